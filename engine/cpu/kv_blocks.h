// SPDX-License-Identifier: Apache-2.0
//
// Where a token's key and value lie inside a block of the CPU engine: per key head
// [head_dim][tokens] (transposed, so that a vector holds one dimension of consecutive keys), then
// per value head [tokens][v_head_dim]. The attention stage is the only reader; nothing here knows
// about numbers.
#pragma once

#include <cstdint>

#include "engine/kv_geometry.h"

namespace attend {

struct KvBlockLayout {
  KvGeometry geometry;
  int block_tokens = kBlockTokens;  // 16, 32, 48 or 64

  // Byte offset of a head's keys [head_dim][block_tokens] from the block's start.
  int64_t KeyOffset(int kv_head) const {
    return int64_t{kv_head} * geometry.head_dim * block_tokens * DTypeBytes(geometry.dtype);
  }
  // Byte offset of a head's values [block_tokens][v_head_dim] from the block's start.
  int64_t ValueOffset(int kv_head) const {
    return KeyOffset(geometry.kv_heads) +
           int64_t{kv_head} * geometry.v_head_dim * block_tokens * DTypeBytes(geometry.dtype);
  }
};

}  // namespace attend
