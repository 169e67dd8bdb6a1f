// SPDX-License-Identifier: Apache-2.0
#include "server/batch_queue.h"

#include <algorithm>
#include <utility>

#include "engine/util/check.h"

namespace attend {

void BatchQueue::Push(TaskId id, TaskFacts facts) {
  for (const std::string& session : facts.session_ids) {
    sessions_[session].push_back({id, facts.layer});
  }
  const bool fresh = tasks_.emplace(id, std::move(facts)).second;
  CHECK(fresh);
  waiting_.push_back(id);
}

bool BatchQueue::MayRun(TaskId id, const TaskFacts& facts) const {
  for (const std::string& session : facts.session_ids) {
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

std::vector<TaskId> BatchQueue::Next(int64_t token_budget) {
  std::vector<TaskId> batch;
  uint64_t kind = 0;
  int64_t tokens = 0;
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    const TaskFacts& facts = tasks_.at(*at);
    const bool fits = batch.empty() || (facts.kind == kind && kind != TaskFacts::kAlone);
    if (!fits || !MayRun(*at, facts)) {
      ++at;
      continue;
    }
    kind = facts.kind;
    tokens += facts.tokens;
    batch.push_back(*at);
    at = waiting_.erase(at);
    if (kind == TaskFacts::kAlone || tokens >= token_budget) break;
  }
  return batch;
}

void BatchQueue::BackToTail(TaskId id) { waiting_.push_back(id); }

void BatchQueue::BackToHead(TaskId id) { waiting_.push_front(id); }

void BatchQueue::Remove(TaskId id) {
  const auto found = tasks_.find(id);
  CHECK(found != tasks_.end());
  for (const std::string& session : found->second.session_ids) {
    std::deque<Use>& uses = sessions_.at(session);
    std::erase_if(uses, [id](const Use& use) { return use.id == id; });
    if (uses.empty()) sessions_.erase(session);
  }
  std::erase(waiting_, id);
  tasks_.erase(found);
}

}  // namespace attend
