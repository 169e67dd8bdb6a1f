// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/ceilings.h"

#include <functional>
#include <vector>

#include "engine/cuda/cuda_owners.h"
#include "engine/util/status_macros.h"
#include "tests/bench/random_rows.h"

namespace attend::gpu {
namespace {

constexpr int kWarmUps = 3, kRepeats = 10;
constexpr size_t kWorkspaceBytes = size_t{64} << 20;

// Median time of one piece of queued work.
absl::StatusOr<double> MedianUs(cudaStream_t stream, const std::function<absl::Status()>& queue) {
  Event begin, end;
  CUDA_RETURN_IF_ERROR(cudaEventCreateWithFlags(begin.out(), 0));
  CUDA_RETURN_IF_ERROR(cudaEventCreateWithFlags(end.out(), 0));
  std::vector<double> times;
  for (int i = 0; i < kWarmUps + kRepeats; ++i) {
    CUDA_RETURN_IF_ERROR(cudaEventRecord(begin.get(), stream));
    RETURN_IF_ERROR(queue());
    CUDA_RETURN_IF_ERROR(cudaEventRecord(end.get(), stream));
    CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
    float milliseconds = 0;
    CUDA_RETURN_IF_ERROR(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()));
    if (i >= kWarmUps) times.push_back(double{milliseconds} * 1000);
  }
  return bench::QuantilesOf(times).median;
}

absl::StatusOr<double> CopyRate(cudaStream_t stream, int64_t bytes) {
  DeviceMemory from, to;
  CUDA_RETURN_IF_ERROR(from.Allocate(static_cast<size_t>(bytes)));
  CUDA_RETURN_IF_ERROR(to.Allocate(static_cast<size_t>(bytes)));
  // Not zeros, which some memories move faster.
  const std::vector<std::byte> piece = bench::RandomRows(DType::kBF16, int64_t{1} << 20, 1);
  for (int64_t at = 0; at < bytes; at += static_cast<int64_t>(piece.size())) {
    const auto count = std::min<int64_t>(bytes - at, static_cast<int64_t>(piece.size()));
    CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(from.data() + at, piece.data(), static_cast<size_t>(count),
                                         cudaMemcpyHostToDevice, stream));
  }
  ASSIGN_OR_RETURN(const double us, MedianUs(stream, [&] {
                     return CudaStatus(
                         cudaMemcpyAsync(to.data(), from.data(), static_cast<size_t>(bytes),
                                         cudaMemcpyDeviceToDevice, stream),
                         "copy");
                   }));
  return us > 0 ? 2e6 * static_cast<double>(bytes) / us : 0;
}

absl::StatusOr<double> MatmulRate(cudaStream_t stream, int64_t width) {
  const std::vector<std::byte> matrix = bench::RandomRows(DType::kBF16, width * width, 2);
  DeviceMemory a, b, c, workspace;
  for (DeviceMemory* memory : {&a, &b}) {
    CUDA_RETURN_IF_ERROR(memory->Allocate(matrix.size()));
    CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(memory->data(), matrix.data(), matrix.size(),
                                         cudaMemcpyHostToDevice, stream));
  }
  CUDA_RETURN_IF_ERROR(c.Allocate(2 * matrix.size()));  // float, as the engine's products
  CUDA_RETURN_IF_ERROR(workspace.Allocate(kWorkspaceBytes));
  LtHandle handle;
  MatmulDesc desc;
  MatrixLayout layout, result;
  MatmulPreference preference;
  const auto size = static_cast<uint64_t>(width);
  const cublasOperation_t transpose = CUBLAS_OP_T;
  CUBLAS_RETURN_IF_ERROR(cublasLtCreate(handle.out()));
  CUBLAS_RETURN_IF_ERROR(cublasLtMatmulDescCreate(desc.out(), CUBLAS_COMPUTE_32F, CUDA_R_32F));
  CUBLAS_RETURN_IF_ERROR(cublasLtMatmulDescSetAttribute(desc.get(), CUBLASLT_MATMUL_DESC_TRANSA,
                                                        &transpose, sizeof(transpose)));
  CUBLAS_RETURN_IF_ERROR(cublasLtMatrixLayoutCreate(layout.out(), CUDA_R_16BF, size, size, width));
  CUBLAS_RETURN_IF_ERROR(cublasLtMatrixLayoutCreate(result.out(), CUDA_R_32F, size, size, width));
  CUBLAS_RETURN_IF_ERROR(cublasLtMatmulPreferenceCreate(preference.out()));
  CUBLAS_RETURN_IF_ERROR(cublasLtMatmulPreferenceSetAttribute(
      preference.get(), CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspaceBytes,
      sizeof(kWorkspaceBytes)));
  cublasLtMatmulHeuristicResult_t best{};
  int found = 0;
  CUBLAS_RETURN_IF_ERROR(cublasLtMatmulAlgoGetHeuristic(handle.get(), desc.get(), layout.get(),
                                                        layout.get(), result.get(), result.get(),
                                                        preference.get(), 1, &best, &found));
  if (found == 0) return absl::InternalError("cuBLASLt has no algorithm for the square product");
  const float one = 1, zero = 0;
  ASSIGN_OR_RETURN(
      const double us, MedianUs(stream, [&] {
        return CublasStatus(
            cublasLtMatmul(handle.get(), desc.get(), &one, a.data(), layout.get(), b.data(),
                           layout.get(), &zero, c.data(), result.get(), c.data(), result.get(),
                           &best.algo, workspace.data(), kWorkspaceBytes, stream),
            "cublasLtMatmul");
      }));
  const double flops =
      2.0 * static_cast<double>(width) * static_cast<double>(width) * static_cast<double>(width);
  return us > 0 ? flops * 1e6 / us : 0;
}

}  // namespace

absl::StatusOr<Ceilings> MeasureCeilings(int64_t copy_bytes, int64_t matmul_width) {
  CUDA_RETURN_IF_ERROR(cudaSetDevice(0));
  Stream stream;
  CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(stream.out(), cudaStreamNonBlocking));
  Ceilings ceilings;
  ASSIGN_OR_RETURN(ceilings.copy_bytes_per_second, CopyRate(stream.get(), copy_bytes));
  ASSIGN_OR_RETURN(ceilings.matmul_flops_per_second, MatmulRate(stream.get(), matmul_width));
  return ceilings;
}

}  // namespace attend::gpu
