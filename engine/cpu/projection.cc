// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/projection.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "engine/cpu/onednn_matmul.h"
#include "engine/cpu/row_convert.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

// Multiply-adds of the smallest task: some 3 us, ten times what handing it out costs.
constexpr int64_t kMinTaskWork = 6 * 64 * 1024;

// Reading weights from memory takes as long as computing so many rows with them.
constexpr int64_t kRowsOfReading = 16;

// Rows quantised by one task.
constexpr int64_t kRowsPerQuantise = 8;

// |sum of products| <= 127 x 127 x inner must stay below 2^31.
constexpr int64_t kMaxI8Inner = 131072;

// Floats of a worker's scratch: sums, and a widened block, of the widest strip.
constexpr int64_t kWidestStrip = 64;
constexpr int64_t kSumFloats = kGemmRows * kWidestStrip;
constexpr int64_t kWideFloats = 2 * kGemmBlockGroups * kWidestStrip;

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

// Null where the machine has none.
const GemmKernel* KernelFor(CpuIsa isa, const CpuInfo& cpu, DType weights, DType compute) {
  const bool wide = isa == CpuIsa::kAvx512;
  if (compute == DType::kI8) return wide && cpu.avx512_vnni ? &kGemmVnniI8 : &kGemmAvx2I8;
  if (compute == DType::kBF16) return wide && cpu.avx512_bf16 ? &kGemmBF16Dot : nullptr;
  if (weights == DType::kBF16) return wide ? &kGemmAvx512BF16 : &kGemmAvx2BF16;
  return wide ? &kGemmAvx512F32 : &kGemmAvx2F32;
}

bool UsesTiles(CpuIsa isa, const CpuInfo& cpu) { return isa == CpuIsa::kAvx512 && cpu.amx_bf16; }

int64_t StepsOf(const Product& product) {
  const int64_t step = product.matrix->row_step(product.rows);
  return step == 0 ? 0 : (product.rows + step - 1) / step;
}

int64_t UnitsOf(const Product& product) { return product.matrix->strips() * StepsOf(product); }

// Multiply-adds of one unit, or what reading its weights costs.
int64_t UnitWork(const Product& product) {
  const PackedMatrix& matrix = *product.matrix;
  const int64_t rows =
      product.rows < kRowsOfReading ? kRowsOfReading : matrix.row_step(product.rows);
  return rows * matrix.strip_columns() * matrix.inner();
}

}  // namespace

std::string ProjectionLibrary(CpuIsa isa, const CpuInfo& cpu) {
  return UsesTiles(isa, cpu) ? OneDnnMatmul::Version() : "own";
}

Projector::Projector(CpuIsa isa, const CpuInfo& cpu, WorkerPool& pool)
    : isa_(isa), cpu_(cpu), pool_(pool), scratch_(static_cast<size_t>(pool.workers())) {
  if (UsesTiles(isa, cpu)) onednn_ = std::make_unique<OneDnnMatmul>(pool.workers());
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
  if (compute == DType::kI8 && matrix.columns > kMaxI8Inner) {
    return absl::UnimplementedError("projection: I8 sums of " + std::to_string(matrix.columns) +
                                    " products do not fit 32 bits");
  }
  if (compute == DType::kBF16 && onednn_ != nullptr) {
    auto packed = PackForOneDnn(*onednn_, isa_, matrix, bias, pool_);
    if (packed.ok() || !absl::IsUnimplemented(packed.status())) return packed;
  }
  const GemmKernel* kernel = KernelFor(isa_, cpu_, matrix.dtype, compute);
  if (kernel == nullptr) return absl::UnimplementedError("no BF16 product on this machine");
  return PackForKernel(*kernel, isa_, matrix, bias, compute, pool_);
}

absl::Status Projector::Run(std::span<const Product> products) {
  for (MappedMemory& scratch : scratch_) {
    RETURN_IF_ERROR(scratch.Reserve((kSumFloats + kWideFloats) * int64_t{sizeof(float)}));
  }
  inputs_.clear();
  for (const Product& product : products) {
    RETURN_IF_ERROR(Prepare(product));
    inputs_.push_back({product.x, nullptr});
  }
  RETURN_IF_ERROR(Quantise(products));
  CutTasks(products);
  FirstError error;
  pool_.ParallelFor(task_ends_, [&](int64_t index, int worker) {
    const Task& task = tasks_[static_cast<size_t>(index)];
    absl::Status status =
        RunTask(products[task.product], inputs_[task.product], task.begin, task.end, worker);
    if (!status.ok()) error.Set(std::move(status));
  });
  return error.status();
}

absl::Status Projector::Prepare(const Product& product) {
  if (product.rows == 0) return absl::OkStatus();
  const int64_t step = product.matrix->row_step(product.rows);
  RETURN_IF_ERROR(product.matrix->Prepare(step));
  const int64_t rest = product.rows % step;
  return rest == 0 ? absl::OkStatus() : product.matrix->Prepare(rest);
}

