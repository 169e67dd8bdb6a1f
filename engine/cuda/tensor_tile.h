// SPDX-License-Identifier: Apache-2.0
//
// What attention on tensor cores has in shared memory, for prefill and decode alike: swizzled
// tiles, the copies that fill them, the lanes' places for ldmatrix, and the rows and blocks of one
// tile of work. What happens in registers is in tensor_fragment.h.
#pragma once

#include <cstdint>

#include "engine/cuda/device.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/score.h"

namespace attend::device {

// ---- Tiles in shared memory ----
// Rows of kWidth elements in chunks of 8 (16 bytes); chunk c of row r is stored at chunk
// c ^ SwizzleKey(r) of its row. Eight rows at one chunk (ldmatrix) and eight neighbouring chunks
// (copies) then fall into different banks for every width that is a multiple of 16.

// Bits of the key: at most the chunks of a row's power of two.
template <int kWidth>
inline constexpr int kSwizzleBits = kWidth / 8 % 8 == 0   ? 7
                                    : kWidth / 8 % 4 == 0 ? 3
                                                          : 1;
template <int kWidth>
ATTEND_DEVICE int SwizzleKey(int row) {
  static_assert(kWidth % 16 == 0);
  constexpr int kBits = kSwizzleBits<kWidth>;
  return (kBits == 7 ? row : kBits == 3 ? row >> 1 : row >> 2) & kBits;
}

// Element offset of a chunk.
template <int kWidth>
ATTEND_DEVICE int ChunkOffset(int row, int chunk) {
  return row * kWidth + (chunk ^ SwizzleKey<kWidth>(row)) * 8;
}

// How kThreads threads share the chunks of kRows rows: chunk `thread`, then every kThreads-th.
// Where a step is whole rows in eights, a thread stays in its column and a step is one constant.
template <int kWidth, int kRows, int kThreads>
struct ChunkShare {
  static constexpr int kChunks = kWidth / 8;
  static constexpr int kSteps = kRows * kChunks / kThreads;
  static constexpr bool kOneColumn = kThreads % (8 * kChunks) == 0;
  static_assert(kRows * kChunks % kThreads == 0);

  ATTEND_DEVICE static int Row(int thread, int step) {
    if constexpr (kOneColumn) return thread / kChunks + step * (kThreads / kChunks);
    return (thread + step * kThreads) / kChunks;
  }
  ATTEND_DEVICE static int Chunk(int thread, int step) {
    if constexpr (kOneColumn) return thread % kChunks;
    return (thread + step * kThreads) % kChunks;
  }
  // Element offset in the tile.
  ATTEND_DEVICE static int Offset(int thread, int step) {
    if constexpr (kOneColumn) {
      return ChunkOffset<kWidth>(thread / kChunks, thread % kChunks) + step * (kThreads * 8);
    }
    return ChunkOffset<kWidth>(Row(thread, step), Chunk(thread, step));
  }
};

// Starts the copy of rows [row_begin, row_begin + kRows) of a head, `row_elements` apart in global
// memory, to the tile at `to`. Rows >= `rows` and chunks past the row are zero: nothing is read
// there. `from` is row 0 of the head and readable.
template <class T, int kWidth, int kRows, int kThreads>
ATTEND_DEVICE void CopyRows(Shared<T> to, Global<const T> from, int row_elements, int row_begin,
                            int rows, int thread) {
  using Share = ChunkShare<kWidth, kRows, kThreads>;
  if (row_elements == kWidth && rows >= row_begin + kRows) {  // constant steps, nothing to decide
    const Global<const T> first = from + (row_begin * kWidth + thread * 8);
#pragma unroll
    for (int step = 0; step < Share::kSteps; ++step) {
      CopyAsync16(to + Share::Offset(thread, step), first + step * (kThreads * 8), true);
    }
    return;
  }
#pragma unroll 1
  for (int step = 0; step < Share::kSteps; ++step) {
    const int row = row_begin + Share::Row(thread, step);
    const int column = Share::Chunk(thread, step) * 8;
    const bool valid = row < rows && column < row_elements;
    CopyAsync16(to + Share::Offset(thread, step), from + (valid ? row * row_elements + column : 0),
                valid);
  }
}

// What a lane passes to ldmatrix: the address of its row and of its chunk among the 16 columns of a
// step. Rows are added in multiples of 8: the swizzle key stays.
template <class T, int kWidth>
class MatrixLane {
 public:
  ATTEND_DEVICE MatrixLane(Shared<T> tile, int row, int chunk)
      : row_(tile + row * kWidth), chunk_(chunk ^ SwizzleKey<kWidth>(row)) {}
  // Columns 16 step and following of rows `rows` further down. Bits above the key's are added, not
  // flipped: constants that become part of the instruction.
  ATTEND_DEVICE Shared<T> At(int rows, int step) const {
    const int flipped = 2 * step & kSwizzleBits<kWidth>;
    return row_ + (chunk_ ^ flipped) * 8 + (rows * kWidth + (2 * step - flipped) * 8);
  }

