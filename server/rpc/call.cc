// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/call.h"

#include <grpc/support/time.h>

#include <algorithm>
#include <utility>

#include "engine/util/check.h"
#include "engine/util/error.h"
#include "server/rpc/dispatcher.h"
#include "server/rpc/status.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace attend {

static_assert(alignof(Call) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);  // of RecycledMemory

namespace {

// Thread sanitizer cannot see that gRPC hands a tag from the starting thread to the queue's.
void AnnotateHandOver([[maybe_unused]] void* tag) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(tag);
#endif
}
void AnnotateTakeOver([[maybe_unused]] void* tag) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(tag);
#endif
}

// grpc::ByteBuffer has no move constructor; a copy would allocate.
grpc::ByteBuffer Take(grpc::ByteBuffer& from) {
  grpc::ByteBuffer taken;
  taken.Swap(&from);
  return taken;
}

std::chrono::microseconds Since(Call::Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::microseconds>(Call::Clock::now() - start);
}

// None when it is not set, or so far away that a clock in nanoseconds can't tell.
std::optional<Call::Clock::time_point> SteadyDeadline(gpr_timespec deadline,
                                                      Call::Clock::time_point now) {
  constexpr int64_t kYearSeconds = int64_t{366} * 24 * 3600;
  const gpr_timespec left = gpr_time_sub(gpr_convert_clock_type(deadline, GPR_CLOCK_MONOTONIC),
                                         gpr_now(GPR_CLOCK_MONOTONIC));
  if (left.tv_sec > kYearSeconds) return std::nullopt;
  return now + std::chrono::seconds(left.tv_sec) + std::chrono::nanoseconds(left.tv_nsec);
}

absl::Status WrongMessageCount(int count) {
  return InvalidField("request", std::to_string(count) + (count == 1 ? " message" : " messages"),
                      "1 message");
}

}  // namespace

Call::Call(Dispatcher& dispatcher, std::shared_ptr<CallQueue> queue, CallObserver& observer,
           int64_t items_in_flight)
    : dispatcher_(dispatcher),
      queue_(std::move(queue)),
      observer_(observer),
      items_in_flight_(items_in_flight) {
  queue_->live_calls.fetch_add(1);
}

Call::~Call() { queue_->live_calls.fetch_sub(1); }

std::optional<std::string_view> Call::Metadata(std::string_view key) const {
  const auto found = context_.client_metadata().find(grpc::string_ref(key.data(), key.size()));
  if (found == context_.client_metadata().end()) return std::nullopt;
  return std::string_view(found->second.data(), found->second.size());
}

template <typename Start>
void Call::StartOperation(Operation& operation, Start&& start) {
  operation.self = shared_from_this();
  const bool started = queue_->StartOperation([&] {
    AnnotateHandOver(&operation);
    start();
  });
  if (!started) operation.self.reset();  // the server has stopped; a caller holds the call
}

void Call::Post(grpc::AsyncGenericService& service) {
  StartOperation(request_operation_, [&] {
    done_operation_.self = shared_from_this();
    AnnotateHandOver(&done_operation_);
    context_.AsyncNotifyWhenDone(&done_operation_);
    service.RequestCall(&context_, &stream_, &queue_->grpc_queue(), &queue_->grpc_queue(),
                        &request_operation_);
  });
}

void Call::OnOperation(void* tag, bool ok) {
  AnnotateTakeOver(tag);
  auto& operation = *static_cast<Operation*>(tag);
  const std::shared_ptr<Call> call = std::move(operation.self);
  switch (operation.kind) {
    case Operation::kRequest:
      if (ok) {
        call->OnHeaders();
      } else {
        call->done_operation_.self.reset();  // gRPC returns no done tag for a call that never came
      }
      break;
    case Operation::kDone:
      call->OnDone();
      break;
    case Operation::kRead:
      call->OnRead(ok);
      break;
    case Operation::kWrite:
    case Operation::kFinish:
      call->OnWrite(ok);
      break;
  }
}

void Call::OnHeaders() {
  queue_->running_calls.fetch_add(1);
  received_ = Clock::now();
  deadline_ = SteadyDeadline(context_.raw_deadline(), received_);
  method_ = &dispatcher_.MethodFor(path());
  Admit();
  dispatcher_.PostCall(queue_);  // last: nobody waits for the next call
}

