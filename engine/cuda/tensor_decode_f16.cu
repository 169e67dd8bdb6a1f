// SPDX-License-Identifier: Apache-2.0
//
// The kernels of tensor_decode.h for F16: a file of its own, so that builds run in parallel.
#include "engine/cuda/tensor_decode.h"

namespace attend::device {

template struct TensorDecodeOf<F16>;

}  // namespace attend::device
