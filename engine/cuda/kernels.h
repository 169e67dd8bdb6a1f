// SPDX-License-Identifier: Apache-2.0
//
// What the CUDA engine's kernels read and how they are launched; the host compiler reads it too. A
// batch is described once, in BatchShape and ItemShape, by device_batch; kernels look lengths up
// there and are told nothing twice. Parameter structs are trivially copyable; pointers are device
// pointers, strides count elements unless they say bytes.
//
// Packed rows: the query heads of one key/value head are rows too. Packed row p of an item and key
// head h is query row p / group, query head h * group + p % group.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "engine/kv_geometry.h"

namespace attend {

// ---- KV blocks ----

// A block of one layer: keys [kv_heads][block_tokens][KeyRow()], then values
// [kv_heads][block_tokens][ValueRow()], in the KV dtype; the tails of rows are zeros. A head's keys
// are one contiguous run.
struct KvBlockShape {
  int32_t kv_heads;
  int32_t head_dim;
  int32_t v_head_dim;
  int32_t element_bytes;  // 2 or 4

  // Elements of a row: padded to 16 bytes.
  constexpr int32_t KeyRow() const { return Padded(head_dim); }
  constexpr int32_t ValueRow() const { return Padded(v_head_dim); }
  // Bytes from the block's address to row `token` of a head.
  constexpr int64_t KeyOffset(int32_t kv_head, int32_t token, int32_t block_tokens) const {
    return (int64_t{kv_head} * block_tokens + token) * KeyRow() * element_bytes;
  }
  constexpr int64_t ValueOffset(int32_t kv_head, int32_t token, int32_t block_tokens) const {
    return KeyOffset(kv_heads, 0, block_tokens) +
           (int64_t{kv_head} * block_tokens + token) * ValueRow() * element_bytes;
  }
  constexpr int32_t Padded(int32_t width) const {
    const int32_t step = 16 / element_bytes;
    return (width + step - 1) / step * step;
  }
};

// ---- The batch ----

// Counts of one batch. In a captured graph the grid is fixed and these are what changes.
struct BatchShape {
  int32_t items;
  int32_t prefill_tiles;
  int32_t decode_tiles;
  int32_t combines;
  int64_t query_rows;
  int64_t key_rows;
  int64_t key_row_offset;  // BatchPlan::key_row_offset; query_rows where keys have their own matrix
};

// One item in plan order.
struct ItemShape {
  int64_t rows;
  int64_t first_row;      // AttendItem::first_row
  int64_t keys;           // cached and new
  int64_t cached_keys;    // index of the first new key
  int64_t row_begin;      // BatchPlan::row_begin
  int64_t new_key_begin;  // BatchPlan::new_key_begin
  const float* bias;      // [q_heads | 1, rows, bias_columns] by the strides; null = none
  int64_t bias_head_stride;
  int64_t bias_row_stride;
  int64_t bias_columns;
  int64_t bias_first_key;
  int32_t block_begin;   // first of its blocks in block_address
  int32_t block_tokens;  // 16, 32, 48 or 64 (AttendItem::block_tokens)
  int32_t causal;
  int32_t unused;
};

// One block's work: some packed rows of one item and key head, over some keys.
struct AttentionTile {
  int64_t row_begin;  // first packed row
  int64_t key_begin;  // [key_begin, key_end): every visible key of the rows, or one split of them
  int64_t key_end;    // key_begin is a multiple of kBlockTokens
  int64_t partial;    // row of partial_output where its rows go; -1 = they are final
  int32_t item;
  int32_t kv_head;
  int32_t rows;  // packed rows, <= the kernel's tile height
  int32_t few;   // 1 = the whole call has at most kDecodeRows packed rows: its rows may be computed
                 // another way, which may not depend on where a long call was cut
};

// Rows whose keys were split: partial rows partial + split * rows + r, split ascending.
struct CombineTile {
  int64_t row_begin;  // first packed row
  int64_t partial;
  int32_t item;
  int32_t kv_head;
  int32_t rows;
  int32_t splits;
};

// Softmax of a row over some keys: weights are exp(score - max), `sum` is their sum; without
// visible keys (-inf, 0). Scores are in base e, sinks not included before the last step.
struct RowStatistics {
  float max;
  float sum;
};

// Keys of one split of a row with few packed rows: fixed, so that the order of a row's reduction
// does not depend on the batch (part of the numerics). Splits are aligned to the absolute key
// index.
inline constexpr int64_t kSplitKeys = 512;
// Items with at most this many packed rows are decoded: split over keys, one tile for all rows.
inline constexpr int32_t kDecodeRows = 16;
// Tile heights of the other items.
inline constexpr int32_t kFloatTileRows = 32;
constexpr int32_t TensorTileRows(int32_t dim) { return dim <= 192 ? 128 : 64; }

// ---- Attention ----

// For all attention kernels; score of a visible key, in base e:
//   x = scale * (q . k);  softcap > 0: x = softcap * tanh(x / softcap);
//   x += slope[head] * (key - position)   (-slope * |key - position| without causal);
//   x += bias[head, row, key];            visible = mask and bias > -inf
struct AttentionParams {
  const BatchShape* batch;
  const ItemShape* items;
  const AttentionTile* tiles;  // of this launch
  const int32_t* tile_count;   // one of BatchShape's, in device memory
  const CombineTile* combines;
  const int64_t* block_address;  // bytes from `kv`
  const std::byte* kv;
  KvBlockShape shape;
  int32_t q_heads;
  int32_t group;  // q_heads / kv_heads
  float scale;
  float softcap;              // 0 = off
  int64_t window;             // 0 = none
  const float* alibi_slopes;  // [q_heads] or null
  const float* sinks;         // [q_heads] or null
  const void* q;              // [query rows, q_heads, KeyRow()], tails zero; type: see launches
  void* output;               // [query rows, q_heads, v_head_dim] of output_dtype
  DType output_dtype;         // F32, BF16 or F16
  RowStatistics* statistics;  // [query rows, q_heads], sinks included
  float* partial_output;      // [partial rows, v_head_dim], not divided by the sum
  RowStatistics* partial_statistics;  // [partial rows]
};

// Tiles of up to kFloatTileRows packed rows; q is float; kv_dtype F32, BF16 or F16. Products and
// sums are float.
cudaError_t LaunchFloatAttention(const AttentionParams& params, DType kv_dtype, int64_t blocks,
                                 cudaStream_t stream);
// Tensor cores: q and KV are both BF16 or both F16, weights of values are rounded to it, sums are
// float. Prefill tiles have up to TensorTileRows(max(head_dim, v_head_dim)) packed rows, decode
// tiles up to kDecodeRows. The launches loop over the batch's tiles: `blocks` may be any number.
cudaError_t LaunchTensorPrefill(const AttentionParams& params, DType kv_dtype, int64_t blocks,
                                cudaStream_t stream);
cudaError_t LaunchTensorDecode(const AttentionParams& params, DType kv_dtype, int64_t blocks,
                               cudaStream_t stream);
// Merges the splits in ascending order, adds sinks, writes output and statistics.
cudaError_t LaunchCombine(const AttentionParams& params, int64_t blocks, cudaStream_t stream);

// Rows of one head's attention weights: out[r * row_stride + key] = exp(score - max) / sum for
// visible keys, 0 for the others. After the attention of the same rows.
struct WeightsTask {
  float* out;
  int64_t row_begin;   // query row of the item
  int64_t row_stride;  // >= keys
  int32_t rows;        // <= kWeightsRows
  int32_t item;
  int32_t head;  // query head
  int32_t unused;
};
inline constexpr int32_t kWeightsRows = 8;
struct WeightsParams {
  AttentionParams attention;
  const WeightsTask* tasks;
  int64_t task_count;
};
// q_dtype F32, BF16 or F16: the type the attention kernel read.
cudaError_t LaunchWeights(const WeightsParams& params, DType q_dtype, DType kv_dtype,
                          cudaStream_t stream);

// ---- Rows ----

// Converts `count` elements. Sides that are 16-byte aligned are read and written by vectors.
struct ConvertTask {
  const void* from;
  void* to;
  int64_t count;
  DType from_dtype;
  DType to_dtype;
};
// One block per task.
cudaError_t LaunchConvert(const ConvertTask* tasks, int64_t task_count, cudaStream_t stream);

// What happens to projected rows: clip, q/k norm, rotation, then queries go to `q` in the attention
// kernel's type and keys and values, rounded, to their blocks. Raw rows: nothing but the last step.
struct TransformParams {
  const BatchShape* batch;
  const ItemShape* items;
  const int64_t* block_address;
  std::byte* kv;
  KvBlockShape shape;
  DType kv_dtype;
  DType q_dtype;
  int32_t q_heads;
  float clip;    // 0 = off
  int32_t norm;  // 1 = RMS per head
  float norm_eps;
  const float* q_norm;              // [head_dim] or null
  const float* k_norm;              // [head_dim] or null
  int32_t rope_dim;                 // 0 = none
  int32_t rope_interleaved;         // pairs (2i, 2i + 1), else (i, i + rope_dim / 2)
  const double* inverse_frequency;  // [rope_dim / 2]
  double attention_factor;
  // Row r < query_rows has its query at q_source + r * q_stride. New key k has its key and value at
  // k_source + k * k_stride, v_source + k * v_stride.
  const float* q_source;
  const float* k_source;
  const float* v_source;
  int64_t q_stride;
  int64_t k_stride;
  int64_t v_stride;
  void* q;  // [query rows, q_heads, KeyRow()] of q_dtype
};
// One block per row: row r has query r (r < query_rows) and new key r - key_row_offset (if in
// [0, key_rows)). `blocks` >= max(query_rows, key_row_offset + key_rows); more do nothing.
cudaError_t LaunchTransform(const TransformParams& params, int64_t blocks, cudaStream_t stream);

// Rows [first_key, first_key + keys) between blocks and canonical order: keys [keys][kv_heads]
// [head_dim], then values [keys][kv_heads][v_head_dim].
struct KvRowsParams {
  const int64_t* block_address;  // of full blocks of kBlockTokens
  std::byte* kv;
  KvBlockShape shape;
  int64_t first_key;
  int64_t keys;
  std::byte* canonical;
};
cudaError_t LaunchReadKvRows(const KvRowsParams& params, cudaStream_t stream);
cudaError_t LaunchWriteKvRows(const KvRowsParams& params, cudaStream_t stream);

// Once, before the first launch: lets kernels use the shared memory they need. `shared_limit` is
// the device's opt-in limit per block; cudaErrorInvalidValue when a kernel needs more.
cudaError_t PrepareKernels(int shared_limit);

}  // namespace attend
