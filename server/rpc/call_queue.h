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
#include <unordered_map>
#include <utility>
#include <vector>

namespace attend {

class Call;

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

  // False once RefuseStreams was called.
  bool AddStream(const std::shared_ptr<Call>& call) {
    const std::lock_guard lock(streams_mutex_);
    if (!refuse_streams_) streams_.emplace(call.get(), call);
    return !refuse_streams_;
  }
  void RemoveStream(Call* call) {
    const std::lock_guard lock(streams_mutex_);
    streams_.erase(call);
  }
  void RefuseStreams() {
    const std::lock_guard lock(streams_mutex_);
    refuse_streams_ = true;
  }
  void AppendStreams(std::vector<std::shared_ptr<Call>>& out) const {
    const std::lock_guard lock(streams_mutex_);
    for (const auto& [unused, weak] : streams_) {
      if (std::shared_ptr<Call> call = weak.lock()) out.push_back(std::move(call));
    }
  }

  // Unary calls whose request is on its way.
  void AddReceiving(const std::shared_ptr<Call>& call) {
    const std::lock_guard lock(receiving_mutex_);
    receiving_.emplace(call.get(), call);
  }
  void RemoveReceiving(Call* call) {
    const std::lock_guard lock(receiving_mutex_);
    receiving_.erase(call);
  }
  std::vector<std::shared_ptr<Call>> Receiving() const {
    std::vector<std::shared_ptr<Call>> calls;
    const std::lock_guard lock(receiving_mutex_);
    for (const auto& [unused, weak] : receiving_) {
      if (std::shared_ptr<Call> call = weak.lock()) calls.push_back(std::move(call));
    }
    return calls;
  }

  std::atomic<int64_t> live_calls{0};
  // From a call's headers until gRPC is done with it; who else keeps it does not matter.
  std::atomic<int64_t> running_calls{0};

 private:
  const std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::shared_mutex gate_;
  bool closed_ = false;  // guarded by gate_

  mutable std::mutex streams_mutex_;
  bool refuse_streams_ = false;                             // guarded by streams_mutex_
  std::unordered_map<Call*, std::weak_ptr<Call>> streams_;  // guarded by streams_mutex_

  mutable std::mutex receiving_mutex_;
  std::unordered_map<Call*, std::weak_ptr<Call>> receiving_;  // guarded by receiving_mutex_
};

}  // namespace attend
