// SPDX-License-Identifier: Apache-2.0
//
// Vector arithmetic of the attention stage, compiled once per instruction set: exp, tanh, and the
// register tile of both products (scores = Q K^T, output += P V), in fp32 or bf16 dot products.
// Included by attention_tile.cc, its parts and kv_append.cc only. Every sum runs over one fixed
// ascending index per output element, so an element's bits do not depend on the shape of its tile.
// Each multiply that feeds an addition is an explicit fused one, leaving the compiler nothing to
// contract.
#if defined(ATTEND_VECTOR_KERNELS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTEND_VECTOR_KERNELS_INL_H
#undef ATTEND_VECTOR_KERNELS_INL_H
#else
#define ATTEND_VECTOR_KERNELS_INL_H
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "engine/cpu/prefetch.h"
#include "engine/util/dtype.h"
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
constexpr bool kHasDot = HWY_TARGET == HWY_AVX3;    // instructions that the caller has to check
constexpr int kTileVectors = kLanes == 16 ? 4 : 2;  // 24 accumulators of 32, 12 of 16 registers

// exp(x) for x <= 0: exactly 1 at 0, exactly 0 below -87 and at -inf, NaN for NaN. 2^r on [-1/2,
// 1/2] by a polynomial: of degree 6, fitted to 2e-9, where rounding brings the relative error near
// 1e-7, or of degree 4, fitted to 3e-6, for results that are rounded to bf16 (4e-3).
template <bool kForBF16 = false>
HWY_INLINE V ExpNonPositive(V x) {
  const D d;
  const hn::Rebind<int32_t, D> di;
  const V log2e = hn::Set(d, 1.44269504f);
  // Adding 1.5 x 2^23 rounds to an integer that the sum's low bits then hold, with the 127 added
  // too, as a float's exponent bits.
  const V magic = hn::Set(d, 12582912.0f + 127.0f);
  const V shifted = hn::MulAdd(x, log2e, magic);
  const V r = hn::MulSub(x, log2e, hn::Sub(shifted, magic));
  V p;
  if constexpr (kForBF16) {
    p = hn::Set(d, 0.009582852944731712f);
    p = hn::MulAdd(p, r, hn::Set(d, 0.055906426161527634f));
    p = hn::MulAdd(p, r, hn::Set(d, 0.24024099111557007f));
    p = hn::MulAdd(p, r, hn::Set(d, 0.6931241750717163f));
  } else {
    p = hn::Set(d, 0.0001535335904918611f);
    p = hn::MulAdd(p, r, hn::Set(d, 0.0013398875016719103f));
    p = hn::MulAdd(p, r, hn::Set(d, 0.00961843691766262f));
    p = hn::MulAdd(p, r, hn::Set(d, 0.055503323674201965f));
    p = hn::MulAdd(p, r, hn::Set(d, 0.24022647738456726f));
    p = hn::MulAdd(p, r, hn::Set(d, 0.6931471824645996f));
  }
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  // A product, not an addition to p's exponent bits: it keeps NaN.
  const V power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, shifted)));
  const V least = hn::Set(d, -87.0f);
#if HWY_TARGET == HWY_AVX3
  const auto counts = _mm512_cmp_ps_mask(x.raw, least.raw, _CMP_NLT_UQ);
  return V{_mm512_maskz_mul_ps(counts, p.raw, power.raw)};
#else
  return hn::IfThenZeroElse(hn::Lt(x, least), hn::Mul(p, power));
#endif
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

// What both factors of a product hold in a 32-bit unit. Floats and split pairs give the same bits.
enum class Units : uint8_t {
  kFloats,  // a float each
  kSplit,   // B: a pair of bf16 numbers, multiplied one after the other by the two floats of A
  kDot,     // a pair of bf16 numbers each, for one instruction
};
constexpr bool HoldsPairs(Units units) { return units != Units::kFloats; }

using U = hn::RebindToUnsigned<D>;
constexpr uint32_t kHighHalf = 0xffff0000;

