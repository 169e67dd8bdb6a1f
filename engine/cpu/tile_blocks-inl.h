// SPDX-License-Identifier: Apache-2.0
//
// One block of keys and values as the products of a tile read it: in place, or widened to units of
// the tile's arithmetic; and the copies without hidden values. Compiled once per instruction set;
// included by attention_tile.cc only.
#if defined(ATTEND_TILE_BLOCKS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_TILE_BLOCKS_INL_H
#undef ATTEND_TILE_BLOCKS_INL_H
#else
#define ATTEND_TILE_BLOCKS_INL_H
#endif

#include <algorithm>
#include <optional>

#include "engine/cpu/tile_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attend {
namespace HWY_NAMESPACE {
namespace {

// `begin` and `end` are the slots that any row of the tile sees. Matrices and strides are in units.
struct BlockView {
  int64_t first_key;
  int64_t begin;
  int64_t end;
  const float* keys = nullptr;  // [depth, key_stride]
  int64_t key_stride = 0;
  const float* values = nullptr;  // [tokens, or pairs of tokens; value_stride]
  int64_t value_stride = 0;
  // What is read next, to fetch while the keys or the values are multiplied.
  std::span<const std::byte> fetch_during_keys;
  std::span<const std::byte> fetch_during_values;
  const float* key_scales = nullptr;  // [tokens] or null
  const float* value_scales = nullptr;
  std::optional<bool> finite;  // whether the slots' values are; found out when needed
};

HWY_INLINE V LoadWide(const hwy::float16_t* from) {
  const hn::Rebind<hwy::float16_t, D> half;
  return hn::PromoteTo(D(), hn::LoadU(half, from));
}
HWY_INLINE V LoadWide(const int8_t* from) {
  const hn::Rebind<int32_t, D> whole;
  const hn::Rebind<int8_t, D> narrow;
  return hn::ConvertTo(D(), hn::PromoteTo(whole, hn::LoadU(narrow, from)));
}

// A matrix of a block on its way to units.
struct WideCopy {
  const std::byte* from;  // row 0
  const std::byte* next;  // the same matrix of the next block, to fetch meanwhile; may be null
  int64_t from_stride;    // elements, or pairs of them
  int64_t row_begin;      // of elements
  int64_t row_end;
  int64_t column_begin;  // a multiple of kLanes
  int64_t column_end;
  float* to;
  int64_t to_stride;
};

// Into the second level: the first is full of what is being widened (1 to 2 % of prefill). (Over I8
// keys, fetching during the products instead took decoding half as long again.)
HWY_INLINE void FetchNextRow(const WideCopy& copy, int64_t row, int64_t element_bytes) {
  const int64_t bytes = copy.from_stride * element_bytes;
  if (copy.next != nullptr) {
    FetchRow<false, CacheLevel::kSecond>(copy.next + row * bytes, bytes);
  }
}

// Rows of F16 or I8 to floats.
template <class T>
void WidenRows(const WideCopy& copy) {
  const T* from = reinterpret_cast<const T*>(copy.from);
  for (int64_t i = copy.row_begin; i < copy.row_end; ++i) {
    FetchNextRow(copy, i, sizeof(T));
    for (int64_t n = copy.column_begin; n < copy.column_end; n += kLanes) {
      hn::StoreU(LoadWide(from + i * copy.from_stride + n), D(), copy.to + i * copy.to_stride + n);
    }
  }
}

// Rows of BF16 pairs to floats.
void SplitPairs(const WideCopy& copy) {
  const D d;
  const float* from = reinterpret_cast<const float*>(copy.from);
  for (int64_t i = copy.row_begin / 2; i * 2 < copy.row_end; ++i) {
    FetchNextRow(copy, i, kFloatBytes);
    for (int64_t n = copy.column_begin; n < copy.column_end; n += kLanes) {
      const V units = hn::LoadU(d, from + i * copy.from_stride + n);
      hn::StoreU(LowOf(units), d, copy.to + 2 * i * copy.to_stride + n);
      hn::StoreU(HighOf(units), d, copy.to + (2 * i + 1) * copy.to_stride + n);
    }
  }
}

// Rows of I8 to BF16 pairs, which hold them exactly. A row without a partner gets zeros.
void JoinPairs(const WideCopy& copy, int64_t rows) {
  const U u;
  const int8_t* from = reinterpret_cast<const int8_t*>(copy.from);
  for (int64_t i = copy.row_begin / 2; i * 2 < copy.row_end; ++i) {
    FetchNextRow(copy, 2 * i, 1);
    FetchNextRow(copy, 2 * i + 1, 1);
    const int8_t* row = from + 2 * i * copy.from_stride;
    const bool partner = 2 * i + 1 < rows;
    for (int64_t n = copy.column_begin; n < copy.column_end; n += kLanes) {
      const V low = LoadWide(row + n);
      const V high = partner ? LoadWide(row + copy.from_stride + n) : hn::Zero(D());
      const auto units = hn::Or(hn::ShiftRight<16>(hn::BitCast(u, low)), hn::BitCast(u, high));
      hn::StoreU(hn::BitCast(D(), units), D(), copy.to + i * copy.to_stride + n);
    }
  }
}

void Widen(const TileRun& run, const WideCopy& copy, int64_t rows) {
  const DType dtype = run.tile.layout.geometry.dtype;
  if (run.tile.dot) return JoinPairs(copy, rows);
  if (dtype == DType::kBF16) return SplitPairs(copy);
  if (dtype == DType::kF16) return WidenRows<hwy::float16_t>(copy);
  WidenRows<int8_t>(copy);
}

void WidenKeys(const TileRun& run, const std::byte* from, const std::byte* next, BlockView& view) {
  const int64_t depth = run.tile.layout.geometry.head_dim;
  const WideCopy copy{.from = from,
                      .next = next,
                      .from_stride = run.tile.layout.block_tokens,
                      .row_begin = 0,
                      .row_end = depth,
                      .column_begin = view.begin / kLanes * kLanes,
                      .column_end = view.end,
                      .to = run.wide_keys,
                      .to_stride = kBlockTokens};
  Widen(run, copy, depth);
  view.keys = run.wide_keys;
  view.key_stride = kBlockTokens;
}

void WidenValues(const TileRun& run, const std::byte* from, const std::byte* next,
                 BlockView& view) {
  const WideCopy copy{.from = from,
                      .next = next,
                      .from_stride = run.width,
                      .row_begin = view.begin,
                      .row_end = view.end,
                      .column_begin = 0,
                      .column_end = run.width,
                      .to = run.wide_values,
                      .to_stride = run.o_stride};
  Widen(run, copy, run.tile.layout.block_tokens);
  view.values = run.wide_values;
  view.value_stride = run.o_stride;
}

// A head's part of a block of the item.
struct HeadBlock {
  int64_t index;
  int kv_head;
};

// Keys, and values where asked, of block `index` for the tile's head. Fetches, or says what to
// fetch of, `next`, which is read after it; none when its index is beyond the keys.
BlockView ReadBlock(const TileRun& run, int64_t index, bool with_values, HeadBlock next) {
  const AttentionTile& tile = run.tile;
  const KvBlockLayout& layout = tile.layout;
  const int64_t first_key = index * kBlockTokens;
  BlockView view{.first_key = first_key,
                 .begin = std::max<int64_t>(tile.keys.begin - first_key, 0),
                 .end = std::min<int64_t>(tile.keys.end - first_key, kBlockTokens)};
  const std::byte* block = tile.kv_memory + tile.blocks[index];
  const std::byte* keys = block + layout.KeyOffset(tile.kv_head);
  const std::byte* values = block + layout.ValueOffset(tile.kv_head);
  const std::byte* next_keys = nullptr;
  const std::byte* next_values = nullptr;
  if (next.index * kBlockTokens < tile.keys.end) {
    const std::byte* next_block = tile.kv_memory + tile.blocks[next.index];
    next_keys = next_block + layout.KeyOffset(next.kv_head);
    next_values = next_block + layout.ValueOffset(next.kv_head);
  }
  if (layout.geometry.dtype == DType::kI8) {
    view.key_scales = reinterpret_cast<const float*>(block + layout.KeyScaleOffset(tile.kv_head));
    view.value_scales =
        reinterpret_cast<const float*>(block + layout.ValueScaleOffset(tile.kv_head));
  }
  if (run.direct) {
    view.keys = reinterpret_cast<const float*>(keys);
    view.key_stride = layout.block_tokens;
    view.values = reinterpret_cast<const float*>(values);
    view.value_stride = run.width;
    if (with_values) view.fetch_during_keys = {values, static_cast<size_t>(layout.ValueBytes())};
    if (next_keys != nullptr) {
      view.fetch_during_values = {next_keys, static_cast<size_t>(layout.KeyBytes())};
    }
    return view;
  }
  WidenKeys(run, keys, next_keys, view);
  if (with_values) WidenValues(run, values, next_values, view);
  return view;
}

// Whether all values of the tile's slots are finite, with the partners of the first and last one.
bool ValuesAreFinite(const TileRun& run, BlockView& block) {
  if (block.finite.has_value()) return *block.finite;
  const D d;
  const bool pairs = HoldsPairs(run.units);
  const int64_t first = pairs ? block.begin / 2 : block.begin;
  const int64_t last = pairs ? (block.end + 1) / 2 : block.end;
  V bad = hn::Zero(d);  // x - x is 0 for finite x, else NaN
  for (int64_t i = first; i < last; ++i) {
    const float* row = block.values + i * block.value_stride;
    for (int64_t c = 0; c < run.width; c += kLanes) {
      V x = hn::LoadU(d, row + c);
      if (c + kLanes > run.width) {
        x = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(run.width - c)), x);
      }
      if (pairs) {
        bad = hn::Add(bad, hn::Sub(LowOf(x), LowOf(x)));
        x = HighOf(x);
      }
      bad = hn::Add(bad, hn::Sub(x, x));
    }
  }
  block.finite = hn::AllTrue(d, hn::Eq(bad, hn::Zero(d)));
  return *block.finite;
}

