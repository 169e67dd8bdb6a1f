// SPDX-License-Identifier: Apache-2.0
//
// What each kernel file asks of the device before its first launch; PrepareKernels (row_kernels.cu)
// calls all of them. Every function allows its kernels the shared memory that they need and returns
// cudaErrorInvalidValue when that is more than `shared_limit` bytes of a block.
#pragma once

#include <cuda_runtime_api.h>

namespace attend {

cudaError_t PrepareFloatAttention(int shared_limit);
cudaError_t PrepareWeights(int shared_limit);
cudaError_t PrepareTensorPrefill(int shared_limit);
cudaError_t PrepareTensorDecode(int shared_limit);

}  // namespace attend
