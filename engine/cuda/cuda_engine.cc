// SPDX-License-Identifier: Apache-2.0
//
// The CUDA engine: owns the device's memory and queues what DeviceBatch laid out. One stream
// computes, one uploads and one downloads, so that the copies of one batch run beside the kernels
// of another; a batch keeps one of two slots from Start to Wait. Decode steps replay captured
// graphs, which hold the same launches, so they give the same bits.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/cuda/batch_stages.h"
#include "engine/cuda/cuda_layer.h"
#include "engine/cuda/cuda_owners.h"
#include "engine/cuda/cuda_plugin.h"
#include "engine/cuda/device_batch.h"
#include "engine/cuda/kernels.h"
#include "engine/util/error.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

// Raised with every change of arithmetic, so that equal numerics ids mean equal bits.
constexpr char kKernelVersion[] = "k1";

constexpr int kSlots = kDeviceSlabs;
// A graph takes some 100 KiB of device memory; all are dropped when there are more.
constexpr size_t kMaxGraphs = 512;
// Steps with more rows gain nothing from a graph: their kernels outlast the launches.
constexpr int64_t kMaxStepRows = 256;
// Rows of KV on their way to or from the host, in one piece.
constexpr int64_t kTransferBytes = int64_t{8} << 20;
int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct GraphKey {
  int layer;
  int slot;
  DType kv_dtype;
  BatchCounts room;

  friend auto operator<=>(const GraphKey&, const GraphKey&) = default;
};

// What one batch in flight holds.
struct Slot {
  DeviceMemory slab;
  PinnedMemory upload;    // mirrors the slab's first part
  PinnedMemory download;  // mirrors its last part
  Event uploaded, computed, downloaded;
  StageEvents stage;
  std::optional<DeviceBatch> batch;
  BatchLayout layout;
  Ticket ticket = 0;  // 0 = free
};

class CudaEngine final : public AttentionEngine {
 public:
  static absl::StatusOr<std::unique_ptr<AttentionEngine>> Make(const EngineOptions& options);
  ~CudaEngine() override { static_cast<void>(cudaDeviceSynchronize()); }

  const EngineInfo& info() const override { return info_; }
  int64_t progress_ns() const override { return progress_ns_.load(); }

  absl::StatusOr<LayerInfo> AddLayer(const AttentionSpec& spec,
                                     const LayerWeights& weights) override;
  absl::StatusOr<Ticket> Start(const BatchPlan& plan, std::span<const AttendItem> items) override;
  bool Finished(Ticket ticket) override;
  absl::StatusOr<StageTimes> Wait(Ticket ticket) override;
  absl::Status CopyBlocks(std::span<const BlockCopy> copies) override;
  absl::Status ReadKv(const KvRows& rows, std::span<std::byte> bytes) override;
  absl::Status WriteKv(const KvRows& rows, std::span<const std::byte> bytes) override;
  // Device memory is never given back: taking it again could fail.
  void Discard(int64_t, int64_t) override {}

 private:
  explicit CudaEngine(const EngineOptions& options) : options_(options) {}
  absl::Status Open();
  absl::Status Reserve(Slot& slot, int64_t slab_bytes, int64_t upload_bytes, int64_t result_bytes);
  absl::Status ReserveFor(const AttentionSpec& spec);
  BatchWork Describe(const BatchPlan& plan, std::span<const AttendItem> items) const;
  const AttentionSpec* SpecOf(int layer) const {
    const bool known = layer >= 0 && layer < static_cast<int>(layers_.size());
    return known ? &layers_[static_cast<size_t>(layer)].spec : nullptr;
  }
  absl::Status Queue(Slot& slot);
  BatchStages StagesOf(const Slot& slot);
  absl::Status QueueStep(Slot& slot, int slot_index);
  absl::StatusOr<StageTimes> Collect(Slot& slot);
  absl::Status MoveKv(const KvRows& rows, std::byte* out, const std::byte* in);
  // Remembers the first error: the device's state is unknown after one.
  absl::Status Keep(absl::Status status) {
    if (failed_.ok() && !status.ok()) failed_ = status;
    return status;
  }

