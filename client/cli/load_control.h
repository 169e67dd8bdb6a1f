// SPDX-License-Identifier: Apache-2.0
//
// When the workers of a load start, whether one more request may begin, and when they end: by time,
// by number, by a signal, or because nothing is answered any more. Thread-safe; knows no requests.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace attend::cli {

// From the first call on, SIGINT and SIGTERM end every load early; a second signal ends the
// process.
void StopLoadOnSignals();
int StopSignal();  // the signal that came, 0 = none

class LoadControl {
 public:
  using Clock = std::chrono::steady_clock;

  struct Budget {
    double seconds = 10;                                  // ends then, unless there are
    int64_t requests = 0;                                 // so many in all
    Clock::duration patience = std::chrono::seconds(30);  // of `requests`: nothing but failures
  };
  LoadControl(int64_t workers, const Budget& budget) : budget_(budget), workers_(workers) {}

  // ---- Workers ----

  // Each worker comes here once; the measured time begins when the last one does.
  void ArriveAndWait();
  // Each worker comes here once more; the measured time ends when the last one does.
  void Finish();
  // True if one more request may begin now.
  bool Take();
  // True if the load ends by time and `when` is too late for it.
  bool IsAfterEnd(Clock::time_point when) const;
  // False at once when the load is stopped, else true at `until`.
  bool SleepUntil(Clock::time_point until) const;
  // Something but a failure came back.
  void NoteAnswer();
  bool stopped() const { return gave_up_ || StopSignal() != 0; }
  // After ArriveAndWait.
  Clock::time_point start() const { return start_; }

  std::atomic<int64_t> in_flight{0};

  // ---- The one who watches ----

  bool WaitUntilFinished(Clock::time_point until);
  bool started() const;
  // Of the measured time, so far or in all.
  double elapsed_seconds() const;
  // User and system time of this process in the measured time, after its end.
  double cpu_seconds() const;
  bool gave_up() const { return gave_up_; }
  const Budget& budget() const { return budget_; }

 private:
  const Budget budget_;
  const int64_t workers_;
  std::atomic<int64_t> taken_{0};
  std::atomic<bool> gave_up_{false};
  std::atomic<Clock::duration::rep> last_answer_{0};  // since the clock's epoch

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t arrived_ = 0;
  int64_t finished_ = 0;
  Clock::time_point start_;  // constant once arrived_ == workers_
  Clock::time_point end_;
  double cpu_at_start_ = 0;
  double cpu_at_end_ = 0;
};

}  // namespace attend::cli
