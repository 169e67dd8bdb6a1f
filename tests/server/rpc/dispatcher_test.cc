// SPDX-License-Identifier: Apache-2.0
//
// Unary calls, counting, limits and shutdown of the dispatcher over real sockets.
#include "server/rpc/dispatcher.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/util/error.h"
#include "tests/server/rpc/test_server.h"
#include "tests/support/seed.h"

namespace attend {
namespace {

using absl::StatusCode;

struct UnaryResult {
  grpc::Status status;
  v1::AttendResponse response;
};

std::future<UnaryResult> CallAsync(TestServer& server, grpc::ClientContext& context,
                                   const std::string& id) {
  return std::async(std::launch::async, [&server, &context, id] {
    UnaryResult result;
    result.status = server.stub->Attend(&context, WithId(id), &result.response);
    return result;
  });
}

v1::ErrorDetail DetailOf(const grpc::Status& status) {
  v1::Status wire;
  v1::ErrorDetail detail;
  EXPECT_TRUE(wire.ParseFromString(status.error_details()));
  EXPECT_EQ(wire.code(), status.error_code());
  EXPECT_EQ(wire.message(), status.error_message());
  EXPECT_TRUE(wire.details_size() == 1 && wire.details(0).UnpackTo(&detail));
  return detail;
}

TEST(DispatcherTest, AnAnswerReachesTheClientAndIsCountedBefore) {
  TestServer server;
  grpc::ClientContext context;
  context.AddMetadata("traceparent", "00-1-2-01");
  auto result = CallAsync(server, context, "one");
  const HeldMethod::Held held = server.unary.Wait(1)[0];
  EXPECT_EQ(held.call->traceparent(), "00-1-2-01");
  EXPECT_EQ(held.call->Metadata("absent"), std::nullopt);
  EXPECT_EQ(held.call->path(), "/attend.v1.Attention/Attend");
  EXPECT_EQ(held.call->peer().rfind("ipv4:127.0.0.1:", 0), 0u);
  EXPECT_EQ(held.call->deadline(), std::nullopt);
  EXPECT_EQ(server.observer.finished(), 0);
  Echo(held);
  const UnaryResult answer = result.get();
  EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_EQ(answer.response.request_id(), "one");
  EXPECT_EQ(server.observer.count("Attend", StatusCode::kOk), 1);
  EXPECT_TRUE(server.observer.last().reached_method);
  EXPECT_EQ(server.observer.last().received_bytes, 5);
  EXPECT_EQ(server.observer.last().sent_bytes, 5);
}

TEST(DispatcherTest, AnErrorCarriesItsDetailAndTheTimeToRetry) {
  TestServer server;
  grpc::ClientContext context;
  auto result = CallAsync(server, context, "one");
  const HeldMethod::Held held = server.unary.Wait(1)[0];
  held.call->Answer(held.item,
                    MakeError(StatusCode::kResourceExhausted, {.reason = Reason::kQueueFull,
                                                               .field = "queue_requests",
                                                               .got = "513",
                                                               .wanted = "at most 512",
                                                               .retry_after_ms = 40}));
  const grpc::Status status = result.get().status;
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(status.error_message(), "queue_requests: got 513, wanted at most 512");
  EXPECT_EQ(DetailOf(status).reason(), v1::QUEUE_FULL);
  const auto pushback = context.GetServerTrailingMetadata().find("grpc-retry-pushback-ms");
  ASSERT_NE(pushback, context.GetServerTrailingMetadata().end());
  EXPECT_EQ(pushback->second, "40");
  EXPECT_EQ(server.observer.count("Attend", StatusCode::kResourceExhausted), 1);
}

TEST(DispatcherTest, AUnaryCallWithNoOrTwoMessagesIsInvalid) {
  TestServer server;
  for (const int messages : {0, 2}) {
    grpc::ClientContext context;
    auto stream = OpenGeneric(*server.channel, "/attend.v1.Attention/Attend", context);
    for (int i = 0; i < messages; ++i) stream->Write(EncodeMessage(WithId("x")));
    stream->WritesDone();
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(DetailOf(status).field(), "request");
    EXPECT_EQ(DetailOf(status).got(), std::to_string(messages) + " messages");
  }
  EXPECT_EQ(server.unary.arrived(), 0);
  server.observer.WaitUntilIdle();
  EXPECT_EQ(server.observer.count("Attend", StatusCode::kInvalidArgument), 2);
  server.StopAndExpectNoCalls();
}

TEST(DispatcherTest, AnUnknownMethodIsUnimplementedAndCountedAsOther) {
  TestServer server;
  grpc::ClientContext context;
  auto stream = OpenGeneric(*server.channel, "/attend.v1.Attention/Nope", context);
  stream->WritesDone();
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_NE(status.error_message().find("/attend.v1.Attention/Nope"), std::string::npos);
  EXPECT_EQ(server.observer.count("other", StatusCode::kUnimplemented), 1);
}

TEST(DispatcherTest, ACallRefusedOnItsHeadersEndsBeforeItsBodyIsRead) {
  TestServer server;
  server.unary.SetAdmission(InvalidField("attend-bytes", "9", "at most 8"));
  grpc::ClientContext context;
  auto stream = OpenGeneric(*server.channel, "/attend.v1.Attention/Attend", context);
  // Nothing is sent, not even the half-close: the status must come all the same.
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_FALSE(server.observer.last().reached_method);
  EXPECT_EQ(server.observer.count("Attend", StatusCode::kInvalidArgument), 1);
  server.StopAndExpectNoCalls();
}

TEST(DispatcherTest, ACancelledCallIsToldAndCountedAsCancelledWhateverIsAnswered) {
  TestServer server;
  grpc::ClientContext context;
  auto result = CallAsync(server, context, "one");
  {
    const HeldMethod::Held held = server.unary.Wait(1)[0];
    context.TryCancel();
    EXPECT_EQ(result.get().status.error_code(), grpc::StatusCode::CANCELLED);
    server.unary.WaitForCancel();
    EXPECT_EQ(server.observer.finished(), 0);
    Echo(held);
  }
  EXPECT_EQ(server.observer.count("Attend", StatusCode::kCancelled), 1);
  server.StopAndExpectNoCalls();
}

TEST(DispatcherTest, ACallCancelledBeforeItsBodyNeverReachesTheMethod) {
  TestServer server;
  grpc::ClientContext context;
  auto stream = OpenGeneric(*server.channel, "/attend.v1.Attention/Attend", context);
  server.unary.WaitForHeaders();
  context.TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  server.observer.WaitUntilIdle();
  EXPECT_EQ(server.observer.count("Attend", StatusCode::kCancelled), 1);
  EXPECT_FALSE(server.observer.last().reached_method);
  EXPECT_EQ(server.unary.arrived(), 0);
  server.StopAndExpectNoCalls();
}

TEST(DispatcherTest, ARequestThatDoesNotArriveInTimeIsEnded) {
  TestServer server;
  grpc::ClientContext context;
  auto stream = OpenGeneric(*server.channel, "/attend.v1.Attention/Attend", context);
  server.unary.WaitForHeaders();
  server.dispatcher->EndOverdueRequests(std::chrono::hours(1));
  EXPECT_EQ(server.observer.finished(), 0);
  grpc::ClientContext other;
  auto arrived = CallAsync(server, other, "one");
  {
    const HeldMethod::Held held = server.unary.Wait(1)[0];
    server.dispatcher->EndOverdueRequests(std::chrono::milliseconds(0));
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
    EXPECT_EQ(DetailOf(status).reason(), v1::DEADLINE);
    Echo(held);
  }
  EXPECT_TRUE(arrived.get().status.ok());
  server.observer.WaitUntilIdle();
  EXPECT_EQ(server.observer.count("Attend", StatusCode::kDeadlineExceeded), 1);
  EXPECT_EQ(server.observer.count("Attend", StatusCode::kOk), 1);
  server.StopAndExpectNoCalls();
}

TEST(DispatcherTest, AnExpiredDeadlineIsToldAndCountedAsSuch) {
  TestServer server;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(1));
  auto result = CallAsync(server, context, "one");
  const HeldMethod::Held held = server.unary.Wait(1)[0];
  ASSERT_TRUE(held.call->deadline().has_value());
  EXPECT_LT(*held.call->deadline(), Call::Clock::now() + std::chrono::milliseconds(1100));
  EXPECT_EQ(result.get().status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  server.unary.WaitForCancel();
  while (Call::Clock::now() < *held.call->deadline()) std::this_thread::yield();
  Echo(held);
  EXPECT_EQ(server.observer.count("Attend", StatusCode::kDeadlineExceeded), 1);
}

TEST(DispatcherTest, ADeadlineOfThousandsOfYearsIsNone) {
  TestServer server;
  grpc::ClientContext context;
  context.set_deadline(gpr_timespec{
      .tv_sec = int64_t{300'000'000'000}, .tv_nsec = 0, .clock_type = GPR_CLOCK_REALTIME});
  auto result = CallAsync(server, context, "one");
  const HeldMethod::Held held = server.unary.Wait(1)[0];
  EXPECT_EQ(held.call->deadline(), std::nullopt);
  Echo(held);
  EXPECT_TRUE(result.get().status.ok());
}

TEST(DispatcherTest, AMessageAboveTheReceiveLimitIsRefusedByGrpcAndCountedAsCancelled) {
  TestServer server({.max_receive_bytes = 1000});
  grpc::ClientContext context;
  EXPECT_EQ(CallAsync(server, context, std::string(2000, 'x')).get().status.error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  server.observer.WaitUntilIdle();
  EXPECT_EQ(server.observer.count("Attend", StatusCode::kCancelled), 1);
  EXPECT_EQ(server.unary.arrived(), 0);
  server.StopAndExpectNoCalls();
}

TEST(DispatcherTest, CompressedRequestsAreRefused) {
  TestServer server;
  grpc::ClientContext context;
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  EXPECT_EQ(CallAsync(server, context, std::string(2000, 'x')).get().status.error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
}

TEST(DispatcherTest, WhatAMethodAttachesIsReleasedWithTheCall) {
  class Attaching : public HeldMethod {
   public:
    using HeldMethod::HeldMethod;
    absl::Status Admit(Call& call) override {
      call.Attach(std::shared_ptr<void>(this, [this](void*) { released.fetch_add(1); }));
      return absl::OkStatus();
    }
    std::atomic<int> released{0};
  };
  CountingObserver observer;
  Attaching method("Attend", MethodKind::kUnary);
  auto dispatcher = Dispatcher::Start({.listen = {"127.0.0.1:0"}},
                                      {{"/attend.v1.Attention/Attend", &method}}, observer);
  ASSERT_TRUE(dispatcher.ok());
  {
    auto channel =
        grpc::CreateChannel((*dispatcher)->addresses()[0], grpc::InsecureChannelCredentials());
    grpc::ClientContext context;
    auto stream = OpenGeneric(*channel, "/attend.v1.Attention/Attend", context);
    stream->WritesDone();
    EXPECT_FALSE(stream->Finish().ok());
  }
  (*dispatcher)->Shutdown(std::chrono::system_clock::now());
  (*dispatcher)->Stop();
  EXPECT_EQ(method.released.load(), 1);
}

TEST(DispatcherTest, APortThatIsTakenIsNamed) {
  TestServer server;
  CountingObserver observer;
  const auto second = Dispatcher::Start({.listen = server.dispatcher->addresses()}, {}, observer);
  EXPECT_EQ(second.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(second.status().message()).find(server.dispatcher->addresses()[0]),
            std::string::npos);
}

TEST(DispatcherTest, UnixSocketsAndSeveralAddressesAreServed) {
  const std::string path = testing::TempDir() + "attend-" + std::to_string(getpid()) + ".sock";
  CountingObserver observer;
  const auto dispatcher =
      Dispatcher::Start({.listen = {"unix:" + path, "127.0.0.1:0"}}, {}, observer);
  ASSERT_TRUE(dispatcher.ok()) << dispatcher.status().ToString();
  ASSERT_EQ((*dispatcher)->addresses().size(), 2u);
  EXPECT_EQ((*dispatcher)->addresses()[0], "unix:" + path);
  EXPECT_EQ((*dispatcher)->addresses()[1], "127.0.0.1:" + std::to_string((*dispatcher)->port()));
  for (const std::string& address : (*dispatcher)->addresses()) {
    auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
    grpc::ClientContext context;
    auto stream = OpenGeneric(*channel, "/x", context);
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNIMPLEMENTED);
  }
}

// Answers on its own thread what the dispatcher brings.
void AnswerUntil(HeldMethod& method, const std::atomic<bool>& stop) {
  while (!stop) {
    for (const HeldMethod::Held& held : method.Wait(0)) Echo(held);
    std::this_thread::yield();
  }
}

TEST(DispatcherTest, ThousandsOfCallsWithRandomCancelsLeaveNothingBehind) {
  constexpr int kThreads = 4;
  constexpr int kCallsPerThread = 500;
  const uint64_t seed = TestSeed();
  TestServer server;
  std::atomic<bool> stop{false};
  std::thread answerer([&] { AnswerUntil(server.unary, stop); });
  std::atomic<int> answered{0};
  std::vector<std::thread> clients;
  for (int t = 0; t < kThreads; ++t) {
    clients.emplace_back([&, t] {
      std::mt19937_64 random(seed + t);
      for (int i = 0; i < kCallsPerThread; ++i) {
        grpc::ClientContext context;
        const int kind = static_cast<int>(random() % 4);
        if (kind == 0) {
          context.set_deadline(std::chrono::system_clock::now() +
                               std::chrono::microseconds(random() % 2000));
        }
        auto result = CallAsync(server, context, "call");
        if (kind == 1) {
          for (uint64_t spin = random() % 300; spin > 0; --spin) std::this_thread::yield();
          context.TryCancel();
        }
        const UnaryResult answer = result.get();
        if (answer.status.ok()) answered.fetch_add(1);
        EXPECT_TRUE(kind < 2 || answer.status.ok()) << answer.status.error_message();
      }
    });
  }
  for (std::thread& client : clients) client.join();
  server.observer.WaitUntilIdle();
  stop = true;
  answerer.join();
  EXPECT_GE(server.observer.count("Attend", StatusCode::kOk), answered.load());
  EXPECT_GE(server.observer.started(), answered.load());
  server.StopAndExpectNoCalls();
}

TEST(DispatcherTest, ShutdownWaitsForAnswersUntilItsDeadline) {
  TestServer server;
  grpc::ClientContext context;
  auto result = CallAsync(server, context, "one");
  std::vector<HeldMethod::Held> held = server.unary.Wait(1);
  auto down = std::async(std::launch::async, [&] {
    server.dispatcher->Shutdown(std::chrono::system_clock::now() + std::chrono::minutes(5));
  });
  Echo(held[0]);
  down.get();
  EXPECT_TRUE(result.get().status.ok());
  held.clear();
  server.StopAndExpectNoCalls();
}

TEST(DispatcherTest, AShutdownAfterARefusalStillWaitsForAnswers) {
  TestServer server;
  grpc::ClientContext context;
  auto result = CallAsync(server, context, "one");
  std::vector<HeldMethod::Held> held = server.unary.Wait(1);
  server.dispatcher->Refuse(std::chrono::system_clock::now());
  auto down = std::async(std::launch::async, [&] {
    server.dispatcher->Shutdown(std::chrono::system_clock::now() + std::chrono::minutes(5));
  });
  // Never over before the answer; a shutdown that does not wait is, long before this ends.
  EXPECT_EQ(down.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  Echo(held[0]);
  down.get();
  EXPECT_TRUE(result.get().status.ok());
  held.clear();
  server.StopAndExpectNoCalls();
}

TEST(DispatcherTest, AnswersAfterStopAreOnlyCounted) {
  TestServer server;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::future<UnaryResult>> results;
  for (int i = 0; i < 20; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    results.push_back(CallAsync(server, *contexts.back(), "late"));
  }
  std::vector<HeldMethod::Held> held = server.unary.Wait(20);
  server.dispatcher->Shutdown(std::chrono::system_clock::now());
  for (auto& result : results) EXPECT_FALSE(result.get().status.ok());
  server.dispatcher->Stop();
  EXPECT_EQ(server.dispatcher->live_calls(), 20);
  server.dispatcher.reset();
  for (const HeldMethod::Held& late : held) Echo(late);
  EXPECT_EQ(server.observer.count("Attend", StatusCode::kCancelled), 20);
}

TEST(DispatcherTest, ShutdownUnderLoadEndsEveryCallAndCountsIt) {
  TestServer server;
  std::atomic<bool> stop{false};
  std::thread answerer([&] { AnswerUntil(server.unary, stop); });
  std::vector<std::thread> clients;
  for (int t = 0; t < 4; ++t) {
    clients.emplace_back([&] {
      for (bool served = true; served;) {
        grpc::ClientContext context;
        served = CallAsync(server, context, "load").get().status.ok();
      }
    });
  }
  while (server.observer.finished() < 100) std::this_thread::yield();
  server.dispatcher->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(60));
  for (std::thread& client : clients) client.join();
  server.observer.WaitUntilIdle();
  stop = true;
  answerer.join();
  server.dispatcher->Stop();
  EXPECT_EQ(server.dispatcher->live_calls(), 0);
}

}  // namespace
}  // namespace attend
