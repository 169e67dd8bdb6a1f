// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/head_transform.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/cpu/head_transform.cc"
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
using Doubles = hn::ScalableTag<double>;
using DoubleVector = hn::Vec<Doubles>;
using Floats = hn::ScalableTag<float>;

// A polynomial of r^2 from its coefficients, highest first.
template <size_t kTerms>
HWY_INLINE DoubleVector Polynomial(DoubleVector square, const double (&coefficients)[kTerms]) {
  const Doubles d;
  DoubleVector sum = hn::Set(d, coefficients[0]);
  for (size_t i = 1; i < kTerms; ++i) {
    sum = hn::MulAdd(sum, square, hn::Set(d, coefficients[i]));
  }
  return sum;
}

// Sines and cosines of angles below 2^50, to some 3e-16: reduced to [-pi/4, pi/4] with pi/2 in two
// parts, then the Taylor series, whose next terms are below 1e-16 there.
HWY_INLINE void SinCos(DoubleVector angle, DoubleVector& sine, DoubleVector& cosine) {
  static constexpr double kSine[] = {
      -1.0 / 1307674368000, 1.0 / 6227020800, -1.0 / 39916800, 1.0 / 362880,
      -1.0 / 5040,          1.0 / 120,        -1.0 / 6};
  static constexpr double kCosine[] = {
      1.0 / 20922789888000, -1.0 / 87178291200, 1.0 / 479001600, -1.0 / 3628800,
      1.0 / 40320,          -1.0 / 720,         1.0 / 24,        -1.0 / 2};
  const Doubles d;
  const hn::Rebind<int64_t, Doubles> di;
  // Adding 1.5 x 2^52 rounds to an integer that the sum's low bits then hold.
  const DoubleVector magic = hn::Set(d, 0x1.8p52);
  const DoubleVector shifted = hn::MulAdd(angle, hn::Set(d, 0.6366197723675814), magic);
  const DoubleVector quarters = hn::Sub(shifted, magic);
  DoubleVector r = hn::NegMulAdd(quarters, hn::Set(d, 1.5707963267948966), angle);
  r = hn::NegMulAdd(quarters, hn::Set(d, 6.123233995736766e-17), r);
  const DoubleVector square = hn::Mul(r, r);
  const DoubleVector s = hn::MulAdd(hn::Mul(r, square), Polynomial(square, kSine), r);
  const DoubleVector c = hn::MulAdd(square, Polynomial(square, kCosine), hn::Set(d, 1.0));

  const auto turns = hn::BitCast(di, shifted);
  const auto one = hn::Set(di, 1);
  const auto odd = hn::RebindMask(d, hn::Eq(hn::And(turns, one), one));
  // Bit 1 of the number of quarter turns is the sine's sign, that of the number plus one the
  // cosine's.
  const auto two = hn::Set(di, 2);
  const auto sine_sign = hn::ShiftLeft<62>(hn::And(turns, two));
  const auto cosine_sign = hn::ShiftLeft<62>(hn::And(hn::Add(turns, one), two));
  sine = hn::Xor(hn::IfThenElse(odd, c, s), hn::BitCast(d, sine_sign));
  cosine = hn::Xor(hn::IfThenElse(odd, s, c), hn::BitCast(d, cosine_sign));
}

HWY_NOINLINE void Angles(const RopeSpec& rope, int64_t position, RopeAngles& angles) {
  const Doubles d;
  const hn::Rebind<float, Doubles> df;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const int pairs = rope.dim / 2;
  const DoubleVector where = hn::Set(d, static_cast<double>(position));
  const DoubleVector factor = hn::Set(d, rope.attention_factor);
  for (int i = 0; i < pairs; i += lanes) {
    HWY_ALIGN double frequencies[hn::MaxLanes(Doubles())] = {};
    const int count = std::min(lanes, pairs - i);
    std::copy_n(rope.inverse_frequency.data() + i, count, frequencies);
    DoubleVector sine, cosine;
    SinCos(hn::Mul(where, hn::Load(d, frequencies)), sine, cosine);
    // Whole vectors: the arrays hold kMaxHeadDim / 2.
    hn::StoreU(hn::DemoteTo(df, hn::Mul(cosine, factor)), df, angles.cosine + i);
    hn::StoreU(hn::DemoteTo(df, hn::Mul(sine, factor)), df, angles.sine + i);
  }
}

