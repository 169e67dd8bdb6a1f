// SPDX-License-Identifier: Apache-2.0
//
// Pure batching policy: which waiting tasks run next, and in which order the calls of a session
// run. No threads, no clock, no jobs: tasks are numbers with the few facts the policy needs.
//
// Work-conserving and first come, first served: the oldest task that may run sets the kind of the
// next batch, and younger ones of the same kind join it up to a token budget. A task that did not
// finish goes back to the tail. Tasks of one (session, layer) run in arrival order; a session call
// (fork, truncate, close) waits for all earlier tasks of its session and holds back all later ones.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <string>
#include <unordered_map>
#include <vector>

namespace attend {

using TaskId = uint64_t;

struct TaskFacts {
  // Tasks of equal kind may share a batch; kAlone never shares.
  static constexpr uint64_t kAlone = 0;
  uint64_t kind = kAlone;
  int64_t tokens = 0;
  int layer = kAllLayers;                // of all its sessions
  std::vector<std::string> session_ids;  // distinct

  static constexpr int kAllLayers = -1;
};

class BatchQueue {
 public:
  // Adds a task at the tail. `id` is new.
  void Push(TaskId id, TaskFacts facts);

  // The tasks of the next batch, oldest first, now running; empty when nothing may run. Takes tasks
  // until their tokens reach the budget; the first one always.
  std::vector<TaskId> Next(int64_t token_budget);

  // A running task goes back: to the tail, after others had their turn, or to where it was.
  void BackToTail(TaskId id);
  void BackToHead(TaskId id);
  // A waiting or running task has ended.
  void Remove(TaskId id);

  // The session has a waiting or running task.
  bool Pinned(const std::string& session_id) const { return sessions_.contains(session_id); }

  const std::list<TaskId>& waiting() const { return waiting_; }
  size_t size() const { return tasks_.size(); }  // waiting and running

 private:
  struct Use {
    TaskId id = 0;
    int layer = 0;
  };
  bool MayRun(TaskId id, const TaskFacts& facts) const;

  std::unordered_map<TaskId, TaskFacts> tasks_;
  std::list<TaskId> waiting_;
  std::unordered_map<std::string, std::deque<Use>> sessions_;  // in arrival order
};

}  // namespace attend
