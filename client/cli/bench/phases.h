// SPDX-License-Identifier: Apache-2.0
//
// What a fairness run does at the moment, and how long each phase lasted in all. Driven by the
// worker that prefills; those that append follow it. Thread-safe; knows no requests.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <mutex>

namespace attend::cli {

class FairnessPhases {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Phase { kAppends, kPrefill, kBoth, kOver };

  Phase now() const { return phase_; }
  void Begin(Phase phase) {
    const std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    if (began_ != Clock::time_point()) {
      seconds_[static_cast<size_t>(phase_.load())] +=
          std::chrono::duration<double>(now - began_).count();
    }
    began_ = now;
    phase_ = phase;
  }
  // Of all ended phases of this kind.
  double seconds(Phase phase) const {
    const std::lock_guard lock(mutex_);
    return seconds_[static_cast<size_t>(phase)];
  }

 private:
  std::atomic<Phase> phase_{Phase::kAppends};
  mutable std::mutex mutex_;
  Clock::time_point began_;          // guarded by mutex_; zero before the first phase
  std::array<double, 4> seconds_{};  // guarded by mutex_
};

}  // namespace attend::cli
