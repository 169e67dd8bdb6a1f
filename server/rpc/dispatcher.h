// SPDX-License-Identifier: Apache-2.0
//
// The gRPC server: ports, completion queues and their threads, and the table of methods. Every
// method is generic, so headers can be refused before the body is read and no other service
// competes for the sockets. Made by the server with its methods; knows nothing of what they do.
#pragma once

#include <grpcpp/server.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/rpc/call.h"
#include "server/rpc/call_queue.h"
#include "server/rpc/method.h"

namespace attend {

// By full path: "/attend.v1.Attention/Attend".
using MethodTable = std::map<std::string, Method*, std::less<>>;

struct DispatcherSettings {
  std::vector<std::string> listen =
      {};                 // HOST:PORT (port 0: any free one), [IPV6]:PORT or unix:PATH
  int queue_threads = 2;  // one completion queue each
  int64_t max_receive_bytes = 2 * int64_t{83886080};
  // Bounds all memory of messages being received; gRPC resets streams above it.
  int64_t resource_quota_bytes = int64_t{1} << 30;
  std::chrono::seconds connection_age{600};
  std::chrono::seconds connection_grace{720};
  // Of one connection. Above the queue's limit, so that too many requests are refused, not stuck in
  // clients.
  int max_concurrent_streams = 1024;
  // Accepted and unsent items at which a stream is no longer read.
  int64_t stream_items_in_flight = 16;
};

class Dispatcher {
 public:
  // Binds and serves. Methods and observer outlive the dispatcher and all calls. INVALID_ARGUMENT
  // names the address that can't be bound.
  static absl::StatusOr<std::unique_ptr<Dispatcher>> Start(const DispatcherSettings& settings,
                                                           MethodTable methods,
                                                           CallObserver& observer);
  // As Shutdown(now) and Stop() if they were not called.
  ~Dispatcher();
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  // The listen addresses with the ports that were bound.
  const std::vector<std::string>& addresses() const { return addresses_; }
  // Of the first TCP address; 0 when there is none.
  int port() const { return port_; }

  // Streams that are open, of all methods: for Call::EndStream at a stream age or in a drain.
  // Thread-safe.
  std::vector<std::shared_ptr<Call>> Streams() const;

  // Ends unary calls whose request is not all there at their deadline, or `longest` after their
  // headers, with DEADLINE_EXCEEDED. To be called again and again. Thread-safe.
  void EndOverdueRequests(std::chrono::milliseconds longest);

  // Ends all streams and from now on all new calls with UNAVAILABLE, and waits until the running
  // ones are answered or `deadline` is there. Not on a queue thread. A second call only waits.
  void Refuse(std::chrono::system_clock::time_point deadline);
  // Refuse, then ends all connections; calls without an answer are cancelled, and so may be those
  // that arrive just now. Not on a queue thread. The owner then stops whatever still answers calls,
  // then calls Stop.
  void Shutdown(std::chrono::system_clock::time_point deadline);
  // Ends the queues and joins their threads; answers given later are only counted. All three are
  // idempotent, and called from one thread.
  void Stop();

  // Calls in memory, those waiting for clients included: 32 for each queue. Thread-safe.
  int64_t live_calls() const;
  // What live_calls returns when no client is there.
  int64_t idle_calls() const;

 private:
  friend class Call;

  Dispatcher(MethodTable methods, CallObserver& observer, int64_t items_in_flight);
  absl::Status Bind(const DispatcherSettings& settings);
  void Serve(CallQueue& queue);

  // For Call, on queue threads.
  Method& MethodFor(std::string_view path);
  void PostCall(const std::shared_ptr<CallQueue>& queue);
  static absl::Status ShutdownStatus();
  bool refusing() const { return refusing_.load(); }

  const MethodTable methods_;
  CallObserver& observer_;
  const int64_t items_in_flight_;
  const std::unique_ptr<Method> unknown_method_;

  grpc::AsyncGenericService service_;
  std::vector<std::shared_ptr<CallQueue>> queues_;
  std::unique_ptr<grpc::Server> server_;
  std::vector<std::thread> threads_;
  std::vector<std::string> addresses_;
  int port_ = 0;
  std::atomic<bool> refusing_{false};
  bool shut_down_ = false;
  bool stopped_ = false;
};

}  // namespace attend
