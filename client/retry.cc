// SPDX-License-Identifier: Apache-2.0
#include "client/retry.h"

#include <grpcpp/support/status.h>

#include <algorithm>
#include <charconv>

namespace attend::client {

Pushback ParsePushback(std::string_view value) {
  int64_t milliseconds = -1;
  const auto [end, error] =
      std::from_chars(value.data(), value.data() + value.size(), milliseconds);
  if (error != std::errc() || end != value.data() + value.size() || milliseconds < 0) {
    return {.allowed = false, .wait = std::nullopt};
  }
  return {.allowed = true, .wait = std::chrono::milliseconds(milliseconds)};
}

bool IsRetryable(const Error& error, const Pushback& pushback) {
  if (!pushback.allowed) return false;
  switch (error.code) {
    case grpc::UNAVAILABLE:
    case grpc::CANCELLED:
      return true;
    case grpc::RESOURCE_EXHAUSTED:
      return pushback.wait.has_value() || error.retry_after.count() > 0;
    default:
      return false;
  }
}

std::optional<std::chrono::milliseconds> RetryDelay(const Error& error, const Pushback& pushback,
                                                    Repeat repeat,
                                                    std::chrono::milliseconds remaining,
                                                    const Options& options, double uniform) {
  if (!IsRetryable(error, pushback) || error.attempts >= options.max_attempts) return std::nullopt;
  if (repeat == Repeat::kIfRefused && error.outcome_unknown) return std::nullopt;
  std::chrono::milliseconds wait;
  if (pushback.wait) {
    wait = *pushback.wait;
  } else if (error.retry_after.count() > 0) {
    wait = error.retry_after;
  } else {
    // Full jitter: clients that failed together must not come back together.
    const int doublings = std::clamp(error.attempts - 1, 0, 20);
    const auto bound =
        std::min(options.max_backoff, options.first_backoff * (int64_t{1} << doublings));
    wait = std::chrono::milliseconds(
        static_cast<int64_t>(static_cast<double>(bound.count()) * uniform));
  }
  if (wait >= remaining) return std::nullopt;
  return wait;
}

}  // namespace attend::client
