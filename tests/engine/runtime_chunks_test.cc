// SPDX-License-Identifier: Apache-2.0
//
// How long work is cut beside appends, on a clock that the engine's batches move.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "tests/engine/runtime_fixture.h"
#include "tests/support/seed.h"

namespace attend {
namespace {

using State = BatchOutcome::State;

class RuntimeChunksTest : public RuntimeFixture {
 protected:
  explicit RuntimeChunksTest(int64_t batch_tokens = 128) : RuntimeFixture(1, 0, batch_tokens) {
    engine_->on_start = [this](const BatchPlan& plan, std::span<const AttendItem>) {
      rows_.push_back(std::max(plan.query_rows, plan.key_rows));
      engine_->times = {batch_us_ + row_us_ * rows_.back(), 0, 0};
      now_us_ += engine_->times.project_us;
    };
  }

  // Until both rates are known.
  void Warm() {
    for (int i = 0; i < 30; ++i) {
      EXPECT_TRUE(RunOne(*Job(0, {1})).ok());
      EXPECT_TRUE(RunOne(*Job(0, {128})).ok());
    }
    now_us_ += 10'000'000;
    rows_.clear();
  }

  BatchOutcome Run(std::vector<AttendJob*> jobs) { return runtime_->RunBatch(jobs); }
  std::shared_ptr<AttendJob> Append() {
    if (session_.empty()) session_ = Open();
    return SessionJob(0, session_, appended_++, 1);
  }

