// SPDX-License-Identifier: Apache-2.0
//
// The engine thread: takes tasks from a BatchQueue, runs them through the AttentionRuntime, and
// answers. Everything that touches the runtime's sessions and cache happens on this thread. As many
// batches are in flight as the engine allows: while one runs, the next is started as soon as there
// is work for it, and what comes then gathers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "absl/status/status.h"
#include "engine/attend_job.h"
#include "engine/attention_runtime.h"
#include "engine/util/recycled.h"
#include "server/batch_queue.h"

namespace attend {

// For gauges and retry hints. Jobs count as queued until their first batch and as running from then
// on, also between two of their batches; session calls are neither.
struct BatcherStats {
  RuntimeStats runtime;  // as the engine thread last saw it
  int64_t queue_requests = 0;
  int64_t queue_tokens = 0;
  int64_t running_requests = 0;
  double tokens_per_ms = 0;  // moving average of batches
};

class Batcher {
 public:
  using Done = std::function<void(absl::Status)>;
  using Control = std::function<void(AttentionRuntime&)>;
  // After every batch, on the engine thread.
  using Observer = std::function<void(const BatchOutcome&)>;

  // Whenever sessions were tidied, on the engine thread.
  using StatsObserver = std::function<void(const RuntimeStats&)>;

  // `runtime` outlives the batcher.
  Batcher(AttentionRuntime& runtime, int64_t batch_tokens, std::function<int64_t()> now_us,
          Observer observer, StatsObserver stats_observer);
  ~Batcher();

  // Starts the thread; until then tasks only gather. Once.
  void Start();

  // Takes a job. `done` is called exactly once, on the engine thread (or here when stopped). After
  // an engine fault every job ends with it.
  void Submit(std::shared_ptr<AttendJob> job, Done done);

  // Runs `control` when no batch has work of the session (empty = no session), after all earlier
  // work of it. Never called when stopped or when the engine failed first: `stopped` is, with the
  // reason.
  void SubmitControl(const std::string& session_id, Control control, Done stopped);

  // The job's `cancelled` was set: end it soon if it waits.
  void Wake();

  // Ends what waits with `reason` after the running batches, and joins. Idempotent.
  void Stop(const absl::Status& reason);

  BatcherStats Stats() const;
  bool idle() const;  // nothing waiting or running, and Stats() says what came of it
  bool engine_failed() const { return engine_failed_.load(); }

 private:
  struct Task {
    std::shared_ptr<AttendJob> job;  // null = control
    Control control;
    Done done;
    int64_t tokens = 0;
    bool begun = false;  // counted as running; else as queued
  };

  // A batch in flight and the tasks it will end or bring further.
  struct RunningBatch {
    AttendBatch* batch = nullptr;
    RecycledVector<TaskId> ids;  // [batch->jobs]; those that are untouched wait again
  };

  void Push(TaskFacts facts, Task task);
  void Loop();
  bool WaitForWork();
  bool StartNext();
  bool StartJobs(RecycledVector<TaskId> started);
  void FinishOldest(uint64_t seen);
  void Finish(RunningBatch running);
  void RunControl(TaskId id);
  void EndTask(TaskId id, absl::Status status);
  void EndExpired();
  int64_t PredictUs(uint64_t kind, int64_t tokens) const;  // engine thread; 0 = unknown
  void Publish();
  void FindLong();
  Task* Find(TaskId id);
  void Count(Task& task, bool begun);  // mutex_ is held
  void Changed();                      // mutex_ is held

  AttentionRuntime& runtime_;
  const int64_t batch_tokens_;
  const std::function<int64_t()> now_us_;
  const Observer observer_;
  const StatsObserver stats_observer_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  BatchQueue queue_;                  // guarded by mutex_
  RecycledMap<TaskId, Task> tasks_;   // guarded by mutex_
  TaskId next_id_ = 1;                // guarded by mutex_
  RecycledVector<TaskId> fresh_;      // guarded by mutex_: jobs that came since FindLong
  bool unpublished_ = false;          // guarded by mutex_: work was done since stats_ was filled
  bool look_ = false;                 // guarded by mutex_: a waiting job was cancelled
  bool stopping_ = false;             // guarded by mutex_
  absl::Status stop_reason_;          // guarded by mutex_
  BatcherStats stats_;                // guarded by mutex_
  std::atomic<uint64_t> changes_{0};  // counts what WaitForWork wakes up for
  RecycledVector<RunningBatch> in_flight_;                   // engine thread; oldest first
  int64_t published_us_ = 0;                                 // engine thread
  double tokens_per_ms_ = 0;                                 // engine thread
  std::unordered_map<uint64_t, double> full_tokens_per_ms_;  // engine thread; kind -> of batches
                                                             // of many rows
  std::atomic<bool> engine_failed_{false};
  std::thread thread_;
};

}  // namespace attend
