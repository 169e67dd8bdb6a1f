// SPDX-License-Identifier: Apache-2.0
//
// One batch of attention work, decided with integers before any engine sees it. The runtime makes
// the items (pointers and counts), BuildPlan turns them into flat arrays that CPU and CUDA engines
// read alike.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/attention_spec.h"

namespace attend {

// Consecutive rows of one request tensor. Borrowed; element-aligned; may be any float dtype.
struct InputRows {
  const void* data = nullptr;
  DType dtype = DType::kUnspecified;
};

// Additive bias of one item, F32. Column c of every row belongs to absolute key `first_key + c`;
// keys before the first column have bias 0, columns of negative keys are ignored. -inf masks.
struct BiasView {
  const float* data = nullptr;  // [q_heads | 1, rows, columns] by the strides below; null = no bias
  int64_t head_stride = 0;      // elements; 0 = the same for every head
  int64_t row_stride = 0;       // elements; row 0 is the item's first row
  int64_t columns = 0;
  int64_t first_key = 0;
};

// Where to put attention weights of one item: data[h][r][key] for the asked heads and rows. The
// caller has zeroed it; the engine writes visible keys, and may write 0 to others.
struct WeightsView {
  float* data = nullptr;           // row `row_begin` of the first asked head; null = not asked
  const int32_t* heads = nullptr;  // [head_count] query heads in ascending or any order
  int32_t head_count = 0;
  int64_t row_begin = 0;  // asked rows of the item: [row_begin, row_end)
  int64_t row_end = 0;
  int64_t head_stride = 0;  // elements between heads
  int64_t row_stride = 0;   // elements between rows (>= the item's keys)
};

// One sequence's share of a batch: some query rows, some new keys, or both. All pointers are
// borrowed until Wait returns.
struct AttendItem {
  int32_t group = 0;     // the request it belongs to; requests succeed or fail as a whole
  int32_t sequence = 0;  // its sequence of the request

  int64_t rows = 0;  // query rows
  // Rows of the whole sequence that this item is a chunk of; 0 = it is no chunk. How an engine
  // computes a row may depend on it, but never on where a chunk ends.
  int64_t sequence_rows = 0;
  InputRows query;  // [rows, d_model] hidden states; raw: [rows, q_heads, head_dim]
  int64_t first_row =
      0;  // absolute position of row 0: causal row i sees keys 0 .. first_row + i; may be negative

  int64_t new_keys = 0;     // keys appended by this item
  InputRows key_source;     // [new_keys, context_width]; self-attention: rows of the hidden states;
                            // raw: [new_keys, kv_heads, head_dim]
  InputRows value_source;   // raw only: [new_keys, kv_heads, v_head_dim]
  int64_t cached_keys = 0;  // keys already in the blocks = absolute index of the first new key

  bool causal = false;
  // No item sees keys that another item of its batch appends. Address of this layer's part of block
  // b (keys 64 b .. 64 b + 63) in the engine's KV memory, bytes. [block_count()]
  std::span<const int64_t> blocks;
  // Tokens a block has room for: kBlockTokens, or 16, 32, 48 in scratch of a sequence with one
  // short block.
  int32_t block_tokens = kBlockTokens;

  BiasView bias;
  WeightsView weights;

  void* output = nullptr;  // [rows, output_width]; raw: [rows, q_heads, v_head_dim]
  DType output_dtype = DType::kF32;

  int64_t keys() const { return cached_keys + new_keys; }
  int64_t block_count() const { return (keys() + kBlockTokens - 1) / kBlockTokens; }
  int64_t call_rows() const { return sequence_rows > 0 ? sequence_rows : rows; }
  // The projection of its query rows and of its new keys reads the same tensor rows.
  bool shares_rows() const { return rows > 0 && rows == new_keys && query.data == key_source.data; }
};

// The items of one (layer, spec), flattened. Items are reordered so that those with only query rows
// come first, then those that project the same rows to q, k and v, then those with only new keys:
// the rows of the query product and of the key/value product are then two overlapping ranges of one
// matrix.
struct BatchPlan {
  int layer = -1;                       // engine's layer index; -1 = raw, no projections
  const AttentionSpec* spec = nullptr;  // borrowed
  DType kv_dtype = DType::kF32;         // of the blocks