  const EngineOptions options_;
  EngineInfo info_;
  int processors_ = 1;
  Stream compute_, upload_, download_;
  LtContext lt_;
  DeviceMemory kv_;
  std::vector<CudaLayer> layers_;
  std::array<Slot, kSlots> slots_;
  std::map<GraphKey, GraphExec> graphs_;
  DeviceMemory transfer_;         // KV rows in canonical order, then block addresses
  PinnedMemory transfer_mirror_;  // the same on the host
  Ticket started_ = 0;
  absl::Status failed_;
  std::atomic<int64_t> progress_ns_{0};
};

absl::StatusOr<DeviceChoice> FindDevice() {
  int count = 0;  // a failing call leaves it alone
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    const cudaError_t reason = error != cudaSuccess ? error : cudaErrorNoDevice;
    return absl::UnavailableError(std::string("no CUDA device: ") + cudaGetErrorString(reason) +
                                  " (" + cudaGetErrorName(reason) + ")");
  }
  DeviceChoice choice{.device = "cuda"};
  cudaDeviceProp properties{};
  CUDA_RETURN_IF_ERROR(cudaSetDevice(0));
  CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, 0));
  choice.name = properties.name;
  if (properties.major < 8) {
    return absl::UnavailableError(std::string("CUDA device ") + properties.name +
                                  " has compute capability " + std::to_string(properties.major) +
                                  "." + std::to_string(properties.minor) + ", 8.0 is needed");
  }
  size_t free = 0;
  size_t total = 0;
  CUDA_RETURN_IF_ERROR(cudaMemGetInfo(&free, &total));
  choice.free_bytes = static_cast<int64_t>(free);
  choice.total_bytes = static_cast<int64_t>(total);
  return choice;
}

absl::StatusOr<std::unique_ptr<AttentionEngine>> CudaEngine::Make(const EngineOptions& options) {
  const std::string& compute = options.compute;
  if (compute != "auto" && compute != "fp32" && compute != "bf16" && compute != "tf32") {
    return InvalidField("compute", compute, "auto, fp32, bf16 or tf32");
  }
  std::unique_ptr<CudaEngine> engine(new CudaEngine(options));
  RETURN_IF_ERROR(engine->Open());
  return engine;
}

absl::Status CudaEngine::Open() {
  CUDA_RETURN_IF_ERROR(cudaSetDevice(0));
  cudaDeviceProp properties{};
  CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, 0));
  processors_ = properties.multiProcessorCount;
  info_.engine = "cuda";
  info_.device = properties.name;
  info_.isa = "sm_" + std::to_string(properties.major) + std::to_string(properties.minor);
  const bool named = options_.compute == "fp32" || options_.compute == "tf32";
  info_.numerics_id = "cuda-" + info_.isa + "x" + std::to_string(processors_) + "-cublaslt" +
                      std::to_string(cublasLtGetVersion()) + "-" + kKernelVersion +
                      (named ? "-" + options_.compute : "");
  info_.threads = options_.threads;
  info_.batches_in_flight = kSlots;
  info_.max_head_dim = 256;

  size_t free = 0;
  size_t total = 0;
  CUDA_RETURN_IF_ERROR(cudaMemGetInfo(&free, &total));
  const int64_t slabs = kSlots * DeviceSlabBytes(options_.workspace_bytes);
  const int64_t kv_bytes = options_.kv_bytes + options_.scratch_bytes;
  const auto no_room = [&] {
    return InvalidField("kv_bytes", std::to_string(options_.kv_bytes),
                        "less: it, " + std::to_string(options_.scratch_bytes) +
                            " bytes of scratch and " + std::to_string(slabs) +
                            " of workspace need " + std::to_string(kv_bytes + slabs) +
                            " bytes of device memory, and " + std::to_string(free) + " of " +
                            std::to_string(total) + " are free on " + info_.device);
  };
  if (kv_bytes + slabs > static_cast<int64_t>(free)) return no_room();
  const cudaError_t error = kv_.Allocate(static_cast<size_t>(kv_bytes));
  if (error == cudaErrorMemoryAllocation) return no_room();
  CUDA_RETURN_IF_ERROR(error);

  CUDA_RETURN_IF_ERROR(PrepareKernels(static_cast<int>(properties.sharedMemPerBlockOptin)));
  for (Stream* stream : {&compute_, &upload_, &download_}) {
    CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(stream->out(), cudaStreamNonBlocking));
  }
  ASSIGN_OR_RETURN(lt_, MakeLtContext());
  CUDA_RETURN_IF_ERROR(transfer_.Allocate(2 * kTransferBytes));
  CUDA_RETURN_IF_ERROR(transfer_mirror_.Allocate(2 * kTransferBytes));
  for (Slot& slot : slots_) {
    for (Event* event : {&slot.uploaded, &slot.computed, &slot.downloaded}) {
      CUDA_RETURN_IF_ERROR(cudaEventCreateWithFlags(event->out(), cudaEventDisableTiming));
    }
    for (Event& event : slot.stage) {
      CUDA_RETURN_IF_ERROR(cudaEventCreateWithFlags(event.out(), 0));
    }
    RETURN_IF_ERROR(Reserve(slot, slabs / kSlots, 0, 0));
  }
  return absl::OkStatus();
}

