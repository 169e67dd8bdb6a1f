// SPDX-License-Identifier: Apache-2.0
//
// What every engine owes its callers, 3: whole layers. Projections in every weight type, what
// stands between projection and cache (clip, norms, rotation), cross-attention, input and output
// types.
#include <functional>
#include <string>
#include <vector>

#include "tests/support/engine_cases.h"

namespace attend {
namespace {

constexpr DType kF32 = DType::kF32;
constexpr DType kBF16 = DType::kBF16;
constexpr DType kF16 = DType::kF16;

class EngineLayerTest : public EngineTest {
 protected:
  // One prefill over several lengths, whole, at the given dtypes.
  void TryLayer(const AttentionSpec& spec, DType weight, DType kv, DType input, DType output,
                const std::string& compute = "auto", const std::string& weight_dtype = "auto") {
    SCOPED_TRACE(testing::Message()
                 << "weights " << DTypeName(weight) << " kept as " << weight_dtype << ", kv "
                 << DTypeName(kv) << ", input " << DTypeName(input) << ", output "
                 << DTypeName(output) << ", compute " << compute);
    Restart(compute, 2, weight_dtype);
    const TestLayer layer(random, spec, weight);
    auto info = engine->AddLayer(layer.spec(), layer.weights());
    ASSERT_THAT(info, IsOk());
    EXPECT_GT(info->packed_bytes, 0);
    const DType wanted =
        weight_dtype == "i8" ? DType::kI8 : ComputeDType(GetParam(), weight, compute);
    if (wanted != DType::kUnspecified) {
      EXPECT_EQ(info->compute_dtype, wanted);
    }
    std::vector<TestSequence> sequences;
    for (int64_t rows : {1, 5, 64, 90}) {
      const int64_t keys = spec.cross ? 97 - rows : rows;
      sequences.push_back(RandomSequence(random, layer.spec(), kv, input, output, rows, keys));
      sequences.back().AskWeights({0, spec.q_heads - 1});
    }
    RunAndCompare(sequences, info->index, layer.weights(), info->compute_dtype);
  }

  // Rows, weights and KV in int8 by themselves and together, over what attention may compute in.
  void TryI8(const AttentionSpec& spec) {
    for (DType weight : {kF32, kBF16, kF16}) {
      for (DType kv : {kF32, kBF16, DType::kI8}) {
        TryLayer(spec, weight, kv, kF32, kF32, "fp32", "i8");
        if (weight != kBF16) continue;
        TryLayer(spec, weight, DType::kI8, kF32, kBF16, "fp32");
        if (!HasBf16Products(GetParam())) continue;
        TryLayer(spec, weight, kv, kBF16, kBF16, "bf16", "i8");
        TryLayer(spec, weight, DType::kI8, kF32, kF32, "bf16");
      }
    }
  }

