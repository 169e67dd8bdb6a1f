// SPDX-License-Identifier: Apache-2.0
//
// A matrix of BF16 weights packed for oneDNN, panel by panel (PackForOneDnn). Used on machines with
// AMX tiles only, for which we have no kernel: they multiply BF16 at many times the rate of
// vectors. Everywhere else our own kernels were faster at every row count (1..1024 rows).
#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/cpu/mapped_memory.h"
#include "engine/cpu/onednn_matmul.h"
#include "engine/cpu/packed_matrix.h"
#include "engine/cpu/row_convert.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

class OneDnnMatrix final : public PackedMatrix {
 public:
  OneDnnMatrix(OneDnnMatmul& onednn, CpuIsa isa, const WeightView& view, const WeightView& bias)
      : PackedMatrix(view.rows, view.columns, DType::kBF16),
        onednn_(onednn),
        isa_(isa),
        bias_(static_cast<size_t>(view.rows), 0.0f) {
    for (int64_t c = 0; bias.present() && c < columns(); ++c) bias_[c] = bias.At(c, 0);
  }

  absl::Status Pack(const WeightView& view, WorkerPool& pool) {
    ASSIGN_OR_RETURN(const std::string kernel, onednn_.KernelName(ShapeOf(0)));
    name_ = "onednn " + kernel;
    ASSIGN_OR_RETURN(int64_t panel_bytes, onednn_.PackedBytes(ShapeOf(0)));
    RETURN_IF_ERROR(onednn_.PackedBytes(ShapeOf(strips() - 1)).status());
    panel_bytes = (panel_bytes + 63) / 64 * 64;
    RETURN_IF_ERROR(memory_.Allocate(panel_bytes * strips()));
    packed_.resize(static_cast<size_t>(strips()));
    std::mutex mutex;
    absl::Status first_error;
    pool.ParallelFor(strips(), [&](int64_t panel, int) {
      const OneDnnMatmul::Shape shape = ShapeOf(panel);
      const std::vector<uint16_t> plain = Plain(view, panel * strip_columns(), shape.columns);
      auto packed = onednn_.Pack(shape, plain.data(), memory_.data() + panel * panel_bytes);
      if (packed.ok()) {
        packed_[panel] = *packed;
        return;
      }
      const std::lock_guard lock(mutex);
      if (first_error.ok()) first_error = packed.status();
    });
    return first_error;
  }

  int64_t packed_bytes() const override { return memory_.bytes(); }
  const char* implementation() const override { return name_.c_str(); }
  int64_t strip_columns() const override { return columns() >= 2048 ? 128 : 64; }
  // Primitives are made for exact row counts, so there should be few of them.
  int64_t row_step(int64_t rows) const override { return std::min(rows, kGemmRows); }

  absl::Status Prepare(int64_t rows) override {
    RETURN_IF_ERROR(onednn_.Prepare(ShapeOf(0), rows));
    return onednn_.Prepare(ShapeOf(strips() - 1), rows);
  }

  absl::Status Run(const Piece& piece) override {
    const OneDnnMatmul::Shape shape = ShapeOf(piece.strip);
    ASSIGN_OR_RETURN(float* tile,
                     onednn_.Run(shape, packed_[piece.strip], piece.x, piece.rows, piece.worker));
    const int64_t column = piece.strip * strip_columns();
    for (int64_t r = 0; r < piece.rows; ++r) {
      float* from = tile + r * shape.columns;
      for (int64_t c = 0; c < shape.columns; ++c) from[c] += bias_[column + c];
      const OutputRow& y = piece.y[r];
      ConvertElements(isa_, DType::kF32, from, y.dtype,
                      static_cast<std::byte*>(y.data) + column * DTypeBytes(y.dtype),
                      shape.columns);
    }
    return absl::OkStatus();
  }

 private:
  OneDnnMatmul::Shape ShapeOf(int64_t panel) const {
    return {inner(), std::min(strip_columns(), columns() - panel * strip_columns())};
  }

  std::vector<uint16_t> Plain(const WeightView& view, int64_t first, int64_t count) const {
    std::vector<uint16_t> plain(static_cast<size_t>(count * inner()));
    for (int64_t c = 0; c < count; ++c) {
      for (int64_t i = 0; i < inner(); ++i) {
        plain[c * inner() + i] = BF16FromFloat(view.At(first + c, i));
      }
    }
    return plain;
  }

  OneDnnMatmul& onednn_;
  const CpuIsa isa_;
  std::vector<float> bias_;
  std::string name_;
  MappedMemory memory_;
  std::vector<dnnl::memory> packed_;  // [strips] views of memory_
};

}  // namespace

absl::StatusOr<std::unique_ptr<PackedMatrix>> PackForOneDnn(OneDnnMatmul& onednn, CpuIsa isa,
                                                            const WeightView& view,
                                                            const WeightView& bias,
                                                            WorkerPool& pool) {
  auto matrix = std::make_unique<OneDnnMatrix>(onednn, isa, view, bias);
  RETURN_IF_ERROR(matrix->Pack(view, pool));
  return std::unique_ptr<PackedMatrix>(std::move(matrix));
}

}  // namespace attend
