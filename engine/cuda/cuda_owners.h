// SPDX-License-Identifier: Apache-2.0
//
// Move-only owners of CUDA objects, and CUDA errors as statuses. Used by the host side of the
// engine only.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "engine/util/status_macros.h"

namespace attend {

// INTERNAL, naming the call and the runtime's reason.
inline absl::Status CudaStatus(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(std::string(call) + ": " + cudaGetErrorName(error) + " (" +
                             std::to_string(static_cast<int>(error)) + "), " +
                             cudaGetErrorString(error));
}

inline absl::Status CublasStatus(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return absl::InternalError(std::string(call) + ": cuBLAS status " +
                             std::to_string(static_cast<int>(status)));
}

#define CUDA_RETURN_IF_ERROR(call) RETURN_IF_ERROR(::attend::CudaStatus((call), #call))
#define CUBLAS_RETURN_IF_ERROR(call) RETURN_IF_ERROR(::attend::CublasStatus((call), #call))

// Owns one handle; `kDestroy` gives it back. An error of giving back has no one to tell.
template <class Handle, auto kDestroy>
class CudaOwner {
 public:
  CudaOwner() = default;
  CudaOwner(CudaOwner&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  CudaOwner& operator=(CudaOwner&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~CudaOwner() {
    if (handle_ != Handle{}) static_cast<void>(kDestroy(handle_));
  }

  Handle get() const { return handle_; }
  // For the calls that create. REQUIRES: owns nothing.
  Handle* out() { return &handle_; }

 private:
  Handle handle_{};
};

using Stream = CudaOwner<cudaStream_t, cudaStreamDestroy>;
using Event = CudaOwner<cudaEvent_t, cudaEventDestroy>;
using Graph = CudaOwner<cudaGraph_t, cudaGraphDestroy>;
using GraphExec = CudaOwner<cudaGraphExec_t, cudaGraphExecDestroy>;
using LtHandle = CudaOwner<cublasLtHandle_t, cublasLtDestroy>;
using MatmulDesc = CudaOwner<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using MatrixLayout = CudaOwner<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using MatmulPreference = CudaOwner<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// Device memory and page-locked host memory; 256-byte aligned.
template <auto kAllocate, auto kFree>
class CudaMemory {
 public:
  std::byte* data() const { return static_cast<std::byte*>(memory_.get()); }
  size_t bytes() const { return bytes_; }

  // Replaces what it owned; nothing may use that any more.
  cudaError_t Allocate(size_t bytes) {
    memory_ = {};
    bytes_ = 0;
    if (bytes == 0) return cudaSuccess;
    const cudaError_t error = kAllocate(memory_.out(), bytes);
    if (error == cudaSuccess) bytes_ = bytes;
    return error;
  }

 private:
  CudaOwner<void*, kFree> memory_;
  size_t bytes_ = 0;
};

inline cudaError_t AllocateDevice(void** memory, size_t bytes) { return cudaMalloc(memory, bytes); }
inline cudaError_t AllocatePinned(void** memory, size_t bytes) {
  return cudaMallocHost(memory, bytes);
}
using DeviceMemory = CudaMemory<AllocateDevice, cudaFree>;
using PinnedMemory = CudaMemory<AllocatePinned, cudaFreeHost>;

}  // namespace attend
