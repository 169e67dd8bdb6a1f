// SPDX-License-Identifier: Apache-2.0
//
// Bidirectional streams of the dispatcher over real sockets: order, back-pressure and endings.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
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

const absl::Status& StreamAge() {
  static const absl::Status status =
      MakeError(StatusCode::kUnavailable, {.reason = Reason::kDraining, .field = "stream_age"},
                "stream_age reached");
  return status;
}

TEST(DispatcherStreamTest, AnswersKeepTheOrderOfTheRequests) {
  TestServer server;
  grpc::ClientContext context;
  auto stream = server.stub->AttendStream(&context);
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(stream->Write(WithId(std::to_string(i))));
  {
    std::vector<HeldMethod::Held> held = server.stream.Wait(10);
    EXPECT_EQ(server.observer.streams(), 1);
    std::reverse(held.begin(), held.end());
    for (const HeldMethod::Held& item : held) Echo(item);
  }
  v1::AttendResponse response;
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_EQ(response.request_id(), std::to_string(i));
  }
  stream->WritesDone();
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(server.observer.count("AttendStream", StatusCode::kOk), 10);
  EXPECT_EQ(server.observer.streams(), 0);
  server.StopAndExpectNoCalls();
}

TEST(DispatcherStreamTest, AHalfCloseIsFollowedByAllAnswersAndOk) {
  TestServer server;
  grpc::ClientContext context;
  auto stream = server.stub->AttendStream(&context);
  stream->Write(WithId("a"));
  stream->Write(WithId("b"));
  stream->WritesDone();
  std::vector<HeldMethod::Held> held = server.stream.Wait(2);
  Echo(held[1]);
  Echo(held[0]);
  v1::AttendResponse response;
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.request_id(), "b");
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(DispatcherStreamTest, AnItemsErrorInsideItsMessageIsCountedAndTheStreamGoesOn) {
  TestServer server;
  grpc::ClientContext context;
  auto stream = server.stub->AttendStream(&context);
  stream->Write(WithId("bad"));
  {
    const HeldMethod::Held held = server.stream.Wait(1)[0];
    v1::AttendResponse response;
    response.mutable_error()->set_code(3);
    held.call->Answer(held.item, EncodeMessage(response), StatusCode::kInvalidArgument);
  }
  v1::AttendResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.error().code(), 3);
  stream->Write(WithId("good"));
  Echo(server.stream.Wait(1)[0]);
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.request_id(), "good");
  EXPECT_EQ(server.observer.count("AttendStream", StatusCode::kInvalidArgument), 1);
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(DispatcherStreamTest, AnErrorAnswerEndsTheStreamAfterTheEarlierAnswers) {
  TestServer server;
  grpc::ClientContext context;
  auto stream = server.stub->AttendStream(&context);
  for (const char* id : {"a", "b", "c"}) stream->Write(WithId(id));
  {
    std::vector<HeldMethod::Held> held = server.stream.Wait(3);
    held[1].call->Answer(held[1].item, InvalidField("request", "b", "not b"));
    Echo(held[0]);
    Echo(held[2]);
  }
  v1::AttendResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.request_id(), "a");
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(server.observer.finished(), 3);
  server.StopAndExpectNoCalls();
}

TEST(DispatcherStreamTest, NoMoreItemsAreReadThanTheLimitOfUnansweredOnes) {
  constexpr size_t kLimit = 4;
  constexpr int kItems = 60;
  TestServer server({.stream_items_in_flight = kLimit});
  grpc::ClientContext context;
  auto stream = server.stub->AttendStream(&context);
  std::thread writer([&] {
    for (int i = 0; i < kItems; ++i) stream->Write(WithId(std::to_string(i)));
    stream->WritesDone();
  });
  std::vector<HeldMethod::Held> held;
  v1::AttendResponse response;
  for (int i = 0; i < kItems; ++i) {
    // Once the limit is reached, what is read beyond it would be seen in a later round at the
    // latest.
    const size_t wanted = std::min<size_t>(kLimit, kItems - i);
    while (held.size() < wanted) {
      for (HeldMethod::Held& item : server.stream.Wait(1)) held.push_back(std::move(item));
    }
    EXPECT_LE(held.size(), kLimit);
    Echo(held.front());
    held.erase(held.begin());
    EXPECT_TRUE(stream->Read(&response));
    EXPECT_EQ(response.request_id(), std::to_string(i));
  }
  writer.join();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST(DispatcherStreamTest, EndStreamAnswersWhatWasAcceptedAndRunsNothingElse) {
  TestServer server({.stream_items_in_flight = 2});
  grpc::ClientContext context;
  auto stream = server.stub->AttendStream(&context);
  for (int i = 0; i < 5; ++i) stream->Write(WithId(std::to_string(i)));
  std::vector<HeldMethod::Held> held = server.stream.Wait(2);
  ASSERT_EQ(server.dispatcher->Streams().size(), 1u);
  server.dispatcher->Streams()[0]->EndStream(StreamAge());
  Echo(held[1]);
  Echo(held[0]);
  v1::AttendResponse response;
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.request_id(), "1");
  EXPECT_FALSE(stream->Read(&response));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(status.error_message(), "stream_age reached");
  EXPECT_EQ(server.stream.arrived(), 2);
  EXPECT_EQ(server.observer.started(), 2);
  EXPECT_TRUE(server.dispatcher->Streams().empty());
  held.clear();
  server.StopAndExpectNoCalls();
}

