// SPDX-License-Identifier: Apache-2.0
//
// The client against a scripted server: limits, deadlines, errors and retries of calls without a
// session.
#include "client/attend_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include "tests/client/fake_attention.h"

namespace attend::client {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;

const Options kOptions = {.deadline = milliseconds(20000),
                          .max_attempts = 3,
                          .first_backoff = milliseconds(1),
                          .max_backoff = milliseconds(2)};
const std::vector<float> kRows = {1, 2, 3, 4};

class AttendClientTest : public testing::Test {
 protected:
  Client Connect(const Options& options = kOptions) {
    auto client = Client::Connect(server_.address(), options);
    EXPECT_TRUE(client.ok()) << client.error().ToString();
    return *client;
  }
  Result<Answer> AttendOnce(const Client& client) {
    return client.Attend("tiny", "0", {kRows, {2, 2}});
  }
  void FailTimes(int times, const grpc::Status& status, const std::string& pushback = {}) {
    for (int i = 0; i < times; ++i) server_.FailNext({.status = status, .pushback = pushback});
  }
  size_t attends() const { return server_.seen("Attend").size(); }

  FakeAttention server_;
};

TEST_F(AttendClientTest, ConnectingWithoutADeadlineIsRefused) {
  auto client = Client::Connect(server_.address(), {});
  ASSERT_FALSE(client.ok());
  EXPECT_EQ(client.error().field, "deadline");
  EXPECT_EQ(client.error().attempts, 0);
}

TEST_F(AttendClientTest, ConnectingToNobodyIsUnavailable) {
  server_.Stop();
  auto client = Client::Connect(server_.address(), kOptions);
  ASSERT_FALSE(client.ok());
  EXPECT_EQ(client.error().code, grpc::UNAVAILABLE);
  EXPECT_TRUE(client.error().retryable);
  EXPECT_EQ(client.error().attempts, 3);
}

TEST_F(AttendClientTest, RowsComeBackAsATensorOfTheSameShape) {
  auto answer = AttendOnce(Connect());
  ASSERT_TRUE(answer.ok()) << answer.error().ToString();
  EXPECT_THAT(answer->output.shape, ElementsAre(2, 2));
  EXPECT_EQ(answer->output.ToFloats(), kRows);
}

TEST_F(AttendClientTest, AnswersAboveGrpcsDefaultLimitArrive) {
  const std::vector<float> rows(2 << 20, 1.0f);  // 8 MiB
  auto answer = Connect().Attend("tiny", "0", {rows, {1 << 20, 2}});
  ASSERT_TRUE(answer.ok()) << answer.error().ToString();
  EXPECT_EQ(answer->output.data.size(), rows.size() * sizeof(float));
}

TEST_F(AttendClientTest, ARequestAboveMessageBytesIsRefusedBeforeItIsSent) {
  server_.info.mutable_limits()->set_message_bytes(1000);
  const std::vector<float> rows(1000);
  auto answer = Connect().Attend("tiny", "0", {rows, {500, 2}});
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code, grpc::INVALID_ARGUMENT);
  EXPECT_EQ(answer.error().reason, v1::TOO_LARGE);
  EXPECT_THAT(answer.error().message, HasSubstr("message_bytes = 1000"));
  EXPECT_EQ(attends(), 0u);
}

TEST_F(AttendClientTest, EveryAttendAnnouncesItsBytes) {
  ASSERT_TRUE(AttendOnce(Connect()).ok());
  const auto seen = server_.seen("Attend").at(0);
  EXPECT_EQ(seen.metadata.at("attend-bytes"), std::to_string(seen.attend.ByteSizeLong()));
  EXPECT_FALSE(seen.metadata.contains("attend-replica"));
}

