// SPDX-License-Identifier: Apache-2.0
//
// What a server with these options and checkpoints needs at most, of the machine and of the device,
// and whether both have it. Pure; server.cc asks before it takes anything.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/attention_engine.h"
#include "engine/model/checkpoint.h"
#include "server/options.h"

namespace attend {

// Bytes. On CUDA weights, kv, scratch and workspace lie in device memory, else in the machine's.
struct MemoryPlan {
  int64_t weights = 0;    // as the engine keeps them
  int64_t kv = 0;         // sessions' cache
  int64_t scratch = 0;    // keys and values of stateless work
  int64_t workspace = 0;  // of the batches in flight on CUDA
  int64_t queue = 0;      // messages in the queue and being received
  int64_t staging = 0;    // CPU: activations of a batch and kept buffers; CUDA: pinned buffers
  int64_t batch_workspace = 0;  // EngineOptions.workspace_bytes; part of workspace
  bool cuda = false;

  int64_t DeviceBytes() const { return cuda ? weights + kv + scratch + workspace : 0; }
  int64_t HostBytes() const {
    return weights + kv + scratch + workspace + queue + staging - DeviceBytes();
  }
};

using NamedCheckpoints = std::vector<std::pair<std::string, Checkpoint>>;

MemoryPlan PlanMemory(const Options& options, const DeviceChoice& device,
                      const NamedCheckpoints& checkpoints);

// OK, or INVALID_ARGUMENT with one line: what is needed, what there is, which flag to lower.
absl::Status CheckMemory(const MemoryPlan& plan, const DeviceChoice& device, int64_t machine_bytes);

// "12 MiB", rounded.
std::string Mebibytes(int64_t bytes);

}  // namespace attend
