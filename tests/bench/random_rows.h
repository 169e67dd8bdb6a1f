// SPDX-License-Identifier: Apache-2.0
//
// Gigabytes of plausible operands in little time: values of the normal distribution, drawn from a
// pool. Used by the benchmarks' cases and ceilings.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "engine/kv_geometry.h"

namespace attend::bench {

// `count` elements of standard deviation `scale`. I8: values x / 40, so that hardly any is cut off.
inline std::vector<std::byte> RandomRows(DType dtype, int64_t count, uint64_t seed,
                                         double scale = 1) {
  constexpr int64_t kPool = int64_t{1} << 18, kRun = 4096;
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, static_cast<float>(scale));
  const int64_t element_bytes = DTypeBytes(dtype);
  std::vector<std::byte> pool(static_cast<size_t>(kPool * element_bytes));
  for (int64_t i = 0; i < kPool; ++i) {
    if (dtype == DType::kI8) {
      const float value = std::clamp(std::nearbyint(40 * normal(random)), -127.0f, 127.0f);
      pool[static_cast<size_t>(i)] = static_cast<std::byte>(static_cast<int8_t>(value));
    } else {
      StoreFloat(dtype, normal(random), pool.data(), i);
    }
  }
  std::vector<std::byte> rows(static_cast<size_t>(count * element_bytes));
  for (int64_t at = 0; at < count; at += kRun) {
    const auto from = static_cast<int64_t>(random() % (kPool - kRun));
    const int64_t run = std::min(kRun, count - at);
    std::memcpy(rows.data() + at * element_bytes, pool.data() + from * element_bytes,
                static_cast<size_t>(run * element_bytes));
  }
  return rows;
}

// Keys and values of `keys` tokens in canonical form (engine/attention_engine.h).
inline std::vector<std::byte> RandomKv(const KvGeometry& geometry, int64_t keys, uint64_t seed) {
  const int64_t width = int64_t{geometry.kv_heads} * (geometry.head_dim + geometry.v_head_dim);
  std::vector<std::byte> rows = RandomRows(geometry.dtype, keys * width, seed);
  if (geometry.ScaleBytes() == 0) return rows;
  const std::vector<float> scales(static_cast<size_t>(2 * keys * geometry.kv_heads), 1.0f / 40);
  const auto* bytes = reinterpret_cast<const std::byte*>(scales.data());
  rows.insert(rows.end(), bytes, bytes + scales.size() * sizeof(float));
  return rows;
}

}  // namespace attend::bench
