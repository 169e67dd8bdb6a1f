// SPDX-License-Identifier: Apache-2.0
//
// The fused attention stage of the CPU engine: appends keys and values to their blocks and attends
// with an online softmax, never holding more than one strip of scores. Compiled once per
// instruction set (Highway); the caller names the one to use.
//
// Determinism: a row's bits depend on its query, its visible keys and values and the spec only.
// Keys are reduced in blocks of 64 aligned to the absolute key index, in segments of 1024 keys,
// each from a fresh state, merged in ascending order, whichever threads computed them and however
// many rows or heads a call has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/attention_plan.h"
#include "engine/cpu/gemm_kernel.h"
#include "engine/cpu/worker_pool.h"

namespace attend {

struct AttentionWorkspace;  // engine/cpu/attention_workspace.h

enum class CpuIsa : uint8_t { kAvx2, kAvx512 };

// Everything of one batch the stage reads. `q`, `k`, `v` are float32, projected, normalised and
// rotated, in plan order (BatchPlan::row_begin, new_key_begin).
struct AttentionBatch {
  const BatchPlan* plan = nullptr;
  std::span<const AttendItem> items;  // the caller's order: plan->order maps
  const float* q = nullptr;           // [query rows, q_heads, head_dim]
  const float* k = nullptr;           // [new keys, kv_heads, head_dim]
  const float* v = nullptr;           // [new keys, kv_heads, v_head_dim]
  std::byte* kv_memory = nullptr;     // block addresses are offsets into it; 64-byte aligned
  // [query rows] -> [q_heads, v_head_dim] of F32, F16 or BF16: rounded once, from fp32.
  const OutputRow* output = nullptr;
  // BF16: queries and weights are rounded to bf16 and multiplied in pairs with keys and values
  // (AVX512_BF16, BF16 or I8 blocks; with any other blocks the same as F32). Statistics and sums
  // are fp32 always.
  DType compute = DType::kF32;
};

// Rounds or quantises k and v to plan->kv_dtype and writes them to their places in the blocks, then
// attends all query rows: writes `output` and the asked attention weights. Nothing in `workspace`
// matters but its memory.
void AppendAndAttend(CpuIsa isa, const AttentionBatch& batch, WorkerPool& pool,
                     AttentionWorkspace& workspace);

// Rows between a block layout and canonical [keys, kv_heads, dim] order, in the geometry's dtype,
// without conversion. `canonical` holds K rows, then V rows, for I8 then the scales of keys and of
// values [keys, kv_heads] (AttentionEngine::ReadKv).
void CopyKvOut(const KvGeometry& geometry, std::span<const int64_t> blocks, int64_t first_key,
               int64_t keys, const std::byte* kv_memory, std::byte* canonical);
void CopyKvIn(const KvGeometry& geometry, std::span<const int64_t> blocks, int64_t first_key,
              int64_t keys, const std::byte* canonical, std::byte* kv_memory);

}  // namespace attend
