// SPDX-License-Identifier: Apache-2.0
//
// The work of one batch in the order it is queued: rows to the products' type, projections, clip,
// norms, rotation and append, attention, output projection, rows to the items' types. The same
// calls run directly or into a graph; nothing here waits.
#pragma once

#include <array>

#include "absl/status/status.h"
#include "engine/cuda/cuda_layer.h"
#include "engine/cuda/device_batch.h"

namespace attend {

// Begin, projected, attended, end.
using StageEvents = std::array<Event, 4>;

// Borrows everything for the time of the call.
struct BatchStages {
  const DeviceBatch& batch;
  const BatchLayout& layout;
  const CudaLayer* layer;  // null = raw
  std::byte* slab;         // device memory, filled by layout
  std::byte* kv;           // device memory that block addresses count from
  LtContext* context;
  int processors;  // of the device
  const StageEvents* events;
  cudaStream_t stream;

  // `record_flags`: cudaEventRecordExternal while a graph is captured, else 0.
  absl::Status Queue(unsigned record_flags);

 private:
  absl::Status QueueProjections();
  absl::Status QueueTransform();
  absl::Status QueueAttention();
  absl::Status QueueOutput();
  AttentionParams Params() const;
  int64_t LoopBlocks(int64_t tiles) const;
};

}  // namespace attend
