// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/projection.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "engine/util/status_macros.h"

namespace attend {
namespace {

// cuBLAS documentation recommends 32 MiB for Hopper, 4 MiB before.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;
// Algorithms the heuristic is asked for; the first that fits every run and row count is kept.
constexpr int kCandidates = 32;
// Pointers into padded matrices are multiples of this.
constexpr uint32_t kAlignment = 16;

cudaDataType TypeOf(DType dtype) {
  if (dtype == DType::kBF16) return CUDA_R_16BF;
  return dtype == DType::kF16 ? CUDA_R_16F : CUDA_R_32F;
}

// Whether the algorithm adds each sum in one piece.
bool IsWhole(const cublasLtMatmulAlgo_t& algorithm) {
  int32_t split_k = 0;
  uint32_t scheme = 0;
  size_t written = 0;
  if (cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &split_k,
                                           sizeof(split_k), &written) != CUBLAS_STATUS_SUCCESS ||
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                           &scheme, sizeof(scheme),
                                           &written) != CUBLAS_STATUS_SUCCESS) {
    return false;
  }
  return split_k <= 1 && scheme == CUBLASLT_REDUCTION_SCHEME_NONE;
}

// Row `from` of a [out, in] weight as `dtype`.
void ConvertRow(const WeightView& weight, int64_t row, DType dtype, std::byte* to) {
  if (weight.dtype == dtype && weight.column_stride == 1) {
    const auto* from =
        static_cast<const std::byte*>(weight.data) + row * weight.row_stride * DTypeBytes(dtype);
    std::memcpy(to, from, static_cast<size_t>(weight.columns * DTypeBytes(dtype)));
    return;
  }
  for (int64_t i = 0; i < weight.columns; ++i) StoreFloat(dtype, weight.At(row, i), to, i);
}

absl::Status AllocateWeights(int64_t bytes, DeviceMemory& memory) {
  const cudaError_t error = memory.Allocate(static_cast<size_t>(bytes));
  if (error != cudaErrorMemoryAllocation) return CudaStatus(error, "cudaMalloc of weights");
  size_t free = 0;
  size_t total = 0;
  CUDA_RETURN_IF_ERROR(cudaMemGetInfo(&free, &total));
  return absl::ResourceExhaustedError("layer weights need " + std::to_string(bytes) +
                                      " bytes of device memory, " + std::to_string(free) + " of " +
                                      std::to_string(total) + " are free; lower --kv_bytes");
}

}  // namespace

absl::StatusOr<LtContext> MakeLtContext() {
  LtContext context;
  CUBLAS_RETURN_IF_ERROR(cublasLtCreate(context.handle.out()));
  CUDA_RETURN_IF_ERROR(context.workspace.Allocate(kWorkspaceBytes));
  return context;
}

absl::StatusOr<Projection> Projection::Make(LtContext& context, std::span<const Part> parts,
                                            std::span<const PartRun> runs, DType dtype, bool tf32,
                                            int64_t max_rows, cudaStream_t stream) {
  Projection made;
  made.dtype_ = dtype;
  made.in_ = PaddedWidth(parts[0].weight->columns);
  made.begin_.push_back(0);
  for (const Part& part : parts) {
    made.begin_.push_back(made.begin_.back() + PaddedWidth(part.weight->rows));
  }
  made.out_ = made.begin_.back();
  RETURN_IF_ERROR(made.Upload(parts, stream));
  for (const PartRun& run : runs) {
    ASSIGN_OR_RETURN(Product product, made.MakeProduct(run, tf32));
    made.products_.push_back(std::move(product));
  }
  RETURN_IF_ERROR(made.ChooseAlgorithm(context, max_rows));
  return made;
}

absl::Status Projection::Upload(std::span<const Part> parts, cudaStream_t stream) {
  const int64_t row_bytes = in_ * DTypeBytes(dtype_);
  RETURN_IF_ERROR(AllocateWeights(out_ * row_bytes, weights_));
  RETURN_IF_ERROR(AllocateWeights(out_ * int64_t{sizeof(float)}, bias_));
  std::vector<float> bias(static_cast<size_t>(out_), 0.0f);
  for (size_t p = 0; p < parts.size(); ++p) {
    const WeightView& weight = *parts[p].weight;
    const int64_t rows = begin_[p + 1] - begin_[p];  // with padding rows, zeros
    std::vector<std::byte> packed(static_cast<size_t>(rows * row_bytes), std::byte{0});
    for (int64_t r = 0; r < weight.rows; ++r) {
      ConvertRow(weight, r, dtype_, packed.data() + r * row_bytes);
      if (parts[p].bias->present()) {
        bias[static_cast<size_t>(begin_[p] + r)] = parts[p].bias->At(r, 0);
      }
    }
    CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(weights_.data() + begin_[p] * row_bytes, packed.data(),
                                         packed.size(), cudaMemcpyHostToDevice, stream));
    CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
  }
  CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(bias_.data(), bias.data(), bias_.bytes(), cudaMemcpyHostToDevice, stream));
  return CudaStatus(cudaStreamSynchronize(stream), "upload of weights");
}

absl::StatusOr<MatrixLayout> Projection::Rows(int64_t rows, int64_t columns, int64_t stride,
                                              cudaDataType type) const {
  // cuBLAS is column-major: a row-major [rows, columns] matrix is its [columns, rows].
  MatrixLayout layout;
  CUBLAS_RETURN_IF_ERROR(cublasLtMatrixLayoutCreate(
      layout.out(), type, static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), stride));
  return layout;
}

