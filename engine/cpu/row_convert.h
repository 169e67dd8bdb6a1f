// SPDX-License-Identifier: Apache-2.0
//
// Rows of tensors between dtypes, vectorised; the bits are those of engine/util/dtype.h. The engine
// calls it wherever rows enter or leave.
#pragma once

#include <cstdint>

#include "engine/cpu/attention_kernel.h"
#include "engine/util/dtype.h"

namespace attend {

// Converts `count` elements of F32, F16 or BF16 at any alignment. The ranges do not overlap.
void ConvertElements(CpuIsa isa, DType from_dtype, const void* from, DType to_dtype, void* to,
                     int64_t count);

}  // namespace attend
