// SPDX-License-Identifier: Apache-2.0
//
// Errors a user can cause. They are absl::Status values whose payload is a wire-encoded
// attend.v1.ErrorDetail, so that the server can pass it on without translating; the engine itself
// knows no protobuf. Field numbers and reasons are those of proto/attend/v1/attend.proto.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace attend {

// attend.v1.Reason, number by number (checked by tests/server/errors_test.cc).
enum class Reason : int {
  kUnspecified = 0,
  kInvalidField = 1,
  kUnknownModel = 2,
  kUnknownLayer = 3,
  kSessionNotFound = 4,
  kSessionExpired = 5,
  kSessionEvicted = 6,
  kSessionClosed = 7,
  kSessionLostInRestart = 8,
  kSessionMoved = 9,
  kPositionMismatch = 10,
  kQueueFull = 11,
  kKvExhausted = 12,
  kQuota = 13,
  kTooLarge = 14,
  kDraining = 15,
  kStarting = 16,
  kDeadline = 17,
  kCancelled = 18,
  kEngineFault = 19,
  kUnsupported = 20,
  kContextConflict = 21,
};

// attend.v1.ErrorDetail.
struct ErrorDetail {
  Reason reason = Reason::kUnspecified;
  std::string field = {};
  std::string got = {};
  std::string wanted = {};
  std::vector<int32_t> sequences = {};
  int64_t cached = 0;
  int64_t retry_after_ms = 0;
  std::string replica = {};
};

// The message is "field: got X, wanted Y" unless `message` is given.
absl::Status MakeError(absl::StatusCode code, const ErrorDetail& detail, std::string message = {});

// The same error with `sequences` added to its detail.
absl::Status WithSequences(const absl::Status& status, const std::vector<int32_t>& sequences);

// INVALID_ARGUMENT, INVALID_FIELD.
absl::Status InvalidField(std::string_view field, std::string_view got, std::string_view wanted);

// UNIMPLEMENTED, UNSUPPORTED: valid, but this build does not do it.
absl::Status Unsupported(std::string_view field, std::string_view what);

// The reason of an error; kUnspecified for an OK status or a foreign error.
Reason ReasonOf(const absl::Status& status);

// The wire-encoded attend.v1.ErrorDetail of an error; empty for an OK status or a foreign error.
std::string EncodedErrorDetail(const absl::Status& status);

}  // namespace attend
