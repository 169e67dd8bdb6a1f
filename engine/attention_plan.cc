// SPDX-License-Identifier: Apache-2.0
#include "engine/attention_plan.h"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/util/emptied.h"

namespace attend {
namespace {

absl::Status CheckItem(const AttentionSpec& spec, const AttendItem& item) {
  const auto wrong = [&](const char* what) {
    return absl::InternalError(std::string("attention plan: ") + what);
  };
  if (item.rows < 0 || item.new_keys < 0 || item.cached_keys < 0) return wrong("negative count");
  if (item.rows > 0 && (item.query.data == nullptr || item.output == nullptr)) {
    return wrong("query rows without input or output");
  }
  if (item.new_keys > 0 && item.key_source.data == nullptr) return wrong("new keys without source");
  if (item.new_keys > 0 && spec.raw() && item.value_source.data == nullptr) {
    return wrong("raw keys without values");
  }
  if (static_cast<int64_t>(item.blocks.size()) < item.block_count()) {
    return wrong("too few blocks");
  }
  if (item.block_tokens != kBlockTokens && item.keys() > item.block_tokens) {
    return wrong("short block overflows");
  }
  return absl::OkStatus();
}

// 0: query rows only, 1: the same rows for q, k, v, 2: new keys only. An item whose query and key
// rows are different rows of a self-attention layer does not occur: the runtime cuts it in two.
constexpr int kKinds = 3;
int Kind(const AttendItem& item) {
  if (item.new_keys == 0) return 0;
  return item.rows > 0 ? 1 : 2;
}

}  // namespace

BatchPlan Emptied(BatchPlan plan) {
  return {.order = Emptied(std::move(plan.order)),
          .row_begin = Emptied(std::move(plan.row_begin)),
          .new_key_begin = Emptied(std::move(plan.new_key_begin)),
          .block_begin = Emptied(std::move(plan.block_begin)),
          .block_address = Emptied(std::move(plan.block_address))};
}

absl::StatusOr<BatchPlan> BuildPlan(int layer, const AttentionSpec& spec, DType kv_dtype,
                                    std::span<const AttendItem> items, BatchPlan recycled) {
  BatchPlan plan = Emptied(std::move(recycled));
  plan.layer = layer;
  plan.spec = &spec;
  plan.kv_dtype = kv_dtype;
  for (const AttendItem& item : items) {
    if (absl::Status status = CheckItem(spec, item); !status.ok()) return status;
  }
  plan.order.reserve(items.size());
  for (int kind = 0; kind < kKinds; ++kind) {
    for (size_t i = 0; i < items.size(); ++i) {
      if (Kind(items[i]) == kind) plan.order.push_back(static_cast<int32_t>(i));
    }
  }

  const bool one_matrix = !spec.raw() && !spec.cross;
  plan.row_begin.push_back(0);
  plan.new_key_begin.push_back(0);
  plan.block_begin.push_back(0);
  int64_t shared_rows = 0;
  for (int32_t index : plan.order) {
    const AttendItem& item = items[index];
    plan.row_begin.push_back(plan.row_begin.back() + item.rows);
    plan.new_key_begin.push_back(plan.new_key_begin.back() + item.new_keys);
    plan.block_address.insert(plan.block_address.end(), item.blocks.begin(),
                              item.blocks.begin() + item.block_count());
    plan.block_begin.push_back(static_cast<int32_t>(plan.block_address.size()));
    if (one_matrix && Kind(item) == 1) {
      if (!item.shares_rows()) {
        return absl::InternalError("attention plan: query and key rows of one item differ");
      }
      shared_rows += item.rows;
    }
  }
  plan.query_rows = plan.row_begin.back();
  plan.key_rows = plan.new_key_begin.back();
  plan.key_row_offset = one_matrix ? plan.query_rows - shared_rows : 0;
  plan.input_rows = one_matrix ? plan.key_row_offset + plan.key_rows : plan.query_rows;
  return plan;
}

absl::Status CheckLayer(const BatchPlan& plan, const AttentionSpec* layer) {
  const auto wrong = [&](const char* what) {
    return absl::InternalError("attention plan for layer " + std::to_string(plan.layer) + ": " +
                               what);
  };
  if (plan.spec == nullptr) return wrong("no spec");
  if (plan.layer == -1 && plan.spec->raw()) return absl::OkStatus();
  if (layer == nullptr || plan.spec->raw()) return wrong("the engine has no such layer");
  if (*layer == *plan.spec) return absl::OkStatus();
  AttentionSpec expected = *layer;  // plain: has no lists that a copy would allocate
  expected.cross = plan.spec->cross;
  expected.causal = plan.spec->causal;
  return expected == *plan.spec ? absl::OkStatus() : wrong("its spec is another");
}

KeyRange VisibleToAny(const AttentionSpec& spec, const AttendItem& item, int64_t row_begin,
                      int64_t rows) {
  KeyRange keys;
  bool any = false;
  for (int64_t row = row_begin; row < row_begin + rows; ++row) {
    const KeyRange next = VisibleKeys(spec, item.causal, item.first_row + row, item.keys());
    if (next.end == next.begin) continue;
    keys = any ? KeyRange{std::min(keys.begin, next.begin), std::max(keys.end, next.end)} : next;
    any = true;
  }
  return keys;
}

int64_t WorkspaceBytes(const AttentionSpec& spec, const AttendItem& item) {
  constexpr int64_t kItemBytes = 4096;
  constexpr int64_t kTileBytes = 96;
  constexpr int64_t kSplitKeys = 512;  // these two as in engine/cuda/kernels.h
  constexpr int64_t kSplitRows = 16;
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t q_heads = spec.q_heads;
  const int64_t kv_width = int64_t{spec.kv_heads} * (spec.head_dim + spec.v_head_dim);
  const int64_t output_width = spec.raw() ? q_heads * spec.v_head_dim : spec.output_width;

  int64_t row = spec.raw() ? 4 * q_heads * spec.head_dim : 8 * int64_t{spec.d_model};
  row += 4 * q_heads * (spec.head_dim + ceil_div(spec.head_dim, 8) * 8);
  row += 4 * q_heads * spec.v_head_dim + 8 * output_width + 8 * q_heads;
  int64_t splits = 1;
  if (item.call_rows() * spec.group_size() <= kSplitRows) {
    splits = std::max<int64_t>(1, ceil_div(item.keys(), kSplitKeys));
    row += splits * q_heads * (4 * spec.v_head_dim + 8);
  }
  if (item.bias.data != nullptr) {
    row += 4 * (item.bias.head_stride != 0 ? q_heads : 1) * item.bias.columns;
  }
  const int64_t new_key =
      (spec.raw() ? 4 * kv_width : 8 * int64_t{spec.context_width}) + 4 * kv_width;
  int64_t bytes = item.rows * row + item.new_keys * new_key;
  bytes +=
      kTileBytes * spec.kv_heads * splits * ceil_div(item.rows * spec.group_size(), kSplitRows);
  if (item.weights.data != nullptr) {
    bytes +=
        4 * item.weights.head_count * (item.weights.row_end - item.weights.row_begin) * item.keys();
  }
  return bytes + 8 * item.block_count() + kItemBytes;
}

}  // namespace attend
