// SPDX-License-Identifier: Apache-2.0
//
// Writes new keys and values into blocks: rounded or quantised to the blocks' dtype, transposed and
// interleaved as KvBlockLayout says. attention_kernel.cc calls it, once per block and head.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/cpu/attention_kernel.h"
#include "engine/cpu/kv_blocks.h"

namespace attend {

// Keys of one head for slots [slot, slot + keys) of one block.
struct HeadRows {
  int kv_head = 0;
  int64_t slot = 0;
  int64_t keys = 0;
  const float* k = nullptr;  // [keys, head_dim], rows k_stride floats apart
  const float* v = nullptr;  // [keys, v_head_dim], rows v_stride floats apart
  int64_t k_stride = 0;
  int64_t v_stride = 0;
};

// I8: scale = max|x| / 127 of a head's row, value = x / scale to the nearest integer (ties to
// even). A row with an element that is not finite gets scale NaN, a row of zeros scale 0.
void AppendHead(CpuIsa isa, const KvBlockLayout& layout, const HeadRows& rows, std::byte* block);

}  // namespace attend
