// SPDX-License-Identifier: Apache-2.0
//
// Attention of tiles with at most 16 packed rows on tensor cores: all four warps have the same rows
// and share the keys, 16 of every 64 each, and merge their states at the end in the order of warps.
// tensor_decode_{bf16,f16}.cu instantiate it, tensor_attention.cu launches it; how long rows are
// split into tiles is not its business.
//
// A warp copies the keys and values that it reads itself: the main loop has no barrier of the
// block. Keys and values of a block take turns in a ring of slots; kSlots - 1 copies are on their
// way while one slot is in use.
#pragma once

#include "engine/cuda/tensor_fragment.h"
#include "engine/cuda/tensor_launch.h"
#include "engine/cuda/tensor_tile.h"

namespace attend::device {

// Shared memory: ring [kSlots][64][kWidth] of 2 bytes, spans [16] of 16 bytes, output rows [16] of
// 4 bytes, statistics [4][16] of 8 bytes, TileFacts. At the end the ring becomes the warps' sums
// [4][16][kSumRow] of float: of every 8 columns the first 4 are in the first half of a row, the
// others in the second, and rows are 16 banks apart: reading and writing 16 bytes has no conflicts.
//
// About 0.8 us x 4.3 TB/s / 132 SMs = 26 KB must be under way per SM of an H200. Thread blocks per
// SM: what __launch_bounds__ asks registers for, and what shared memory of 227 KB (sm_90, sm_100)
// and 99 KB (sm_86, sm_89) has room for.
// Width   slots   bytes    registers, 227 KB, 99 KB
//   32      6     25,472      4, 8, 3
//   64      6     50,048      4, 4, 1
//   80      6     62,336      3, 3, 1
//   96      6     74,624      3, 3, 1
//  128      6     99,200      2, 2, 1
//  192      4     99,200      2, 2, 1
//  256      3     99,200      2, 2, 1
template <int kHeadWidth>
struct DecodePlan {
  static constexpr int kWidth = kHeadWidth;
  static constexpr int kRows = kDecodeRows;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpKeys = kBlockTokens / kWarps;
  static constexpr int kColumnTiles = kWidth / 8;
  static constexpr int kSlots = kWidth <= 128 ? 6 : kWidth == 192 ? 4 : 3;
  static constexpr int kBlocksPerSm = kWidth <= 64 ? 4 : kWidth <= 96 ? 3 : 2;
  static constexpr int kSumRow = kWidth + (kWidth % 32 == 0 ? 16 : 0);

  static constexpr int kSlotElements = kBlockTokens * kWidth;
  static constexpr int kSpansAt = kSlots * kSlotElements * 2;
  static constexpr int kOutputRowsAt = kSpansAt + kRows * 16;
  static constexpr int kStatisticsAt = kOutputRowsAt + kRows * 4;
  static constexpr int kFactsAt = kStatisticsAt + kWarps * kRows * 8;
  static constexpr int kBytes = kFactsAt + static_cast<int>(sizeof(TileFacts));
  static_assert(kBytes <= 99 * 1024);
  static_assert(kWarps * kRows * kSumRow * 4 <= kSpansAt);
  static_assert(kRows == 16 && kWarpKeys == 16);
};

template <class T, class Plan>
struct DecodeMemory {
  Shared<T> ring;
  Shared<float> sums;  // in the ring's place
  Shared<KeySpan> spans;
  Shared<int32_t> output_rows;  // from FirstOutputRow; -1 = the tile has no such row
  Shared<RowStatistics> statistics;
  Shared<TileFacts> facts;  // [1]

  ATTEND_DEVICE DecodeMemory()
      : ring(SharedArray<T>("ring", 0, Plan::kSlots * Plan::kSlotElements)),
        sums(SharedArray<float>("sums", 0, Plan::kWarps * Plan::kRows * Plan::kSumRow)),
        spans(SharedArray<KeySpan>("spans", Plan::kSpansAt, Plan::kRows)),
        output_rows(SharedArray<int32_t>("output_rows", Plan::kOutputRowsAt, Plan::kRows)),
        statistics(SharedArray<RowStatistics>("statistics", Plan::kStatisticsAt,
                                              Plan::kWarps * Plan::kRows)),
        facts(SharedArray<TileFacts>("facts", Plan::kFactsAt, 1)) {}

