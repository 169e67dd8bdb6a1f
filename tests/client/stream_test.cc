// SPDX-License-Identifier: Apache-2.0
//
// Stream: order, item errors, and reopening with the unanswered items, against a scripted server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include "client/attend_client.h"
#include "tests/client/fake_attention.h"

namespace attend::client {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

class StreamTest : public testing::Test {
 protected:
  StreamTest() { server_.info.mutable_limits()->set_stream_items_in_flight(3); }

  Client Connect() {
    return *Client::Connect(server_.address(), {.deadline = milliseconds(20000),
                                                .max_attempts = 3,
                                                .first_backoff = milliseconds(1),
                                                .max_backoff = milliseconds(2),
                                                .on_retry = [this](const Error&) { ++retries_; }});
  }
  static v1::AttendRequest Item(const std::string& id) {
    v1::AttendRequest request;
    request.set_layer("0");
    request.set_request_id(id);
    return request;
  }
  static std::string IdOf(const Result<v1::AttendResponse>& response) {
    return response.ok() ? response->request_id() : response.error().ToString();
  }

  FakeAttention server_;
  int retries_ = 0;
};

TEST_F(StreamTest, AnswersComeInTheOrderOfTheItems) {
  Stream stream = Connect().OpenStream();
  for (const char* id : {"a", "b", "c"}) ASSERT_TRUE(stream.Send(Item(id)).ok());
  EXPECT_EQ(stream.unanswered(), 3);
  for (const char* id : {"a", "b", "c"}) EXPECT_EQ(IdOf(stream.Receive()), id);
  EXPECT_EQ(server_.seen("AttendStream").at(0).attend.timeout_us(), 20000000);
  EXPECT_FALSE(stream.Receive().ok());
}

TEST_F(StreamTest, MoreItemsThanTheServerTakesAreRefused) {
  Stream stream = Connect().OpenStream();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(stream.Send(Item("x")).ok());
  auto sent = stream.Send(Item("y"));
  ASSERT_FALSE(sent.ok());
  EXPECT_THAT(sent.error().message, HasSubstr("stream_items_in_flight = 3"));
  ASSERT_TRUE(stream.Receive().ok());
  EXPECT_TRUE(stream.Send(Item("y")).ok());
}

TEST_F(StreamTest, AnItemsErrorLeavesTheStreamOpen) {
  Stream stream = Connect().OpenStream();
  server_.FailNext(
      {.status = StatusWithReason(grpc::NOT_FOUND, v1::UNKNOWN_LAYER), .applied = true});
  ASSERT_TRUE(stream.Send(Item("a")).ok());
  ASSERT_TRUE(stream.Send(Item("b")).ok());
  auto failed = stream.Receive();
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().reason, v1::UNKNOWN_LAYER);
  EXPECT_FALSE(failed.error().outcome_unknown);
  EXPECT_EQ(IdOf(stream.Receive()), "b");
}

TEST_F(StreamTest, ADrainedStreamIsReopenedWithItsUnansweredItems) {
  Stream stream = Connect().OpenStream();
  ASSERT_TRUE(stream.Send(Item("a")).ok());
  EXPECT_EQ(IdOf(stream.Receive()), "a");
  server_.FailNext({StatusWithReason(grpc::UNAVAILABLE, v1::DRAINING)});
  ASSERT_TRUE(stream.Send(Item("b")).ok());
  ASSERT_TRUE(stream.Send(Item("c")).ok());
  EXPECT_EQ(IdOf(stream.Receive()), "b");
  EXPECT_EQ(IdOf(stream.Receive()), "c");
  EXPECT_EQ(retries_, 1);
}

TEST_F(StreamTest, ALostStreamRepeatsOnlyItemsThatMayRunTwice) {
  const Client client = Connect();
  auto session = client.OpenSession();
  ASSERT_TRUE(session.ok());
  v1::AttendRequest append = Item("append");
  append.add_sequences()->set_session_id(session->id());
  append.mutable_sequences(0)->set_position(0);
  append.mutable_sequences(0)->set_length(2);

  Stream stream = client.OpenStream();
  server_.FailNext({grpc::Status(grpc::UNAVAILABLE, "lost")});
  ASSERT_TRUE(stream.Send(append).ok());
  auto lost = stream.Receive();
  ASSERT_FALSE(lost.ok());
  EXPECT_TRUE(lost.error().outcome_unknown);
  EXPECT_EQ(stream.unanswered(), 0);

  append.mutable_sequences(0)->set_rewind(true);
  server_.FailNext({grpc::Status(grpc::UNAVAILABLE, "lost")});
  ASSERT_TRUE(stream.Send(append).ok());
  EXPECT_EQ(IdOf(stream.Receive()), "append");
  EXPECT_EQ(server_.length(session->id(), "0"), 2);
}

TEST_F(StreamTest, AStreamThatHangsEndsAtTheDeadline) {
  std::promise<void> release;
  server_.FailNext({.status = grpc::Status(grpc::UNAVAILABLE, "late"),
                    .during = [&] { release.get_future().wait(); }});
  Stream stream = Connect().WithDeadline(milliseconds(50)).OpenStream();
  ASSERT_TRUE(stream.Send(Item("a")).ok());
  auto answer = stream.Receive();
  release.set_value();
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code, grpc::DEADLINE_EXCEEDED);
  EXPECT_EQ(stream.unanswered(), 0);
}

TEST_F(StreamTest, DestroyingAStreamCancelsWhatIsUnanswered) {
  Stream stream = Connect().OpenStream();
  ASSERT_TRUE(stream.Send(Item("a")).ok());
}

TEST_F(StreamTest, AStoppedServerIsAnErrorAfterTheLastAttempt) {
  const Client client = Connect();
  server_.Stop();
  Stream stream = client.OpenStream();
  ASSERT_TRUE(stream.Send(Item("a")).ok());
  auto answer = stream.Receive();
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code, grpc::UNAVAILABLE);
  EXPECT_EQ(answer.error().attempts, 3);
}

}  // namespace
}  // namespace attend::client
