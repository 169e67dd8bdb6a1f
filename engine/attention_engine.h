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
  std::string device = "auto";   // auto | cpu | cuda
  std::string isa = "auto";      // auto | avx2 | avx512 (CPU)
  std::string compute = "auto";  // auto | fp32 | bf16
  int threads = 1;               // worker threads, the caller's included
  int64_t kv_bytes = 0;          // KV memory of sessions: addresses [0, kv_bytes)
  int64_t scratch_bytes = 0;  // KV memory of stateless work: [kv_bytes, kv_bytes + scratch_bytes)
};

struct EngineInfo {
  std::string engine;       // "cpu" | "cuda"
  std::string device;       // name of the processor
  std::string isa;          // "avx2" | "avx512"
  std::string numerics_id;  // engine, ISA, kernel version: equal ids give equal bits per dtype
  int threads = 0;
};

struct LayerInfo {
  int index = -1;                     // what BatchPlan.layer names
  DType compute_dtype = DType::kF32;  // F32 or BF16 products
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
  // Plan and items are borrowed until Wait has returned. A non-OK status of either means that no
  // output may be used and that the engine must not be called again.
  virtual absl::StatusOr<Ticket> Start(const BatchPlan& plan,
                                       std::span<const AttendItem> items) = 0;
  virtual absl::StatusOr<StageTimes> Wait(Ticket ticket) = 0;

  virtual absl::Status CopyBlocks(std::span<const BlockCopy> copies) = 0;

  // KV by token rows in canonical form, the same for every engine: for K then V: [keys, kv_heads,
  // dim] in the geometry's dtype; `bytes` holds keys * geometry.TokenBytes() bytes.
  virtual absl::Status ReadKv(const KvRows& rows, std::span<std::byte> bytes) = 0;
  virtual absl::Status WriteKv(const KvRows& rows, std::span<const std::byte> bytes) = 0;

  // The content of these addresses is no longer needed; physical memory may go back to the system.
  virtual void Discard(int64_t address, int64_t bytes) = 0;

  // Monotonic clock reading of the last finished piece of work; 0 before the first.
  virtual int64_t progress_ns() const = 0;
};

// Makes the engine the options ask for. INVALID_ARGUMENT names the option and what this build and
// machine allow.
absl::StatusOr<std::unique_ptr<AttentionEngine>> MakeEngine(const EngineOptions& options);

}  // namespace attend