 private:
  Shared<T> row_;
  int chunk_;
};
// Operand a of a product (rows x columns): queries.
template <class T, int kWidth>
ATTEND_DEVICE MatrixLane<T, kWidth> RowOperand(Shared<T> tile, int lane) {
  return {tile, lane % 16, lane / 16};
}
// Operand b, transposed in memory (columns of b are rows of the tile): keys.
template <class T, int kWidth>
ATTEND_DEVICE MatrixLane<T, kWidth> KeyOperand(Shared<T> tile, int lane) {
  return {tile, lane / 16 * 8 + lane % 8, lane / 8 % 2};
}
// Operand b, as in memory; loaded transposed: values.
template <class T, int kWidth>
ATTEND_DEVICE MatrixLane<T, kWidth> ValueOperand(Shared<T> tile, int lane) {
  return {tile, lane % 16, lane / 16};
}

// ---- Values that are not finite ----
// A weight of 0 doesn't hide an infinite or NaN value from a product. Where some row of a tile
// doesn't see some key, such values are taken out of the tile and added by hand to the rows that
// see them. Weights are the rounded ones: a row gets what the product would have given it alone.

template <class T>
ATTEND_DEVICE bool IsFinite(T value);
template <>
ATTEND_DEVICE bool IsFinite<Bf16>(Bf16 value) {
  return (value.bits & 0x7f80) != 0x7f80;
}
template <>
ATTEND_DEVICE bool IsFinite<F16>(F16 value) {
  return (value.bits & 0x7c00) != 0x7c00;
}

// A word's two elements with those that are not finite replaced by 0.
template <class T>
ATTEND_DEVICE uint32_t FinitePart(uint32_t word) {
  if (!IsFinite(T{static_cast<uint16_t>(word)})) word &= 0xffff0000u;
  if (!IsFinite(T{static_cast<uint16_t>(word >> 16)})) word &= 0x0000ffffu;
  return word;
}

// Looks at the chunks that this thread itself copied with the same arguments to CopyRows; `replace`
// takes out what is not finite. Returns whether it met such values.
template <class T, int kWidth, int kRows, int kThreads>
ATTEND_DEVICE bool VisitNonFinite(Shared<T> tile, int thread, bool replace) {
  using Share = ChunkShare<kWidth, kRows, kThreads>;
  bool found = false;
#pragma unroll 1
  for (int step = 0; step < Share::kSteps; ++step) {
    const Shared<T> at = tile + Share::Offset(thread, step);
    Vector16 chunk = Load16(at);
    bool changed = false;
#pragma unroll
    for (uint32_t& word : chunk.word) {
      const uint32_t finite = FinitePart<T>(word);
      changed = changed || finite != word;
      word = finite;
    }
    if (changed && replace) Store16(at, chunk);
    found = found || changed;
  }
  return found;
}

// ---- Rows and blocks of a tile ----

// Row of q, output and statistics that a tile's output rows count from: head 0 of its first query
// row.
ATTEND_DEVICE int64_t FirstOutputRow(const AttentionParams& params, const ItemShape& item,
                                     const AttentionTile& tile) {
  return (item.row_begin + tile.row_begin / params.group) * params.q_heads;
}

// For each of kRows packed rows: the keys it sees, and its output row from FirstOutputRow. Rows the
// tile doesn't have see nothing and have output row -1.
template <int kRows, int kThreads>
ATTEND_DEVICE void PlaceRows(const AttentionParams& params, const ItemShape& item,
                             const AttentionTile& tile, Shared<KeySpan> spans,
                             Shared<int32_t> output_rows) {
  for (int row = Opaque(ThreadIndex()); row < kRows; row += kThreads) {
    KeySpan span{0, 0};
    int32_t output_row = -1;
    if (row < tile.rows) {
      const PackedRow place(tile.row_begin + row, tile.kv_head, params.group);
      span =
          VisibleSpan(item.first_row + place.query_row, item.keys, item.causal != 0, params.window);
      const auto query_row = static_cast<int32_t>(place.query_row - tile.row_begin / params.group);
      output_row = query_row * params.q_heads + place.head;
    }
    spans[row] = span;
    output_rows[row] = output_row;
  }
}

// What is the same for all rows of a tile. It lies in shared memory: registers are short in the
// main loops. Blocks are counted from the item's first.
struct TileFacts {
  int64_t keys_at;  // bytes from a block to the head's keys
  int64_t values_at;
  int64_t first_query_row;  // of the item; output rows count from its head 0
  int32_t item;
  int32_t first_block;  // of the item, in block_address
  int32_t begin;        // the tile's blocks: [begin, end)
  int32_t end;
  int32_t all_begin;  // every row sees all keys of blocks [all_begin, all_end)
  int32_t all_end;
  int32_t last_keys;  // keys of block end - 1 that some row sees; the others' are all seen by some
  int32_t plain_scores;  // PlainScores
  int32_t may_hide;      // there is a bias
  int32_t tile;          // index in AttentionParams::tiles
};

ATTEND_DEVICE TileFacts FactsOf(const AttentionParams& params, const ItemShape& item,
                                const AttentionTile& tile, int32_t index) {
  const auto span = [&](int64_t packed_row) {
    return VisibleSpan(item.first_row + packed_row / params.group, item.keys, item.causal != 0,
                       params.window);
  };
  const int64_t last_row_begin = span(tile.row_begin + tile.rows - 1).begin;
  const int64_t first_row_end = span(tile.row_begin).end;
  TileFacts facts;
  facts.keys_at = params.shape.KeyOffset(tile.kv_head, 0, item.block_tokens);
  facts.values_at = params.shape.ValueOffset(tile.kv_head, 0, item.block_tokens);
  facts.first_query_row = tile.row_begin / params.group;
  facts.item = tile.item;
  facts.first_block = item.block_begin;
  facts.begin = static_cast<int32_t>(tile.key_begin / kBlockTokens);
  facts.end = static_cast<int32_t>((tile.key_end + kBlockTokens - 1) / kBlockTokens);
  facts.all_begin = static_cast<int32_t>((last_row_begin + kBlockTokens - 1) / kBlockTokens);
  facts.all_end = static_cast<int32_t>(
      (first_row_end < tile.key_end ? first_row_end : tile.key_end) / kBlockTokens);
  facts.last_keys = static_cast<int32_t>(tile.key_end - int64_t{facts.end - 1} * kBlockTokens);
  facts.plain_scores = PlainScores(params, item);
  facts.may_hide = item.bias != nullptr;
  facts.tile = index;
  return facts;
}

}  // namespace attend::device
