// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace attend {

enum class CacheLevel : int { kFirst = 3, kSecond = 2 };  // as __builtin_prefetch counts

// Fetches a row into a cache before it is needed, for reading or for writing. For rows that no
// hardware fetches, because what lies between them is somebody else's ([rows, heads, width] seen
// from one head), or whose reading would wait for what is computed meanwhile.
template <bool kForWriting, CacheLevel kLevel = CacheLevel::kFirst>
inline void FetchRow(const void* row, int64_t bytes) {
  constexpr int64_t kLine = 64;
  for (int64_t i = 0; i < bytes; i += kLine) {
    __builtin_prefetch(static_cast<const std::byte*>(row) + i, kForWriting,
                       static_cast<int>(kLevel));
  }
}

}  // namespace attend
