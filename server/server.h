// SPDX-License-Identifier: Apache-2.0
//
// Owns everything of a running server in construction order, and its life: load, serve, drain,
// stop. main.cc turns signals into RequestStop.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/attention_runtime.h"
#include "engine/model/checkpoint.h"
#include "engine/util/log.h"
#include "server/admission.h"
#include "server/attention_service.h"
#include "server/batcher.h"
#include "server/health.h"
#include "server/http_endpoint.h"
#include "server/machine.h"
#include "server/memory_plan.h"
#include "server/metrics.h"
#include "server/options.h"
#include "server/reflection.h"
#include "server/rpc/dispatcher.h"

namespace attend {

class Server {
 public:
  // `logger` outlives the server.
  Server(Options options, const Machine& machine, Logger& logger);
  // For tests: ends calls, joins every thread. attend-server ends without it, see main.cc.
  ~Server();

  // Reads and checks the checkpoints, then opens the ports and packs the weights; calls are
  // answered STARTING until the last layer is packed. Errors are start-up errors: one line, exit 2.
  absl::Status Start();

  // Serves until RequestStop, then drains; or until the engine fails, and returns why the process
  // has to end with an error. Called by one thread after Start. New calls are refused from then on;
  // the owner ends the process.
  absl::Status Run();

  // True until the first call can be served: a stop needs no drain. Any thread.
  bool loading() const { return state_.starting.load(); }

  // Starts the drain; any thread. Not from a signal handler.
  void RequestStop();

  // Removes the files of unix:PATH listeners, but not those of a server that took their places
  // since. Any thread; for owners that end without destructors.
  void RemoveSocketFiles();

  // Where it listens, with bound ports.
  const std::vector<std::string>& addresses() const { return dispatcher_->addresses(); }
  int metrics_port() const { return http_->port(); }

 private:
  absl::Status SettleDevice();
  absl::Status LoadCheckpoints();
  void LogDeviceAndMemory() const;
  absl::Status OpenPorts();
  absl::Status PackModels();
  void Drain();
  void StopServing();
  void EndCalls(const absl::Status& reason);
  bool Quiet() const;
  void EndOldStreams();
  GaugeSnapshot Gauges() const;
  absl::Status Ready() const;
  bool WaitForStop(int64_t milliseconds);  // true when asked to stop
  void Observe(const BatchOutcome& outcome);

  struct SocketFile {
    std::string path;
    std::pair<dev_t, ino_t> identity;
  };

  Options options_;  // fixed after SettleDevice
  const Machine machine_;
  Logger& logger_;
  const int64_t start_us_;
  ServerState state_;
  DeviceChoice device_;
  NamedCheckpoints checkpoints_;
  MemoryPlan memory_;
  std::unique_ptr<AttentionRuntime> runtime_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<CallMetrics> call_metrics_;
  std::unique_ptr<Batcher> batcher_;
  std::unique_ptr<Admission> admission_;
  std::unique_ptr<AttentionService> service_;
  Health health_;
  Reflection reflection_;
  std::unique_ptr<Dispatcher> dispatcher_;
  std::unique_ptr<HttpEndpoint> http_;

  mutable std::mutex mutex_;
  std::condition_variable stop_changed_;
  bool stop_ = false;                        // guarded by mutex_
  std::vector<int> listen_ports_;            // guarded by mutex_
  std::vector<SocketFile> socket_files_;     // guarded by mutex_
  std::vector<int64_t> kv_capacity_tokens_;  // fixed after PackModels
  int64_t expired_reported_ = 0;             // engine thread
  int64_t closed_reported_ = 0;              // engine thread
};

}  // namespace attend
