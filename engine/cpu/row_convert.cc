// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/row_convert.h"

#include <algorithm>
#include <cstring>

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

}  // namespace attend
#endif  // HWY_ONCE