// Rows that products share (the same pointers) are quantised once.
absl::Status Projector::Quantise(std::span<const Product> products) {
  quantised_.resize(std::max(quantised_.size(), products.size()));
  std::vector<size_t>& own = quantised_here_;
  own.clear();
  for (size_t i = 0; i < products.size(); ++i) {
    const Product& product = products[i];
    if (product.matrix->compute_dtype() != DType::kI8 || product.rows == 0) continue;
    const auto shared = std::find_if(own.begin(), own.end(), [&](size_t j) {
      return products[j].matrix->inner() == product.matrix->inner() && products[j].x <= product.x &&
             product.x + product.rows <= products[j].x + products[j].rows;
    });
    const size_t source = shared == own.end() ? i : *shared;
    QuantisedRows& rows = quantised_[source];
    if (source == i) {
      own.push_back(i);
      RETURN_IF_ERROR(rows.bytes.Reserve(product.rows * product.matrix->padded_inner()));
      rows.x.resize(static_cast<size_t>(product.rows));
      rows.scale.resize(static_cast<size_t>(product.rows));
    }
    const int64_t first = product.x - products[source].x;
    inputs_[i] = {rows.x.data() + first, rows.scale.data() + first};
  }
  for (size_t i : own) {
    const Product& product = products[i];
    QuantisedRows& rows = quantised_[i];
    const int64_t inner = product.matrix->inner();
    const int64_t padded = product.matrix->padded_inner();
    const int offset = product.matrix->input_offset();
    const int64_t tasks = (product.rows + kRowsPerQuantise - 1) / kRowsPerQuantise;
    pool_.ParallelFor(tasks, [&](int64_t task, int) {
      const int64_t end = std::min((task + 1) * kRowsPerQuantise, product.rows);
      for (int64_t r = task * kRowsPerQuantise; r < end; ++r) {
        auto* to = reinterpret_cast<uint8_t*>(rows.bytes.data()) + r * padded;
        rows.scale[r] =
            QuantiseRow(isa_, static_cast<const float*>(product.x[r]), inner, offset, to);
        std::fill(to + inner, to + padded, uint8_t{0});
        rows.x[r] = to;
      }
    });
  }
  return absl::OkStatus();
}

// Each worker has the same part of the columns of every product: what it has written of a head,
// attention then finds in its core's cache. Tasks are long at first, so that a thread reads weights
// one after another, and short in the end, so that all threads end together however many strips
// there are and whatever else their cores do.
void Projector::CutTasks(std::span<const Product> products) {
  tasks_.clear();
  task_ends_.clear();
  const int64_t workers = pool_.workers();
  for (int64_t worker = 0; worker < workers; ++worker) {
    const auto first = [&](const Product& product, int64_t w) {
      return UnitsOf(product) * w / workers;
    };
    int64_t left = 0;
    for (const Product& product : products) {
      left += (first(product, worker + 1) - first(product, worker)) * UnitWork(product);
    }
    for (size_t i = 0; i < products.size(); ++i) {
      const int64_t work = UnitWork(products[i]);
      const int64_t end = first(products[i], worker + 1);
      for (int64_t begin = first(products[i], worker); begin < end;) {
        const int64_t wanted = std::max(left / 2, kMinTaskWork);
        const int64_t count = std::clamp<int64_t>(wanted / work, 1, end - begin);
        tasks_.push_back({static_cast<int>(i), begin, begin + count});
        begin += count;
        left -= count * work;
      }
    }
    task_ends_.push_back(static_cast<int64_t>(tasks_.size()));
  }
}

absl::Status Projector::RunTask(const Product& product, const Input& input, int64_t begin,
                                int64_t end, int worker) {
  PackedMatrix& matrix = *product.matrix;
  const int64_t step = matrix.row_step(product.rows);
  const int64_t steps = StepsOf(product);
  float* scratch = reinterpret_cast<float*>(scratch_[worker].data());
  while (begin < end) {
    const int64_t strip = begin / steps;
    const int64_t strip_end = std::min((strip + 1) * steps, end);
    const int64_t most = std::max<int64_t>(1, kGemmRows / step);
    const int64_t pieces = (strip_end - begin + most - 1) / most;
    const int64_t count = (strip_end - begin + pieces - 1) / pieces;
    for (; begin < strip_end; begin += std::min(count, strip_end - begin)) {
      const int64_t piece_end = std::min(begin + count, strip_end);
      const int64_t row = begin % steps * step;
      const int64_t row_end = std::min((piece_end - strip * steps) * step, product.rows);
      RETURN_IF_ERROR(matrix.Run({
          .strip = strip,
          .next_follows = piece_end == strip_end && strip_end < end,
          .x = input.x + row,
          .x_scale = input.scale == nullptr ? nullptr : input.scale + row,
          .y = product.y + row,
          .rows = row_end - row,
          .sums = scratch,
          .wide = scratch + kSumFloats,
          .worker = worker,
      }));
    }
  }
  return absl::OkStatus();
}

}  // namespace attend
