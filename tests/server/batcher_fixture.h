// SPDX-License-Identifier: Apache-2.0
//
// A batcher over a runtime of one layer of width 1 and MemoryEngine, and the jobs its tests submit.
// Tests start the engine thread themselves.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>

#include "server/batcher.h"
#include "tests/support/memory_engine.h"

namespace attend {

inline int64_t NowUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class BatcherFixture : public ::testing::Test {
 protected:
  static constexpr int64_t kBytes = 1 << 20;

  // Nothing is cut for time unless a test asks for it: the engine takes what the machine lets it.
  explicit BatcherFixture(int batches_in_flight = 1, int64_t workspace_bytes = 0,
                          int64_t chunk_us = 60'000'000) {
    RuntimeOptions options;
    options.engine.kv_bytes = options.engine.scratch_bytes = kBytes;
    options.engine.workspace_bytes = workspace_bytes;
    options.replica = "r";
    options.start = "1";
    options.batch_tokens = 64;
    options.chunk_us = chunk_us;
    auto engine = std::make_unique<MemoryEngine>(2 * kBytes, batches_in_flight);
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

  ~BatcherFixture() override {
    batcher_.reset();
    EXPECT_EQ(engine_->violations.load(), 0);
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

}  // namespace attend
