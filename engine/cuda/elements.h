// SPDX-License-Identifier: Apache-2.0
//
// Vectors of 16 bytes as elements, and elements by run-time type: what kernels that meet more than
// one DType share. Knows no shapes.
#pragma once

#include "engine/cuda/device.h"
#include "engine/util/dtype.h"

namespace attend::device {

// Elements of T in 16 bytes.
template <class T>
inline constexpr int kVectorElements = 16 / static_cast<int>(sizeof(T));

// out[i] = element i of the vector.
template <class T>
ATTEND_DEVICE void Unpack(const Vector16& vector, float (&out)[kVectorElements<T>]) {
#pragma unroll
  for (int i = 0; i < kVectorElements<T>; ++i) {
    if constexpr (sizeof(T) == 4) {
      out[i] = WordAsFloat(vector.word[i]);
    } else {
      out[i] = ToFloat(T{static_cast<uint16_t>(vector.word[i / 2] >> (16 * (i % 2)))});
    }
  }
}

// Elements [first, first + kVectorElements<T>) of `values`.
template <class T, int kCount>
ATTEND_DEVICE Vector16 Pack(const float (&values)[kCount], int first) {
  Vector16 vector;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      vector.word[i] = FloatAsWord(values[first + i]);
    } else {
      vector.word[i] = Pack2<T>(values[first + 2 * i], values[first + 2 * i + 1]);
    }
  }
  return vector;
}

// Calls f(T{}) with the element type of `dtype`, one of F32, BF16 and F16.
template <class F>
ATTEND_DEVICE void WithElement(DType dtype, const F& f) {
  if (dtype == DType::kF32) {
    f(float{});
  } else if (dtype == DType::kBF16) {
    f(Bf16{});
  } else {
    f(F16{});
  }
}

// Elements [column, column + kCount) of a row of `width` elements of `dtype`; those past its end
// are left out. Whole vectors where the address allows it.
template <int kCount>
ATTEND_DEVICE void StorePart(DType dtype, void* row, int column, int width,
                             const float (&values)[kCount]) {
  WithElement(dtype, [&](auto element) {
    using T = decltype(element);
    const Global<T> out = Global<T>(static_cast<T*>(row)) + column;
    if constexpr (kCount >= kVectorElements<T>) {
      if (column + kCount <= width && reinterpret_cast<uintptr_t>(out.data()) % 16 == 0) {
#pragma unroll
        for (int i = 0; i < kCount; i += kVectorElements<T>) Store16(out + i, Pack<T>(values, i));
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (column + i < width) out[i] = FromFloat<T>(values[i]);
    }
  });
}

}  // namespace attend::device
