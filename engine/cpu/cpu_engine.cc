// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/cpu_engine.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "engine/cpu/attention_kernel.h"
#include "engine/cpu/attention_workspace.h"
#include "engine/cpu/batch_rows.h"
#include "engine/cpu/cpu_info.h"
#include "engine/cpu/head_transform.h"
#include "engine/cpu/mapped_memory.h"
#include "engine/cpu/projection.h"
#include "engine/cpu/worker_pool.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

// Raised with every change of arithmetic, so that equal numerics ids mean equal bits.
constexpr char kKernelVersion[] = "k3";

// Giving back less is not worth the system call and the split huge page.
constexpr int64_t kMinDiscardBytes = 256 << 10;
constexpr int64_t kPage = 4096;

constexpr int64_t kRowsPerTransform = 4;

// Packed weights are read once for so many rows, and all cores are busy: rows per second are those
// of larger batches, and everybody in the batch waits for less.
constexpr int64_t kEnoughRows = 256;

int64_t MicrosSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() -
                                                               start)
      .count();
}

// "cpu-avx512_bf16-own-k3", "cpu-avx2-own-k3". The bf16 unit belongs to it: AMX tiles (oneDNN) and
// vector dot products sum in different orders.
std::string NumericsId(CpuIsa isa, const CpuInfo& cpu) {
  std::string unit = "avx2";
  if (isa == CpuIsa::kAvx512) {
    unit = cpu.amx_bf16 ? "avx512_amx" : cpu.avx512_bf16 ? "avx512_bf16" : "avx512";
  }
  return "cpu-" + unit + "-" + ProjectionLibrary(isa, cpu) + "-" + kKernelVersion;
}

struct Layer {
  AttentionSpec spec;
  DType compute = DType::kF32;  // of the products: F32, BF16 or I8
  DType attention_compute = DType::kF32;
  std::unique_ptr<PackedMatrix> q, k, v, o;
  std::vector<float> q_norm, k_norm;  // [head_dim] or empty
};

class CpuEngine final : public AttentionEngine {
 public:
  CpuEngine(EngineInfo info, CpuIsa isa, const CpuInfo& cpu, DType bf16_compute, bool i8_weights,
            MappedMemory kv_memory)
      : info_(std::move(info)),
        isa_(isa),
        bf16_compute_(bf16_compute),
        i8_weights_(i8_weights),
        kv_memory_(std::move(kv_memory)),
        pool_(info_.threads),
        projector_(isa, cpu, pool_) {}

  const EngineInfo& info() const override { return info_; }
  int64_t progress_ns() const override { return pool_.progress_ns(); }

  absl::StatusOr<LayerInfo> AddLayer(const AttentionSpec& spec,
                                     const LayerWeights& weights) override;
  absl::StatusOr<Ticket> Start(const BatchPlan& plan, std::span<const AttendItem> items) override;
  bool Finished(Ticket) override { return true; }  // Start does all
  absl::StatusOr<StageTimes> Wait(Ticket ticket) override;
  absl::Status CopyBlocks(std::span<const BlockCopy> copies) override;
  absl::Status ReadKv(const KvRows& rows, std::span<std::byte> bytes) override;
  absl::Status WriteKv(const KvRows& rows, std::span<const std::byte> bytes) override;
  void Discard(int64_t address, int64_t bytes) override;

 private:
  absl::Status PackLayer(const LayerWeights& weights, DType compute, Layer& layer);
  const AttentionSpec* SpecOf(int layer) const {
    const bool known = layer >= 0 && layer < static_cast<int>(layers_.size());
    return known ? &layers_[static_cast<size_t>(layer)].spec : nullptr;
  }
  absl::Status ReserveHeads(const BatchRows& rows, const Layer* layer);
  absl::Status ReadProjected(const BatchRows& rows);
  absl::Status Project(const BatchRows& rows, Layer& layer);
  void TransformHeads(const BatchRows& rows, const Layer& layer);
  absl::Status ProjectOutput(const BatchRows& rows, Layer& layer);

