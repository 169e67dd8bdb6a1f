// SPDX-License-Identifier: Apache-2.0
//
// gtest assertions for statuses and tensors. Tests use them so that no comparison lets a NaN pass
// and no tolerance is written by hand.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/util/dtype.h"
#include "tests/support/reference_attention.h"

namespace attend {

inline const absl::Status& StatusOf(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

// EXPECT_THAT(status or StatusOr, IsOk()).
MATCHER(IsOk, negation ? "is an error" : "is OK") {
  *result_listener << StatusOf(arg).ToString();
  return StatusOf(arg).ok();
}

// EXPECT_THAT(status or StatusOr, StatusIs(absl::StatusCode::kInvalidArgument)).
MATCHER_P(StatusIs, code, "has code " + absl::StatusCodeToString(code)) {
  *result_listener << StatusOf(arg).ToString();
  return StatusOf(arg).code() == code;
}

// Values of `dtype` at `actual` against the oracle's, element by element: NaNs and infinities (with
// their signs) must stand at the same places, everything else must lie within the oracle's bound,
// widened by the last rounding to `dtype`. The message names the worst element.
testing::AssertionResult MatchesReference(DType dtype, const void* actual,
                                          const BoundedRows& expected);

// The same with one absolute tolerance for all elements; F32.
testing::AssertionResult MatchesWithin(std::span<const float> actual,
                                       std::span<const float> expected, double tolerance);

// Equal bytes; on failure the message names the first element of `dtype` that differs.
testing::AssertionResult SameBits(DType dtype, std::span<const std::byte> actual,
                                  std::span<const std::byte> expected);

}  // namespace attend
