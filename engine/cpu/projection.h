// SPDX-License-Identifier: Apache-2.0
//
// Packed matrix products of the CPU engine: y = x W^T + b with W packed once at load. On AVX-512
// oneDNN's packed brgemm, one single-threaded primitive per column panel, driven by the engine's
// workers; where oneDNN has no kernel whose bits are independent of the row count (AVX2) our own.
// One implementation serves every row count of a matrix, so that a row's bits do not depend on the
// rows beside it.
//
// One caller at a time. q, k and v of a layer are three matrices whose panels run as one phase:
// each keeps its own rows (a batch may have queries without new keys, and new keys without queries)
// and its own output.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "engine/cpu/attention_kernel.h"
#include "engine/cpu/worker_pool.h"
#include "engine/layer_weights.h"

namespace attend {

// One packed matrix with its bias; immutable after packing.
class PackedMatrix {
 public:
  virtual ~PackedMatrix() = default;

  int64_t columns() const { return columns_; }      // out features
  int64_t inner() const { return inner_; }          // in features
  DType compute_dtype() const { return compute_; }  // F32 or BF16: also the dtype of x
  virtual int64_t packed_bytes() const = 0;
  virtual const char* implementation() const = 0;  // for the log: "onednn brg:avx512_core", "own"

 protected:
  friend class Projector;
  PackedMatrix(int64_t columns, int64_t inner, DType compute)
      : columns_(columns), inner_(inner), compute_(compute) {}

  int64_t panel_columns() const { return columns_ >= 2048 ? 128 : 64; }
  int64_t panels() const { return (columns_ + panel_columns() - 1) / panel_columns(); }

  // Called before RunPanel, by the caller's thread, for every row count that will be used.
  virtual absl::Status Prepare(int64_t rows) = 0;
  // Columns of one panel of y for `rows` rows. Any worker, any number at a time.
  virtual absl::Status RunPanel(int64_t panel, const void* x, int64_t rows, float* y,
                                int worker) = 0;

 private:
  const int64_t columns_;
  const int64_t inner_;
  const DType compute_;
};

// y[r, c] for all rows and columns. x: [rows, inner] of the matrix's compute dtype; y: [rows,
// columns] float32; both without gaps. Borrowed during the call.
struct Product {
  PackedMatrix* matrix = nullptr;
  const void* x = nullptr;
  int64_t rows = 0;
  float* y = nullptr;
};

// The code that multiplies, for numerics ids: "onednn2.6.3" or "own".
std::string ProjectionLibrary(CpuIsa isa);

class OneDnnMatmul;

class Projector {
 public:
  // The pool must outlive the projector, the projector its matrices.
  Projector(CpuIsa isa, WorkerPool& pool);
  ~Projector();

  // Packs `matrix` [out, in]; an absent bias is zeros. compute: F32 or BF16. UNIMPLEMENTED when
  // this machine has no BF16 product for the shape.
  absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const WeightView& matrix,
                                                     const WeightView& bias, DType compute);

  // Runs the products as one phase on the pool. INTERNAL when a primitive fails.
  absl::Status Run(std::span<const Product> products);

 private:
  const CpuIsa isa_;
  WorkerPool& pool_;
  std::unique_ptr<OneDnnMatmul> onednn_;  // AVX-512 only
};

}  // namespace attend