  const EngineInfo info_;
  const CpuIsa isa_;
  const DType bf16_compute_;  // what BF16 weights compute in
  const bool i8_weights_;     // weights are quantised at load, whatever they are
  MappedMemory kv_memory_;
  WorkerPool pool_;
  Projector projector_;
  std::vector<Layer> layers_;

  // Workspaces of one batch; they grow and are kept.
  MappedMemory input_;      // [input rows, d_model], those that are not of the products' dtype
  MappedMemory context_;    // [key rows, context_width] likewise, cross-attention only
  MappedMemory q_, k_, v_;  // float, as AttentionBatch wants them
  MappedMemory attended_;   // [query rows, q_heads, v_head_dim] as the output product reads it
  std::vector<const void*> input_rows_, context_rows_, attended_inputs_;
  std::vector<OutputRow> q_rows_, k_rows_, v_rows_, attended_rows_, output_rows_;
  AttentionWorkspace attention_;

  Ticket ticket_ = 0;  // of the last Start
  StageTimes times_;
};

float* Floats(const MappedMemory& memory) { return reinterpret_cast<float*>(memory.data()); }

// The rows of [count, width].
void PointTo(std::byte* data, DType dtype, int64_t count, int64_t width,
             std::vector<OutputRow>& rows) {
  rows.resize(static_cast<size_t>(count));
  for (int64_t r = 0; r < count; ++r) rows[r] = {data + r * width * DTypeBytes(dtype), dtype};
}

absl::Status CpuEngine::PackLayer(const LayerWeights& weights, DType compute, Layer& layer) {
  layer.compute = compute;
  ASSIGN_OR_RETURN(layer.q, projector_.Pack(weights.q, weights.q_bias, compute));
  ASSIGN_OR_RETURN(layer.k, projector_.Pack(weights.k, weights.k_bias, compute));
  ASSIGN_OR_RETURN(layer.v, projector_.Pack(weights.v, weights.v_bias, compute));
  ASSIGN_OR_RETURN(layer.o, projector_.Pack(weights.o, weights.o_bias, compute));
  return absl::OkStatus();
}

absl::StatusOr<LayerInfo> CpuEngine::AddLayer(const AttentionSpec& spec,
                                              const LayerWeights& weights) {
  RETURN_IF_ERROR(CheckWeights(spec, weights));
  Layer layer;
  layer.spec = spec;
  layer.q_norm = LoadVector(weights.q_norm);
  layer.k_norm = LoadVector(weights.k_norm);
  const DType compute = i8_weights_                            ? DType::kI8
                        : MatrixDType(weights) == DType::kBF16 ? bf16_compute_
                                                               : DType::kF32;
  absl::Status status = PackLayer(weights, compute, layer);
  if (absl::IsUnimplemented(status) && compute == DType::kBF16) {
    status = PackLayer(weights, DType::kF32, layer);
  }
  RETURN_IF_ERROR(status);
  // Quantised weights leave attention as it is without them.
  const bool bf16 = MatrixDType(weights) == DType::kBF16;
  layer.attention_compute = layer.compute != DType::kI8 ? layer.compute
                            : bf16                      ? bf16_compute_
                                                        : DType::kF32;
  const LayerInfo info{.index = static_cast<int>(layers_.size()),
                       .compute_dtype = layer.compute,
                       .attend_dtype = layer.attention_compute,
                       .packed_bytes = layer.q->packed_bytes() + layer.k->packed_bytes() +
                                       layer.v->packed_bytes() + layer.o->packed_bytes()};
  layers_.push_back(std::move(layer));
  return info;
}

