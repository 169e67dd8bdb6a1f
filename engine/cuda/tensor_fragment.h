// SPDX-License-Identifier: Apache-2.0
//
// What attention on tensor cores has in registers, for prefill and decode alike: masks and rules of
// scores, online softmax, products with values, and the way of results to memory. One warp's view:
// which rows and keys a warp has is the kernels' choice.
//
// Fragments: with g = lane / 4, t = lane % 4, scores s[m][n][2 h + e] belong to row 16 m + 8 h + g
// and key 8 n + 2 t + e of the warp's rows and keys; sums o[m][n][2 h + e] to that row and column
// 8 n + 2 t + e.
#pragma once

#include <cstdint>

#include "engine/cuda/device.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/score.h"
#include "engine/cuda/tensor_tile.h"

namespace attend::device {

template <int kRowTiles, int kTiles>
ATTEND_DEVICE void Clear(float (&fragments)[kRowTiles][kTiles][4]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (float& element : fragments[m][n]) element = 0;
    }
  }
}

// ---- Masks and rules ----

// Places of the warp's rows and keys in the item, for elements that need a decision of their own.
struct FragmentPlace {
  Shared<const KeySpan> spans;        // of the warp's rows
  Shared<const int32_t> output_rows;  // of the warp's rows
  Shared<const TileFacts> facts;
  int64_t first_key;  // of the warp's keys
};

// Index of an element in `seen` words: bit 16 h + 2 n + e of word m.
ATTEND_DEVICE int SeenBit(int half, int n, int e) { return 16 * half + 2 * n + e; }

// Scores that the mask hides become -inf; `seen` tells which keys each row sees.
template <int kRowTiles, int kKeyTiles>
ATTEND_DEVICE void HideKeys(const FragmentPlace& place, float (&s)[kRowTiles][kKeyTiles][4],
                            uint32_t (&seen)[kRowTiles]) {
  const int lane = Opaque(ThreadIndex()) % 32;  // rare: nothing of this is kept for the next tile
  const int column = lane % 4 * 2;
  const auto slot = [&](int64_t key) {
    const int64_t relative = key - place.first_key;
    return static_cast<int>(relative < 0 ? 0 : relative > 64 ? 64 : relative) - column;
  };
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    seen[m] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeySpan span = place.spans[16 * m + 8 * half + lane / 4];
      const int begin = slot(span.begin);
      const int end = slot(span.end);
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (8 * n + e >= begin && 8 * n + e < end) {
            seen[m] |= 1u << SeenBit(half, n, e);
          } else {
            s[m][n][2 * half + e] = -kInfinity;
          }
        }
      }
    }
  }
}

// For every row m, half of the lane: f = rule(packed row, the lane's first key), then
// f(score, key - first key) for the keys that the row sees; it returns whether they stay seen.
template <int kRowTiles, int kKeyTiles, class Rule>
ATTEND_DEVICE void ForSeenKeys(const AttentionParams& params, const FragmentPlace& place,
                               float (&s)[kRowTiles][kKeyTiles][4], uint32_t (&seen)[kRowTiles],
                               const Rule& rule) {
  const int lane = Opaque(ThreadIndex()) % 32;
  const int q_heads = Opaque(params.q_heads);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t output_row = place.output_rows[16 * m + 8 * half + lane / 4];
      // Rows that the tile doesn't have see nothing: any row will do.
      const auto f = rule(PackedRow::Of(TileFacts(place.facts[0]).first_query_row,
                                        output_row < 0 ? 0 : output_row, q_heads),
                          place.first_key + lane % 4 * 2);
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32_t bit = 1u << SeenBit(half, n, e);
          if ((seen[m] & bit) == 0) continue;
          if (!f(s[m][n][2 * half + e], 8 * n + e)) seen[m] &= ~bit;
        }
      }
    }
  }
}

// The rules of scores for the keys that rows see; those that bias hides become -inf and unseen. One
// rule and one row at a time, with the item read again for each: registers are short.
template <int kRowTiles, int kKeyTiles>
ATTEND_DEVICE void ApplyRules(const AttentionParams& params, const FragmentPlace& place,
                              float (&s)[kRowTiles][kKeyTiles][4], uint32_t (&seen)[kRowTiles]) {
  const auto item = [&]() -> ItemShape {
    return Global<const ItemShape>(params.items)[Opaque(TileFacts(place.facts[0]).item)];
  };
  const ScoreCap cap(params);
  ForSeenKeys(params, place, s, seen, [&](const PackedRow&, int64_t) {
    return [&](float& score, int) {
      score = cap(score);
      return true;
    };
  });
  if (params.alibi_slopes != nullptr) {
    ForSeenKeys(params, place, s, seen, [&](const PackedRow& row, int64_t first_key) {
      return [alibi = RowAlibi(params, item(), row, first_key)](float& score, int offset) {
        score += alibi(offset);
        return true;
      };
    });
  }
  if (!TileFacts(place.facts[0]).may_hide) return;
  ForSeenKeys(params, place, s, seen, [&](const PackedRow& row, int64_t first_key) {
    return [bias_of = RowBias(item(), row, first_key)](float& score, int offset) {
      const float bias = bias_of(offset);
      score = WithBias(score, bias);
      return bias != -kInfinity;
    };
  });
}

