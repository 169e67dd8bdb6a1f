// SPDX-License-Identifier: Apache-2.0
//
// Session: positions, rewind after lost answers, replica metadata and lifetime, against a scripted
// server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/attend_client.h"
#include "tests/client/fake_attention.h"

namespace attend::client {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;

const std::vector<float> kRows = {1, 2, 3, 4};
const TensorView kTwoRows = {kRows, {2, 2}};
const grpc::Status kLost(grpc::UNAVAILABLE, "connection lost");

class SessionTest : public testing::Test {
 protected:
  static Result<Client> ConnectTo(const FakeAttention& server) {
    return Client::Connect(server.address(), {.deadline = milliseconds(20000),
                                              .max_attempts = 3,
                                              .first_backoff = milliseconds(1),
                                              .max_backoff = milliseconds(2)});
  }
  Session Open(const Client& client) {
    auto session = client.OpenSession("tiny");
    EXPECT_TRUE(session.ok()) << session.error().ToString();
    return *std::move(session);
  }
  v1::Sequence LastSequence() const { return server_.seen("Attend").back().attend.sequences(0); }

  FakeAttention server_;
  Client client_ = *ConnectTo(server_);
};

TEST_F(SessionTest, EachLayerContinuesWhereItStands) {
  Session session = Open(client_);
  ASSERT_TRUE(session.Attend("0", kTwoRows).ok());
  ASSERT_TRUE(session.Attend("0", kTwoRows).ok());
  ASSERT_TRUE(session.Attend("1", kTwoRows).ok());
  EXPECT_EQ(session.position("0"), 4);
  EXPECT_EQ(session.position("1"), 2);
  EXPECT_EQ(LastSequence().position(), 0);
  EXPECT_FALSE(LastSequence().rewind());
  EXPECT_EQ(server_.seen("Attend").back().attend.model(), "tiny");
}

TEST_F(SessionTest, EveryCallCarriesTheReplica) {
  Session session = Open(client_);
  ASSERT_TRUE(session.Attend("0", kTwoRows).ok());
  ASSERT_TRUE(session.Truncate(1).ok());
  ASSERT_TRUE(session.Fork().ok());
  ASSERT_TRUE(session.Info().ok());
  ASSERT_TRUE(client_.AttachSession(session.id()).ok());
  ASSERT_TRUE(session.Close().ok());
  for (const char* method :
       {"Attend", "TruncateSession", "ForkSession", "GetSession", "CloseSession"}) {
    for (const auto& seen : server_.seen(method)) {
      EXPECT_EQ(seen.metadata.at("attend-replica"), "fake.host-1") << method;
    }
  }
}

TEST_F(SessionTest, ALostAnswerIsAskedForAgainWithRewindAtTheSamePosition) {
  Session session = Open(client_);
  ASSERT_TRUE(session.Attend("0", kTwoRows).ok());
  server_.FailNext({.status = kLost, .applied = true});
  auto answer = session.Attend("0", kTwoRows);
  ASSERT_TRUE(answer.ok()) << answer.error().ToString();
  EXPECT_EQ(LastSequence().position(), 2);
  EXPECT_TRUE(LastSequence().rewind());
  EXPECT_EQ(server_.length(session.id(), "0"), 4);
  EXPECT_EQ(session.position("0"), 4);
}

TEST_F(SessionTest, ARefusalIsRepeatedWithoutRewind) {
  Session session = Open(client_);
  server_.FailNext({StatusWithReason(grpc::UNAVAILABLE, v1::STARTING)});
  ASSERT_TRUE(session.Attend("0", kTwoRows).ok());
  EXPECT_EQ(server_.seen("Attend").size(), 2u);
  EXPECT_FALSE(LastSequence().rewind());
}

TEST_F(SessionTest, AfterAnUnknownOutcomeTheNextCallRewinds) {
  Session session = Open(client_);
  server_.FailNext({.status = grpc::Status(grpc::DEADLINE_EXCEEDED, "late"), .applied = true});
  ASSERT_FALSE(session.Attend("0", kTwoRows).ok());
  EXPECT_EQ(server_.length(session.id(), "0"), 2);
  EXPECT_EQ(session.position("0"), 0);
  ASSERT_TRUE(session.Attend("0", kTwoRows).ok());
  EXPECT_TRUE(LastSequence().rewind());
  EXPECT_EQ(server_.length(session.id(), "0"), 2);
  ASSERT_TRUE(session.Attend("0", kTwoRows).ok());
  EXPECT_FALSE(LastSequence().rewind());
}

TEST_F(SessionTest, ALostAnswerIsRememberedWhenTheRepetitionIsRefused) {
  Session session = Open(client_);
  server_.FailNext({.status = kLost, .applied = true});
  server_.FailNext({StatusWithReason(grpc::INTERNAL, v1::ENGINE_FAULT)});
  auto answer = session.Attend("0", kTwoRows);
  ASSERT_FALSE(answer.ok());
  EXPECT_TRUE(answer.error().outcome_unknown);
  ASSERT_TRUE(session.Attend("0", kTwoRows).ok());
  EXPECT_TRUE(LastSequence().rewind());
  EXPECT_EQ(server_.length(session.id(), "0"), 2);
}

TEST_F(SessionTest, AnOrdinaryErrorLeavesTheLayerWhereItWas) {
  Session session = Open(client_);
  server_.FailNext({StatusWithReason(grpc::INVALID_ARGUMENT, v1::INVALID_FIELD)});
  ASSERT_FALSE(session.Attend("0", kTwoRows).ok());
  ASSERT_TRUE(session.Attend("0", kTwoRows).ok());
  EXPECT_FALSE(LastSequence().rewind());
  EXPECT_EQ(session.position("0"), 2);
}

TEST_F(SessionTest, NoAppendMovesNothing) {
  Session session = Open(client_);
  ASSERT_TRUE(session.Attend("0", kTwoRows).ok());
  ASSERT_TRUE(session.Attend("0", kTwoRows, {.no_append = true}).ok());
  EXPECT_TRUE(LastSequence().no_append());
  EXPECT_EQ(session.position("0"), 2);
}

TEST_F(SessionTest, RewindToCutsWithTheNextCall) {
  Session session = Open(client_);
  ASSERT_TRUE(session.Attend("0", kTwoRows).ok());
  session.RewindTo(1);
  EXPECT_EQ(session.position("0"), 1);
  EXPECT_EQ(server_.length(session.id(), "0"), 2);
  ASSERT_TRUE(session.Attend("0", kTwoRows).ok());
  EXPECT_EQ(server_.length(session.id(), "0"), 3);
  ASSERT_TRUE(session.Attend("1", kTwoRows).ok());
  EXPECT_FALSE(LastSequence().rewind());
}

TEST_F(SessionTest, ForkAndTruncateTakeTheServersLengths) {
  Session session = Open(client_);
  ASSERT_TRUE(session.Attend("0", kTwoRows).ok());
  auto fork = session.Fork(1);
  ASSERT_TRUE(fork.ok());
  EXPECT_NE(fork->id(), session.id());
  EXPECT_EQ(fork->position("0"), 1);
  ASSERT_TRUE(session.Truncate(0).ok());
  EXPECT_EQ(session.position("0"), 0);
}

TEST_F(SessionTest, ABatchAppendsToEverySession) {
  Session first = Open(client_);
  Session second = Open(client_);
  ASSERT_TRUE(first.Attend("0", kTwoRows).ok());
  const SessionRows batch[] = {{&first, 1}, {&second, 1}};
  server_.FailNext({.status = kLost, .applied = true});
  auto answer = client_.Attend("0", batch, kTwoRows);
  ASSERT_TRUE(answer.ok()) << answer.error().ToString();
  EXPECT_THAT(answer->positions, ElementsAre(3, 1));
  EXPECT_EQ(first.position("0"), 3);
  EXPECT_EQ(second.position("0"), 1);
}

TEST_F(SessionTest, ABatchAcrossReplicasIsRefusedBeforeItIsSent) {
  FakeAttention other;
  other.info.set_replica("other");
  Session first = Open(client_);
  Session second = Open(*ConnectTo(other));
  const SessionRows batch[] = {{&first, 1}, {&second, 1}};
  auto answer = client_.Attend("0", batch, kTwoRows);
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().field, "sequences[1].session_id");
  EXPECT_TRUE(server_.seen("Attend").empty());
}

