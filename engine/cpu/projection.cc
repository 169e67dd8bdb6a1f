// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/projection.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/cpu/mapped_memory.h"
#include "engine/cpu/onednn_matmul.h"
#include "engine/cpu/own_gemm.h"
#include "engine/cpu/row_convert.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

// Below this many rows a task would be shorter than handing it out.
constexpr int64_t kMinChunkRows = 16;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The first error of a phase, from any worker.
class FirstError {
 public:
  void Set(absl::Status status) {
    const std::lock_guard lock(mutex_);
    if (status_.ok()) status_ = std::move(status);
  }
  absl::Status status() const { return status_; }

 private:
  std::mutex mutex_;
  absl::Status status_;
};

// Rows [begin, begin + count) of `view`, converted to `dtype`: [count][columns].
std::vector<std::byte> PlainRows(CpuIsa isa, const WeightView& view, int64_t begin, int64_t count,
                                 DType dtype) {
  std::vector<std::byte> plain(static_cast<size_t>(count * view.columns * DTypeBytes(dtype)));
  for (int64_t r = 0; r < count; ++r) {
    std::byte* row = plain.data() + r * view.columns * DTypeBytes(dtype);
    const int64_t first = (begin + r) * view.row_stride;
    if (view.column_stride == 1) {
      const auto* source =
          static_cast<const std::byte*>(view.data) + first * DTypeBytes(view.dtype);
      ConvertElements(isa, view.dtype, source, dtype, row, view.columns);
      continue;
    }
    for (int64_t c = 0; c < view.columns; ++c) StoreFloat(dtype, view.At(begin + r, c), row, c);
  }
  return plain;
}

std::vector<float> LoadBias(const WeightView& bias, int64_t columns) {
  std::vector<float> values(static_cast<size_t>(columns), 0.0f);
  for (int64_t c = 0; bias.present() && c < columns; ++c) values[c] = bias.At(c, 0);
  return values;
}

}  // namespace

class OneDnnMatrix final : public PackedMatrix {
 public:
  OneDnnMatrix(OneDnnMatmul& onednn, const WeightView& view, const WeightView& bias, DType compute)
      : PackedMatrix(view.rows, view.columns, compute),
        onednn_(onednn),
        bias_(LoadBias(bias, view.rows)) {}

  absl::Status Pack(CpuIsa isa, const WeightView& view, WorkerPool& pool) {
    ASSIGN_OR_RETURN(const std::string kernel, onednn_.KernelName(ShapeOf(0)));
    name_ = "onednn " + kernel;
    ASSIGN_OR_RETURN(int64_t panel_bytes, onednn_.PackedBytes(ShapeOf(0)));
    RETURN_IF_ERROR(onednn_.PackedBytes(ShapeOf(panels() - 1)).status());
    panel_bytes = RoundUp(panel_bytes, 64);
    RETURN_IF_ERROR(memory_.Allocate(panel_bytes * panels()));
    packed_.resize(static_cast<size_t>(panels()));
    FirstError error;
    pool.ParallelFor(panels(), [&](int64_t panel, int) {
      const OneDnnMatmul::Shape shape = ShapeOf(panel);
      const std::vector<std::byte> plain =
          PlainRows(isa, view, panel * panel_columns(), shape.columns, compute_dtype());
      auto packed = onednn_.Pack(shape, plain.data(), memory_.data() + panel * panel_bytes);
      if (!packed.ok()) return error.Set(packed.status());
      packed_[panel] = *packed;
    });
    return error.status();
  }

  int64_t packed_bytes() const override { return memory_.bytes(); }
  const char* implementation() const override { return name_.c_str(); }

  absl::Status Prepare(int64_t rows) override {
    RETURN_IF_ERROR(onednn_.Prepare(ShapeOf(0), rows));
    return onednn_.Prepare(ShapeOf(panels() - 1), rows);
  }

  absl::Status RunPanel(int64_t panel, const void* x, int64_t rows, float* y, int worker) override {
    const OneDnnMatmul::Shape shape = ShapeOf(panel);
    ASSIGN_OR_RETURN(const float* tile, onednn_.Run(shape, packed_[panel], x, rows, worker));
    const int64_t column = panel * panel_columns();
    const float* bias = bias_.data() + column;
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = tile + r * shape.columns;
      float* to = y + r * columns() + column;
      for (int64_t c = 0; c < shape.columns; ++c) to[c] = from[c] + bias[c];
    }
    return absl::OkStatus();
  }

 private:
  OneDnnMatmul::Shape ShapeOf(int64_t panel) const {
    return {inner(), std::min(panel_columns(), columns() - panel * panel_columns()),
            compute_dtype()};
  }

  OneDnnMatmul& onednn_;
  std::vector<float> bias_;
  std::string name_;
  MappedMemory memory_;
  std::vector<dnnl::memory> packed_;  // [panels] views of memory_
};

// Computes in F32; BF16 weights stay BF16 in memory and are widened in registers.
class OwnMatrix final : public PackedMatrix {
 public:
  OwnMatrix(CpuIsa isa, const WeightView& view, const WeightView& bias)
      : PackedMatrix(view.rows, view.columns, DType::kF32),
        isa_(isa),
        stored_(view.dtype == DType::kBF16 ? DType::kBF16 : DType::kF32),
        bias_(LoadBias(bias, view.rows)) {}

