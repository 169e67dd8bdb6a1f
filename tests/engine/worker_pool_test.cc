// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/worker_pool.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/count_allocations.h"

namespace attend {
namespace {

// Keeps the caller away from the pool until idle workers have given up spinning.
void StayIdle(std::chrono::microseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

TEST(WorkerPoolTest, RunsEveryTaskExactlyOnceForAnyCountAndAnyNumberOfWorkers) {
  for (int workers : {1, 2, 3, 8}) {
    WorkerPool pool(workers);
    for (int64_t tasks : {0, 1, 2, 3, 7, 64, 1000}) {
      std::vector<int> runs(static_cast<size_t>(tasks), 0);  // a task's slot has one writer
      pool.ParallelFor(tasks, [&](int64_t task, int worker) {
        EXPECT_GE(worker, 0);
        EXPECT_LT(worker, workers);
        ++runs[task];
      });
      EXPECT_EQ(runs, std::vector<int>(static_cast<size_t>(tasks), 1)) << workers << " workers";
    }
  }
}

TEST(WorkerPoolTest, RunsEveryTaskOfEveryWorkersRangeExactlyOnce) {
  for (int workers : {1, 2, 3, 8}) {
    WorkerPool pool(workers);
    for (int64_t step : {0, 1, 5, 100}) {
      for (int empty = -1; empty < workers; ++empty) {
        std::vector<int64_t> ends(static_cast<size_t>(workers));
        int64_t end = 0;
        for (int w = 0; w < workers; ++w) ends[w] = end += w == empty ? 0 : step;
        std::vector<int> runs(static_cast<size_t>(end), 0);
        pool.ParallelFor(ends, [&](int64_t task, int) { ++runs[task]; });
        EXPECT_EQ(runs, std::vector<int>(static_cast<size_t>(end), 1)) << workers << " workers";
      }
    }
  }
}

TEST(WorkerPoolTest, AWorkerTakesItsOwnTasksFirstAndThenThoseThatOthersHaveLeft) {
  WorkerPool pool(2);
  std::atomic<int> arrived{0};
  std::vector<int> first(2, -1);
  std::atomic<int> of_worker_one{0};
  pool.ParallelFor(std::vector<int64_t>{1, 101}, [&](int64_t task, int worker) {
    if (arrived.fetch_add(1) < 2) first[worker] = static_cast<int>(task);
    while (arrived.load() < 2) std::this_thread::yield();
    if (worker == 1 && task == 1) {  // its other tasks are the caller's meanwhile
      while (of_worker_one.load() < 99) std::this_thread::yield();
    } else if (worker == 0 && task > 0) {
      of_worker_one.fetch_add(1);
    }
  });
  EXPECT_EQ(first, (std::vector<int>{0, 1}));
  EXPECT_EQ(of_worker_one.load(), 99);
}

TEST(WorkerPoolTest, TheCallerIsWorkerZeroAndNoWorkerRunsTwoTasksAtOnce) {
  WorkerPool pool(4);
  const std::thread::id caller = std::this_thread::get_id();
  std::vector<std::atomic<int>> busy(4);
  for (int round = 0; round < 200; ++round) {
    pool.ParallelFor(32, [&](int64_t, int worker) {
      EXPECT_EQ(busy[worker].fetch_add(1), 0);
      EXPECT_EQ(worker == 0, std::this_thread::get_id() == caller);
      busy[worker].fetch_sub(1);
    });
  }
}

TEST(WorkerPoolTest, WritesOfTasksAreVisibleToTheCallerAndToTheNextRound) {
  WorkerPool pool(3);
  std::vector<int64_t> values(97, 0);
  for (int round = 1; round <= 3000; ++round) {
    pool.ParallelFor(static_cast<int64_t>(values.size()), [&](int64_t task, int) {
      values[task] += values[task] == round - 1 ? 1 : 1000000;
    });
  }
  EXPECT_EQ(std::accumulate(values.begin(), values.end(), int64_t{0}), 3000 * 97);
}

TEST(WorkerPoolTest, WakesSleepersWithoutLosingARoundAtAnyMomentOfTheirFallingAsleep) {
  WorkerPool pool(2);
  // Both workers must be inside at once for the round to end: a lost wake-up would hang here.
  for (int round = 0; round < 400; ++round) {
    StayIdle(std::chrono::microseconds(round % 2 == 0 ? 40 + round % 50 : round));
    std::atomic<int> arrived{0};
    pool.ParallelFor(2, [&](int64_t, int) {
      arrived.fetch_add(1);
      while (arrived.load() < 2) std::this_thread::yield();
    });
  }
}

// 'R' runs or could, 'S' sleeps.
char StateOfThread(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(')');
  return name_end == std::string::npos ? '?' : text[name_end + 2];
}

// A caller that kept its core busy would take it from the worker it waits for.
TEST(WorkerPoolTest, ACallerSleepsWhileAWorkerTakesLong) {
  WorkerPool pool(2);
  const pid_t caller = gettid();
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> arrived{0};
    bool slept = false;
    pool.ParallelFor(2, [&](int64_t, int worker) {
      arrived.fetch_add(1);
      while (arrived.load() < 2) std::this_thread::yield();
      if (worker == 0) return;
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (!slept && std::chrono::steady_clock::now() < end) {
        slept = StateOfThread(caller) == 'S';
      }
    });
    ASSERT_TRUE(slept) << "round " << round;
  }
}

TEST(WorkerPoolTest, WithAWorkerForEveryCoreEachHasItsOwnOtherThanTheCallersWas) {
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  const int cores = CPU_COUNT(&allowed);
  if (cores < 2) GTEST_SKIP() << "one core";
  for (const int workers : {cores, cores + 1}) {
    WorkerPool pool(workers);
    std::vector<cpu_set_t> sets(static_cast<size_t>(workers));
    std::atomic<int> arrived{0};
    int core = -1;  // of the caller, in a round in which it stays there
    for (bool stayed = false; !stayed; stayed = sched_getcpu() == core) {
      core = sched_getcpu();
      arrived.store(0);
      pool.ParallelFor(workers, [&](int64_t, int worker) {
        arrived.fetch_add(1);
        while (arrived.load() < workers) std::this_thread::yield();
        sched_getaffinity(0, sizeof(cpu_set_t), &sets[worker]);
      });
    }
    EXPECT_TRUE(CPU_EQUAL(&sets[0], &allowed));  // the caller's thread stays as it is
    std::set<int> taken;
    for (int worker = 1; worker < workers; ++worker) {
      EXPECT_EQ(CPU_COUNT(&sets[worker]), workers == cores ? 1 : cores);
      for (int core = 0; core < CPU_SETSIZE; ++core) {
        if (CPU_ISSET(core, &sets[worker])) taken.insert(core);
      }
    }
    EXPECT_EQ(static_cast<int>(taken.size()), workers == cores ? cores - 1 : cores);
    EXPECT_EQ(taken.contains(core), workers != cores);
  }
}

TEST(WorkerPoolTest, RoundsAllocateNothingAlsoWhenTheCallerMoves) {
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  WorkerPool pool(CPU_COUNT(&allowed));
  std::atomic<int64_t> sum{0};
  int64_t a = 1, b = 2, c = 3;  // more than fits into an object of two pointers
  const auto run = [&] {
    pool.ParallelFor(100, [&, a, b, c](int64_t task, int) { sum += task + a + b + c; });
  };
  run();
  const Allocations before = AllocationsSoFar();
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed)) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    ASSERT_EQ(sched_setaffinity(0, sizeof(allowed), &allowed), 0);  // it is there now
    for (int round = 0; round < 3; ++round) run();
  }
  EXPECT_EQ((AllocationsSoFar() - before).count, 0);
}

TEST(WorkerPoolTest, ProgressAdvancesWithFinishedTasks) {
  WorkerPool pool(2);
  EXPECT_EQ(pool.progress_ns(), 0);
  pool.ParallelFor(1, [](int64_t, int) {});
  const int64_t first = pool.progress_ns();
  EXPECT_GT(first, 0);
  StayIdle(std::chrono::microseconds(10));
  pool.ParallelFor(4, [](int64_t, int) {});
  EXPECT_GT(pool.progress_ns(), first);
}

TEST(WorkerPoolTest, PoolsThatNeverRanOrSleepEndAtOnce) {
  for (int i = 0; i < 50; ++i) WorkerPool pool(4);
  WorkerPool pool(4);
  pool.ParallelFor(16, [](int64_t, int) {});
  StayIdle(std::chrono::milliseconds(1));
}

}  // namespace
}  // namespace attend
