// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/packed_matrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "engine/cpu/mapped_memory.h"
#include "engine/cpu/row_convert.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

// Whatever the packed type, a group of inner elements of one column takes 4 bytes.
constexpr int64_t kCellBytes = 4;

// Up to this many rows a strip is read from memory faster than it is computed: two threads that
// share one would both read it.
constexpr int64_t kRowsOfOneReader = 32;
// Rows of a kernel's tile; other cuts leave tiles half empty.
constexpr int64_t kRowStep = 6;

// Transposes in blocks, so that what is written stays in the first-level cache meanwhile.
constexpr int64_t kGroupsPerBlock = 64;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Row `row` of `view` in `dtype`, at `to`.
void PlainRow(CpuIsa isa, const WeightView& view, int64_t row, DType dtype, std::byte* to) {
  if (view.column_stride == 1) {
    const auto* from =
        static_cast<const std::byte*>(view.data) + row * view.row_stride * DTypeBytes(view.dtype);
    return ConvertElements(isa, view.dtype, from, dtype, to, view.columns);
  }
  for (int64_t c = 0; c < view.columns; ++c) StoreFloat(dtype, view.At(row, c), to, c);
}

// Symmetric 8-bit integers of a row of weights; returns the scale. A row that is not finite gets
// the scale NaN, so that whoever uses it sees it.
float QuantiseWeights(const std::vector<float>& weights, int8_t* to) {
  float largest = 0;
  bool finite = true;
  for (float weight : weights) {
    finite = finite && std::isfinite(weight);
    largest = std::max(largest, std::fabs(weight));
  }
  if (!finite) return std::numeric_limits<float>::quiet_NaN();
  const float scale = largest / 127;
  if (scale == 0) return 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    to[i] = static_cast<int8_t>(std::clamp(std::nearbyint(weights[i] / scale), -127.0f, 127.0f));
  }
  return scale;
}

class KernelMatrix final : public PackedMatrix {
 public:
  KernelMatrix(const GemmKernel& kernel, const WeightView& view, const WeightView& bias,
               DType compute)
      : PackedMatrix(view.rows, view.columns, compute),
        kernel_(kernel),
        groups_(RoundUp(view.columns, kernel.group) / kernel.group),
        bias_(static_cast<size_t>(padded_columns()), 0.0f) {
    for (int64_t c = 0; bias.present() && c < columns(); ++c) bias_[c] = bias.At(c, 0);
    if (kernel.packed == DType::kI8) {
      scale_.assign(bias_.size(), 0.0f);
      offset_.assign(bias_.size(), 0);
    }
  }

  absl::Status Pack(CpuIsa isa, const WeightView& view, WorkerPool& pool) {
    RETURN_IF_ERROR(memory_.Allocate(padded_columns() * groups_ * kCellBytes));
    pool.ParallelFor(strips(), [&](int64_t strip, int) { PackStrip(isa, view, strip); });
    return absl::OkStatus();
  }

  int64_t packed_bytes() const override { return memory_.bytes(); }
  const char* implementation() const override { return kernel_.name; }
  int64_t strip_columns() const override { return kernel_.strip_columns; }
  int64_t row_step(int64_t rows) const override {
    return rows <= kRowsOfOneReader ? rows : kRowStep;
  }
  absl::Status Prepare(int64_t) override { return absl::OkStatus(); }
  int64_t padded_inner() const override { return groups_ * kernel_.group; }
  int input_offset() const override { return kernel_.input_offset; }

  absl::Status Run(const Piece& piece) override {
    const int64_t column = piece.strip * strip_columns();
    const std::byte* weights = memory_.data() + column * groups_ * kCellBytes;
    const bool quantised = kernel_.packed == DType::kI8;
    kernel_.run({
        .weights = weights,
        .next = piece.next_follows ? weights + strip_columns() * groups_ * kCellBytes : nullptr,
        .inner = quantised ? padded_inner() : inner(),
        .columns = std::min(strip_columns(), columns() - column),
        .bias = bias_.data() + column,
        .x = piece.x,
        .y = piece.y,
        .rows = piece.rows,
        .y_column = column,
        .sums = piece.sums,
        .wide = piece.wide,
        .x_scale = piece.x_scale,
        .weight_scale = quantised ? scale_.data() + column : nullptr,
        .weight_offset = quantised ? offset_.data() + column : nullptr,
    });
    return absl::OkStatus();
  }

 private:
  int64_t padded_columns() const { return RoundUp(columns(), kernel_.strip_columns); }

  void PackStrip(CpuIsa isa, const WeightView& view, int64_t strip) {
    const int64_t width = strip_columns();
    const int64_t first = strip * width;
    const int64_t count = std::min(width, columns() - first);
    const int64_t row_bytes = groups_ * kCellBytes;
    std::vector<std::byte> plain(static_cast<size_t>(count * row_bytes));
    std::vector<float> floats(static_cast<size_t>(kernel_.packed == DType::kI8 ? inner() : 0));
    for (int64_t c = 0; c < count; ++c) {
      std::byte* row = plain.data() + c * row_bytes;
      if (kernel_.packed != DType::kI8) {
        PlainRow(isa, view, first + c, kernel_.packed, row);
        continue;
      }
      PlainRow(isa, view, first + c, DType::kF32, reinterpret_cast<std::byte*>(floats.data()));
      auto* bytes = reinterpret_cast<int8_t*>(row);
      scale_[first + c] = QuantiseWeights(floats, bytes);
      for (int64_t i = 0; i < inner(); ++i) offset_[first + c] += bytes[i] * kernel_.input_offset;
    }
    std::byte* packed = memory_.data() + first * row_bytes;
    for (int64_t begin = 0; begin < groups_; begin += kGroupsPerBlock) {
      const int64_t end = std::min(begin + kGroupsPerBlock, groups_);
      for (int64_t c = 0; c < count; ++c) {
        for (int64_t g = begin; g < end; ++g) {
          std::memcpy(packed + (g * width + c) * kCellBytes,
                      plain.data() + c * row_bytes + g * kCellBytes, kCellBytes);
        }
      }
    }
  }

  const GemmKernel& kernel_;
  const int64_t groups_;
  MappedMemory memory_;          // [strips][groups][strip columns] cells
  std::vector<float> bias_;      // [padded columns]
  std::vector<float> scale_;     // [padded columns] I8 only
  std::vector<int32_t> offset_;  // [padded columns] I8 only
};

}  // namespace

absl::StatusOr<std::unique_ptr<PackedMatrix>> PackForKernel(const GemmKernel& kernel, CpuIsa isa,
                                                            const WeightView& view,
                                                            const WeightView& bias, DType compute,
                                                            WorkerPool& pool) {
  auto matrix = std::make_unique<KernelMatrix>(kernel, view, bias, compute);
  RETURN_IF_ERROR(matrix->Pack(isa, view, pool));
  return std::unique_ptr<PackedMatrix>(std::move(matrix));
}

}  // namespace attend
