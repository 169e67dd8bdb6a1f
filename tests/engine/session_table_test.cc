// SPDX-License-Identifier: Apache-2.0
#include "engine/session_table.h"

#include <gtest/gtest.h>

namespace attend {
namespace {

constexpr int64_t kSecond = 1000000;

std::unique_ptr<Session> NewSession(int64_t ttl_seconds) {
  auto session = std::make_unique<Session>();
  session->ttl_us = ttl_seconds * kSecond;
  return session;
}

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(SessionTableTest, AnIdTellsReplicaStartAnd128RandomBits) {
  SessionTable table("host-1.example.org", "65f", 10);
  Session* session = *table.Insert(NewSession(10), 0);
  EXPECT_TRUE(session->id.starts_with("host-1.example.org.65f."));
  EXPECT_EQ(session->id.size(), std::string("host-1.example.org.65f.").size() + 32);
  EXPECT_EQ(*table.Find(session->id), session);
}

TEST(SessionTableTest, AnotherReplicasSessionNamesItsOwner) {
  SessionTable owner("a.b", "1", 10);
  SessionTable other("c", "1", 10);
  const std::string id = (*owner.Insert(NewSession(10), 0))->id;
  const absl::Status status = other.Find(id).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(Message(status).find("replica a.b"), std::string::npos);
}

TEST(SessionTableTest, ASessionFromBeforeARestartIsLostAndNotJustUnknown) {
  SessionTable before("a", "1", 10);
  SessionTable after("a", "2", 10);
  const std::string id = (*before.Insert(NewSession(10), 0))->id;
  EXPECT_NE(Message(after.Find(id).status()).find("restart"), std::string::npos);
  EXPECT_EQ(after.Find(id).status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(Message(after.Find("nonsense").status()).find("not found"), std::string::npos);
  EXPECT_NE(Message(after.Find("a.2." + std::string(32, '0')).status()).find("not found"),
            std::string::npos);
}

TEST(SessionTableTest, ExpiredSkipsPinnedSessions) {
  SessionTable table("a", "1", 10);
  const std::string first = (*table.Insert(NewSession(5), 0))->id;
  const std::string second = (*table.Insert(NewSession(5), 0))->id;
  const auto expired =
      table.Expired(6 * kSecond, [&](const std::string& id) { return id == first; });
  EXPECT_EQ(expired, std::vector<std::string>{second});
}

TEST(SessionTableTest, EndedSessionsKeepTheirReasonForAnHour) {
  SessionTable table("a", "1", 10);
  const std::string id = (*table.Insert(NewSession(5), 0))->id;
  table.End(id, Reason::kSessionClosed, 0);
  EXPECT_NE(Message(table.Find(id).status()).find("closed"), std::string::npos);
  const std::string later = (*table.Insert(NewSession(5), 0))->id;
  table.End(later, Reason::kSessionExpired, 3601 * kSecond);
  EXPECT_NE(Message(table.Find(id).status()).find("not found"), std::string::npos);
  EXPECT_NE(Message(table.Find(later).status()).find("expired"), std::string::npos);
  EXPECT_EQ(table.ended(Reason::kSessionClosed), 1);
}

TEST(SessionTableTest, CapacityIsALimitWithNumbers) {
  SessionTable table("a", "1", 2);
  ASSERT_TRUE(table.Insert(NewSession(5), 0).ok());
  ASSERT_TRUE(table.Insert(NewSession(5), 0).ok());
  const absl::Status status = table.Insert(NewSession(5), 0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(Message(status).find("fewer than 2"), std::string::npos);
}

}  // namespace
}  // namespace attend
