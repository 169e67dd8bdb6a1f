// SPDX-License-Identifier: Apache-2.0
//
// NumPy .npy files (format versions 1 to 3) as client tensors, for the command line. Little-endian
// float32
// ('<f4'), float16 ('<f2') and bfloat16 ('<V2' as ml_dtypes writes it, or 'bfloat16'), row-major.
#pragma once

#include <string>

#include "client/attend_client.h"

namespace attend::client {

// Errors are INVALID_ARGUMENT with a message that names the file, what was found and what is
// wanted. The file must hold exactly the bytes that its header promises.
Result<Tensor> ReadNpy(const std::string& path);

// Version 1. F32, F16 or BF16; anything else is INVALID_ARGUMENT.
Result<void> WriteNpy(const std::string& path, const TensorView& tensor);

}  // namespace attend::client
