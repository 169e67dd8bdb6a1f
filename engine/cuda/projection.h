// SPDX-License-Identifier: Apache-2.0
//
// Matrix products of the CUDA engine by cuBLASLt: y = x W^T + b in float, for a weight matrix made
// of several parts stacked over out features (q, k and v of a layer are one product). One algorithm
// per matrix, chosen at load for every row count and every run of parts it will serve, without
// split-K, so that a row's bits do not depend on the rows beside it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/cuda/cuda_owners.h"
#include "engine/cuda/padding.h"
#include "engine/layer_weights.h"

namespace attend {

// What all products of an engine share. One stream at a time may use it.
struct LtContext {
  LtHandle handle;
  DeviceMemory workspace;
};
absl::StatusOr<LtContext> MakeLtContext();

class Projection {
 public:
  struct Part {
    const WeightView* weight;  // [out, in], all parts with the same in
    const WeightView* bias;    // [out] or absent
  };
  // Converts and uploads; the views are not used after the call. `dtype`: of x and the weights, F32
  // (with `tf32`, products of 10-bit mantissas), BF16 or F16. `runs`: the runs [first, last) of
  // parts that Run will be asked for. `max_rows`: most rows of a product. RESOURCE_EXHAUSTED with
  // bytes needed and free when the device has no room.
  struct PartRun {
    int first;
    int last;
  };
  static absl::StatusOr<Projection> Make(LtContext& context, std::span<const Part> parts,
                                         std::span<const PartRun> runs, DType dtype, bool tf32,
                                         int64_t max_rows, cudaStream_t stream);

  int64_t in() const { return in_; }    // columns of x, padded; padding columns hold zeros
  int64_t out() const { return out_; }  // columns of y, all parts, padded
  int64_t part_begin(int part) const { return begin_[part]; }  // first column of a part in y
  int64_t bytes() const { return static_cast<int64_t>(weights_.bytes() + bias_.bytes()); }

  // Queues y[r, columns of the run] for r < PaddedRows(rows). x: [PaddedRows(rows), in()] of the
  // dtype; y: [PaddedRows(rows), out()] float, from column 0.
  absl::Status Run(LtContext& context, const PartRun& run, const void* x, int64_t rows, float* y,
                   cudaStream_t stream) const;

 private:
  // Everything of one run that does not depend on the rows.
  struct Product {
    PartRun parts;
    MatmulDesc desc;
    MatrixLayout weights;
  };
  Projection() = default;
  absl::Status Upload(std::span<const Part> parts, cudaStream_t stream);
  absl::StatusOr<Product> MakeProduct(const PartRun& run, bool tf32) const;
  absl::Status ChooseAlgorithm(LtContext& context, int64_t max_rows);
  absl::StatusOr<MatrixLayout> Rows(int64_t rows, int64_t columns, int64_t stride,
                                    cudaDataType type) const;

  DType dtype_ = DType::kF32;
  int64_t in_ = 0;
  int64_t out_ = 0;
  std::vector<int64_t> begin_;  // [parts + 1]
  DeviceMemory weights_;        // [out, in]
  DeviceMemory bias_;           // float [out]
  std::vector<Product> products_;
  cublasLtMatmulAlgo_t algorithm_{};
};

}  // namespace attend