// The two bf16 numbers of every unit as floats.
HWY_INLINE V LowOf(V units) { return hn::BitCast(D(), hn::ShiftLeft<16>(hn::BitCast(U(), units))); }
HWY_INLINE V HighOf(V units) {
  return hn::BitCast(D(), hn::And(hn::BitCast(U(), units), hn::Set(U(), kHighHalf)));
}

// acc + a b. With kDot every unit holds a pair of bf16 numbers, and both products are added.
// Assembler, because Highway's function attributes lack AVX512_BF16, and a file compiled with it
// could leak its instructions into inline functions shared with other files.
template <bool kDot>
HWY_INLINE V MultiplyAdd(V a, V b, V acc) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (kDot) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc.raw) : "v"(a.raw), "v"(b.raw));
    return acc;
  }
#endif
  static_assert(!kDot || kHasDot);
  return hn::MulAdd(a, b, acc);
}

// One matrix product A B with few rows: A [rows, steps], B [steps, columns], C [rows, columns].
// Strides are in 32-bit units; with Units::kSplit a step takes two floats of A. Meanwhile what is
// read next, `next`, is fetched into the first-level cache in the order of memory, as many bytes in
// each step as the step reads. (One matrix ahead: two ahead, into the second level, left decoding 8
// to 14 % slower; fetching during the exponentials too changed nothing.)
struct Factors {
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride;
  int64_t steps;
  std::span<const std::byte> next;
};

// c[r][n] = (kOld ? c[r][n] * scale[r] : 0) + sum over i of a[r][i] * b[i][n], i ascending.
template <Units kUnits, bool kOld, int kRows, int kVectors>
HWY_NOINLINE void ProductTile(const Factors& factors, const float* HWY_RESTRICT scale,
                              float* HWY_RESTRICT c, int64_t c_stride) {
  const D d;
  const float* HWY_RESTRICT a = factors.a;
  const float* HWY_RESTRICT b = factors.b;
  const int64_t a_stride = factors.a_stride;
  const int64_t b_stride = factors.b_stride;
  const int64_t steps = factors.steps;
  V acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) {
      if constexpr (kOld) {
        acc[r][n] = hn::Mul(hn::LoadU(d, c + r * c_stride + n * kLanes), hn::Set(d, scale[r]));
      } else {
        acc[r][n] = hn::Zero(d);
      }
    }
  }
  // Not in two loops, one with fetching and one without: 5 % slower with one row.
  constexpr int64_t kStepBytes = kVectors * kLanes * sizeof(float);
  const std::byte* next = factors.next.data();
  const auto next_bytes = static_cast<int64_t>(factors.next.size());
  const int64_t fetching_steps = (next_bytes + kStepBytes - 1) / kStepBytes;
  for (int64_t i = 0; i < steps; ++i) {
    V column[kVectors];
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) column[n] = hn::LoadU(d, b + i * b_stride + n * kLanes);
    if (i < fetching_steps) {
      FetchRow<false>(next, kStepBytes);
      next += kStepBytes;
    }
    if constexpr (kUnits == Units::kSplit) {
      V half[kVectors];
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) half[n] = LowOf(column[n]);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const V row = hn::Set(d, a[r * a_stride + 2 * i]);
#pragma GCC unroll 8
        for (int n = 0; n < kVectors; ++n) acc[r][n] = hn::MulAdd(row, half[n], acc[r][n]);
      }
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) half[n] = HighOf(column[n]);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const V row = hn::Set(d, a[r * a_stride + 2 * i + 1]);
#pragma GCC unroll 8
        for (int n = 0; n < kVectors; ++n) acc[r][n] = hn::MulAdd(row, half[n], acc[r][n]);
      }
      continue;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const V row = hn::Set(d, a[r * a_stride + i]);
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) {
        acc[r][n] = MultiplyAdd<kUnits == Units::kDot>(row, column[n], acc[r][n]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) hn::StoreU(acc[r][n], d, c + r * c_stride + n * kLanes);
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

// Calls f(integral_constant units).
template <class F>
HWY_INLINE void WithUnits(Units units, const F& f) {
  if constexpr (kHasDot) {
    if (units == Units::kDot) return f(std::integral_constant<Units, Units::kDot>());
  }
  if (units == Units::kSplit) return f(std::integral_constant<Units, Units::kSplit>());
  f(std::integral_constant<Units, Units::kFloats>());
}

// Calls f(integral_constant vectors, first vector) over `vectors` vectors in wide register tiles.
// No single vector is left over where another cut avoids it: six rows of one vector do not fill
// the multipliers.
template <class F>
HWY_INLINE void WithVectors(int vectors, const F& f) {
  int n = 0;
  if constexpr (kTileVectors == 4) {
    for (; vectors - n == 4 || vectors - n >= 6; n += 4) f(std::integral_constant<int, 4>(), n);
    if (vectors - n >= 3) {
      f(std::integral_constant<int, 3>(), n);
      n += 3;
    }
  }
  for (; vectors - n >= 2; n += 2) f(std::integral_constant<int, 2>(), n);
  if (n < vectors) f(std::integral_constant<int, 1>(), n);
}

// ProductTile over `rows` rows and `vectors` vectors.
template <Units kUnits, bool kOld>
void ProductStrip(int rows, int vectors, const Factors& factors, const float* scale, float* c,
                  int64_t c_stride) {
  WithRows(rows, [&](auto r) {
    WithVectors(vectors, [&](auto n, int first) {
      Factors part = factors;
      part.b += first * kLanes;
      const size_t read = static_cast<size_t>(first * kLanes * factors.steps) * sizeof(float);
      part.next = factors.next.subspan(std::min(read, factors.next.size()));
      ProductTile<kUnits, kOld, decltype(r)::value, decltype(n)::value>(
          part, scale, c + first * kLanes, c_stride);
    });
  });
}

// The first `count` < kLanes elements, then zeros; reads nothing behind them.
HWY_INLINE V LoadFirst(const float* from, int64_t count) {
  return hn::MaskedLoad(hn::FirstN(D(), static_cast<size_t>(count)), D(), from);
}

// x rounded to bf16 as engine/util/dtype.h does, in the upper halves of the lanes.
HWY_INLINE hn::Vec<U> RoundBF16(V x) {
  const U u;
  const auto bits = hn::BitCast(u, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u, 1));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(u, 0x7fff)), odd);
  const auto quiet = hn::Or(bits, hn::Set(u, 0x400000));
  const auto narrow = hn::IfThenElse(hn::RebindMask(u, hn::IsNaN(x)), quiet, rounded);
  return hn::And(narrow, hn::Set(u, kHighHalf));
}