TEST_F(AttendClientTest, ErrorDetailsBecomeFields) {
  v1::ErrorDetail detail;
  detail.set_reason(v1::POSITION_MISMATCH);
  detail.set_field("sequences[1].position");
  detail.set_got("7");
  detail.set_wanted("9");
  detail.set_cached(9);
  detail.set_replica("other");
  detail.add_sequences(1);
  detail.add_sequences(3);
  server_.FailNext({StatusWithDetail(grpc::FAILED_PRECONDITION, "two\nlines", detail)});
  auto answer = AttendOnce(Connect());
  ASSERT_FALSE(answer.ok());
  const Error& error = answer.error();
  EXPECT_EQ(error.ToString(), "FAILED_PRECONDITION POSITION_MISMATCH: two lines");
  EXPECT_EQ(error.field, "sequences[1].position");
  EXPECT_EQ(error.got, "7");
  EXPECT_EQ(error.wanted, "9");
  EXPECT_EQ(error.cached, 9);
  EXPECT_EQ(error.replica, "other");
  EXPECT_THAT(error.sequences, ElementsAre(1, 3));
  EXPECT_FALSE(error.retryable);
  EXPECT_FALSE(error.outcome_unknown);
}

TEST_F(AttendClientTest, AnUnknownReasonKeepsItsNumber) {
  server_.FailNext({StatusWithReason(grpc::INTERNAL, static_cast<v1::Reason>(77))});
  auto answer = AttendOnce(Connect());
  ASSERT_FALSE(answer.ok());
  EXPECT_THAT(answer.error().ToString(), HasSubstr("INTERNAL REASON_77"));
}

TEST_F(AttendClientTest, TheDeadlineEndsACallThatHangs) {
  std::promise<void> release;
  server_.FailNext({.status = grpc::Status(grpc::UNAVAILABLE, "late"),
                    .during = [&] { release.get_future().wait(); }});
  auto answer = AttendOnce(Connect().WithDeadline(milliseconds(50)));
  release.set_value();
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code, grpc::DEADLINE_EXCEEDED);
  EXPECT_EQ(answer.error().reason, v1::DEADLINE);
  EXPECT_TRUE(answer.error().outcome_unknown);
  EXPECT_EQ(answer.error().attempts, 1);
  EXPECT_EQ(attends(), 1u);
}

TEST_F(AttendClientTest, StatelessCallsAreRepeatedAfterTransientErrors) {
  FailTimes(1, grpc::Status(grpc::UNAVAILABLE, "connection lost"));
  FailTimes(1, grpc::Status(grpc::CANCELLED, "shut down"));
  EXPECT_TRUE(AttendOnce(Connect()).ok());
  EXPECT_EQ(attends(), 3u);
}

TEST_F(AttendClientTest, RetriesAreReportedBeforeTheyAreMade) {
  Options options = kOptions;
  std::vector<std::string> reported;
  options.on_retry = [&](const Error& error) {
    reported.push_back(std::to_string(error.attempts) + " " + error.ToString());
    EXPECT_EQ(attends(), reported.size());
  };
  const Client client = Connect(options);
  FailTimes(9, StatusWithReason(grpc::UNAVAILABLE, v1::DRAINING));
  EXPECT_FALSE(AttendOnce(client).ok());
  EXPECT_THAT(reported,
              ElementsAre("1 UNAVAILABLE DRAINING: DRAINING", "2 UNAVAILABLE DRAINING: DRAINING"));
}

TEST_F(AttendClientTest, AttemptsEndAtTheirLimit) {
  FailTimes(9, StatusWithReason(grpc::UNAVAILABLE, v1::DRAINING));
  auto answer = AttendOnce(Connect());
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().reason, v1::DRAINING);
  EXPECT_EQ(answer.error().attempts, 3);
  EXPECT_EQ(attends(), 3u);
}

TEST_F(AttendClientTest, AFullQueueIsWaitedForAsLongAsTheServerSays) {
  v1::ErrorDetail detail;
  detail.set_reason(v1::QUEUE_FULL);
  detail.set_retry_after_ms(30);
  server_.FailNext({StatusWithDetail(grpc::RESOURCE_EXHAUSTED, "full", detail)});
  server_.FailNext({.status = grpc::Status(grpc::RESOURCE_EXHAUSTED, "full"), .pushback = "30"});
  const Client client = Connect();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(AttendOnce(client).ok());
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(60));
  EXPECT_EQ(attends(), 3u);
}

