// SPDX-License-Identifier: Apache-2.0
//
// The loops of every gemm kernel around the one step in which they differ. Included by each
// gemm_*.cc after <immintrin.h> and its target pragma; a `Unit` says how wide a strip is, how one
// group of inner elements is multiplied and how a sum becomes a float. Everything is in an unnamed
// namespace: no other file may end up with code compiled for an instruction set it did not ask for.
#include "engine/cpu/gemm_kernel.h"

namespace attend {
namespace {

#define ATTEND_GEMM_INLINE [[gnu::always_inline]] static inline

// 24 sums, four weights and one broadcast value take 29 of the 32 registers of AVX-512; 12, two and
// one 15 of the 16 of AVX2.
constexpr int kTileRows = 6;
constexpr int64_t kLine = 64;

// First lines of each row of the next tile, fetched before a tile: rows of a large batch do not
// stay in the second-level cache (1 to 2 % of 1024 rows of 768; doing so for y gave nothing).
constexpr int kRowLinesAhead = 4;

// With a few tiles of rows memory bounds: a block then stays in the first-level cache from the
// first tile to the last, and leaves the second level to what is fetched ahead (16 KiB blocks gave
// 20 to 30 % at 8 to 16 rows from memory, 32 KiB half of that, and cost 2 % from cache).
constexpr int64_t kMostFewRows = 24;
constexpr int64_t kFewRowsBlockGroups = 64;

struct Block {
  const GemmStrip* strip;
  const std::byte* weights;  // of the block's first group
  const std::byte* ahead;    // what comes after the block, null = nothing
  int64_t first_element;     // of x
  int64_t groups;            // whole ones
  int64_t tail;              // elements in the group after them; 0 = none
  int ahead_lines;           // lines of `ahead` per group of this block
  bool near;                 // the next block has room in the first-level cache
  bool first, last;
};

template <class Unit>
constexpr int64_t kGroupBytes = Unit::kVectors* Unit::kLanes * 4;

// Results of `rows` rows, [rows][kVectors * kLanes], to where they go.
template <class Unit>
[[gnu::noinline]] void StoreRows(const GemmStrip& strip, int64_t row, int rows,
                                 const float* results) {
  for (int r = 0; r < rows; ++r) {
    const OutputRow& y = strip.y[row + r];
    auto* to = static_cast<std::byte*>(y.data) + strip.y_column * DTypeBytes(y.dtype);
    const float* from = results + r * Unit::kVectors * Unit::kLanes;
    int64_t c = 0;
    for (; c + Unit::kLanes <= strip.columns; c += Unit::kLanes) {
      Unit::Store(y.dtype, Unit::Load(from + c), to + c * DTypeBytes(y.dtype));
    }
    for (; c < strip.columns; ++c) StoreFloat(y.dtype, from[c], to, c);
  }
}

// Whole strips of float rows, the common case, go straight to y.
template <class Unit, int kRows, int kUsed>
ATTEND_GEMM_INLINE void WriteTile(const Block& block, int64_t row,
                                  const typename Unit::Sum (&sum)[kRows][kUsed]) {
  const GemmStrip& strip = *block.strip;
  float* to[kRows];
  bool direct = strip.columns == kUsed * Unit::kLanes;
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    const OutputRow& y = strip.y[row + r];
    direct = direct && y.dtype == DType::kF32;
  }
  constexpr int64_t kColumns = Unit::kVectors * Unit::kLanes;
  float results[kRows * kColumns];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    to[r] = direct ? static_cast<float*>(strip.y[row + r].data) + strip.y_column
                   : results + r * kColumns;
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kUsed; ++v) {
      const int64_t column = v * Unit::kLanes;
      Unit::Store(DType::kF32, Unit::Finish(strip, row + r, column, sum[r][v]), to[r] + column);
    }
  }
  if (!direct) StoreRows<Unit>(strip, row, kRows, results);
}

// One group, `element` of its block; x[r][i] belongs to it. A Unit that widens leaves the block's
// weights in the strip's scratch.
template <class Unit, int kRows, int kUsed>
ATTEND_GEMM_INLINE void StepOf(const GemmStrip& strip, const std::byte* weights, int64_t element,
                               const typename Unit::Value* const* x, int64_t i,
                               typename Unit::Sum (&sum)[kRows][kUsed]) {
  if constexpr (requires { Unit::kWidens; }) {
    Unit::template Step<kRows, kUsed>(weights, x, i, sum,
                                      strip.wide + element * Unit::kVectors * Unit::kLanes);
  } else {
    Unit::template Step<kRows, kUsed>(weights, x, i, sum);
  }
}

