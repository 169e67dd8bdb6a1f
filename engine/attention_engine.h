// SPDX-License-Identifier: Apache-2.0
//
// The one seam of the project: an engine owns packed weights and KV memory on its device and runs
// planned batches. Implemented by engine/cpu and engine/cuda; the runtime is its only caller. It
// knows nothing of sessions, requests or queues.
//
// Threads: one caller at a time, except progress_ns() and info(), which any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/attention_plan.h"
#include "engine/layer_weights.h"

namespace attend {

struct EngineOptions {
  std::string device = "auto";        // auto | cpu | cuda
  std::string isa = "auto";           // auto | avx2 | avx512 (CPU)
  std::string compute = "auto";       // auto | fp32 | bf16 | tf32 (CUDA)
  std::string weight_dtype = "auto";  // auto (as in the checkpoint) | i8 (CPU)
  int threads = 1;                    // worker threads, the caller's included (CPU)
  int64_t kv_bytes = 0;               // KV memory of sessions: addresses [0, kv_bytes)
  int64_t scratch_bytes = 0;    // KV memory of stateless work: [kv_bytes, kv_bytes + scratch_bytes)
  int64_t batch_tokens = 2048;  // most query rows, and most new keys, of a batch
  int64_t workspace_bytes = 0;  // most WorkspaceBytes of a batch's items together; 0 = no limit
};

// What EngineOptions::device means on this machine.
struct DeviceChoice {
  std::string device = {};  // "cpu" | "cuda"
  std::string name = {};    // of the CUDA device; empty for the CPU
  std::string why = {};     // why "auto" is not CUDA; empty otherwise
  int64_t free_bytes = 0;   // device memory; 0 for the CPU
  int64_t total_bytes = 0;
};

struct EngineInfo {
  std::string engine;       // "cpu" | "cuda"
  std::string device;       // name of the processor
  std::string isa;          // "avx2" | "avx512"; CUDA: "sm_90" etc.
  std::string numerics_id;  // engine, ISA, kernel version: equal ids give equal bits per dtype
  int threads = 0;
  int max_head_dim = kMaxHeadDim;  // of keys and of values
  bool keeps_i8 = false;           // keys and values may be kept in I8
  int batches_in_flight = 1;       // how often Start may be called before the first Wait
  int64_t enough_rows = 0;  // a batch of so many rows gains nothing from more; 0 = it always does
};

struct LayerInfo {
  int index = -1;                     // what BatchPlan.layer names
  DType compute_dtype = DType::kF32;  // type of the products' operands: F32, BF16, I8, F16 (CUDA)
  DType attend_dtype = DType::kF32;   // type of attention's products over 16-bit or I8 keys
  int64_t packed_bytes = 0;           // memory the packed weights take
};

struct StageTimes {
  int64_t project_us = 0;
  int64_t attend_us = 0;
  int64_t output_us = 0;
};

struct BlockCopy {
  int64_t from = 0;  // address, bytes
  int64_t to = 0;
  int64_t bytes = 0;
};

// Rows [first_key, first_key + keys) of one layer's history; `blocks` as in AttendItem.
struct KvRows {
  KvGeometry geometry;
  std::span<const int64_t> blocks;
  int64_t first_key = 0;
  int64_t keys = 0;
};

using Ticket = int64_t;

class AttentionEngine {
 public:
  virtual ~AttentionEngine() = default;

  virtual const EngineInfo& info() const = 0;

  // Packs the weights of a layer; `weights` is not used after the call. Only before the first
  // Start. A plan may run the layer with a spec that differs in `cross` and `causal` (plain modules
  // leave them open).
  virtual absl::StatusOr<LayerInfo> AddLayer(const AttentionSpec& spec,
                                             const LayerWeights& weights) = 0;

  // Begins a batch: projects, appends new keys and values to the blocks, attends, writes outputs.
  // Up to info().batches_in_flight may run; they are waited for in the order of their starts. Plan
  // and items, with what they point to, are borrowed until Wait has returned.
  //
  // KV memory changes in the order of the calls: a batch, a copy or a discard sees all that was
  // started before it as done. A block may therefore be given to a new owner while a batch that
  // uses it still runs.
  //
  // When any call has returned a non-OK status the engine has failed: it must not be called again
  // but for info() and progress_ns(), no output of a batch that was not waited for may be used, and
  // nothing borrowed is touched any more.
  virtual absl::StatusOr<Ticket> Start(const BatchPlan& plan,
                                       std::span<const AttendItem> items) = 0;
  // True when Wait would not wait: the batch has ended, or the engine has failed.
  virtual bool Finished(Ticket ticket) = 0;
  virtual absl::StatusOr<StageTimes> Wait(Ticket ticket) = 0;

  virtual absl::Status CopyBlocks(std::span<const BlockCopy> copies) = 0;

  // KV by token rows in canonical form, the same for every engine: for K then V: [keys, kv_heads,
  // dim] in the geometry's dtype; I8: then the scales of K and of V, [keys, kv_heads] F32. `bytes`
  // holds keys * geometry.TokenBytes() bytes.
  virtual absl::Status ReadKv(const KvRows& rows, std::span<std::byte> bytes) = 0;
  virtual absl::Status WriteKv(const KvRows& rows, std::span<const std::byte> bytes) = 0;

  // The content of these addresses is no longer needed; physical memory may go back to the system.
  virtual void Discard(int64_t address, int64_t bytes) = 0;

  // Monotonic clock reading of the last finished piece of work; 0 before the first.
  virtual int64_t progress_ns() const = 0;
};

// Looks for a device and says what it finds. "auto" never fails; "cuda" without one is
// INVALID_ARGUMENT with the reason.
absl::StatusOr<DeviceChoice> ChooseDevice(const std::string& device);

// Makes the engine the options ask for. INVALID_ARGUMENT names the option and what this build and
// machine allow.
absl::StatusOr<std::unique_ptr<AttentionEngine>> MakeEngine(const EngineOptions& options);

}  // namespace attend