// What decides about items by time (a drain) must agree with those who saw them counted.
TEST(DispatcherStreamTest, AnItemBeganBeforeItWasCounted) {
  TestServer server;
  grpc::ClientContext context;
  const auto stream = server.stub->AttendStream(&context);
  for (const std::string id : {"a", "b"}) {
    const auto before = Call::Clock::now();
    ASSERT_TRUE(stream->Write(WithId(id)));
    while (server.observer.started() < (id == "a" ? 1 : 2)) std::this_thread::yield();
    const auto counted = Call::Clock::now();
    const HeldMethod::Held held = server.stream.Wait(1)[0];
    EXPECT_GE(held.call->Started(held.item), before);
    EXPECT_LE(held.call->Started(held.item), counted);
    Echo(held);
  }
  context.TryCancel();
  v1::AttendResponse response;
  while (stream->Read(&response)) {
  }
  server.observer.WaitUntilIdle();
  server.StopAndExpectNoCalls();
}

TEST(DispatcherStreamTest, AnItemThatArrivesAfterEndStreamIsNotRun) {
  TestServer server;
  grpc::ClientContext context;
  auto stream = server.stub->AttendStream(&context);
  stream->Write(WithId("before"));
  const HeldMethod::Held held = server.stream.Wait(1)[0];  // and a read is waiting
  server.dispatcher->Streams()[0]->EndStream(StreamAge());
  stream->Write(WithId("after"));
  {  // a call on the same connection, sent later: when it arrives, so has the item
    grpc::ClientContext later;
    (void)OpenGeneric(*server.channel, "/later", later)->Finish();
  }
  Echo(held);
  v1::AttendResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(server.stream.arrived(), 1);
  EXPECT_EQ(server.observer.count("AttendStream", StatusCode::kOk), 1);
}

TEST(DispatcherStreamTest, AnIdleStreamEndsAtOnceWhenTheServerShutsDown) {
  TestServer server;
  grpc::ClientContext context;
  auto stream = server.stub->AttendStream(&context);
  stream->Write(WithId("a"));
  Echo(server.stream.Wait(1)[0]);
  v1::AttendResponse response;
  ASSERT_TRUE(stream->Read(&response));
  server.dispatcher->Shutdown(std::chrono::system_clock::now() + std::chrono::minutes(5));
  EXPECT_FALSE(stream->Read(&response));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(status.error_message(), "the server is shutting down");
  server.StopAndExpectNoCalls();
}

TEST(DispatcherStreamTest, ARefusedStreamIsNoRequest) {
  TestServer server;
  server.stream.SetAdmission(
      MakeError(StatusCode::kUnavailable, {.reason = Reason::kStarting}, "wait"));
  grpc::ClientContext context;
  auto stream = server.stub->AttendStream(&context);
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(server.observer.started(), 0);
  EXPECT_EQ(server.observer.streams(), 0);
}

TEST(DispatcherStreamTest, ADroppedStreamIsToldAndItsItemsAreCountedAsCancelled) {
  TestServer server;
  grpc::ClientContext context;
  auto stream = server.stub->AttendStream(&context);
  for (int i = 0; i < 3; ++i) stream->Write(WithId("x"));
  {
    const std::vector<HeldMethod::Held> held = server.stream.Wait(3);
    context.TryCancel();
    server.stream.WaitForCancel();
    for (const HeldMethod::Held& item : held) Echo(item);
  }
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(server.observer.count("AttendStream", StatusCode::kCancelled), 3);
  EXPECT_EQ(server.observer.streams(), 0);
  server.StopAndExpectNoCalls();
}

TEST(DispatcherStreamTest, ManyStreamsWithRandomEndingsLeaveNothingBehind) {
  const uint64_t seed = TestSeed();
  TestServer server({.stream_items_in_flight = 3});
  std::atomic<bool> stop{false};
  std::thread answerer([&] {
    std::mt19937_64 random(seed);
    while (!stop) {
      std::vector<HeldMethod::Held> held = server.stream.Wait(0);
      std::shuffle(held.begin(), held.end(), random);
      for (const HeldMethod::Held& item : held) Echo(item);
      if (random() % 64 == 0) {
        for (const auto& open : server.dispatcher->Streams()) open->EndStream(StreamAge());
      }
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> clients;
  for (int t = 0; t < 3; ++t) {
    clients.emplace_back([&, t] {
      std::mt19937_64 random(seed + 1 + t);
      for (int round = 0; round < 60; ++round) {
        grpc::ClientContext context;
        auto stream = server.stub->AttendStream(&context);
        const int items = static_cast<int>(random() % 20);
        const bool cancel = random() % 3 == 0;
        std::thread writer([&] {
          for (int i = 0; i < items; ++i) stream->Write(WithId(std::to_string(i)));
          if (cancel) context.TryCancel();
          stream->WritesDone();
        });
        v1::AttendResponse response;
        for (int i = 0; stream->Read(&response); ++i) {
          EXPECT_EQ(response.request_id(), std::to_string(i));
        }
        writer.join();
        (void)stream->Finish();
      }
    });
  }
  for (std::thread& client : clients) client.join();
  server.observer.WaitUntilIdle();
  stop = true;
  answerer.join();
  server.StopAndExpectNoCalls();
}

}  // namespace
}  // namespace attend
