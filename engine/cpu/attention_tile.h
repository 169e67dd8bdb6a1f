// SPDX-License-Identifier: Apache-2.0
//
// One task of the attention stage: some rows of one item with all query heads of one key/value
// head. The functions exist once per instruction set; attention_kernel.cc cuts batches into tiles
// and calls them. A tile knows nothing of threads or of other tiles.
//
// A tile's rows are (query row, head of the group), heads innermost: row r is query row r /
// group_size.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/attention_plan.h"
#include "engine/cpu/attention_kernel.h"
#include "engine/cpu/kv_blocks.h"

namespace attend {

// Keys reduced from one fresh state; part of the numerics (DESIGN 4), not a tuning value.
inline constexpr int64_t kSegmentKeys = 1024;

struct AttentionTile {
  const AttentionSpec* spec = nullptr;
  const AttendItem* item = nullptr;
  KvBlockLayout layout;
  const std::byte* kv_memory = nullptr;
  const int64_t* blocks = nullptr;    // addresses of the item's blocks
  const float* q = nullptr;           // the item's row 0: [rows, q_heads, head_dim]
  const OutputRow* output = nullptr;  // of the item's rows: [rows] -> [q_heads, v_head_dim]
  bool dot = false;                   // bf16 dot products (AttentionBatch::compute)
  // For attention_kernel.cc: the item's place in the plan, and whether its new keys of this head
  // are appended right before the tile, its only reader, is attended: from the nearest cache.
  int plan_index = 0;
  bool brings_keys = false;
  int kv_head = 0;
  int64_t row_begin = 0;  // query rows of the item: [row_begin, row_begin + query_rows)
  int64_t query_rows = 0;
  KeyRange keys;  // union of what its rows can see

  int64_t rows() const { return query_rows * spec->group_size(); }
  int64_t first_segment() const { return keys.begin / kSegmentKeys; }
  int64_t segments() const {
    return keys.end > keys.begin ? (keys.end - 1) / kSegmentKeys + 1 - first_segment() : 0;
  }
};

// Softmax of a tile's rows over some keys: weights are exp(score - max), `sum` their sum and `o`
// the sum of weighted values. Without visible keys: (-inf, 0, 0). Borrowed memory.
struct SoftmaxState {
  float* max = nullptr;  // [rows]
  float* sum = nullptr;  // [rows]
  float* o = nullptr;    // [rows, PaddedWidth(v_head_dim)]
};

// Row stride of SoftmaxState::o: whole vectors of any instruction set.
inline int64_t PaddedWidth(int64_t width) { return (width + 15) / 16 * 16; }
// Statistics of a strip are read as a whole vector.
inline constexpr int64_t kStatisticsRoom = 16;
inline int64_t SoftmaxStateFloats(const AttentionTile& tile) {
  return PaddedWidth(tile.rows() * (2 + PaddedWidth(tile.spec->v_head_dim)) + kStatisticsRoom);
}
inline SoftmaxState SoftmaxStateAt(const AttentionTile& tile, float* memory) {
  const int64_t rows = tile.rows();
  float* statistics = memory + rows * PaddedWidth(tile.spec->v_head_dim);
  return {statistics, statistics + rows, memory};
}

// The parts of the memory that work on a tile needs (TileRun in tile_rows-inl.h), in floats: enough
// for every instruction set, so that a batch's most can be known before it is dealt out.
inline constexpr int64_t kMostLanes = 16;
inline constexpr int64_t kMostStripRows = 6;
inline std::array<int64_t, 9> TileScratchFloats(const AttentionTile& tile) {
  const int64_t values = PaddedWidth(tile.spec->v_head_dim) * kBlockTokens;
  const int64_t state = SoftmaxStateFloats(tile);
  return {tile.rows() * PaddedWidth(tile.spec->head_dim),
          PaddedWidth(tile.query_rows * int64_t{sizeof(KeyRange) / sizeof(float)}),
          tile.rows() * kMostLanes,
          2 * kMostStripRows * kBlockTokens,
          (tile.spec->head_dim + 1) * int64_t{kBlockTokens},
          values,
          values,
          state,
          state};
}
inline int64_t TileScratchBytes(const AttentionTile& tile) {
  int64_t floats = 0;
  for (int64_t part : TileScratchFloats(tile)) floats += part;
  return floats * int64_t{sizeof(float)};
}

// Most tiles that are attended together.
inline constexpr int kMostHeadsInTurn = 8;

// `scratch`: TileScratchBytes of this thread's for every tile, 64-byte aligned.
struct TileFunctions {
  // Whole tiles, alike but for their key heads, which follow each other: all segments in ascending
  // order, output and weights. Memory of the next tile's work lies behind that of one.
  void (*attend)(std::span<const AttentionTile> tiles, std::byte* scratch);
  // One segment from a fresh state.
  void (*attend_segment)(const AttentionTile& tile, std::byte* scratch, int64_t segment,
                         SoftmaxState state);
  // The rest of a tile whose segments were computed apart: merges the `segments()` states that lie
  // SoftmaxStateFloats apart, in ascending order, into the first one, then output and weights.
  void (*finish)(const AttentionTile& tile, std::byte* scratch, float* states);
};

const TileFunctions& TileFunctionsFor(CpuIsa isa);

}  // namespace attend