void Call::Admit() {
  if (!method_->streaming()) observer_.RequestStarted(*method_);
  absl::Status admitted =
      dispatcher_.refusing() ? dispatcher_.ShutdownStatus() : method_->Admit(*this);
  if (admitted.ok() && method_->streaming()) {
    observer_.StreamOpened(*method_);
    if (!queue_->streams.Add(shared_from_this())) {
      observer_.StreamClosed(*method_);
      admitted = dispatcher_.ShutdownStatus();
    }
  }
  if (!admitted.ok()) observer_.Refused(*method_, admitted);
  const std::lock_guard lock(mutex_);
  admitted_ = admitted.ok();
  if (admitted_) {
    if (!method_->streaming()) queue_->receiving.Add(shared_from_this());
    return Advance();
  }
  if (!method_->streaming()) CountEnd({.started = received_}, admitted.code(), false);
  Finish(admitted);
}

void Call::OnRead(bool ok) {
  std::unique_lock lock(mutex_);
  reading_ = false;
  grpc::ByteBuffer message = Take(incoming_);
  if (over_) return;
  if (!ok) half_closed_ = true;

  if (method_->kind() == MethodKind::kBidiStream) {
    const bool accepted = ok && !end_;  // after EndStream nothing new is run
    const int64_t item = first_item_ + static_cast<int64_t>(items_.size());
    if (accepted) AcceptItem(static_cast<int64_t>(message.Length()));
    Advance();
    lock.unlock();
    if (accepted) method_->OnMessage(shared_from_this(), Take(message), item);
    return;
  }

  // One message and the client's half-close make the request.
  if (ok && ++messages_ == 1) {
    request_.Swap(&message);
    return Advance();
  }
  if (messages_ != 1) {
    // No message may also be a call that gRPC refused or the client cancelled: OnDone, which
    // follows, knows and counts it.
    if (messages_ > 1 && !method_->streaming()) {
      CountEnd({.started = received_}, absl::StatusCode::kInvalidArgument, false);
    }
    return Finish(WrongMessageCount(messages_));
  }
  if (end_) return Advance();
  if (!method_->streaming()) {
    queue_->receiving.Remove(this);
    AcceptItem(static_cast<int64_t>(request_.Length()));
  }
  lock.unlock();
  method_->OnMessage(shared_from_this(), Take(request_), 0);
}

void Call::AcceptItem(int64_t received_bytes) {
  const bool unary = !method_->streaming();
  items_.push_back({.started = unary ? received_ : Clock::now(), .received_bytes = received_bytes});
  if (unary) items_.back().receive = Since(received_);
  if (!unary) observer_.RequestStarted(*method_);
  ++owed_;
}

Call::Clock::time_point Call::Started(int64_t item) {
  const std::lock_guard lock(mutex_);
  return Owed(item).started;
}

Call::Item& Call::Owed(int64_t item) {
  const int64_t index = item - first_item_;
  CHECK(index >= 0 && index < static_cast<int64_t>(items_.size()));
  Item& owed = items_[static_cast<size_t>(index)];
  CHECK(!owed.answered);
  return owed;
}

void Call::Answer(int64_t item, grpc::ByteBuffer message, absl::StatusCode code, int label) {
  GiveAnswer(item, Take(message), absl::OkStatus(), code, label);
}

void Call::Answer(int64_t item, const absl::Status& error, int label) {
  CHECK(!error.ok());
  GiveAnswer(item, {}, error, error.code(), label);
}

void Call::GiveAnswer(int64_t item, grpc::ByteBuffer message, const absl::Status& error,
                      absl::StatusCode code, int label) {
  const std::lock_guard lock(mutex_);
  Item& answered = Owed(item);
  answered.answered = Clock::now();
  answered.message.Swap(&message);
  answered.error = error;
  --owed_;
  CountAnswer(answered, code, label);
  Advance();
}

void Call::Send(grpc::ByteBuffer message) {
  CHECK(method_->kind() == MethodKind::kServerStream);
  const std::lock_guard lock(mutex_);
  if (over_ || end_) return;
  items_.push_back({.started = Clock::now(), .answered = Clock::now()});
  items_.back().message.Swap(&message);
  Advance();
}

void Call::EndStream(const absl::Status& status) {
  CHECK(method_->streaming());
  const std::lock_guard lock(mutex_);
  if (!end_) end_ = status;
  Advance();
}

void Call::EndIfOverdue(std::chrono::milliseconds longest) {
  const std::lock_guard lock(mutex_);
  const bool received = !items_.empty() || first_item_ > 0;
  if (over_ || received) return;
  const Clock::time_point end = received_ + longest;
  if (Clock::now() < std::min(deadline_.value_or(end), end)) return;
  const absl::Status late =
      MakeError(absl::StatusCode::kDeadlineExceeded, {.reason = Reason::kDeadline},
                "the request did not arrive within its deadline");
  observer_.Refused(*method_, late);
  CountEnd({.started = received_}, late.code(), false);
  Finish(late);
}

