// SPDX-License-Identifier: Apache-2.0
//
// Pure batching policy: which waiting tasks run next, and in which order the calls of a session
// run. No threads, no clock, no jobs: tasks are numbers with the few facts the policy needs.
//
// Work-conserving: an idle engine gets what there is. Among short tasks first come is first served:
// the oldest that may run sets the kind of the next batch, and younger ones of the same kind join
// it up to a token budget. Long tasks run in chunks, each a batch of its own, one at a time, and
// take turns. When a chunk has ended, every short task that waits by then goes before the next one:
// short tasks never wait for two chunks, and chunks only for short tasks that were there before.
// Tasks of one (session, layer) run in arrival order; a session call (fork, truncate, close) waits
// for all earlier tasks of its session and holds back all later ones.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <string_view>

#include "engine/util/recycled.h"

namespace attend {

using TaskId = uint64_t;

struct TaskFacts {
  // Tasks of equal kind may share a batch; kAlone never shares.
  static constexpr uint64_t kAlone = 0;
  uint64_t kind = kAlone;
  int64_t tokens = 0;
  int layer = kAllLayers;                      // of all its sessions
  RecycledVector<RecycledString> session_ids;  // distinct

  static constexpr int kAllLayers = -1;
};

class BatchQueue {
 public:
  // Adds a task at the tail. `id` is new.
  void Push(TaskId id, TaskFacts facts);

  // From now on a waiting or running task is run in chunks. New tasks are short.
  void SetLong(TaskId id);

  // The tasks of the next batch, oldest first, now running; empty when nothing may run. Takes tasks
  // until their tokens reach the budget; the first one always.
  RecycledVector<TaskId> Next(int64_t token_budget);

  // A waiting task lets all others go first that the next chunk would wait for, too, but for later
  // ones of its sessions. It takes no turn for that: no chunk goes first that it would not wait for
  // anyway.
  void Postpone(TaskId id);
  // A running task goes back: to the tail, after others had their turn, or to where it was.
  void BackToTail(TaskId id);
  void BackToHead(TaskId id);
  // A waiting or running task has ended.
  void Remove(TaskId id);

  // The session has a waiting or running task.
  bool Pinned(std::string_view session_id) const { return sessions_.contains(session_id); }

  using TaskList = std::list<TaskId, RecyclingAllocator<TaskId>>;
  const TaskList& waiting() const { return waiting_; }
  size_t size() const { return tasks_.size(); }  // waiting and running

 private:
  struct Use {
    TaskId id = 0;
    int layer = 0;
  };
  struct Task {
    TaskFacts facts;
    uint64_t turn = 0;  // order of arrival, or of the last return to the tail
    bool is_long = false;
    std::optional<TaskList::iterator> place = {};  // in waiting_; unset = it runs
  };
  bool MayRun(TaskId id, const TaskFacts& facts) const;
  TaskList::iterator First();
  TaskList::iterator Take(TaskList::iterator at);
  void ChunkEnded(TaskId id);

  RecycledMap<TaskId, Task> tasks_;
  uint64_t last_turn_ = 0;
  uint64_t before_chunk_ = 0;    // short tasks up to this turn go before the next chunk
  std::optional<TaskId> chunk_;  // the long task that runs
  size_t long_tasks_ = 0;
  TaskList waiting_;
  RecycledMap<RecycledString, RecycledVector<Use>, StringHash> sessions_;  // in arrival order
};

}  // namespace attend
