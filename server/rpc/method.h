// SPDX-License-Identifier: Apache-2.0
//
// What the dispatcher calls: one Method per RPC method, and one CallObserver that counts.
// Implemented by the service's methods (health, reflection and the Attention service) and by the
// metrics; neither knows completion queues.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"

namespace attend {

class Call;

enum class MethodKind {
  kUnary,         // one message in, one answer out
  kServerStream,  // one message in, Call::Send any number of times, then Call::EndStream
  kBidiStream,    // every item in is answered once, in order
};

// Called on queue threads, for any number of calls at a time; must not block. Outlives the
// dispatcher and every Call.
class Method {
 public:
  // `name` is the short name, as in the metrics: "Attend".
  Method(std::string name, MethodKind kind) : name_(std::move(name)), kind_(kind) {}
  virtual ~Method() = default;

  const std::string& name() const { return name_; }
  MethodKind kind() const { return kind_; }
  bool streaming() const { return kind_ != MethodKind::kUnary; }

  // The headers are in, the body is not: an error ends the call before the body is read.
  virtual absl::Status Admit(Call&) { return absl::OkStatus(); }

  // A whole message. Items are 0 for a unary call and 0, 1, 2, ... on a stream; each must lead to
  // exactly one call->Answer(item, ...), from any thread, also after a cancellation (a server
  // stream: EndStream).
  virtual void OnMessage(std::shared_ptr<Call> call, grpc::ByteBuffer message, int64_t item) = 0;

  // The client is gone or its deadline passed while answers are owed; they still are. At most once
  // a call.
  virtual void OnCancelled(Call&) {}

 private:
  const std::string name_;
  const MethodKind kind_;
};

// No label was given with the answer, or there was none.
inline constexpr int kNoLabel = -2;

// How one request ended. A request is a unary call, from its headers on, or an item of a
// bidirectional stream, once it is read.
struct RequestEnd {
  // As counted: CANCELLED or DEADLINE_EXCEEDED when the client could not get the answer any more.
  absl::StatusCode code = absl::StatusCode::kOk;
  // What the method answered; differs from `code` when the client could not get the answer.
  absl::StatusCode answered = absl::StatusCode::kUnknown;
  // What the method gave with its answer for the observer, e.g. which model it used.
  int label = kNoLabel;
  // The method was asked. False for a call that was refused on its headers, was cancelled or
  // refused by gRPC (a message above the limit) before its message was whole, or had none or two
  // messages.
  bool reached_method = false;
  int64_t received_bytes = 0;
  int64_t sent_bytes = 0;
  std::chrono::microseconds receive{0};  // headers to end of message; 0 for a stream's item
  std::chrono::microseconds total{0};    // start to answer
};

// Counts. Every RequestStarted is followed by exactly one RequestFinished, so at any time the sum
// over codes is started - in flight; an answer is counted before it is sent. A stream is not a
// request, and a server stream has none. Called on any thread, with a call's lock held: must only
// count, and not call back. Outlives every Call.
class CallObserver {
 public:
  virtual ~CallObserver() = default;
  virtual void RequestStarted(const Method&) {}
  virtual void RequestFinished(const Method&, const RequestEnd&) {}
  // A call was answered on its headers; a unary one has a RequestFinished as well.
  virtual void Refused(const Method&, const absl::Status&) {}
  // gRPC has taken the answer for the wire; `send` is the time since it was given. Not called for
  // answers that could not be sent.
  virtual void RequestSent(const Method&, std::chrono::microseconds /*send*/) {}
  virtual void StreamOpened(const Method&) {}
  virtual void StreamClosed(const Method&) {}
};

}  // namespace attend
