// SPDX-License-Identifier: Apache-2.0
#include "server/service_parts.h"

#include "attend/v1/attend.pb.h"

namespace attend {
namespace {

absl::Status Unavailable(Reason reason, const char* message) {
  return MakeError(absl::StatusCode::kUnavailable, {.reason = reason, .retry_after_ms = 1000},
                   message);
}

}  // namespace

absl::Status StartingError() {
  return Unavailable(Reason::kStarting, "the server is loading its models");
}

absl::Status DrainingError() {
  return Unavailable(Reason::kDraining,
                     "the server is draining: it takes no new sessions and no work without one");
}

absl::Status MessageTooLarge(const char* field, int64_t got, int64_t limit) {
  return MakeError(absl::StatusCode::kInvalidArgument,
                   {.reason = Reason::kTooLarge,
                    .field = field,
                    .got = std::to_string(got) + " bytes",
                    .wanted = "at most message_bytes " + std::to_string(limit)});
}

std::string ReasonName(Reason reason) { return v1::Reason_Name(static_cast<v1::Reason>(reason)); }

}  // namespace attend
