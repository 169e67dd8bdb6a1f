// SPDX-License-Identifier: Apache-2.0
//
// One unary call: deadline, metadata, decoding of errors and the retry loop (decided by retry.h).
// Used by Client and Session; the only place, with the stream, where gRPC's client context is
// touched.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "attend/v1/attend.grpc.pb.h"
#include "client/attend_client.h"
#include "client/retry.h"

namespace attend::client {

struct Connection {
  Options options;
  v1::ServerInfo server;
  // Two channels, so that a small call never waits behind the bytes of a large one.
  std::unique_ptr<v1::Attention::Stub> control;
  std::unique_ptr<v1::Attention::Stub> data;
};

struct CallPlan {
  std::chrono::milliseconds deadline{0};
  Repeat repeat = Repeat::kSafe;
  std::string replica = {};     // metadata attend-replica; empty = none
  int64_t announced_bytes = 0;  // metadata attend-bytes; 0 = none
};

// Makes `attempt` until it succeeds or retry.h gives up. `after_lost` runs before an attempt that
// follows a lost answer. Thread-safe.
Result<void> RunCall(const CallPlan& plan, const Options& options,
                     const std::function<grpc::Status(grpc::ClientContext*)>& attempt,
                     const std::function<void()>& after_lost = {});

// The trailer grpc-retry-pushback-ms of a finished call.
Pushback PushbackOf(const grpc::ClientContext& context);

// A failed status; its ErrorDetail, when the server sent one, fills the fields.
Error ErrorFromStatus(const grpc::Status& status);
// The error of a stream item.
Error ErrorFromWire(const v1::Status& status);
// INVALID_ARGUMENT found by this library before sending.
Error LocalError(std::string field, std::string got, std::string wanted);

// The replica in "<replica>.<start>.<random>"; empty for other ids.
std::string ReplicaOfSession(std::string_view id);

template <typename Request, typename Response>
using UnaryMethod = grpc::Status (v1::Attention::Stub::*)(grpc::ClientContext*, const Request&,
                                                          Response*);

template <typename Request, typename Response>
Result<Response> Call(v1::Attention::Stub& stub, UnaryMethod<Request, Response> method,
                      const Request& request, const CallPlan& plan, const Options& options,
                      const std::function<void()>& after_lost = {}) {
  Response response;
  Result<void> done = RunCall(
      plan, options,
      [&](grpc::ClientContext* context) { return (stub.*method)(context, request, &response); },
      after_lost);
  if (!done.ok()) return done.error();
  return response;
}

}  // namespace attend::client
