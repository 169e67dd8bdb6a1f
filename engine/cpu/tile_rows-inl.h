// SPDX-License-Identifier: Apache-2.0
//
// Rows of an attention tile between the two matrix products: their queries and key ranges, products
// to scores (softcap, ALiBi, bias, mask), scores to exponentials with running statistics. Compiled
// once per instruction set; included by attention_tile.cc and tile_blocks-inl.h only. A row is
// worked on alone, whatever lies beside it.
#if defined(ATTEND_TILE_ROWS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_TILE_ROWS_INL_H
#undef ATTEND_TILE_ROWS_INL_H
#else
#define ATTEND_TILE_ROWS_INL_H
#endif

#include <algorithm>
#include <limits>

#include "engine/cpu/attention_tile.h"
#include "engine/cpu/prefetch.h"
#include "engine/cpu/vector_kernels-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attend {
namespace HWY_NAMESPACE {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kFloatBytes = sizeof(float);
// Rows up to which BF16 blocks are not widened to memory but in registers, once per strip.
constexpr int64_t kMaxSplitPairRows = 12;

// A tile with its buffers. Row r is query row r / group, head r % group of the group. Units are
// those of keys and values as the products read them.
struct TileRun {
  const AttentionTile& tile;
  Units units;
  int64_t rows;
  int64_t group;
  int64_t depth;        // units of head_dim
  int64_t q_stride;     // whole vectors of a row of q
  int64_t width;        // v_head_dim
  int64_t o_stride;     // PaddedWidth(width)
  bool direct;          // products read the blocks where they lie
  bool plain;           // products are the scores of visible keys
  KeyRange common;      // keys that every row sees, before bias; may be empty
  float* q;             // [rows, q_stride], scaled: floats, or pairs for dot products
  KeyRange* visible;    // [query rows]
  float* lane_sums;     // [rows, kLanes]: parts of the running sums
  float* scores;        // [2, kStripRows, kBlockTokens], then weights in units
  float* wide_keys;     // [depth + 1, kBlockTokens] units
  float* wide_values;   // [kBlockTokens, o_stride] units
  float* clean_values;  // likewise
  SoftmaxState total;
  SoftmaxState part;  // of one segment
};

// Stores a row of queries times the scale, in units, padded with zeros.
HWY_INLINE void StoreQuery(const TileRun& run, const float* from, float* to) {
  const D d;
  const V scale = hn::Set(d, static_cast<float>(run.tile.spec->scale));
  const int64_t count = run.tile.spec->head_dim;
  for (int64_t i = 0; i < count; i += kLanes) {
    const bool whole = i + kLanes <= count;
    const V x = hn::Mul(whole ? hn::LoadU(d, from + i) : LoadFirst(from + i, count - i), scale);
#if HWY_TARGET == HWY_AVX3
    if (run.tile.dot) {
      StoreBF16(x, to + i / 2);
      continue;
    }
#endif
    hn::StoreU(x, d, to + i);
  }
}

void FindVisible(TileRun& run) {
  const AttentionTile& tile = run.tile;
  run.common = {0, std::numeric_limits<int64_t>::max()};
  for (int64_t i = 0; i < tile.query_rows; ++i) {
    run.visible[i] = VisibleKeys(*tile.spec, tile.item->causal,
                                 tile.item->first_row + tile.row_begin + i, tile.item->keys());
    run.common.begin = std::max(run.common.begin, run.visible[i].begin);
    run.common.end = std::min(run.common.end, run.visible[i].end);
  }
}

TileRun StartTile(const AttentionTile& tile, std::byte* scratch) {
  const AttentionSpec& spec = *tile.spec;
  const DType dtype = tile.layout.geometry.dtype;
  Units units = tile.dot ? Units::kDot : Units::kFloats;
  if (!tile.dot && dtype == DType::kBF16 && tile.rows() <= kMaxSplitPairRows) {
    units = Units::kSplit;
  }
  const int64_t pairs = (spec.head_dim + 1) / 2;
  TileRun run{.tile = tile,
              .units = units,
              .rows = tile.rows(),
              .group = spec.group_size(),
              .depth = HoldsPairs(units) ? pairs : spec.head_dim,
              .q_stride = PaddedWidth(tile.dot ? pairs : spec.head_dim),
              .width = spec.v_head_dim,
              .o_stride = PaddedWidth(spec.v_head_dim),
              .direct = dtype == DType::kF32 || (HoldsPairs(units) && dtype == DType::kBF16),
              .plain = spec.softcap == 0 && spec.alibi_slopes.empty() &&
                       tile.item->bias.data == nullptr && dtype != DType::kI8};
  static_assert(kLanes <= kMostLanes && kStripRows <= kMostStripRows);
  const auto sizes = TileScratchFloats(tile);
  const int64_t* size = sizes.data();
  const auto take = [&] {
    auto* part = reinterpret_cast<float*>(scratch);
    scratch += *size++ * kFloatBytes;
    return part;
  };
  run.q = take();
  run.visible = reinterpret_cast<KeyRange*>(take());
  run.lane_sums = take();
  run.scores = take();
  run.wide_keys = take();
  run.wide_values = take();
  run.clean_values = take();
  run.total = SoftmaxStateAt(tile, take());
  run.part = SoftmaxStateAt(tile, take());
  FindVisible(run);
  return run;
}

// Rows of queries and of outputs that are fetched ahead.
constexpr int64_t kRowsAhead = 12;

const float* QueryOf(const TileRun& run, int64_t r) {
  const AttentionSpec& spec = *run.tile.spec;
  const int64_t row = run.tile.row_begin + r / run.group;
  const int64_t head = run.tile.kv_head * run.group + r % run.group;
  return run.tile.q + (row * spec.q_heads + head) * spec.head_dim;
}

void LoadQueries(const TileRun& run) {
  const int64_t bytes = run.tile.spec->head_dim * kFloatBytes;
  for (int64_t r = 0; r < std::min(kRowsAhead, run.rows); ++r) {
    FetchRow<false>(QueryOf(run, r), bytes);
  }
  for (int64_t r = 0; r < run.rows; ++r) {
    if (r + kRowsAhead < run.rows) {
      FetchRow<false>(QueryOf(run, r + kRowsAhead), bytes);
    }
    StoreQuery(run, QueryOf(run, r), run.q + r * run.q_stride);
  }
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

HWY_INLINE V MaskSlots(V s, int slot, Slots seen) {
  const D d;
  if (seen.begin <= slot && seen.end >= slot + kLanes) return s;
  const V lane = hn::Iota(d, static_cast<float>(slot));
  const auto visible = hn::And(hn::Ge(lane, hn::Set(d, static_cast<float>(seen.begin))),
                               hn::Lt(lane, hn::Set(d, static_cast<float>(seen.end))));
  return hn::IfThenElse(visible, s, hn::Set(d, -kInfinity));
}

// Turns products of vectors [first, last) of a block into scores in natural units, -inf where the
// row does not see the key, and returns the vector of their maxima (NaN scores do not count: their
// exp is NaN). `key_scales` are the block's, by slot, or null.
HWY_INLINE V FinishScores(const TileRun& run, int64_t row, Slots seen, int64_t first_key, int first,
                          int last, const float* key_scales, float* scores) {
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
    if (key_scales != nullptr) s = hn::Mul(s, hn::LoadU(d, key_scales + slot));
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
    s = MaskSlots(s, slot, seen);
    hn::StoreU(s, d, scores + slot);
    maximum = hn::Max(s, maximum);  // returns its second argument when one is NaN
  }
  return maximum;
}

// The same where products are the scores.
HWY_INLINE V FinishPlainScores(Slots seen, int first, int last, float* scores) {
  const D d;
  V maximum = hn::Set(d, -kInfinity);
  const bool all = seen.begin <= first * kLanes && seen.end >= last * kLanes;
  for (int n = first; n < last; ++n) {
    V s = hn::LoadU(d, scores + n * kLanes);
    if (!all) {
      s = MaskSlots(s, n * kLanes, seen);
      hn::StoreU(s, d, scores + n * kLanes);
    }
    maximum = hn::Max(s, maximum);
  }
  return maximum;
}

// exp(x - maximum) with exp(-inf - -inf) = 1: factors of whole states.
HWY_INLINE V FactorOf(V x, V maximum) {
  const D d;
  const V factor = ExpNonPositive(hn::Sub(x, maximum));
  return hn::IfThenElse(hn::Eq(x, maximum), hn::Set(d, 1.0f), factor);
}
HWY_INLINE float Factor(float x, float maximum) {
  const D d;
  return hn::GetLane(FactorOf(hn::Set(d, x), hn::Set(d, maximum)));
}

// What the exponentials of a strip's rows need; lanes are rows.
struct StripStatistics {
  HWY_ALIGN float reference[kLanes];  // subtracted from the scores
  HWY_ALIGN float factor[kLanes];     // of what was summed before
};

// Takes the block's maxima of rows [row, row + count) into the running ones.
HWY_INLINE void UpdateMaxima(int64_t row, int count, V block_maxima, SoftmaxState state,
                             StripStatistics& s) {
  static_assert(kStripRows <= kLanes);
  const D d;
  const V before = hn::LoadU(d, state.max + row);
  const V maximum = hn::Max(block_maxima, before);
  hn::BlendedStore(maximum, hn::FirstN(d, static_cast<size_t>(count)), d, state.max + row);
  hn::Store(FactorOf(before, maximum), d, s.factor);
  // All scores so far -inf: any finite reference gives weights of 0.
  const auto none = hn::Eq(maximum, hn::Set(d, -kInfinity));
  hn::Store(hn::IfThenZeroElse(none, maximum), d, s.reference);
}

// Replaces a row's scores by its weights exp(score - reference), in units and times the values'
// scales, and adds them to the row's sums.
template <bool kDot>
HWY_INLINE void ExpRow(const TileRun& run, int64_t row, float reference, float factor, int first,
                       int last, const float* value_scales, float* scores) {
  const D d;
  V sum = hn::Zero(d);
#pragma GCC unroll 8
  for (int n = first; n < last; ++n) {
    const V score = hn::LoadU(d, scores + n * kLanes);
    V p = ExpNonPositive<kDot>(hn::Sub(score, hn::Set(d, reference)));
    sum = hn::Add(sum, p);
    if (value_scales != nullptr) {  // that of a hidden key may be NaN
      const V scaled = hn::Mul(p, hn::LoadU(d, value_scales + n * kLanes));
      p = hn::IfThenZeroElse(hn::Eq(score, hn::Set(d, -kInfinity)), scaled);
    }
#if HWY_TARGET == HWY_AVX3
    if constexpr (kDot) {  // in place: vector n ends where vector n / 2 did
      StoreBF16(p, scores + n * (kLanes / 2));
      continue;
    }
#endif
    hn::StoreU(p, d, scores + n * kLanes);
  }
  float* lanes = run.lane_sums + row * kLanes;
  hn::StoreU(hn::MulAdd(hn::LoadU(d, lanes), hn::Set(d, factor), sum), d, lanes);
}

// Lane r of the result is the largest lane of rows[r]; the other lanes are -inf.
template <int kRows>
HWY_INLINE V RowMaxima(const V (&rows)[kRows]) {
  const D d;
  V maxima = hn::Set(d, -kInfinity);
#if HWY_TARGET == HWY_AVX3
  static_assert(kRows <= 8);
  // Halving: two vectors become one of half as many lanes for each, three times.
  __m512 x[8];
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) x[r] = r < kRows ? rows[r].raw : maxima.raw;
#pragma GCC unroll 8
  for (int r = 0; r < 4; ++r) {
    x[r] = _mm512_max_ps(_mm512_shuffle_f32x4(x[r], x[r + 4], 0x44),
                         _mm512_shuffle_f32x4(x[r], x[r + 4], 0xee));
  }
#pragma GCC unroll 8
  for (int r = 0; r < 2; ++r) {  // blocks: row r, r + 4, r + 2, r + 6, of 128 bits each
    x[r] = _mm512_max_ps(_mm512_shuffle_f32x4(x[r], x[r + 2], 0x88),
                         _mm512_shuffle_f32x4(x[r], x[r + 2], 0xdd));
  }
  const __m512 two = _mm512_max_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const __m512 one = _mm512_max_ps(two, _mm512_permute_ps(two, 0x4e));
  // Lanes 0 and 1 of block b are now rows 2 (b / 2) + 4 (b % 2) and the one after it.
  const __m512i order = _mm512_setr_epi32(0, 1, 8, 9, 4, 5, 12, 13, 0, 0, 0, 0, 0, 0, 0, 0);
  return V{_mm512_mask_permutexvar_ps(maxima.raw, 0xff, order, one)};
#else
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const auto lane = hn::Eq(hn::Iota(d, 0), hn::Set(d, static_cast<float>(r)));
    maxima = hn::IfThenElse(lane, hn::MaxOfLanes(d, rows[r]), maxima);
  }
  return maxima;
#endif
}

// What FinishPlainScores, UpdateMaxima and ExpRow do, for rows that see a whole block: the common
// case, without a branch.
template <bool kDot, int kRows>
HWY_NOINLINE void WeighWholeRows(const TileRun& run, int64_t row, SoftmaxState state, float* scores,
                                 StripStatistics& s) {
  const D d;
  constexpr int kVectors = kBlockTokens / kLanes;
  V maxima[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const float* from = scores + r * kBlockTokens;
    V maximum = hn::Set(d, -kInfinity);
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) maximum = hn::Max(hn::LoadU(d, from + n * kLanes), maximum);
    maxima[r] = maximum;
  }
  UpdateMaxima(row, kRows, RowMaxima(maxima), state, s);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    ExpRow<kDot>(run, row + r, s.reference[r], s.factor[r], 0, kVectors, nullptr,
                 scores + r * kBlockTokens);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace attend
HWY_AFTER_NAMESPACE();

#endif  // include guard
