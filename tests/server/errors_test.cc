// SPDX-License-Identifier: Apache-2.0
//
// The engine's errors against the wire contract: engine/util/error.h writes protobuf by hand.
#include <gtest/gtest.h>

#include "attend/v1/attend.pb.h"
#include "engine/util/error.h"

namespace attend {
namespace {

TEST(ErrorsTest, EveryReasonHasItsNumberInTheContract) {
  const std::pair<Reason, const char*> reasons[] = {
      {Reason::kUnspecified, "REASON_UNSPECIFIED"},
      {Reason::kInvalidField, "INVALID_FIELD"},
      {Reason::kUnknownModel, "UNKNOWN_MODEL"},
      {Reason::kUnknownLayer, "UNKNOWN_LAYER"},
      {Reason::kSessionNotFound, "SESSION_NOT_FOUND"},
      {Reason::kSessionExpired, "SESSION_EXPIRED"},
      {Reason::kSessionEvicted, "SESSION_EVICTED"},
      {Reason::kSessionClosed, "SESSION_CLOSED"},
      {Reason::kSessionLostInRestart, "SESSION_LOST_IN_RESTART"},
      {Reason::kSessionMoved, "SESSION_MOVED"},
      {Reason::kPositionMismatch, "POSITION_MISMATCH"},
      {Reason::kQueueFull, "QUEUE_FULL"},
      {Reason::kKvExhausted, "KV_EXHAUSTED"},
      {Reason::kQuota, "QUOTA"},
      {Reason::kTooLarge, "TOO_LARGE"},
      {Reason::kDraining, "DRAINING"},
      {Reason::kStarting, "STARTING"},
      {Reason::kDeadline, "DEADLINE"},
      {Reason::kCancelled, "CANCELLED"},
      {Reason::kEngineFault, "ENGINE_FAULT"},
      {Reason::kUnsupported, "UNSUPPORTED"},
      {Reason::kContextConflict, "CONTEXT_CONFLICT"},
  };
  const auto* contract = v1::Reason_descriptor();
  ASSERT_EQ(static_cast<int>(std::size(reasons)), contract->value_count());
  for (const auto& [reason, name] : reasons) {
    const auto* value = contract->FindValueByName(name);
    ASSERT_NE(value, nullptr) << name;
    EXPECT_EQ(static_cast<int>(reason), value->number()) << name;
  }
}

TEST(ErrorsTest, TheEncodedDetailParsesAsTheContractsMessageWithAllFields) {
  const ErrorDetail detail{.reason = Reason::kPositionMismatch,
                           .field = "sequences.position",
                           .got = "300",
                           .wanted = "7",
                           .sequences = {0, 3, 200, 70000},
                           .cached = (int64_t{1} << 40) + 5,
                           .retry_after_ms = 250,
                           .replica = "host-1.example.org"};
  v1::ErrorDetail parsed;
  ASSERT_TRUE(parsed.ParseFromString(
      EncodedErrorDetail(MakeError(absl::StatusCode::kFailedPrecondition, detail))));
  EXPECT_EQ(parsed.reason(), v1::POSITION_MISMATCH);
  EXPECT_EQ(parsed.field(), detail.field);
  EXPECT_EQ(parsed.got(), detail.got);
  EXPECT_EQ(parsed.wanted(), detail.wanted);
  EXPECT_EQ(std::vector<int32_t>(parsed.sequences().begin(), parsed.sequences().end()),
            detail.sequences);
  EXPECT_EQ(parsed.cached(), detail.cached);
  EXPECT_EQ(parsed.retry_after_ms(), detail.retry_after_ms);
  EXPECT_EQ(parsed.replica(), detail.replica);
  // Written as protobuf writes it, so that nothing was lost on the way.
  EXPECT_EQ(parsed.SerializeAsString(),
            EncodedErrorDetail(MakeError(absl::StatusCode::kFailedPrecondition, detail)));
}

TEST(ErrorsTest, TheContractsDetailHasNoFieldTheEngineLacks) {
  EXPECT_EQ(v1::ErrorDetail::descriptor()->field_count(), 8);
}

TEST(ErrorsTest, AnOkStatusAndAForeignErrorHaveNoDetail) {
  EXPECT_EQ(EncodedErrorDetail(absl::OkStatus()), "");
  EXPECT_EQ(EncodedErrorDetail(absl::InternalError("foreign")), "");
}

TEST(ErrorsTest, AWrongFieldSaysWhatWasGotAndWanted) {
  const absl::Status status = InvalidField("hidden_states.data", "12 bytes", "16 bytes");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(status.message()), "hidden_states.data: got 12 bytes, wanted 16 bytes");
  v1::ErrorDetail parsed;
  ASSERT_TRUE(parsed.ParseFromString(EncodedErrorDetail(status)));
  EXPECT_EQ(parsed.reason(), v1::INVALID_FIELD);
}

}  // namespace
}  // namespace attend
