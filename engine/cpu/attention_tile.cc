// SPDX-License-Identifier: Apache-2.0
//
// The fused loop of one tile: for each block of 64 keys, scores of a strip of rows into an L1
// buffer, their exponentials, and the weighted sum of values, with one running (max, sum, output)
// per row.
//
// A key that a row does not see must not touch the row's numbers. Its score is replaced by -inf,
// whose exp is exactly 0, and 0 x value is a harmless 0 as long as the value is finite; where a
// block holds keys hidden from some row and a value that is not finite, rows go one by one over the
// keys they see. Both ways give the same bits up to the sign of zeros, and outputs turn -0 into +0.
#include "engine/cpu/attention_tile.h"

#include <algorithm>
#include <memory>
#include <new>
#include <optional>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/cpu/attention_tile.cc"
#include "engine/cpu/simd_targets.h"
// clang-format off: the order matters.
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
#include "engine/cpu/tile_rows-inl.h"
#include "engine/cpu/vector_kernels-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attend {
namespace HWY_NAMESPACE {
namespace {

// From this many rows on, half-precision keys and values are widened once per block and not in
// every strip.
constexpr int64_t kWidenRows = 13;

// One block as its kernels read it. `begin` and `end` are the slots that any row of the tile sees.
template <class Key, class Value>
struct BlockView {
  int64_t first_key;
  int64_t begin;
  int64_t end;
  const Key* keys;
  int64_t key_stride;
  const Value* values;
  int64_t value_stride;
  std::optional<bool> finite;  // whether all values of the slots are; found out when needed
};

template <class Key, class Value>
bool ValuesAreFinite(const TileRun& run, BlockView<Key, Value>& block) {
  if (block.finite.has_value()) return *block.finite;
  const D d;
  V bad = hn::Zero(d);  // x - x is 0 for finite x, else NaN
  for (int64_t slot = block.begin; slot < block.end; ++slot) {
    for (int64_t c = 0; c < run.width; c += kLanes) {
      const V x = LoadWide(block.values + slot * block.value_stride + c);
      bad = hn::Add(bad, hn::Sub(x, x));
    }
  }
  block.finite = hn::AllTrue(d, hn::Eq(bad, hn::Zero(d)));
  return *block.finite;
}

// output += P V of one row over the keys it sees only.
template <class Key, class Value>
void AddVisibleValues(const TileRun& run, const BlockView<Key, Value>& block, int64_t row,
                      const float* p, float factor, float* o) {
  const Slots seen = VisibleSlots(run, row / run.group, block.first_key);
  const float* bias_row = BiasRow(run, row);
  const int vectors = static_cast<int>((run.width + kLanes - 1) / kLanes);
  const auto add = [&](int slot, int keys) {
    ValueStrip<Value>(1, p + slot, kBlockTokens, block.values + slot * block.value_stride,
                      block.value_stride, keys, &factor, vectors, o, run.o_stride);
    factor = 1.0f;
  };
  add(seen.begin, 0);
  for (int slot = seen.begin; slot < seen.end; ++slot) {
    if (bias_row != nullptr &&
        BiasAt(run.tile.item->bias, bias_row, block.first_key + slot) == -kInfinity) {
      continue;
    }
    add(slot, 1);
  }
}

// Rows [row, row + count) against one block.
template <class Key, class Value>
void AttendStrip(const TileRun& run, BlockView<Key, Value>& block, int64_t row, int count,
                 SoftmaxState state) {
  Slots seen[kStripRows];
  Slots all{kBlockTokens, 0};
  bool hides = run.tile.item->bias.data != nullptr;
  for (int r = 0; r < count; ++r) {
    seen[r] = VisibleSlots(run, (row + r) / run.group, block.first_key);
    if (seen[r].begin == seen[r].end) {
      hides = true;
      continue;
    }
    all.begin = std::min(all.begin, seen[r].begin);
    all.end = std::max(all.end, seen[r].end);
  }
  if (all.end <= all.begin) return;
  const int first = all.begin / kLanes;
  const int last = (all.end + kLanes - 1) / kLanes;
  ScoreStrip<Key>(count, run.q + row * run.depth, run.depth, block.keys + first * kLanes,
                  block.key_stride, last - first, run.scores + first * kLanes, kBlockTokens);
  float factors[kStripRows];
  for (int r = 0; r < count; ++r) {
    float* scores = run.scores + r * kBlockTokens;
    hides |= seen[r].begin > all.begin || seen[r].end < all.end;
    const V maximum = FinishScores(run, row + r, seen[r], block.first_key, first, last, scores);
    factors[r] = UpdateRow(run, row + r, maximum, first, last, scores, state);
  }
  const Value* values = block.values + all.begin * block.value_stride;
  float* o = state.o + row * run.o_stride;
  if (hides && !ValuesAreFinite(run, block)) {
    for (int r = 0; r < count; ++r) {
      AddVisibleValues(run, block, row + r, run.scores + r * kBlockTokens, factors[r],
                       o + r * run.o_stride);
    }
    return;
  }
  ValueStrip<Value>(count, run.scores + all.begin, kBlockTokens, values, block.value_stride,
                    all.end - all.begin, factors,
                    static_cast<int>((run.width + kLanes - 1) / kLanes), o, run.o_stride);
}

// Calls f(first row, rows) for strips of nearly equal height.
template <class F>
HWY_INLINE void ForEachStrip(const TileRun& run, const F& f) {
  const int64_t strips = (run.rows + kStripRows - 1) / kStripRows;
  for (int64_t i = 0; i < strips; ++i) {
    const int64_t begin = run.rows * i / strips;
    f(begin, static_cast<int>(run.rows * (i + 1) / strips - begin));
  }
}

// Keys [depth, slots [begin, end) rounded out to vectors] to floats.
template <class T>
void WidenKeys(const TileRun& run, const T* keys, int64_t stride, int64_t begin, int64_t end) {
  for (int64_t i = 0; i < run.depth; ++i) {
    for (int64_t n = begin / kLanes * kLanes; n < end; n += kLanes) {
      hn::StoreU(LoadWide(keys + i * stride + n), D(), run.wide_keys + i * kBlockTokens + n);
    }
  }
}

// Values of slots [begin, end) to floats, rows padded with zeros to whole vectors.
template <class T>
void WidenValues(const TileRun& run, const T* values, int64_t begin, int64_t end) {
  const D d;
  const int64_t whole = run.width / kLanes * kLanes;
  for (int64_t j = begin; j < end; ++j) {
    const T* from = values + j * run.width;
    float* to = run.wide_values + j * run.o_stride;
    for (int64_t c = 0; c < whole; c += kLanes) hn::StoreU(LoadWide(from + c), d, to + c);
    if (whole == run.width) continue;
    HWY_ALIGN T rest[kLanes] = {};
    std::copy(from + whole, from + run.width, rest);
    hn::StoreU(LoadWide(rest), d, to + whole);
  }
}

void Prefetch(const std::byte* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

template <class T>
const T* KeysOf(const TileRun& run, int64_t block) {
  const AttentionTile& tile = run.tile;
  return reinterpret_cast<const T*>(tile.kv_memory + tile.blocks[block] +
                                    tile.layout.KeyOffset(tile.kv_head));
}
template <class T>
const T* ValuesOf(const TileRun& run, int64_t block) {
  const AttentionTile& tile = run.tile;
  return reinterpret_cast<const T*>(tile.kv_memory + tile.blocks[block] +
                                    tile.layout.ValueOffset(tile.kv_head));
}

template <class T>
void AttendBlock(const TileRun& run, int64_t index, SoftmaxState state) {
  const int64_t first_key = index * kBlockTokens;
  const int64_t tokens = run.tile.layout.block_tokens;
  const int64_t begin = std::max<int64_t>(run.tile.keys.begin - first_key, 0);
  const int64_t end = std::min<int64_t>(run.tile.keys.end - first_key, kBlockTokens);
  const T* keys = KeysOf<T>(run, index);
  const T* values = ValuesOf<T>(run, index);
  const auto attend_all = [&](auto block) {
    ForEachStrip(run, [&](int64_t row, int count) { AttendStrip(run, block, row, count, state); });
  };
  const bool widen = !std::is_same_v<T, float> && run.rows >= kWidenRows;
  if (widen || run.width % kLanes != 0) WidenValues(run, values, begin, end);
  if (widen) {
    WidenKeys(run, keys, tokens, begin, end);
    attend_all(BlockView<float, float>{
        first_key, begin, end, run.wide_keys, kBlockTokens, run.wide_values, run.o_stride, {}});
    return;
  }
  if (first_key + kBlockTokens < run.tile.keys.end) {
    Prefetch(reinterpret_cast<const std::byte*>(KeysOf<T>(run, index + 1)),
             run.depth * tokens * int64_t{sizeof(T)});
    Prefetch(reinterpret_cast<const std::byte*>(ValuesOf<T>(run, index + 1)),
             run.width * tokens * int64_t{sizeof(T)});
  }
  if (run.width % kLanes != 0) {
    attend_all(BlockView<T, float>{
        first_key, begin, end, keys, tokens, run.wide_values, run.o_stride, {}});
  } else {
    attend_all(BlockView<T, T>{first_key, begin, end, keys, tokens, values, run.width, {}});
  }
}

// Calls f(element of the KV dtype).
template <class F>
void WithDType(const TileRun& run, const F& f) {
  switch (run.tile.layout.geometry.dtype) {
    case DType::kBF16:
      return f(hwy::bfloat16_t());
    case DType::kF16:
      return f(hwy::float16_t());
    default:
      return f(float());
  }
}

void AttendSegmentInto(const TileRun& run, int64_t segment, SoftmaxState state) {
  std::fill_n(state.max, run.rows, -kInfinity);
  std::fill_n(state.o, run.rows * run.o_stride, 0.0f);
  std::fill_n(run.lane_sums, run.rows * kLanes, 0.0f);
  const KeyRange& keys = run.tile.keys;
  const int64_t begin = std::max(segment * kSegmentKeys, keys.begin);
  const int64_t end = std::min((segment + 1) * kSegmentKeys, keys.end);
  WithDType(run, [&](auto element) {
    for (int64_t block = begin / kBlockTokens; block * kBlockTokens < end; ++block) {
      AttendBlock<decltype(element)>(run, block, state);
    }
  });
  for (int64_t r = 0; r < run.rows; ++r) {
    state.sum[r] = hn::GetLane(hn::SumOfLanes(D(), hn::LoadU(D(), run.lane_sums + r * kLanes)));
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

// Adds the sinks and divides; leaves in `state` the reference and divisor of the attention weights.
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
    float* o = state.o + r * run.o_stride;
    const V divisor = hn::Set(d, state.sum[r]);
    for (int64_t c = 0; c < run.width; c += kLanes) {
      const V scaled = hn::Mul(hn::LoadU(d, o + c), hn::Set(d, factor));
      hn::StoreU(hn::Add(hn::Div(scaled, divisor), hn::Zero(d)), d, o + c);
    }
    const int64_t row = run.tile.row_begin + r / run.group;
    std::copy_n(o, run.width, run.tile.output + (row * spec.q_heads + head) * run.width);
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
  const int64_t tokens = run.tile.layout.block_tokens;
  for (int64_t row = 0; row < run.rows; ++row) {
    if (!AsksWeights(run, row)) continue;
    const KeyRange& range = run.visible[row / run.group];
    for (int64_t block = range.begin / kBlockTokens; block * kBlockTokens < range.end; ++block) {
      const int64_t first_key = block * kBlockTokens;
      const Slots seen = VisibleSlots(run, row / run.group, first_key);
      const int first = seen.begin / kLanes;
      const int last = (seen.end + kLanes - 1) / kLanes;
      WithDType(run, [&](auto element) {
        using T = decltype(element);
        ScoreStrip<T>(1, run.q + row * run.depth, run.depth, KeysOf<T>(run, block) + first * kLanes,
                      tokens, last - first, run.scores + first * kLanes, kBlockTokens);
      });
      FinishScores(run, row, seen, first_key, first, last, run.scores);
      StoreWeights(run, row, seen, first_key, run.scores, state);
    }
  }
}

void FinishTile(const TileRun& run, SoftmaxState state) {
  WriteOutput(run, state);
  if (run.tile.item->weights.data != nullptr) WriteWeights(run, state);
}

}  // namespace

void AttendTile(const AttentionTile& tile) {
  const TileRun run = StartTile(tile);
  // Merging a segment into an empty state changes no bit, so the first one is computed in place;
  // with no visible key this leaves the empty state.
  AttendSegmentInto(run, tile.first_segment(), run.total);
  for (int64_t i = 1; i < tile.segments(); ++i) {
    AttendSegmentInto(run, tile.first_segment() + i, run.part);
    Merge(run, run.total, run.part);
  }
  FinishTile(run, run.total);
}

void AttendTileSegment(const AttentionTile& tile, int64_t segment, SoftmaxState state) {
  AttendSegmentInto(StartTile(tile), segment, state);
}

void FinishSplitTile(const AttentionTile& tile, float* states) {
  const TileRun run = StartTile(tile);
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
  static constexpr TileFunctions kAvx2{N_AVX2::AttendTile, N_AVX2::AttendTileSegment,
                                       N_AVX2::FinishSplitTile};
  static constexpr TileFunctions kAvx512{N_AVX3::AttendTile, N_AVX3::AttendTileSegment,
                                         N_AVX3::FinishSplitTile};
  return isa == CpuIsa::kAvx512 ? kAvx512 : kAvx2;
}

std::byte* ThreadScratch(ScratchUse use, int64_t bytes) {
  constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlign); }
  };
  struct Buffer {
    std::unique_ptr<std::byte, Free> memory;
    int64_t bytes = 0;
  };
  thread_local Buffer buffers[2];
  Buffer& buffer = buffers[static_cast<int>(use)];
  if (buffer.bytes < bytes) {
    buffer.memory.reset();
    buffer.memory.reset(static_cast<std::byte*>(::operator new(bytes, kAlign)));
    buffer.bytes = bytes;
  }
  return buffer.memory.get();
}

}  // namespace attend
#endif  // HWY_ONCE
