// SPDX-License-Identifier: Apache-2.0
//
// What goes into a batch, and what a session looks like after each kind of end; no arithmetic.
#include "engine/attention_runtime.h"

#include <gtest/gtest.h>

#include "tests/engine/runtime_fixture.h"

namespace attend {
namespace {

using AttentionRuntimeTest = RuntimeFixture;

TEST_F(AttentionRuntimeTest, JobsOfOneLayerShareABatchWithoutPadding) {
  auto a = Job(0, {5, 0, 3});
  auto b = Job(0, {7});
  auto c = Job(1, {2});
  AttendJob* jobs[] = {a.get(), b.get(), c.get()};
  const BatchOutcome outcome = runtime_->RunBatch(jobs);
  EXPECT_EQ(outcome.tokens, 15);
  EXPECT_EQ(outcome.sequences, 3);  // the empty one needs no work
  EXPECT_TRUE(outcome.jobs[0].status.ok());
  EXPECT_EQ(outcome.jobs[0].state, BatchOutcome::State::kEnded);
  EXPECT_EQ(outcome.jobs[1].state, BatchOutcome::State::kEnded);
  EXPECT_EQ(outcome.jobs[2].state, BatchOutcome::State::kUntouched);
  EXPECT_EQ(engine_->plans.back().query_rows, 15);
  EXPECT_EQ(engine_->plans.back().input_rows, 15);
}

TEST_F(AttentionRuntimeTest, WorkLargerThanABatchIsCutInWholeBlocks) {
  auto job = Job(0, {300});
  EXPECT_TRUE(RunOne(*job).ok());
  int64_t rows = 0;
  for (const BatchPlan& plan : engine_->plans) {
    EXPECT_LE(plan.query_rows, options_.batch_tokens);
    rows += plan.query_rows;
    EXPECT_TRUE(rows == 300 || plan.query_rows % kBlockTokens == 0);
  }
  EXPECT_EQ(rows, 300);
}

TEST_F(AttentionRuntimeTest, BidirectionalWorkLargerThanABatchAppendsEveryKeyFirst) {
  auto job = Job(3, {300});
  EXPECT_TRUE(RunOne(*job).ok());
  int64_t keys = 0;
  int64_t rows = 0;
  for (const BatchPlan& plan : engine_->plans) {
    keys += plan.key_rows;
    EXPECT_TRUE(plan.query_rows == 0 || keys == 300) << "rows attended before all keys were there";
    rows += plan.query_rows;
  }
  EXPECT_EQ(rows, 300);
}

TEST_F(AttentionRuntimeTest, AppendsGrowTheSessionAndMustNameItsLength) {
  const std::string id = Open();
  auto first = SessionJob(0, id, 0, 5);
  EXPECT_TRUE(RunOne(*first).ok());
  EXPECT_EQ(first->sequences[0].position_after, 5);
  const absl::Status less = RunOne(*SessionJob(0, id, 4, 1));
  EXPECT_EQ(less.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(RunOne(*SessionJob(0, id, 6, 1)).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Length(id), 5);
  auto rewind = SessionJob(0, id, 2, 1);
  rewind->sequences[0].rewind = true;
  EXPECT_TRUE(RunOne(*rewind).ok());
  EXPECT_EQ(Length(id), 3);
  auto ahead = SessionJob(0, id, 3, 9);
  ahead->sequences[0].no_append = true;
  EXPECT_TRUE(RunOne(*ahead).ok());
  EXPECT_EQ(ahead->sequences[0].position_after, 3);
  EXPECT_EQ(Length(id), 3);
}

TEST_F(AttentionRuntimeTest, AFailedRequestChangesNoSession) {
  const std::string good = Open();
  const std::string bad = Open();
  auto job = Job(0, {2, 2, 2});
  job->sequences[0].session_id = good;
  job->sequences[0].position = 0;
  for (int i : {1, 2}) {
    job->sequences[i].session_id = i == 1 ? bad : Open();
    job->sequences[i].position = 7;
  }
  const absl::Status status = RunOne(*job);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Length(good), 0);
  EXPECT_EQ(runtime_->Stats().kv_used_bytes, 0);
  // Detail: field 5, packed: sequences 1 and 2.
  EXPECT_NE(EncodedErrorDetail(status).find(std::string("\x2a\x02\x01\x02")), std::string::npos);
}

TEST_F(AttentionRuntimeTest, CancelDeadlineAndFaultBeforeTheBatchEndsRollBack) {
  const std::string id = Open();
  ASSERT_TRUE(RunOne(*SessionJob(0, id, 0, 3)).ok());
  const int64_t used = runtime_->Stats().kv_used_bytes;

  auto cancelled = SessionJob(0, id, 3, 100);
  engine_->on_start = [&](const auto&, auto) { cancelled->cancelled = true; };
  EXPECT_EQ(RunOne(*cancelled).code(), absl::StatusCode::kCancelled);

  auto late = SessionJob(0, id, 3, 100);
  late->deadline_us = 50;
  engine_->on_start = [&](const auto&, auto) { now_us_ = 100; };
  EXPECT_EQ(RunOne(*late).code(), absl::StatusCode::kDeadlineExceeded);

  engine_->on_start = {};
  const size_t launched = engine_->plans.size();
  auto dead = SessionJob(0, id, 3, 1);
  dead->deadline_us = 99;
  EXPECT_EQ(RunOne(*dead).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(engine_->plans.size(), launched) << "dead work was launched";

  engine_->fail_next = true;
  EXPECT_EQ(RunOne(*SessionJob(0, id, 3, 1)).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(Length(id), 3);
  EXPECT_EQ(runtime_->Stats().kv_used_bytes, used);
}

TEST_F(AttentionRuntimeTest, AJobThatDiesWhileItsBatchIsPreparedIsNotLaunched) {
  const std::string id = Open();
  auto dying = SessionJob(0, id, 0, 4);
  auto living = Job(0, {3});
  AttendJob* jobs[] = {dying.get(), living.get()};
  now_us_ = 0;
  step_us_ = 10;
  dying->deadline_us = 35;  // alive when it is added, dead before the launch
  const BatchOutcome outcome = runtime_->RunBatch(jobs);
  step_us_ = 0;
  EXPECT_EQ(outcome.jobs[0].status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(outcome.jobs[1].status.ok());
  EXPECT_EQ(outcome.launched_late, 0);
  ASSERT_EQ(engine_->plans.size(), 1u);
  EXPECT_EQ(engine_->plans[0].query_rows, 3);
  EXPECT_EQ(Length(id), 0);
}

TEST_F(AttentionRuntimeTest, JobsThatTogetherExceedTheScratchAllEnd) {
  // Each sequence takes 6 MiB / 10 of scratch; both jobs need far more than there is.
  std::vector<std::shared_ptr<AttendJob>> waiting = {
      Job(0, std::vector<int64_t>(60, 3000)), Job(0, std::vector<int64_t>(60, 3000)),
      Job(0, std::vector<int64_t>(30000, 1)), Job(0, std::vector<int64_t>(30000, 1))};
  size_t batches = 0;
  while (!waiting.empty()) {
    ASSERT_LT(++batches, 20000u) << "no job ever ends";
    const std::shared_ptr<AttendJob> job = waiting.front();
    waiting.erase(waiting.begin());
    AttendJob* jobs[] = {job.get()};
    const BatchOutcome outcome = runtime_->RunBatch(jobs);
    if (outcome.jobs[0].state != BatchOutcome::State::kEnded) {
      waiting.push_back(job);
    } else {
      EXPECT_TRUE(outcome.jobs[0].status.ok());
    }
  }
}

TEST_F(AttentionRuntimeTest, ARewindOfMoreSessionsThanScratchHoldsStillWorks) {
  auto job =
      Job(0, std::vector<int64_t>(700, 1));  // 700 undo copies of 2 KiB in 2 MiB of scratch ...
  for (SequenceJob& sequence : job->sequences) {
    sequence.session_id = Open({"0"});
    sequence.position = 0;
  }
  auto again = Job(0, std::vector<int64_t>(700, 1));
  auto ahead = Job(0, std::vector<int64_t>(700, 1));
  for (size_t i = 0; i < 700; ++i) {
    for (const auto& other : {again, ahead}) {
      other->sequences[i].session_id = job->sequences[i].session_id;
      other->sequences[i].position = 0;
      other->sequences[i].rewind = true;
    }
    ahead->sequences[i].no_append = true;
  }
  ASSERT_TRUE(RunOne(*job).ok());
  // ... of which a stateless job holds a part.
  auto holder = Job(0, {8000});
  AttendJob* jobs[] = {holder.get()};
  ASSERT_EQ(runtime_->RunBatch(jobs).jobs[0].state, BatchOutcome::State::kContinues);
  EXPECT_TRUE(RunOne(*again).ok());
  EXPECT_TRUE(RunOne(*ahead).ok());
  EXPECT_TRUE(RunOne(*holder).ok());
}

TEST_F(AttentionRuntimeTest, ACacheThatIsFullSaysSoAndServesOthers) {
  const std::string id = Open();
  auto job = SessionJob(0, id, 0, (1 << 15) + 1);
  // Not one row is computed: the blocks are reserved first.
  EXPECT_EQ(RunOne(*job).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Length(id), 0);
  EXPECT_TRUE(RunOne(*SessionJob(0, id, 0, 10)).ok());
}

TEST_F(AttentionRuntimeTest, ExpiredSessionsMakeRoomBeforeTheCacheIsCalledFull) {
  const std::string old = Open();
  const int64_t fits = (1 << 15) / 2;  // half of the cache
  ASSERT_TRUE(RunOne(*SessionJob(0, old, 0, fits)).ok());
  now_us_ = (options_.session_ttl_seconds + 1) * 1000000;
  const std::string fresh = Open();
  auto job = SessionJob(0, fresh, 0, fits + 640);
  job->arrival_us = now_us_;
  job->deadline_us = now_us_ + 1000;
  EXPECT_TRUE(RunOne(*job).ok());
  EXPECT_EQ(runtime_->Stats().sessions_expired, 1);
}

TEST_F(AttentionRuntimeTest, ASessionWithAQueuedOrRunningCallDoesNotExpire) {
  const std::string id = Open();
  bool pinned = true;
  runtime_->SetPinned([&](const std::string&) { return pinned; });
  now_us_ = (options_.session_ttl_seconds + 1) * 1000000;
  runtime_->ExpireSessions();
  EXPECT_TRUE(runtime_->GetSession(id).ok());
  pinned = false;
  runtime_->ExpireSessions();
  EXPECT_EQ(runtime_->GetSession(id).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(AttentionRuntimeTest, MaxTokensIsAQuota) {
  const std::string id = Open({}, 10);
  EXPECT_TRUE(RunOne(*SessionJob(0, id, 0, 10)).ok());
  const absl::Status status = RunOne(*SessionJob(0, id, 10, 1));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(status.message()).find("at most max_tokens 10"), std::string::npos);
}

TEST_F(AttentionRuntimeTest, CrossContextIsComputedOnceAndMustStayTheSame) {
  const std::string id = Open();
  const auto call = [&](bool brings, uint64_t hash) {
    auto job = Job(2, {2});
    SequenceJob& sequence = job->sequences[0];
    sequence.session_id = id;
    if (brings) {
      sequence.has_keys = true;
      sequence.keys = 2;
      sequence.key_source = sequence.query;
      sequence.context_hash = {hash, 0};
    }
    return job;
  };
  EXPECT_EQ(RunOne(*call(false, 0)).code(), absl::StatusCode::kFailedPrecondition);
  auto first = call(true, 1);
  EXPECT_TRUE(RunOne(*first).ok());
  EXPECT_EQ(first->sequences[0].position_after, 2);
  EXPECT_EQ(engine_->plans.back().key_rows, 2);
  EXPECT_TRUE(RunOne(*call(false, 0)).ok());
  EXPECT_EQ(engine_->plans.back().key_rows, 0);
  EXPECT_TRUE(RunOne(*call(true, 1)).ok());
  EXPECT_EQ(engine_->plans.back().key_rows, 0);
  EXPECT_EQ(RunOne(*call(true, 2)).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(AttentionRuntimeTest, AnAnswerAboveTheLimitIsRefusedBeforeAnythingIsAppended) {
  const std::string id = Open();
  auto job = SessionJob(0, id, 0, 5);
  job->response_bytes_limit = 5 * kWidth * 4 - 1;
  const absl::Status status = RunOne(*job);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(status.message()).find("80 bytes"), std::string::npos);
  EXPECT_EQ(Length(id), 0);
  EXPECT_TRUE(engine_->plans.empty());
}

TEST_F(AttentionRuntimeTest, ForkTruncateAndCloseKeepTheBooks) {
  const std::string id = Open();
  ASSERT_TRUE(RunOne(*SessionJob(0, id, 0, 100)).ok());
  const int64_t used = runtime_->Stats().kv_used_bytes;
  const SessionState fork = *runtime_->ForkSession(id, 50);
  EXPECT_EQ(fork.length, 50);
  EXPECT_EQ(runtime_->Stats().kv_used_bytes, used) << "a fork shares its blocks";
  EXPECT_EQ(runtime_->TruncateSession(id, 101).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(runtime_->TruncateSession(id, 7)->length, 7);
  EXPECT_TRUE(runtime_->CloseSession(id).ok());
  EXPECT_EQ(runtime_->CloseSession(id).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(runtime_->CloseSession(fork.id).ok());
  EXPECT_EQ(runtime_->Stats().kv_used_bytes, 0);
}

TEST_F(AttentionRuntimeTest, OpenSessionRefusesWhatKeepsNoHistory) {
  OpenSessionArguments arguments;
  arguments.model = 0;
  arguments.layers = {"3"};
  EXPECT_EQ(runtime_->OpenSession(arguments).status().code(), absl::StatusCode::kNotFound);
  arguments.layers = {"0", "0"};
  EXPECT_EQ(runtime_->OpenSession(arguments).status().code(), absl::StatusCode::kInvalidArgument);
  arguments.layers = {};
  arguments.ttl_seconds = -1;
  EXPECT_EQ(runtime_->OpenSession(arguments).status().code(), absl::StatusCode::kInvalidArgument);
  arguments.ttl_seconds = 1 << 30;
  EXPECT_EQ(runtime_->OpenSession(arguments)->ttl_seconds, options_.session_ttl_cap_seconds);
}

}  // namespace
}  // namespace attend
