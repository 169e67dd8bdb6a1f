// SPDX-License-Identifier: Apache-2.0
//
// The engine thread with real threads around it; arithmetic is left out (MemoryEngine).
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "tests/server/batcher_fixture.h"

namespace attend {
namespace {

using BatcherTest = BatcherFixture;

TEST_F(BatcherTest, WorkThatGatheredWhileTheEngineWasBusySharesABatch) {
  std::vector<std::future<absl::Status>> answers;
  for (int i = 0; i < 8; ++i) answers.push_back(Submit(Job(3)));  // before the thread runs
  batcher_->Start();
  for (auto& answer : answers) EXPECT_TRUE(answer.get().ok());
  EXPECT_EQ(batches_.load(), 1);
  while (!batcher_->idle())
    std::this_thread::yield();  // hangs, and is ended by ctest, if it never is
}

TEST_F(BatcherTest, ManyThreadsGetEveryAnswerExactlyOnce) {
  batcher_->Start();
  std::atomic<int> answered{0};
  std::vector<std::thread> clients;
  for (int c = 0; c < 4; ++c) {
    clients.emplace_back([&] {
      const std::string session = Open();
      for (int i = 0; i < 50; ++i) {
        EXPECT_GE(batcher_->Stats().queue_requests, 0);
        EXPECT_TRUE(Submit(Job(1 + i % 100)).get().ok());
        EXPECT_TRUE(Submit(Job(1, session, i)).get().ok());
        answered.fetch_add(2);
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(answered.load(), 400);
  while (!batcher_->idle())
    std::this_thread::yield();  // hangs, and is ended by ctest, if it never is
}

TEST_F(BatcherTest, PipelinedAppendsOfASessionRunInOrderAndASessionCallWaitsForThem) {
  batcher_->Start();
  const std::string session = Open();
  std::vector<std::future<absl::Status>> answers;
  for (int i = 0; i < 20; ++i) answers.push_back(Submit(Job(10, session, 10 * i)));
  auto length = std::make_shared<std::promise<int64_t>>();
  batcher_->SubmitControl(
      session,
      [length, session](AttentionRuntime& runtime) {
        length->set_value(runtime.TruncateSession(session, 5)->length);
      },
      [](absl::Status) {});
  answers.push_back(Submit(Job(1, session, 5)));
  for (auto& answer : answers) EXPECT_TRUE(answer.get().ok());
  EXPECT_EQ(length->get_future().get(), 5);
}

TEST_F(BatcherTest, AJobIsQueuedUntilItsFirstBatchAndRunsFromThenOnBetweenBatchesToo) {
  const auto expect = [this](int64_t queue_requests, int64_t queue_tokens, int64_t running) {
    const BatcherStats stats = batcher_->Stats();
    EXPECT_EQ(stats.queue_requests, queue_requests);
    EXPECT_EQ(stats.queue_tokens, queue_tokens);
    EXPECT_EQ(stats.running_requests, running);
  };
  std::vector<std::future<absl::Status>> answers;
  answers.push_back(Submit(Job(640)));  // ten batches or more
  expect(1, 640, 0);
  std::promise<void> controlled;
  batcher_->SubmitControl(
      "",
      [&](AttentionRuntime&) {  // between two batches of the long job
        expect(1, 3, 1);
        controlled.set_value();
      },
      [](absl::Status) {});
  expect(1, 640, 0);                  // a session call is no request of the engine
  answers.push_back(Submit(Job(3)));  // joins the second batch
  expect(2, 643, 0);
  int batch = 0;
  engine_->on_start = [&](const auto&, auto) {
    if (batch++ == 0) expect(1, 3, 1);
    if (batch > 3) expect(0, 0, 1);
  };
  batcher_->Start();
  controlled.get_future().wait();
  for (auto& answer : answers) EXPECT_TRUE(answer.get().ok());
  EXPECT_GE(batch, 10);
  while (!batcher_->idle()) std::this_thread::yield();
  expect(0, 0, 0);
}

TEST_F(BatcherTest, ALongJobNeverCountsAsQueuedAgainWhoeverLooksWhen) {
  std::promise<void> begun;
  std::atomic<int> starts{0};
  engine_->on_start = [&](const auto&, auto) {
    if (starts.fetch_add(1) == 0) begun.set_value();
  };
  std::atomic<bool> answered{false};
  std::promise<absl::Status> status;
  batcher_->Submit(Job(20000), [&](absl::Status ended) {
    answered.store(true);
    status.set_value(std::move(ended));
  });
  batcher_->Start();
  begun.get_future().wait();
  for (int looks = 0; !answered.load(); ++looks) {
    const BatcherStats stats = batcher_->Stats();
    EXPECT_EQ(stats.queue_requests + stats.queue_tokens, 0) << looks;
    EXPECT_LE(stats.running_requests, 1);
    if (stats.running_requests == 0) break;  // it has ended and is being answered
  }
  EXPECT_TRUE(status.get_future().get().ok());
  EXPECT_GT(starts.load(), 100);
}

TEST_F(BatcherTest, JobsThatEndWaitingLeaveTheCountsToo) {
  auto cancelled = Job(5);
  cancelled->cancelled = true;
  auto first = Submit(cancelled);
  EXPECT_EQ(batcher_->Stats().queue_tokens, 5);
  batcher_->Start();
  EXPECT_FALSE(first.get().ok());
  const BatcherStats stats = batcher_->Stats();
  EXPECT_EQ(stats.queue_requests, 0);
  EXPECT_EQ(stats.queue_tokens, 0);
  EXPECT_EQ(stats.running_requests, 0);
}

TEST_F(BatcherTest, DeadWorkIsEndedWithoutBeingLaunched) {
  auto cancelled = Job(1);
  cancelled->cancelled = true;
  auto late = Job(1);
  late->deadline_us = NowUs() - 1;
  auto first = Submit(cancelled);
  auto second = Submit(late);
  batcher_->Start();
  EXPECT_EQ(first.get().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(second.get().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(engine_->plans.empty());
}

TEST_F(BatcherTest, ABatchIsNoLargerThanTheEngineGainsFrom) {
  engine_->set_enough_rows(4);
  std::vector<std::future<absl::Status>> answers;
  for (int64_t rows : {3, 3, 3, 9, 1}) answers.push_back(Submit(Job(rows)));
  batcher_->Start();
  for (auto& answer : answers) EXPECT_TRUE(answer.get().ok());
  std::vector<int64_t> rows;
  for (const BatchPlan& plan : engine_->plans) rows.push_back(plan.query_rows);
  EXPECT_EQ(rows, (std::vector<int64_t>{6, 12, 1}));
}

// The first batch tells that a row takes a second. The second job would be late.
TEST_F(BatcherTest, WhoCannotBeAnsweredInTimeLetsThoseGoFirstWhoCan) {
  engine_->set_enough_rows(1);
  engine_->times.attend_us = 1'000'000;
  std::vector<std::future<absl::Status>> answers;
  answers.push_back(Submit(Job(1)));
  std::shared_ptr<AttendJob> late = Job(20);
  late->deadline_us = late->arrival_us + 15'000'000;
  answers.push_back(Submit(late));
  for (int64_t rows : {3, 4}) answers.push_back(Submit(Job(rows)));
  batcher_->Start();
  for (auto& answer : answers) EXPECT_TRUE(answer.get().ok());
  std::vector<int64_t> rows;
  for (const BatchPlan& plan : engine_->plans) rows.push_back(plan.query_rows);
  EXPECT_EQ(rows, (std::vector<int64_t>{1, 3, 4, 20}));
}

// As above, in a session.
TEST_F(BatcherTest, WhoCannotBeAnsweredInTimeStillGoesBeforeLaterCallsOfItsSession) {
  engine_->set_enough_rows(1);
  engine_->times.attend_us = 1'000'000;
  batcher_->Start();
  const std::string session = Open();
  std::promise<void> entered;
  std::promise<void> leave;
  engine_->on_start = [&](const auto&, auto) {
    if (engine_->plans.size() > 1) return;
    entered.set_value();
    leave.get_future().wait();
  };
  std::vector<std::future<absl::Status>> answers;
  answers.push_back(Submit(Job(1)));
  entered.get_future().wait();
  std::shared_ptr<AttendJob> late = Job(20, session, 0);
  late->deadline_us = late->arrival_us + 15'000'000;
  answers.push_back(Submit(late));
  answers.push_back(Submit(Job(2, session, 20)));
  answers.push_back(Submit(Job(4)));
  leave.set_value();
  for (auto& answer : answers) EXPECT_TRUE(answer.get().ok());
  std::vector<int64_t> rows;
  for (const BatchPlan& plan : engine_->plans) rows.push_back(plan.query_rows);
  EXPECT_EQ(rows, (std::vector<int64_t>{1, 4, 20, 2}));
}

TEST_F(BatcherTest, AnEngineFaultFailsItsBatchAndEveryLaterOne) {
  engine_->fail_next = true;
  batcher_->Start();
  EXPECT_EQ(Submit(Job(1)).get().code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(batcher_->engine_failed());
  engine_->fail_next = false;
  EXPECT_EQ(Submit(Job(1)).get().code(), absl::StatusCode::kInternal);
}

TEST_F(BatcherTest, StopEndsWhatWaitsWithItsReasonAndRefusesLaterWork) {
  std::vector<std::future<absl::Status>> answers;
  std::promise<void> entered;
  std::promise<void> leave;
  std::atomic<bool> first{true};
  engine_->on_start = [&](const auto&, auto) {
    if (!first.exchange(false)) return;
    entered.set_value();
    leave.get_future().wait();
  };
  answers.push_back(Submit(Job(64)));
  batcher_->Start();
  entered.get_future().wait();
  answers.push_back(Submit(Job(64)));
  std::thread stopper([&] { batcher_->Stop(absl::UnavailableError("over")); });
  leave.set_value();
  stopper.join();
  EXPECT_TRUE(answers[0].get().ok());
  const absl::Status waiting = answers[1].get();
  EXPECT_TRUE(waiting.ok() || absl::IsUnavailable(waiting));
  EXPECT_TRUE(absl::IsUnavailable(Submit(Job(1)).get()));
}

}  // namespace
}  // namespace attend
