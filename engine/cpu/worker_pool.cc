// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/worker_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <span>

namespace attend {
namespace {

using Clock = std::chrono::steady_clock;

// A sleeping worker takes 10..50 us to wake; between two phases of a batch there are a few
// microseconds, and as many between two batches of a busy server.
constexpr std::chrono::microseconds kSpin{100};
// Reading the clock and offering the core to others cost about as much as this many pauses.
constexpr int kPausesPerClock = 16;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Pauses until done() or the spin time is over; returns done(). Whoever else wants the core gets
// it: the threads that receive the next request, or the worker that is waited for.
template <typename Done>
bool SpinUntil(const Done& done) {
  const Clock::time_point end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerClock; ++i) {
      if (done()) return true;
      Pause();
    }
    sched_yield();
  } while (Clock::now() < end);
  return done();
}

// The cores that a thread may use; none where the system does not tell.
cpu_set_t AllowedCores(pthread_t thread) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (pthread_getaffinity_np(thread, sizeof(cores), &cores) != 0) CPU_ZERO(&cores);
  return cores;
}

void Allow(pthread_t thread, const cpu_set_t& cores) {
  pthread_setaffinity_np(thread, sizeof(cores), &cores);  // where it fails, all still works
}

}  // namespace

WorkerPool::WorkerPool(int workers)
    : workers_(workers < 1 ? 1 : workers), ranges_(static_cast<size_t>(workers_)) {
  if (workers_ > 1) {
    cores_ = AllowedCores(pthread_self());
    const bool one_each = CPU_COUNT(&cores_) == workers_;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (one_each && CPU_ISSET(core, &cores_)) core_of_.push_back(core);
    }
  }
  threads_.reserve(workers_ - 1);
  for (int worker = 1; worker < workers_; ++worker) {
    threads_.emplace_back([this, worker] { WorkerLoop(worker); });
    pthread_setname_np(threads_.back().native_handle(), "attend-worker");
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

void WorkerPool::ParallelFor(int64_t tasks, Work work) {
  ParallelFor(std::span<const int64_t>(&tasks, 1), work);
}

void WorkerPool::ParallelFor(std::span<const int64_t> ends, Work work) {
  ranges_used_ = static_cast<int>(ends.size());
  int64_t tasks = 0;
  for (size_t w = 0; w < ends.size(); ++w) {
    ranges_[w].next.store(tasks, std::memory_order_relaxed);
    ranges_[w].end = tasks = ends[w];
  }
  if (tasks <= 0) return;
  work_ = &work;
  if (tasks == 1 || workers_ == 1) {
    RunTasks(0);
    return;
  }
  if (!core_of_.empty() && (!placed_ || sched_getcpu() != core_of_[0])) SpreadWorkers();
  const uint64_t sequence = (round_.load(std::memory_order_relaxed) >> 32) + 1;
  // Sequentially consistent, like the pair in WaitForRound: either this thread sees the sleeper or
  // the sleeper sees the round.
  round_.store(sequence << 32 | kOpen);
  if (sleepers_.load() > 0) {
    const std::lock_guard lock(mutex_);
    wake_.notify_all();
  }
  RunTasks(0);
  round_.fetch_and(~kOpen);
  const auto empty = [this] { return (round_.load() & kInside) == 0; };
  if (SpinUntil(empty)) return;
  std::unique_lock lock(mutex_);
  caller_sleeps_.store(true);
  left_.wait(lock, empty);
  caller_sleeps_.store(false);
}

// The system wakes a worker on the core of its waker when the others look busy at that moment, and
// a batch is over before it balances: half the speed beside an idle core. So every worker but the
// caller has a core of its own, other than where the caller is now.
void WorkerPool::SpreadWorkers() {
  const auto taken = std::find(core_of_.begin(), core_of_.end(), sched_getcpu());
  // Once somebody has moved the caller, threads are theirs to place, but for those held here.
  const cpu_set_t allowed = AllowedCores(pthread_self());
  const bool moved = taken == core_of_.end() || !CPU_EQUAL(&allowed, &cores_);
  if (!moved) std::swap(core_of_[0], *taken);
  for (int worker = 1; worker < workers_; ++worker) {
    const pthread_t thread = threads_[worker - 1].native_handle();
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(core_of_[worker], &own);
    if (moved && placed_) {
      const cpu_set_t held = AllowedCores(thread);
      if (CPU_EQUAL(&held, &own)) Allow(thread, cores_);
    }
    if (!moved && (!placed_ || core_of_[worker] == *taken)) Allow(thread, own);
  }
  placed_ = true;
  if (moved) core_of_.clear();
}

void WorkerPool::RunTasks(int worker) {
  for (int i = 0; i < ranges_used_; ++i) {
    Range& range = ranges_[(worker + i) % ranges_used_];
    for (;;) {
      const int64_t task = range.next.fetch_add(1, std::memory_order_relaxed);
      if (task >= range.end) break;
      (*work_)(task, worker);
      progress_ns_.store(
          std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
              .count(),
          std::memory_order_relaxed);
    }
  }
}

void WorkerPool::WorkerLoop(int worker) {
  uint64_t sequence = 0;
  while (WaitForRound(sequence)) {
    if (!JoinRound(&sequence)) continue;
    RunTasks(worker);
    // Sequentially consistent, like the pair in ParallelFor: either this thread sees the caller
    // asleep or the caller sees the round empty.
    round_.fetch_sub(1);
    if (caller_sleeps_.load()) {
      const std::lock_guard lock(mutex_);
      left_.notify_one();
    }
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
