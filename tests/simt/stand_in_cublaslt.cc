// SPDX-License-Identifier: Apache-2.0
//
// The calls of cublasLt.h on the emulated device. Three algorithms: two without split-K that add in
// different orders, and one with it, which is offered first unless the preference excludes it and
// whose bits depend on the number of columns of D. Products are queued like kernels; arguments are
// checked at the call, memory when the product runs.
#include <cublasLt.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/simt/stand_in_device.h"
#include "tests/simt/stand_in_product.h"

struct EmulatedLtHandle {};
struct EmulatedPreference {
  uint64_t workspace_bytes = 0;
  uint32_t reduction_schemes = ~uint32_t{0};
  uint32_t alignment[4] = {256, 256, 256, 256};  // of A, B, C, D; cuBLASLt's defaults
};

namespace attend::simt {
namespace {

constexpr uint64_t kAlgorithmMark = 0x617474656e640001;

static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

constexpr uint32_t kReductionInPlace = 1;

cublasLtMatmulAlgo_t Pack(const Algorithm& algorithm) {
  cublasLtMatmulAlgo_t packed = {};
  std::memcpy(packed.data, &algorithm, sizeof(algorithm));
  return packed;
}

std::optional<Algorithm> Unpack(const cublasLtMatmulAlgo_t* packed) {
  if (packed == nullptr) return std::nullopt;
  Algorithm algorithm;
  std::memcpy(&algorithm, packed->data, sizeof(algorithm));
  if (algorithm.mark != kAlgorithmMark) return std::nullopt;
  return algorithm;
}

cublasStatus_t FromCuda(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return CUBLAS_STATUS_SUCCESS;
    case cudaErrorInsufficientDriver:
      return CUBLAS_STATUS_NOT_INITIALIZED;
    case cudaErrorInvalidValue:
      return CUBLAS_STATUS_INVALID_VALUE;
    default:
      return CUBLAS_STATUS_EXECUTION_FAILED;
  }
}

// Frames a call that needs the device.
template <class Body>
cublasStatus_t BlasCall(const char* function, Body body) {
  Device& device = Device::Get();
  const std::lock_guard lock(device.mutex);
  if (const cudaError_t error = device.Enter(function); error != cudaSuccess) {
    return FromCuda(error);
  }
  return body(device);
}

void CountObject(int change) {
  Device& device = Device::Get();
  const std::lock_guard lock(device.mutex);
  device.blas_objects += change;
}

template <class T>
cublasStatus_t Create(T** object, T value) {
  if (object == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *object = new T(std::move(value));
  CountObject(1);
  return CUBLAS_STATUS_SUCCESS;
}

template <class T>
cublasStatus_t Destroy(T* object) {
  if (object == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  delete object;
  CountObject(-1);
  return CUBLAS_STATUS_SUCCESS;
}

template <class T>
cublasStatus_t Set(T* attribute, const void* value, size_t bytes) {
  if (value == nullptr || bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(attribute, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

// In the order of preference for `columns` of D.
std::vector<Algorithm> Algorithms(const EmulatedPreference& preference, int64_t columns) {
  const Algorithm split = {kAlgorithmMark, 4, kReductionInPlace, 1, {}, 0};
  const Algorithm plain = {kAlgorithmMark, 1, CUBLASLT_REDUCTION_SCHEME_NONE, 1, {}, 0};
  const Algorithm paired = {kAlgorithmMark, 1, CUBLASLT_REDUCTION_SCHEME_NONE, 2, {}, 1 << 16};
  std::vector<Algorithm> algorithms = {split, plain, paired};
  // A choice that depends on the batch, as the real one does.
  if (columns <= 16) std::swap(algorithms[1], algorithms[2]);
  std::erase_if(algorithms, [&](const Algorithm& algorithm) {
    const auto scheme = static_cast<uint32_t>(algorithm.reduction_scheme);
    return (scheme & ~preference.reduction_schemes) != 0 ||
           algorithm.workspace_bytes > preference.workspace_bytes;
  });
  for (Algorithm& algorithm : algorithms) {
    std::copy_n(preference.alignment, 4, algorithm.alignment);
  }
  return algorithms;
}

cublasLtMatmulHeuristicResult_t ResultOf(const Algorithm& algorithm) {
  cublasLtMatmulHeuristicResult_t result = {};
  result.algo = Pack(algorithm);
  result.workspaceSize = algorithm.workspace_bytes;
  result.state = CUBLAS_STATUS_SUCCESS;
  result.wavesCount = 1;
  return result;
}

cublasStatus_t Submit(Device& device, cudaStream_t stream, Product product) {
  EmulatedStream* queue = device.Queue(stream);
  if (queue == nullptr) return FromCuda(device.Violation("cublasLtMatmul: no such stream"));
  Operation operation;
  operation.name = "matrix product";
  operation.run = [&device, product = std::move(product)] { return RunProduct(device, product); };
  return FromCuda(device.Submit(*queue, std::move(operation)));
}

}  // namespace
}  // namespace attend::simt

namespace simt = attend::simt;

// ---- Handles and descriptions ----

const char* cublasGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
  }
  return "CUBLAS_STATUS_UNKNOWN";
}

size_t cublasLtGetVersion() { return 130000; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  const cublasStatus_t status =
      simt::BlasCall(__func__, [](simt::Device&) { return CUBLAS_STATUS_SUCCESS; });
  return status == CUBLAS_STATUS_SUCCESS ? simt::Create(handle, EmulatedLtHandle{}) : status;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return simt::Destroy(handle); }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  if (scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  return simt::Create(desc, EmulatedMatmulDesc{.compute = compute});
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) { return simt::Destroy(desc); }

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  if (desc == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return simt::Set(&desc->transpose_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return simt::Set(&desc->transpose_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return simt::Set(&desc->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return simt::Set(&desc->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return simt::Set(&desc->bias_type, value, bytes);
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t leading) {
  return simt::Create(layout, EmulatedMatrixLayout{type, static_cast<int64_t>(rows),
                                                   static_cast<int64_t>(columns), leading});
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  return simt::Destroy(layout);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return simt::Create(preference, EmulatedPreference{});
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return simt::Destroy(preference);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  if (preference == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return simt::Set(&preference->workspace_bytes, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return simt::Set(&preference->reduction_schemes, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return simt::Set(
          &preference->alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value,
          bytes);
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}

// ---- Algorithms ----

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* returned) {
  if (handle == nullptr || desc == nullptr || a == nullptr || b == nullptr || c == nullptr ||
      d == nullptr || preference == nullptr || requested < 1 || results == nullptr ||
      returned == nullptr) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  return simt::BlasCall(__func__, [&](simt::Device&) {
    *returned = 0;
    if (!simt::Unsupported(*desc, *a, *b, *c, *d).empty()) return CUBLAS_STATUS_NOT_SUPPORTED;
    for (const simt::Algorithm& algorithm : simt::Algorithms(*preference, d->columns)) {
      if (*returned < requested) results[(*returned)++] = simt::ResultOf(algorithm);
    }
    return *returned == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
  });
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algo,
                                       cublasLtMatmulHeuristicResult_t* result) {
  const std::optional<simt::Algorithm> algorithm = simt::Unpack(algo);
  if (handle == nullptr || !algorithm || result == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (!simt::Unsupported(*desc, *a, *b, *c, *d).empty()) return CUBLAS_STATUS_NOT_SUPPORTED;
  *result = simt::ResultOf(*algorithm);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                    void* value, size_t bytes, size_t* written) {
  const std::optional<simt::Algorithm> algorithm = simt::Unpack(algo);
  if (!algorithm || value == nullptr || bytes != sizeof(int32_t)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const int32_t number = attribute == CUBLASLT_ALGO_CONFIG_SPLITK_NUM ? algorithm->splits
                                                                      : algorithm->reduction_scheme;
  std::memcpy(value, &number, sizeof(number));
  if (written != nullptr) *written = sizeof(number);
  return CUBLAS_STATUS_SUCCESS;
}

// ---- Products ----

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
                              void* workspace, size_t workspace_bytes, cudaStream_t stream) {
  return simt::BlasCall(__func__, [&](simt::Device& device) {
    const auto refuse = [&](const std::string& reason) {
      device.Violation("cublasLtMatmul: " + reason);
      return CUBLAS_STATUS_INVALID_VALUE;
    };
    if (handle == nullptr || desc == nullptr || alpha == nullptr || beta == nullptr) {
      return refuse("a null argument");
    }
    if (algo == nullptr) return refuse("no algorithm: the choice would depend on the batch");
    const std::optional<simt::Algorithm> algorithm = simt::Unpack(algo);
    if (!algorithm) return refuse("an algorithm that no heuristic returned");
    const std::string unsupported =
        simt::Unsupported(*desc, *a_layout, *b_layout, *c_layout, *d_layout);
    if (!unsupported.empty()) return refuse("not supported: " + unsupported);
    float factor;
    std::memcpy(&factor, beta, sizeof(factor));
    if (factor != 0) return refuse("beta is not 0");
    std::memcpy(&factor, alpha, sizeof(factor));
    if (algorithm->workspace_bytes > workspace_bytes) return refuse("too little workspace");
    if (c != nullptr && c != d) return refuse("C is neither null nor D");

    simt::Product product;
    product.a = {"A", a, *a_layout};
    product.b = {"B", b, *b_layout};
    product.d = {"D", d, *d_layout};
    product.bias =
        desc->epilogue == CUBLASLT_EPILOGUE_BIAS ? static_cast<const float*>(desc->bias) : nullptr;
    if (desc->epilogue == CUBLASLT_EPILOGUE_BIAS && product.bias == nullptr) {
      return refuse("a bias epilogue without a bias");
    }
    product.workspace = workspace;
    product.workspace_bytes = algorithm->workspace_bytes;
    product.task = simt::TaskOf(*desc, product, *algorithm, factor);
    const std::string wrong = simt::Misaligned(product, *algorithm);
    if (!wrong.empty()) return refuse(wrong);
    const std::string outside = simt::OutsideMemory(device.memory, product);
    if (!outside.empty()) return refuse(outside);
    return simt::Submit(device, stream, std::move(product));
  });
}