// y^T [out, rows] = W [out, in] x^T [in, rows]: W is row-major, so it is given transposed.
absl::StatusOr<Projection::Product> Projection::MakeProduct(const PartRun& run, bool tf32) const {
  Product product;
  product.parts = run;
  const auto compute = tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  CUBLAS_RETURN_IF_ERROR(cublasLtMatmulDescCreate(product.desc.out(), compute, CUDA_R_32F));
  const cublasOperation_t transpose = CUBLAS_OP_T;
  const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
  const void* bias = bias_.data() + begin_[run.first] * int64_t{sizeof(float)};
  const cudaDataType bias_type = CUDA_R_32F;
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const void* value, size_t bytes) {
    return cublasLtMatmulDescSetAttribute(product.desc.get(), attribute, value, bytes);
  };
  CUBLAS_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose)));
  CUBLAS_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue)));
  CUBLAS_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias)));
  CUBLAS_RETURN_IF_ERROR(set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type, sizeof(bias_type)));
  ASSIGN_OR_RETURN(product.weights,
                   Rows(begin_[run.last] - begin_[run.first], in_, in_, TypeOf(dtype_)));
  return product;
}

absl::Status Projection::ChooseAlgorithm(LtContext& context, int64_t max_rows) {
  MatmulPreference preference;
  CUBLAS_RETURN_IF_ERROR(cublasLtMatmulPreferenceCreate(preference.out()));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    return cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value));
  };
  const size_t workspace = context.workspace.bytes();
  const uint32_t whole = CUBLASLT_REDUCTION_SCHEME_NONE;
  CUBLAS_RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace));
  CUBLAS_RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, whole));
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    CUBLAS_RETURN_IF_ERROR(prefer(attribute, kAlignment));
  }
  // Asked for the widest run and a middling batch: large ones are bound by arithmetic with any good
  // tile, small ones by reading the weights.
  constexpr int64_t typical = 512;  // whatever max_rows is: the choice is part of the numerics
  const auto widest =
      std::max_element(products_.begin(), products_.end(), [&](const Product& a, const Product& b) {
        return begin_[a.parts.last] - begin_[a.parts.first] <
               begin_[b.parts.last] - begin_[b.parts.first];
      });
  const auto layouts = [&](const Product& product, int64_t rows, MatrixLayout& x,
                           MatrixLayout& y) -> absl::Status {
    ASSIGN_OR_RETURN(x, Rows(rows, in_, in_, TypeOf(dtype_)));
    ASSIGN_OR_RETURN(
        y, Rows(rows, begin_[product.parts.last] - begin_[product.parts.first], out_, CUDA_R_32F));
    return absl::OkStatus();
  };
  MatrixLayout x, y;
  RETURN_IF_ERROR(layouts(*widest, typical, x, y));
  std::vector<cublasLtMatmulHeuristicResult_t> found(kCandidates);
  int count = 0;
  CUBLAS_RETURN_IF_ERROR(cublasLtMatmulAlgoGetHeuristic(
      context.handle.get(), widest->desc.get(), widest->weights.get(), x.get(), y.get(), y.get(),
      preference.get(), kCandidates, found.data(), &count));
  const auto fits = [&](const cublasLtMatmulAlgo_t& algorithm) {
    for (const Product& product : products_) {
      for (int64_t rows : {kProductRows, typical, PaddedRows(max_rows)}) {
        MatrixLayout inputs, outputs;
        cublasLtMatmulHeuristicResult_t check{};
        if (!layouts(product, rows, inputs, outputs).ok() ||
            cublasLtMatmulAlgoCheck(context.handle.get(), product.desc.get(), product.weights.get(),
                                    inputs.get(), outputs.get(), outputs.get(), &algorithm,
                                    &check) != CUBLAS_STATUS_SUCCESS ||
            check.workspaceSize > workspace) {
          return false;
        }
      }
    }
    return true;
  };
  for (int i = 0; i < count; ++i) {
    if (found[i].state != CUBLAS_STATUS_SUCCESS || !IsWhole(found[i].algo)) continue;
    if (!fits(found[i].algo)) continue;
    algorithm_ = found[i].algo;
    return absl::OkStatus();
  }
  return absl::InternalError("cuBLASLt has no algorithm without split-K for a [" +
                             std::to_string(out_) + ", " + std::to_string(in_) + "] " +
                             DTypeName(dtype_) + " matrix (" + std::to_string(count) + " offered)");
}

absl::Status Projection::Run(LtContext& context, const PartRun& run, const void* x, int64_t rows,
                             float* y, cudaStream_t stream) const {
  if (rows == 0) return absl::OkStatus();
  const auto product =
      std::find_if(products_.begin(), products_.end(), [&](const Product& candidate) {
        return candidate.parts.first == run.first && candidate.parts.last == run.last;
      });
  if (product == products_.end()) return absl::InternalError("projection: unknown run of parts");
  const int64_t width = begin_[run.last] - begin_[run.first];
  ASSIGN_OR_RETURN(const MatrixLayout inputs, Rows(PaddedRows(rows), in_, in_, TypeOf(dtype_)));
  ASSIGN_OR_RETURN(const MatrixLayout outputs, Rows(PaddedRows(rows), width, out_, CUDA_R_32F));
  const float one = 1;
  const float zero = 0;
  const void* weights = weights_.data() + begin_[run.first] * in_ * DTypeBytes(dtype_);
  float* to = y + begin_[run.first];
  return CublasStatus(cublasLtMatmul(context.handle.get(), product->desc.get(), &one, weights,
                                     product->weights.get(), x, inputs.get(), &zero, to,
                                     outputs.get(), to, outputs.get(), &algorithm_,
                                     context.workspace.data(), context.workspace.bytes(), stream),
                      "cublasLtMatmul");
}

}  // namespace attend