void Call::Advance() {
  if (over_ || !admitted_) return;
  if (!writing_ && !items_.empty() && items_.front().answered) WriteNextAnswer();
  if (over_) return;
  const bool all_sent = items_.empty() && !writing_;
  // A client's half-close ends a bidirectional stream only; the others end with their answer or
  // EndStream.
  if (all_sent && (end_ || (half_closed_ && method_->kind() == MethodKind::kBidiStream))) {
    return Finish(end_.value_or(absl::OkStatus()));
  }
  const int64_t unsent = static_cast<int64_t>(items_.size()) + (writing_ ? 1 : 0);
  if (!reading_ && !reading_ended() && unsent < items_in_flight_) {
    reading_ = true;
    StartOperation(read_operation_, [&] { stream_.Read(&incoming_, &read_operation_); });
  }
}

void Call::WriteNextAnswer() {
  Item item;
  std::swap(item, items_.front());
  if (!item.error.ok()) return Finish(item.error);
  items_.pop_front();
  ++first_item_;
  sending_since_ = *item.answered;
  if (!method_->streaming()) {
    BecomeOver();
    StartOperation(finish_operation_, [&] {
      stream_.WriteAndFinish(item.message, grpc::WriteOptions(), grpc::Status::OK,
                             &finish_operation_);
    });
    return;
  }
  writing_ = true;
  StartOperation(write_operation_, [&] { stream_.Write(item.message, &write_operation_); });
}

void Call::Finish(const absl::Status& status) {
  if (const int64_t wait_ms = RetryAfterMs(status);
      status.code() == absl::StatusCode::kResourceExhausted && wait_ms > 0) {
    context_.AddTrailingMetadata("grpc-retry-pushback-ms", std::to_string(wait_ms));
  }
  BecomeOver();
  sending_since_ = Clock::now();
  StartOperation(finish_operation_,
                 [&] { stream_.Finish(ToGrpcStatus(status), &finish_operation_); });
}

// From here on nothing is started but the final operation; answers that still come are only
// counted.
void Call::BecomeOver() {
  over_ = true;
  if (!admitted_) return;
  if (method_->streaming()) {
    queue_->streams.Remove(this);
    observer_.StreamClosed(*method_);
  } else {
    queue_->receiving.Remove(this);
  }
}

void Call::OnWrite(bool ok) {
  const std::lock_guard lock(mutex_);
  // The final status of a stream is no answer, and a server stream has no requests.
  const bool answer =
      !method_->streaming() || (writing_ && method_->kind() == MethodKind::kBidiStream);
  if (ok && answer) {
    observer_.RequestSent(*method_, Since(sending_since_));
  }
  writing_ = false;
  if (ok) return Advance();
  lost_ = true;
  if (!over_) BecomeOver();
}

void Call::OnDone() {
  queue_->running_calls.fetch_sub(1);
  bool notify = false;
  {
    const std::lock_guard lock(mutex_);
    const bool cancelled = context_.IsCancelled();
    cancelled_ = cancelled;
    notify = cancelled && answers_owed();
    if (cancelled && !over_) BecomeOver();
    const bool unary = !method_->streaming();
    if (unary && !counted_ && owed_ == 0 && over_) {
      CountEnd({.started = received_},
               cancelled ? CodeOfCancelled() : absl::StatusCode::kInvalidArgument, false);
    }
  }
  if (notify) method_->OnCancelled(*this);
}

bool Call::answers_owed() const {
  return owed_ > 0 ||
         (method_->kind() == MethodKind::kServerStream && admitted_ && !over_ && messages_ > 0);
}

void Call::CountEnd(const Item& item, absl::StatusCode code, bool reached_method) {
  counted_ = true;
  observer_.RequestFinished(*method_, {.code = code,
                                       .answered = code,
                                       .reached_method = reached_method,
                                       .received_bytes = item.received_bytes,
                                       .receive = item.receive,
                                       .total = Since(item.started)});
}

void Call::CountAnswer(const Item& item, absl::StatusCode answered, int label) {
  counted_ = true;
  observer_.RequestFinished(*method_, {.code = cancelled_ || lost_ ? CodeOfCancelled() : answered,
                                       .answered = answered,
                                       .label = label,
                                       .reached_method = true,
                                       .received_bytes = item.received_bytes,
                                       .sent_bytes = static_cast<int64_t>(item.message.Length()),
                                       .receive = item.receive,
                                       .total = Since(item.started)});
}

absl::StatusCode Call::CodeOfCancelled() const {
  return deadline_ && Clock::now() >= *deadline_ ? absl::StatusCode::kDeadlineExceeded
                                                 : absl::StatusCode::kCancelled;
}

}  // namespace attend
