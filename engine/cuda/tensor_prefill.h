// SPDX-License-Identifier: Apache-2.0
//
// Attention of tiles with many packed rows on tensor cores: every warp has rows of its own and all
// the tile's keys. tensor_prefill_{bf16,f16}.cu instantiate it, tensor_attention.cu launches it;
// who made the tiles, and whether they are one of several splits, is not its business.
//
// One tile: the queries stay in shared memory; keys and values come in tiles of 64, last first, one
// buffer each. Values are on their way while scores are computed, the next keys while the softmax
// and the product with the values are:
//   wait for keys, barrier | start values | scores, masks | wait for values, barrier |
//   start next keys | softmax, weights x values
#pragma once

#include "engine/cuda/tensor_fragment.h"
#include "engine/cuda/tensor_launch.h"
#include "engine/cuda/tensor_tile.h"

namespace attend::device {

// Shared memory: queries [kRows][kWidth], keys [64][kWidth], values [64][kWidth] of 2 bytes, spans
// [kRows] of 16 bytes, output rows [kRows] of 4 bytes, TileFacts, states of rows [8][kThreads] of 4
// bytes where they are parked.
//
// Thread blocks per SM: what __launch_bounds__ asks registers for, and what shared memory of 227 KB
// (sm_90, sm_100) and 99 KB (sm_86, sm_89) has room for.
// Width   rows x warps   accumulators    bytes   registers, 227 KB, 99 KB
//   32      128 x 4         32 + 64      19,008      3, 11, 5
//   64      128 x 4         64 + 64      35,392      2,  6, 2
//   80      128 x 4         80 + 64      43,584      2,  5, 2
//   96      128 x 4         96 + 64      51,776      2,  4, 1
//  128      128 x 4        128 + 64      72,256      2,  3, 1
//  192      128 x 8         96 + 32     100,928      1,  2, 1
//  256       64 x 4        128 + 32      99,648      2,  2, 1
// Warps have 32 rows where registers allow it: a fragment of keys then serves twice.
template <int kHeadWidth>
struct PrefillPlan {
  static constexpr int kWidth = kHeadWidth;
  static constexpr int kRows = TensorTileRows(kWidth);
  static constexpr int kWarps = kWidth == 192 ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpRows = kRows / kWarps;
  static constexpr int kRowTiles = kWarpRows / 16;
  static constexpr int kKeyTiles = kBlockTokens / 8;
  static constexpr int kColumnTiles = kWidth / 8;
  static constexpr int kBlocksPerSm = kWidth <= 32 ? 3 : kWidth == 192 ? 1 : 2;

  static constexpr int kKeysAt = kRows * kWidth * 2;
  static constexpr int kValuesAt = kKeysAt + kBlockTokens * kWidth * 2;
  static constexpr int kSpansAt = kValuesAt + kBlockTokens * kWidth * 2;
  static constexpr int kOutputRowsAt = kSpansAt + kRows * 16;
  static constexpr int kFactsAt = kOutputRowsAt + kRows * 4;
  static constexpr int kStatesAt = kFactsAt + static_cast<int>(sizeof(TileFacts));
  // 192 accumulators and what the rules of scores need are more than 255 registers: states of rows,
  // used once per block, wait in shared memory.
  static constexpr bool kParkStates = kWidth == 128;
  static constexpr int kStates = kParkStates ? kThreads * kRowTiles * 4 : 0;
  static constexpr int kBytes = kStatesAt + kStates * 4;
  static_assert(kBytes <= 99 * 1024);  // the least of the supported devices, sm_86 and sm_89

  // The warp's first row in the tile.
  ATTEND_DEVICE static int WarpRow() { return Opaque(ThreadIndex()) / 32 * kWarpRows; }
};

// Shared memory of one thread block.
template <class T, class Plan>
struct PrefillMemory {
  Shared<T> queries;
  Shared<T> keys;
  Shared<T> values;
  Shared<KeySpan> spans;
  Shared<int32_t> output_rows;  // from FirstOutputRow; -1 = the tile has no such row
  Shared<TileFacts> facts;      // [1]
  Shared<float> states;         // of a thread: every kThreads-th, unless they stay in registers

