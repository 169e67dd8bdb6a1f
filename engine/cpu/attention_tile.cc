// SPDX-License-Identifier: Apache-2.0
//
// The fused loop of one tile: for each block of 64 keys, scores of a strip of rows into an L1
// buffer, their exponentials, and the weighted sum of values, with one running (max, sum, output)
// per row.
//
// A key that a row does not see must not touch the row's numbers. Its score is replaced by -inf,
// whose exp is exactly 0, and 0 x value is a harmless 0 as long as the value is finite; where a
// block holds keys hidden from some row and a value that is not finite, rows go one by one over
// copies that have zeros for the values they do not see. Both ways give the same bits up to the
// sign of zeros, and outputs turn -0 into +0.
#include "engine/cpu/attention_tile.h"

#include <algorithm>
#include <span>

#include "absl/container/inlined_vector.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/cpu/attention_tile.cc"
#include "engine/cpu/simd_targets.h"
// clang-format off: the order matters.
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
#include "engine/cpu/tile_blocks-inl.h"
#include "engine/cpu/tile_rows-inl.h"
#include "engine/cpu/vector_kernels-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attend {
namespace HWY_NAMESPACE {
namespace {

// Rows [row, row + count) between the products with keys and with values of one block.
struct Strip {
  int64_t row;
  int count = 0;               // 0 = no row sees a key
  Slots all{kBlockTokens, 0};  // union of what the rows see
  bool whole = false;          // all rows see all 64 keys, and scores are plain
  bool hides;                  // some row does not see all values that are read
  Slots seen[kStripRows];
  float* weights;  // [count, kBlockTokens] units
  StripStatistics statistics;
};

// Finds out what the strip's rows see of the block.
HWY_INLINE void LookAt(const TileRun& run, const BlockView& block, Strip& strip, int count) {
  strip.all = {kBlockTokens, 0};
  strip.hides = run.tile.item->bias.data != nullptr;
  strip.count = count;
  strip.whole = false;
  if (block.first_key >= run.common.begin && block.first_key + kBlockTokens <= run.common.end) {
    strip.all = {0, kBlockTokens};
    strip.whole = run.plain;
    for (int r = 0; r < count; ++r) strip.seen[r] = strip.all;
    return;
  }
  for (int r = 0; r < count; ++r) {
    const Slots seen = VisibleSlots(run, (strip.row + r) / run.group, block.first_key);
    strip.seen[r] = seen;
    if (seen.begin == seen.end) {
      strip.hides = true;
      continue;
    }
    strip.all.begin = std::min(strip.all.begin, seen.begin);
    strip.all.end = std::max(strip.all.end, seen.end);
  }
  if (strip.all.end <= strip.all.begin) strip.count = 0;
  for (int r = 0; r < count; ++r) {
    strip.hides |= strip.seen[r].begin > strip.all.begin || strip.seen[r].end < strip.all.end;
  }
  if (HoldsPairs(run.units)) strip.hides |= strip.all.begin % 2 == 1 || strip.all.end % 2 == 1;
}

// Scores of the strip's rows, then their weights, with the rows' maxima and sums brought up.
template <Units kUnits>
void WeighStrip(const TileRun& run, const BlockView& block, Strip& strip, SoftmaxState state) {
  const D d;
  const int first = strip.all.begin / kLanes;
  const int last = (strip.all.end + kLanes - 1) / kLanes;
  ProductStrip<kUnits, false>(
      strip.count, last - first,
      Factors{.a = run.q + strip.row * run.q_stride,
              .a_stride = run.q_stride,
              .b = block.keys + first * kLanes,
              .b_stride = block.key_stride,
              .steps = run.depth,
              .next = strip.row == 0 ? block.fetch_during_keys : std::span<const std::byte>()},
      nullptr, strip.weights + first * kLanes, kBlockTokens);
  StripStatistics& s = strip.statistics;
  if (strip.whole) {
    WithRows(strip.count, [&](auto rows) {
      WeighWholeRows<kUnits == Units::kDot, decltype(rows)::value>(run, strip.row, state,
                                                                   strip.weights, s);
    });
    return;
  }
  V maxima[kStripRows];
  for (int r = 0; r < kStripRows; ++r) {
    maxima[r] = hn::Set(d, -kInfinity);
    if (r >= strip.count) continue;
    float* scores = strip.weights + r * kBlockTokens;
    maxima[r] = run.plain ? FinishPlainScores(strip.seen[r], first, last, scores)
                          : FinishScores(run, strip.row + r, strip.seen[r], block.first_key, first,
                                         last, block.key_scales, scores);
  }
  UpdateMaxima(strip.row, strip.count, RowMaxima(maxima), state, s);
  for (int r = 0; r < strip.count; ++r) {
    ExpRow<kUnits == Units::kDot>(run, strip.row + r, s.reference[r], s.factor[r], first, last,
                                  block.value_scales, strip.weights + r * kBlockTokens);
  }
}

// Adds the weighted values to the strip's output.
template <Units kUnits>
void AddValues(const TileRun& run, BlockView& block, const Strip& strip, SoftmaxState state) {
  constexpr int kTokens = HoldsPairs(kUnits) ? 2 : 1;        // of a unit of values
  constexpr int kWeights = kUnits == Units::kSplit ? 2 : 1;  // that go with it
  const int first = strip.all.begin / kTokens;
  const int last = (strip.all.end + kTokens - 1) / kTokens;
  const int vectors = static_cast<int>((run.width + kLanes - 1) / kLanes);
  Factors factors{.a = strip.weights + first * kWeights,
                  .a_stride = kBlockTokens,
                  .b = block.values + first * block.value_stride,
                  .b_stride = block.value_stride,
                  .steps = last - first,
                  .next = {}};
  float* o = state.o + strip.row * run.o_stride;
  if (!strip.hides || ValuesAreFinite(run, block)) {
    if (strip.row == 0) factors.next = block.fetch_during_values;
    ProductStrip<kUnits, true>(strip.count, vectors, factors, strip.statistics.factor, o,
                               run.o_stride);
    return;
  }
  for (int r = 0; r < strip.count; ++r) {
    const float* values = ValuesSeenBy(run, block, strip.row + r, strip.seen[r]);
    factors.a = strip.weights + r * kBlockTokens + first * kWeights;
    factors.b = values + first * run.o_stride;
    factors.b_stride = run.o_stride;
    ProductStrip<kUnits, true>(1, vectors, factors, strip.statistics.factor + r,
                               o + r * run.o_stride, run.o_stride);
  }
}

using Runs = std::span<const TileRun>;

// All rows against one block, in strips of nearly equal height. The values of a strip are added
// after the next strip's scores were weighed: the processor then overlaps the exponentials, which
// wait for one another, with products that do not depend on them.
template <Units kUnits>
void AttendBlock(const TileRun& run, int64_t index, HeadBlock next, SoftmaxState state) {
  BlockView block = ReadBlock(run, index, true, next);
  const int64_t strips = (run.rows + kStripRows - 1) / kStripRows;
  Strip buffers[2];
  for (int64_t i = 0; i <= strips; ++i) {
    if (i < strips) {
      Strip& strip = buffers[i % 2];
      strip.row = run.rows * i / strips;
      strip.weights = run.scores + i % 2 * kStripRows * kBlockTokens;
      LookAt(run, block, strip, static_cast<int>(run.rows * (i + 1) / strips - strip.row));
      if (strip.count > 0) WeighStrip<kUnits>(run, block, strip, state);
    }
    if (i > 0 && buffers[(i - 1) % 2].count > 0) {
      AddValues<kUnits>(run, block, buffers[(i - 1) % 2], state);
    }
  }
}

// Tiles of one segment, block after block in turn.
void AttendSegmentInto(Runs runs, int64_t segment, SoftmaxState TileRun::*into) {
  for (const TileRun& run : runs) {
    const SoftmaxState state = run.*into;
    std::fill_n(state.max, run.rows, -kInfinity);
    std::fill_n(state.o, run.rows * run.o_stride, 0.0f);
    std::fill_n(run.lane_sums, run.rows * kLanes, 0.0f);
  }
  const TileRun& first = runs.front();
  const KeyRange& keys = first.tile.keys;
  const int64_t begin = std::max(segment * kSegmentKeys, keys.begin);
  const int64_t end = std::min((segment + 1) * kSegmentKeys, keys.end);
  WithUnits(first.units, [&](auto units) {
    for (int64_t block = begin / kBlockTokens; block * kBlockTokens < end; ++block) {
      for (const TileRun& run : runs) {
        const bool last = &run == &runs.back();
        const HeadBlock next = last ? HeadBlock{block + 1, first.tile.kv_head}
                                    : HeadBlock{block, run.tile.kv_head + 1};
        AttendBlock<decltype(units)::value>(run, block, next, run.*into);
      }
    }
  });
  for (const TileRun& run : runs) {
    for (int64_t r = 0; r < run.rows; ++r) {
      (run.*into).sum[r] =
          hn::GetLane(hn::SumOfLanes(D(), hn::LoadU(D(), run.lane_sums + r * kLanes)));
    }
  }
}

// into = into merged with the state of the keys that follow.
void Merge(const TileRun& run, SoftmaxState into, SoftmaxState next) {
  const D d;
  for (int64_t r = 0; r < run.rows; ++r) {
    const float maximum = std::max(into.max[r], next.max[r]);
    const V factor = hn::Set(d, Factor(into.max[r], maximum));
    const V next_factor = hn::Set(d, Factor(next.max[r], maximum));
    const V next_sum = hn::Mul(hn::Set(d, next.sum[r]), next_factor);
    into.sum[r] = hn::GetLane(hn::MulAdd(hn::Set(d, into.sum[r]), factor, next_sum));
    into.max[r] = maximum;
    float* o = into.o + r * run.o_stride;
    const float* next_o = next.o + r * run.o_stride;
    for (int64_t c = 0; c < run.width; c += kLanes) {
      const V scaled = hn::Mul(hn::LoadU(d, next_o + c), next_factor);
      hn::StoreU(hn::MulAdd(hn::LoadU(d, o + c), factor, scaled), d, o + c);
    }
  }
}

std::byte* OutputOf(const TileRun& run, int64_t r) {
  const OutputRow& row = run.tile.output[run.tile.row_begin + r / run.group];
  return static_cast<std::byte*>(row.data) + HeadOf(run, r) * run.width * DTypeBytes(row.dtype);
}

// Adds the sinks and divides by the sum; leaves in `state` the reference and divisor of the
// attention weights.
void WriteOutput(const TileRun& run, SoftmaxState state) {
  const D d;
  const AttentionSpec& spec = *run.tile.spec;
  for (int64_t r = 0; r < run.rows; ++r) {
    const int head = HeadOf(run, r);
    float maximum = state.max[r];
    float factor = 1.0f;
    if (!spec.sinks.empty()) {
      const float sink = spec.sinks[head];
      maximum = std::max(maximum, sink);
      factor = Factor(state.max[r], maximum);
      const V own = hn::Mul(hn::Set(d, state.sum[r]), hn::Set(d, factor));
      state.sum[r] = hn::GetLane(own) + Factor(sink, maximum);
    }
    if (state.sum[r] == 0) state.sum[r] = 1.0f;  // no visible key, or only scores of -inf
    state.max[r] = maximum == -kInfinity ? 0.0f : maximum;
    const float* o = state.o + r * run.o_stride;
    const DType dtype = run.tile.output[run.tile.row_begin + r / run.group].dtype;
    std::byte* to = OutputOf(run, r);
    if (r + kRowsAhead < run.rows) {
      FetchRow<true>(OutputOf(run, r + kRowsAhead), run.width * DTypeBytes(dtype));
    }
    const V share = hn::Set(d, factor / state.sum[r]);
    int64_t c = 0;
    for (; c + kLanes <= run.width; c += kLanes) {
      const V x = hn::MulAdd(hn::LoadU(d, o + c), share, hn::Zero(d));
      StoreAs(dtype, x, to + c * DTypeBytes(dtype));
    }
    if (c < run.width) {
      const V x = hn::MulAdd(hn::LoadU(d, o + c), share, hn::Zero(d));
      StoreFirstAs(dtype, x, run.width - c, to + c * DTypeBytes(dtype));
    }
  }
}

// Writes the weights of one row over one block: exp(score - reference) / divisor.
void StoreWeights(const TileRun& run, int64_t row, Slots seen, int64_t first_key, float* scores,
                  SoftmaxState state) {
  const D d;
  const WeightsView& view = run.tile.item->weights;
  for (int slot = seen.begin / kLanes * kLanes; slot < seen.end; slot += kLanes) {
    const V x = hn::Sub(hn::LoadU(d, scores + slot), hn::Set(d, state.max[row]));
    hn::StoreU(hn::Div(ExpNonPositive(x), hn::Set(d, state.sum[row])), d, scores + slot);
  }
  const int64_t query_row = run.tile.row_begin + row / run.group;
  for (int32_t h = 0; h < view.head_count; ++h) {
    if (view.heads[h] != HeadOf(run, row)) continue;
    float* to = view.data + h * view.head_stride + (query_row - view.row_begin) * view.row_stride;
    std::copy(scores + seen.begin, scores + seen.end, to + first_key + seen.begin);
  }
}

bool AsksWeights(const TileRun& run, int64_t row) {
  const WeightsView& view = run.tile.item->weights;
  const int64_t query_row = run.tile.row_begin + row / run.group;
  return query_row >= view.row_begin && query_row < view.row_end &&
         std::find(view.heads, view.heads + view.head_count, HeadOf(run, row)) !=
             view.heads + view.head_count;
}

// Second pass, after WriteOutput: the scores again, for the asked rows only.
void WriteWeights(const TileRun& run, SoftmaxState state) {
  const KeyRange& keys = run.tile.keys;
  if (keys.begin >= keys.end) return;
  LoadQueries(run);
  for (int64_t index = keys.begin / kBlockTokens; index * kBlockTokens < keys.end; ++index) {
    const BlockView block = ReadBlock(run, index, false, {index + 1, run.tile.kv_head});
    for (int64_t row = 0; row < run.rows; ++row) {
      const Slots seen = VisibleSlots(run, row / run.group, block.first_key);
      if (seen.begin == seen.end || !AsksWeights(run, row)) continue;
      const int first = seen.begin / kLanes;
      const int last = (seen.end + kLanes - 1) / kLanes;
      const Factors factors{.a = run.q + row * run.q_stride,
                            .a_stride = run.q_stride,
                            .b = block.keys + first * kLanes,
                            .b_stride = block.key_stride,
                            .steps = run.depth,
                            .next = {}};
      float* scores = run.scores + first * kLanes;
      WithUnits(run.units, [&](auto units) {
        ProductStrip<decltype(units)::value, false>(1, last - first, factors, nullptr, scores,
                                                    kBlockTokens);
      });
      FinishScores(run, row, seen, block.first_key, first, last, block.key_scales, run.scores);
      StoreWeights(run, row, seen, block.first_key, run.scores, state);
    }
  }
}

void FinishTile(const TileRun& run, SoftmaxState state) {
  WriteOutput(run, state);
  if (run.tile.item->weights.data != nullptr) WriteWeights(run, state);
}

}  // namespace

void AttendTiles(std::span<const AttentionTile> tiles, std::byte* scratch) {
  absl::InlinedVector<TileRun, kMostHeadsInTurn> runs;
  for (const AttentionTile& tile : tiles) {
    runs.push_back(StartTile(tile, scratch));
    scratch += TileScratchBytes(tile);
    LoadQueries(runs.back());
  }
  const AttentionTile& tile = tiles.front();
  // Merging a segment into an empty state changes no bit, so the first one is computed in place;
  // with no visible key this leaves the empty state.
  AttendSegmentInto(runs, tile.first_segment(), &TileRun::total);
  for (int64_t i = 1; i < tile.segments(); ++i) {
    AttendSegmentInto(runs, tile.first_segment() + i, &TileRun::part);
    for (const TileRun& run : runs) Merge(run, run.total, run.part);
  }
  for (const TileRun& run : runs) FinishTile(run, run.total);
}

void AttendTileSegment(const AttentionTile& tile, std::byte* scratch, int64_t segment,
                       SoftmaxState state) {
  TileRun run = StartTile(tile, scratch);
  LoadQueries(run);
  run.part = state;
  AttendSegmentInto({&run, 1}, segment, &TileRun::part);
}

void FinishSplitTile(const AttentionTile& tile, std::byte* scratch, float* states) {
  const TileRun run = StartTile(tile, scratch);
  const SoftmaxState total = SoftmaxStateAt(tile, states);
  for (int64_t i = 1; i < tile.segments(); ++i) {
    Merge(run, total, SoftmaxStateAt(tile, states + i * SoftmaxStateFloats(tile)));
  }
  FinishTile(run, total);
}

}  // namespace HWY_NAMESPACE
}  // namespace attend
HWY_AFTER_NAMESPACE();
#endif  // AVX2 or AVX-512

#if HWY_ONCE
namespace attend {

const TileFunctions& TileFunctionsFor(CpuIsa isa) {
  static constexpr TileFunctions kAvx2{N_AVX2::AttendTiles, N_AVX2::AttendTileSegment,
                                       N_AVX2::FinishSplitTile};
  static constexpr TileFunctions kAvx512{N_AVX3::AttendTiles, N_AVX3::AttendTileSegment,
                                         N_AVX3::FinishSplitTile};
  return isa == CpuIsa::kAvx512 ? kAvx512 : kAvx2;
}

}  // namespace attend
#endif  // HWY_ONCE
