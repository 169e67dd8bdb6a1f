// SPDX-License-Identifier: Apache-2.0
//
// Vector arithmetic of the attention tile, compiled once per instruction set: exp, tanh, and the
// two register tiles (scores = Q K^T, output += P V). Included by attention_tile.cc only. Every sum
// runs over one fixed ascending index per output element, so an element's bits do not depend on the
// shape of its tile. Each multiply that feeds an addition is an explicit fused one, leaving the
// compiler nothing to contract.
#if defined(ATTEND_VECTOR_KERNELS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_VECTOR_KERNELS_INL_H
#undef ATTEND_VECTOR_KERNELS_INL_H
#else
#define ATTEND_VECTOR_KERNELS_INL_H
#endif

#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace attend {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr int kLanes = HWY_LANES(float);
constexpr int kStripRows = 6;                       // query rows of a register tile
constexpr int kTileVectors = kLanes == 16 ? 4 : 2;  // 24 accumulators of 32, 12 of 16 registers

// exp(x) for x <= 0: exactly 1 at 0, exactly 0 below -87 and at -inf, NaN for NaN. 2^r on [-1/2,
// 1/2] by a polynomial of degree 6 fitted to 2e-9; rounding brings the relative error near 1e-7.
HWY_INLINE V ExpNonPositive(V x) {
  const D d;
  const hn::Rebind<int32_t, D> di;
  const V log2e = hn::Set(d, 1.44269504f);
  // Adding 1.5 x 2^23 rounds to an integer that the sum's low bits then hold.
  const V magic = hn::Set(d, 12582912.0f);
  const V shifted = hn::MulAdd(x, log2e, magic);
  const V r = hn::MulSub(x, log2e, hn::Sub(shifted, magic));
  V p = hn::Set(d, 0.0001535335904918611f);
  p = hn::MulAdd(p, r, hn::Set(d, 0.0013398875016719103f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.00961843691766262f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.055503323674201965f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.24022647738456726f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.6931471824645996f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  const auto exponent =
      hn::Add(hn::ShiftLeft<23>(hn::BitCast(di, shifted)), hn::Set(di, 0x3f800000));
  // A product, not an addition to p's exponent bits: it keeps NaN.
  const V y = hn::Mul(p, hn::BitCast(d, exponent));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.0f)), y);
}

// tanh(x) without overflow: odd polynomial (5e-9) near 0, (1 - e) / (1 + e) with e = exp(-2|x|)
// beyond.
HWY_INLINE V Tanh(V x) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  const V z = hn::Mul(x, x);
  V p = hn::Set(d, -0.005648307502269745f);
  p = hn::MulAdd(p, z, hn::Set(d, 0.020589817315340042f));
  p = hn::MulAdd(p, z, hn::Set(d, -0.05372512340545654f));
  p = hn::MulAdd(p, z, hn::Set(d, 0.13331274688243866f));
  p = hn::MulAdd(p, z, hn::Set(d, -0.33333274722099304f));
  const V small = hn::MulAdd(hn::Mul(p, z), x, x);
  const V e = ExpNonPositive(hn::Mul(hn::Set(d, -2.0f), hn::Abs(x)));
  const V large = hn::CopySign(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
  return hn::IfThenElse(hn::Lt(hn::Abs(x), hn::Set(d, 0.625f)), small, large);
}

HWY_INLINE V LoadWide(const float* from) { return hn::LoadU(D(), from); }
HWY_INLINE V LoadWide(const hwy::bfloat16_t* from) {
  const D d;
  return hn::PromoteTo(d, hn::LoadU(hn::Rebind<hwy::bfloat16_t, D>(), from));
}
HWY_INLINE V LoadWide(const hwy::float16_t* from) {
  const D d;
  return hn::PromoteTo(d, hn::LoadU(hn::Rebind<hwy::float16_t, D>(), from));
}