  ATTEND_DEVICE PrefillMemory()
      : queries(SharedArray<T>("queries", 0, Plan::kRows * Plan::kWidth)),
        keys(SharedArray<T>("keys", Plan::kKeysAt, kBlockTokens * Plan::kWidth)),
        values(SharedArray<T>("values", Plan::kValuesAt, kBlockTokens * Plan::kWidth)),
        spans(SharedArray<KeySpan>("spans", Plan::kSpansAt, Plan::kRows)),
        output_rows(SharedArray<int32_t>("output_rows", Plan::kOutputRowsAt, Plan::kRows)),
        facts(SharedArray<TileFacts>("facts", Plan::kFactsAt, 1)),
        states(SharedArray<float>("states", Plan::kStatesAt, Plan::kStates)) {}
};

// Starts the copy of the tile's queries; rows it doesn't have are zero.
template <class T, class Plan>
ATTEND_DEVICE void CopyQueries(const AttentionParams& params, int64_t first_output_row,
                               const PrefillMemory<T, Plan>& memory) {
  constexpr int kChunks = Plan::kWidth / 8;
  const int row_elements = params.shape.KeyRow();
  const Global<const T> q(static_cast<const T*>(params.q));
#pragma unroll 1
  for (int index = Opaque(ThreadIndex()); index < Plan::kRows * kChunks; index += Plan::kThreads) {
    const int row = index / kChunks;
    const int chunk = index % kChunks;
    const int32_t output_row = memory.output_rows[row];
    const bool valid = output_row >= 0 && chunk * 8 < row_elements;
    const int64_t from = valid ? (first_output_row + output_row) * row_elements + chunk * 8 : 0;
    CopyAsync16(memory.queries + ChunkOffset<Plan::kWidth>(row, chunk), q + from, valid);
  }
}

// s = q k over the warp's rows and the 64 keys in shared memory. Columns past the head are zeros on
// both sides; wide heads leave out whole quarters of 64.
template <class T, class Plan>
ATTEND_DEVICE void MultiplyKeys(const PrefillMemory<T, Plan>& memory, int columns,
                                float (&s)[Plan::kRowTiles][Plan::kKeyTiles][4]) {
  const int lane = Opaque(ThreadIndex()) % 32;
  const int warp_row = Plan::WarpRow();
  const auto queries = RowOperand<T, Plan::kWidth>(memory.queries + warp_row * Plan::kWidth, lane);
  const auto keys = KeyOperand<T, Plan::kWidth>(memory.keys, lane);
  Clear(s);
#pragma unroll
  for (int step = 0; step < Plan::kWidth / 16; ++step) {
    if (Plan::kWidth > 128 && step % 4 == 0 && 16 * step >= columns) break;
    uint32_t a[Plan::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < Plan::kRowTiles; ++m) LoadMatrix4(a[m], queries.At(16 * m, step));
#pragma unroll
    for (int n = 0; n < Plan::kKeyTiles; n += 2) {
      uint32_t b[4];
      LoadMatrix4(b, keys.At(8 * n, step));
#pragma unroll
      for (int m = 0; m < Plan::kRowTiles; ++m) {
        MultiplyAccumulate<T>(s[m][n], a[m], b[0], b[1]);
        MultiplyAccumulate<T>(s[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Where the lane's states wait between blocks.
template <class T, class Plan>
ATTEND_DEVICE void ParkStates(const PrefillMemory<T, Plan>& memory,
                              const RowStates<Plan::kRowTiles>& rows) {
  if constexpr (Plan::kParkStates) {
    for (int i = 0; i < 2 * Plan::kRowTiles; ++i) {
      memory.states[2 * i * Plan::kThreads + ThreadIndex()] = rows.max[i / 2][i % 2];
      memory.states[(2 * i + 1) * Plan::kThreads + ThreadIndex()] = rows.sum[i / 2][i % 2];
    }
  }
}
template <class T, class Plan>
ATTEND_DEVICE void FetchStates(const PrefillMemory<T, Plan>& memory,
                               RowStates<Plan::kRowTiles>& rows) {
  if constexpr (Plan::kParkStates) {
    for (int i = 0; i < 2 * Plan::kRowTiles; ++i) {
      rows.max[i / 2][i % 2] = memory.states[2 * i * Plan::kThreads + ThreadIndex()];
      rows.sum[i / 2][i % 2] = memory.states[(2 * i + 1) * Plan::kThreads + ThreadIndex()];
    }
  }
}

// Writes the warp's rows.
template <class Plan>
ATTEND_DEVICE void StoreRows(const AttentionParams& params, int index,
                             Shared<const int32_t> output_rows,
                             const RowStates<Plan::kRowTiles>& rows,
                             const float (&o)[Plan::kRowTiles][Plan::kColumnTiles][4]) {
  const int lane = Opaque(ThreadIndex()) % 32;
  const int warp_row = Plan::WarpRow();
  // Read again: registers are short in the main loop.
  const AttentionTile tile = Global<const AttentionTile>(params.tiles)[index];
  const ItemShape item = Global<const ItemShape>(params.items)[tile.item];
  const float to_base_e = PlainScores(params, item) ? params.scale : 1.0f;
  const RowWriter writer(params, tile, FirstOutputRow(params, item, tile));
#pragma unroll
  for (int m = 0; m < Plan::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + 16 * m + 8 * half + lane / 4;
      const int32_t output_row = output_rows[row];
      const RowStatistics state{rows.max[m][half] * to_base_e, QuadSum(rows.sum[m][half])};
      float factor = 0;
      if (output_row >= 0) factor = writer.Statistics(row, output_row, state, lane % 4 == 0);
#pragma unroll
      for (int n = 0; n < Plan::kColumnTiles; n += 4) {
        float eight[8];
        GatherEight<Plan::kColumnTiles>(o[m], n, half, factor, lane, eight);
        if (output_row >= 0) writer.Columns(row, output_row, 8 * (n + lane % 4), eight);
      }
    }
  }
}

// Returns `index`, which waits in shared memory like all that the main loop doesn't need.
template <class T, class Plan>
ATTEND_DEVICE int AttendTile(const AttentionParams& params, int index,
                             const PrefillMemory<T, Plan>& memory) {
  const AttentionTile tile = Global<const AttentionTile>(params.tiles)[index];
  const ItemShape item = Global<const ItemShape>(params.items)[tile.item];
  SyncThreads();  // the previous tile's spans, queries and values have been read
  PlaceRows<Plan::kRows, Plan::kThreads>(params, item, tile, memory.spans, memory.output_rows);
  if (ThreadIndex() == 0) memory.facts[0] = FactsOf(params, item, tile, index);
  SyncThreads();

  const auto facts = [&] { return TileFacts(memory.facts[0]); };
  // Starts the copy of a block's keys or values; those that no row sees are zero.
  const auto copy = [&](Shared<T> to, int block, bool values) {
    const int count = block == facts().end - 1 ? facts().last_keys : kBlockTokens;
    const int64_t address =
        Global<const int64_t>(params.block_address)[int64_t{facts().first_block} + block];
    const std::byte* from = params.kv + address + (values ? facts().values_at : facts().keys_at);
    CopyRows<T, Plan::kWidth, kBlockTokens, Plan::kThreads>(
        to, Global(reinterpret_cast<const T*>(from)),
        values ? params.shape.ValueRow() : params.shape.KeyRow(), 0, count, ThreadIndex());
    CommitCopies();
  };

  RowStates<Plan::kRowTiles> rows;
  float o[Plan::kRowTiles][Plan::kColumnTiles][4];
  Clear(o);
  ParkStates(memory, rows);
  int block = facts().end - 1;
  if (block >= facts().begin) {
    CopyQueries(params, FirstOutputRow(params, item, tile), memory);
    copy(memory.keys, block, /*values=*/false);
  }
#pragma unroll 1
  for (; block >= facts().begin; --block) {
    WaitCopies<0>();
    SyncThreads();  // keys are here; the previous values have been read
    copy(memory.values, block, /*values=*/true);

    float s[Plan::kRowTiles][Plan::kKeyTiles][4];
    MultiplyKeys<T, Plan>(memory, params.shape.head_dim, s);
    const bool all_seen = block >= facts().all_begin && block < facts().all_end;
    uint32_t seen[Plan::kRowTiles] = {};
    if (!all_seen || !facts().plain_scores) {
      const int warp_row = Plan::WarpRow();
      const FragmentPlace place{memory.spans + warp_row, memory.output_rows + warp_row,
                                memory.facts, int64_t{block} * kBlockTokens};
      HideKeys(place, s, seen);
      if (!facts().plain_scores) ApplyRules(params, place, s, seen);
    }

    WaitCopies<0>();
    bool non_finite = !all_seen || facts().may_hide;  // or is there any to look for?
    if (non_finite) {
      non_finite = VisitNonFinite<T, Plan::kWidth, kBlockTokens, Plan::kThreads>(
          memory.values, ThreadIndex(), false);
    }
    non_finite = SyncThreadsOr(non_finite);  // values are here; the keys have been read
    if (block > facts().begin) copy(memory.keys, block - 1, /*values=*/false);
    FetchStates(memory, rows);
    UpdateRows((facts().plain_scores ? params.scale : 1.0f) * kLog2E, s, rows, o);
    ParkStates(memory, rows);
    uint32_t p[Plan::kRowTiles][Plan::kKeyTiles / 2][4];
    PackWeights<T>(s, p);
    if (non_finite) {
      AddNonFinite<T, Plan::kWidth>(p, seen, memory.values, o);
      SyncThreads();
      VisitNonFinite<T, Plan::kWidth, kBlockTokens, Plan::kThreads>(memory.values, ThreadIndex(),
                                                                    true);
      SyncThreads();
    }
    AddValues<T, Plan::kWidth>(p, memory.values, params.shape.v_head_dim, o);
  }
  FetchStates(memory, rows);
  StoreRows<Plan>(params, facts().tile, memory.output_rows, rows, o);
  return facts().tile;
}

template <class T, int kWidth>
__global__ void __launch_bounds__(PrefillPlan<kWidth>::kThreads, PrefillPlan<kWidth>::kBlocksPerSm)
    TensorPrefill(const __grid_constant__ AttentionParams params) {
  using Plan = PrefillPlan<kWidth>;
  const PrefillMemory<T, Plan> memory;
  const Global<const int32_t> tile_count(params.tile_count);
  int index = BlockIndex();
  while (index < tile_count[0]) index = AttendTile<T, Plan>(params, index, memory) + GridBlocks();
}

template <class T>
cudaError_t TensorPrefillOf<T>::Launch(const AttentionParams& params, int64_t blocks,
                                       cudaStream_t stream) {
  return WithWidth(params.shape, [&](auto width) {
    using Plan = PrefillPlan<width()>;
    return device::Launch(TensorPrefill<T, Plan::kWidth>, "TensorPrefill",
                          {blocks, Plan::kThreads, Plan::kBytes}, params, stream);
  });
}

template <class T>
cudaError_t TensorPrefillOf<T>::Prepare(int shared_limit) {
  return ForEachWidth([&](auto width) {
    using Plan = PrefillPlan<width()>;
    if (Plan::kBytes > shared_limit) return cudaErrorInvalidValue;
    return AllowSharedMemory(TensorPrefill<T, Plan::kWidth>, Plan::kBytes);
  });
}

}  // namespace attend::device
