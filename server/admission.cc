// SPDX-License-Identifier: Apache-2.0
#include "server/admission.h"

#include <string>
#include <utility>

#include "engine/util/error.h"

namespace attend {

Admission::Admission(const AdmissionLimits& limits, std::function<int64_t()> retry_after_ms)
    : limits_(limits), retry_after_ms_(std::move(retry_after_ms)) {}

Admission::Slot& Admission::Slot::operator=(Slot&& other) noexcept {
  if (this == &other) return *this;
  Release();
  admission_ = std::exchange(other.admission_, nullptr);
  requests_ = std::exchange(other.requests_, 0);
  tokens_ = std::exchange(other.tokens_, 0);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

void Admission::Slot::Release() {
  if (admission_ == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(admission_->mutex_);
    admission_->usage_.requests -= requests_;
    admission_->usage_.tokens -= tokens_;
    admission_->usage_.bytes -= bytes_;
  }
  admission_ = nullptr;
  requests_ = tokens_ = bytes_ = 0;
}

absl::Status Admission::Reserve(int64_t requests, int64_t tokens, int64_t bytes, Slot& slot) {
  const char* field = nullptr;
  int64_t used = 0;
  int64_t asked = 0;
  int64_t limit = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto over = [&](const char* name, int64_t in_use, int64_t more, int64_t most) {
      if (field != nullptr || more <= most - in_use) return;
      field = name;
      used = in_use;
      asked = more;
      limit = most;
    };
    over("queue_requests", usage_.requests, requests, limits_.requests);
    over("queue_tokens", usage_.tokens, tokens, limits_.tokens);
    over("queue_bytes", usage_.bytes, bytes, limits_.bytes);
    if (field == nullptr) {
      usage_.requests += requests;
      usage_.tokens += tokens;
      usage_.bytes += bytes;
      slot.admission_ = this;
      slot.requests_ += requests;
      slot.tokens_ += tokens;
      slot.bytes_ += bytes;
      return absl::OkStatus();
    }
  }
  return MakeError(absl::StatusCode::kResourceExhausted,
                   {.reason = Reason::kQueueFull,
                    .field = field,
                    .got = std::to_string(asked) + " more with " + std::to_string(used) + " in use",
                    .wanted = "at most " + std::to_string(limit),
                    .retry_after_ms = retry_after_ms_()},
                   std::string("queue full: ") + field + ": got " + std::to_string(asked) +
                       " more with " + std::to_string(used) + " in use, wanted at most " +
                       std::to_string(limit));
}

Admission::Usage Admission::usage() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return usage_;
}

}  // namespace attend
