// SPDX-License-Identifier: Apache-2.0
//
// Two batches in flight, and batches with a budget of workspace bytes; no arithmetic.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <random>

#include "tests/engine/runtime_fixture.h"
#include "tests/support/seed.h"

namespace attend {
namespace {

using State = BatchOutcome::State;

class RuntimePipelineTest : public RuntimeFixture {
 protected:
  RuntimePipelineTest() : RuntimeFixture(2) {}
  ~RuntimePipelineTest() override { EXPECT_EQ(engine_->violations.load(), 0); }

  AttendBatch* Start(AttendJob& job) {
    AttendJob* jobs[] = {&job};
    return &runtime_->StartBatch(jobs);
  }
  absl::Status Finish(AttendBatch* batch) {
    const BatchOutcome& outcome = runtime_->FinishBatch(*batch);
    EXPECT_EQ(outcome.jobs[0].state, State::kEnded);
    return outcome.jobs[0].status;
  }
  int64_t LayerLength(const std::string& id, size_t layer) {
    return runtime_->GetSession(id)->layers[layer].length;
  }
};

TEST_F(RuntimePipelineTest, TwoLayersOfASessionAppendAtTheSameTime) {
  const std::string id = Open();
  auto first = SessionJob(0, id, 0, 70);
  auto second = SessionJob(1, id, 0, 3);
  auto running = Start(*first);
  auto next = Start(*second);
  EXPECT_EQ(engine_->started.load(), 2);
  EXPECT_EQ(engine_->waited.load(), 0);
  EXPECT_EQ(LayerLength(id, 0), 0) << "committed while it ran";
  EXPECT_TRUE(Finish(running).ok());
  EXPECT_EQ(LayerLength(id, 0), 70);
  EXPECT_EQ(LayerLength(id, 1), 0);
  EXPECT_TRUE(Finish(next).ok());
  EXPECT_EQ(LayerLength(id, 1), 3);
}

TEST_F(RuntimePipelineTest, ABatchIsFinishedWhenTheEngineSaysSo) {
  engine_->released = 0;
  auto job = Job(0, {4});
  auto batch = Start(*job);
  EXPECT_FALSE(runtime_->Finished(*batch));
  engine_->released = 1;
  EXPECT_TRUE(runtime_->Finished(*batch));
  EXPECT_TRUE(Finish(batch).ok());
  auto dead = Job(0, {4});
  dead->cancelled = true;
  batch = Start(*dead);
  EXPECT_FALSE(batch->launched());
  EXPECT_TRUE(runtime_->Finished(*batch)) << "nothing to wait for";
  EXPECT_EQ(Finish(batch).code(), absl::StatusCode::kCancelled);
}

TEST_F(RuntimePipelineTest, CancelAndDeadlineInTheSecondBatchRollBackWhenItEnds) {
  const std::string a = Open();
  const std::string b = Open();
  ASSERT_TRUE(RunOne(*SessionJob(0, a, 0, 3)).ok());
  const int64_t used = runtime_->Stats().kv_used_bytes;
  for (const bool cancel : {true, false}) {
    auto first = SessionJob(0, b, 0, 1);
    first->sequences[0].no_append = true;
    auto second = SessionJob(0, a, 1, 100);  // overwrites two rows
    second->sequences[0].rewind = true;
    second->deadline_us = now_us_ + 50;
    auto running = Start(*first);
    auto next = Start(*second);
    if (cancel) second->cancelled = true;
    if (!cancel) now_us_ += 100;
    EXPECT_TRUE(Finish(running).ok());
    EXPECT_GT(runtime_->Stats().kv_used_bytes, used) << "given back while it ran";
    EXPECT_EQ(Finish(next).code(),
              cancel ? absl::StatusCode::kCancelled : absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(Length(a), 3);
    EXPECT_EQ(runtime_->Stats().kv_used_bytes, used);
  }
}

// A rewind in the first batch, whose roll-back would copy; an append to a shared block in the
// second one, which copies before it starts. `break_engine` is called between the two.
class RuntimeFaultTest : public RuntimePipelineTest {
 protected:
  void Run(const std::function<void()>& break_engine, bool first_fails) {
    const std::string a = Open();
    ASSERT_TRUE(RunOne(*SessionJob(0, a, 0, 3)).ok());
    const std::string fork = runtime_->ForkSession(a, std::nullopt)->id;
    const std::string keeper = runtime_->ForkSession(a, std::nullopt)->id;
    auto first = SessionJob(0, a, 1, 1);
    first->sequences[0].rewind = true;
    auto second = SessionJob(0, fork, 3, 2);
    auto third = SessionJob(0, Open(), 0, 1);
    auto running = Start(*first);
    break_engine();
    auto next = Start(*second);

    const BatchOutcome ends[] = {runtime_->FinishBatch(*running), runtime_->FinishBatch(*next)};
    const bool failed[] = {first_fails, true};
    for (int i : {0, 1}) {
      const absl::Status& status = ends[i].jobs[0].status;
      EXPECT_EQ(ends[i].jobs[0].state, State::kEnded);
      EXPECT_EQ(status.code(), failed[i] ? absl::StatusCode::kInternal : absl::StatusCode::kOk);
      EXPECT_EQ(ends[i].engine.ok(), i != (first_fails ? 0 : 1)) << "told once, and at once";
    }
    EXPECT_EQ(Length(a), first_fails ? 3 : 2);
    EXPECT_EQ(Length(fork), 3);
    EXPECT_EQ(RunOne(*third).code(), absl::StatusCode::kInternal);
    for (const std::string& id : {a, fork, keeper}) EXPECT_TRUE(runtime_->CloseSession(id).ok());
    EXPECT_EQ(runtime_->Stats().kv_used_bytes, 0);
  }
};

TEST_F(RuntimeFaultTest, InTheFirstBatch) {
  Run([this] { engine_->fail_wait = 2; }, true);
}
TEST_F(RuntimeFaultTest, InTheSecondBatch) {
  Run([this] { engine_->fail_wait = 3; }, false);
}
TEST_F(RuntimeFaultTest, StartingTheSecondBatch) {
  Run([this] { engine_->fail_next = true; }, true);
}
TEST_F(RuntimeFaultTest, CopyingBlocksForTheSecondBatch) {
  Run([this] { engine_->fail_copies = true; }, true);
}

TEST_F(RuntimePipelineTest, SessionCallsAndExpiryGoOnBesideABatchOfAnotherSession) {
  const std::string id = Open();
  const std::string other = Open();
  ASSERT_TRUE(RunOne(*SessionJob(0, id, 0, 100)).ok());
  ASSERT_TRUE(RunOne(*SessionJob(0, other, 0, 100)).ok());
  const std::string fork = runtime_->ForkSession(id, std::nullopt)->id;
  runtime_->SetPinned([&](const std::string& session) { return session == id; });
  auto job = SessionJob(0, id, 100, 10);
  auto running = Start(*job);  // reads a block that it shares with the fork, and copied another one
  EXPECT_TRUE(runtime_->CloseSession(fork).ok());
  EXPECT_EQ(runtime_->TruncateSession(other, 1)->length, 1);
  const std::string opened = Open();
  auto abandoned = SessionJob(1, other, 0, 300);
  abandoned->deadline_us = int64_t{1} << 60;
  AttendJob* jobs[] = {abandoned.get()};
  ASSERT_EQ(runtime_->FinishBatch(*running).jobs[0].state, State::kEnded);
  ASSERT_EQ(runtime_->RunBatch(jobs).jobs[0].state, State::kContinues);
  auto again = SessionJob(0, id, 110, 10);
  running = Start(*again);
  runtime_->Abandon(*abandoned);  // between two of its batches, beside one of another session
  now_us_ += (options_.session_ttl_seconds + 1) * 1000000;
  again->deadline_us = now_us_ + 1;
  runtime_->ExpireSessions();
  EXPECT_EQ(runtime_->Stats().sessions_expired, 2);  // other, opened
  EXPECT_TRUE(Finish(running).ok());
  EXPECT_EQ(Length(id), 120);
  EXPECT_TRUE(runtime_->CloseSession(id).ok());
  EXPECT_EQ(runtime_->Stats().kv_used_bytes, 0);
}

TEST_F(RuntimePipelineTest, ScratchOfARunningBatchIsNotGivenAway) {
  const int64_t most = 57000;  // seven eighths of the scratch
  auto holder = Job(0, {most});
  while (most - holder->sequences[0].rows_done > options_.batch_tokens) {
    AttendJob* jobs[] = {holder.get()};
    ASSERT_EQ(runtime_->RunBatch(jobs).jobs[0].state, State::kContinues);
  }
  auto waiting = Job(0, {20000});
  auto running = Start(*holder);  // its last rows
  auto next = Start(*waiting);
  EXPECT_FALSE(next->launched());
  EXPECT_EQ(next->outcome.jobs[0].state, State::kUntouched);
  EXPECT_EQ(runtime_->FinishBatch(*next).jobs[0].state, State::kUntouched);
  EXPECT_TRUE(Finish(running).ok());
  EXPECT_TRUE(RunOne(*waiting).ok());
}

TEST_F(RuntimePipelineTest, ABatchHasTheEngineFromTheEndOfTheOneBeforeIt) {
  auto first = Job(0, {4});
  auto second = Job(0, {4});
  now_us_ = 1000;
  auto running = Start(*first);
  now_us_ = 1010;
  auto next = Start(*second);
  now_us_ = 1100;
  EXPECT_EQ(runtime_->FinishBatch(*running).compute_us, 100);
  EXPECT_EQ(first->first_batch_us, 1000);
  now_us_ = 1150;
  EXPECT_EQ(runtime_->FinishBatch(*next).compute_us, 50);
  EXPECT_EQ(second->first_batch_us, 1100);
  // Seen late to end: the engine's own times count.
  engine_->times = {30, 40, 10};
  auto third = Job(0, {4});
  now_us_ = 2000;
  running = Start(*third);
  now_us_ = 2020;
  EXPECT_EQ(runtime_->FinishBatch(*running).compute_us, 80);
  EXPECT_EQ(third->first_batch_us, 1940);
}

// ---- Workspace ----

class RuntimeWorkspaceTest : public RuntimeFixture {
 protected:
  static constexpr int64_t kWorkspaceBytes = 25 << 10;

  RuntimeWorkspaceTest() : RuntimeFixture(1, kWorkspaceBytes) {
    engine_->on_start = [this](const BatchPlan& plan, std::span<const AttendItem> items) {
      int64_t bytes = 0;
      for (const AttendItem& item : items) bytes += WorkspaceBytes(*plan.spec, item);
      const bool smallest = items.size() == 1 && items[0].rows + items[0].new_keys <= 2 &&
                            std::max(items[0].rows, items[0].new_keys) == 1;
      EXPECT_TRUE(bytes <= kWorkspaceBytes || smallest) << bytes;
      EXPECT_LE(std::max(plan.query_rows, plan.key_rows), options_.batch_tokens);
      single_rows_ += smallest && bytes > kWorkspaceBytes;
      rows_ += plan.query_rows;
      most_items_ = std::max(most_items_, items.size());
      most_rows_ = std::max(most_rows_, plan.query_rows);
    };
  }

  int64_t single_rows_ = 0;  // batches of one row that exceed the bytes
  int64_t rows_ = 0;
  size_t most_items_ = 0;
  int64_t most_rows_ = 0;
};

TEST_F(RuntimeWorkspaceTest, SmallItemsShareABatchAsFarAsItsBytesGo) {
  EXPECT_TRUE(RunOne(*Job(0, std::vector<int64_t>(100, 1))).ok());
  EXPECT_EQ(rows_, 100);
  EXPECT_EQ(most_items_, 5u);  // of 4 KiB and some
}

TEST_F(RuntimeWorkspaceTest, LongItemsAreCutInWholeBlocks) {
  EXPECT_TRUE(RunOne(*Job(0, {300})).ok());
  EXPECT_EQ(rows_, 300);
  EXPECT_EQ(most_rows_, 64);
  EXPECT_TRUE(RunOne(*Job(3, {300})).ok());
  EXPECT_EQ(rows_, 600);
}

TEST_F(RuntimeWorkspaceTest, AnItemThatFitsABatchOfItsOwnIsNotCutForTheRestOfOne) {
  auto first = Job(0, {4});
  auto second = Job(0, {80});  // 64 of its rows would fit beside the first
  AttendJob* jobs[] = {first.get(), second.get()};
  const BatchOutcome outcome = runtime_->RunBatch(jobs);
  EXPECT_EQ(outcome.jobs[0].state, State::kEnded);
  EXPECT_EQ(outcome.jobs[1].state, State::kUntouched);
  EXPECT_TRUE(RunOne(*second).ok());
  EXPECT_EQ(most_rows_, 80);
}

TEST_F(RuntimeWorkspaceTest, RowsWaitForEveryKeyAlsoWhenTheRestFitsABatch) {
  auto first = Job(3, {28});
  first->bias_sequences = first->bias_heads = 1;  // takes bytes that are no tokens
  first->bias_rows = 28;
  first->bias_columns = 55;
  const std::vector<float> bias(28 * 55);
  first->bias = bias.data();
  auto second = Job(3, {100});  // too much for a batch; without 64 of its keys no longer
  AttendJob* jobs[] = {first.get(), second.get()};
  const BatchOutcome outcome = runtime_->RunBatch(jobs);
  EXPECT_EQ(outcome.jobs[1].tokens, 64);
  EXPECT_EQ(rows_, 28);
  EXPECT_TRUE(RunOne(*second).ok());
  EXPECT_EQ(rows_, 128);
}

TEST_F(RuntimeWorkspaceTest, ARowThatExceedsEveryBatchRunsAlone) {
  auto job = Job(0, {4, 4000});
  job->weights.full = true;
  job->weights.row_begin = 3997;
  EXPECT_TRUE(RunOne(*job).ok());
  EXPECT_EQ(single_rows_, 3);  // of 2 heads x 4000 keys x 4 bytes
}

TEST_F(RuntimeWorkspaceTest, AnyMixtureEndsWithinTheBytes) {
  std::mt19937_64 random(TestSeed());
  const std::vector<float> bias(2 * 200 * 200);
  int64_t rows = 0;
  std::vector<std::shared_ptr<AttendJob>> waiting;
  for (int i = 0; i < 60; ++i) {
    std::vector<int64_t> lengths(1 + random() % 4);
    for (int64_t& length : lengths) length = static_cast<int64_t>(random() % 200);
    const int layer = static_cast<int>(random() % 4);
    auto job = Job(layer, lengths);
    for (SequenceJob& sequence : job->sequences) {
      if (layer == 2 && sequence.rows > 0) {
        sequence.has_keys = true;
        sequence.keys = 1 + static_cast<int64_t>(random()) % sequence.rows;
        sequence.keys = std::max<int64_t>(1, sequence.keys);
        sequence.key_source = sequence.query;
      }
      rows += sequence.rows;
    }
    job->weights.full = random() % 2 == 0;
    if (random() % 2 == 0) {
      job->bias_sequences = 1;
      job->bias_heads = random() % 2 == 0 ? 1 : 2;
      job->bias_rows = 200;
      job->bias_columns = 200;
      job->bias = bias.data();
    }
    waiting.push_back(std::move(job));
  }
  for (int batches = 0; !waiting.empty(); ++batches) {
    ASSERT_LT(batches, 20000) << "a job never ends";
    std::vector<AttendJob*> jobs;
    for (const auto& job : waiting) jobs.push_back(job.get());
    const BatchOutcome outcome = runtime_->RunBatch(jobs);
    std::vector<std::shared_ptr<AttendJob>> rest;
    for (size_t i = 0; i < jobs.size(); ++i) {
      if (outcome.jobs[i].state != State::kEnded) rest.push_back(waiting[i]);
      EXPECT_TRUE(outcome.jobs[i].status.ok()) << outcome.jobs[i].status;
    }
    waiting = std::move(rest);
  }
  EXPECT_EQ(rows_, rows);
}

}  // namespace
}  // namespace attend
