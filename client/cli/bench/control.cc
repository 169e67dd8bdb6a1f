// SPDX-License-Identifier: Apache-2.0
#include "client/cli/bench/control.h"

#include <signal.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "client/cli/bench/process_cpu.h"

namespace attend::cli {
namespace {

std::atomic<int> stop_signal{0};
static_assert(std::atomic<int>::is_always_lock_free);  // or a handler may not use it

void OnSignal(int number) {
  int none = 0;
  if (stop_signal.compare_exchange_strong(none, number)) return;
  signal(number, SIG_DFL);
  raise(number);  // ends the process when this handler returns
}

std::chrono::duration<double> Seconds(double seconds) {
  return std::chrono::duration<double>(seconds);
}

}  // namespace

void StopLoadOnSignals() {
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);  // one signal after the other
  sigaddset(&action.sa_mask, SIGINT);
  sigaddset(&action.sa_mask, SIGTERM);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

int StopSignal() { return stop_signal; }

void LoadControl::Abort(client::Error error) {
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
  aborted_ = true;
  changed_.notify_all();
}

bool LoadControl::ArriveAndWait() {
  std::unique_lock lock(mutex_);
  if (stopped()) return false;
  if (++arrived_ == workers_) {
    start_ = Clock::now();
    cpu_at_start_ = CpuSeconds();
    changed_.notify_all();
  }
  while (arrived_ < workers_) {
    if (stopped()) return false;
    changed_.wait_for(lock, kSlice);
  }
  return true;
}

void LoadControl::Finish() {
  const std::lock_guard lock(mutex_);
  if (++finished_ < workers_) return;
  end_ = Clock::now();
  cpu_at_end_ = CpuSeconds();
  changed_.notify_all();
}

bool LoadControl::Take(Clock::time_point now) {
  if (stopped()) return false;
  if (budget_.requests == 0) return !IsAfterEnd(now);
  const Clock::duration failing_since(failing_since_);
  if (failing_since.count() != 0 && now.time_since_epoch() - failing_since > budget_.patience) {
    gave_up_ = true;
    return false;
  }
  return taken_.fetch_add(1) < budget_.requests;
}

bool LoadControl::IsAfterEnd(Clock::time_point when) const {
  return budget_.requests == 0 && when - start_ >= Seconds(budget_.seconds);
}

bool LoadControl::SleepUntil(Clock::time_point until) const {
  for (;;) {
    if (stopped()) return false;
    const Clock::time_point now = Clock::now();
    if (now >= until) return true;
    std::this_thread::sleep_until(std::min(until, now + kSlice));
  }
}

void LoadControl::NoteFailure(Clock::time_point now) {
  Clock::duration::rep none = 0;
  failing_since_.compare_exchange_strong(none, now.time_since_epoch().count());
}

bool LoadControl::WaitUntilFinished(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, until, [this] { return finished_ == workers_; });
}

bool LoadControl::started() const {
  const std::lock_guard lock(mutex_);
  return arrived_ == workers_;
}

double LoadControl::elapsed_seconds() const {
  const std::lock_guard lock(mutex_);
  if (arrived_ < workers_) return 0;
  const Clock::time_point end = finished_ == workers_ ? end_ : Clock::now();
  return std::chrono::duration<double>(end - start_).count();
}

double LoadControl::cpu_seconds() const {
  const std::lock_guard lock(mutex_);
  return cpu_at_end_ - cpu_at_start_;
}

std::optional<client::Error> LoadControl::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

}  // namespace attend::cli
