// SPDX-License-Identifier: Apache-2.0
//
// When the client tries again and how long it waits, decided without clock or network.
#include "client/retry.h"

#include <gmock/gmock.h>
#include <grpcpp/support/status.h>
#include <gtest/gtest.h>

namespace attend::client {
namespace {

using std::chrono::milliseconds;
using testing::Optional;

const Options kOptions = {.deadline = milliseconds(10000),
                          .max_attempts = 5,
                          .first_backoff = milliseconds(100),
                          .max_backoff = milliseconds(300)};

Error Failed(int code, int attempts = 1) {
  Error error;
  error.code = code;
  error.attempts = attempts;
  return error;
}

std::optional<milliseconds> Delay(const Error& error, double uniform = 0.5,
                                  const Pushback& pushback = {}, Repeat repeat = Repeat::kSafe,
                                  milliseconds remaining = milliseconds(10000)) {
  return RetryDelay(error, pushback, repeat, remaining, kOptions, uniform);
}

TEST(RetryTest, OnlyTransientCodesAreTriedAgain) {
  for (int code = 1; code <= 16; ++code) {
    const bool transient = code == grpc::UNAVAILABLE || code == grpc::CANCELLED;
    EXPECT_EQ(Delay(Failed(code)).has_value(), transient) << CodeName(code);
  }
}

TEST(RetryTest, AFullServerIsAskedAgainOnlyWhenItSaysWhen) {
  Error error = Failed(grpc::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Delay(error), std::nullopt);
  EXPECT_THAT(Delay(error, 0.5, ParsePushback("40")), Optional(milliseconds(40)));
  error.retry_after = milliseconds(70);
  EXPECT_THAT(Delay(error), Optional(milliseconds(70)));
  EXPECT_THAT(Delay(error, 0.5, ParsePushback("40")), Optional(milliseconds(40)));
}

TEST(RetryTest, WaitsAreRandomBelowADoublingBound) {
  EXPECT_THAT(Delay(Failed(grpc::UNAVAILABLE, 1), 0.0), Optional(milliseconds(0)));
  EXPECT_THAT(Delay(Failed(grpc::UNAVAILABLE, 1), 0.5), Optional(milliseconds(50)));
  EXPECT_THAT(Delay(Failed(grpc::UNAVAILABLE, 2), 0.5), Optional(milliseconds(100)));
  EXPECT_THAT(Delay(Failed(grpc::UNAVAILABLE, 3), 0.5), Optional(milliseconds(150)));
  EXPECT_THAT(Delay(Failed(grpc::UNAVAILABLE, 4), 0.5), Optional(milliseconds(150)));
}

TEST(RetryTest, AttemptsAreBounded) {
  EXPECT_NE(Delay(Failed(grpc::UNAVAILABLE, 4)), std::nullopt);
  EXPECT_EQ(Delay(Failed(grpc::UNAVAILABLE, 5)), std::nullopt);
}

TEST(RetryTest, AWaitThatReachesTheDeadlineIsNotStarted) {
  const Error error = Failed(grpc::UNAVAILABLE);
  EXPECT_NE(Delay(error, 0.5, {}, Repeat::kSafe, milliseconds(51)), std::nullopt);
  EXPECT_EQ(Delay(error, 0.5, {}, Repeat::kSafe, milliseconds(50)), std::nullopt);
  EXPECT_EQ(Delay(error, 0.0, {}, Repeat::kSafe, milliseconds(-3)), std::nullopt);
}

TEST(RetryTest, UnsafeCallsAreTriedAgainOnlyWhenTheServerRefusedThem) {
  Error error = Failed(grpc::UNAVAILABLE);
  EXPECT_NE(Delay(error, 0.5, {}, Repeat::kIfRefused), std::nullopt);
  error.outcome_unknown = true;
  EXPECT_EQ(Delay(error, 0.5, {}, Repeat::kIfRefused), std::nullopt);
  EXPECT_NE(Delay(error, 0.5, {}, Repeat::kSafe), std::nullopt);
}

TEST(RetryTest, PushbackThatIsNegativeOrNoNumberForbidsARetry) {
  for (const char* text : {"-1", "", "abc", "5x", "99999999999999999999"}) {
    EXPECT_FALSE(ParsePushback(text).allowed) << text;
    EXPECT_EQ(Delay(Failed(grpc::UNAVAILABLE), 0.5, ParsePushback(text)), std::nullopt) << text;
  }
  EXPECT_TRUE(ParsePushback("0").allowed);
}

}  // namespace
}  // namespace attend::client
