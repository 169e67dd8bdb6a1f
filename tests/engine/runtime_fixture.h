// SPDX-License-Identifier: Apache-2.0
//
// A runtime over MemoryEngine with one model of four narrow layers, and the jobs its tests make.
// The clock stands still unless a test moves it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "engine/attention_runtime.h"
#include "tests/support/memory_engine.h"

namespace attend {

class RuntimeFixture : public ::testing::Test {
 protected:
  explicit RuntimeFixture(int batches_in_flight = 1, int64_t workspace_bytes = 0,
                          int64_t batch_tokens = 128) {
    options_.engine.kv_bytes = kKvBytes;
    options_.engine.scratch_bytes = kScratchBytes;
    options_.engine.workspace_bytes = workspace_bytes;
    options_.replica = "r";
    options_.start = "1";
    options_.batch_tokens = batch_tokens;
    auto engine = std::make_unique<MemoryEngine>(kKvBytes + kScratchBytes, batches_in_flight);
    engine_ = engine.get();
    runtime_ = std::make_unique<AttentionRuntime>(options_, std::move(engine),
                                                  [this] { return now_us_ += step_us_; });
    Checkpoint checkpoint;
    checkpoint.family = "test";
    for (const char* name : {"0", "1", "2.cross", "3"}) {
      ModelLayer layer;
      layer.name = name;
      layer.spec.d_model = layer.spec.context_width = layer.spec.output_width = kWidth;
      layer.spec.q_heads = 2;
      layer.spec.head_dim = layer.spec.v_head_dim = 2;
      layer.spec.cross = layer.name == "2.cross";
      layer.spec.causal = layer.name < "2";
      checkpoint.layers.push_back(layer);
    }
    EXPECT_TRUE(runtime_->AddModel("m", checkpoint, {}).ok());
  }

  // A job of sequences with these lengths on one layer; causal layers are 0 and 1, 3 is
  // bidirectional.
  std::shared_ptr<AttendJob> Job(int layer, std::vector<int64_t> lengths) {
    auto job = std::make_shared<AttendJob>();
    job->model = 0;
    job->layer = layer;
    job->layer_name = std::to_string(layer);
    job->cross = layer == 2;
    job->causal = layer < 2;
    job->deadline_us = 1 << 30;
    job->response_bytes_limit = 1 << 30;
    job->output_rows = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    job->input = pool_->Get(job->output_rows * kWidth * 4);
    int64_t row = 0;
    for (int64_t length : lengths) {
      SequenceJob sequence;
      sequence.rows = length;
      sequence.query = {job->input.data.get() + row * kWidth * 4, DType::kF32};
      sequence.output_row = row;
      if (layer != 2) {
        sequence.has_keys = true;
        sequence.keys = length;
        sequence.key_source = sequence.query;
      }
      job->sequences.push_back(sequence);
      row += length;
    }
    return job;
  }

  std::shared_ptr<AttendJob> SessionJob(int layer, const std::string& id, int64_t position,
                                        int64_t rows) {
    auto job = Job(layer, {rows});
    job->sequences[0].session_id = id;
    job->sequences[0].position = position;
    return job;
  }

  std::string Open(std::vector<std::string> layers = {}, int64_t max_tokens = 0) {
    OpenSessionArguments arguments;
    arguments.model = 0;
    arguments.layers = std::move(layers);
    arguments.max_tokens = max_tokens;
    return runtime_->OpenSession(arguments)->id;
  }

  absl::Status RunOne(AttendJob& job) {
    AttendJob* jobs[] = {&job};
    for (;;) {
      BatchOutcome outcome = runtime_->RunBatch(jobs);
      if (outcome.jobs[0].state == BatchOutcome::State::kEnded) return outcome.jobs[0].status;
      if (outcome.jobs[0].state == BatchOutcome::State::kUntouched) {
        return absl::InternalError("untouched");
      }
    }
  }

  int64_t Length(const std::string& id) { return runtime_->GetSession(id)->layers[0].length; }

  static constexpr int64_t kKvBytes = 2 << 20;
  static constexpr int64_t kScratchBytes = 2 << 20;
  static constexpr int kWidth = 4;
  int64_t now_us_ = 0;
  int64_t step_us_ = 0;  // time that passes between two looks at the clock
  RuntimeOptions options_;
  MemoryEngine* engine_ = nullptr;
  std::unique_ptr<AttentionRuntime> runtime_;
  std::shared_ptr<BufferPool> pool_ = BufferPool::Make(1 << 20);
};

}  // namespace attend
