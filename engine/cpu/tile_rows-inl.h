// SPDX-License-Identifier: Apache-2.0
//
// Rows of an attention tile between the two matrix products: their queries and key ranges, products
// to scores (softcap, ALiBi, bias, mask), scores to exponentials with running statistics. Compiled
// once per instruction set; included by attention_tile.cc only. A row is worked on alone, whatever
// lies beside it.
#if defined(ATTEND_TILE_ROWS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_TILE_ROWS_INL_H
#undef ATTEND_TILE_ROWS_INL_H
#else
#define ATTEND_TILE_ROWS_INL_H
#endif

#include <algorithm>
#include <limits>

#include "engine/cpu/attention_tile.h"
#include "engine/cpu/vector_kernels-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attend {
namespace HWY_NAMESPACE {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A tile with its buffers. Row r is query row r / group, head r % group of the group.
struct TileRun {
  const AttentionTile& tile;
  int64_t rows;
  int64_t group;
  int64_t depth;       // head_dim
  int64_t width;       // v_head_dim
  int64_t o_stride;    // PaddedWidth(width)
  float* q;            // [rows, depth], scaled
  KeyRange* visible;   // [query rows]
  float* lane_sums;    // [rows, kLanes]: parts of the running sums
  float* scores;       // [kStripRows, kBlockTokens]
  float* wide_keys;    // [depth, kBlockTokens]
  float* wide_values;  // [kBlockTokens, o_stride]
  SoftmaxState total;
  SoftmaxState part;  // of one segment
};

TileRun StartTile(const AttentionTile& tile) {
  const AttentionSpec& spec = *tile.spec;
  TileRun run{.tile = tile,
              .rows = tile.rows(),
              .group = spec.group_size(),
              .depth = spec.head_dim,
              .width = spec.v_head_dim,
              .o_stride = PaddedWidth(spec.v_head_dim)};
  const int64_t sizes[] = {
      run.rows * run.depth,     tile.query_rows * int64_t{sizeof(KeyRange) / sizeof(float)},
      run.rows * kLanes,        int64_t{kStripRows} * kBlockTokens,
      run.depth * kBlockTokens, kBlockTokens * run.o_stride,
      SoftmaxStateFloats(tile), SoftmaxStateFloats(tile)};
  int64_t floats = 0;
  for (int64_t size : sizes) floats += PaddedWidth(size);
  std::byte* memory = ThreadScratch(ScratchUse::kTile, floats * int64_t{sizeof(float)});
  const int64_t* size = sizes;
  const auto take = [&] {
    std::byte* piece = memory;
    memory += PaddedWidth(*size++) * int64_t{sizeof(float)};
    return piece;
  };
  run.q = reinterpret_cast<float*>(take());
  run.visible = reinterpret_cast<KeyRange*>(take());
  run.lane_sums = reinterpret_cast<float*>(take());
  run.scores = reinterpret_cast<float*>(take());
  run.wide_keys = reinterpret_cast<float*>(take());
  run.wide_values = reinterpret_cast<float*>(take());
  run.total = SoftmaxStateAt(tile, reinterpret_cast<float*>(take()));
  run.part = SoftmaxStateAt(tile, reinterpret_cast<float*>(take()));

  const float scale = static_cast<float>(spec.scale);
  for (int64_t i = 0; i < tile.query_rows; ++i) {
    const int64_t row = tile.row_begin + i;
    run.visible[i] =
        VisibleKeys(spec, tile.item->causal, tile.item->first_row + row, tile.item->keys());
    // The group's heads lie one after another.
    const float* from = tile.q + (row * spec.q_heads + tile.kv_head * run.group) * run.depth;
    float* to = run.q + i * run.group * run.depth;
    for (int64_t j = 0; j < run.group * run.depth; ++j) to[j] = from[j] * scale;
  }
  return run;
}

int HeadOf(const TileRun& run, int64_t row) {
  return static_cast<int>(run.tile.kv_head * run.group + row % run.group);
}

// What a query row sees of the block that starts at first_key, as slots [begin, end).
struct Slots {
  int begin;
  int end;
};
HWY_INLINE Slots VisibleSlots(const TileRun& run, int64_t query_row, int64_t first_key) {
  const KeyRange& range = run.visible[query_row];
  const int64_t begin = std::clamp<int64_t>(range.begin - first_key, 0, kBlockTokens);
  const int64_t end = std::clamp<int64_t>(range.end - first_key, 0, kBlockTokens);
  return {static_cast<int>(begin), static_cast<int>(std::max(begin, end))};
}

// Bias of a row by absolute key; null when the item has none.
const float* BiasRow(const TileRun& run, int64_t row) {
  const BiasView& bias = run.tile.item->bias;
  if (bias.data == nullptr) return nullptr;
  return bias.data + HeadOf(run, row) * bias.head_stride +
         (run.tile.row_begin + row / run.group) * bias.row_stride;
}
float BiasAt(const BiasView& view, const float* row, int64_t key) {
  const int64_t column = key - view.first_key;
  return column >= 0 && column < view.columns ? row[column] : 0.0f;
}
HWY_INLINE V BiasVector(const BiasView& view, const float* row, int64_t key) {
  const D d;
  const int64_t column = key - view.first_key;
  if (column >= 0 && column + kLanes <= view.columns) return hn::LoadU(d, row + column);
  HWY_ALIGN float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = BiasAt(view, row, key + i);
  return hn::Load(d, lanes);
}

// Turns products of vectors [first, last) of a block into scores in natural units, -inf where the
// row does not see the key, and returns the vector of their maxima (NaN scores do not count: their
// exp is NaN).
HWY_INLINE V FinishScores(const TileRun& run, int64_t row, Slots seen, int64_t first_key, int first,
                          int last, float* scores) {
  const D d;
  const AttentionSpec& spec = *run.tile.spec;
  const float* bias_row = BiasRow(run, row);
  const float slope = spec.alibi_slopes.empty() ? 0.0f : spec.alibi_slopes[HeadOf(run, row)];
  const int64_t position = run.tile.item->first_row + run.tile.row_begin + row / run.group;
  const V minus_infinity = hn::Set(d, -kInfinity);
  V maximum = minus_infinity;
  for (int n = first; n < last; ++n) {
    const int slot = n * kLanes;
    V s = hn::LoadU(d, scores + slot);
    if (spec.softcap > 0) {
      const V capped = Tanh(hn::Mul(s, hn::Set(d, 1.0f / spec.softcap)));
      s = hn::Mul(hn::Set(d, spec.softcap), capped);
    }
    if (slope != 0) {  // visible causal keys have key <= position: one formula for both directions
      const V distance = hn::Abs(hn::Iota(d, static_cast<float>(first_key + slot - position)));
      s = hn::NegMulAdd(hn::Set(d, slope), distance, s);
    }
    if (bias_row != nullptr) {
      const V bias = BiasVector(run.tile.item->bias, bias_row, first_key + slot);
      s = hn::IfThenElse(hn::Eq(bias, minus_infinity), minus_infinity, hn::Add(s, bias));
    }
    if (seen.begin > slot || seen.end < slot + kLanes) {
      const V lane = hn::Iota(d, static_cast<float>(slot));
      const auto visible = hn::And(hn::Ge(lane, hn::Set(d, static_cast<float>(seen.begin))),
                                   hn::Lt(lane, hn::Set(d, static_cast<float>(seen.end))));
      s = hn::IfThenElse(visible, s, minus_infinity);
    }
    hn::StoreU(s, d, scores + slot);
    maximum = hn::Max(s, maximum);  // returns its second argument when one is NaN
  }
  return maximum;
}

// exp(x - maximum) with exp(-inf - -inf) = 1: factors of whole states.
HWY_INLINE float Factor(float x, float maximum) {
  return x == maximum ? 1.0f : hn::GetLane(ExpNonPositive(hn::Set(D(), x - maximum)));
}

// Replaces a row's scores by exp(score - maximum), updates the row's statistics and returns the
// factor of what was summed before.
HWY_INLINE float UpdateRow(const TileRun& run, int64_t row, V block_maximum, int first, int last,
                           float* scores, SoftmaxState state) {
  const D d;
  const float before = state.max[row];
  float maximum = before;
  float factor = 1.0f;
  if (!hn::AllFalse(d, hn::Gt(block_maximum, hn::Set(d, before)))) {
    maximum = hn::GetLane(hn::MaxOfLanes(d, block_maximum));
    factor = Factor(before, maximum);
    state.max[row] = maximum;
  }
  // All scores so far -inf: any finite reference gives weights of 0.
  const V reference = hn::Set(d, maximum == -kInfinity ? 0.0f : maximum);
  V sum = hn::Zero(d);
  for (int n = first; n < last; ++n) {
    const V p = ExpNonPositive(hn::Sub(hn::LoadU(d, scores + n * kLanes), reference));
    hn::StoreU(p, d, scores + n * kLanes);
    sum = hn::Add(sum, p);
  }
  float* lanes = run.lane_sums + row * kLanes;
  hn::StoreU(hn::MulAdd(hn::LoadU(d, lanes), hn::Set(d, factor), sum), d, lanes);
  return factor;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace attend
HWY_AFTER_NAMESPACE();

#endif  // include guard