// Grows what is too small. REQUIRES: the slot is free.
absl::Status CudaEngine::Reserve(Slot& slot, int64_t slab_bytes, int64_t upload_bytes,
                                 int64_t result_bytes) {
  const auto grow = [](auto& memory, int64_t bytes) {
    const auto has = static_cast<int64_t>(memory.bytes());
    if (has >= bytes) return cudaSuccess;
    // By a quarter at least: many small steps would each cost an allocation.
    return memory.Allocate(static_cast<size_t>(std::max(bytes, has + has / 4)));
  };
  if (static_cast<int64_t>(slot.slab.bytes()) < slab_bytes) {
    graphs_.clear();  // they hold addresses in the old slab
    CUDA_RETURN_IF_ERROR(grow(slot.slab, slab_bytes));
    // Padding rows of products hold what was there before: anything, but never memory that the
    // device has not written.
    CUDA_RETURN_IF_ERROR(cudaMemsetAsync(slot.slab.data(), 0, slot.slab.bytes(), compute_.get()));
    CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(compute_.get()));
  }
  CUDA_RETURN_IF_ERROR(grow(slot.upload, upload_bytes));
  return CudaStatus(grow(slot.download, result_bytes), "cudaMallocHost");
}

// Makes room for full batches of a layer, so that nothing grows while serving.
absl::Status CudaEngine::ReserveFor(const AttentionSpec& spec) {
  AttendItem item;
  item.rows = item.new_keys = options_.batch_tokens;
  const int64_t workspace = WorkspaceBytes(spec, item);
  const int64_t limit = options_.workspace_bytes > 0 ? options_.workspace_bytes : workspace;
  const int64_t upload =
      options_.batch_tokens * 4 * PaddedWidth(std::max(spec.d_model, spec.context_width));
  const int64_t result = options_.batch_tokens * 4 * PaddedWidth(spec.output_width);
  for (Slot& slot : slots_) {
    RETURN_IF_ERROR(Reserve(slot, DeviceSlabBytes(std::min(limit, workspace)),
                            std::min(limit, upload), std::min(limit, result)));
  }
  return absl::OkStatus();
}

absl::StatusOr<LayerInfo> CudaEngine::AddLayer(const AttentionSpec& spec,
                                               const LayerWeights& weights) {
  RETURN_IF_ERROR(failed_);
  ASSIGN_OR_RETURN(CudaLayer layer, MakeCudaLayer(spec, weights, options_.compute,
                                                  options_.batch_tokens, lt_, compute_.get()));
  RETURN_IF_ERROR(ReserveFor(spec));
  layers_.push_back(std::move(layer));
  return LayerInfo{.index = static_cast<int>(layers_.size()) - 1,
                   .compute_dtype = layers_.back().compute,
                   .packed_bytes = layers_.back().bytes()};
}