  int64_t batch_us_ = 300;
  int64_t row_us_ = 200;
  std::vector<int64_t> rows_;  // of every batch
  std::string session_;
  int64_t appended_ = 0;
};

TEST_F(RuntimeChunksTest, AloneWorkRunsInWholeBatches) {
  Warm();
  EXPECT_TRUE(RunOne(*Job(0, {640})).ok());
  EXPECT_EQ(rows_, std::vector<int64_t>(5, 128));
}

TEST_F(RuntimeChunksTest, BesideAppendsWorkRunsInChunksUntilTheyHaveStopped) {
  Warm();
  auto prefill = Job(0, {1000});
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(RunOne(*Append()).ok());
    EXPECT_EQ(Run({prefill.get()}).jobs[0].state, State::kContinues);
    EXPECT_GE(rows_.back(), 12);  // of 5 ms
    EXPECT_LE(rows_.back(), 25);
  }
  now_us_ += 499'000 - 10'000;
  Run({prefill.get()});
  EXPECT_LE(rows_.back(), 25);
  now_us_ += 500'000;
  Run({prefill.get()});
  EXPECT_EQ(rows_.back(), 128);
}

TEST_F(RuntimeChunksTest, SmallWorkOfOneBatchIsCutToo) {
  Warm();
  EXPECT_FALSE(runtime_->NeedsChunks(*Job(0, {100})));
  EXPECT_TRUE(runtime_->NeedsChunks(*Job(0, {129}))) << "more than a batch";
  EXPECT_TRUE(RunOne(*Append()).ok());
  EXPECT_TRUE(runtime_->NeedsChunks(*Job(0, {100}))) << "20 ms, though it fits into a batch";
  EXPECT_FALSE(runtime_->NeedsChunks(*Job(0, {17})));
  EXPECT_FALSE(runtime_->NeedsChunks(*Job(0, std::vector<int64_t>(100, 1)))) << "a decode step";
  auto job = Job(0, {100});
  EXPECT_EQ(Run({job.get()}).jobs[0].state, State::kContinues);
  auto unknown = SessionJob(0, "nobody", 0, 100);
  EXPECT_FALSE(runtime_->NeedsChunks(*unknown));
}

class LargeBatchTest : public RuntimeChunksTest {
 protected:
  LargeBatchTest() : RuntimeChunksTest(4096) {}
};

TEST_F(LargeBatchTest, ManyShortSequencesAreCutForTimeAsLongOnesAre) {
  Warm();
  EXPECT_TRUE(RunOne(*Append()).ok());
  EXPECT_FALSE(runtime_->NeedsChunks(*Job(0, std::vector<int64_t>(128, 1))));
  auto many = Job(0, std::vector<int64_t>(200, 1));
  EXPECT_TRUE(runtime_->NeedsChunks(*many)) << "40 ms";
  EXPECT_EQ(Run({many.get()}).jobs[0].state, State::kContinues);
  EXPECT_LE(rows_.back(), 25);  // of 5 ms
}

TEST_F(RuntimeChunksTest, AChunkOfLongWorkSharesNoBatchWithShortWork) {
  row_us_ = 50;  // a block of rows would have time beside the append
  Warm();
  auto append = Append();
  auto prefill = Job(0, {1000});
  const BatchOutcome outcome = Run({append.get(), prefill.get()});
  EXPECT_EQ(outcome.jobs[0].state, State::kEnded);
  EXPECT_EQ(outcome.jobs[1].state, State::kUntouched);
  EXPECT_EQ(rows_.back(), 1);
}

TEST_F(RuntimeChunksTest, AStepOfManySessionsIsOneBatchHoweverShortAChunkIs) {
  Warm();
  batch_us_ = 50'000;
  std::vector<std::shared_ptr<AttendJob>> steps;
  std::vector<AttendJob*> jobs;
  for (int i = 0; i < 100; ++i) {
    steps.push_back(SessionJob(0, Open(), 0, 1));
    jobs.push_back(steps.back().get());
  }
  for (const BatchOutcome::Job& job : Run(jobs).jobs) EXPECT_EQ(job.state, State::kEnded);
  EXPECT_EQ(rows_, std::vector<int64_t>{100});
}

TEST_F(RuntimeChunksTest, WhereARowTakesLongerThanAChunkItTakesTwiceThatAndTheWorkEnds) {
  batch_us_ = 20'000;
  row_us_ = 20'000;
  Warm();
  auto prefill = Job(0, {40});
  for (int batches = 0;; ++batches) {
    ASSERT_LT(batches, 60);
    EXPECT_TRUE(RunOne(*Append()).ok());
    const BatchOutcome outcome = Run({prefill.get()});
    EXPECT_LE(rows_.back(), 4);  // 100 ms
    if (batches == 0) {
      EXPECT_GE(rows_.back(), 2);  // 60 ms
    }
    if (outcome.jobs[0].state == State::kEnded) break;
  }
}

// A chunk of keys alone reads a part of the weights and has time for more than that.
TEST_F(RuntimeChunksTest, WhereTheWeightsTakeLongerThanAChunkKeysComeInManyRowsToo) {
  batch_us_ = 17'600;
  row_us_ = 100;
  Warm();
  auto request = Job(3, {400});
  EXPECT_TRUE(RunOne(*Append()).ok());
  Run({request.get()});
  EXPECT_GE(rows_.back(), 16);
}

// What a client claims to have cached is looked at before it is checked.
TEST_F(RuntimeChunksTest, AnAbsurdPositionIsRefusedAndCountsForNothing) {
  Warm();
  EXPECT_TRUE(RunOne(*Append()).ok());
  for (const int64_t position : {std::numeric_limits<int64_t>::max(), int64_t{1} << 40}) {
    auto job = SessionJob(0, session_, position, 17);
    EXPECT_FALSE(runtime_->NeedsChunks(*job));
    EXPECT_EQ(RunOne(*job).code(), absl::StatusCode::kFailedPrecondition);
  }
}

TEST_F(RuntimeChunksTest, TheFirstChunkOfAllIsAMeasureButNoLonger) {
  row_us_ = 20'000;  // the engine is far slower than anything guessed before it was timed
  EXPECT_TRUE(RunOne(*Append()).ok());
  auto prefill = Job(0, {100});
  std::vector<int64_t> cut;
  for (int i = 0; i < 6; ++i) {
    Run({prefill.get()});
    cut.push_back(rows_.back());
    EXPECT_TRUE(RunOne(*Append()).ok());
  }
  EXPECT_GE(cut.front(), 32);
  EXPECT_LE(cut.back(), 2);
}

TEST_F(RuntimeChunksTest, EverySequenceOfALongRequestHasItsTurn) {
  Warm();
  auto request = Job(3, {200, 0, 90, 1, 64});  // bidirectional: keys first
  int64_t query_rows = 0;
  engine_->on_start = [&](const BatchPlan& plan, std::span<const AttendItem>) {
    query_rows += plan.query_rows;
    now_us_ += batch_us_ + row_us_ * std::max(plan.query_rows, plan.key_rows);
  };
  for (int batches = 0;; ++batches) {
    ASSERT_LT(batches, 1000);
    EXPECT_TRUE(RunOne(*Append()).ok());
    if (Run({request.get()}).jobs[0].state == State::kEnded) break;
  }
  EXPECT_EQ(query_rows - appended_, 355);
}

}  // namespace
}  // namespace attend
