// SPDX-License-Identifier: Apache-2.0
//
// The engine thread with real threads around it; arithmetic is left out (MemoryEngine).
#include "server/batcher.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "tests/support/memory_engine.h"

namespace attend {
namespace {

constexpr int64_t kBytes = 1 << 20;

int64_t NowUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class BatcherTest : public ::testing::Test {
 protected:
  BatcherTest() {
    RuntimeOptions options;
    options.engine.kv_bytes = options.engine.scratch_bytes = kBytes;
    options.replica = "r";
    options.start = "1";
    options.batch_tokens = 64;
    auto engine = std::make_unique<MemoryEngine>(2 * kBytes);
    engine_ = engine.get();
    runtime_ = std::make_unique<AttentionRuntime>(options, std::move(engine), NowUs);
    Checkpoint checkpoint;
    ModelLayer layer;
    layer.name = "0";
    layer.spec.d_model = layer.spec.context_width = layer.spec.output_width = 1;
    layer.spec.causal = true;
    checkpoint.layers.push_back(layer);
    EXPECT_TRUE(runtime_->AddModel("m", checkpoint, {}).ok());
    batcher_ = std::make_unique<Batcher>(
        *runtime_, options.batch_tokens, NowUs,
        [this](const BatchOutcome& outcome) { batches_.fetch_add(outcome.sequences > 0); },
        [](const RuntimeStats&) {});
  }

  std::shared_ptr<AttendJob> Job(int64_t rows, const std::string& session = {},
                                 int64_t position = 0) {
    auto job = std::make_shared<AttendJob>();
    job->model = 0;
    job->causal = true;
    job->arrival_us = NowUs();
    job->deadline_us = job->arrival_us + 60'000'000;
    job->response_bytes_limit = 1 << 20;
    job->output_rows = rows;
    job->input = pool_->Get(rows * 4);
    SequenceJob sequence;
    sequence.rows = sequence.keys = rows;
    sequence.has_keys = true;
    sequence.query = sequence.key_source = {job->input.data.get(), DType::kF32};
    sequence.session_id = session;
    if (!session.empty()) sequence.position = position;
    job->sequences.push_back(sequence);
    return job;
  }

  // Submits and gives the outcome to come.
  std::future<absl::Status> Submit(std::shared_ptr<AttendJob> job) {
    auto promise = std::make_shared<std::promise<absl::Status>>();
    batcher_->Submit(std::move(job),
                     [promise](absl::Status status) { promise->set_value(status); });
    return promise->get_future();
  }

  std::string Open() {
    auto promise = std::make_shared<std::promise<std::string>>();
    batcher_->SubmitControl(
        "",
        [promise](AttentionRuntime& runtime) {
          OpenSessionArguments arguments;
          arguments.model = 0;
          promise->set_value(runtime.OpenSession(arguments)->id);
        },
        [](absl::Status) {});
    return promise->get_future().get();
  }

  MemoryEngine* engine_ = nullptr;
  std::unique_ptr<AttentionRuntime> runtime_;
  std::shared_ptr<BufferPool> pool_ = BufferPool::Make(1 << 20);
  std::atomic<int> batches_{0};
  std::unique_ptr<Batcher> batcher_;
};

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