// Stores x as kLanes elements of F32, F16 or BF16, with the bits of engine/util/dtype.h.
HWY_INLINE void StoreAs(DType dtype, V x, std::byte* to) {
  if (dtype == DType::kF32) return hn::StoreU(x, D(), reinterpret_cast<float*>(to));
  if (dtype == DType::kF16) {
    const hn::Rebind<hwy::float16_t, D> half;
    return hn::StoreU(hn::DemoteTo(half, x), half, reinterpret_cast<hwy::float16_t*>(to));
  }
  const hn::Rebind<uint16_t, D> narrow;
  const hn::Rebind<int32_t, D> whole;
  const auto high = hn::BitCast(whole, hn::ShiftRight<16>(RoundBF16(x)));
  hn::StoreU(hn::DemoteTo(narrow, high), narrow, reinterpret_cast<uint16_t*>(to));
}

// The same of the first `count` lanes, and not a byte more.
HWY_INLINE void StoreFirstAs(DType dtype, V x, int64_t count, std::byte* to) {
  HWY_ALIGN std::byte all[kLanes * sizeof(float)];
  StoreAs(dtype, x, all);
  std::memcpy(to, all, static_cast<size_t>(count * DTypeBytes(dtype)));
}

// Stores x rounded, denormals to 0, to kLanes consecutive bf16 numbers at to[0 .. kLanes / 2).
#if HWY_TARGET == HWY_AVX3
HWY_INLINE void StoreBF16(V x, float* to) {
  __m256i narrow;
  __asm__("vcvtneps2bf16 %1, %0" : "=v"(narrow) : "v"(x.raw));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow);
}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace attend
HWY_AFTER_NAMESPACE();

#endif  // include guard
