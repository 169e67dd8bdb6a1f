// SPDX-License-Identifier: Apache-2.0
//
// The engine thread with two batches in flight: the engine's batches end when the test lets them.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/server/batcher_fixture.h"

namespace attend {
namespace {

using Answer = std::future<absl::Status>;

bool Ready(Answer& answer) {
  return answer.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

class BatcherPipelineTest : public BatcherFixture {
 protected:
  BatcherPipelineTest() : BatcherFixture(2) {}
  ~BatcherPipelineTest() override { Release(); }

  // Hangs, and is ended by ctest, if it never happens.
  void AwaitStarts(Ticket count) {
    while (engine_->started.load() < count) std::this_thread::yield();
  }
  void Hold() { engine_->released = 0; }
  void Release(Ticket upto = std::numeric_limits<Ticket>::max()) { engine_->released = upto; }
};

TEST_F(BatcherPipelineTest, TheNextBatchStartsWhileOneRunsAndTheThirdGathers) {
  Hold();
  batcher_->Start();
  std::vector<Answer> answers;
  answers.push_back(Submit(Job(3)));
  AwaitStarts(1);  // an idle engine starts at once
  answers.push_back(Submit(Job(4)));
  AwaitStarts(2);  // work that arrives later does not wait for the first batch either
  EXPECT_EQ(engine_->waited.load(), 0);
  for (int i = 0; i < 5; ++i) answers.push_back(Submit(Job(2)));
  EXPECT_EQ(engine_->started.load(), 2);
  EXPECT_EQ(batcher_->Stats().queue_requests, 5);
  EXPECT_EQ(batcher_->Stats().running_requests, 2);
  Release(1);
  EXPECT_TRUE(answers[0].get().ok());
  AwaitStarts(3);
  EXPECT_FALSE(Ready(answers[1]));
  Release();
  for (size_t i = 1; i < answers.size(); ++i) EXPECT_TRUE(answers[i].get().ok());
  EXPECT_EQ(engine_->started.load(), 3);
  EXPECT_EQ(batches_.load(), 3);  // seen by the observer
  while (!batcher_->idle()) std::this_thread::yield();
}

TEST_F(BatcherPipelineTest, WorkForTwoBatchesStartsBothAtOnce) {
  Hold();
  std::vector<Answer> answers;
  for (int i = 0; i < 3; ++i) answers.push_back(Submit(Job(60)));  // two do not fit into one
  batcher_->Start();
  AwaitStarts(2);  // nothing else arrives
  Release();
  for (Answer& answer : answers) EXPECT_TRUE(answer.get().ok());
}

TEST_F(BatcherPipelineTest, AnswersComeInTheOrderOfTheBatches) {
  Hold();
  batcher_->Start();
  std::mutex mutex;
  std::vector<int> order;
  std::promise<void> last;
  for (int i = 0; i < 6; ++i) {
    batcher_->Submit(Job(60), [&, i](absl::Status status) {  // two do not fit into one batch
      EXPECT_TRUE(status.ok());
      std::lock_guard<std::mutex> lock(mutex);
      order.push_back(i);
      if (order.size() == 6) last.set_value();
    });
    if (i == 0) AwaitStarts(1);
  }
  Release();
  last.get_future().wait();
  std::lock_guard<std::mutex> lock(mutex);
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4, 5}));
}

class BatcherWorkspaceTest : public BatcherFixture {
 protected:
  BatcherWorkspaceTest() : BatcherFixture(2, 3 * 4300) {}  // of three jobs of one row
};

TEST_F(BatcherWorkspaceTest, JobsForWhichABatchHasNoBytesKeepTheirOrder) {
  std::mutex mutex;
  std::vector<int> order;
  std::promise<void> last;
  for (int i = 0; i < 20; ++i) {
    batcher_->Submit(Job(1), [&, i](absl::Status status) {
      EXPECT_TRUE(status.ok());
      std::lock_guard<std::mutex> lock(mutex);
      order.push_back(i);
      if (order.size() == 20) last.set_value();
    });
  }
  batcher_->Start();
  last.get_future().wait();
  std::lock_guard<std::mutex> lock(mutex);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
  EXPECT_EQ(engine_->started.load(), 7);
}

TEST_F(BatcherPipelineTest, AppendsAndCallsOfASessionWaitForItsRunningBatch) {
  batcher_->Start();
  const std::string session = Open();
  Hold();
  std::vector<Answer> answers;
  answers.push_back(Submit(Job(10, session, 0)));
  AwaitStarts(1);
  answers.push_back(Submit(Job(10, session, 10)));
  std::atomic<bool> truncated{false};
  batcher_->SubmitControl(
      session,
      [&](AttentionRuntime& runtime) {
        truncated = true;
        EXPECT_EQ(runtime.TruncateSession(session, 15)->length, 15);
      },
      [](absl::Status) {});
  answers.push_back(Submit(Job(1, session, 15)));
  // Work and calls of others go on; they come later, so that the session's had their chance.
  const std::string other = Open();
  answers.push_back(Submit(Job(1, other, 0)));
  AwaitStarts(2);
  EXPECT_EQ(engine_->plans[1].query_rows, 1);
  EXPECT_FALSE(truncated.load());
  Release();
  for (Answer& answer : answers) EXPECT_TRUE(answer.get().ok());
  EXPECT_TRUE(truncated.load());
}