// kRows rows times the first kUsed vectors of one block, into the sums or, at the last block, to y.
// Meanwhile kLines lines per group are fetched from `ahead`: at few rows memory would else wait
// while a later tile of the same block is computed. Into the first-level cache where blocks are
// small (8 to 12 % at 8 rows); what is far ahead would be gone before its turn.
template <class Unit, int kRows, int kUsed, int kLines>
[[gnu::noinline]] void Tile(const Block& block, int64_t row, const std::byte* ahead) {
  using Value = typename Unit::Value;
  constexpr int64_t kColumns = Unit::kVectors * Unit::kLanes;
  const GemmStrip& strip = *block.strip;
  typename Unit::Sum sum[kRows][kUsed];
  float* sums = strip.sums + row * kColumns;
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kUsed; ++v) {
      sum[r][v] =
          block.first ? Unit::Zero() : Unit::LoadSum(sums + r * kColumns + v * Unit::kLanes);
    }
  }
  const Value* x[kRows];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    x[r] = static_cast<const Value*>(strip.x[row + r]) + block.first_element;
  }
  if (kRows == kTileRows && row + 2 * kRows <= strip.rows) {
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const auto* next = reinterpret_cast<const char*>(
          static_cast<const Value*>(strip.x[row + kRows + r]) + block.first_element);
#pragma GCC unroll 4
      for (int line = 0; line < kRowLinesAhead; ++line) {
        _mm_prefetch(next + kLine * line, _MM_HINT_T0);
      }
    }
  }
  const std::byte* weights = block.weights;
  for (int64_t g = 0; g < block.groups; ++g) {
#pragma GCC unroll 4
    for (int line = 0; line < kLines; ++line) {
      if (block.near) {
        _mm_prefetch(ahead + kLine * line, _MM_HINT_T0);
      } else {
        _mm_prefetch(ahead + kLine * line, _MM_HINT_T1);
      }
    }
    if constexpr (kLines > 0) ahead += kLine * kLines;
    StepOf<Unit>(strip, weights, g * Unit::kGroup, x, g * Unit::kGroup, sum);
    weights += kGroupBytes<Unit>;
  }
  if (block.tail > 0) {  // a row may end where memory ends
    Value last[kRows][Unit::kGroup] = {};
    const Value* from[kRows];
    for (int r = 0; r < kRows; ++r) {
      for (int64_t i = 0; i < block.tail; ++i) last[r][i] = x[r][block.groups * Unit::kGroup + i];
      from[r] = last[r];
    }
    StepOf<Unit>(strip, weights, block.groups * Unit::kGroup, from, 0, sum);
  }
  if (block.last) return WriteTile<Unit, kRows, kUsed>(block, row, sum);
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kUsed; ++v) {
      Unit::StoreSum(sum[r][v], sums + r * kColumns + v * Unit::kLanes);
    }
  }
}

template <class Unit, int kUsed, int kLines, int kRows = kTileRows>
ATTEND_GEMM_INLINE void TileOf(int64_t rows, const Block& block, int64_t row,
                               const std::byte* ahead) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return Tile<Unit, kRows, kUsed, kLines>(block, row, ahead);
    TileOf<Unit, kUsed, kLines, kRows - 1>(rows, block, row, ahead);
  }
}

// A matrix's last strip may have fewer vectors than others.
template <class Unit, int kUsed = Unit::kVectors - 1>
ATTEND_GEMM_INLINE void NarrowTileOf(int64_t vectors, int64_t rows, const Block& block,
                                     int64_t row) {
  if constexpr (kUsed > 0) {
    if (vectors == kUsed) return TileOf<Unit, kUsed, 0>(rows, block, row, nullptr);
    NarrowTileOf<Unit, kUsed - 1>(vectors, rows, block, row);
  }
}

