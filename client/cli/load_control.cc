// SPDX-License-Identifier: Apache-2.0
#include "client/cli/load_control.h"

#include <signal.h>
#include <time.h>

#include <algorithm>
#include <thread>

namespace attend::cli {
namespace {

// How long a sleeping worker may not notice that the load was stopped.
constexpr std::chrono::milliseconds kSlice{20};

std::atomic<int> stop_signal{0};

void OnSignal(int number) { stop_signal = number; }

std::chrono::duration<double> Seconds(double seconds) {
  return std::chrono::duration<double>(seconds);
}

double CpuSeconds() {
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

}  // namespace

void StopLoadOnSignals() {
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

int StopSignal() { return stop_signal; }

void LoadControl::ArriveAndWait() {
  std::unique_lock lock(mutex_);
  if (++arrived_ == workers_) {
    start_ = Clock::now();
    cpu_at_start_ = CpuSeconds();
    last_answer_ = start_.time_since_epoch().count();
    changed_.notify_all();
  }
  changed_.wait(lock, [this] { return arrived_ == workers_; });
}

void LoadControl::Finish() {
  const std::lock_guard lock(mutex_);
  if (++finished_ < workers_) return;
  end_ = Clock::now();
  cpu_at_end_ = CpuSeconds();
  changed_.notify_all();
}

bool LoadControl::Take() {
  if (stopped()) return false;
  const Clock::time_point now = Clock::now();
  if (budget_.requests == 0) return !IsAfterEnd(now);
  if (now.time_since_epoch() - Clock::duration(last_answer_) > budget_.patience) {
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

void LoadControl::NoteAnswer() { last_answer_ = Clock::now().time_since_epoch().count(); }

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

}  // namespace attend::cli
