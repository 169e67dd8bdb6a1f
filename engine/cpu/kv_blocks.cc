// SPDX-License-Identifier: Apache-2.0
//
// Copies between the block layout and canonical token rows, for snapshots and tests.
#include "engine/cpu/kv_blocks.h"

#include <cstring>
#include <span>

#include "engine/cpu/attention_kernel.h"

namespace attend {
namespace {

// Calls copy(place in the block's memory, offset in canonical memory, bytes) for every contiguous
// piece.
template <class Copy>
void ForEachPiece(const KvGeometry& geometry, std::span<const int64_t> blocks, int64_t first_key,
                  int64_t keys, const Copy& copy) {
  const KvBlockLayout layout{geometry, kBlockTokens};
  const int64_t size = DTypeBytes(geometry.dtype);
  const int64_t k_row = int64_t{geometry.kv_heads} * geometry.head_dim;
  const int64_t v_row = int64_t{geometry.kv_heads} * geometry.v_head_dim;
  const int64_t values = keys * k_row;  // canonical element where the V rows start
  for (int64_t i = 0; i < keys; ++i) {
    const int64_t key = first_key + i;
    const int64_t block = blocks[key / kBlockTokens];
    const int64_t slot = key % kBlockTokens;
    for (int h = 0; h < geometry.kv_heads; ++h) {
      const int64_t k = block + layout.KeyOffset(h) + slot * size;
      for (int d = 0; d < geometry.head_dim; ++d) {
        copy(k + int64_t{d} * kBlockTokens * size, (i * k_row + h * geometry.head_dim + d) * size,
             size);
      }
      copy(block + layout.ValueOffset(h) + slot * geometry.v_head_dim * size,
           (values + i * v_row + h * geometry.v_head_dim) * size, geometry.v_head_dim * size);
    }
  }
}

}  // namespace

void CopyKvOut(const KvGeometry& geometry, std::span<const int64_t> blocks, int64_t first_key,
               int64_t keys, const std::byte* kv_memory, std::byte* canonical) {
  ForEachPiece(geometry, blocks, first_key, keys,
               [&](int64_t place, int64_t offset, int64_t bytes) {
                 std::memcpy(canonical + offset, kv_memory + place, bytes);
               });
}

void CopyKvIn(const KvGeometry& geometry, std::span<const int64_t> blocks, int64_t first_key,
              int64_t keys, const std::byte* canonical, std::byte* kv_memory) {
  ForEachPiece(geometry, blocks, first_key, keys,
               [&](int64_t place, int64_t offset, int64_t bytes) {
                 std::memcpy(kv_memory + place, canonical + offset, bytes);
               });
}

}  // namespace attend