// Rows from `row` on times one block. Rows are dealt evenly to tiles (8 as 4 + 4, not 6 + 2, whose
// second tile would wait for its own sums), and what is fetched ahead to the first tiles.
template <class Unit>
void RunBlock(const Block& block, int64_t row = 0) {
  constexpr int kAll = Unit::kVectors;
  const int64_t rows = block.strip->rows;
  const int64_t vectors = (block.strip->columns + Unit::kLanes - 1) / Unit::kLanes;
  const int64_t tiles = (rows - row + kTileRows - 1) / kTileRows;
  const int lines_per_tile = static_cast<int>((block.ahead_lines + tiles - 1) / tiles);
  int lines = block.ahead == nullptr ? 0 : block.ahead_lines;
  const std::byte* ahead = block.ahead;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t count = (rows - row + tiles - tile - 1) / (tiles - tile);
    if (vectors < kAll) {
      NarrowTileOf<Unit>(vectors, count, block, row);
    } else if (lines == 0) {
      TileOf<Unit, kAll, 0>(count, block, row, nullptr);
    } else {
      if (lines_per_tile == 1) TileOf<Unit, kAll, 1>(count, block, row, ahead);
      if (lines_per_tile == 2) TileOf<Unit, kAll, 2>(count, block, row, ahead);
      if (lines_per_tile == 4) TileOf<Unit, kAll, 4>(count, block, row, ahead);
      lines -= lines_per_tile;
      ahead += lines_per_tile * block.groups * kLine;
    }
    row += count;
  }
}

// Block after block of a strip as the Unit packs it: run(block).
template <class Unit, class Run>
ATTEND_GEMM_INLINE void ForBlocks(const GemmStrip& strip, const Run& run) {
  const int64_t whole = strip.inner / Unit::kGroup;
  const int64_t groups = (strip.inner + Unit::kGroup - 1) / Unit::kGroup;
  const bool few = strip.rows > kTileRows && strip.rows <= kMostFewRows;
  const int64_t most = few ? kFewRowsBlockGroups : kGemmBlockGroups;
  for (int64_t begin = 0; begin < groups; begin += most) {
    const int64_t end = begin + most < groups ? begin + most : groups;
    const Block block{
        .strip = &strip,
        .weights = strip.weights + begin * kGroupBytes<Unit>,
        .ahead = end < groups ? strip.weights + end * kGroupBytes<Unit> : strip.next,
        .first_element = begin * Unit::kGroup,
        .groups = (end < whole ? end : whole) - begin,
        .tail = end > whole ? strip.inner % Unit::kGroup : 0,
        .ahead_lines = static_cast<int>(kGroupBytes<Unit> / kLine),
        .near = few,
        .first = begin == 0,
        .last = end == groups,
    };
    run(block);
  }
}

// Above it the first tile of a block leaves its widened weights to the others (a pass of its own
// for it took half a tile's time). In registers it costs each tile a sixth where the shift shares a
// port with the multiplications, and a third where registers are few (AVX2).
constexpr int64_t kMaxRowsWidenedInRegisters = 24;

// BF16 weights, pairs of them, times floats: in registers (Pairs) for few rows; for many by the
// first tile of a block (Widening), which leaves floats for the others (Floats).
template <class Pairs, class Widening, class Floats>
void RunWidened(const GemmStrip& strip) {
  if (strip.rows <= kMaxRowsWidenedInRegisters) {
    return ForBlocks<Pairs>(strip, [](const Block& block) { RunBlock<Pairs>(block); });
  }
  ForBlocks<Pairs>(strip, [&](Block block) {
    const int64_t vectors = (strip.columns + Pairs::kLanes - 1) / Pairs::kLanes;
    if (vectors == Pairs::kVectors) {
      Tile<Widening, kTileRows, Pairs::kVectors, 0>(block, 0, nullptr);
    } else {
      NarrowTileOf<Widening>(vectors, kTileRows, block, 0);
    }
    block.weights = reinterpret_cast<const std::byte*>(strip.wide);
    block.groups = 2 * block.groups + block.tail;
    block.tail = 0;
    block.ahead_lines /= 2;  // twice the groups for the same bytes
    RunBlock<Floats>(block, kTileRows);
  });
}

template <class Unit>
void RunStrip(const GemmStrip& strip) {
  ForBlocks<Unit>(strip, [](const Block& block) { RunBlock<Unit>(block); });
}

}  // namespace
}  // namespace attend
