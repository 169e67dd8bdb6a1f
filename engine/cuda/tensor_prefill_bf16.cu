// SPDX-License-Identifier: Apache-2.0
//
// The kernels of tensor_prefill.h for BF16: a file of its own, so that builds run in parallel.
#include "engine/cuda/tensor_prefill.h"

namespace attend::device {

template struct TensorPrefillOf<Bf16>;

}  // namespace attend::device
