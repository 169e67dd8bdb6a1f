// SPDX-License-Identifier: Apache-2.0
//
// How tensor_attention.cu reaches the kernels of one type, which have files of their own because
// they take long to compile; and the widths that kernels are compiled for. A head runs in the
// narrowest one that holds its keys and its values.
#pragma once

#include <cstdint>
#include <type_traits>

#include "engine/cuda/device.h"
#include "engine/cuda/kernels.h"

namespace attend::device {

// f(std::integral_constant) of the kernel width for heads of `shape`.
template <class F>
cudaError_t WithWidth(const KvBlockShape& shape, const F& f) {
  const int width = shape.head_dim > shape.v_head_dim ? shape.head_dim : shape.v_head_dim;
  if (width <= 32) return f(std::integral_constant<int, 32>());
  if (width <= 64) return f(std::integral_constant<int, 64>());
  if (width <= 80) return f(std::integral_constant<int, 80>());
  if (width <= 96) return f(std::integral_constant<int, 96>());
  if (width <= 128) return f(std::integral_constant<int, 128>());
  if (width <= 192) return f(std::integral_constant<int, 192>());
  if (width <= 256) return f(std::integral_constant<int, 256>());
  return cudaErrorInvalidValue;
}

// The same for every width, until one fails.
template <class F>
cudaError_t ForEachWidth(const F& f) {
  for (const int width : {32, 64, 80, 96, 128, 192, 256}) {
    const cudaError_t error = WithWidth({1, width, width, 2}, f);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Kernels of T = Bf16 or F16.
template <class T>
struct TensorPrefillOf {
  static cudaError_t Launch(const AttentionParams& params, int64_t blocks, cudaStream_t stream);
  static cudaError_t Prepare(int shared_limit);
};
template <class T>
struct TensorDecodeOf {
  static cudaError_t Launch(const AttentionParams& params, int64_t blocks, cudaStream_t stream);
  static cudaError_t Prepare(int shared_limit);
};

}  // namespace attend::device
