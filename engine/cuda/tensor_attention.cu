// SPDX-License-Identifier: Apache-2.0
//
// Launches attention on tensor cores: chooses the kernels of the KV blocks' type. Widths are chosen
// in tensor_launch.h.
#include "engine/cuda/kernels.h"
#include "engine/cuda/prepare.h"
#include "engine/cuda/tensor_launch.h"

namespace attend {

cudaError_t LaunchTensorPrefill(const AttentionParams& params, DType kv_dtype, int64_t blocks,
                                cudaStream_t stream) {
  using namespace device;
  if (kv_dtype == DType::kBF16) return TensorPrefillOf<Bf16>::Launch(params, blocks, stream);
  if (kv_dtype == DType::kF16) return TensorPrefillOf<F16>::Launch(params, blocks, stream);
  return cudaErrorInvalidValue;
}

cudaError_t LaunchTensorDecode(const AttentionParams& params, DType kv_dtype, int64_t blocks,
                               cudaStream_t stream) {
  using namespace device;
  if (kv_dtype == DType::kBF16) return TensorDecodeOf<Bf16>::Launch(params, blocks, stream);
  if (kv_dtype == DType::kF16) return TensorDecodeOf<F16>::Launch(params, blocks, stream);
  return cudaErrorInvalidValue;
}

cudaError_t PrepareTensorPrefill(int shared_limit) {
  const cudaError_t error = device::TensorPrefillOf<device::Bf16>::Prepare(shared_limit);
  return error != cudaSuccess ? error : device::TensorPrefillOf<device::F16>::Prepare(shared_limit);
}

cudaError_t PrepareTensorDecode(int shared_limit) {
  const cudaError_t error = device::TensorDecodeOf<device::Bf16>::Prepare(shared_limit);
  return error != cudaSuccess ? error : device::TensorDecodeOf<device::F16>::Prepare(shared_limit);
}

}  // namespace attend
