// SPDX-License-Identifier: Apache-2.0
//
// Two servers measured in one run: they take turns in short slices of time, so that noise of the
// machine meets both alike, and never have requests in flight together. Decides whose turn it is
// and when an arrival of the open loop is due. Thread-safe; knows no requests. Used by the worker
// of stateless requests under `attend bench --echo`.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "client/cli/bench/control.h"
#include "client/cli/bench/plan.h"

namespace attend::cli {

enum class Side { kServer = 0, kEcho = 1 };

class Slices {
 public:
  using Clock = LoadControl::Clock;

  struct Budget {
    double seconds = 0.25;      // of a slice, where `requests` is 0
    int64_t requests = 0;       // of a slice
    int64_t requests_each = 0;  // of each side in all, with `requests`
  };
  explicit Slices(const Budget& budget) : budget_(budget) {}

  // A budget for a load of so many seconds, or of so many requests to each side.
  static Budget BudgetOf(double seconds, int64_t requests, int64_t workers);

  struct Turn {
    Side side = Side::kServer;
    Clock::time_point due;  // open loop: when the request arrives; closed loop: now
  };
  // Waits until the caller may send its next request; nothing when the load was stopped. Each turn
  // ends with Leave. Open loop: the next of `arrivals`, whose clock runs in slices only.
  std::optional<Turn> Enter(const LoadControl& control, ArrivalSchedule* arrivals);
  // The request was answered, or never sent.
  void Leave();

  // Of all slices of a side so far, until their last answer: time, and this process's CPU time.
  struct Sum {
    double seconds = 0;
    double cpu_seconds = 0;
  };
  Sum sum(Side side) const;

 private:
  // Where one arrival belongs.
  struct Place {
    int64_t slice = 0;
    double after_begin = 0;  // seconds
  };

  // All: mutex_ is held.
  bool IsOver(Clock::time_point now) const;  // the current slice takes no more turns
  void BeginNext(Clock::time_point now);
  Place NextArrival(ArrivalSchedule& arrivals);
  Sum CurrentUntil(Clock::time_point until) const;

  const Budget budget_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  int64_t slice_ = -1;               // the current one; even ones are the server's
  int64_t granted_ = 0;              // turns of the current slice
  std::map<int64_t, int64_t> open_;  // by slice: turns and taken arrivals without Leave
  std::array<int64_t, 2> granted_each_{};
  std::array<Sum, 2> sums_{};  // of ended slices
  Clock::time_point began_;
  Clock::time_point left_;  // the last Leave
  double cpu_began_ = 0;
  // The slice of the next arrival, with a limit by number.
  int64_t arrival_slice_ = 0;
  int64_t arrivals_in_slice_ = 0;
  std::array<int64_t, 2> arrivals_each_{};
  double base_ = 0;  // where that slice begins in the arrivals' time
  double last_arrival_ = 0;
};

}  // namespace attend::cli
