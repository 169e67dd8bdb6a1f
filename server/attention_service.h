// SPDX-License-Identifier: Apache-2.0
//
// The methods of attend.v1.Attention: each turns a message into a job or a session call for the
// batcher, and the outcome into an answer. Decides admission and draining; what a request may say
// is decided in convert, what a session allows in the runtime.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/attention_runtime.h"
#include "engine/util/buffer_pool.h"
#include "engine/util/log.h"
#include "server/admission.h"
#include "server/batcher.h"
#include "server/convert.h"
#include "server/metrics.h"
#include "server/options.h"
#include "server/rpc/call.h"
#include "server/rpc/method.h"

namespace attend {

// Where the process is in its life; set by Server, read by every call.
struct ServerState {
  std::atomic<bool> starting{true};   // models are still being packed: calls are answered STARTING
  std::atomic<bool> draining{false};  // told to stop: visible in GetServerInfo and health
  // Past drain_delay: no new sessions, and no work without one that arrives later.
  std::atomic<Call::Clock::time_point> refusing_from{Call::Clock::time_point::max()};
  std::atomic<int64_t> in_flight{0};  // requests started and not yet answered
  std::atomic<int64_t> streams{0};

  bool Refuses(Call::Clock::time_point arrived) const { return arrived >= refusing_from.load(); }
};

// Everything outlives the service.
struct ServiceParts {
  const Options* options = nullptr;
  AttentionRuntime* runtime = nullptr;
  Batcher* batcher = nullptr;
  Admission* admission = nullptr;
  Metrics* metrics = nullptr;
  Logger* logger = nullptr;
  ServerState* state = nullptr;
  std::function<int64_t()> now_us;  // monotonic
};

class AttentionService {
 public:
  explicit AttentionService(ServiceParts parts);
  ~AttentionService();

  // Full path ("/attend.v1.Attention/Attend") and method; live as long as the service.
  const std::vector<std::pair<std::string, std::unique_ptr<Method>>>& methods() const {
    return methods_;
  }

 private:
  const ServiceParts parts_;
  std::vector<std::pair<std::string, std::unique_ptr<Method>>> methods_;
};

// Counts requests, phases and streams in Metrics and ServerState.
class CallMetrics : public CallObserver {
 public:
  CallMetrics(Metrics& metrics, ServerState& state) : metrics_(metrics), state_(state) {}
  void RequestStarted(const Method& method) override;
  void RequestFinished(const Method& method, const RequestEnd& end) override;
  void Refused(const Method& method, const absl::Status& status) override;
  void RequestSent(const Method& method, std::chrono::microseconds send) override;
  void StreamOpened(const Method& method) override;
  void StreamClosed(const Method& method) override;

 private:
  Metrics& metrics_;
  ServerState& state_;
};

}  // namespace attend
