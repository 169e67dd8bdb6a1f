// SPDX-License-Identifier: Apache-2.0
//
// One RPC, unary or stream, from its headers to its status: reads messages, hands them to its
// Method, and sends the answers in request order. Methods use the public part; the dispatcher makes
// calls and feeds them completions. It knows no message type.
//
// How a call lives: the dispatcher posts it; its headers arrive (Admit); messages are read while
// fewer than `items_in_flight` answers are owed; answers are written in order; then one final
// status. `over_` means that nothing more will be sent. Each operation that gRPC holds also holds
// the call, so it is destroyed when all have come back and no one else keeps it.
#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "engine/util/recycled.h"
#include "server/rpc/call_queue.h"
#include "server/rpc/method.h"

namespace attend {

class Dispatcher;

// Thread-safe where not said otherwise.
class Call : public std::enable_shared_from_this<Call> {
 public:
  using Clock = std::chrono::steady_clock;

  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  static void* operator new(size_t bytes) { return RecycledMemory::Get(bytes); }
  static void operator delete(void* memory, size_t bytes) { RecycledMemory::Put(memory, bytes); }

  // --- Facts, fixed once the headers are in.
  const Method& method() const { return *method_; }
  const std::string& path() const { return context_.method(); }  // "/attend.v1.Attention/Attend"
  std::string peer() const { return context_.peer(); }
  Clock::time_point received() const { return received_; }
  std::optional<Clock::time_point> deadline() const { return deadline_; }
  // The first value of a lower-case key; valid as long as the call.
  std::optional<std::string_view> Metadata(std::string_view key) const;
  // W3C trace context as sent; empty without.
  std::string_view traceparent() const { return Metadata("traceparent").value_or(""); }

  // The client is gone or its deadline passed.
  bool cancelled() const { return cancelled_.load(); }

  // --- Answers. Exactly one for each item given to Method::OnMessage, in any order and from any
  // thread, not before OnMessage was called for it; the order on the wire is that of the items.
  // `code` is what is counted: a stream's item whose error is inside `message` gives that.
  void Answer(int64_t item, grpc::ByteBuffer message, absl::StatusCode code = absl::StatusCode::kOk,
              int label = kNoLabel);
  // `error` is not OK. Ends the call with it, on a stream after the answers to earlier items.
  void Answer(int64_t item, const absl::Status& error, int label = kNoLabel);

  // When the request of an item not yet answered began: its headers came (unary), or it was read
  // (stream). Not after it was counted, so what is decided by it agrees with the counts.
  Clock::time_point Started(int64_t item);

  // Server streams only: one more message.
  void Send(grpc::ByteBuffer message);
  // Streams: stops reading, sends the answers of what was accepted, then ends with `status`;
  // messages not read until now never reach the method. The first call counts. A server stream ends
  // in no other way.
  void EndStream(const absl::Status& status);

  // Ends a unary call whose request is not all there at its deadline, or `longest` after its
  // headers, with DEADLINE_EXCEEDED.
  void EndIfOverdue(std::chrono::milliseconds longest);

  // Something that the method keeps with the call, e.g. what Admit reserved; released with the
  // call. Attach within Admit only, read within the method's functions.
  void Attach(std::shared_ptr<void> attachment) { attachment_ = std::move(attachment); }
  const std::shared_ptr<void>& attachment() const { return attachment_; }

 private:
  friend class Dispatcher;

  // What gRPC holds while an operation runs, as its tag.
  struct Operation {
    enum Kind { kRequest, kDone, kRead, kWrite, kFinish };
    Kind kind;
    std::shared_ptr<Call> self = nullptr;
  };

  // An item that was accepted; or, on a server stream, a message to send.
  struct Item {
    Clock::time_point started;
    int64_t received_bytes = 0;
    std::chrono::microseconds receive{0};
    std::optional<Clock::time_point> answered = std::nullopt;
    grpc::ByteBuffer message = {};
    absl::Status error = absl::OkStatus();  // instead of a message
  };

  Call(Dispatcher& dispatcher, std::shared_ptr<CallQueue> queue, CallObserver& observer,
       int64_t items_in_flight);

  // For the dispatcher: asks gRPC for a new call.
  void Post(grpc::AsyncGenericService& service);
  // Called by the queue's thread with what Next returned.
  static void OnOperation(void* tag, bool ok);

  void OnHeaders();
  void Admit();
  void OnRead(bool ok);
  void OnWrite(bool ok);
  void OnDone();

  template <typename Start>
  void StartOperation(Operation& operation, Start&& start);
  void GiveAnswer(int64_t item, grpc::ByteBuffer message, const absl::Status& error,
                  absl::StatusCode code, int label);

  // All below: mutex_ is held.
  bool reading_ended() const { return half_closed_ || end_.has_value(); }
  bool answers_owed() const;
  Item& Owed(int64_t item);  // one without an answer
  void AcceptItem(int64_t received_bytes);
  void Advance();  // starts whatever can be started
  void WriteNextAnswer();
  void Finish(const absl::Status& status);
  void BecomeOver();
  void CountEnd(const Item& item, absl::StatusCode code, bool reached_method);
  void CountAnswer(const Item& item, absl::StatusCode answered, int label);
  absl::StatusCode CodeOfCancelled() const;

  Dispatcher& dispatcher_;  // used on queue threads only: it may be gone before the last answer
  const std::shared_ptr<CallQueue> queue_;
  CallObserver& observer_;
  const int64_t items_in_flight_;

  Operation request_operation_{Operation::kRequest};
  Operation done_operation_{Operation::kDone};
  Operation read_operation_{Operation::kRead};
  Operation write_operation_{Operation::kWrite};
  Operation finish_operation_{Operation::kFinish};

  grpc::GenericServerContext context_;
  grpc::GenericServerAsyncReaderWriter stream_{&context_};

  // Set on the queue's thread by OnHeaders, then fixed.
  Method* method_ = nullptr;
  Clock::time_point received_;
  std::optional<Clock::time_point> deadline_;

  std::shared_ptr<void> attachment_;  // queue thread
  grpc::ByteBuffer incoming_;         // gRPC's while reading_, else the queue thread's
  grpc::ByteBuffer request_;          // the message of a unary call or server stream; queue thread
  std::atomic<bool> cancelled_{false};

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::deque<Item, RecyclingAllocator<Item>> items_;  // accepted, not yet written
  int64_t first_item_ = 0;                            // number of items_.front()
  int64_t owed_ = 0;                                  // items without an answer
  int messages_ = 0;                                  // read for a unary call or server stream
  bool admitted_ = false;
  bool reading_ = false;      // a read is running
  bool writing_ = false;      // a write is running
  bool half_closed_ = false;  // the client sends no more
  bool counted_ = false;      // a unary call's end
  bool lost_ = false;         // a write failed
  bool over_ = false;
  std::optional<absl::Status> end_;  // the final status, once it is decided
  Clock::time_point sending_since_;  // when the answer being sent was given
};

}  // namespace attend