// s[r][n] = sum over i of q[r][i] * k[i][n], i ascending; R rows, kVectors vectors of keys.
template <int kRows, int kVectors, class T>
HWY_NOINLINE void ScoreTile(const float* HWY_RESTRICT q, int64_t q_stride, const T* HWY_RESTRICT k,
                            int64_t k_stride, int64_t depth, float* HWY_RESTRICT s,
                            int64_t s_stride) {
  const D d;
  V acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) acc[r][n] = hn::Zero(d);
  }
  for (int64_t i = 0; i < depth; ++i) {
    V key[kVectors];
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) key[n] = LoadWide(k + i * k_stride + n * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const V query = hn::Set(d, q[r * q_stride + i]);
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) acc[r][n] = hn::MulAdd(query, key[n], acc[r][n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) hn::StoreU(acc[r][n], d, s + r * s_stride + n * kLanes);
  }
}

// o[r][n] = o[r][n] * alpha[r] + sum over j of p[r][j] * v[j][n], j ascending.
template <int kRows, int kVectors, class T>
HWY_NOINLINE void ValueTile(const float* HWY_RESTRICT p, int64_t p_stride, const T* HWY_RESTRICT v,
                            int64_t v_stride, int64_t keys, const float* HWY_RESTRICT alpha,
                            float* HWY_RESTRICT o, int64_t o_stride) {
  const D d;
  V acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const V factor = hn::Set(d, alpha[r]);
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) {
      acc[r][n] = hn::Mul(hn::LoadU(d, o + r * o_stride + n * kLanes), factor);
    }
  }
  for (int64_t j = 0; j < keys; ++j) {
    V value[kVectors];
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) value[n] = LoadWide(v + j * v_stride + n * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const V weight = hn::Set(d, p[r * p_stride + j]);
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) acc[r][n] = hn::MulAdd(weight, value[n], acc[r][n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) hn::StoreU(acc[r][n], d, o + r * o_stride + n * kLanes);
  }
}

// Calls f(integral_constant rows) for a row count of 1..kStripRows known at run time only.
template <class F>
HWY_INLINE void WithRows(int rows, const F& f) {
  switch (rows) {
    case 1:
      return f(std::integral_constant<int, 1>());
    case 2:
      return f(std::integral_constant<int, 2>());
    case 3:
      return f(std::integral_constant<int, 3>());
    case 4:
      return f(std::integral_constant<int, 4>());
    case 5:
      return f(std::integral_constant<int, 5>());
    default:
      return f(std::integral_constant<int, 6>());
  }
}

// Calls f(integral_constant vectors, first vector) over `vectors` vectors in the widest register
// tiles.
template <class F>
HWY_INLINE void WithVectors(int vectors, const F& f) {
  int n = 0;
  for (; n + kTileVectors <= vectors; n += kTileVectors) {
    f(std::integral_constant<int, kTileVectors>(), n);
  }
  if (kTileVectors > 2 && n + 2 <= vectors) {
    f(std::integral_constant<int, 2>(), n);
    n += 2;
  }
  if (n < vectors) f(std::integral_constant<int, 1>(), n);
}

// Scores of `rows` rows against vectors [0, vectors) of keys of a transposed block.
template <class T>
void ScoreStrip(int rows, const float* q, int64_t depth, const T* k, int64_t k_stride, int vectors,
                float* s, int64_t s_stride) {
  WithRows(rows, [&](auto r) {
    WithVectors(vectors, [&](auto n, int first) {
      ScoreTile<decltype(r)::value, decltype(n)::value, T>(q, depth, k + first * kLanes, k_stride,
                                                           depth, s + first * kLanes, s_stride);
    });
  });
}

// Adds weighted values of `keys` keys to `rows` rows of output, `vectors` vectors wide.
template <class T>
void ValueStrip(int rows, const float* p, int64_t p_stride, const T* v, int64_t v_stride,
                int64_t keys, const float* alpha, int vectors, float* o, int64_t o_stride) {
  WithRows(rows, [&](auto r) {
    WithVectors(vectors, [&](auto n, int first) {
      ValueTile<decltype(r)::value, decltype(n)::value, T>(
          p, p_stride, v + first * kLanes, v_stride, keys, alpha, o + first * kLanes, o_stride);
    });
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace attend
HWY_AFTER_NAMESPACE();

#endif  // include guard
