// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/worker_pool.h"

#include <chrono>

namespace attend {
namespace {

using Clock = std::chrono::steady_clock;

// A sleeping worker takes 10..50 us to wake; between two phases of a batch there are a few
// microseconds.
constexpr std::chrono::microseconds kSpin{60};
// Reading the clock costs about as much as this many pauses.
constexpr int kPausesPerClock = 16;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Pauses until done() or the spin time is over; returns done().
template <typename Done>
bool SpinUntil(const Done& done) {
  const Clock::time_point end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerClock; ++i) {
      if (done()) return true;
      Pause();
    }
  } while (Clock::now() < end);
  return done();
}

}  // namespace

WorkerPool::WorkerPool(int workers) : workers_(workers < 1 ? 1 : workers) {
  threads_.reserve(workers_ - 1);
  for (int worker = 1; worker < workers_; ++worker) {
    threads_.emplace_back([this, worker] { WorkerLoop(worker); });
  }
}

WorkerPool::~WorkerPool() {
  stopping_.store(true);
  {
    const std::lock_guard lock(mutex_);
    wake_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::ParallelFor(int64_t tasks,
                             const std::function<void(int64_t task, int worker)>& work) {
  if (tasks <= 0) return;
  tasks_ = tasks;
  work_ = &work;
  next_task_.store(0, std::memory_order_relaxed);
  if (tasks == 1 || workers_ == 1) {
    RunTasks(0);
    return;
  }
  const uint64_t sequence = (round_.load(std::memory_order_relaxed) >> 32) + 1;
  // Sequentially consistent, like the pair in WaitForRound: either this thread sees the sleeper or
  // the sleeper sees the round.
  round_.store(sequence << 32 | kOpen);
  if (sleepers_.load() > 0) {
    const std::lock_guard lock(mutex_);
    wake_.notify_all();
  }
  RunTasks(0);
  round_.fetch_and(~kOpen, std::memory_order_relaxed);
  const auto empty = [this] { return (round_.load(std::memory_order_acquire) & kInside) == 0; };
  while (!SpinUntil(empty)) std::this_thread::yield();
}

void WorkerPool::RunTasks(int worker) {
  for (;;) {
    const int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks_) return;
    (*work_)(task, worker);
    progress_ns_.store(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
            .count(),
        std::memory_order_relaxed);
  }
}

void WorkerPool::WorkerLoop(int worker) {
  uint64_t sequence = 0;
  while (WaitForRound(sequence)) {
    if (!JoinRound(&sequence)) continue;
    RunTasks(worker);
    round_.fetch_sub(1, std::memory_order_release);
  }
}

// Counts this worker in when a round newer than *last_sequence is still open.
bool WorkerPool::JoinRound(uint64_t* last_sequence) {
  uint64_t round = round_.load(std::memory_order_relaxed);
  do {
    *last_sequence = round >> 32;
    if ((round & kOpen) == 0) return false;
  } while (!round_.compare_exchange_weak(round, round + 1, std::memory_order_acquire,
                                         std::memory_order_relaxed));
  return true;
}

// Returns true when there is a round newer than last_sequence, false when the pool ends.
bool WorkerPool::WaitForRound(uint64_t last_sequence) {
  const auto ready = [this, last_sequence] {
    return (round_.load() >> 32) != last_sequence || stopping_.load();
  };
  if (!SpinUntil(ready)) {
    std::unique_lock lock(mutex_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, ready);
    sleepers_.fetch_sub(1);
  }
  return !stopping_.load();
}

}  // namespace attend