TEST_F(SessionTest, CrossLayersCarryNoPositionAndKeepTheirContext) {
  Session session = Open(client_);
  ASSERT_TRUE(session.Attend("0", kTwoRows, {.context = kTwoRows}).ok());
  EXPECT_FALSE(LastSequence().has_position());
  EXPECT_EQ(LastSequence().context_length(), 2);
  ASSERT_TRUE(session.Attend("0", kTwoRows).ok());
  EXPECT_FALSE(LastSequence().has_position());
  EXPECT_FALSE(LastSequence().has_context_length());
  ASSERT_TRUE(session.Attend("1.cross", kTwoRows).ok());
  EXPECT_FALSE(LastSequence().has_position());
}

TEST_F(SessionTest, RawRowsSendTheirOwnCounts) {
  v1::OpenSessionRequest open;
  open.mutable_raw()->set_layers(1);
  auto session = client_.OpenSession(open);
  ASSERT_TRUE(session.ok());
  const TensorView three({kRows.data(), 3}, {3, 1, 1});
  const TensorView one({kRows.data(), 1}, {1, 1, 1});
  ASSERT_TRUE(session->Attend("0", RawRows{.q = one, .k = three, .v = three}).ok());
  EXPECT_EQ(LastSequence().length(), 1);
  EXPECT_EQ(LastSequence().context_length(), 3);
  ASSERT_TRUE(session->Attend("0", RawRows{.q = one}).ok());
  EXPECT_FALSE(LastSequence().has_context_length());
  EXPECT_EQ(server_.seen("Attend").back().attend.model(), "");
}

