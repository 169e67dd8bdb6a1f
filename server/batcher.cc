// SPDX-License-Identifier: Apache-2.0
#include "server/batcher.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/util/check.h"
#include "engine/util/error.h"

namespace attend {
namespace {

// Session expiry and gauges are looked at this often while idle, and between batches.
constexpr int64_t kTidyUs = 200000;
constexpr int64_t kFewSessions = 256;
// A running batch is polled without pause this long, which most decode steps take at most; then a
// pause costs a longer batch little.
constexpr int64_t kSpinUs = 2000;
constexpr std::chrono::microseconds kPollPause{50};

// Jobs of one (model, layer, cross) share a batch; raw work is one kind, split further by the
// runtime.
uint64_t KindOf(const AttendJob& job) {
  const auto model = static_cast<uint64_t>(job.model + 2);
  return model << 33 | static_cast<uint64_t>(job.layer) << 1 | (job.cross ? 1 : 0);
}

}  // namespace

Batcher::Batcher(AttentionRuntime& runtime, int64_t batch_tokens, std::function<int64_t()> now_us,
                 Observer observer, StatsObserver stats_observer)
    : runtime_(runtime),
      batch_tokens_(batch_tokens),
      now_us_(std::move(now_us)),
      observer_(std::move(observer)),
      stats_observer_(std::move(stats_observer)) {
  runtime_.SetPinned([this](const std::string& session_id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.Pinned(session_id);
  });
  stats_.runtime = runtime_.Stats();
}

void Batcher::Start() {
  thread_ = std::thread([this] { Loop(); });
  pthread_setname_np(thread_.native_handle(), "attend-engine");
}

Batcher::~Batcher() { Stop(absl::UnavailableError("the server stops")); }

void Batcher::Push(TaskFacts facts, Task task) {
  absl::Status stopped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!stopping_) {
      const TaskId id = next_id_++;
      task.tokens = facts.tokens;
      if (task.job != nullptr) {
        ++stats_.queue_requests;
        stats_.queue_tokens += task.tokens;
        fresh_.push_back(id);
      }
      queue_.Push(id, std::move(facts));
      tasks_.emplace(id, std::move(task));
      Changed();
      return;
    }
    stopped = stop_reason_;
  }
  task.done(stopped);
}

void Batcher::Submit(std::shared_ptr<AttendJob> job, Done done) {
  TaskFacts facts;
  facts.kind = KindOf(*job);
  facts.tokens = job->tokens();
  facts.layer = job->layer;
  for (const SequenceJob& sequence : job->sequences) {
    if (!sequence.session_id.empty()) facts.session_ids.push_back(sequence.session_id);
  }
  Push(std::move(facts), {std::move(job), {}, std::move(done)});
}

void Batcher::SubmitControl(const std::string& session_id, Control control, Done stopped) {
  TaskFacts facts;
  if (!session_id.empty()) facts.session_ids.emplace_back(session_id);
  Push(std::move(facts), {nullptr, std::move(control), std::move(stopped)});
}

void Batcher::Wake() {
  std::lock_guard<std::mutex> lock(mutex_);
  look_ = true;
  Changed();
}

void Batcher::Stop(const absl::Status& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!stopping_) stop_reason_ = reason;
    stopping_ = true;
    Changed();
  }
  if (thread_.joinable()) thread_.join();
}

BatcherStats Batcher::Stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

bool Batcher::idle() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.size() == 0 && !unpublished_;
}

void Batcher::Count(Task& task, bool begun) {
  if (task.job == nullptr || task.begun == begun) return;
  task.begun = begun;
  const int64_t more = begun ? 1 : -1;
  stats_.running_requests += more;
  stats_.queue_requests -= more;
  stats_.queue_tokens -= more * task.tokens;
}

void Batcher::Changed() {
  changes_.fetch_add(1);
  wake_.notify_one();
}

Batcher::Task* Batcher::Find(TaskId id) {
  std::lock_guard<std::mutex> lock(mutex_);
  return &tasks_.at(id);  // references stay valid while others are added
}

void Batcher::EndTask(TaskId id, absl::Status status) {
  Task task;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Count(tasks_.at(id), true);  // no longer as queued, where it was
    task = std::move(tasks_.at(id));
    if (task.job != nullptr) --stats_.running_requests;
    tasks_.erase(id);
    queue_.Remove(id);
  }
  if (task.job != nullptr || !status.ok()) task.done(std::move(status));
}

