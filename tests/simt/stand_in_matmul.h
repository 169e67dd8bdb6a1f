// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of the emulated cuBLASLt: a matrix product with float sums in an order that an
// algorithm fixes. Checks nothing; stand_in_cublaslt.cc does.
#pragma once

#include <cublasLt.h>

#include <cstddef>
#include <cstdint>

namespace attend::simt {

// Column-major, element (row, column) at row + column * leading.
struct MatmulOperand {
  const void* data = nullptr;
  cudaDataType_t type = CUDA_R_32F;
  int64_t leading = 0;
  bool transposed = false;  // op() of the product is its transpose
};

struct MatmulTask {
  int64_t m = 0;  // rows of D and op(A)
  int64_t n = 0;  // columns of D and op(B)
  int64_t k = 0;  // columns of op(A), rows of op(B)
  MatmulOperand a;
  MatmulOperand b;
  float alpha = 1;
  const float* bias = nullptr;  // [m] or null
  float* d = nullptr;           // column-major
  int64_t d_leading = 0;
  bool tf32 = false;  // operands are rounded to 10 bits of mantissa, to nearest even
  // The sum of an element goes over `splits` equal ranges of k. Within a range k ascends, in
  // `chains` interleaved partial sums that are added at its end. The ranges' sums are added in
  // turn, beginning with range n % splits: with splits > 1 bits depend on the number of columns.
  int splits = 1;
  int chains = 1;  // 1 or 2
};

void Multiply(const MatmulTask& task);

}  // namespace attend::simt
