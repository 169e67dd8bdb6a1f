// SPDX-License-Identifier: Apache-2.0
//
// The checks of one product, at its call and when it runs.
#include "tests/simt/stand_in_product.h"

#include <cstring>

namespace attend::simt {
namespace {

std::string Unwritten(const Product& product) {
  for (const Matrix* matrix : {&product.a, &product.b}) {
    for (int64_t column = 0; column < matrix->layout.columns; ++column) {
      const auto first = FirstUnwritten(matrix->Column(column), matrix->ColumnBytes());
      if (!first.has_value()) continue;
      return std::string("nothing wrote element (") +
             std::to_string(*first / ElementBytes(matrix->layout.type)) + ", " +
             std::to_string(column) + ") of " + matrix->name;
    }
  }
  if (product.bias != nullptr && FirstUnwritten(product.bias, product.d.ColumnBytes())) {
    return "nothing wrote a part of the bias";
  }
  return "";
}

}  // namespace

std::string Unsupported(const EmulatedMatmulDesc& desc, const EmulatedMatrixLayout& a,
                        const EmulatedMatrixLayout& b, const EmulatedMatrixLayout& c,
                        const EmulatedMatrixLayout& d) {
  const bool tf32 = desc.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  if (desc.compute != CUBLAS_COMPUTE_32F && !tf32) return "compute type";
  if (a.type != b.type) return "A and B of different types";
  if (a.type != CUDA_R_32F && a.type != CUDA_R_16F && a.type != CUDA_R_16BF) return "type of A";
  if (tf32 && a.type != CUDA_R_32F) return "TF32 with operands of 16 bits";
  if (c.type != CUDA_R_32F || d.type != CUDA_R_32F) return "type of C or D";
  const bool transpose_a = desc.transpose_a == CUBLAS_OP_T;
  const bool transpose_b = desc.transpose_b == CUBLAS_OP_T;
  const int64_t m = transpose_a ? a.columns : a.rows;
  const int64_t k = transpose_a ? a.rows : a.columns;
  if ((transpose_b ? b.columns : b.rows) != k) return "op(A) and op(B) with unequal k";
  if (d.rows != m || d.columns != (transpose_b ? b.rows : b.columns)) return "shape of D";
  if (c.rows != d.rows || c.columns != d.columns) return "shape of C";
  if (m == 0 || k == 0 || d.columns == 0) return "an empty matrix";
  for (const EmulatedMatrixLayout* layout : {&a, &b, &c, &d}) {
    if (layout->leading < layout->rows) return "a leading dimension below the rows";
  }
  if (desc.epilogue != CUBLASLT_EPILOGUE_DEFAULT && desc.epilogue != CUBLASLT_EPILOGUE_BIAS) {
    return "epilogue";
  }
  if (desc.epilogue == CUBLASLT_EPILOGUE_BIAS && desc.bias_type != CUDA_R_32F) {
    return "type of the bias";
  }
  return "";
}

std::string OutsideMemory(const DeviceMemory& memory, const Product& product) {
  for (const Matrix* matrix : {&product.a, &product.b, &product.d}) {
    if (!memory.Inside(matrix->data, matrix->Bytes(), MemoryKind::kDevice)) {
      return std::string(matrix->name) + " is not inside one allocation of device memory";
    }
  }
  if (product.bias != nullptr &&
      !memory.Inside(product.bias, product.d.ColumnBytes(), MemoryKind::kDevice)) {
    return "the bias is not inside one allocation of device memory";
  }
  if (product.workspace_bytes > 0 &&
      !memory.Inside(product.workspace, product.workspace_bytes, MemoryKind::kDevice)) {
    return "the workspace is not inside one allocation of device memory";
  }
  return "";
}

cudaError_t RunProduct(Device& device, const Product& product) {
  std::string wrong = OutsideMemory(device.memory, product);
  if (wrong.empty()) wrong = Unwritten(product);
  if (!wrong.empty()) {
    return device.Violation("cublasLtMatmul: " + wrong, cudaErrorIllegalAddress);
  }
  if (product.workspace_bytes > 0) std::memset(product.workspace, 0xff, product.workspace_bytes);
  Multiply(product.task);
  for (int64_t column = 0; column < product.d.layout.columns; ++column) {
    MarkWritten(product.d.Column(column), product.d.ColumnBytes());
  }
  return cudaSuccess;
}

std::string Misaligned(const Product& product, const Algorithm& algorithm) {
  const Matrix* matrices[] = {&product.a, &product.b, &product.d, &product.d};
  for (int i = 0; i < 4; ++i) {
    const auto address = reinterpret_cast<uintptr_t>(matrices[i]->data);
    if (address % algorithm.alignment[i] != 0) {
      return std::string("address of ") + matrices[i]->name +
             " is no multiple of the alignment in the algorithm's preference, " +
             std::to_string(algorithm.alignment[i]);
    }
  }
  // Tensor cores read 16 bytes at a time.
  const bool wide = product.task.tf32 || product.a.layout.type != CUDA_R_32F;
  const uintptr_t step = wide ? 16 : sizeof(float);
  for (const void* data :
       {product.a.data, product.b.data, product.d.data, static_cast<const void*>(product.bias)}) {
    if (reinterpret_cast<uintptr_t>(data) % step != 0) {
      return "an address is no multiple of " + std::to_string(step);
    }
  }
  return "";
}

MatmulTask TaskOf(const EmulatedMatmulDesc& desc, const Product& product,
                  const Algorithm& algorithm, float alpha) {
  const EmulatedMatrixLayout& a = product.a.layout;
  const EmulatedMatrixLayout& b = product.b.layout;
  MatmulTask task;
  task.m = product.d.layout.rows;
  task.n = product.d.layout.columns;
  task.k = desc.transpose_a == CUBLAS_OP_T ? a.rows : a.columns;
  task.a = {product.a.data, a.type, a.leading, desc.transpose_a == CUBLAS_OP_T};
  task.b = {product.b.data, b.type, b.leading, desc.transpose_b == CUBLAS_OP_T};
  task.alpha = alpha;
  task.bias = product.bias;
  task.d = static_cast<float*>(const_cast<void*>(product.d.data));
  task.d_leading = product.d.layout.leading;
  task.tf32 = desc.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  task.splits = algorithm.splits;
  task.chains = algorithm.chains;
  return task;
}

}  // namespace attend::simt