// ---- Online softmax ----

// State of a lane's rows. `sum` covers the lane's own keys until QuadSum.
template <int kRowTiles>
struct RowStates {
  float max[kRowTiles][2];
  float sum[kRowTiles][2];

  ATTEND_DEVICE RowStates() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        max[m][half] = -kInfinity;
        sum[m][half] = 0;
      }
    }
  }
};

// Over the four lanes that share a row.
ATTEND_DEVICE float QuadMax(float x) {
  x = Max(x, ShuffleXor(x, 1));
  return Max(x, ShuffleXor(x, 2));
}
ATTEND_DEVICE float QuadSum(float x) {
  x += ShuffleXor(x, 1);
  return x + ShuffleXor(x, 2);
}

// Scores become weights; the sums `o` of values so far are brought to the new maximum.
template <int kRowTiles, int kKeyTiles, int kColumnTiles>
ATTEND_DEVICE void UpdateRows(float base2, float (&s)[kRowTiles][kKeyTiles][4],
                              RowStates<kRowTiles>& rows, float (&o)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float maximum = rows.max[m][half];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        maximum = Max(maximum, Max(s[m][n][2 * half], s[m][n][2 * half + 1]));
      }
      maximum = QuadMax(maximum);
      const float reference = Reference(maximum);
      const float rescale = Weight(rows.max[m][half], reference, base2);
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& weight = s[m][n][2 * half + e];
          weight = Weight(weight, reference, base2);
          sum += weight;
        }
      }
      rows.max[m][half] = maximum;
      rows.sum[m][half] = rows.sum[m][half] * rescale + sum;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        o[m][n][2 * half] *= rescale;
        o[m][n][2 * half + 1] *= rescale;
      }
    }
  }
}

// Weights as operand a of the product with values: word w of step k holds keys 16 k + 8 (w / 2) and
// following of half w % 2.
template <class T, int kRowTiles, int kKeyTiles>
ATTEND_DEVICE void PackWeights(const float (&s)[kRowTiles][kKeyTiles][4],
                               uint32_t (&p)[kRowTiles][kKeyTiles / 2][4]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      p[m][n / 2][n % 2 * 2] = Pack2<T>(s[m][n][0], s[m][n][1]);
      p[m][n / 2][n % 2 * 2 + 1] = Pack2<T>(s[m][n][2], s[m][n][3]);
    }
  }
}

// ---- Products with values ----

// o += p v over the warp's keys and the columns of steps [0, kWidth / 16).
template <class T, int kWidth, int kRowTiles, int kSteps>
ATTEND_DEVICE void AddValues(const uint32_t (&p)[kRowTiles][kSteps][4], Shared<T> tile, int columns,
                             float (&o)[kRowTiles][kWidth / 8][4]) {
  const auto values = ValueOperand<T, kWidth>(tile, Opaque(ThreadIndex()) % 32);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
      if (kWidth > 128 && n % 4 == 0 && 16 * n >= columns) break;
      uint32_t b[4];
      LoadMatrix4Transposed(b, values.At(16 * k, n));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        MultiplyAccumulate<T>(o[m][2 * n], p[m][k], b[0], b[1]);
        MultiplyAccumulate<T>(o[m][2 * n + 1], p[m][k], b[2], b[3]);
      }
    }
  }
}

// o += p v over the values of the warp's 16 kSteps keys that are not finite.
template <class T, int kWidth, int kRowTiles, int kSteps>
ATTEND_DEVICE void AddNonFinite(const uint32_t (&p)[kRowTiles][kSteps][4],
                                const uint32_t (&seen)[kRowTiles], Shared<T> values,
                                float (&o)[kRowTiles][kWidth / 8][4]) {
  const int lane = Opaque(ThreadIndex()) % 32;
#pragma unroll 1
  for (int key = 0; key < 16 * kSteps; ++key) {
    const int owner = lane / 4 * 4 + key % 8 / 2;  // lane with the weights of my rows for this key
    float weight[kRowTiles][2];
    bool sees[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const uint32_t bits = FloatAsWord(Shuffle(WordAsFloat(seen[m]), owner));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t word = 0;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          word |= key / 8 == 2 * k ? p[m][k][half] : 0;
          word |= key / 8 == 2 * k + 1 ? p[m][k][2 + half] : 0;
        }
        word = FloatAsWord(Shuffle(WordAsFloat(word), owner));
        weight[m][half] = ToFloat(T{static_cast<uint16_t>(key & 1 ? word >> 16 : word)});
        sees[m][half] = (bits >> SeenBit(half, key / 8, key & 1) & 1) != 0;
      }
    }
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const T value = values[ChunkOffset<kWidth>(key, n) + lane % 4 * 2 + e];
        if (IsFinite(value)) continue;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (sees[m][half]) o[m][n][2 * half + e] += weight[m][half] * ToFloat(value);
          }
        }
      }
    }
  }
}