  absl::Status Pack(const WeightView& view, WorkerPool& pool) {
    const int64_t strip = OwnGemmStrip(isa_);
    const int64_t strips = RoundUp(columns(), strip) / strip;
    const int64_t element = DTypeBytes(stored_);
    RETURN_IF_ERROR(memory_.Allocate(strips * strip * inner() * element));
    pool.ParallelFor(strips, [&](int64_t s, int) {
      const int64_t count = std::min(strip, columns() - s * strip);
      const std::vector<std::byte> plain = PlainRows(isa_, view, s * strip, count, stored_);
      std::byte* packed = memory_.data() + s * strip * inner() * element;
      for (int64_t c = 0; c < count; ++c) {
        for (int64_t i = 0; i < inner(); ++i) {
          std::copy_n(plain.data() + (c * inner() + i) * element, element,
                      packed + (i * strip + c) * element);
        }
      }
    });
    return absl::OkStatus();
  }

  int64_t packed_bytes() const override { return memory_.bytes(); }
  const char* implementation() const override { return "own"; }
  absl::Status Prepare(int64_t) override { return absl::OkStatus(); }

  absl::Status RunPanel(int64_t panel, const void* x, int64_t rows, float* y, int) override {
    const int64_t column = panel * panel_columns();
    const int64_t count = std::min(panel_columns(), columns() - column);
    OwnGemm(isa_, stored_, memory_.data() + column * inner() * DTypeBytes(stored_),
            bias_.data() + column, inner(), count, static_cast<const float*>(x), rows, y + column,
            columns());
    return absl::OkStatus();
  }

 private:
  const CpuIsa isa_;
  const DType stored_;
  std::vector<float> bias_;
  MappedMemory memory_;
};

std::string ProjectionLibrary(CpuIsa isa) {
  return isa == CpuIsa::kAvx512 ? OneDnnMatmul::Version() : "own";
}

Projector::Projector(CpuIsa isa, WorkerPool& pool) : isa_(isa), pool_(pool) {
  if (isa == CpuIsa::kAvx512) onednn_ = std::make_unique<OneDnnMatmul>(pool.workers());
}

Projector::~Projector() = default;

absl::StatusOr<std::unique_ptr<PackedMatrix>> Projector::Pack(const WeightView& matrix,
                                                              const WeightView& bias,
                                                              DType compute) {
  if (!matrix.present() || matrix.rows < 1 || matrix.columns < 1 || !IsFloat(matrix.dtype)) {
    return absl::InternalError("projection: no F32, F16 or BF16 matrix to pack");
  }
  if (bias.present() && bias.rows != matrix.rows) {
    return absl::InternalError("projection: bias of " + std::to_string(bias.rows) +
                               " elements for " + std::to_string(matrix.rows) + " columns");
  }
  if (onednn_ != nullptr) {
    auto packed = std::make_unique<OneDnnMatrix>(*onednn_, matrix, bias, compute);
    const absl::Status status = packed->Pack(isa_, matrix, pool_);
    if (status.ok()) return std::unique_ptr<PackedMatrix>(std::move(packed));
    if (!absl::IsUnimplemented(status) || compute != DType::kF32) return status;
  }
  if (compute != DType::kF32) return absl::UnimplementedError("no BF16 product on this machine");
  auto packed = std::make_unique<OwnMatrix>(isa_, matrix, bias);
  RETURN_IF_ERROR(packed->Pack(matrix, pool_));
  return std::unique_ptr<PackedMatrix>(std::move(packed));
}

absl::Status Projector::Run(std::span<const Product> products) {
  // Rows are cut where weights need not be read twice for it, or where panels alone can't keep the
  // workers busy. Neither changes a row's bits.
  int64_t chunk = OneDnnMatmul::kMaxRows;
  const auto task_count = [&](const Product& product) {
    return product.matrix->panels() * ((product.rows + chunk - 1) / chunk);
  };
  const auto total_tasks = [&] {
    int64_t tasks = 0;
    for (const Product& product : products) tasks += task_count(product);
    return tasks;
  };
  while (chunk > kMinChunkRows && total_tasks() < 2 * pool_.workers()) chunk /= 2;
  for (const Product& product : products) {
    if (product.rows >= chunk) RETURN_IF_ERROR(product.matrix->Prepare(chunk));
    if (product.rows % chunk > 0) RETURN_IF_ERROR(product.matrix->Prepare(product.rows % chunk));
  }
  FirstError error;
  pool_.ParallelFor(total_tasks(), [&](int64_t task, int worker) {
    const Product* product = products.data();
    for (; task >= task_count(*product); ++product) task -= task_count(*product);
    const PackedMatrix& matrix = *product->matrix;
    const int64_t chunks = (product->rows + chunk - 1) / chunk;
    const int64_t row = task % chunks * chunk;
    const auto* x = static_cast<const std::byte*>(product->x) +
                    row * matrix.inner() * DTypeBytes(matrix.compute_dtype());
    absl::Status status =
        product->matrix->RunPanel(task / chunks, x, std::min(chunk, product->rows - row),
                                  product->y + row * matrix.columns(), worker);
    if (!status.ok()) error.Set(std::move(status));
  });
  return error.status();
}

}  // namespace attend
