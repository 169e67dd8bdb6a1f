// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/row_convert.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/cpu/row_convert.cc"
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

template <class D>
HWY_INLINE hn::Vec<D> WidenBF16(D d, const uint16_t* from) {
  const hn::Rebind<uint16_t, D> half;
  const hn::Rebind<uint32_t, D> bits;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(bits, hn::LoadU(half, from))));
}

template <class D>
HWY_INLINE hn::Vec<D> WidenF16(D d, const uint16_t* from) {
  const hn::Rebind<uint16_t, D> half;
  const hn::Rebind<hwy::float16_t, D> f16;
  return hn::PromoteTo(d, hn::BitCast(f16, hn::LoadU(half, from)));
}

template <class D>
HWY_INLINE void NarrowBF16(D /*d*/, hn::Vec<D> value, uint16_t* to) {
  const hn::Rebind<uint16_t, D> half;
  const hn::Rebind<uint32_t, D> unsigned_bits;
  const hn::Rebind<int32_t, D> signed_bits;
  const auto bits = hn::BitCast(unsigned_bits, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(unsigned_bits, 1));
  const auto rounded =
      hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(unsigned_bits, 0x7fff)), odd));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(unsigned_bits, 0x40));
  const auto is_nan = hn::RebindMask(unsigned_bits, hn::IsNaN(value));
  const auto narrow = hn::BitCast(signed_bits, hn::IfThenElse(is_nan, quiet, rounded));
  hn::StoreU(hn::DemoteTo(half, narrow), half, to);
}

template <class D>
HWY_INLINE void NarrowF16(D /*d*/, hn::Vec<D> value, uint16_t* to) {
  const hn::Rebind<uint16_t, D> half;
  const hn::Rebind<hwy::float16_t, D> f16;
  hn::StoreU(hn::BitCast(half, hn::DemoteTo(f16, value)), half, to);
}

// One of the two dtypes is F32, the other F16 or BF16. Returns how many elements were done.
HWY_NOINLINE int64_t ConvertVectors(DType from_dtype, const void* from, DType to_dtype, void* to,
                                    int64_t count) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t end = count / lanes * lanes;
  const auto* half_from = static_cast<const uint16_t*>(from);
  const auto* float_from = static_cast<const float*>(from);
  auto* half_to = static_cast<uint16_t*>(to);
  auto* float_to = static_cast<float*>(to);
  if (from_dtype == DType::kBF16) {
    for (int64_t i = 0; i < end; i += lanes)
      hn::StoreU(WidenBF16(d, half_from + i), d, float_to + i);
  } else if (from_dtype == DType::kF16) {
    for (int64_t i = 0; i < end; i += lanes)
      hn::StoreU(WidenF16(d, half_from + i), d, float_to + i);
  } else if (to_dtype == DType::kBF16) {
    for (int64_t i = 0; i < end; i += lanes)
      NarrowBF16(d, hn::LoadU(d, float_from + i), half_to + i);
  } else {
    for (int64_t i = 0; i < end; i += lanes)
      NarrowF16(d, hn::LoadU(d, float_from + i), half_to + i);
  }
  return end;
}

// Largest of |x| as its bits, which are ordered as magnitudes are, infinity and NaN last.
HWY_NOINLINE int32_t LargestMagnitude(const float* from, int64_t count) {
  const hn::ScalableTag<int32_t> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* bits = reinterpret_cast<const int32_t*>(from);
  const auto magnitude = hn::Set(d, 0x7fffffff);
  auto largest = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    largest = hn::Max(largest, hn::And(hn::LoadU(d, bits + i), magnitude));
  }
  int32_t result = hn::GetLane(hn::MaxOfLanes(d, largest));
  for (; i < count; ++i) result = std::max(result, bits[i] & 0x7fffffff);
  return result;
}

// Bytes round(x * factor) + offset; every product is below 127.5. Adding 1.5 x 2^23 rounds to an
// integer that the low bits then hold, the last of them modulo 256.
HWY_NOINLINE void QuantiseVectors(const float* from, int64_t count, float factor, int offset,
                                  uint8_t* to) {
  const hn::ScalableTag<float> d;
  const hn::Rebind<uint32_t, decltype(d)> du;
  const hn::Rebind<uint8_t, decltype(d)> bytes;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr float kRound = 12582912.0f;
  const auto scale = hn::Set(d, factor);
  const auto add = hn::Set(du, static_cast<uint32_t>(offset));
  const auto quantise = [&](auto x) {
    const auto rounded = hn::Add(hn::Mul(x, scale), hn::Set(d, kRound));
    return hn::And(hn::Add(hn::BitCast(du, rounded), add), hn::Set(du, 0xff));
  };
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::U8FromU32(quantise(hn::LoadU(d, from + i))), bytes, to + i);
  }
  if (i == count) return;
  HWY_ALIGN float end[hn::MaxLanes(d)] = {};
  HWY_ALIGN uint8_t end_bytes[hn::MaxLanes(d)];
  std::copy(from + i, from + count, end);
  hn::Store(hn::U8FromU32(quantise(hn::Load(d, end))), bytes, end_bytes);
  std::copy(end_bytes, end_bytes + (count - i), to + i);
}

}  // namespace HWY_NAMESPACE
}  // namespace attend
HWY_AFTER_NAMESPACE();
#endif  // HWY_AVX2 or HWY_AVX3

#if HWY_ONCE
namespace attend {
namespace {

void ConvertWithFloat(CpuIsa isa, DType from_dtype, const void* from, DType to_dtype, void* to,
                      int64_t count) {
  int64_t done = isa == CpuIsa::kAvx512
                     ? N_AVX3::ConvertVectors(from_dtype, from, to_dtype, to, count)
                     : N_AVX2::ConvertVectors(from_dtype, from, to_dtype, to, count);
  for (; done < count; ++done) StoreFloat(to_dtype, LoadFloat(from_dtype, from, done), to, done);
}

}  // namespace

void ConvertElements(CpuIsa isa, DType from_dtype, const void* from, DType to_dtype, void* to,
                     int64_t count) {
  if (count <= 0) return;
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<size_t>(count * DTypeBytes(to_dtype)));
    return;
  }
  if (from_dtype == DType::kF32 || to_dtype == DType::kF32) {
    ConvertWithFloat(isa, from_dtype, from, to_dtype, to, count);
    return;
  }
  float wide[256];
  for (int64_t begin = 0; begin < count; begin += 256) {
    const int64_t part = std::min<int64_t>(256, count - begin);
    ConvertWithFloat(isa, from_dtype,
                     static_cast<const char*>(from) + begin * DTypeBytes(from_dtype), DType::kF32,
                     wide, part);
    ConvertWithFloat(isa, DType::kF32, wide, to_dtype,
                     static_cast<char*>(to) + begin * DTypeBytes(to_dtype), part);
  }
}

float QuantiseRow(CpuIsa isa, const float* from, int64_t count, int offset, uint8_t* to) {
  const bool wide = isa == CpuIsa::kAvx512;
  const float largest = std::bit_cast<float>(wide ? N_AVX3::LargestMagnitude(from, count)
                                                  : N_AVX2::LargestMagnitude(from, count));
  if (!std::isfinite(largest) || largest < 0x1p-100f) {
    std::memset(to, offset, static_cast<size_t>(count));
    return std::isfinite(largest) ? 0 : std::numeric_limits<float>::quiet_NaN();
  }
  (wide ? N_AVX3::QuantiseVectors : N_AVX2::QuantiseVectors)(from, count, 127 / largest, offset,
                                                             to);
  return largest / 127;
}

}  // namespace attend
#endif  // HWY_ONCE
