// SPDX-License-Identifier: Apache-2.0
//
// One matrix of weights, packed at load in the form its kernel reads, with its bias: our own gemm
// kernels, or oneDNN's for BF16 on AMX tiles. Made by the Projector, which alone runs it; who holds
// one sees widths and types.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/cpu/attention_kernel.h"
#include "engine/cpu/gemm_kernel.h"
#include "engine/cpu/worker_pool.h"
#include "engine/layer_weights.h"

namespace attend {

class OneDnnMatmul;

class PackedMatrix {
 public:
  virtual ~PackedMatrix() = default;
  PackedMatrix(const PackedMatrix&) = delete;
  PackedMatrix& operator=(const PackedMatrix&) = delete;

  int64_t columns() const { return columns_; }      // out features
  int64_t inner() const { return inner_; }          // in features
  DType compute_dtype() const { return compute_; }  // F32, BF16 or I8: of the products' operands
  // Of the rows it is given; I8 rows are made of F32 ones by the projector.
  DType input_dtype() const { return compute_ == DType::kBF16 ? DType::kBF16 : DType::kF32; }
  virtual int64_t packed_bytes() const = 0;
  virtual const char* implementation() const = 0;  // for the log

  // ---- For the Projector ----

  // Some rows of a product times one strip of columns.
  struct Piece {
    int64_t strip = 0;
    bool next_follows = false;       // this thread takes the next strip after it
    const void* const* x = nullptr;  // [rows]; I8: quantised, of padded_inner() elements
    const float* x_scale = nullptr;  // [rows] I8 only
    const OutputRow* y = nullptr;    // [rows]
    int64_t rows = 0;                // at most kGemmRows
    float* sums = nullptr;           // scratch of this worker, see GemmStrip
    float* wide = nullptr;
    int worker = 0;
  };
  virtual int64_t strip_columns() const = 0;
  // Rows are cut into multiples of this only.
  virtual int64_t row_step(int64_t rows) const = 0;
  // By the caller's thread, for every row count of a piece; any worker may Run it then.
  virtual absl::Status Prepare(int64_t rows) = 0;
  virtual absl::Status Run(const Piece& piece) = 0;
  // I8: elements of a quantised row, and what is added to each.
  virtual int64_t padded_inner() const { return inner_; }
  virtual int input_offset() const { return 0; }

  int64_t strips() const { return (columns_ + strip_columns() - 1) / strip_columns(); }

 protected:
  PackedMatrix(int64_t columns, int64_t inner, DType compute)
      : columns_(columns), inner_(inner), compute_(compute) {}

 private:
  const int64_t columns_;
  const int64_t inner_;
  const DType compute_;
};

// `view` [out, in] of F32, F16 or BF16, packed by the pool's threads. BF16 weights stay BF16 in
// memory, whatever they compute in. RESOURCE_EXHAUSTED when the system refuses memory.
absl::StatusOr<std::unique_ptr<PackedMatrix>> PackForKernel(const GemmKernel& kernel, CpuIsa isa,
                                                            const WeightView& view,
                                                            const WeightView& bias, DType compute,
                                                            WorkerPool& pool);

// BF16 by oneDNN. UNIMPLEMENTED when it has no kernel for the shape whose bits are independent of
// the row count.
absl::StatusOr<std::unique_ptr<PackedMatrix>> PackForOneDnn(OneDnnMatmul& onednn, CpuIsa isa,
                                                            const WeightView& view,
                                                            const WeightView& bias,
                                                            WorkerPool& pool);

}  // namespace attend
