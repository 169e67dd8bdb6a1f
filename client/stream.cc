// SPDX-License-Identifier: Apache-2.0
//
// Stream: one AttendStream call at a time, reopened with its unanswered items. Every step is waited
// for with a deadline, which a blocking gRPC stream can't do; at most one step is outstanding.
#include <grpcpp/completion_queue.h>
#include <grpcpp/support/async_stream.h>

#include <algorithm>
#include <random>
#include <thread>

#include "client/session.h"

namespace attend::client {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

struct StreamCall {
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::AttendRequest, v1::AttendResponse>> wire;
  bool usable = true;  // no step has failed
  bool timed_out = false;
  bool finished = false;

  ~StreamCall() {
    if (finished) return;
    context.TryCancel();
    Finish(Clock::now());
  }

  // Waits for the outstanding step; cancels the call when it takes longer than until `end`.
  bool Wait(Clock::time_point end) {
    void* tag = nullptr;
    bool ok = false;
    const auto deadline = std::chrono::system_clock::now() + (end - Clock::now());
    if (queue.AsyncNext(&tag, &ok, deadline) == grpc::CompletionQueue::TIMEOUT) {
      timed_out = true;
      context.TryCancel();
      queue.Next(&tag, &ok);
      ok = false;
    }
    usable = usable && ok;
    return ok;
  }

  grpc::Status Finish(Clock::time_point end) {
    grpc::Status status;
    finished = true;
    wire->Finish(&status, this);
    Wait(end);
    return status;
  }
};

namespace {

// Why the call ended; a stream that ends well with items unanswered has failed them.
Error EndCall(StreamCall& call, Clock::time_point end) {
  const grpc::Status status = call.Finish(end);
  const bool late = call.timed_out;  // here or in an earlier step
  if (!late && !status.ok()) return ErrorFromStatus(status);
  Error error;
  error.code = late ? grpc::DEADLINE_EXCEEDED : grpc::UNAVAILABLE;
  error.reason = late ? v1::DEADLINE : v1::REASON_UNSPECIFIED;
  error.message = late ? "stream: no answer within the deadline"
                       : "stream: ended by the server before it answered every item";
  error.outcome_unknown = true;
  return error;
}

}  // namespace

Stream Client::OpenStream() const { return Stream(*this); }

Stream::Stream(Client client) : client_(std::move(client)) {}
Stream::Stream(Stream&&) noexcept = default;
Stream& Stream::operator=(Stream&&) noexcept = default;
Stream::~Stream() = default;

int64_t Stream::unanswered() const { return static_cast<int64_t>(unanswered_.size()); }

Result<void> Stream::Send(v1::AttendRequest request) {
  const int64_t limit = client_.server().limits().stream_items_in_flight();
  if (limit > 0 && unanswered() >= limit) {
    return LocalError("unanswered", std::to_string(unanswered()) + " items",
                      "fewer than stream_items_in_flight = " + std::to_string(limit));
  }
  if (auto error = CheckSize(*client_.connection_, request)) return *error;
  if (request.timeout_us() == 0) {
    request.set_timeout_us(std::chrono::microseconds(client_.deadline_).count());
  }
  unanswered_.push_back(std::move(request));
  const Clock::time_point end = Clock::now() + client_.deadline_;
  if (call_ == nullptr) {
    Reopen(end);
  } else if (call_->usable) {
    call_->wire->Write(unanswered_.back(), call_.get());
    call_->Wait(end);
  }
  return {};
}

void Stream::Reopen(Clock::time_point end) {
  call_ = std::make_unique<StreamCall>();
  const std::string replica = ReplicaOf(unanswered_.front());
  if (!replica.empty()) call_->context.AddMetadata("attend-replica", replica);
  call_->wire = client_.connection_->data->PrepareAsyncAttendStream(&call_->context, &call_->queue);
  call_->wire->StartCall(call_.get());
  call_->Wait(end);
  for (const v1::AttendRequest& request : unanswered_) {
    if (!call_->usable) return;
    call_->wire->Write(request, call_.get());
    call_->Wait(end);
  }
}

Result<v1::AttendResponse> Stream::Receive() {
  if (unanswered_.empty()) return LocalError("unanswered", "0 items", "a Send before Receive");
  const Clock::time_point end = Clock::now() + client_.deadline_;
  for (int attempts = 1;; ++attempts) {
    if (call_->usable) {
      v1::AttendResponse response;
      call_->wire->Read(&response, call_.get());
      if (call_->Wait(end)) {
        unanswered_.pop_front();
        if (!response.has_error()) return response;
        Error error = ErrorFromWire(response.error());
        error.attempts = attempts;
        return error;
      }
    }
    Error error = EndCall(*call_, end);
    error.attempts = attempts;
    const Pushback pushback = PushbackOf(call_->context);
    error.retryable = IsRetryable(error, pushback);
    const bool repeatable = std::all_of(unanswered_.begin(), unanswered_.end(), IsRepeatable);
    std::random_device random;
    const double uniform = std::uniform_real_distribution<double>(0, 1)(random);
    const auto wait = RetryDelay(error, pushback, repeatable ? Repeat::kSafe : Repeat::kIfRefused,
                                 std::chrono::duration_cast<milliseconds>(end - Clock::now()),
                                 client_.connection_->options, uniform);
    if (!wait) {
      unanswered_.clear();
      call_.reset();
      return error;
    }
    if (client_.connection_->options.on_retry) client_.connection_->options.on_retry(error);
    std::this_thread::sleep_for(*wait);
    Reopen(end);
  }
}

}  // namespace attend::client