  // This warp's 16 keys or values in a slot.
  ATTEND_DEVICE Shared<T> WarpTile(int slot) const {
    const int warp = ThreadIndex() / 32;
    return ring + (slot * Plan::kSlotElements + warp * Plan::kWarpKeys * Plan::kWidth);
  }
};

// One warp's copies: keys of the first block, its values, keys of the second block, ...
template <class T, class Plan>
class WarpCopies {
 public:
  ATTEND_DEVICE WarpCopies(const AttentionParams& params, const ItemShape& item,
                           const DecodeMemory<T, Plan>& memory)
      : params_(params),
        memory_(memory),
        address_(Global(params.block_address) + item.block_begin),
        block_(TileFacts(memory.facts[0]).begin),
        end_(TileFacts(memory.facts[0]).end) {
    if (block_ < end_) next_address_ = address_[block_];
  }

  // Starts the next copy, if there is one, into the slot that was used before the current one.
  ATTEND_DEVICE void Start() {
    if (block_ < end_) {
      const int warp = Opaque(ThreadIndex()) / 32;
      const TileFacts facts = memory_.facts[0];
      const int count = block_ == end_ - 1 ? facts.last_keys : kBlockTokens;
      const int64_t offset = next_address_ + (values_next_ ? facts.values_at : facts.keys_at);
      CopyRows<T, Plan::kWidth, Plan::kWarpKeys, 32>(
          memory_.WarpTile(slot_), Global(reinterpret_cast<const T*>(params_.kv + offset)),
          values_next_ ? params_.shape.ValueRow() : params_.shape.KeyRow(), warp * Plan::kWarpKeys,
          count, Opaque(ThreadIndex()) % 32);
      // Ahead of its use: a copy would wait for the table and then for itself.
      if (values_next_ && ++block_ < end_) next_address_ = address_[block_];
      values_next_ = !values_next_;
      slot_ = slot_ + 1 == Plan::kSlots ? 0 : slot_ + 1;
    }
    CommitCopies();  // also when empty: waiting counts groups
  }

 private:
  const AttentionParams& params_;
  const DecodeMemory<T, Plan>& memory_;
  Global<const int64_t> address_;
  int64_t next_address_ = 0;
  int block_;
  int end_;
  int slot_ = 0;
  bool values_next_ = false;
};

// The tile's queries as operand a. Rows it doesn't have and columns past the head are zero.
template <class T, class Plan>
ATTEND_DEVICE void LoadQueries(const AttentionParams& params, int64_t first_output_row,
                               Shared<const int32_t> output_rows,
                               uint32_t (&q)[Plan::kWidth / 16][4]) {
  const int lane = ThreadIndex() % 32;
  const int row_elements = params.shape.KeyRow();
  const Global<const uint32_t> words(static_cast<const uint32_t*>(params.q));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t output_row = output_rows[8 * half + lane / 4];
    const int64_t first = (first_output_row + output_row) * row_elements;
#pragma unroll
    for (int step = 0; step < Plan::kWidth / 16; ++step) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int column = 16 * step + 8 * upper + lane % 4 * 2;
        uint32_t word = 0;
        if (output_row >= 0 && column < row_elements) word = words[(first + column) / 2];
        q[step][2 * upper + half] = word;
      }
    }
  }
}

// s = q k over the warp's keys.
template <class T, class Plan>
ATTEND_DEVICE void MultiplyKeys(const uint32_t (&q)[Plan::kWidth / 16][4], Shared<T> tile,
                                float (&s)[1][2][4]) {
  const auto keys = KeyOperand<T, Plan::kWidth>(tile, ThreadIndex() % 32);
  Clear(s);
#pragma unroll
  for (int step = 0; step < Plan::kWidth / 16; ++step) {
    uint32_t b[4];
    LoadMatrix4(b, keys.At(0, step));
    MultiplyAccumulate<T>(s[0][0], q[step], b[0], b[1]);
    MultiplyAccumulate<T>(s[0][1], q[step], b[2], b[3]);
  }
}

