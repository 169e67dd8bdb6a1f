// SPDX-License-Identifier: Apache-2.0
//
// The register kernels behind engine/cpu/projection: some rows times one strip of packed weights.
// One kernel exists per instruction set, packed type and arithmetic; which rows and strips it is
// given, and by which thread, is the projection's business.
//
// Every output is one chain of fused multiply-adds in ascending order of the inner index (or an
// exact int32 sum), whatever rows are beside it and wherever the inner index is cut into blocks, so
// its bits depend on its row and its column only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/util/dtype.h"

namespace attend {

// Where one row of a product goes: elements of F32, F16 or BF16.
struct OutputRow {
  void* data = nullptr;
  DType dtype = DType::kF32;
};

// Most rows of one call. Their sums take 60 KiB, a fraction of any second-level cache.
constexpr int64_t kGemmRows = 240;

// Groups of inner elements between two visits to the sums: a block of a strip of 64 columns takes
// 256 KiB, a quarter of the smallest second-level cache beside AVX-512. 512 and 256 lost 1..3 %.
constexpr int64_t kGemmBlockGroups = 1024;

// Packed weights of a strip: [ceil(inner / group)][strip columns][group], zeros beyond the matrix.
// The strips of a matrix lie one after another.
struct GemmStrip {
  const std::byte* weights = nullptr;
  const std::byte* next = nullptr;  // the strip this thread takes next; fetched ahead; null = none
  int64_t inner = 0;
  int64_t columns = 0;             // of the strip that exist
  const float* bias = nullptr;     // [strip columns]
  const void* const* x = nullptr;  // [rows] -> [inner] of the kernel's input
  const OutputRow* y = nullptr;    // [rows]
  int64_t rows = 0;                // at most kGemmRows
  int64_t y_column = 0;            // of a row of y where the strip begins
  float* sums = nullptr;           // scratch [kGemmRows][strip columns]
  float* wide = nullptr;           // scratch [2 * kGemmBlockGroups][strip columns]
  // I8 only: y = x_scale * weight_scale * (sum - weight_offset) + bias.
  const float* x_scale = nullptr;          // [rows]
  const float* weight_scale = nullptr;     // [strip columns]
  const int32_t* weight_offset = nullptr;  // [strip columns] input_offset x sum of the weights
};

struct GemmKernel {
  const char* name = "";
  int64_t strip_columns = 0;
  int64_t group = 1;           // inner elements that lie together in packed weights
  DType packed = DType::kF32;  // F32, BF16 or I8
  DType input = DType::kF32;   // of x: F32, BF16 or I8
  int input_offset = 0;        // I8 inputs are stored with it added, as bytes
  void (*run)(const GemmStrip& strip) = nullptr;
};

extern const GemmKernel kGemmAvx2F32;
extern const GemmKernel kGemmAvx2BF16;  // BF16 weights, float32 arithmetic
extern const GemmKernel kGemmAvx2I8;
extern const GemmKernel kGemmAvx512F32;
extern const GemmKernel kGemmAvx512BF16;
extern const GemmKernel kGemmBF16Dot;  // AVX512_BF16: BF16 times BF16
extern const GemmKernel kGemmVnniI8;   // AVX512_VNNI

}  // namespace attend
