// SPDX-License-Identifier: Apache-2.0
#include "client/call.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <random>
#include <thread>

namespace attend::client {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr const char* kCodeNames[] = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};

// True if `status` carried an ErrorDetail: only the server itself sends one.
bool ReadDetail(const v1::Status& status, Error* error) {
  for (const auto& any : status.details()) {
    v1::ErrorDetail detail;
    if (!any.UnpackTo(&detail)) continue;
    error->reason = detail.reason();
    error->field = detail.field();
    error->got = detail.got();
    error->wanted = detail.wanted();
    error->sequences.assign(detail.sequences().begin(), detail.sequences().end());
    error->cached = detail.cached();
    error->retry_after = milliseconds(std::max<int64_t>(0, detail.retry_after_ms()));
    error->replica = detail.replica();
    return true;
  }
  return false;
}

}  // namespace

std::string CodeName(int code) {
  if (code >= 0 && code < static_cast<int>(std::size(kCodeNames))) return kCodeNames[code];
  return "CODE_" + std::to_string(code);
}

std::string Error::ToString() const {
  std::string text = CodeName(code);
  if (reason != v1::REASON_UNSPECIFIED) {
    const std::string& name = v1::Reason_Name(reason);
    text += " " + (name.empty() ? "REASON_" + std::to_string(static_cast<int>(reason)) : name);
  }
  text += ": " + message;
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
  return text;
}

Pushback PushbackOf(const grpc::ClientContext& context) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find("grpc-retry-pushback-ms");
  if (found == trailers.end()) return {};
  return ParsePushback({found->second.data(), found->second.size()});
}

Error ErrorFromWire(const v1::Status& status) {
  Error error;
  error.code = status.code();
  error.message = status.message();
  ReadDetail(status, &error);
  error.retryable = IsRetryable(error, {});
  return error;
}

Error ErrorFromStatus(const grpc::Status& status) {
  Error error;
  error.code = status.error_code();
  error.message = status.error_message();
  v1::Status details;
  error.outcome_unknown =
      !details.ParseFromString(status.error_details()) || !ReadDetail(details, &error);
  if (error.outcome_unknown && error.code == grpc::DEADLINE_EXCEEDED) error.reason = v1::DEADLINE;
  return error;
}

Error LocalError(std::string field, std::string got, std::string wanted) {
  Error error;
  error.code = grpc::INVALID_ARGUMENT;
  error.reason = v1::INVALID_FIELD;
  error.message = field + ": got " + got + ", wanted " + wanted;
  error.field = std::move(field);
  error.got = std::move(got);
  error.wanted = std::move(wanted);
  return error;
}

std::string ReplicaOfSession(std::string_view id) {
  // Host names have dots: split from the right.
  const size_t random = id.rfind('.');
  if (random == std::string_view::npos || random == 0) return {};
  const size_t start = id.rfind('.', random - 1);
  if (start == std::string_view::npos) return {};
  return std::string(id.substr(0, start));
}

Result<void> RunCall(const CallPlan& plan, const Options& options,
                     const std::function<grpc::Status(grpc::ClientContext*)>& attempt,
                     const std::function<void()>& after_lost) {
  const Clock::time_point end = Clock::now() + plan.deadline;
  std::optional<std::mt19937> random;
  bool lost = false;
  for (int attempts = 1;; ++attempts) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + (end - Clock::now()));
    if (!plan.replica.empty()) context.AddMetadata("attend-replica", plan.replica);
    if (plan.announced_bytes > 0) {
      context.AddMetadata("attend-bytes", std::to_string(plan.announced_bytes));
    }
    const grpc::Status status = attempt(&context);
    if (status.ok()) return {};

    Error error = ErrorFromStatus(status);
    error.attempts = attempts;
    const Pushback pushback = PushbackOf(context);
    error.retryable = IsRetryable(error, pushback);
    if (pushback.wait && error.retry_after.count() == 0) error.retry_after = *pushback.wait;
    if (!random) random.emplace(std::random_device{}());
    const double uniform = std::uniform_real_distribution<double>(0, 1)(*random);
    const auto remaining = std::chrono::duration_cast<milliseconds>(end - Clock::now());
    const auto wait = RetryDelay(error, pushback, plan.repeat, remaining, options, uniform);
    lost = lost || error.outcome_unknown;
    if (!wait) {
      error.outcome_unknown = lost;
      return error;
    }
    if (options.on_retry) options.on_retry(error);
    std::this_thread::sleep_for(*wait);
    if (error.outcome_unknown && after_lost) after_lost();
  }
}

}  // namespace attend::client
