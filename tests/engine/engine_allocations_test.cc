// SPDX-License-Identifier: Apache-2.0
//
// A warm batch asks the heap for nothing: between StartBatch and the end of FinishBatch, with the
// CPU engine, whatever kinds of jobs it is of. A job itself is its maker's.
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "engine/attention_runtime.h"
#include "tests/support/count_allocations.h"
#include "tests/support/test_batches.h"

namespace attend {
namespace {

using State = BatchOutcome::State;

constexpr int kWidth = 64;
constexpr int64_t kMaxRows = 1200;

enum Layer { kBidirectional, kGrouped, kCross };

struct Kind {
  std::string name;
  DType weights;
  std::string weight_dtype;  // the engine's option
  DType kv_dtype;
  int threads;

  friend std::ostream& operator<<(std::ostream& stream, const Kind& kind) {
    return stream << kind.name;
  }
};

class EngineAllocationsTest : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (!RecycledMemory::kRecycles) GTEST_SKIP() << "nothing is recycled under a sanitizer";
    RuntimeOptions options;
    options.engine.device = "cpu";
    options.engine.weight_dtype = GetParam().weight_dtype;
    options.engine.threads = GetParam().threads;
    options.engine.kv_bytes = options.engine.scratch_bytes = int64_t{16} << 20;
    options.kv_dtype = GetParam().kv_dtype;
    options.replica = "a-replica-with-a-long-name";
    options.start = "1";
    options.batch_tokens = 256;
    options.chunk_us = 60'000'000;  // nothing is cut for time, which differs from run to run
    auto engine = MakeEngine(options.engine);
    ASSERT_TRUE(engine.ok()) << engine.status();
    if (GetParam().weights == DType::kBF16 &&
        (*engine)->info().numerics_id.find("onednn") != std::string::npos) {
      GTEST_SKIP() << "oneDNN itself allocates for every product";
    }
    runtime_ = std::make_unique<AttentionRuntime>(options, *std::move(engine),
                                                  [this] { return now_us_ += 10; });
    // As BERT's, as a decoder's with grouped heads, and a decoder's second one.
    AttentionSpec specs[] = {PlainSpec(kWidth, 4, 4, 16, 16), PlainSpec(kWidth, 4, 2, 16, 16),
                             PlainSpec(kWidth, 4, 4, 16, 16)};
    specs[kGrouped].causal = true;
    specs[kGrouped].rope = PlainRope(RopePairing::kHalf, 16);
    specs[kCross].cross = true;
    Checkpoint checkpoint;
    checkpoint.weight_dtype = GetParam().weights;
    for (const AttentionSpec& spec : specs) {
      weights_.emplace_back(random_, spec, GetParam().weights);
      ModelLayer layer;
      layer.name = std::to_string(checkpoint.layers.size());
      layer.spec = spec;
      layer.weights = weights_.back().weights();
      checkpoint.layers.push_back(layer);
    }
    ASSERT_TRUE(runtime_->AddModel("m", checkpoint, {}).ok());
    input_ = RandomTensor(random_, DType::kF32, kMaxRows, kWidth);
    wide_input_ = RandomTensor(random_, DType::kBF16, kMaxRows, kWidth);
    raw_spec_ = std::make_shared<AttentionSpec>(PlainSpec(0, 4, 2, 16, 16));
  }