TEST_F(BatcherPipelineTest, AChunkedJobIsInOneBatchAtATimeAndOthersRunBeside) {
  Hold();
  batcher_->Start();
  Answer chunked = Submit(Job(640));
  AwaitStarts(1);
  Answer beside = Submit(Job(5));
  AwaitStarts(2);
  EXPECT_EQ(engine_->plans[1].query_rows, 5);
  Release(1);
  AwaitStarts(3);  // its second chunk, beside the other job
  EXPECT_FALSE(Ready(beside));
  Release();
  EXPECT_TRUE(beside.get().ok());
  EXPECT_TRUE(chunked.get().ok());
}

TEST_F(BatcherPipelineTest, WorkThatWaitsForTheScratchOfOtherWorkGetsItWhenThatHasEnded) {
  std::vector<Answer> answers;
  for (int i = 0; i < 4; ++i) answers.push_back(Submit(Job(20000)));  // each more than half of it
  answers.push_back(Submit(Job(3)));
  batcher_->Start();
  for (Answer& answer : answers) EXPECT_TRUE(answer.get().ok());
}

TEST_F(BatcherPipelineTest, CancelAndDeadlineInTheSecondBatch) {
  batcher_->Start();
  const std::string session = Open();
  Hold();
  Answer first = Submit(Job(1));
  AwaitStarts(1);
  auto cancelled = Job(3, session, 0);
  Answer second = Submit(cancelled);
  AwaitStarts(2);
  auto late = Job(1);
  late->deadline_us = NowUs() + 1000;
  Answer third = Submit(late);  // gathers until it is dead
  cancelled->cancelled = true;
  batcher_->Wake();
  while (NowUs() <= late->deadline_us) std::this_thread::yield();
  EXPECT_FALSE(Ready(second)) << "answered while the engine had its memory";
  Release();
  EXPECT_TRUE(first.get().ok());
  EXPECT_EQ(second.get().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(third.get().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(engine_->started.load(), 2);
  EXPECT_TRUE(Submit(Job(1, session, 0)).get().ok());  // nothing was appended
}

TEST_F(BatcherPipelineTest, AFaultInTheFirstBatchAnswersBothAndAllThatWaits) {
  batcher_->Start();
  const std::string session = Open();
  Hold();
  engine_->fail_wait = 1;
  std::vector<Answer> answers;
  answers.push_back(Submit(Job(1, session, 0)));
  AwaitStarts(1);
  answers.push_back(Submit(Job(2)));
  AwaitStarts(2);
  answers.push_back(Submit(Job(3)));
  std::promise<absl::Status> control;
  batcher_->SubmitControl(
      session, [&](AttentionRuntime&) { control.set_value(absl::OkStatus()); },
      [&](absl::Status status) { control.set_value(std::move(status)); });
  Release();
  for (Answer& answer : answers) EXPECT_EQ(answer.get().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(control.get_future().get().code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(batcher_->engine_failed());
  EXPECT_EQ(Submit(Job(1)).get().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(engine_->started.load(), 2);
}

TEST_F(BatcherPipelineTest, AFaultInTheSecondBatchLeavesTheFirstItsAnswer) {
  Hold();
  engine_->fail_wait = 2;
  batcher_->Start();
  Answer first = Submit(Job(1));
  AwaitStarts(1);
  Answer second = Submit(Job(2));
  AwaitStarts(2);
  Release();
  EXPECT_TRUE(first.get().ok());
  EXPECT_EQ(second.get().code(), absl::StatusCode::kInternal);
}

TEST_F(BatcherPipelineTest, StopAwaitsBothBatchesAndEndsWhatGathered) {
  Hold();
  batcher_->Start();
  Answer first = Submit(Job(1));
  AwaitStarts(1);
  Answer second = Submit(Job(2));
  AwaitStarts(2);
  Answer third = Submit(Job(3));
  std::thread stopper([&] { batcher_->Stop(absl::UnavailableError("over")); });
  std::vector<Answer> later;
  do {
    later.push_back(Submit(Job(1)));
  } while (!Ready(later.back()));  // refused at once: it is stopping
  EXPECT_FALSE(Ready(first));
  Release();
  stopper.join();
  EXPECT_TRUE(first.get().ok());
  EXPECT_TRUE(second.get().ok());
  EXPECT_TRUE(absl::IsUnavailable(third.get()));
  for (Answer& answer : later) EXPECT_TRUE(absl::IsUnavailable(answer.get()));
}

TEST_F(BatcherPipelineTest, ManyThreadsGetEveryAnswerExactlyOnce) {
  batcher_->Start();
  std::atomic<int> answered{0};
  std::vector<std::thread> clients;
  for (int c = 0; c < 4; ++c) {
    clients.emplace_back([&] {
      const std::string session = Open();
      for (int i = 0; i < 50; ++i) {
        EXPECT_TRUE(Submit(Job(1 + i % 100)).get().ok());
        Answer append = Submit(Job(1, session, i));
        auto cancelled = Job(1 + i);
        Answer maybe = Submit(cancelled);
        cancelled->cancelled = true;
        batcher_->Wake();
        EXPECT_TRUE(append.get().ok());
        const absl::Status status = maybe.get();
        EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
        answered.fetch_add(1);
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(answered.load(), 200);
  while (!batcher_->idle()) std::this_thread::yield();
}

}  // namespace
}  // namespace attend
