// SPDX-License-Identifier: Apache-2.0
//
// The CPU engine's threads: a fixed number, the caller included, woken for one ParallelFor at a
// time. They share their cores with the threads that serve: who waits spins for a moment, offering
// its core to others, then sleeps. Where every core the process may use has a worker, no two of
// them are on the same core.
#pragma once

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace attend {

class WorkerPool {
 public:
  // `workers` >= 1 threads take part; workers - 1 are created here and live as long as the pool.
  explicit WorkerPool(int workers);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int workers() const { return workers_; }

  using Work = absl::FunctionRef<void(int64_t task, int worker)>;

  // Calls work(task, worker) once for every task in [0, tasks), worker in [0, workers()), and
  // returns when all are done. Tasks are handed out in ascending order, one at a time. One caller
  // at a time, the same thread always takes part as worker 0. `work` must not throw or call
  // ParallelFor.
  void ParallelFor(int64_t tasks, Work work);

  // The same for tasks [0, ends.back()) with a worker near to each: [ends[w - 1], ends[w]) are of
  // worker w < workers(). Each worker takes its own in ascending order, then what others have left:
  // what it wrote in one round is in its core's cache in the next.
  void ParallelFor(std::span<const int64_t> ends, Work work);

  // Monotonic clock reading of the last finished task, nanoseconds; any thread. 0 before the first.
  int64_t progress_ns() const { return progress_ns_.load(std::memory_order_relaxed); }

 private:
  // A round (one ParallelFor) is open while the caller hands out tasks. Workers join an open round
  // by counting themselves in, so a late one can never touch the next round's task counter, and the
  // caller never waits for one that has not woken up.
  //   round_ = sequence << 32 | open << 31 | workers inside
  static constexpr uint64_t kOpen = uint64_t{1} << 31;
  static constexpr uint64_t kInside = kOpen - 1;

  // Tasks of one worker, or of all.
  struct alignas(64) Range {
    std::atomic<int64_t> next{0};
    int64_t end = 0;  // written by the caller while no worker is inside
  };

  void SpreadWorkers();
  void RunTasks(int worker);
  void WorkerLoop(int worker);
  bool JoinRound(uint64_t* last_sequence);
  bool WaitForRound(uint64_t last_sequence);

  const int workers_;
  alignas(64) std::atomic<uint64_t> round_{0};
  alignas(64) std::atomic<int64_t> progress_ns_{0};

  // Of the open round; written by the caller while no worker is inside.
  std::vector<Range> ranges_;  // [workers]
  int ranges_used_ = 0;
  const Work* work_ = nullptr;

  cpu_set_t cores_{};         // allowed when the pool was made
  std::vector<int> core_of_;  // [workers] caller's thread; empty: the system places the workers
  bool placed_ = false;       // caller's thread: each worker is held to its core

  std::atomic<int> sleepers_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;              // of the conditions only
  std::condition_variable wake_;  // a round is open
  std::condition_variable left_;  // a worker has left the round
  std::vector<std::thread> threads_;
};

}  // namespace attend
