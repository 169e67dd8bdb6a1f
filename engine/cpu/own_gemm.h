// SPDX-License-Identifier: Apache-2.0
//
// Our own packed matrix product, for instruction sets and shapes where oneDNN has no kernel whose
// bits are independent of the row count. Every output is one chain of fused multiply-adds in
// ascending order of the inner index, so its bits depend on its row and column only. Called by
// engine/cpu/projection.
#pragma once

#include <cstdint>

#include "engine/cpu/attention_kernel.h"
#include "engine/util/dtype.h"

namespace attend {

// Columns of one strip of packed weights: two vectors of floats.
constexpr int64_t OwnGemmStrip(CpuIsa isa) { return isa == CpuIsa::kAvx512 ? 32 : 16; }

// y[r][c] = sum over i of x[r][i] * w[i][c] + bias[c] for c < columns.
// packed: [ceil(columns / strip)][inner][strip] F32 or BF16, the last strip padded with zeros.
// x: [rows, inner] without gaps; y has row stride y_stride; bias: [columns].
void OwnGemm(CpuIsa isa, DType packed_dtype, const void* packed, const float* bias, int64_t inner,
             int64_t columns, const float* x, int64_t rows, float* y, int64_t y_stride);

}  // namespace attend
