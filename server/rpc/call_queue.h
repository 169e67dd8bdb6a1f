// SPDX-License-Identifier: Apache-2.0
//
// One completion queue and what the calls on it share: the gate that no operation passes once the
// queue is closed (gRPC aborts the process otherwise), the open streams, and the number of live
// calls. Made by the dispatcher; shared by its calls, which may outlive the dispatcher.
#pragma once

#include <grpcpp/completion_queue.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "engine/util/recycled.h"

namespace attend {

class Call;

// Calls that are looked at from outside; does not keep them. Thread-safe.
class CallSet {
 public:
  // False once Refuse was called.
  bool Add(const std::shared_ptr<Call>& call) {
    const std::lock_guard lock(mutex_);
    if (!refusing_) calls_.emplace(call.get(), call);
    return !refusing_;
  }
  void Remove(Call* call) {
    const std::lock_guard lock(mutex_);
    calls_.erase(call);
  }
  void Refuse() {
    const std::lock_guard lock(mutex_);
    refusing_ = true;
  }
  void AppendTo(std::vector<std::shared_ptr<Call>>& out) const {
    const std::lock_guard lock(mutex_);
    for (const auto& [unused, weak] : calls_) {
      if (std::shared_ptr<Call> call = weak.lock()) out.push_back(std::move(call));
    }
  }

 private:
  mutable std::mutex mutex_;
  bool refusing_ = false;                          // guarded by mutex_
  RecycledMap<Call*, std::weak_ptr<Call>> calls_;  // guarded by mutex_
};

// Thread-safe.
class CallQueue {
 public:
  explicit CallQueue(std::unique_ptr<grpc::ServerCompletionQueue> queue)
      : queue_(std::move(queue)) {}

  grpc::ServerCompletionQueue& grpc_queue() { return *queue_; }

  // Runs `start`, which hands tags to gRPC, unless the queue is closed: then false, and nothing is
  // run.
  template <typename Start>
  bool StartOperation(Start&& start) {
    const std::shared_lock lock(gate_);
    if (closed_) return false;
    start();
    return true;
  }

  // After it no operation starts, and the queue's thread ends when the running ones are through.
  void Close() {
    const std::unique_lock lock(gate_);
    if (!std::exchange(closed_, true)) queue_->Shutdown();
  }

  CallSet streams;
  CallSet receiving;  // unary calls whose request is on its way

  std::atomic<int64_t> live_calls{0};
  // From a call's headers until gRPC is done with it; who else keeps it does not matter.
  std::atomic<int64_t> running_calls{0};

 private:
  const std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::shared_mutex gate_;
  bool closed_ = false;  // guarded by gate_
};

}  // namespace attend