  // Sequences of these lengths, of which some may have ids of sessions.
  std::unique_ptr<AttendJob> Job(Layer layer, const std::vector<int64_t>& lengths,
                                 const std::vector<std::string>& sessions = {}) {
    auto job = std::make_unique<AttendJob>();
    job->model = 0;
    job->layer = layer;
    job->layer_name = std::to_string(layer);
    job->cross = layer == kCross;
    job->causal = layer == kGrouped;
    job->deadline_us = int64_t{1} << 60;
    job->response_bytes_limit = 1 << 30;
    job->output_rows = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    int64_t row = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      SequenceJob sequence;
      sequence.rows = lengths[i];
      // Every other one as the products read it, perhaps.
      sequence.query = (i % 2 == 0 ? input_ : wide_input_).Rows(row);
      sequence.output_row = row;
      sequence.has_keys = true;
      sequence.keys = layer == kCross ? 40 : lengths[i];
      sequence.key_source = layer == kCross ? input_.Rows(0) : sequence.query;
      if (i < sessions.size()) sequence.session_id = sessions[i];
      job->sequences.push_back(sequence);
      row += lengths[i];
    }
    return job;
  }

  std::unique_ptr<AttendJob> RawJob(int64_t rows, const std::string& session = {}) {
    auto job = Job(kGrouped, {rows});
    job->model = -1;
    job->layer = 0;
    job->raw_session = !session.empty();
    job->raw_spec = raw_spec_;
    SequenceJob& sequence = job->sequences[0];
    sequence.session_id = session;
    sequence.value_source = sequence.key_source;
    return job;
  }

  std::string Open(bool raw = false) {
    OpenSessionArguments arguments;
    arguments.model = raw ? -1 : 0;
    if (raw) {
      arguments.raw_spec = *raw_spec_;
      arguments.raw_spec.causal = true;
      arguments.raw_layers = 1;
      arguments.raw_kv_dtype = GetParam().kv_dtype;
    }
    return runtime_->OpenSession(arguments)->id;
  }

  // Runs all jobs to their ends, as a server would: what was not touched is offered again.
  void Run(std::vector<std::unique_ptr<AttendJob>> jobs) {
    std::vector<AttendJob*> left;
    for (const auto& job : jobs) left.push_back(job.get());
    while (!left.empty()) {
      const Allocations before = AllocationsSoFar();
      AttendBatch& batch = runtime_->StartBatch(left);
      const BatchOutcome& outcome = runtime_->FinishBatch(batch);
      const Allocations took = AllocationsSoFar() - before;
      ++batches_;
      allocations_ += took.count;
      std::vector<AttendJob*> next;
      for (size_t i = 0; i < left.size(); ++i) {
        if (outcome.jobs[i].state != State::kEnded) {
          next.push_back(left[i]);
        } else {
          EXPECT_TRUE(outcome.jobs[i].status.ok()) << outcome.jobs[i].status;
        }
      }
      left = std::move(next);
    }
  }
  template <typename... Jobs>
  void Run(Jobs... jobs) {
    std::vector<std::unique_ptr<AttendJob>> list;
    (list.push_back(std::move(jobs)), ...);
    Run(std::move(list));
  }

  // Twice to warm up, then counted.
  void ExpectNone(const std::function<void()>& round) {
    for (int i = 0; i < 4; ++i) {
      allocations_ = batches_ = 0;
      round();
      if (i >= 2) {
        EXPECT_EQ(allocations_, 0) << "in " << batches_ << " batches of round " << i;
      }
    }
  }

  int64_t now_us_ = 0;
  Random random_{7};
  std::deque<TestLayer> weights_;
  TestTensor input_, wide_input_;
  std::shared_ptr<AttentionSpec> raw_spec_;
  std::unique_ptr<AttentionRuntime> runtime_;
  int64_t batches_ = 0;
  int64_t allocations_ = 0;
};

TEST_P(EngineAllocationsTest, OneSequence) {
  ExpectNone([&] { Run(Job(kBidirectional, {16})); });
}

TEST_P(EngineAllocationsTest, JobsOfManySequences) {
  ExpectNone([&] {
    Run(Job(kBidirectional, {16}), Job(kBidirectional, {5, 1, 30, 64}),
        Job(kBidirectional, {65, 3}));
    Run(Job(kGrouped, std::vector<int64_t>(100, 2)), Job(kGrouped, {20}));
    Run(Job(kBidirectional, {7}), Job(kGrouped, {9}));  // two batches
  });
}

TEST_P(EngineAllocationsTest, WeightsAndBias) {
  const std::vector<float> bias(40 * 40, -0.5f);
  ExpectNone([&] {
    auto weights = Job(kBidirectional, {16, 70});
    weights->weights.full = true;
    weights->weights.heads = {0, 3};
    auto biased = Job(kBidirectional, {40});
    biased->bias = bias.data();
    biased->bias_sequences = biased->bias_heads = 1;
    biased->bias_rows = biased->bias_columns = 40;
    Run(std::move(weights), std::move(biased));
  });
}

