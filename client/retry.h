// SPDX-License-Identifier: Apache-2.0
//
// When the client tries again: pure decisions over an Error, no clock and no network. Called by the
// client's call loop; the server's table of errors is DESIGN 2, "Errors".
#pragma once

#include <chrono>
#include <optional>
#include <string_view>

#include "client/attend_client.h"

namespace attend::client {

// What a second run of a call may do.
enum class Repeat {
  kSafe,       // the same as one run
  kIfRefused,  // only allowed when the server said that it did not run the first
};

// Metadata grpc-retry-pushback-ms: milliseconds to wait; anything negative or not a number forbids
// a retry.
struct Pushback {
  bool allowed = true;
  std::optional<std::chrono::milliseconds> wait;
};
Pushback ParsePushback(std::string_view value);

// True if the same call may succeed later: UNAVAILABLE, CANCELLED (never by this library, which
// cancels nothing), RESOURCE_EXHAUSTED with a time to wait.
bool IsRetryable(const Error& error, const Pushback& pushback);

// How long to wait before the next attempt; nullopt = give up. `error.attempts` calls were made,
// `remaining` is the time left, `uniform` is random in [0, 1).
std::optional<std::chrono::milliseconds> RetryDelay(const Error& error, const Pushback& pushback,
                                                    Repeat repeat,
                                                    std::chrono::milliseconds remaining,
                                                    const Options& options, double uniform);

}  // namespace attend::client