  std::vector<int32_t> order;          // [items] plan order -> index in the caller's items
  std::vector<int64_t> row_begin;      // [items + 1] query rows, in plan order
  std::vector<int64_t> new_key_begin;  // [items + 1] new keys, in plan order
  // Self-attention: query rows are rows [0, query_rows) and new keys rows [key_row_offset,
  // key_row_offset + key_rows) of one matrix of `input_rows` rows. Cross-attention and raw: two
  // matrices.
  int64_t query_rows = 0;
  int64_t key_rows = 0;
  int64_t key_row_offset = 0;
  int64_t input_rows = 0;

  std::vector<int32_t> block_begin;    // [items + 1]
  std::vector<int64_t> block_address;  // [blocks] bytes

  int items() const { return static_cast<int>(order.size()); }
};

// The plan of no items, with the memory of the given one's vectors.
BatchPlan Emptied(BatchPlan plan);

// Pure. INTERNAL when an item contradicts the spec (a programmer error of the caller). The plan
// uses the memory of `recycled`.
absl::StatusOr<BatchPlan> BuildPlan(int layer, const AttentionSpec& spec, DType kv_dtype,
                                    std::span<const AttendItem> items, BatchPlan recycled = {});

// INTERNAL unless the plan is one for `layer`, the spec of the engine's layer plan.layer (null: it
// has no such layer). The plan's cross and causal may differ: plain modules leave them open.
absl::Status CheckLayer(const BatchPlan& plan, const AttentionSpec* layer);

// Keys that query row at absolute position `position` can see, before bias: [begin, end).
struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
};
inline KeyRange VisibleKeys(const AttentionSpec& spec, bool causal, int64_t position,
                            int64_t keys) {
  KeyRange range{0, keys};
  if (causal && position + 1 < range.end) range.end = position + 1;
  if (spec.window > 0) {
    // Positions may be negative and windows any int64: nothing is subtracted that may overflow.
    if (spec.window <= position) range.begin = position - spec.window + 1;
    if (!causal && spec.window < keys - position && position + spec.window < range.end) {
      range.end = position + spec.window;
    }
  }
  if (range.end < range.begin) range.end = range.begin;
  if (range.end < 0) range = {0, 0};
  return range;
}

// An upper bound of the device memory that a batch needs for the item: its rows as given, between
// the steps, and on the way back. `pad8` rounds up to 8 elements, W = output_width. Bytes:
//   a query row: 8 d_model (as given, in the product's type)     raw: 4 q_heads head_dim (as given)
//     + 4 q_heads (head_dim + pad8(head_dim))                     (projected; for attention)
//     + 4 q_heads v_head_dim + 8 W + 8 q_heads                    (attended; output; statistics)
//     + ceil(keys / 512) q_heads (4 v_head_dim + 8)               (splits; call_rows() * group_size
//     <= 16)
//     + 4 (1 | q_heads) bias columns + 4 heads keys               (bias; weights, asked rows only)
//   a new key: 8 context_width     raw: 4 kv_heads (head_dim + v_head_dim)
//     + 4 kv_heads (head_dim + v_head_dim)                        (projected)
//   a block: 8 (its address);  the item: 4096 (alignment).
//   a tile of 16 packed rows and a key head: 96, per split                 (tile lists)
// What depends on the batch alone (its shape, padding rows) is the engine's own.
int64_t WorkspaceBytes(const AttentionSpec& spec, const AttendItem& item);

// Batches in flight on a device, and the device memory that each of them keeps for batches of
// `workspace_bytes`: tile lists, padding rows of products and unused columns come on top.
inline constexpr int kDeviceSlabs = 2;
constexpr int64_t DeviceSlabBytes(int64_t workspace_bytes) {
  return workspace_bytes + workspace_bytes / 8 + (int64_t{16} << 20);
}

// Keys that at least one of the item's rows [row_begin, row_begin + rows) can see, before bias, and
// those between them; [0, 0) when there is none.
KeyRange VisibleToAny(const AttentionSpec& spec, const AttendItem& item, int64_t row_begin,
                      int64_t rows);

}  // namespace attend