absl::StatusOr<Ticket> CpuEngine::Start(const BatchPlan& plan, std::span<const AttendItem> items) {
  RETURN_IF_ERROR(CheckLayer(plan, SpecOf(plan.layer)));
  const BatchRows rows(plan, items, isa_, pool_);
  Layer* layer = plan.layer < 0 ? nullptr : &layers_[plan.layer];
  auto start = std::chrono::steady_clock::now();
  RETURN_IF_ERROR(ReserveHeads(rows, layer));
  if (layer == nullptr) {
    RETURN_IF_ERROR(ReadProjected(rows));
  } else {
    RETURN_IF_ERROR(Project(rows, *layer));
    TransformHeads(rows, *layer);
  }
  times_.project_us = MicrosSince(start);

  start = std::chrono::steady_clock::now();
  const AttentionBatch batch{.plan = &plan,
                             .items = items,
                             .q = Floats(q_),
                             .k = Floats(k_),
                             .v = Floats(v_),
                             .kv_memory = kv_memory_.data(),
                             .output = attended_rows_.data(),
                             .compute = layer == nullptr ? DType::kF32 : layer->attention_compute};
  AppendAndAttend(isa_, batch, pool_, attention_);
  times_.attend_us = MicrosSince(start);

  start = std::chrono::steady_clock::now();
  if (layer != nullptr) RETURN_IF_ERROR(ProjectOutput(rows, *layer));
  times_.output_us = MicrosSince(start);
  return ++ticket_;
}

absl::StatusOr<StageTimes> CpuEngine::Wait(Ticket ticket) {
  if (ticket != ticket_) {
    return absl::InternalError("cpu engine: waiting for batch " + std::to_string(ticket) +
                               ", the last one is " + std::to_string(ticket_));
  }
  return times_;
}

// Memory for what lies between the products. Raw rows of attention are outputs already.
absl::Status CpuEngine::ReserveHeads(const BatchRows& rows, const Layer* layer) {
  const BatchPlan& plan = rows.plan();
  const AttentionSpec& spec = *plan.spec;
  constexpr int64_t kFloat = sizeof(float);
  RETURN_IF_ERROR(q_.Reserve(plan.query_rows * spec.q_heads * spec.head_dim * kFloat));
  RETURN_IF_ERROR(k_.Reserve(plan.key_rows * spec.kv_heads * spec.head_dim * kFloat));
  RETURN_IF_ERROR(v_.Reserve(plan.key_rows * spec.kv_heads * spec.v_head_dim * kFloat));
  if (layer == nullptr) {
    attended_rows_.resize(static_cast<size_t>(plan.query_rows));
    rows.PointToOutputs(spec.output_width, attended_rows_.data());
    return absl::OkStatus();
  }
  const DType dtype = layer->o->input_dtype();
  RETURN_IF_ERROR(attended_.Reserve(plan.query_rows * layer->o->inner() * DTypeBytes(dtype)));
  PointTo(attended_.data(), dtype, plan.query_rows, layer->o->inner(), attended_rows_);
  return absl::OkStatus();
}

// Raw work: the caller projected.
absl::Status CpuEngine::ReadProjected(const BatchRows& rows) {
  const AttentionSpec& spec = rows.spec();
  rows.ReadQueries(&AttendItem::query, spec.q_heads * spec.head_dim, Floats(q_));
  rows.ReadKeys(&AttendItem::key_source, spec.kv_heads * spec.head_dim, Floats(k_));
  rows.ReadKeys(&AttendItem::value_source, spec.kv_heads * spec.v_head_dim, Floats(v_));
  return absl::OkStatus();
}