  void TryRule(const std::string& name, const std::function<void(AttentionSpec&)>& change) {
    SCOPED_TRACE(name);
    AttentionSpec spec = PlainSpec(40, 6, 2, 16, 16);
    spec.causal = true;
    change(spec);
    TryLayer(spec, kF32, kF32, kF32, kF32);
    TryLayer(spec, kBF16, kBF16, kF32, kF32);
  }
};

TEST_P(EngineLayerTest, I8WeightsAndKvMatchTheReferenceWhereTheEngineHasThem) {
  if (GetParam().cuda()) {
    EngineOptions options;
    options.device = "cuda";
    options.weight_dtype = "i8";
    EXPECT_THAT(MakeEngine(options).status(), StatusIs(absl::StatusCode::kInvalidArgument));
    EXPECT_FALSE(engine->info().keeps_i8);
    return;
  }
  AttentionSpec spec = PlainSpec(48, 4, 2, 24, 16);
  spec.causal = true;
  spec.output_width = 40;
  TryI8(spec);
  spec = PlainSpec(40, 3, 3, 15, 9);  // widths that fill no vector, pair or group of four
  spec.rope = PlainRope(RopePairing::kHalf, 14);
  TryI8(spec);
}

TEST_P(EngineLayerTest, EveryWeightKvInputAndOutputTypeMatchesTheReference) {
  AttentionSpec spec = PlainSpec(48, 4, 2, 24, 16);
  spec.causal = true;
  spec.output_width = 40;
  for (DType weight : {kF32, kBF16, kF16}) {
    for (DType kv : {kF32, kBF16, kF16}) {
      TryLayer(spec, weight, kv, kF32, kF32);
      if (weight == kBF16) {
        if (HasBf16Products(GetParam())) TryLayer(spec, weight, kv, kF32, kF32, "bf16");
        TryLayer(spec, weight, kv, kF32, kF32, "fp32");
      }
      if (weight == kF16 && GetParam().cuda()) {  // the CPU's F16 weights always compute in F32
        TryLayer(spec, weight, kv, kF32, kF32, "fp32");
      }
    }
    for (DType input : {kF32, kBF16, kF16}) {
      for (DType output : {kF32, kBF16, kF16}) TryLayer(spec, weight, kF32, input, output);
    }
  }
}

TEST_P(EngineLayerTest, Tf32ProductsMatchTheReference) {
  if (!GetParam().cuda()) GTEST_SKIP() << "only CUDA has TF32 products";
  AttentionSpec spec = PlainSpec(48, 4, 2, 24, 16);
  spec.causal = true;
  for (DType weight : {kF32, kBF16, kF16}) {
    for (DType kv : {kF32, kBF16}) TryLayer(spec, weight, kv, kF32, kF32, "tf32");
  }
}

TEST_P(EngineLayerTest, HiddenStatesBeyondF16OverflowInTheirOwnRow) {
  AttentionSpec spec = PlainSpec(32, 4, 2, 8, 8);
  spec.causal = true;
  const TestLayer layer(random, spec, kF16);
  auto info = engine->AddLayer(layer.spec(), layer.weights());
  ASSERT_THAT(info, IsOk());
  std::vector<TestSequence> sequences;
  for (int i = 0; i < 2; ++i) {
    sequences.push_back(RandomSequence(random, layer.spec(), kF32, kF32, kF32, 40, 40));
  }
  // Infinite where products are F16, large elsewhere; the oracle knows.
  sequences[1].query.Set(33, 3, 70000);
  RunAndCompare(sequences, info->index, layer.weights(), info->compute_dtype);
}

TEST_P(EngineLayerTest, EveryRuleBetweenProjectionAndCacheMatchesTheReference) {
  TryRule("bidirectional", [](AttentionSpec& spec) { spec.causal = false; });
  TryRule("clip", [](AttentionSpec& spec) { spec.clip_qkv = 0.8f; });
  TryRule("norm", [](AttentionSpec& spec) {
    spec.qk_norm = QkNorm::kRmsPerHead;
    spec.qk_norm_eps = 1e-5f;
  });
  TryRule("rope half", [](AttentionSpec& spec) { spec.rope = PlainRope(RopePairing::kHalf, 16); });
  TryRule("rope half, partial",
          [](AttentionSpec& spec) { spec.rope = PlainRope(RopePairing::kHalf, 6); });
  TryRule("rope interleaved",
          [](AttentionSpec& spec) { spec.rope = PlainRope(RopePairing::kInterleaved, 16); });
  TryRule("rope interleaved, partial",
          [](AttentionSpec& spec) { spec.rope = PlainRope(RopePairing::kInterleaved, 10); });
  TryRule("everything", [](AttentionSpec& spec) {
    spec.clip_qkv = 1.5f;
    spec.qk_norm = QkNorm::kRmsPerHead;
    spec.qk_norm_eps = 1e-6f;
    spec.rope = PlainRope(RopePairing::kHalf, 12);
    spec.rope.attention_factor = 1.25;
    spec.softcap = 3;
    spec.sinks = {0, 1, -1, 2, 0.5f, -3};
    spec.alibi_slopes = {0.5f, 0.25f, 0.125f, 0.0625f, 0.03f, 0.015f};
    spec.window = 33;
  });
}

TEST_P(EngineLayerTest, OddWidthsMatchTheReference) {
  for (const auto& [d_model, head_dim, v_dim] :
       {std::array<int, 3>{1, 1, 1}, {3, 5, 7}, {17, 12, 1}, {96, 40, 33}, {130, 80, 72}}) {
    AttentionSpec spec = PlainSpec(d_model, 3, 1, head_dim, v_dim);
    spec.causal = true;
    spec.output_width = d_model + 2;
    for (DType weight : {kF32, kBF16}) TryLayer(spec, weight, kF32, kF32, kF32);
  }
}

TEST_P(EngineLayerTest, CrossAttentionOverAContextOfAnotherWidthMatchesTheReference) {
  AttentionSpec spec = PlainSpec(48, 4, 2, 16, 24);
  spec.cross = true;
  spec.context_width = 20;
  for (DType weight : {kF32, kBF16}) TryLayer(spec, weight, kF32, kF32, kF32);
}

TEST_P(EngineLayerTest, CrossAttentionOverACachedContextEqualsTheFirstCall) {
  AttentionSpec spec = PlainSpec(48, 4, 2, 16, 24);
  spec.cross = true;
  spec.context_width = 20;
  const TestLayer layer(random, spec, kF32);
  auto info = engine->AddLayer(layer.spec(), layer.weights());
  ASSERT_THAT(info, IsOk());
  std::vector<TestSequence> sequences;
  sequences.push_back(RandomSequence(random, layer.spec(), kF32, kF32, kF32, 9, 100));
  sequences.push_back(RandomSequence(random, layer.spec(), kF32, kF32, kF32, 4, 0));  // no context
  RunAndCompare(sequences, info->index, layer.weights());
  const TestTensor first = sequences[0].output;
  sequences[0].output.FillRows(0, 9, 0);
  const AttendItem cached = sequences[0].Item(0, 9, 100, 100);
  ASSERT_THAT(RunBatch(*engine, info->index, layer.spec(), kF32, {&cached, 1}), IsOk());
  EXPECT_TRUE(SameBits(kF32, sequences[0].output.bytes, first.bytes));
}

TEST_P(EngineLayerTest, APlainModuleRunsCausalBidirectionalAndAsCrossAttention) {
  AttentionSpec spec = PlainSpec(32, 4, 4, 8, 8);
  spec.mask_selectable = true;
  const TestLayer layer(random, spec, kF32);
  auto info = engine->AddLayer(layer.spec(), layer.weights());
  ASSERT_THAT(info, IsOk());
  for (bool cross : {false, true}) {
    AttentionSpec used = layer.spec();
    used.cross = cross;
    for (bool causal : {false, true}) {
      used.causal = causal && !cross;
      std::vector<TestSequence> sequences;
      sequences.push_back(RandomSequence(random, used, kF32, kF32, kF32, 70, cross ? 33 : 70));
      RunAndCompare(sequences, info->index, layer.weights());
    }
  }
}

TEST_P(EngineLayerTest, LayersOfOneEngineDoNotMix) {
  AttentionSpec wide = PlainSpec(64, 4, 2, 32, 16);
  AttentionSpec narrow = PlainSpec(24, 2, 2, 12, 12);
  wide.causal = narrow.causal = true;
  const TestLayer first(random, wide, kF32), second(random, narrow, kBF16),
      third(random, wide, kF32);
  for (const TestLayer* layer : {&first, &second, &third}) {
    ASSERT_THAT(engine->AddLayer(layer->spec(), layer->weights()), IsOk());
  }
  int index = 0;
  for (const TestLayer* layer : {&first, &third}) {
    std::vector<TestSequence> sequences;
    sequences.push_back(RandomSequence(random, layer->spec(), kF32, kF32, kF32, 30, 30));
    RunAndCompare(sequences, index, layer->weights());
    index += 2;
  }
}

TEST_P(EngineLayerTest, RotationStaysExactAtHighPositions) {
  AttentionSpec spec = PlainSpec(16, 2, 1, 8, 8);
  spec.causal = true;
  // Position 2000 under a frequency near 1000 turns as far as position two million under 1.
  spec.rope = {RopePairing::kHalf, 8, {997.3, 71.7, 3.3, 0.1}, 1.0};
  const TestLayer layer(random, spec, kF32);
  auto info = engine->AddLayer(layer.spec(), layer.weights());
  ASSERT_THAT(info, IsOk());
  std::vector<TestSequence> sequences;
  sequences.push_back(RandomSequence(random, layer.spec(), kF32, kF32, kF32, 2000, 2000));
  RunAndCompare(sequences, info->index, layer.weights());
}

TEST_P(EngineLayerTest, NaNInHiddenStatesStaysInTheRowsThatSeeIt) {
  AttentionSpec spec = PlainSpec(32, 4, 2, 8, 8);
  spec.causal = true;
  for (DType weight : {kF32, kBF16}) {
    Restart();
    const TestLayer layer(random, spec, weight);
    auto info = engine->AddLayer(layer.spec(), layer.weights());
    ASSERT_THAT(info, IsOk());
    std::vector<TestSequence> sequences;
    for (int i = 0; i < 3; ++i) {
      sequences.push_back(RandomSequence(random, layer.spec(), weight, kF32, kF32, 70, 70));
    }
    Run(sequences, info->index);
    const std::vector<TestTensor> clean{sequences[0].output, sequences[1].output,
                                        sequences[2].output};
    sequences[1].query.Set(50, 3, std::numeric_limits<float>::quiet_NaN());
    RunAndCompare(sequences, info->index, layer.weights(), info->compute_dtype);
    EXPECT_TRUE(SameBits(kF32, sequences[0].output.bytes, clean[0].bytes));
    EXPECT_TRUE(SameBits(kF32, sequences[2].output.bytes, clean[2].bytes));
    EXPECT_TRUE(SameBits(kF32, std::span(sequences[1].output.bytes).first(50 * 32 * 4),
                         std::span(clean[1].bytes).first(50 * 32 * 4)));
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, EngineLayerTest, testing::ValuesIn(EngineCases()),
                         EngineCaseName);

}  // namespace
}  // namespace attend
