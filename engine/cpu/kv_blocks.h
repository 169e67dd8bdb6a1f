// SPDX-License-Identifier: Apache-2.0
//
// Where a token's key and value lie inside a block of the CPU engine. Two matrices per head, side
// by side: keys [head_dim][tokens] (transposed, so that a vector holds one dimension of consecutive
// keys) and values [tokens][v_head_dim]. BF16 interleaves two rows of either matrix, so that a
// 32-bit unit is what a dot product takes: keys [head_dim / 2][tokens][2], values [tokens /
// 2][v_head_dim][2]. I8 has float scales per head: of keys [tokens], of values [tokens]. Nothing
// here knows about numbers.
#pragma once

#include <cstdint>

#include "engine/kv_geometry.h"

namespace attend {

// A tile reads one head of block after block, so both its matrices lie together: twice as much
// memory in one run (decoding from memory: 2 % in floats, 3 % in BF16).
struct KvBlockLayout {
  KvGeometry geometry;
  int block_tokens = kBlockTokens;  // 16, 32, 48 or 64

  // Two rows of a matrix are interleaved.
  bool paired() const { return geometry.dtype == DType::kBF16; }

  // Bytes of a head's matrices.
  int64_t KeyBytes() const {
    const int64_t rows = paired() ? (geometry.head_dim + 1) / 2 * 2 : geometry.head_dim;
    return rows * block_tokens * DTypeBytes(geometry.dtype);
  }
  int64_t ValueBytes() const {
    return int64_t{geometry.v_head_dim} * block_tokens * DTypeBytes(geometry.dtype);
  }

  // Byte offsets of a head, its matrices and its scales from the block's start.
  int64_t HeadOffset(int kv_head) const { return kv_head * (KeyBytes() + ValueBytes()); }
  int64_t KeyOffset(int kv_head) const {
    return HeadOffset(kv_head) + (values_first() ? ValueBytes() : 0);
  }
  int64_t ValueOffset(int kv_head) const {
    return HeadOffset(kv_head) + (values_first() ? 0 : KeyBytes());
  }
  int64_t KeyScaleOffset(int kv_head) const {
    return HeadOffset(geometry.kv_heads) + kv_head * block_tokens * geometry.ScaleBytes();
  }
  int64_t ValueScaleOffset(int kv_head) const {
    return KeyScaleOffset(geometry.kv_heads) + kv_head * block_tokens * geometry.ScaleBytes();
  }

  // Byte offset of an element from its matrix.
  int64_t KeyElement(int64_t dimension, int64_t slot) const {
    return Element(dimension, slot, block_tokens);
  }
  int64_t ValueElement(int64_t slot, int64_t dimension) const {
    return Element(slot, dimension, geometry.v_head_dim);
  }

 private:
  // Keys are read first. But a vector load that starts in a row of values may run over its end:
  // it stays within the head when keys follow, which take at least a vector (16 tokens).
  bool values_first() const { return geometry.v_head_dim % kWidestVector != 0; }

  static constexpr int kWidestVector = 16;  // elements
  int64_t Element(int64_t row, int64_t column, int64_t columns) const {
    const int64_t index =
        paired() ? (row / 2 * columns + column) * 2 + row % 2 : row * columns + column;
    return index * DTypeBytes(geometry.dtype);
  }
};

}  // namespace attend