BatchWork CudaEngine::Describe(const BatchPlan& plan, std::span<const AttendItem> items) const {
  const AttentionSpec& spec = *plan.spec;
  BatchWork work;
  work.plan = &plan;
  work.items = items;
  const bool half = plan.kv_dtype != DType::kF32;
  if (plan.layer < 0) {
    work.projected_width = PaddedWidth(int64_t{spec.q_heads} * spec.head_dim);
    work.q_dtype = half && options_.compute != "fp32" ? plan.kv_dtype : DType::kF32;
    return work;
  }
  const CudaLayer& layer = layers_[static_cast<size_t>(plan.layer)];
  work.compute = layer.compute;
  // Queries are rounded only where the layer's products round their operands to the same type.
  work.q_dtype = half && layer.compute == plan.kv_dtype ? plan.kv_dtype : DType::kF32;
  work.x_width = layer.q().in();
  work.projected_width = layer.q().out();
  if (spec.cross) {
    work.context_width = layer.kv().in();
    work.kv_width = layer.kv().out();
  }
  work.attended_width = layer.output->in();
  work.output_width = layer.output->out();
  return work;
}

absl::StatusOr<Ticket> CudaEngine::Start(const BatchPlan& plan, std::span<const AttendItem> items) {
  RETURN_IF_ERROR(failed_);
  RETURN_IF_ERROR(CheckLayer(plan, SpecOf(plan.layer)));
  Slot& slot = slots_[static_cast<size_t>(started_ % kSlots)];
  if (slot.ticket != 0) {
    return absl::InternalError("cuda engine: a third batch before the first was waited for");
  }
  slot.batch.emplace(Describe(plan, items));
  RETURN_IF_ERROR(Keep(Queue(slot)));
  slot.ticket = ++started_;
  return slot.ticket;
}

// Upload, compute, download; every stream waits for the one before.
absl::Status CudaEngine::Queue(Slot& slot) {
  const DeviceBatch& batch = *slot.batch;
  const bool step = batch.is_step() && batch.counts().items <= kMaxStepRows;
  // A step whose rounded layout does not fit runs like any other batch: growing costs more.
  if (step) slot.layout = batch.Place(batch.RoundedCounts());
  const bool replay = step && slot.layout.bytes <= static_cast<int64_t>(slot.slab.bytes());
  if (!replay) slot.layout = batch.Place(batch.counts());
  const BatchLayout& layout = slot.layout;
  RETURN_IF_ERROR(Reserve(slot, layout.bytes, layout.upload_bytes, layout.bytes - layout.results));
  batch.Fill(layout, slot.upload.data(), slot.slab.data());
  CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(slot.slab.data(), slot.upload.data(),
                                       static_cast<size_t>(layout.upload_bytes),
                                       cudaMemcpyHostToDevice, upload_.get()));
  CUDA_RETURN_IF_ERROR(cudaEventRecord(slot.uploaded.get(), upload_.get()));
  CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(compute_.get(), slot.uploaded.get(), 0));
  RETURN_IF_ERROR(replay ? QueueStep(slot, static_cast<int>(&slot - slots_.data()))
                         : StagesOf(slot).Queue(0));
  CUDA_RETURN_IF_ERROR(cudaEventRecord(slot.computed.get(), compute_.get()));
  CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(download_.get(), slot.computed.get(), 0));
  if (batch.counts().result_bytes > 0) {
    CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(slot.download.data(), slot.slab.data() + layout.results,
                                         static_cast<size_t>(batch.counts().result_bytes),
                                         cudaMemcpyDeviceToHost, download_.get()));
  }
  return CudaStatus(cudaEventRecord(slot.downloaded.get(), download_.get()), "cudaEventRecord");
}

BatchStages CudaEngine::StagesOf(const Slot& slot) {
  const int layer = slot.batch->work().plan->layer;
  return {*slot.batch,      slot.layout, layer < 0 ? nullptr : &layers_[static_cast<size_t>(layer)],
          slot.slab.data(), kv_.data(),  &lt_,
          processors_,      &slot.stage, compute_.get()};
}

