// SPDX-License-Identifier: Apache-2.0
//
// Matrix products of the CPU engine, y = x W^T + b with W packed once at load: chooses the kernel
// of a matrix, and deals rows and columns of some products to the engine's workers as one phase.
// One kernel serves every row count of a matrix, so that a row's bits do not depend on the rows
// beside it.
//
// Rows are pointers: they are read where the caller has them and written where he wants them, each
// in its own dtype. q, k and v of a layer are three products of one phase, each with its own rows
// (a batch may have queries without new keys, and new keys without queries).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/cpu/attention_kernel.h"
#include "engine/cpu/cpu_info.h"
#include "engine/cpu/mapped_memory.h"
#include "engine/cpu/packed_matrix.h"
#include "engine/cpu/worker_pool.h"
#include "engine/layer_weights.h"

namespace attend {

// Borrowed during the call. The products of one phase write different memory.
struct Product {
  PackedMatrix* matrix = nullptr;
  const void* const* x = nullptr;  // [rows] -> [inner] of the matrix's input_dtype
  const OutputRow* y = nullptr;    // [rows] -> [columns]
  int64_t rows = 0;
};

// The code that multiplies, for numerics ids: "own", or oneDNN's version where it serves BF16.
std::string ProjectionLibrary(CpuIsa isa, const CpuInfo& cpu);

class OneDnnMatmul;

// One caller at a time.
class Projector {
 public:
  // The pool must outlive the projector, the projector its matrices. `cpu` says which kernels may
  // be used beyond `isa`.
  Projector(CpuIsa isa, const CpuInfo& cpu, WorkerPool& pool);
  ~Projector();

  // Packs `matrix` [out, in]; an absent bias is zeros. compute: F32, BF16 or I8 (quantises weights
  // here, and rows when they come). UNIMPLEMENTED when this machine has no such product for the
  // shape.
  absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const WeightView& matrix,
                                                     const WeightView& bias, DType compute);

  // Runs the products as one phase on the pool (I8: one more before it, for the rows). INTERNAL
  // when a primitive fails.
  absl::Status Run(std::span<const Product> products);

 private:
  // Units [begin, end) of a product; unit u is row step u % steps of strip u / steps.
  struct Task {
    int product;
    int64_t begin, end;
  };
  // Rows as a product's kernel reads them.
  struct Input {
    const void* const* x;
    const float* scale;  // I8 only
  };
  struct QuantisedRows {
    std::vector<const void*> x;
    std::vector<float> scale;
    MappedMemory bytes;
  };

  absl::Status Prepare(const Product& product);
  absl::Status Quantise(std::span<const Product> products);
  void CutTasks(std::span<const Product> products);
  absl::Status RunTask(const Product& product, const Input& input, int64_t begin, int64_t end,
                       int worker);

  const CpuIsa isa_;
  const CpuInfo cpu_;
  WorkerPool& pool_;
  std::unique_ptr<OneDnnMatmul> onednn_;  // AMX only
  std::vector<MappedMemory> scratch_;     // [workers] sums, then a widened block

  // Of the phase that runs.
  std::vector<Input> inputs_;             // [products]
  std::vector<QuantisedRows> quantised_;  // [products] those whose rows no other product has
  std::vector<size_t> quantised_here_;    // these products
  std::vector<Task> tasks_;
  std::vector<int64_t> task_ends_;  // of each worker's
};

}  // namespace attend
