// SPDX-License-Identifier: Apache-2.0
//
// An engine that only has KV memory: for tests of cache and runtime that need no arithmetic. It
// records plans, fails on command, and may have two batches in flight that end on command. It holds
// its caller to the contract of AttentionEngine: violations are counted.
#pragma once

#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <thread>
#include <vector>

#include "engine/attention_engine.h"

namespace attend {

class MemoryEngine : public AttentionEngine {
 public:
  explicit MemoryEngine(int64_t bytes, int batches_in_flight = 1)
      : memory_(static_cast<size_t>(bytes)) {
    info_ = {.engine = "memory",
             .device = "test",
             .isa = "none",
             .numerics_id = "memory-1",
             .threads = 1,
             .batches_in_flight = batches_in_flight};
  }

  const EngineInfo& info() const override { return info_; }
  void set_enough_rows(int64_t rows) { info_.enough_rows = rows; }
  absl::StatusOr<LayerInfo> AddLayer(const AttentionSpec&, const LayerWeights&) override {
    return LayerInfo{.index = layers_++};
  }
  absl::StatusOr<Ticket> Start(const BatchPlan& plan, std::span<const AttendItem> items) override {
    violations += failed_ || static_cast<int>(running_.size()) >= info_.batches_in_flight;
    if (fail_next) return Fail();
    plans.push_back(plan);
    running_.push_back({plan.order, plan.spec, items});
    const Ticket ticket = started.fetch_add(1) + 1;
    if (on_start) on_start(plan, items);
    return ticket;
  }
  bool Finished(Ticket ticket) override {
    violations += failed_;
    return ticket <= released.load();
  }
  // Only here the results arrive: what was lent must be there still.
  absl::StatusOr<StageTimes> Wait(Ticket ticket) override {
    violations += failed_ || running_.empty() || ticket != waited.load() + 1;
    while (ticket > released.load()) std::this_thread::yield();
    waited.store(ticket);
    const Running batch = running_.front();
    running_.pop_front();
    if (ticket == fail_wait) return Fail();
    for (int32_t index : batch.order) {
      const AttendItem& item = batch.items[static_cast<size_t>(index)];
      const int64_t width = batch.spec->raw()
                                ? int64_t{batch.spec->q_heads} * batch.spec->v_head_dim
                                : batch.spec->output_width;
      const int64_t bytes = item.rows * width * DTypeBytes(item.output_dtype);
      if (bytes > 0) std::memset(item.output, 1, static_cast<size_t>(bytes));
    }
    return times;
  }
  absl::Status CopyBlocks(std::span<const BlockCopy> copies) override {
    violations += failed_;
    if (fail_copies) return Fail();
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
  void Discard(int64_t, int64_t) override {
    violations += failed_;
    ++discards;
  }
  int64_t progress_ns() const override { return 0; }

  std::byte* at(int64_t address) { return memory_.data() + address; }

  bool fail_next = false;                                            // the next Start
  bool fail_copies = false;                                          // the next CopyBlocks
  Ticket fail_wait = 0;                                              // the Wait for this batch
  StageTimes times;                                                  // of every batch
  std::atomic<Ticket> released{std::numeric_limits<Ticket>::max()};  // batches that have ended
  std::atomic<Ticket> started{0};
  std::atomic<Ticket> waited{0};
  std::atomic<int> violations{0};
  std::function<void(const BatchPlan&, std::span<const AttendItem>)> on_start;
  std::vector<BatchPlan> plans;
  int discards = 0;

 private:
  struct Running {
    std::vector<int32_t> order;
    const AttentionSpec* spec;
    std::span<const AttendItem> items;
  };

  absl::Status Fail() {
    failed_ = true;
    return absl::InternalError("asked to fail");
  }

  std::vector<std::byte> memory_;
  std::deque<Running> running_;
  bool failed_ = false;
  EngineInfo info_;
  int layers_ = 0;
};

}  // namespace attend