// Captures the stages of this layout once, then replays them.
absl::Status CudaEngine::QueueStep(Slot& slot, int slot_index) {
  const BatchPlan& plan = *slot.batch->work().plan;
  const GraphKey key{plan.layer, slot_index, plan.kv_dtype, slot.layout.counts};
  auto found = graphs_.find(key);
  if (found == graphs_.end()) {
    // The first of its kind runs directly: kernels are loaded by their first launch, which a
    // capture may not be, and a layout that never comes again is not worth a graph.
    if (graphs_.size() >= kMaxGraphs) graphs_.clear();
    graphs_.emplace(key, GraphExec());
    return StagesOf(slot).Queue(0);
  }
  if (found->second.get() == nullptr) {
    CUDA_RETURN_IF_ERROR(cudaStreamBeginCapture(compute_.get(), cudaStreamCaptureModeThreadLocal));
    const absl::Status queued = StagesOf(slot).Queue(cudaEventRecordExternal);
    Graph graph;
    const cudaError_t ended = cudaStreamEndCapture(compute_.get(), graph.out());
    RETURN_IF_ERROR(queued);  // the cause, where both failed
    CUDA_RETURN_IF_ERROR(ended);
    CUDA_RETURN_IF_ERROR(cudaGraphInstantiate(found->second.out(), graph.get(), 0));
  }
  return CudaStatus(cudaGraphLaunch(found->second.get(), compute_.get()), "cudaGraphLaunch");
}

bool CudaEngine::Finished(Ticket ticket) {
  const Slot& slot = slots_[static_cast<size_t>((ticket - 1) % kSlots)];
  return !failed_.ok() || slot.ticket != ticket ||
         cudaEventQuery(slot.downloaded.get()) != cudaErrorNotReady;
}

absl::StatusOr<StageTimes> CudaEngine::Wait(Ticket ticket) {
  RETURN_IF_ERROR(failed_);
  Slot& slot = slots_[static_cast<size_t>((ticket - 1) % kSlots)];
  const Slot& other = slots_[static_cast<size_t>(ticket % kSlots)];
  if (slot.ticket != ticket || (other.ticket != 0 && other.ticket < ticket)) {
    return absl::InternalError("cuda engine: waiting for batch " + std::to_string(ticket) +
                               " out of order; the last one started is " +
                               std::to_string(started_));
  }
  absl::StatusOr<StageTimes> times = Collect(slot);
  if (!times.ok()) return Keep(times.status());
  slot.batch.reset();
  slot.ticket = 0;
  return times;
}

absl::StatusOr<StageTimes> CudaEngine::Collect(Slot& slot) {
  CUDA_RETURN_IF_ERROR(cudaEventSynchronize(slot.downloaded.get()));
  progress_ns_.store(NowNs());
  slot.batch->Collect(slot.download.data());
  std::array<float, 3> milliseconds{};
  for (size_t i = 0; i < milliseconds.size(); ++i) {
    // Times are for the metrics: without them the answer is as good.
    if (cudaEventElapsedTime(&milliseconds[i], slot.stage[i].get(), slot.stage[i + 1].get()) !=
        cudaSuccess) {
      milliseconds[i] = 0;
    }
  }
  const auto micros = [](float ms) { return static_cast<int64_t>(1000 * ms); };
  return StageTimes{micros(milliseconds[0]), micros(milliseconds[1]), micros(milliseconds[2])};
}

absl::Status CudaEngine::CopyBlocks(std::span<const BlockCopy> copies) {
  RETURN_IF_ERROR(failed_);
  for (const BlockCopy& copy : copies) {
    RETURN_IF_ERROR(Keep(CudaStatus(
        cudaMemcpyAsync(kv_.data() + copy.to, kv_.data() + copy.from,
                        static_cast<size_t>(copy.bytes), cudaMemcpyDeviceToDevice, compute_.get()),
        "copy of blocks")));
  }
  return absl::OkStatus();
}

