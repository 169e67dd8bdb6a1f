// SPDX-License-Identifier: Apache-2.0
#include "server/batch_queue.h"

#include <algorithm>
#include <utility>

#include "engine/util/check.h"

namespace attend {

void BatchQueue::Push(TaskId id, TaskFacts facts) {
  for (const RecycledString& session : facts.session_ids) {
    sessions_[session].push_back({id, facts.layer});
  }
  const auto [task, fresh] = tasks_.emplace(id, Task{std::move(facts), ++last_turn_});
  CHECK(fresh);
  task->second.place = waiting_.insert(waiting_.end(), id);
}

// Who came before it goes before its first chunk.
void BatchQueue::SetLong(TaskId id) {
  Task& task = tasks_.at(id);
  if (task.is_long) return;
  task.is_long = true;
  ++long_tasks_;
  before_chunk_ = std::max(before_chunk_, task.turn);
}

void BatchQueue::ChunkEnded(TaskId id) {
  if (chunk_ != id) return;
  chunk_.reset();
  before_chunk_ = last_turn_;
}

bool BatchQueue::MayRun(TaskId id, const TaskFacts& facts) const {
  for (const RecycledString& session : facts.session_ids) {
    for (const Use& use : sessions_.at(session)) {
      if (use.id == id) break;
      if (use.layer == facts.layer || use.layer == TaskFacts::kAllLayers ||
          facts.layer == TaskFacts::kAllLayers) {
        return false;
      }
    }
  }
  return true;
}

// The task that sets the kind of the next batch.
BatchQueue::TaskList::iterator BatchQueue::First() {
  auto first_long = waiting_.end();
  auto first_short = waiting_.end();
  for (auto at = waiting_.begin(); at != waiting_.end(); ++at) {
    const Task& task = tasks_.at(*at);
    const bool early = !task.is_long && (long_tasks_ == 0 || task.turn <= before_chunk_);
    auto& first = task.is_long ? first_long : first_short;
    const bool wanted = early || (first == waiting_.end() && !(task.is_long && chunk_.has_value()));
    if (!wanted || !MayRun(*at, task.facts)) continue;
    if (early) return at;
    first = at;
  }
  return first_long != waiting_.end() ? first_long : first_short;
}

// The task at `at` no longer waits; gives the one behind it.
BatchQueue::TaskList::iterator BatchQueue::Take(TaskList::iterator at) {
  tasks_.at(*at).place.reset();
  return waiting_.erase(at);
}

RecycledVector<TaskId> BatchQueue::Next(int64_t token_budget) {
  const auto first = First();
  if (first == waiting_.end()) return {};
  const Task& leader = tasks_.at(*first);
  RecycledVector<TaskId> batch{*first};
  Take(first);
  if (leader.is_long) chunk_ = batch.front();
  if (leader.is_long || leader.facts.kind == TaskFacts::kAlone) return batch;
  int64_t tokens = leader.facts.tokens;
  for (auto at = waiting_.begin(); at != waiting_.end() && tokens < token_budget;) {
    const Task& task = tasks_.at(*at);
    if (task.is_long || task.facts.kind != leader.facts.kind || !MayRun(*at, task.facts)) {
      ++at;
      continue;
    }
    tokens += task.facts.tokens;
    batch.push_back(*at);
    at = Take(at);
  }
  return batch;
}

void BatchQueue::Postpone(TaskId id) {
  const Task& task = tasks_.at(id);
  CHECK(task.place.has_value());
  waiting_.splice(waiting_.end(), waiting_, *task.place);
}

void BatchQueue::BackToTail(TaskId id) {
  Task& task = tasks_.at(id);
  CHECK(!task.place.has_value());
  task.turn = ++last_turn_;
  task.place = waiting_.insert(waiting_.end(), id);
  ChunkEnded(id);
  // It may have become long by running: what it ran was a chunk all the same.
  if (task.is_long) before_chunk_ = last_turn_;
}

void BatchQueue::BackToHead(TaskId id) {
  Task& task = tasks_.at(id);
  CHECK(!task.place.has_value());
  task.place = waiting_.insert(waiting_.begin(), id);
  if (chunk_ == id) chunk_.reset();
}

void BatchQueue::Remove(TaskId id) {
  const auto found = tasks_.find(id);
  CHECK(found != tasks_.end());
  ChunkEnded(id);
  if (found->second.is_long) --long_tasks_;
  for (const RecycledString& session : found->second.facts.session_ids) {
    RecycledVector<Use>& uses = sessions_.at(session);
    std::erase_if(uses, [id](const Use& use) { return use.id == id; });
    if (uses.empty()) sessions_.erase(session);
  }
  if (found->second.place.has_value()) waiting_.erase(*found->second.place);
  tasks_.erase(found);
}

}  // namespace attend