absl::Status CpuEngine::Project(const BatchRows& rows, Layer& layer) {
  const BatchPlan& plan = rows.plan();
  const AttentionSpec& spec = rows.spec();
  const DType input = layer.q->input_dtype();
  const int64_t input_row_bytes = spec.d_model * DTypeBytes(input);
  const int64_t input_rows = spec.cross ? plan.query_rows : plan.input_rows;
  RETURN_IF_ERROR(input_.Reserve(input_rows * input_row_bytes));
  input_rows_.resize(static_cast<size_t>(input_rows));
  rows.PointToQueries(&AttendItem::query, spec.d_model, input, input_.data(), input_rows_.data());
  const void* const* key_rows = nullptr;
  if (spec.cross) {
    RETURN_IF_ERROR(context_.Reserve(plan.key_rows * spec.context_width * DTypeBytes(input)));
    context_rows_.resize(static_cast<size_t>(plan.key_rows));
    rows.PointToKeys(0, &AttendItem::key_source, spec.context_width, input, context_.data(),
                     context_rows_.data());
    key_rows = context_rows_.data();
  } else {
    // The first keys are the last queries' rows, found already.
    const int64_t shared = plan.query_rows - plan.key_row_offset;
    rows.PointToKeys(shared, &AttendItem::key_source, spec.d_model, input,
                     input_.data() + plan.query_rows * input_row_bytes,
                     input_rows_.data() + plan.query_rows);
    key_rows = input_rows_.data() + plan.key_row_offset;
  }
  PointTo(q_.data(), DType::kF32, plan.query_rows, layer.q->columns(), q_rows_);
  PointTo(k_.data(), DType::kF32, plan.key_rows, layer.k->columns(), k_rows_);
  PointTo(v_.data(), DType::kF32, plan.key_rows, layer.v->columns(), v_rows_);
  const Product products[] = {{layer.q.get(), input_rows_.data(), q_rows_.data(), plan.query_rows},
                              {layer.k.get(), key_rows, k_rows_.data(), plan.key_rows},
                              {layer.v.get(), key_rows, v_rows_.data(), plan.key_rows}};
  return projector_.Run(products);
}

// Clip, norms and positions of all new rows. A self-attention row has one position as query and as
// key, so q and k of a row are done together and share its angles.
void CpuEngine::TransformHeads(const BatchRows& rows, const Layer& layer) {
  const AttentionSpec& spec = rows.spec();
  const BatchPlan& plan = rows.plan();
  const bool norm = spec.qk_norm == QkNorm::kRmsPerHead;
  if (spec.clip_qkv == 0 && !norm && spec.rope.dim == 0) return;
  const int64_t q_width = int64_t{spec.q_heads} * spec.head_dim;
  const int64_t k_width = int64_t{spec.kv_heads} * spec.head_dim;
  const int64_t v_width = int64_t{spec.kv_heads} * spec.v_head_dim;
  const int64_t key_offset = spec.cross ? plan.query_rows : plan.key_row_offset;
  const int64_t total = key_offset + plan.key_rows;

  const auto transform = [&](float* row, int heads, const std::vector<float>& weight,
                             const RopeAngles& angles) {
    if (spec.clip_qkv > 0) Clip(spec.clip_qkv, row, int64_t{heads} * spec.head_dim);
    for (int h = 0; h < heads; ++h) {
      float* head = row + int64_t{h} * spec.head_dim;
      if (norm) {
        NormaliseHead(isa_, weight.empty() ? nullptr : weight.data(), spec.qk_norm_eps,
                      spec.head_dim, head);
      }
      if (spec.rope.dim > 0) RotateHead(isa_, spec.rope, angles, head);
    }
  };
  pool_.ParallelFor((std::max(total, plan.query_rows) + kRowsPerTransform - 1) / kRowsPerTransform,
                    [&](int64_t task, int) {
                      RopeAngles angles;
                      int64_t angles_position = -1;
                      bool angles_known = false;
                      const auto move_to = [&](int64_t position) {
                        if (angles_known && position == angles_position) return;
                        ComputeRopeAngles(isa_, spec.rope, position, angles);
                        angles_position = position;
                        angles_known = true;
                      };
                      for (int64_t row = task * kRowsPerTransform;
                           row < (task + 1) * kRowsPerTransform; ++row) {
                        if (row < plan.query_rows) {
                          move_to(rows.QueryPosition(row));
                          transform(Floats(q_) + row * q_width, spec.q_heads, layer.q_norm, angles);
                        }
                        const int64_t key = row - key_offset;
                        if (key < 0 || key >= plan.key_rows) continue;
                        move_to(rows.KeyPosition(key));
                        transform(Floats(k_) + key * k_width, spec.kv_heads, layer.k_norm, angles);
                        if (spec.clip_qkv > 0)
                          Clip(spec.clip_qkv, Floats(v_) + key * v_width, v_width);
                      }
                    });
}

