// SPDX-License-Identifier: Apache-2.0
//
// The methods of attend.v1.Attention. Attend and AttendStream are in attend_method; the others here
// turn a message into a session call for the batcher, or answer at once.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/metrics.h"
#include "server/rpc/method.h"
#include "server/service_parts.h"

namespace attend {

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
