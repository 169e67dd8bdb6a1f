// SPDX-License-Identifier: Apache-2.0
//
// Tensors of the public header: element sizes, conversion to float, to and from the wire.
#include <bit>
#include <cmath>

#include "client/attend_client.h"

namespace attend::client {
namespace {

float FloatFromF16(uint32_t half) {
  const uint32_t sign = (half & 0x8000) << 16;
  const uint32_t exponent = half >> 10 & 31;
  const uint32_t fraction = half & 0x3ff;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0) {  // subnormal: fraction x 2^-24, exact in float
    const float magnitude = std::ldexp(static_cast<float>(fraction), -24);
    return sign == 0 ? magnitude : -magnitude;
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

}  // namespace

int64_t ElementBytes(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_F32:
    case v1::DTYPE_I32:
      return 4;
    case v1::DTYPE_F16:
    case v1::DTYPE_BF16:
      return 2;
    default:
      return 0;
  }
}

std::vector<float> Tensor::ToFloats() const {
  std::vector<float> floats;
  if (dtype != v1::DTYPE_F32 && dtype != v1::DTYPE_F16 && dtype != v1::DTYPE_BF16) return floats;
  const size_t element_bytes = static_cast<size_t>(ElementBytes(dtype));
  floats.reserve(data.size() / element_bytes);
  for (size_t at = 0; at + element_bytes <= data.size(); at += element_bytes) {
    uint32_t bits = 0;
    for (size_t i = 0; i < element_bytes; ++i) {
      bits |= static_cast<uint32_t>(static_cast<unsigned char>(data[at + i])) << (8 * i);
    }
    if (dtype == v1::DTYPE_F16) {
      floats.push_back(FloatFromF16(bits));
    } else {
      floats.push_back(std::bit_cast<float>(dtype == v1::DTYPE_BF16 ? bits << 16 : bits));
    }
  }
  return floats;
}

void CopyToWire(const TensorView& view, v1::Tensor* wire) {
  wire->set_dtype(view.dtype);
  wire->mutable_shape()->Assign(view.shape.begin(), view.shape.end());
  wire->set_data(view.data.data(), view.data.size());
}

Tensor TakeFromWire(v1::Tensor* wire) {
  Tensor tensor;
  tensor.dtype = wire->dtype();
  tensor.shape.assign(wire->shape().begin(), wire->shape().end());
  tensor.data = std::move(*wire->mutable_data());
  return tensor;
}

}  // namespace attend::client
