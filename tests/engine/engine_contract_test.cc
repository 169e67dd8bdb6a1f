// SPDX-License-Identifier: Apache-2.0
//
// What every engine owes its callers, 1: raw attention, every rule of AttentionSpec and AttendItem
// at every shape that has an edge somewhere, against the oracle.
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/engine_cases.h"

namespace attend {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr DType kF32 = DType::kF32;
constexpr DType kBF16 = DType::kBF16;
constexpr DType kF16 = DType::kF16;
// Engines may attend over 16-bit keys with other kernels.

class EngineContractTest : public EngineTest {
 protected:
  TestSequence Raw(const AttentionSpec& spec, int64_t rows, int64_t keys, DType kv = kF32) {
    return RandomSequence(random, spec, kv, kF32, kF32, rows, keys);
  }

  // The shapes that a rule of the spec is tried at: inside one block, over blocks, over segments.
  std::vector<TestSequence> Shapes(const AttentionSpec& spec, DType kv) {
    std::vector<TestSequence> sequences;
    const std::pair<int64_t, int64_t> shapes[] = {{1, 1},   {5, 5},    {70, 70},   {9, 200},
                                                  {1, 129}, {3, 1030}, {17, 1100}, {1, 2049}};
    for (const auto& [rows, keys] : shapes) {
      sequences.push_back(Raw(spec, rows, keys, kv));
      sequences.back().AskWeights({0, spec.q_heads - 1});
    }
    return sequences;
  }

