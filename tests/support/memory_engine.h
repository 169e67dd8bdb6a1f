// SPDX-License-Identifier: Apache-2.0
//
// An engine that only has KV memory: for tests of cache and runtime that need no arithmetic. It
// records plans, and can fail on command.
#pragma once

#include <cstring>
#include <functional>
#include <vector>

#include "engine/attention_engine.h"

namespace attend {

class MemoryEngine : public AttentionEngine {
 public:
  explicit MemoryEngine(int64_t bytes) : memory_(static_cast<size_t>(bytes)) {
    info_ = {"memory", "test", "none", "memory-1", 1};
  }

  const EngineInfo& info() const override { return info_; }
  absl::StatusOr<LayerInfo> AddLayer(const AttentionSpec&, const LayerWeights&) override {
    return LayerInfo{layers_++, DType::kF32, 0};
  }
  absl::StatusOr<Ticket> Start(const BatchPlan& plan, std::span<const AttendItem> items) override {
    if (fail_next) return absl::InternalError("asked to fail");
    plans.push_back(plan);
    if (on_start) on_start(plan, items);
    return Ticket{1};
  }
  absl::StatusOr<StageTimes> Wait(Ticket) override { return StageTimes{}; }
  absl::Status CopyBlocks(std::span<const BlockCopy> copies) override {
    for (const BlockCopy& copy : copies) {
      std::memcpy(at(copy.to), at(copy.from), static_cast<size_t>(copy.bytes));
    }
    return absl::OkStatus();
  }
  absl::Status ReadKv(const KvRows&, std::span<std::byte>) override {
    return absl::UnimplementedError("memory engine");
  }
  absl::Status WriteKv(const KvRows&, std::span<const std::byte>) override {
    return absl::UnimplementedError("memory engine");
  }
  void Discard(int64_t, int64_t) override { ++discards; }
  int64_t progress_ns() const override { return 0; }

  std::byte* at(int64_t address) { return memory_.data() + address; }

  bool fail_next = false;
  std::function<void(const BatchPlan&, std::span<const AttendItem>)> on_start;
  std::vector<BatchPlan> plans;
  int discards = 0;

 private:
  std::vector<std::byte> memory_;
  EngineInfo info_;
  int layers_ = 0;
};

}  // namespace attend
