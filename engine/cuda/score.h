// SPDX-License-Identifier: Apache-2.0
//
// What a product of a query and a key means: which packed row it belongs to, whether the row sees
// the key, the score's rules, and the steps of a softmax that meets its keys piece by piece. Shared
// by all attention kernels, one element at a time; knows no tiles, fragments or memory layout.
#pragma once

#include <cstdint>
#include <limits>

#include "engine/cuda/device.h"
#include "engine/cuda/kernels.h"

namespace attend::device {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kLog2E = 1.44269504f;

// ---- Rows and keys ----

// Where packed row `packed_row` of an item and key head is.
struct PackedRow {
  int64_t query_row;  // of the item
  int32_t head;       // query head

  ATTEND_DEVICE PackedRow(int64_t packed_row, int32_t kv_head, int32_t group)
      : query_row(packed_row / group),
        head(kv_head * group + static_cast<int32_t>(packed_row % group)) {}
  // What `output_row`, counted from head 0 of query row `first_query_row`, is.
  ATTEND_DEVICE static PackedRow Of(int64_t first_query_row, int32_t output_row, int32_t q_heads) {
    PackedRow row(0, 0, 1);
    row.query_row = first_query_row + output_row / q_heads;
    row.head = output_row % q_heads;
    return row;
  }
};

// Keys [begin, end) that a row sees before bias. Both ends grow with the row's position, so keys
// that all rows of a tile see are [begin of the last row, end of the first row).
struct KeySpan {
  int64_t begin;
  int64_t end;

  ATTEND_DEVICE bool Contains(int64_t key) const { return key >= begin && key < end; }
};

// VisibleKeys of engine/attention_plan.h. `position` is the item's first_row + query row and may be
// negative; positions are below 2^62 and windows any int64: no step overflows.
ATTEND_DEVICE KeySpan VisibleSpan(int64_t position, int64_t keys, bool causal, int64_t window) {
  KeySpan span{0, keys};
  if (causal && position + 1 < span.end) span.end = position + 1;
  if (window > 0) {
    if (window <= position) span.begin = position - window + 1;
    if (!causal && window < keys - position) span.end = position + window;
  }
  if (span.end < span.begin) span.end = span.begin;
  if (span.end < 0) span = {0, 0};
  return span;
}

// ---- Scores ----

// Scores of the item are scale * product with scale > 0 and nothing else: order and maximum of the
// products are those of the scores. False for the whole item or for none of it, so that a row's
// formula doesn't depend on its company. The upper limit keeps scale * kLog2E finite.
ATTEND_DEVICE bool PlainScores(const AttentionParams& params, const ItemShape& item) {
  return params.scale > 0 && params.scale < 1e38f && !(params.softcap > 0) &&
         params.alibi_slopes == nullptr && item.bias == nullptr;
}

// The first rule: scale and softcap, which don't depend on row and key.
class ScoreCap {
 public:
  // The reciprocal is the same for all keys: a division for each is a call that costs registers.
  // Below 2^-126 it would overflow, and capped scores are 0 either way.
  ATTEND_DEVICE explicit ScoreCap(const AttentionParams& params)
      : scale_(params.scale),
        softcap_(params.softcap),
        reciprocal_(1.0f / Max(params.softcap, 0x1p-126f)) {}

  ATTEND_DEVICE float operator()(float product) const {
    const float x = scale_ * product;
    return softcap_ > 0 ? softcap_ * Tanh(x * reciprocal_) : x;
  }

 private:
  float scale_;
  float softcap_;  // 0 = off
  float reciprocal_;
};

// What a row adds for a key `ahead` of it: -slope * |ahead|. Causal rows see no key ahead of them,
// so this is slope * (key - position) there.
ATTEND_DEVICE float AlibiOf(float slope, float ahead) {
  return slope * (ahead < 0 ? ahead : -ahead);
}
ATTEND_DEVICE float SlopeOf(const AttentionParams& params, int32_t head) {
  return params.alibi_slopes == nullptr ? 0.0f
                                        : float(Global<const float>(params.alibi_slopes)[head]);
}

// -inf where bias hides the key, also when the score is NaN or +inf.
ATTEND_DEVICE float WithBias(float score, float bias) {
  return bias == -kInfinity ? bias : score + bias;
}

// All rules of one row: a product and the key's bias -> score in base e. Whether the mask shows the
// key is the caller's part.
class RowScore {
 public:
  ATTEND_DEVICE RowScore(const AttentionParams& params, const ItemShape& item, const PackedRow& row)
      : cap_(params),
        slope_(SlopeOf(params, row.head)),
        position_(item.first_row + row.query_row),
        bias_begin_(item.bias_first_key),
        bias_end_(item.bias == nullptr ? item.bias_first_key
                                       : item.bias_first_key + item.bias_columns),
        bias_(item.bias) {
    if (item.bias == nullptr) return;
    bias_ = bias_ + (item.bias_head_stride * row.head + item.bias_row_stride * row.query_row -
                     item.bias_first_key);
  }