int64_t Batcher::PredictUs(uint64_t kind, int64_t tokens) const {
  const auto rate = full_tokens_per_ms_.find(kind);
  const bool known = rate != full_tokens_per_ms_.end() && runtime_.info().enough_rows > 0;
  return known ? int64_t(1000.0 * double(tokens) / rate->second) : 0;
}

// Ends waiting jobs that were cancelled or whose deadline passed: dead work is never launched.
// Those that would be answered too late go last: an engine that has nothing better to do tries
// them. Never one that has begun: it holds memory, which others may wait for.
void Batcher::EndExpired() {
  const int64_t now = now_us_();
  RecycledVector<std::pair<TaskId, std::shared_ptr<AttendJob>>> dead;
  RecycledVector<TaskId> late;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    look_ = false;
    const int64_t beside = std::min(runtime_.info().enough_rows, stats_.queue_tokens);
    for (TaskId id : queue_.waiting()) {
      const std::shared_ptr<AttendJob>& job = tasks_.at(id).job;
      if (job == nullptr) continue;
      if (job->cancelled.load() || now > job->deadline_us) {
        dead.emplace_back(id, job);
      } else if (!job->started && now + PredictUs(KindOf(*job), std::max(beside, job->tokens())) >
                                      job->deadline_us) {
        late.push_back(id);
      }
    }
    for (TaskId id : late) queue_.Postpone(id);
  }
  for (auto& [id, job] : dead) {
    runtime_.Abandon(*job);
    const bool cancelled = job->cancelled.load();
    EndTask(id, cancelled
                    ? MakeError(absl::StatusCode::kCancelled, {.reason = Reason::kCancelled},
                                "the call was cancelled")
                    : MakeError(absl::StatusCode::kDeadlineExceeded, {.reason = Reason::kDeadline},
                                "the deadline passed while the request waited"));
  }
}

void Batcher::Publish() {
  const int64_t now = now_us_();
  runtime_.ExpireSessions();
  const RuntimeStats stats = runtime_.Stats();
  stats_observer_(stats);
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.runtime = stats;
  stats_.tokens_per_ms = tokens_per_ms_;
  unpublished_ = false;
  published_us_ = now;
}

void Batcher::RunControl(TaskId id) {
  if (engine_failed()) {
    EndTask(id, MakeError(absl::StatusCode::kInternal, {.reason = Reason::kEngineFault},
                          "the engine has failed"));
    return;
  }
  Find(id)->control(runtime_);
  EndTask(id, absl::OkStatus());
}

// Starts a batch of these tasks; one that has nothing for the engine ends here. False when none of
// them came further, because batches in flight hold the memory they need.
bool Batcher::StartJobs(RecycledVector<TaskId> started) {
  RecycledVector<AttendJob*> jobs;
  for (TaskId id : started) jobs.push_back(Find(id)->job.get());
  RunningBatch running{&runtime_.StartBatch(jobs), std::move(started)};
  const RecycledVector<TaskId>& ids = running.ids;

  // What did not fit is offered again, before younger tasks. But when nothing ran and nothing runs,
  // it waits for memory that waiting jobs hold: they get their turn first.
  const bool stuck = running.batch->outcome.sequences == 0 && in_flight_.empty();
  RecycledVector<TaskId> untouched;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (running.batch->outcome.jobs[i].state == BatchOutcome::State::kUntouched) {
      untouched.push_back(ids[i]);
    }
  }
  if (!stuck) std::reverse(untouched.begin(), untouched.end());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (TaskId id : untouched) {
      Task& task = tasks_.at(id);
      if (task.job->first_batch_us == 0) Count(task, false);
      stuck ? queue_.BackToTail(id) : queue_.BackToHead(id);
    }
  }
  if (running.batch->launched()) {
    in_flight_.push_back(std::move(running));
    return true;
  }
  const bool some_ended = untouched.size() < ids.size();
  Finish(std::move(running));
  return some_ended || in_flight_.empty();
}

