// SPDX-License-Identifier: Apache-2.0
//
// When the workers of a load start, whether one more request may begin, and when they end: by time,
// by number, by a signal, because one of them could not start, or because nothing but failures
// comes back. Thread-safe; knows no requests.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>

#include "client/attend_client.h"

namespace attend::cli {

// From the first call on, SIGINT and SIGTERM end every load early; a second signal, the same or the
// other, ends the process as it would have without this.
void StopLoadOnSignals();
int StopSignal();  // the first signal that came, 0 = none

class LoadControl {
 public:
  using Clock = std::chrono::steady_clock;

  struct Budget {
    // Length of the measured time, where `requests` is 0.
    double seconds = 10;
    // How often Take grants a request; 0 = as often as `seconds` allow.
    int64_t requests = 0;
    // With `requests`: the load gives up when a run of failures, with nothing else in between,
    // lasts longer.
    Clock::duration patience = std::chrono::seconds(30);
  };
  LoadControl(int64_t workers, const Budget& budget) : budget_(budget), workers_(workers) {}

  // ---- Workers ----

  // Instead of starting: ends the load of all. Keeps the first error.
  void Abort(client::Error error);
  // Each worker comes here once. True when the measured time began, with the arrival of the last
  // one; false within kSlice when the load was stopped before.
  bool ArriveAndWait();
  // Each worker comes here once more; the measured time ends when the last one does.
  void Finish();
  // True if one more request may begin at `now`.
  bool Take(Clock::time_point now = Clock::now());
  // True if the load ends by time and `when` is too late for it.
  bool IsAfterEnd(Clock::time_point when) const;
  // False within kSlice when the load is stopped, else true at `until`.
  bool SleepUntil(Clock::time_point until) const;
  // An answer or a refusal came back: ends a run of failures.
  void NoteAnswer() { failing_since_ = 0; }
  // A failure came back.
  void NoteFailure(Clock::time_point now = Clock::now());
  bool stopped() const { return aborted_ || gave_up_ || StopSignal() != 0; }
  // After ArriveAndWait.
  Clock::time_point start() const { return start_; }
  const Budget& budget() const { return budget_; }

  std::atomic<int64_t> in_flight{0};  // calls

  // ---- The one who watches ----

  // False at `until`, true as soon as every worker has finished.
  bool WaitUntilFinished(Clock::time_point until);
  bool started() const;
  // Of the measured time, so far or in all.
  double elapsed_seconds() const;
  // User and system time of this process in the measured time, after its end.
  double cpu_seconds() const;
  bool gave_up() const { return gave_up_; }
  std::optional<client::Error> error() const;  // that of Abort

  // How long a waiting thread may not notice that the load was stopped: nothing may be locked in a
  // signal handler, so they look.
  static constexpr std::chrono::milliseconds kSlice{20};

 private:
  const Budget budget_;
  const int64_t workers_;
  std::atomic<int64_t> taken_{0};
  std::atomic<bool> aborted_{false};
  std::atomic<bool> gave_up_{false};
  std::atomic<Clock::duration::rep> failing_since_{0};  // since the clock's epoch; 0 = not failing

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<client::Error> error_;
  int64_t arrived_ = 0;
  int64_t finished_ = 0;
  Clock::time_point start_;  // constant once arrived_ == workers_
  Clock::time_point end_;
  double cpu_at_start_ = 0;
  double cpu_at_end_ = 0;
};

}  // namespace attend::cli
