// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/own_gemm.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/cpu/own_gemm.cc"
#include "engine/cpu/simd_targets.h"
// clang-format off: the order matters.
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
namespace attend {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Floats = hn::ScalableTag<float>;

// Accumulators of a tile, two weights and one broadcast fill the 16 registers of AVX2 (6 rows) and
// most of the 32 of AVX-512 (12 rows).
#if HWY_TARGET == HWY_AVX2
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 12;
#endif

HWY_INLINE hn::Vec<Floats> LoadWeights(Floats d, const float* packed) {
  return hn::LoadU(d, packed);
}

HWY_INLINE hn::Vec<Floats> LoadWeights(Floats d, const uint16_t* packed) {
  const hn::Rebind<uint16_t, Floats> half;
  const hn::Rebind<uint32_t, Floats> bits;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(bits, hn::LoadU(half, packed))));
}

struct Strip {
  const float* bias;
  int64_t inner;
  int64_t columns;  // of this strip
  int64_t y_stride;
};

// `kRows` rows of x against one strip.
template <int kRows, class Weight>
HWY_NOINLINE void Tile(const Strip& strip, const Weight* packed, const float* x, float* y) {
  const Floats d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  hn::Vec<Floats> sum[kRows][2];
  for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = hn::Zero(d);
  for (int64_t i = 0; i < strip.inner; ++i) {
    const auto w0 = LoadWeights(d, packed + 2 * lanes * i);
    const auto w1 = LoadWeights(d, packed + 2 * lanes * i + lanes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const auto value = hn::Set(d, x[r * strip.inner + i]);
      sum[r][0] = hn::MulAdd(value, w0, sum[r][0]);
      sum[r][1] = hn::MulAdd(value, w1, sum[r][1]);
    }
  }
  if (strip.columns == 2 * lanes) {
    const auto b0 = hn::LoadU(d, strip.bias);
    const auto b1 = hn::LoadU(d, strip.bias + lanes);
    for (int r = 0; r < kRows; ++r) {
      hn::StoreU(hn::Add(sum[r][0], b0), d, y + r * strip.y_stride);
      hn::StoreU(hn::Add(sum[r][1], b1), d, y + r * strip.y_stride + lanes);
    }
    return;
  }
  HWY_ALIGN float row[2 * hn::MaxLanes(Floats())];
  for (int r = 0; r < kRows; ++r) {
    hn::Store(sum[r][0], d, row);
    hn::Store(sum[r][1], d, row + lanes);
    for (int64_t c = 0; c < strip.columns; ++c) {
      y[r * strip.y_stride + c] = row[c] + strip.bias[c];
    }
  }
}

// The last rows % kTileRows rows.
template <int kRows, class Weight>
HWY_INLINE void LastTile(int64_t rows, const Strip& strip, const Weight* packed, const float* x,
                         float* y) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return Tile<kRows>(strip, packed, x, y);
    LastTile<kRows - 1>(rows, strip, packed, x, y);
  }
}

template <class Weight>
HWY_INLINE void Gemm(const Weight* packed, const float* bias, int64_t inner, int64_t columns,
                     const float* x, int64_t rows, float* y, int64_t y_stride) {
  const int64_t width = 2 * static_cast<int64_t>(hn::Lanes(Floats()));
  for (int64_t column = 0; column < columns; column += width) {
    const Strip strip{bias + column, inner, std::min(width, columns - column), y_stride};
    int64_t row = 0;
    for (; row + kTileRows <= rows; row += kTileRows) {
      Tile<kTileRows>(strip, packed, x + row * inner, y + row * y_stride + column);
    }
    LastTile<kTileRows - 1>(rows - row, strip, packed, x + row * inner,
                            y + row * y_stride + column);
    packed += inner * width;
  }
}

HWY_NOINLINE void GemmOf(DType packed_dtype, const void* packed, const float* bias, int64_t inner,
                         int64_t columns, const float* x, int64_t rows, float* y,
                         int64_t y_stride) {
  if (packed_dtype == DType::kBF16) {
    Gemm(static_cast<const uint16_t*>(packed), bias, inner, columns, x, rows, y, y_stride);
  } else {
    Gemm(static_cast<const float*>(packed), bias, inner, columns, x, rows, y, y_stride);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attend
HWY_AFTER_NAMESPACE();
#endif  // HWY_AVX2 or HWY_AVX3

#if HWY_ONCE
namespace attend {

void OwnGemm(CpuIsa isa, DType packed_dtype, const void* packed, const float* bias, int64_t inner,
             int64_t columns, const float* x, int64_t rows, float* y, int64_t y_stride) {
  (isa == CpuIsa::kAvx512 ? N_AVX3::GemmOf : N_AVX2::GemmOf)(packed_dtype, packed, bias, inner,
                                                             columns, x, rows, y, y_stride);
}

}  // namespace attend
#endif  // HWY_ONCE
