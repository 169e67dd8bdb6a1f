// SPDX-License-Identifier: Apache-2.0
//
// Copies between the block layout and canonical token rows, for snapshots and tests.
#include "engine/cpu/kv_blocks.h"

#include <cstring>
#include <span>

#include "engine/cpu/attention_kernel.h"

namespace attend {
namespace {

// Calls copy(place in the block's memory, offset in canonical memory) for every element of kBytes
// bytes, and for every scale.
template <int kBytes, class Copy>
void ForEachElement(const KvGeometry& geometry, std::span<const int64_t> blocks, int64_t first_key,
                    int64_t keys, const Copy& copy) {
  const KvBlockLayout layout{geometry, kBlockTokens};
  const int64_t heads = geometry.kv_heads;
  const int64_t values = keys * heads * geometry.head_dim * kBytes;
  const int64_t key_scales = values + keys * heads * geometry.v_head_dim * kBytes;
  const int64_t value_scales = key_scales + keys * heads * geometry.ScaleBytes();
  const std::integral_constant<int, kBytes> element;
  const std::integral_constant<int, 4> scale;
  for (int64_t i = 0; i < keys; ++i) {
    const int64_t block = blocks[(first_key + i) / kBlockTokens];
    const int64_t slot = (first_key + i) % kBlockTokens;
    for (int h = 0; h < heads; ++h) {
      const int64_t row = i * heads + h;
      for (int64_t d = 0; d < geometry.head_dim; ++d) {
        copy(block + layout.KeyOffset(h) + layout.KeyElement(d, slot),
             (row * geometry.head_dim + d) * kBytes, element);
      }
      for (int64_t d = 0; d < geometry.v_head_dim; ++d) {
        copy(block + layout.ValueOffset(h) + layout.ValueElement(slot, d),
             values + (row * geometry.v_head_dim + d) * kBytes, element);
      }
      if (geometry.ScaleBytes() == 0) continue;
      copy(block + layout.KeyScaleOffset(h) + slot * 4, key_scales + row * 4, scale);
      copy(block + layout.ValueScaleOffset(h) + slot * 4, value_scales + row * 4, scale);
    }
  }
}

template <class Copy>
void ForEachPiece(const KvGeometry& geometry, std::span<const int64_t> blocks, int64_t first_key,
                  int64_t keys, const Copy& copy) {
  switch (DTypeBytes(geometry.dtype)) {
    case 1:
      return ForEachElement<1>(geometry, blocks, first_key, keys, copy);
    case 2:
      return ForEachElement<2>(geometry, blocks, first_key, keys, copy);
    default:
      return ForEachElement<4>(geometry, blocks, first_key, keys, copy);
  }
}

}  // namespace

void CopyKvOut(const KvGeometry& geometry, std::span<const int64_t> blocks, int64_t first_key,
               int64_t keys, const std::byte* kv_memory, std::byte* canonical) {
  ForEachPiece(geometry, blocks, first_key, keys, [&](int64_t place, int64_t offset, auto bytes) {
    std::memcpy(canonical + offset, kv_memory + place, bytes());
  });
}

// A row of keys of odd width gets its zero padding too: restored blocks are like appended
// ones. (What lies beside a last odd value stays: its weight is masked.)
void CopyKvIn(const KvGeometry& geometry, std::span<const int64_t> blocks, int64_t first_key,
              int64_t keys, const std::byte* canonical, std::byte* kv_memory) {
  ForEachPiece(geometry, blocks, first_key, keys, [&](int64_t place, int64_t offset, auto bytes) {
    std::memcpy(kv_memory + place, canonical + offset, bytes());
  });
  const KvBlockLayout layout{geometry, kBlockTokens};
  if (!layout.paired() || geometry.head_dim % 2 == 0) return;
  for (int64_t key = first_key; key < first_key + keys; ++key) {
    for (int h = 0; h < geometry.kv_heads; ++h) {
      const int64_t place = layout.KeyElement(geometry.head_dim, key % kBlockTokens);
      std::memset(kv_memory + blocks[key / kBlockTokens] + layout.KeyOffset(h) + place, 0, 2);
    }
  }
}

}  // namespace attend
