// SPDX-License-Identifier: Apache-2.0
//
// Vectors that are used again: what serves one batch after another takes its memory from the heap
// for the largest of them only.
#pragma once

#include <vector>

namespace attend {

// The vector without its elements, with their memory.
template <typename T>
std::vector<T> Emptied(std::vector<T> vector) {
  vector.clear();
  return vector;
}

}  // namespace attend