TEST_F(SessionTest, OwnedSessionsAreClosedWithTheirObject) {
  {
    Session session = Open(client_);
    Session moved = std::move(session);
    EXPECT_EQ(server_.open_sessions(), 1u);
    auto attached = client_.AttachSession(moved.id());
    ASSERT_TRUE(attached.ok());
  }
  EXPECT_EQ(server_.open_sessions(), 0u);
  EXPECT_EQ(server_.seen("CloseSession").size(), 1u);
}

TEST_F(SessionTest, AssigningClosesWhatTheObjectHeld) {
  Session session = Open(client_);
  const std::string first = session.id();
  session = Open(client_);
  EXPECT_NE(session.id(), first);
  EXPECT_EQ(server_.open_sessions(), 1u);
}

TEST_F(SessionTest, DetachedSessionsStayOpen) {
  Open(client_).Detach();
  EXPECT_EQ(server_.open_sessions(), 1u);
}

TEST_F(SessionTest, ClosingSurvivesALostAnswer) {
  Session session = Open(client_);
  server_.FailNext({.status = kLost, .applied = true});
  EXPECT_TRUE(session.Close().ok());
  auto answer = session.Attend("0", kTwoRows);
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().reason, v1::SESSION_CLOSED);
  EXPECT_FALSE(session.Close().ok());
}

TEST_F(SessionTest, ASessionOutlivesItsServer) {
  Session session = Open(client_);
  server_.Stop();
  auto answer = session.Attend("0", kTwoRows);
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code, grpc::UNAVAILABLE);
}

}  // namespace
}  // namespace attend::client
