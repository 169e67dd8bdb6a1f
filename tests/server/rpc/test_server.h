// SPDX-License-Identifier: Apache-2.0
//
// A dispatcher on a free port with a method whose answers the test gives by hand, and a counter
// that checks what CallObserver promises.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/sync_stream.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "attend/v1/attend.grpc.pb.h"
#include "server/rpc/call.h"
#include "server/rpc/dispatcher.h"
#include "server/rpc/wire.h"

namespace attend {

// Thread-safe.
class CountingObserver : public CallObserver {
 public:
  void RequestStarted(const Method&) override {
    const std::lock_guard lock(mutex_);
    ++started_;
  }
  void RequestFinished(const Method& method, const RequestEnd& end) override {
    const std::lock_guard lock(mutex_);
    ++finished_;
    EXPECT_LE(finished_, started_);
    ++codes_[{method.name(), end.code}];
    last_ = end;
    changed_.notify_all();
  }
  void RequestSent(const Method&, std::chrono::microseconds) override {
    const std::lock_guard lock(mutex_);
    ++sent_;
    EXPECT_LE(sent_, finished_);
  }
  void StreamOpened(const Method&) override {
    const std::lock_guard lock(mutex_);
    ++streams_;
  }
  void StreamClosed(const Method&) override {
    const std::lock_guard lock(mutex_);
    --streams_;
    EXPECT_GE(streams_, 0);
    changed_.notify_all();
  }

  int64_t count(const std::string& method, absl::StatusCode code) const {
    const std::lock_guard lock(mutex_);
    const auto found = codes_.find({method, code});
    return found == codes_.end() ? 0 : found->second;
  }
  int64_t started() const {
    const std::lock_guard lock(mutex_);
    return started_;
  }
  RequestEnd last() const {
    const std::lock_guard lock(mutex_);
    return last_;
  }
  void WaitUntilIdle() const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return finished_ == started_ && streams_ == 0; });
  }
  int64_t finished() const {
    const std::lock_guard lock(mutex_);
    return finished_;
  }
  int64_t streams() const {
    const std::lock_guard lock(mutex_);
    return streams_;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  int64_t started_ = 0;
  int64_t finished_ = 0;
  int64_t sent_ = 0;
  int64_t streams_ = 0;
  std::map<std::pair<std::string, absl::StatusCode>, int64_t> codes_;
  RequestEnd last_;
};

// Keeps what arrives until the test answers it. Thread-safe.
class HeldMethod : public Method {
 public:
  using Method::Method;

  struct Held {
    std::shared_ptr<Call> call;
    int64_t item;
    std::string request_id;
  };

  absl::Status Admit(Call& call) override {
    const std::lock_guard lock(mutex_);
    ++admitted_;
    traceparent_ = std::string(call.traceparent());
    changed_.notify_all();
    return admission_;
  }
  void OnMessage(std::shared_ptr<Call> call, grpc::ByteBuffer message, int64_t item) override {
    const auto request = ParseMessage<v1::AttendRequest>(message);
    ASSERT_TRUE(request.ok());
    const std::lock_guard lock(mutex_);
    held_.push_back({std::move(call), item, request->request_id()});
    ++arrived_;
    changed_.notify_all();
  }
  void OnCancelled(Call& call) override {
    EXPECT_TRUE(call.cancelled());
    const std::lock_guard lock(mutex_);
    ++cancelled_;
    changed_.notify_all();
  }

  void SetAdmission(absl::Status status) {
    const std::lock_guard lock(mutex_);
    admission_ = std::move(status);
  }
  std::vector<Held> Wait(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return held_.size() >= count; });
    return std::exchange(held_, {});
  }
  void WaitForCancel() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return cancelled_ > 0; });
  }
  void WaitForHeaders() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return admitted_ > 0; });
  }
  int64_t arrived() const {
    const std::lock_guard lock(mutex_);
    return arrived_;
  }
  std::string traceparent() const {
    const std::lock_guard lock(mutex_);
    return traceparent_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Held> held_;
  absl::Status admission_;
  std::string traceparent_;
  int64_t arrived_ = 0;
  int64_t admitted_ = 0;
  int cancelled_ = 0;
};

// Answers with the request's own id.
inline void Echo(const HeldMethod::Held& held) {
  v1::AttendResponse response;
  response.set_request_id(held.request_id);
  held.call->Answer(held.item, EncodeMessage(response));
}

class TestServer {
 public:
  explicit TestServer(DispatcherSettings settings = {}) {
    settings.listen = {"127.0.0.1:0"};
    auto started = Dispatcher::Start(
        settings,
        {{"/attend.v1.Attention/Attend", &unary}, {"/attend.v1.Attention/AttendStream", &stream}},
        observer);
    EXPECT_TRUE(started.ok()) << started.status().ToString();
    dispatcher = std::move(*started);
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    channel = grpc::CreateCustomChannel(dispatcher->addresses()[0],
                                        grpc::InsecureChannelCredentials(), arguments);
    stub = v1::Attention::NewStub(channel);
  }

  // After it every call must be gone from memory.
  void StopAndExpectNoCalls() {
    dispatcher->Shutdown(std::chrono::system_clock::now());
    dispatcher->Stop();
    EXPECT_EQ(dispatcher->live_calls(), 0);
  }

  CountingObserver observer;
  HeldMethod unary{"Attend", MethodKind::kUnary};
  HeldMethod stream{"AttendStream", MethodKind::kBidiStream};
  std::unique_ptr<Dispatcher> dispatcher;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Attention::Stub> stub;
};

// Any number of messages on any method.
inline std::unique_ptr<grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>> OpenGeneric(
    grpc::Channel& channel, const char* path, grpc::ClientContext& context) {
  const grpc::internal::RpcMethod method(path, grpc::internal::RpcMethod::BIDI_STREAMING);
  return std::unique_ptr<grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>>(
      grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(
          &channel, method, &context));
}

inline v1::AttendRequest WithId(std::string id) {
  v1::AttendRequest request;
  request.set_request_id(std::move(id));
  return request;
}

}  // namespace attend