// Explicit fused multiply-adds leave the compiler nothing to contract, so that the last pairs have
// the bits they would have in a vector.
HWY_NOINLINE void Rotate(const RopeSpec& rope, const RopeAngles& angles, float* head) {
  const Floats d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const int pairs = rope.dim / 2;
  const bool half = rope.pairing == RopePairing::kHalf;
  int i = 0;
  for (; i + lanes <= pairs; i += lanes) {
    const auto cosine = hn::LoadU(d, angles.cosine + i);
    const auto sine = hn::LoadU(d, angles.sine + i);
    hn::Vec<Floats> x, y;
    if (half) {
      x = hn::LoadU(d, head + i);
      y = hn::LoadU(d, head + pairs + i);
    } else {
      hn::LoadInterleaved2(d, head + 2 * i, x, y);
    }
    const auto first = hn::MulSub(x, cosine, hn::Mul(y, sine));
    const auto second = hn::MulAdd(y, cosine, hn::Mul(x, sine));
    if (half) {
      hn::StoreU(first, d, head + i);
      hn::StoreU(second, d, head + pairs + i);
    } else {
      hn::StoreInterleaved2(first, second, d, head + 2 * i);
    }
  }
  for (; i < pairs; ++i) {
    float* first = half ? head + i : head + 2 * i;
    float* second = half ? head + pairs + i : head + 2 * i + 1;
    const float x = *first;
    const float y = *second;
    *first = std::fma(x, angles.cosine[i], -(y * angles.sine[i]));
    *second = std::fma(y, angles.cosine[i], x * angles.sine[i]);
  }
}

HWY_NOINLINE void Normalise(const float* weight, float eps, int dim, float* head) {
  // Eight partial sums, element i in sum i % 8: products of floats are exact in double.
  const hn::CappedTag<double, 4> d;
  const hn::Rebind<float, decltype(d)> half;
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  int i = 0;
  for (; i + 8 <= dim; i += 8) {
    const auto x0 = hn::PromoteTo(d, hn::LoadU(half, head + i));
    const auto x1 = hn::PromoteTo(d, hn::LoadU(half, head + i + 4));
    sum0 = hn::MulAdd(x0, x0, sum0);
    sum1 = hn::MulAdd(x1, x1, sum1);
  }
  HWY_ALIGN double sums[8];
  hn::Store(sum0, d, sums);
  hn::Store(sum1, d, sums + 4);
  for (; i < dim; ++i) sums[i % 8] += double{head[i]} * head[i];
  double sum = 0;
  for (double part : sums) sum += part;

  const float factor = static_cast<float>(1.0 / std::sqrt(sum / dim + eps));
  const Floats df;
  const int lanes = static_cast<int>(hn::Lanes(df));
  for (i = 0; i + lanes <= dim; i += lanes) {
    auto value = hn::Mul(hn::LoadU(df, head + i), hn::Set(df, factor));
    if (weight != nullptr) value = hn::Mul(value, hn::LoadU(df, weight + i));
    hn::StoreU(value, df, head + i);
  }
  for (; i < dim; ++i)
    head[i] = weight == nullptr ? head[i] * factor : head[i] * factor * weight[i];
}

}  // namespace HWY_NAMESPACE
}  // namespace attend
HWY_AFTER_NAMESPACE();
#endif  // HWY_AVX2 or HWY_AVX3

#if HWY_ONCE
namespace attend {

void ComputeRopeAngles(CpuIsa isa, const RopeSpec& rope, int64_t position, RopeAngles& angles) {
  (isa == CpuIsa::kAvx512 ? N_AVX3::Angles : N_AVX2::Angles)(rope, position, angles);
}

void RotateHead(CpuIsa isa, const RopeSpec& rope, const RopeAngles& angles, float* head) {
  (isa == CpuIsa::kAvx512 ? N_AVX3::Rotate : N_AVX2::Rotate)(rope, angles, head);
}

void NormaliseHead(CpuIsa isa, const float* weight, float eps, int dim, float* head) {
  (isa == CpuIsa::kAvx512 ? N_AVX3::Normalise : N_AVX2::Normalise)(weight, eps, dim, head);
}

void Clip(float limit, float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = values[i];
    values[i] = value > limit ? limit : value < -limit ? -limit : value;
  }
}

}  // namespace attend
#endif  // HWY_ONCE
