// SPDX-License-Identifier: Apache-2.0
//
// How one layer's keys and values are stored in a cache block. Blocks hold kBlockTokens tokens of
// one history. The layout of a layer's part of a block is the engine's own business; only the
// number of bytes is agreed here.
#pragma once

#include <cstdint>

#include "engine/util/dtype.h"

namespace attend {

inline constexpr int kBlockTokens =
    64;  // aligned to the absolute key index: block b holds 64b .. 64b+63

// A head's row of one token may take a multiple of this many bytes inside a block: the widest copy
// of a CUDA thread.
inline constexpr int64_t kRowBytes = 16;

struct KvGeometry {
  int kv_heads = 0;
  int head_dim = 0;    // of keys
  int v_head_dim = 0;  // of values
  // F32, F16, BF16; or I8: an element is its int8 times a float scale that a head's row of one
  // token has for its key and another for its value.
  DType dtype = DType::kF32;

  // Of one head's key or value of one token: 4 for I8, else 0.
  int64_t ScaleBytes() const { return dtype == DType::kI8 ? DTypeBytes(DType::kF32) : 0; }
  // One token in canonical form.
  int64_t TokenBytes() const {
    return kv_heads * ((head_dim + v_head_dim) * DTypeBytes(dtype) + 2 * ScaleBytes());
  }
  // A layer's part of a block of `tokens` tokens: room for rows of heads padded to kRowBytes and
  // for their scales, rounded up so that every part starts on a cache line.
  int64_t BlockBytes(int64_t tokens = kBlockTokens) const {
    const int64_t token_bytes =
        kv_heads * (PaddedRowBytes(head_dim) + PaddedRowBytes(v_head_dim) + 2 * ScaleBytes());
    return (token_bytes * tokens + 63) / 64 * 64;
  }

  friend bool operator==(const KvGeometry&, const KvGeometry&) = default;

 private:
  int64_t PaddedRowBytes(int64_t width) const {
    return (width * DTypeBytes(dtype) + kRowBytes - 1) / kRowBytes * kRowBytes;
  }
};

}  // namespace attend
