// SPDX-License-Identifier: Apache-2.0
//
// One product of the emulated cuBLASLt: what it may look like, where its matrices have to be, and
// its run as queued work. stand_in_cublaslt.cc makes it out of a call; stand_in_matmul.cc computes.
#pragma once

#include <cublasLt.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "tests/simt/stand_in_device.h"
#include "tests/simt/stand_in_matmul.h"

struct EmulatedMatmulDesc {
  cublasComputeType_t compute;
  int32_t transpose_a = CUBLAS_OP_N;
  int32_t transpose_b = CUBLAS_OP_N;
  uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  int32_t bias_type = CUDA_R_32F;
};
struct EmulatedMatrixLayout {
  cudaDataType type;
  int64_t rows;
  int64_t columns;
  int64_t leading;
};
namespace attend::simt {

inline size_t ElementBytes(cudaDataType type) { return type == CUDA_R_32F ? 4 : 2; }

// What cublasLtMatmulAlgo_t::data holds.
struct Algorithm {
  uint64_t mark;
  int32_t splits;
  int32_t reduction_scheme;
  int32_t chains;
  uint32_t alignment[4];  // that the caller promised
  uint64_t workspace_bytes;
};
// A matrix of the call, in device memory.
struct Matrix {
  const char* name;
  const void* data;
  EmulatedMatrixLayout layout;

  size_t ColumnBytes() const {
    return static_cast<size_t>(layout.rows) * ElementBytes(layout.type);
  }
  const std::byte* Column(int64_t column) const {
    return static_cast<const std::byte*>(data) +
           static_cast<size_t>(column * layout.leading) * ElementBytes(layout.type);
  }
  size_t Bytes() const {
    return static_cast<size_t>(Column(layout.columns - 1) - Column(0)) + ColumnBytes();
  }
};

struct Product {
  Matrix a, b, d;
  const float* bias;  // [rows of D] or null
  void* workspace;
  size_t workspace_bytes;  // that the algorithm needs
  MatmulTask task;
};

// Why D = op(A) op(B) is none that the emulation supports; empty when it is.
std::string Unsupported(const EmulatedMatmulDesc& desc, const EmulatedMatrixLayout& a,
                        const EmulatedMatrixLayout& b, const EmulatedMatrixLayout& c,
                        const EmulatedMatrixLayout& d);
// Which address breaks a promise to the algorithm; empty when none does.
std::string Misaligned(const Product& product, const Algorithm& algorithm);
// Which memory is not the device's; empty when all is.
std::string OutsideMemory(const DeviceMemory& memory, const Product& product);

MatmulTask TaskOf(const EmulatedMatmulDesc& desc, const Product& product,
                  const Algorithm& algorithm, float alpha);
// Checks the memory again, and that everything it reads was written, and computes.
cudaError_t RunProduct(Device& device, const Product& product);

}  // namespace attend::simt