absl::Status CpuEngine::ProjectOutput(const BatchRows& rows, Layer& layer) {
  const int64_t query_rows = rows.plan().query_rows;
  if (query_rows == 0) return absl::OkStatus();
  attended_inputs_.resize(static_cast<size_t>(query_rows));
  for (int64_t r = 0; r < query_rows; ++r) attended_inputs_[r] = attended_rows_[r].data;
  output_rows_.resize(static_cast<size_t>(query_rows));
  rows.PointToOutputs(layer.o->columns(), output_rows_.data());
  const Product product{layer.o.get(), attended_inputs_.data(), output_rows_.data(), query_rows};
  return projector_.Run({&product, 1});
}

absl::Status CpuEngine::CopyBlocks(std::span<const BlockCopy> copies) {
  pool_.ParallelFor(static_cast<int64_t>(copies.size()), [&](int64_t task, int) {
    const BlockCopy& copy = copies[static_cast<size_t>(task)];
    std::memcpy(kv_memory_.data() + copy.to, kv_memory_.data() + copy.from,
                static_cast<size_t>(copy.bytes));
  });
  return absl::OkStatus();
}

absl::Status CpuEngine::ReadKv(const KvRows& rows, std::span<std::byte> bytes) {
  if (static_cast<int64_t>(bytes.size()) != rows.keys * rows.geometry.TokenBytes()) {
    return absl::InternalError("cpu engine: ReadKv into " + std::to_string(bytes.size()) +
                               " bytes");
  }
  CopyKvOut(rows.geometry, rows.blocks, rows.first_key, rows.keys, kv_memory_.data(), bytes.data());
  return absl::OkStatus();
}

absl::Status CpuEngine::WriteKv(const KvRows& rows, std::span<const std::byte> bytes) {
  if (static_cast<int64_t>(bytes.size()) != rows.keys * rows.geometry.TokenBytes()) {
    return absl::InternalError("cpu engine: WriteKv of " + std::to_string(bytes.size()) + " bytes");
  }
  CopyKvIn(rows.geometry, rows.blocks, rows.first_key, rows.keys, bytes.data(), kv_memory_.data());
  return absl::OkStatus();
}

void CpuEngine::Discard(int64_t address, int64_t bytes) {
  const int64_t begin = (address + kPage - 1) / kPage * kPage;
  const int64_t end = (address + bytes) / kPage * kPage;
  if (end - begin < kMinDiscardBytes) return;
  madvise(kv_memory_.data() + begin, static_cast<size_t>(end - begin), MADV_DONTNEED);
}

}  // namespace

absl::StatusOr<std::unique_ptr<AttentionEngine>> MakeCpuEngine(const EngineOptions& options) {
  const CpuInfo cpu = DetectCpu();
  ASSIGN_OR_RETURN(const CpuIsa isa, ChooseIsa(options.isa, cpu));
  ASSIGN_OR_RETURN(const DType bf16_compute, ChooseCompute(options.compute, isa, cpu));
  MappedMemory kv_memory;
  RETURN_IF_ERROR(kv_memory.Allocate(options.kv_bytes + options.scratch_bytes));
  EngineInfo info{.engine = "cpu",
                  .device = cpu.name,
                  .isa = isa == CpuIsa::kAvx512 ? "avx512" : "avx2",
                  .numerics_id = NumericsId(isa, cpu),
                  .threads = std::max(1, options.threads),
                  .keeps_i8 = true,
                  .enough_rows = kEnoughRows};
  return std::make_unique<CpuEngine>(std::move(info), isa, cpu, bf16_compute,
                                     options.weight_dtype == "i8", std::move(kv_memory));
}

}  // namespace attend
