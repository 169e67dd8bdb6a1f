// SPDX-License-Identifier: Apache-2.0
//
// Element types of tensors and their conversions to and from float, one value at a time. Rounding
// is to nearest even; NaN stays NaN (quiet), infinities stay, float16 overflow becomes infinity.
// Vectorised row conversions live with the engine that needs them and must give the same bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace attend {

// attend.v1.DType, number by number.
enum class DType : uint8_t { kUnspecified = 0, kF32 = 1, kF16 = 2, kBF16 = 3, kI32 = 4, kI8 = 5 };

constexpr int64_t DTypeBytes(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kI8:
      return 1;
    case DType::kUnspecified:
      break;
  }
  return 0;
}

constexpr const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kF16:
      return "F16";
    case DType::kBF16:
      return "BF16";
    case DType::kI32:
      return "I32";
    case DType::kI8:
      return "I8";
    case DType::kUnspecified:
      break;
  }
  return "unspecified";
}

constexpr bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

inline float FloatFromBF16(uint16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

inline uint16_t BF16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x0040);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float FloatFromF16(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000) << 16;
  const uint32_t exponent = (value >> 10) & 0x1f;
  const uint32_t mantissa = value & 0x3ff;
  if (exponent == 31) {  // infinity or NaN (made quiet)
    return std::bit_cast<float>(sign | 0x7f800000 | (mantissa << 13) |
                                (mantissa != 0 ? 0x00400000u : 0u));
  }
  if (exponent == 0) {  // zero or subnormal: mantissa x 2^-24 is exact in float
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

inline uint16_t F16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {  // NaN
    return static_cast<uint16_t>(sign | 0x7e00 | ((bits >> 13) & 0x3ff));
  }
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds above 65504
  if (magnitude < 0x38800000) {  // below 2^-14: subnormal or zero, in units of 2^-24
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p24f;
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyintf(scaled)));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

// Element `index` of an array of `dtype` (F32, F16 or BF16), at any alignment.
inline float LoadFloat(DType dtype, const void* data, int64_t index) {
  const auto* bytes = static_cast<const unsigned char*>(data) + index * DTypeBytes(dtype);
  uint32_t bits = 0;
  for (int64_t i = DTypeBytes(dtype) - 1; i >= 0; --i) bits = bits << 8 | bytes[i];
  if (dtype == DType::kF32) return std::bit_cast<float>(bits);
  return dtype == DType::kBF16 ? FloatFromBF16(static_cast<uint16_t>(bits))
                               : FloatFromF16(static_cast<uint16_t>(bits));
}

inline void StoreFloat(DType dtype, float value, void* data, int64_t index) {
  auto* bytes = static_cast<unsigned char*>(data) + index * DTypeBytes(dtype);
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if (dtype == DType::kBF16) bits = BF16FromFloat(value);
  if (dtype == DType::kF16) bits = F16FromFloat(value);
  for (int64_t i = 0; i < DTypeBytes(dtype); ++i) {
    bytes[i] = static_cast<unsigned char>(bits >> (8 * i));
  }
}

}  // namespace attend
