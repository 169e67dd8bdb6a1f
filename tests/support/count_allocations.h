// SPDX-License-Identifier: Apache-2.0
//
// How often this process asked operator new for memory, on all its threads. Linked into tests that
// ask: it replaces operator new and delete by malloc and free with a count. What calls malloc
// itself does not count.
#pragma once

#include <cstdint>

namespace attend {

struct Allocations {
  int64_t count = 0;
  int64_t bytes = 0;
};

Allocations AllocationsSoFar();

inline Allocations operator-(const Allocations& end, const Allocations& begin) {
  return {end.count - begin.count, end.bytes - begin.bytes};
}

}  // namespace attend