  void TryRule(const std::string& name, const std::function<void(AttentionSpec&)>& change) {
    for (DType kv : {kF32, kBF16}) {
      for (bool causal : {true, false}) {
        SCOPED_TRACE(name + (causal ? ", causal, kv " : ", bidirectional, kv ") + DTypeName(kv));
        AttentionSpec spec = PlainSpec(0, 6, 2, 24, 20);
        spec.causal = causal;
        change(spec);
        std::vector<TestSequence> sequences = Shapes(spec, kv);
        RunAndCompare(sequences);
      }
    }
  }
};

TEST_P(EngineContractTest, EveryGroupSizeAndHeadWidthMatchesTheReference) {
  const int widths[] = {1, 8, 12, 32, 40, 64, 80, 96, 128, 192, 256};
  for (int group : {1, 2, 3, 4, 6, 8}) {
    for (int i = 0; i < 11; ++i) {
      const int width = widths[i], v_width = widths[(i * 4 + group) % 11];
      for (DType kv : {kF32, (i + group) % 2 == 0 ? kBF16 : kF16}) {
        SCOPED_TRACE(testing::Message() << "group " << group << ", width " << width << ", v width "
                                        << v_width << ", kv " << DTypeName(kv));
        AttentionSpec spec = PlainSpec(0, group * (1 + i % 2), 1 + i % 2, width, v_width);
        spec.causal = true;
        std::vector<TestSequence> sequences;
        sequences.push_back(Raw(spec, 18, 18, kv));
        sequences.push_back(Raw(spec, 3, 70, kv));
        sequences.push_back(Raw(spec, 1, 130, kv));
        for (TestSequence& sequence : sequences) sequence.AskWeights({spec.q_heads - 1});
        RunAndCompare(sequences);
      }
    }
  }
}

TEST_P(EngineContractTest, EveryLengthAroundABlockOrSegmentEdgeMatchesTheReference) {
  for (DType kv : {kF32, kBF16}) {
    for (bool causal : {true, false}) {
      AttentionSpec spec = PlainSpec(0, 3, 1, 20, 12);
      spec.causal = causal;
      std::vector<TestSequence> sequences;
      for (int64_t keys :
           {1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 513, 1023, 1024, 1025, 2049}) {
        sequences.push_back(Raw(spec, std::min<int64_t>(keys, 130), keys, kv));
        sequences.push_back(Raw(spec, 1, keys, kv));
      }
      RunAndCompare(sequences);
    }
  }
}

// One wide head instead of many narrow ones.
TEST_P(EngineContractTest, WidestHeadsMatchTheReference) {
  const int widest = engine->info().max_head_dim;
  for (const auto& [width, v_width] : {std::pair{widest, 5}, {widest * 3 / 4, widest}}) {
    for (DType kv : {kF32, kBF16}) {
      AttentionSpec spec = PlainSpec(0, 2, 1, width, v_width);
      spec.causal = true;
      std::vector<TestSequence> sequences;
      sequences.push_back(Raw(spec, 18, 18, kv));
      sequences.push_back(Raw(spec, 2, 70, kv));
      RunAndCompare(sequences);
    }
  }
}

TEST_P(EngineContractTest, LongPrefillMatchesTheReference) {
  AttentionSpec spec = PlainSpec(0, 2, 1, 16, 16);
  spec.causal = true;
  for (DType kv : {kF32, kBF16}) {
    std::vector<TestSequence> sequences;
    sequences.push_back(Raw(spec, 1025, 1025, kv));
    RunAndCompare(sequences);
  }
}

TEST_P(EngineContractTest, EveryKvDtypeMatchesTheReference) {
  for (const char* compute : {"auto", "fp32"}) {
    Restart(compute);
    for (DType kv : KvDTypes()) {
      for (DType input : {kF32, kBF16, kF16}) {
        for (DType output : {kF32, kBF16, kF16}) {
          SCOPED_TRACE(testing::Message()
                       << "compute " << compute << ", kv " << DTypeName(kv) << ", input "
                       << DTypeName(input) << ", output " << DTypeName(output));
          AttentionSpec spec = PlainSpec(0, 4, 2, 40, 24);
          spec.causal = true;
          std::vector<TestSequence> sequences;
          for (const auto& [rows, keys] : {std::pair{66, 66}, {2, 200}, {1, 1090}}) {
            sequences.push_back(RandomSequence(random, spec, kv, input, output, rows, keys));
          }
          RunAndCompare(sequences);
        }
      }
    }
  }
}

TEST_P(EngineContractTest, WindowMatchesTheReference) {
  for (int64_t window : {1, 2, 3, 63, 64, 65, 100, 1024, 1025, 5000}) {
    TryRule("window " + std::to_string(window), [&](AttentionSpec& spec) { spec.window = window; });
  }
  TryRule("window of all bits",
          [](AttentionSpec& spec) { spec.window = std::numeric_limits<int64_t>::max(); });
}

TEST_P(EngineContractTest, EveryScoreRuleMatchesTheReference) {
  const std::vector<float> slopes{0.5f, 0.25f, 0.125f, 0.0625f, 0.7071f, 0.0039f};
  const std::vector<float> sinks{0.3f, -2, 4, -50, 0, 30};
  TryRule("scale", [](AttentionSpec& spec) { spec.scale = -0.7; });
  TryRule("zero scale", [](AttentionSpec& spec) { spec.scale = 0; });
  TryRule("softcap", [](AttentionSpec& spec) { spec.softcap = 1.5f; });
  TryRule("alibi", [&](AttentionSpec& spec) { spec.alibi_slopes = slopes; });
  TryRule("sinks", [&](AttentionSpec& spec) { spec.sinks = sinks; });
  TryRule("all at once", [&](AttentionSpec& spec) {
    spec.scale = 0.5;
    spec.softcap = 5;
    spec.alibi_slopes = slopes;
    spec.sinks = sinks;
    spec.window = 77;
  });
}

TEST_P(EngineContractTest, BiasMatchesTheReference) {
  AttentionSpec spec = PlainSpec(0, 6, 2, 24, 20);
  spec.window = 150;
  const auto try_bias = [&](int64_t heads, double masked, DType kv) {
    SCOPED_TRACE(testing::Message() << "bias heads " << heads << ", masked share " << masked
                                    << ", kv " << DTypeName(kv));
    std::vector<TestSequence> sequences;
    // {rows, keys, first key of the bias, its columns}: all keys, trailing keys, columns of
    // negative keys, columns beyond the keys, columns of negative keys only.
    for (const auto& [rows, keys, first, columns] : {std::array<int64_t, 4>{7, 7, 0, 7},
                                                     {70, 200, 0, 200},
                                                     {5, 200, 195, 5},
                                                     {4, 130, 61, 69},
                                                     {3, 10, -5, 15},
                                                     {3, 70, 66, 9},
                                                     {2, 5, -6, 6},
                                                     {1, 1100, 0, 1100}}) {
      for (bool causal : {true, false}) {
        sequences.push_back(Raw(spec, rows, keys, kv));
        sequences.back().causal = causal;
        sequences.back().AddBias(random, heads, first, columns, masked);
        sequences.back().AskWeights({1, 4});
      }
    }
    RunAndCompare(sequences);
  };
  for (int64_t heads : {1, 6}) {
    for (double masked : {0.0, 0.5, 0.98}) {
      for (DType kv : KvDTypes()) try_bias(heads, masked, kv);
    }
  }
}

TEST_P(EngineContractTest, BiasIsNotScaled) {
  AttentionSpec spec = PlainSpec(0, 1, 1, 64, 1);
  std::vector<TestSequence> sequences;
  sequences.push_back(Raw(spec, 1, 2));
  sequences[0].query.FillRows(0, 1, 0);
  sequences[0].AddBias(random, 1, 0, 2, 0);
  sequences[0].bias = {0, std::log(3.0f)};
  sequences[0].AskWeights({0});
  Run(sequences);
  EXPECT_TRUE(MatchesWithin(sequences[0].weights, std::vector<float>{0.25f, 0.75f}, 1e-6));
}

TEST_P(EngineContractTest, RowsWithoutAKeyAreZeros) {
  AttentionSpec spec = PlainSpec(0, 2, 1, 1, 1);
  spec.sinks = {1, -5};
  for (DType kv : {kF32, kBF16}) {
    for (bool with_sinks : {false, true}) {
      if (!with_sinks) spec.sinks.clear();
      std::vector<TestSequence> sequences;
      sequences.push_back(Raw(spec, 5, 2, kv));  // rows -3, -2, -1 see nothing
      sequences[0].causal = true;
      sequences[0].AskWeights({0, 1});
      sequences.push_back(Raw(spec, 2, 0, kv));   // no key at all
      sequences.push_back(Raw(spec, 3, 70, kv));  // the bias masks everything
      sequences[2].AddBias(random, 1, 0, 70, 1.0);
      RunAndCompare(sequences);
      for (const TestSequence& sequence : sequences) {
        EXPECT_EQ(LoadFloat(kF32, sequence.output.bytes.data(), 0), 0);
      }
      spec.sinks = {1, -5};
    }
  }
}

TEST_P(EngineContractTest, MoreRowsThanKeysAlignAtTheBottomRight) {
  AttentionSpec spec = PlainSpec(0, 1, 1, 1, 1);
  std::vector<TestSequence> sequences;
  sequences.push_back(Raw(spec, 5, 2));
  sequences[0].causal = true;
  sequences[0].query.FillRows(0, 5, 0);
  sequences[0].value.Set(0, 0, 10);
  sequences[0].value.Set(1, 0, 20);
  Run(sequences);
  std::vector<float> output(5);
  std::memcpy(output.data(), sequences[0].output.bytes.data(), 20);
  EXPECT_TRUE(MatchesWithin(output, std::vector<float>{0, 0, 0, 10, 15}, 1e-5));
}

TEST_P(EngineContractTest, ItemsWithoutRowsOrWithoutAnythingAreLegal) {
  AttentionSpec spec = PlainSpec(0, 2, 1, 8, 8);
  std::vector<TestSequence> sequences;
  sequences.push_back(Raw(spec, 0, 0));
  Run(sequences);
  sequences.push_back(Raw(spec, 0, 70));
  sequences.push_back(Raw(spec, 4, 4));
  sequences.push_back(Raw(spec, 0, 0));
  RunAndCompare(sequences);
}

TEST_P(EngineContractTest, ExtremeScoresStayExactlyWeighted) {
  AttentionSpec spec = PlainSpec(0, 1, 1, 64, 1);
  DType kv = kF32;
  // Query e0 and keys s e0: the scores are scale x s.
  const auto scores = [&](std::vector<float> values, float scale) {
    TestSequence sequence = Raw(spec, 1, static_cast<int64_t>(values.size()), kv);
    spec.scale = scale;
    sequence.query.FillRows(0, 1, 0);
    sequence.query.Set(0, 0, 1);
    sequence.source.FillRows(0, sequence.keys, 0);
    for (int64_t key = 0; key < sequence.keys; ++key) {
      sequence.source.Set(key, 0, values[static_cast<size_t>(key)]);
      sequence.value.Set(key, 0, static_cast<float>(key));
    }
    sequence.AskWeights({0});
    std::vector<TestSequence> sequences{std::move(sequence)};
    RunAndCompare(sequences);
    return sequences[0].weights;
  };
  const std::vector<float> uniform(8, 0.125f);
  for (DType type : {kBF16, kF32}) {
    kv = type;
    EXPECT_TRUE(MatchesWithin(scores(std::vector<float>(8, -60000), 1), uniform, 1e-6));
    EXPECT_TRUE(MatchesWithin(scores(std::vector<float>(8, -3e38f), 1), uniform, 1e-6));
    EXPECT_TRUE(MatchesWithin(scores(std::vector<float>(8, 3e38f), 1), uniform, 1e-6));
    EXPECT_TRUE(MatchesWithin(scores({-1e4f, 1e4f, 0}, 1), std::vector<float>{0, 1, 0}, 0));
    EXPECT_TRUE(MatchesWithin(scores({-3e38f, 3e38f, 0}, 1), std::vector<float>{0, 1, 0}, 0));
  }
  std::vector<float> rising;  // too long for the steps of 16-bit keys
  for (int i = 0; i < 1200; ++i) rising.push_back(static_cast<float>(i) * 100);
  EXPECT_EQ(scores(rising, 1).back(), 1);
  spec.softcap = 50;
  const std::vector<float> capped = scores({1, 4400, 5000, 10000, -10000}, 1);
  EXPECT_TRUE(MatchesWithin(capped, std::vector<float>{0, 1 / 3.f, 1 / 3.f, 1 / 3.f, 0}, 1e-5));
}

TEST_P(EngineContractTest, MaskedKeysWeighNothingHoweverLowTheVisibleScoresAre) {
  AttentionSpec spec = PlainSpec(0, 1, 1, 64, 1);
  spec.scale = 1;
  std::vector<TestSequence> sequences;
  sequences.push_back(Raw(spec, 1, 8));
  TestSequence& sequence = sequences[0];
  sequence.query.FillRows(0, 1, 0);
  sequence.query.Set(0, 0, 1);
  sequence.source.FillRows(0, 8, 0);
  for (int key = 0; key < 8; ++key) {
    sequence.source.Set(key, 0, -60000);
    sequence.value.Set(key, 0, static_cast<float>(key));
  }
  sequence.AddBias(random, 1, 0, 8, 0);
  sequence.bias = {0, 0, 0, 0, -kInfinity, -kInfinity, -kInfinity, -kInfinity};
  sequence.AskWeights({0});
  Run(sequences);
  EXPECT_EQ(LoadFloat(kF32, sequence.output.bytes.data(), 0), 1.5f);
  EXPECT_EQ(sequence.weights, (std::vector<float>{0.25, 0.25, 0.25, 0.25, 0, 0, 0, 0}));
}

TEST_P(EngineContractTest, WeightsComeForTheAskedHeadsAndRowsAndChangeNoOutput) {
  AttentionSpec spec = PlainSpec(0, 6, 2, 24, 20);
  spec.causal = true;
  spec.window = 90;
  for (DType kv : {kF32, kF16}) {
    std::vector<TestSequence> sequences;
    sequences.push_back(Raw(spec, 100, 180, kv));
    TestSequence& sequence = sequences[0];
    Run(sequences);
    const TestTensor without = sequence.output;
    sequence.AskWeights({0});  // the oracle gives all heads
    const ReferenceResult expected = Expected(sequence);

    // Heads out of order, rows [10, 73), gaps between rows and heads that must stay as they were.
    const std::vector<int32_t> heads{5, 0, 3};
    const int64_t row_stride = 187, head_stride = 64 * row_stride;
    std::vector<float> weights(static_cast<size_t>(3 * head_stride), 0.0f);
    AttendItem item = sequence.Whole();
    item.weights = {weights.data(), heads.data(), 3, 10, 73, head_stride, row_stride};
    ASSERT_THAT(RunBatch(*engine, -1, spec, kv, {&item, 1}), IsOk());
    EXPECT_TRUE(SameBits(kF32, sequence.output.bytes, without.bytes));
    BoundedRows wanted(3 * 64, row_stride);
    for (int64_t h = 0; h < 3; ++h) {
      for (int64_t row = 10; row < 73; ++row) {
        for (int64_t key = 0; key < 180; ++key) {
          const int64_t to = (h * 64 + row - 10) * row_stride + key;
          const int64_t from = (heads[h] * 100 + row) * 180 + key;
          wanted.value[to] = expected.weights.value[from];
          wanted.error[to] = expected.weights.error[from];
        }
      }
    }
    EXPECT_TRUE(MatchesReference(kF32, weights.data(), wanted));
  }
}

TEST_P(EngineContractTest, ShortBlocksMatchTheReferenceAndKeepToTheirBytes) {
  for (DType kv : KvDTypes()) {
    AttentionSpec spec = PlainSpec(0, 4, 2, 24, 10);
    spec.causal = true;
    std::vector<TestSequence> sequences;
    for (int32_t block_tokens : {16, 32, 48}) {
      for (int64_t keys : {1, 7, 15, 16, 31, 32, 33, 47, 48}) {
        if (keys > block_tokens) continue;
        sequences.push_back(Raw(spec, keys, keys, kv));
        sequences.back().block_tokens = block_tokens;
      }
    }
    RunAndCompare(sequences);
    // All neighbours have written by now; another look through the blocks finds every history
    // unharmed.
    std::vector<AttendItem> items;
    std::vector<TestTensor> before;
    for (TestSequence& sequence : sequences) {
      before.push_back(sequence.output);
      items.push_back(sequence.Whole());
      items.back().cached_keys = items.back().new_keys;
      items.back().new_keys = 0;
    }
    ASSERT_THAT(RunBatch(*engine, -1, spec, kv, items), IsOk());
    for (size_t i = 0; i < sequences.size(); ++i) {
      EXPECT_TRUE(SameBits(kF32, sequences[i].output.bytes, before[i].bytes));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, EngineContractTest, testing::ValuesIn(EngineCases()),
                         EngineCaseName);

}  // namespace
}  // namespace attend