  ATTEND_DEVICE float Bias(int64_t key) const {
    return key >= bias_begin_ && key < bias_end_ ? float(bias_[key]) : 0.0f;
  }
  ATTEND_DEVICE float operator()(float product, int64_t key, float bias) const {
    return WithBias(cap_(product) + AlibiOf(slope_, static_cast<float>(key - position_)), bias);
  }

 private:
  ScoreCap cap_;
  float slope_;
  int64_t position_;
  int64_t bias_begin_;  // keys with a column
  int64_t bias_end_;
  Global<const float> bias_;  // the row's, by key
};

// The same rules one by one and near one key, for kernels that are short of registers: keys are
// origin + offset, offsets below 2^23.
class RowAlibi {
 public:
  ATTEND_DEVICE RowAlibi(const AttentionParams& params, const ItemShape& item, const PackedRow& row,
                         int64_t origin)
      : slope_(SlopeOf(params, row.head)),
        start_(static_cast<float>(origin - (item.first_row + row.query_row))) {}

  ATTEND_DEVICE float operator()(int offset) const {
    return AlibiOf(slope_, start_ + static_cast<float>(offset));
  }

 private:
  float slope_;
  float start_;
};

class RowBias {
 public:
  ATTEND_DEVICE RowBias(const ItemShape& item, const PackedRow& row, int64_t origin)
      : begin_(Offset(item.bias_first_key - origin)),
        end_(Offset(item.bias_first_key + item.bias_columns - origin)),
        row_(item.bias) {
    if (item.bias == nullptr) {
      end_ = begin_;
      return;
    }
    row_ = row_ + (item.bias_head_stride * row.head + item.bias_row_stride * row.query_row +
                   (origin - item.bias_first_key));
  }

  ATTEND_DEVICE float operator()(int offset) const {
    return offset >= begin_ && offset < end_ ? float(row_[offset]) : 0.0f;
  }

 private:
  ATTEND_DEVICE static int Offset(int64_t offset) {
    constexpr int64_t kFar = int64_t{1} << 30;
    return static_cast<int>(offset < -kFar ? -kFar : offset > kFar ? kFar : offset);
  }

  int begin_;  // offsets of keys with a column
  int end_;
  Global<const float> row_;  // by offset
};

// ---- Softmax ----
// A row's state is its maximum m, the sum of weights exp(s - m) and the weighted sum of values.
// Scores may be in any unit; `base2` turns a difference of them into an exponent of 2 (kLog2E for
// scores in base e; scale * kLog2E for products). Differences come first: score * base2 alone
// overflows near 3e38 and, rounded once for m and once inside a fused s * base2 - m, drifts apart.

// What scores are compared with: m, or 0 while all scores so far are -inf (-inf - -inf is NaN).
ATTEND_DEVICE float Reference(float maximum) { return maximum == -kInfinity ? 0.0f : maximum; }

// exp(score - reference); 0 for -inf, NaN for NaN. Also the factor of a state with an older or
// smaller maximum `score`.
ATTEND_DEVICE float Weight(float score, float reference, float base2) {
  return Exp2Fast((score - reference) * base2);
}
// The same in base e to float's precision: for what has no rounding to 16 bits to hide behind.
ATTEND_DEVICE float AccurateWeight(float score, float reference) {
  return Exp2((score - reference) * kLog2E);
}

// 1 / sum; 0 for a row without visible keys. A NaN stays: `sum > 0` would hide it.
ATTEND_DEVICE float Reciprocal(float sum) { return sum == 0 ? 0.0f : 1.0f / sum; }

// The last step of a row: statistics with the sink, and the factor of its weighted sum of values.
struct FinishedRow {
  RowStatistics statistics;
  float factor;
};
// `row` in base e; `sink` is the head's, -inf = none (exp(-inf) adds nothing). A row without
// visible keys: factor 0, statistics (sink, 1), or (-inf, 0) without a sink.
ATTEND_DEVICE FinishedRow FinishRow(RowStatistics row, float sink) {
  const float maximum = Max(row.max, sink);  // first: exp(sink - row.max) may overflow
  const float reference = Reference(maximum);
  const float rescale = Weight(row.max, reference, kLog2E);
  const float sum = row.sum * rescale + Weight(sink, reference, kLog2E);
  return {{maximum, sum}, rescale * Reciprocal(sum)};
}

ATTEND_DEVICE float SinkOf(const AttentionParams& params, int32_t head) {
  return params.sinks == nullptr ? -kInfinity : float(Global<const float>(params.sinks)[head]);
}

}  // namespace attend::device
