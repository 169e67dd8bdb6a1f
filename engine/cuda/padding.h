// SPDX-License-Identifier: Apache-2.0
//
// How far matrices on the device are padded: what projection.cc computes over, and what
// device_batch.cc makes room for.
#pragma once

#include <cstdint>

namespace attend {

// Widths in elements: rows of every type then start at 16 bytes.
constexpr int64_t PaddedWidth(int64_t width) { return (width + 7) / 8 * 8; }

// Rows are computed in multiples of this; the rows past the asked ones hold anything.
inline constexpr int64_t kProductRows = 64;
constexpr int64_t PaddedRows(int64_t rows) {
  return (rows + kProductRows - 1) / kProductRows * kProductRows;
}

}  // namespace attend
