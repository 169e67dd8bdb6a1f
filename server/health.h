// SPDX-License-Identifier: Apache-2.0
//
// grpc.health.v1.Health on the data plane's dispatcher: Check and Watch. Holds the state of each
// service name; the server decides the states and calls SetServing. gRPC's own health service would
// bring its threads and halve the throughput of small calls.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/rpc/call.h"
#include "server/rpc/dispatcher.h"
#include "server/rpc/method.h"

namespace attend {

// Thread-safe. Outlives the dispatcher that serves it.
class Health {
 public:
  // Knows "", "attend.v1.Attention", "readiness" and "liveness", all NOT_SERVING.
  Health();
  ~Health();

  // Adds a name that is new. Watchers hear of a change, once; who has heard of one service's finds
  // the others of the same call changed, too.
  void SetServing(std::span<const std::string_view> services, bool serving);
  void SetServing(std::string_view service, bool serving) {
    SetServing(std::span(&service, 1), serving);
  }

  // Adds Check and Watch.
  void AddTo(MethodTable& methods);

 private:
  class Check;
  class Watch;
  struct Watcher {
    std::weak_ptr<Call> call;  // gone when the stream has ended
    std::string service;
  };

  const std::unique_ptr<Check> check_;
  const std::unique_ptr<Watch> watch_;
  std::mutex mutex_;
  std::map<std::string, bool, std::less<>> serving_;  // guarded by mutex_
  std::vector<Watcher> watchers_;                     // guarded by mutex_
};

}  // namespace attend