void Batcher::Finish(RunningBatch running) {
  const BatchOutcome& outcome = runtime_.FinishBatch(*running.batch);
  if (!outcome.engine.ok()) engine_failed_.store(true);
  if (outcome.tokens > 0) {
    const double rate =
        1000.0 * double(outcome.tokens) / double(std::max<int64_t>(1, outcome.compute_us));
    tokens_per_ms_ = tokens_per_ms_ <= 0 ? rate : 0.8 * tokens_per_ms_ + 0.2 * rate;
    // Decode steps have far fewer tokens in a millisecond: they foretell nothing of other work.
    if (2 * outcome.tokens >= runtime_.info().enough_rows) {
      const uint64_t kind = KindOf(*Find(running.ids.front())->job);
      const auto [known, first] = full_tokens_per_ms_.emplace(kind, rate);
      if (!first) known->second = 0.8 * known->second + 0.2 * rate;
    }
  }
  observer_(outcome);
  for (size_t i = 0; i < running.ids.size(); ++i) {
    if (outcome.jobs[i].state == BatchOutcome::State::kEnded) {
      EndTask(running.ids[i], outcome.jobs[i].status);
    } else if (outcome.jobs[i].state == BatchOutcome::State::kContinues) {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.SetLong(running.ids[i]);
      queue_.BackToTail(running.ids[i]);
    }
  }
}

// Tells the queue which of the new jobs are long; the runtime knows.
void Batcher::FindLong() {
  RecycledVector<std::pair<TaskId, std::shared_ptr<AttendJob>>> jobs;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (TaskId id : std::exchange(fresh_, {})) {
      if (const auto found = tasks_.find(id); found != tasks_.end()) {
        jobs.emplace_back(id, found->second.job);
      }
    }
  }
  for (const auto& [id, job] : jobs) {
    if (!runtime_.NeedsChunks(*job)) continue;
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.SetLong(id);
  }
}

// Starts the next batch or runs a session call; false when there is nothing that can start.
bool Batcher::StartNext() {
  FindLong();
  const int64_t enough = runtime_.info().enough_rows;
  RecycledVector<TaskId> ids;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ids = queue_.Next(enough > 0 ? std::min(enough, batch_tokens_) : batch_tokens_);
    for (TaskId id : ids) Count(tasks_.at(id), true);
    if (!ids.empty()) unpublished_ = true;
  }
  if (ids.empty()) return false;
  if (Find(ids.front())->job == nullptr) {
    RunControl(ids.front());
    return true;
  }
  return StartJobs(std::move(ids));
}

// Ends the oldest batch in flight. When another could be started: unless there is something to
// look at that had not been seen yet.
void Batcher::FinishOldest(uint64_t seen) {
  const bool full = static_cast<int>(in_flight_.size()) >= runtime_.info().batches_in_flight;
  const int64_t begin_us = now_us_();
  while (!full && !runtime_.Finished(*in_flight_.front().batch)) {
    if (changes_.load() != seen) return;
    if (now_us_() - begin_us > kSpinUs) {
      std::this_thread::sleep_for(kPollPause);
    } else {
      std::this_thread::yield();
    }
  }
  RunningBatch oldest = std::move(in_flight_.front());
  in_flight_.erase(in_flight_.begin());
  Finish(std::move(oldest));
}

// False when stopping.
bool Batcher::WaitForWork() {
  bool look = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    // Gauges of many sessions take a while to add up: only then may they be up to kTidyUs old.
    if (queue_.size() == 0 && !stopping_ && runtime_.open_sessions() < kFewSessions) {
      lock.unlock();
      Publish();
      lock.lock();
    }
    wake_.wait_for(lock, std::chrono::microseconds(kTidyUs),
                   [this] { return stopping_ || look_ || queue_.size() > 0; });
    if (stopping_) return false;
    look = look_ || queue_.size() > 0;
  }
  if (look) EndExpired();
  if (now_us_() - published_us_ > kTidyUs) Publish();
  return true;
}

void Batcher::Loop() {
  const auto most = static_cast<size_t>(runtime_.info().batches_in_flight);
  for (;;) {
    const uint64_t seen = changes_.load();
    if (!WaitForWork()) break;
    const bool started = StartNext();
    if (in_flight_.size() == most || (!started && !in_flight_.empty())) FinishOldest(seen);
  }
  while (!in_flight_.empty()) FinishOldest(changes_.load());
  RecycledVector<TaskId> rest;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    rest.assign(queue_.waiting().begin(), queue_.waiting().end());
  }
  for (TaskId id : rest) {
    if (const std::shared_ptr<AttendJob> job = Find(id)->job) runtime_.Abandon(*job);
    EndTask(id, stop_reason_);
  }
  Publish();
}

}  // namespace attend
