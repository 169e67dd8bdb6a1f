// SPDX-License-Identifier: Apache-2.0
//
// What the methods of the service have in common: the parts they work with, and refusals.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "engine/attention_runtime.h"
#include "engine/util/error.h"
#include "engine/util/log.h"
#include "server/admission.h"
#include "server/batcher.h"
#include "server/metrics.h"
#include "server/options.h"
#include "server/rpc/call.h"

namespace attend {

// Where the process is in its life; set by Server, read by every call.
struct ServerState {
  std::atomic<bool> starting{true};   // models are still being packed: calls are answered STARTING
  std::atomic<bool> draining{false};  // told to stop: visible in GetServerInfo and health
  // Past drain_delay: no new sessions, and no work without one, that begins later.
  std::atomic<Call::Clock::time_point> refusing_from{Call::Clock::time_point::max()};
  std::atomic<int64_t> in_flight{0};  // requests started and not yet answered
  std::atomic<int64_t> streams{0};

  bool Refuses(Call::Clock::time_point started) const { return started >= refusing_from.load(); }
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

// UNAVAILABLE, STARTING or DRAINING.
absl::Status StartingError();
absl::Status DrainingError();
// INVALID_ARGUMENT, TOO_LARGE: `field` of more bytes than message_bytes allows.
absl::Status MessageTooLarge(const char* field, int64_t got, int64_t limit);

// "QUEUE_FULL", as in the contract.
std::string ReasonName(Reason reason);

}  // namespace attend
