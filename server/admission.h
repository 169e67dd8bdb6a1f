// SPDX-License-Identifier: Apache-2.0
//
// What the server has accepted and not yet answered: requests, tokens and bytes, each against its
// limit. Thread-safe. A Slot gives everything back when it is destroyed.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>

#include "absl/status/statusor.h"

namespace attend {

struct AdmissionLimits {
  int64_t requests = 512;
  int64_t tokens = 262144;
  int64_t bytes = 0;
};

class Admission {
 public:
  // `retry_after_ms` estimates when room for a refused request may be there.
  Admission(const AdmissionLimits& limits, std::function<int64_t()> retry_after_ms);

  // Move-only; what one request holds.
  class Slot {
   public:
    Slot() = default;
    Slot(Slot&& other) noexcept { *this = std::move(other); }
    Slot& operator=(Slot&& other) noexcept;
    ~Slot() { Release(); }
    bool held() const { return admission_ != nullptr; }
    int64_t bytes() const { return bytes_; }
    void Release();

   private:
    friend class Admission;
    Admission* admission_ = nullptr;
    int64_t requests_ = 0;
    int64_t tokens_ = 0;
    int64_t bytes_ = 0;
  };

  // Adds to what `slot` holds, all or nothing. RESOURCE_EXHAUSTED, QUEUE_FULL names the limit.
  absl::Status Reserve(int64_t requests, int64_t tokens, int64_t bytes, Slot& slot);

  struct Usage {
    int64_t requests = 0;
    int64_t tokens = 0;
    int64_t bytes = 0;
  };
  Usage usage() const;

 private:
  const AdmissionLimits limits_;
  const std::function<int64_t()> retry_after_ms_;
  mutable std::mutex mutex_;
  Usage usage_;  // guarded by mutex_
};

}  // namespace attend
