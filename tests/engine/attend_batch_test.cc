// SPDX-License-Identifier: Apache-2.0
//
// Batches are used again: nothing of an earlier one shows in a later one, however it ended.
#include "engine/attend_batch.h"

#include <gtest/gtest.h>

#include <memory>
#include <tuple>
#include <vector>

#include "tests/engine/runtime_fixture.h"

namespace attend {
namespace {

using State = BatchOutcome::State;

// Everything of a batch but the jobs' pointers, which differ from run to run.
auto Numbers(const BatchPlan& plan) {
  return std::tie(plan.layer, plan.kv_dtype, plan.order, plan.row_begin, plan.new_key_begin,
                  plan.query_rows, plan.key_rows, plan.key_row_offset, plan.input_rows,
                  plan.block_begin, plan.block_address);
}
auto Numbers(const BatchWork& work) {
  return std::tie(work.weights, work.product_flops, work.kv_bytes, work.attend_flops, work.rows,
                  work.most_rows);
}
auto Numbers(const BatchShare& share) { return std::tie(share.tokens, share.workspace_bytes); }

void ExpectEqual(const AttendBatch& batch, const AttendBatch& expected) {
  EXPECT_EQ(batch.in_flight, expected.in_flight);
  EXPECT_EQ(batch.jobs.size(), expected.jobs.size());
  ASSERT_EQ(batch.resolved.size(), expected.resolved.size());
  for (size_t i = 0; i < batch.resolved.size(); ++i) {
    EXPECT_EQ(batch.resolved[i].engine_layer, expected.resolved[i].engine_layer);
    EXPECT_EQ(batch.resolved[i].spec == nullptr, expected.resolved[i].spec == nullptr);
    EXPECT_EQ(batch.resolved[i].sequences.size(), expected.resolved[i].sequences.size());
    EXPECT_EQ(batch.resolved[i].few_rows, expected.resolved[i].few_rows);
  }
  ASSERT_EQ(batch.sequences.size(), expected.sequences.size());
  for (const ResolvedSequence& sequence : batch.sequences) EXPECT_EQ(sequence.session, nullptr);
  EXPECT_EQ(batch.members, expected.members);
  EXPECT_EQ(Numbers(batch.plan), Numbers(expected.plan));
  EXPECT_EQ(batch.plan.spec == nullptr, expected.plan.spec == nullptr);
  EXPECT_EQ(batch.items.size(), expected.items.size());
  EXPECT_EQ(batch.blocks, expected.blocks);
  EXPECT_EQ(Numbers(batch.whole), Numbers(expected.whole));
  EXPECT_EQ(Numbers(batch.room), Numbers(expected.room));
  EXPECT_EQ(batch.time == nullptr, expected.time == nullptr);
  EXPECT_EQ(Numbers(batch.work), Numbers(expected.work));
  EXPECT_EQ(batch.launched(), expected.launched());
  const BatchOutcome& outcome = batch.outcome;
  EXPECT_EQ(outcome.tokens, expected.outcome.tokens);
  EXPECT_EQ(outcome.sequences, expected.outcome.sequences);
  EXPECT_EQ(outcome.compute_us, expected.outcome.compute_us);
  EXPECT_EQ(outcome.stages.attend_us, expected.outcome.stages.attend_us);
  EXPECT_EQ(outcome.engine, expected.outcome.engine);
  EXPECT_EQ(outcome.launched_late, expected.outcome.launched_late);
  ASSERT_EQ(outcome.jobs.size(), expected.outcome.jobs.size());
  for (size_t i = 0; i < outcome.jobs.size(); ++i) {
    EXPECT_EQ(outcome.jobs[i].state, expected.outcome.jobs[i].state);
    EXPECT_EQ(outcome.jobs[i].status, expected.outcome.jobs[i].status);
    EXPECT_EQ(outcome.jobs[i].tokens, expected.outcome.jobs[i].tokens);
  }
}

class AttendBatchTest : public RuntimeFixture {
 protected:
  // Starts and finishes a batch; what it was in between.
  AttendBatch Run(const std::vector<std::shared_ptr<AttendJob>>& jobs) {
    std::vector<AttendJob*> pointers;
    for (const auto& job : jobs) pointers.push_back(job.get());
    AttendBatch& batch = runtime_->StartBatch(pointers);
    runtime_->FinishBatch(batch);
    return batch;
  }