// The block's values with zeros for those that the row does not see.
const float* ValuesSeenBy(const TileRun& run, const BlockView& block, int64_t row, Slots seen) {
  const D d;
  const U u;
  const float* bias_row = BiasRow(run, row);
  const auto sees = [&](int64_t slot) {
    return slot >= seen.begin && slot < seen.end &&
           (bias_row == nullptr ||
            BiasAt(run.tile.item->bias, bias_row, block.first_key + slot) != -kInfinity);
  };
  const bool pairs = HoldsPairs(run.units);
  const int64_t tokens = pairs ? 2 : 1;  // of a unit
  for (int64_t i = block.begin / tokens; i * tokens < block.end; ++i) {
    uint32_t mask = 0;
    if (pairs) {
      mask = (sees(2 * i) ? ~kHighHalf : 0) | (sees(2 * i + 1) ? kHighHalf : 0);
    } else if (sees(i)) {
      mask = ~uint32_t{0};
    }
    for (int64_t c = 0; c < run.width; c += kLanes) {
      const V x = hn::LoadU(d, block.values + i * block.value_stride + c);
      const auto kept = hn::And(hn::BitCast(u, x), hn::Set(u, mask));
      hn::StoreU(hn::BitCast(d, kept), d, run.clean_values + i * run.o_stride + c);
    }
  }
  return run.clean_values;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace attend
HWY_AFTER_NAMESPACE();

#endif  // include guard
