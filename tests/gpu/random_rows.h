// SPDX-License-Identifier: Apache-2.0
//
// Gigabytes of plausible operands in little time: values of the normal distribution, drawn from a
// pool.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "engine/util/dtype.h"

namespace attend::gpu {

// `count` elements.
inline std::vector<std::byte> RandomRows(DType dtype, int64_t count, uint64_t seed) {
  constexpr int64_t kPool = int64_t{1} << 18, kRun = 4096;
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const int64_t element_bytes = DTypeBytes(dtype);
  std::vector<std::byte> pool(static_cast<size_t>(kPool * element_bytes));
  for (int64_t i = 0; i < kPool; ++i) StoreFloat(dtype, normal(random), pool.data(), i);
  std::vector<std::byte> rows(static_cast<size_t>(count * element_bytes));
  for (int64_t at = 0; at < count; at += kRun) {
    const auto from = static_cast<int64_t>(random() % (kPool - kRun));
    const int64_t run = std::min(kRun, count - at);
    std::memcpy(rows.data() + at * element_bytes, pool.data() + from * element_bytes,
                static_cast<size_t>(run * element_bytes));
  }
  return rows;
}

}  // namespace attend::gpu