  // Batches that end in every way but by a failing engine; nothing is left of their jobs.
  void RunAll() {
    engine_->times = {5, 6, 7};
    const std::string id = Open();
    ASSERT_TRUE(RunOne(*SessionJob(0, id, 0, 100)).ok());
    ASSERT_TRUE(RunOne(*Job(0, {500, 3})).ok());  // in chunks
    const auto wrong = SessionJob(0, "r.1.nobody", 0, 1);
    const auto misplaced = SessionJob(0, id, 7, 1);
    const auto other_layer = Job(3, {2});
    const auto first = Job(0, {3, 2});
    EXPECT_EQ(Run({wrong, misplaced, first, other_layer}).members, std::vector<size_t>{2});
    const auto dying = Job(0, {4, 4});
    step_us_ = 10;
    now_us_ = 0;
    dying->deadline_us = 35;
    Run({dying, Job(0, {3})});
    step_us_ = 0;
    const auto dead = Job(0, {4});
    dead->cancelled = true;
    EXPECT_EQ(Run({dead}).outcome.jobs[0].status.code(), absl::StatusCode::kCancelled);
    engine_->times = {};
    ASSERT_TRUE(runtime_->CloseSession(id).ok());
  }
};

class FreshRuntime : public AttendBatchTest {
 public:
  using AttendBatchTest::Job;
  using AttendBatchTest::Run;

 private:
  void TestBody() override {}
};

TEST_F(AttendBatchTest, AResetBatchIsAsNewButForItsMemory) {
  AttendBatch batch = Run({Job(0, {3, 70}), SessionJob(0, "r.1.nobody", 0, 1)});
  batch.in_flight = true;
  batch.outcome.engine = absl::InternalError("broken");
  batch.outcome.launched_late = 1;
  batch.outcome.stages.attend_us = 1;
  ASSERT_TRUE(batch.launched());
  const auto room = [&] {
    return std::vector<size_t>{batch.jobs.capacity(),
                               batch.resolved.capacity(),
                               batch.sequences.capacity(),
                               batch.members.capacity(),
                               batch.items.capacity(),
                               batch.blocks.capacity(),
                               batch.outcome.jobs.capacity(),
                               batch.plan.order.capacity(),
                               batch.plan.row_begin.capacity(),
                               batch.plan.new_key_begin.capacity(),
                               batch.plan.block_begin.capacity(),
                               batch.plan.block_address.capacity()};
  };
  const std::vector<size_t> before = room();
  batch.Reset();
  ExpectEqual(batch, AttendBatch());
  EXPECT_EQ(batch.outcome.started_us, 0);
  EXPECT_EQ(batch.launched_us, 0);
  EXPECT_EQ(room(), before);
}

TEST_F(AttendBatchTest, ALaterBatchIsThatOfAFreshRuntime) {
  ASSERT_NO_FATAL_FAILURE(RunAll());
  const std::vector<std::vector<int64_t>> jobs[] = {{{5}}, {{64, 1}, {2}}, {{3}, {3}, {30, 1}}};
  for (const auto& lengths : jobs) {
    FreshRuntime fresh;
    std::vector<std::shared_ptr<AttendJob>> here, there;
    for (const std::vector<int64_t>& job : lengths) {
      here.push_back(Job(3, job));
      there.push_back(fresh.Job(3, job));
    }
    ExpectEqual(Run(here), fresh.Run(there));
  }
}

TEST_F(AttendBatchTest, AfterAFailureABatchHoldsNothingOfTheOneThatFailed) {
  ASSERT_NO_FATAL_FAILURE(RunAll());
  engine_->fail_next = true;
  const auto started = Job(0, {500});
  const AttendBatch failed = Run({Job(0, {4}), started});
  EXPECT_EQ(failed.members.size(), 1u + (failed.outcome.jobs[1].state != State::kUntouched));
  EXPECT_EQ(failed.outcome.jobs[0].status.code(), absl::StatusCode::kInternal);
  EXPECT_FALSE(failed.outcome.engine.ok());
  const AttendBatch next = Run({Job(0, {2})});
  EXPECT_TRUE(next.outcome.engine.ok()) << "told twice";
  ASSERT_EQ(next.outcome.jobs.size(), 1u);
  EXPECT_EQ(next.outcome.jobs[0].status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(next.outcome.tokens, 0);
  EXPECT_EQ(next.outcome.sequences, 0);
  EXPECT_TRUE(next.members.empty() && next.items.empty() && next.blocks.empty());
  EXPECT_FALSE(next.launched());
}

TEST_F(AttendBatchTest, BatchesInFlightAreDifferentOnes) {
  AttendBatch* last = nullptr;
  for (int i = 0; i < 3; ++i) {
    const auto first = Job(0, {4});
    const auto second = Job(0, {5});
    AttendJob* jobs[] = {first.get()};
    AttendBatch& one = runtime_->StartBatch(jobs);
    jobs[0] = second.get();
    second->cancelled = true;  // the engine takes one batch at a time
    AttendBatch& other = runtime_->StartBatch(jobs);
    EXPECT_NE(&one, &other);
    EXPECT_EQ(one.jobs[0], first.get());
    EXPECT_EQ(runtime_->FinishBatch(other).jobs[0].status.code(), absl::StatusCode::kCancelled);
    EXPECT_TRUE(runtime_->FinishBatch(one).jobs[0].status.ok());
    EXPECT_TRUE(last == nullptr || last == &one);
    last = &one;
  }
}

}  // namespace
}  // namespace attend