TEST_P(EngineAllocationsTest, RawAttention) {
  ExpectNone([&] { Run(RawJob(16), RawJob(100), RawJob(1)); });
}

TEST_P(EngineAllocationsTest, ALongJobInChunksBesideShortOnes) {
  ExpectNone([&] {
    Run(Job(kGrouped, {1000, 30}), Job(kGrouped, {5}));
    Run(Job(kBidirectional, {700}), Job(kBidirectional, {5}));
  });
}

// Some of the steps begin new blocks. What a session holds grows with it: here it has been there.
TEST_P(EngineAllocationsTest, DecodeSteps) {
  std::vector<std::string> sessions;
  for (int i = 0; i < 8; ++i) sessions.push_back(Open());
  ExpectNone([&] {
    Run(Job(kGrouped, {60, 61, 62, 63, 64, 65, 100, 1}, sessions));
    for (int step = 0; step < 70; ++step) {
      Run(Job(kGrouped, {1, 1, 1}, {sessions[0], sessions[1], sessions[2]}),
          Job(kGrouped, {1}, {sessions[3]}), Job(kGrouped, {4}, {sessions[4]}),
          Job(kGrouped, {1, 2}, {sessions[5], sessions[6]}), Job(kGrouped, {16}));
    }
    for (const std::string& id : sessions) ASSERT_TRUE(runtime_->TruncateSession(id, 0).ok());
  });
}

TEST_P(EngineAllocationsTest, AHistoryLongEnoughToBeSplit) {
  const std::string session = Open();
  Run(Job(kGrouped, {1100}, {session}));
  Run(Job(kGrouped, {1100}, {session}));
  ExpectNone([&] {
    for (int step = 0; step < 3; ++step) Run(Job(kGrouped, {1}, {session}));
    ASSERT_TRUE(runtime_->TruncateSession(session, 2200).ok());
  });
}

TEST_P(EngineAllocationsTest, RewindsLookAheadsAndForks) {
  const std::string session = Open();
  Run(Job(kGrouped, {100}, {session}));
  ExpectNone([&] {
    auto rewind = Job(kGrouped, {50}, {session});
    rewind->sequences[0].position = 50;
    rewind->sequences[0].rewind = true;
    Run(std::move(rewind));
    auto ahead = Job(kGrouped, {3}, {session});
    ahead->sequences[0].no_append = true;
    Run(std::move(ahead));
    const std::string fork = runtime_->ForkSession(session, std::nullopt)->id;
    Run(Job(kGrouped, {5}, {fork}));  // to a block that both share
    ASSERT_TRUE(runtime_->CloseSession(fork).ok());
  });
}

TEST_P(EngineAllocationsTest, CrossAttention) {
  const std::string session = Open();
  Run(Job(kCross, {4}, {session}));
  ExpectNone([&] {
    auto cached = Job(kCross, {1}, {session});
    cached->sequences[0].has_keys = false;
    cached->sequences[0].keys = 0;
    Run(std::move(cached), Job(kCross, {4, 2}));
  });
}

TEST_P(EngineAllocationsTest, RawSessions) {
  const std::string session = Open(true);
  ExpectNone([&] {
    Run(RawJob(70, session));
    for (int step = 0; step < 3; ++step) Run(RawJob(1, session), RawJob(5));
    ASSERT_TRUE(runtime_->TruncateSession(session, 0).ok());
  });
}

INSTANTIATE_TEST_SUITE_P(Kinds, EngineAllocationsTest,
                         testing::Values(Kind{"F32", DType::kF32, "auto", DType::kF32, 2},
                                         Kind{"BF16", DType::kBF16, "auto", DType::kBF16, 2},
                                         Kind{"I8OnOneThread", DType::kF32, "i8", DType::kI8, 1}),
                         [](const testing::TestParamInfo<Kind>& info) { return info.param.name; });

}  // namespace
}  // namespace attend