// ---- Results ----

// Lane t of a quad has columns 8 j + 2 t, 8 j + 2 t + 1 of a row in x[j]; after it, columns 8 t + 2
// j and 8 t + 2 j + 1: a transposition of pairs among the four lanes.
ATTEND_DEVICE void TransposeQuad(float (&x)[4][2], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & bit) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float got = ShuffleXor(upper ? x[j][e] : x[j | bit][e], bit);
        x[j][e] = upper ? got : x[j][e];
        x[j | bit][e] = upper ? x[j | bit][e] : got;
      }
    }
  }
}

template <class T>
ATTEND_DEVICE Vector16 PackEight(const float (&x)[8]) {
  return {{Pack2<T>(x[0], x[1]), Pack2<T>(x[2], x[3]), Pack2<T>(x[4], x[5]), Pack2<T>(x[6], x[7])}};
}
ATTEND_DEVICE Vector16 FourFloats(const float (&x)[8], int first) {
  return {{FloatAsWord(x[first]), FloatAsWord(x[first + 1]), FloatAsWord(x[first + 2]),
           FloatAsWord(x[first + 3])}};
}

// Columns [column, column + 8) of a row of `columns` elements; those past the row are dropped.
template <class T>
ATTEND_DEVICE void StoreEight(Global<T> row, int column, int columns, const float (&x)[8]) {
  if (column + 8 <= columns && reinterpret_cast<uintptr_t>((row + column).data()) % 16 == 0) {
    if constexpr (sizeof(T) == 4) {
      Store16(row + column, FourFloats(x, 0));
      Store16(row + (column + 4), FourFloats(x, 4));
    } else {
      Store16(row + column, PackEight<T>(x));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i < columns) row[column + i] = FromFloat<T>(x[i]);
  }
}
ATTEND_DEVICE void StoreEightAs(void* matrix, DType dtype, int64_t row, int column, int columns,
                                const float (&x)[8]) {
  const int64_t first = row * columns;
  if (dtype == DType::kF32) {
    StoreEight(Global(static_cast<float*>(matrix)) + first, column, columns, x);
  } else if (dtype == DType::kBF16) {
    StoreEight(Global(static_cast<Bf16*>(matrix)) + first, column, columns, x);
  } else {
    StoreEight(Global(static_cast<F16*>(matrix)) + first, column, columns, x);
  }
}

// Columns 8 (n + lane % 4) and following of the lane's row of half `half`, times `factor`, from
// fragments n .. n + 3; those past kColumnTiles are 0.
template <int kColumnTiles>
ATTEND_DEVICE void GatherEight(const float (&o)[kColumnTiles][4], int n, int half, float factor,
                               int lane, float (&eight)[8]) {
  float x[4][2];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      x[j][e] = n + j < kColumnTiles ? o[n + j][2 * half + e] * factor : 0.0f;
    }
  }
  TransposeQuad(x, lane);
#pragma unroll
  for (int i = 0; i < 8; ++i) eight[i] = x[i / 2][i % 2];
}

// Where a tile's rows go: final ones with sinks, divided by their sum; partial ones as they are.
class RowWriter {
 public:
  ATTEND_DEVICE RowWriter(const AttentionParams& params, const AttentionTile& tile,
                          int64_t first_output_row)
      : params_(params),
        final_(tile.partial < 0),
        first_row_(final_ ? first_output_row : tile.partial) {}

  // Returns the factor of the row's weighted sums. `row` counts from the tile's first; `state` is
  // in base e.
  ATTEND_DEVICE float Statistics(int row, int32_t output_row, const RowStatistics& state,
                                 bool write) const {
    if (!final_) {
      if (write) Global<RowStatistics>(params_.partial_statistics)[first_row_ + row] = state;
      return 1.0f;
    }
    const FinishedRow finished = FinishRow(state, SinkOf(params_, output_row % params_.q_heads));
    if (write)
      Global<RowStatistics>(params_.statistics)[first_row_ + output_row] = finished.statistics;
    return finished.factor;
  }

  ATTEND_DEVICE void Columns(int row, int32_t output_row, int column, const float (&x)[8]) const {
    StoreEightAs(final_ ? params_.output : params_.partial_output,
                 final_ ? params_.output_dtype : DType::kF32,
                 first_row_ + (final_ ? output_row : row), column, params_.shape.v_head_dim, x);
  }

 private:
  const AttentionParams& params_;
  bool final_;
  int64_t first_row_;
};

}  // namespace attend::device