// Rows in pieces that fit the transfer buffer; `out` or `in` is given.
absl::Status CudaEngine::MoveKv(const KvRows& rows, std::byte* out, const std::byte* in) {
  const KvGeometry& geometry = rows.geometry;
  const int64_t size = DTypeBytes(geometry.dtype);
  const int64_t k_row = int64_t{geometry.kv_heads} * geometry.head_dim * size;
  const int64_t v_row = int64_t{geometry.kv_heads} * geometry.v_head_dim * size;
  if (k_row + v_row > kTransferBytes) {
    return absl::InternalError("cuda engine: a token of " + std::to_string(k_row + v_row) +
                               " bytes of keys and values");
  }
  const int64_t most = kTransferBytes / (k_row + v_row);
  for (int64_t done = 0; done < rows.keys; done += most) {
    const int64_t count = std::min(most, rows.keys - done);
    const int64_t first = rows.first_key + done;
    const int64_t first_block = first / kBlockTokens;
    const int64_t blocks = (first + count - 1) / kBlockTokens + 1 - first_block;
    std::byte* mirror = transfer_mirror_.data();
    if (in != nullptr) {
      std::memcpy(mirror, in + done * k_row, static_cast<size_t>(count * k_row));
      std::memcpy(mirror + count * k_row, in + rows.keys * k_row + done * v_row,
                  static_cast<size_t>(count * v_row));
    }
    std::memcpy(mirror + kTransferBytes, rows.blocks.data() + first_block,
                static_cast<size_t>(blocks) * sizeof(int64_t));
    KvRowsParams params{};
    params.block_address = At<const int64_t>(transfer_.data(), kTransferBytes);
    params.kv = kv_.data();
    params.shape = {geometry.kv_heads, geometry.head_dim, geometry.v_head_dim,
                    static_cast<int32_t>(size)};
    params.first_key = first - first_block * kBlockTokens;
    params.keys = count;
    params.canonical = transfer_.data();
    CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(transfer_.data() + kTransferBytes, mirror + kTransferBytes,
                                         static_cast<size_t>(blocks) * sizeof(int64_t),
                                         cudaMemcpyHostToDevice, compute_.get()));
    const auto bytes = static_cast<size_t>(count * (k_row + v_row));
    if (in != nullptr) {
      CUDA_RETURN_IF_ERROR(
          cudaMemcpyAsync(transfer_.data(), mirror, bytes, cudaMemcpyHostToDevice, compute_.get()));
      CUDA_RETURN_IF_ERROR(LaunchWriteKvRows(params, compute_.get()));
    } else {
      CUDA_RETURN_IF_ERROR(LaunchReadKvRows(params, compute_.get()));
      CUDA_RETURN_IF_ERROR(
          cudaMemcpyAsync(mirror, transfer_.data(), bytes, cudaMemcpyDeviceToHost, compute_.get()));
    }
    CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(compute_.get()));
    if (out != nullptr) {
      std::memcpy(out + done * k_row, mirror, static_cast<size_t>(count * k_row));
      std::memcpy(out + rows.keys * k_row + done * v_row, mirror + count * k_row,
                  static_cast<size_t>(count * v_row));
    }
  }
  return absl::OkStatus();
}

absl::Status CudaEngine::ReadKv(const KvRows& rows, std::span<std::byte> bytes) {
  RETURN_IF_ERROR(failed_);
  if (static_cast<int64_t>(bytes.size()) != rows.keys * rows.geometry.TokenBytes()) {
    return absl::InternalError("cuda engine: ReadKv into " + std::to_string(bytes.size()) +
                               " bytes");
  }
  return Keep(MoveKv(rows, bytes.data(), nullptr));
}

absl::Status CudaEngine::WriteKv(const KvRows& rows, std::span<const std::byte> bytes) {
  RETURN_IF_ERROR(failed_);
  if (static_cast<int64_t>(bytes.size()) != rows.keys * rows.geometry.TokenBytes()) {
    return absl::InternalError("cuda engine: WriteKv of " + std::to_string(bytes.size()) +
                               " bytes");
  }
  return Keep(MoveKv(rows, nullptr, bytes.data()));
}

}  // namespace
}  // namespace attend

extern "C" __attribute__((visibility("default"))) const attend::CudaPlugin* attend_cuda_plugin() {
  static const attend::CudaPlugin plugin{attend::FindDevice, attend::CudaEngine::Make};
  return &plugin;
}