// Writes the warp's state to shared memory.
template <class T, class Plan>
ATTEND_DEVICE void ShareState(const DecodeMemory<T, Plan>& memory, const RowStates<1>& rows,
                              const float (&o)[1][Plan::kColumnTiles][4]) {
  const int lane = ThreadIndex() % 32;
  const int warp = ThreadIndex() / 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * Plan::kRows + 8 * half + lane / 4;
    const RowStatistics state{rows.max[0][half], QuadSum(rows.sum[0][half])};
    if (lane % 4 == 0) memory.statistics[row] = state;
#pragma unroll
    for (int n = 0; n < Plan::kColumnTiles; n += 4) {
      float eight[8];
      GatherEight<Plan::kColumnTiles>(o[0], n, half, 1.0f, lane, eight);
      if (n + lane % 4 >= Plan::kColumnTiles) continue;
      const Shared<float> to = memory.sums + (row * Plan::kSumRow + 4 * (n + lane % 4));
      Store16(to, FourFloats(eight, 0));
      Store16(to + Plan::kWidth / 2, FourFloats(eight, 4));
    }
  }
}

// Adds up the warps' states, in their order, and writes the tile's rows, each by one warp: eight
// columns a lane.
template <class T, class Plan>
ATTEND_DEVICE void StoreMerged(const AttentionParams& params, const AttentionTile& tile,
                               const ItemShape& item, const DecodeMemory<T, Plan>& memory) {
  const int lane = ThreadIndex() % 32;
  const float to_base_e = PlainScores(params, item) ? params.scale : 1.0f;
  const RowWriter writer(params, tile, FirstOutputRow(params, item, tile));
  if (lane >= Plan::kColumnTiles) return;
  for (int row = ThreadIndex() / 32; row < tile.rows; row += Plan::kWarps) {
    RowStatistics merged{-kInfinity, 0};
    for (int warp = 0; warp < Plan::kWarps; ++warp) {
      const RowStatistics state = memory.statistics[warp * Plan::kRows + row];
      merged.max = Max(merged.max, state.max);
    }
    const float reference = Reference(merged.max);
    float sums[8] = {};
#pragma unroll
    for (int warp = 0; warp < Plan::kWarps; ++warp) {
      const RowStatistics state = memory.statistics[warp * Plan::kRows + row];
      const float rescale = Weight(state.max, reference, to_base_e * kLog2E);
      merged.sum += state.sum * rescale;
      const Shared<float> from =
          memory.sums + ((warp * Plan::kRows + row) * Plan::kSumRow + 4 * lane);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const Vector16 four = Load16(from + part * (Plan::kWidth / 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[4 * part + i] += WordAsFloat(four.word[i]) * rescale;
      }
    }
    merged.max *= to_base_e;
    const int32_t output_row = memory.output_rows[row];
    const float factor = writer.Statistics(row, output_row, merged, lane == 0);
#pragma unroll
    for (float& sum : sums) sum *= factor;
    writer.Columns(row, output_row, 8 * lane, sums);
  }
}

template <class T, class Plan>
ATTEND_DEVICE void AttendTile(const AttentionParams& params, int index,
                              const DecodeMemory<T, Plan>& memory) {
  const AttentionTile tile = Global<const AttentionTile>(params.tiles)[index];
  const ItemShape item = Global<const ItemShape>(params.items)[tile.item];
  const int lane = ThreadIndex() % 32;
  const int warp = ThreadIndex() / 32;
  SyncThreads();  // the previous tile's rows have been written
  PlaceRows<Plan::kRows, Plan::kThreads>(params, item, tile, memory.spans, memory.output_rows);
  if (ThreadIndex() == 0) memory.facts[0] = FactsOf(params, item, tile, index);
  SyncThreads();

  const TileFacts facts = memory.facts[0];
  WarpCopies<T, Plan> copies(params, item, memory);
#pragma unroll 1
  for (int i = 0; i < Plan::kSlots - 1; ++i) copies.Start();

  const float base2 = (PlainScores(params, item) ? params.scale : 1.0f) * kLog2E;
  uint32_t q[Plan::kWidth / 16][4];
  LoadQueries<T, Plan>(params, FirstOutputRow(params, item, tile), memory.output_rows, q);
  RowStates<1> rows;
  float o[1][Plan::kColumnTiles][4];
  Clear(o);
  int slot = 0;
  const auto next_tile = [&] {  // the warp's keys or values in the slot that comes next
    const Shared<T> at = memory.WarpTile(slot);
    slot = slot + 1 == Plan::kSlots ? 0 : slot + 1;
    return at;
  };
#pragma unroll 1
  for (int block = facts.begin; block < facts.end; ++block) {
    WaitCopies<Plan::kSlots - 2>();
    SyncWarp();  // the keys are here; the values before them have been read
    copies.Start();
    float s[1][2][4];
    MultiplyKeys<T, Plan>(q, next_tile(), s);
    const bool all_seen = block >= facts.all_begin && block < facts.all_end;
    uint32_t seen[1] = {};
    if (!all_seen || !facts.plain_scores) {
      const int64_t first_key = int64_t{block} * kBlockTokens + warp * Plan::kWarpKeys;
      const FragmentPlace place{memory.spans, memory.output_rows, memory.facts, first_key};
      HideKeys(place, s, seen);
      if (!facts.plain_scores) ApplyRules(params, place, s, seen);
    }
    UpdateRows(base2, s, rows, o);
    uint32_t p[1][1][4];
    PackWeights<T>(s, p);

    const Shared<T> values = next_tile();
    WaitCopies<Plan::kSlots - 2>();
    bool non_finite = !all_seen || facts.may_hide;  // or is there any to look for?
    if (non_finite) {
      non_finite =
          VisitNonFinite<T, Plan::kWidth, Plan::kWarpKeys, 32>(values, lane, /*replace=*/false);
    }
    non_finite = Any(non_finite);
    SyncWarp();  // the values are here; the keys have been read
    copies.Start();
    if (non_finite) {
      AddNonFinite<T, Plan::kWidth>(p, seen, values, o);
      SyncWarp();
      VisitNonFinite<T, Plan::kWidth, Plan::kWarpKeys, 32>(values, lane, /*replace=*/true);
      SyncWarp();
    }
    AddValues<T, Plan::kWidth>(p, values, params.shape.v_head_dim, o);
  }
  WaitCopies<0>();
  SyncThreads();  // all warps are done with the ring
  ShareState(memory, rows, o);
  SyncThreads();
  StoreMerged(params, tile, item, memory);
}

template <class T, int kWidth>
__global__ void __launch_bounds__(DecodePlan<kWidth>::kThreads, DecodePlan<kWidth>::kBlocksPerSm)
    TensorDecode(const __grid_constant__ AttentionParams params) {
  const DecodeMemory<T, DecodePlan<kWidth>> memory;
  const Global<const int32_t> tile_count(params.tile_count);
  for (int index = BlockIndex(); index < tile_count[0]; index += GridBlocks()) {
    AttendTile(params, index, memory);
  }
}

template <class T>
cudaError_t TensorDecodeOf<T>::Launch(const AttentionParams& params, int64_t blocks,
                                      cudaStream_t stream) {
  return WithWidth(params.shape, [&](auto width) {
    using Plan = DecodePlan<width()>;
    return device::Launch(TensorDecode<T, Plan::kWidth>, "TensorDecode",
                          {blocks, Plan::kThreads, Plan::kBytes}, params, stream);
  });
}

template <class T>
cudaError_t TensorDecodeOf<T>::Prepare(int shared_limit) {
  return ForEachWidth([&](auto width) {
    using Plan = DecodePlan<width()>;
    if (Plan::kBytes > shared_limit) return cudaErrorInvalidValue;
    return AllowSharedMemory(TensorDecode<T, Plan::kWidth>, Plan::kBytes);
  });
}

}  // namespace attend::device
