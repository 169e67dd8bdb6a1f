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

// Symmetric 8-bit integers of a row, to nearest even, each with `offset` added. Returns the scale
// that turns them back: max|x| / 127. A row of zeros, or of magnitudes below 2^-100, gives zeros
// and scale 0; one with a value that is not finite gives zeros and scale NaN.
float QuantiseRow(CpuIsa isa, const float* from, int64_t count, int offset, uint8_t* to);

}  // namespace attend