TEST_F(AttendClientTest, ErrorsThatStayAreNotRepeated) {
  const Client client = Connect();
  const grpc::Status statuses[] = {
      StatusWithReason(grpc::INVALID_ARGUMENT, v1::INVALID_FIELD),
      StatusWithReason(grpc::NOT_FOUND, v1::UNKNOWN_MODEL),
      StatusWithReason(grpc::INTERNAL, v1::ENGINE_FAULT),
      StatusWithReason(grpc::RESOURCE_EXHAUSTED, v1::QUOTA),
      grpc::Status(grpc::DEADLINE_EXCEEDED, "server's"),
  };
  for (const grpc::Status& status : statuses) {
    const size_t before = attends();
    server_.FailNext({status});
    EXPECT_FALSE(AttendOnce(client).ok());
    EXPECT_EQ(attends(), before + 1) << status.error_code();
  }
}

TEST_F(AttendClientTest, NegativePushbackForbidsARepetition) {
  FailTimes(1, grpc::Status(grpc::UNAVAILABLE, "go away"), "-1");
  auto answer = AttendOnce(Connect());
  ASSERT_FALSE(answer.ok());
  EXPECT_FALSE(answer.error().retryable);
  EXPECT_EQ(attends(), 1u);
}

TEST_F(AttendClientTest, AWaitBeyondTheDeadlineIsNotStarted) {
  FailTimes(1, grpc::Status(grpc::UNAVAILABLE, "later"), "3600000");
  const auto begin = std::chrono::steady_clock::now();
  auto answer = AttendOnce(Connect());
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code, grpc::UNAVAILABLE);
  EXPECT_EQ(answer.error().retry_after, milliseconds(3600000));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kOptions.deadline);
}

TEST_F(AttendClientTest, AFreeAppendIsRepeatedOnlyWhenTheServerRefusedIt) {
  const Client client = Connect();
  auto session = client.OpenSession();
  ASSERT_TRUE(session.ok());
  v1::AttendRequest request;
  request.set_layer("0");
  CopyToWire({kRows, {2, 2}}, request.mutable_hidden_states());
  v1::Sequence* sequence = request.add_sequences();
  sequence->set_session_id(session->id());
  sequence->set_length(2);
  sequence->set_position(0);

  FailTimes(1, StatusWithReason(grpc::UNAVAILABLE, v1::STARTING));
  ASSERT_TRUE(client.Attend(request).ok());
  EXPECT_EQ(attends(), 2u);
  EXPECT_EQ(server_.seen("Attend").at(0).metadata.at("attend-replica"), "fake.host-1");

  sequence->set_position(2);
  server_.FailNext({.status = grpc::Status(grpc::UNAVAILABLE, "lost"), .applied = true});
  auto lost = client.Attend(request);
  ASSERT_FALSE(lost.ok());
  EXPECT_TRUE(lost.error().outcome_unknown);
  EXPECT_EQ(attends(), 3u);

  sequence->set_rewind(true);
  server_.FailNext({.status = grpc::Status(grpc::UNAVAILABLE, "lost"), .applied = true});
  EXPECT_TRUE(client.Attend(request).ok());
  EXPECT_EQ(server_.length(session->id(), "0"), 4);
}

TEST_F(AttendClientTest, OpeningIsNotRepeatedAfterALostAnswer) {
  const Client client = Connect();
  server_.FailNext({.status = grpc::Status(grpc::UNAVAILABLE, "lost"), .applied = true});
  EXPECT_FALSE(client.OpenSession().ok());
  EXPECT_EQ(server_.seen("OpenSession").size(), 1u);
  server_.FailNext({StatusWithReason(grpc::UNAVAILABLE, v1::DRAINING)});
  EXPECT_TRUE(client.OpenSession().ok());
}

TEST(TensorTest, HalfTypesBecomeFloats) {
  const Tensor half = {v1::DTYPE_F16, {4}, std::string("\x00\x3c\x01\x00\x00\xfc\x00\x80", 8)};
  EXPECT_THAT(half.ToFloats(), ElementsAre(1.0f, std::ldexp(1.0f, -24), -INFINITY, -0.0f));
  const Tensor brain = {v1::DTYPE_BF16, {2}, std::string("\x80\x3f\x00\x3c", 4)};
  EXPECT_THAT(brain.ToFloats(), ElementsAre(1.0f, 0.0078125f));
}

}  // namespace
}  // namespace attend::client
