// SPDX-License-Identifier: Apache-2.0
//
// Real checkpoints of every supported shape through the engine, against outputs of the libraries
// they come from (tests/golden/README.md says how those were computed). Full cases run every
// sequence of the case in one batch, incremental ones append call by call.
#include "tests/support/golden.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "engine/model/checkpoint.h"
#include "tests/support/engine_cases.h"

namespace attend {
namespace {

constexpr DType kF32 = DType::kF32;

// Rows [0, count) of sequence `index` of a padded [sequences, longest, width] tensor.
TestTensor RowsOf(const GoldenTensor& tensor, int64_t index, int64_t count) {
  const int64_t longest = tensor.shape[1], width = tensor.shape[2];
  TestTensor rows{kF32, count, width, {}};
  rows.bytes.resize(static_cast<size_t>(count * width * 4));
  std::memcpy(rows.bytes.data(), &tensor.values[index * longest * width], rows.bytes.size());
  return rows;
}

std::vector<float> Floats(const TestTensor& tensor) {
  std::vector<float> values(tensor.bytes.size() / 4);
  std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

class GoldenTest : public EngineTest {
 protected:
  struct Precision {
    std::string compute;
    DType kv = kF32;
    bool float32 = true;  // holds the float32 tolerance, attention weights too
  };

  void TryVariant(const std::string& name, const Precision& precision) {
    SCOPED_TRACE(name);
    auto checkpoint = LoadCheckpoint(GoldenDirectory(name));
    ASSERT_THAT(checkpoint, IsOk());
    auto golden = ReadGolden(name);
    ASSERT_THAT(golden, IsOk());
    EXPECT_FALSE(golden->cases.empty());
    Restart(precision.compute);
    std::map<std::string, std::pair<const ModelLayer*, int>> layers;
    for (const ModelLayer& layer : checkpoint->layers) {
      auto info = engine->AddLayer(layer.spec, layer.weights);
      ASSERT_THAT(info, IsOk()) << layer.name;
      layers[layer.name] = {&layer, info->index};
    }
    for (const GoldenCase& one : golden->cases) {
      SCOPED_TRACE(one.id + ", layer " + one.layer + ", " + one.role + ", " + one.kind);
      ASSERT_TRUE(layers.contains(one.layer));
      const auto& [layer, index] = layers[one.layer];
      TryCase(one, SpecOf(one, layer->spec), index, precision);
    }
  }

 private:
  // The checkpoint's own specification, checked with the case; plain modules leave the mask to the
  // caller.
  static AttentionSpec SpecOf(const GoldenCase& golden, AttentionSpec spec) {
    if (spec.mask_selectable) {
      spec.causal = golden.causal;
      spec.cross = golden.role == "cross";
    }
    EXPECT_EQ(spec.causal, golden.causal);
    EXPECT_EQ(spec.cross, golden.role == "cross");
    EXPECT_EQ(spec.window, golden.window_left < 0 ? 0 : golden.window_left + 1);
    return spec;
  }

  void TryCase(const GoldenCase& golden, const AttentionSpec& spec, int layer,
               const Precision& precision) {
    std::vector<TestSequence> sequences;
    for (size_t i = 0; i < golden.lengths.size(); ++i) {
      const int64_t rows = golden.lengths[i];
      const int64_t keys = spec.cross ? golden.context_lengths[i] : rows;
      TestSequence sequence = RandomSequence(random, spec, precision.kv, kF32, kF32, rows, keys);
      sequence.query = RowsOf(golden.hidden_states, int64_t(i), rows);
      if (spec.cross) sequence.source = RowsOf(golden.context, int64_t(i), keys);
      if (!golden.attention_weights.shape.empty() && golden.kind == "full") {
        std::vector<int32_t> heads;
        for (int32_t head = 0; head < spec.q_heads; ++head) heads.push_back(head);
        sequence.AskWeights(heads);
      }
      sequences.push_back(std::move(sequence));
    }
    if (golden.kind == "full") {
      Run(sequences, layer);
    } else {
      RunInChunks(golden, sequences, layer);
    }
    for (size_t i = 0; i < sequences.size(); ++i) {
      CheckSequence(golden, sequences[i], int64_t(i), precision);
    }
  }

  void RunInChunks(const GoldenCase& golden, std::vector<TestSequence>& sequences, int layer) {
    ASSERT_EQ(sequences.size(), 1u);
    TestSequence& sequence = sequences[0];
    space->Reset();
    TakeBlocks(sequence);
    int64_t row = 0;
    for (int64_t chunk : golden.chunks) {
      // The context comes with the first call; a history grows by the rows of every call.
      const bool first = row == 0;
      const AttendItem item =
          sequence.own_source
              ? sequence.Item(row, row + chunk, first ? 0 : sequence.keys, sequence.keys)
              : sequence.Item(row, row + chunk, row, row + chunk);
      ASSERT_THAT(RunBatch(*engine, layer, *sequence.spec, sequence.kv_dtype, {&item, 1}), IsOk());
      row += chunk;
    }
    EXPECT_EQ(row, sequence.rows);
  }

  static void CheckSequence(const GoldenCase& golden, const TestSequence& sequence, int64_t index,
                            const Precision& precision) {
    SCOPED_TRACE(testing::Message() << "sequence " << index);
    const double tolerance = precision.float32 ? golden.float32_tolerance : golden.half_tolerance;
    EXPECT_TRUE(MatchesWithin(Floats(sequence.output),
                              Floats(RowsOf(golden.output, index, sequence.rows)), tolerance));
    if (sequence.weight_heads.empty() || !precision.float32) return;
    const std::vector<int64_t>& shape = golden.attention_weights.shape;  // [B, heads, rows, keys]
    ASSERT_EQ(shape[1], int64_t(sequence.weight_heads.size()));
    std::vector<float> expected;
    for (int64_t head = 0; head < shape[1]; ++head) {
      for (int64_t row = 0; row < sequence.rows; ++row) {
        const auto first = golden.attention_weights.values.begin() +
                           ((index * shape[1] + head) * shape[2] + row) * shape[3];
        expected.insert(expected.end(), first, first + sequence.keys);
      }
    }
    EXPECT_TRUE(MatchesWithin(sequence.weights, expected, 1e-5));
  }
};

TEST_P(GoldenTest, EveryVariantAgreesInFloat32) {
  const std::vector<std::string> variants = GoldenVariants();
  EXPECT_GE(variants.size(), 30u);
  for (const std::string& variant : variants) TryVariant(variant, {"fp32", kF32, true});
}

TEST_P(GoldenTest, SixteenBitCheckpointsAgreeUnderDefaultFlags) {
  TryVariant("llama_bf16", {"auto", DType::kBF16, false});
  TryVariant("llama_f16", {"auto", kF32, false});
  TryVariant("llama_f16", {"auto", DType::kF16, false});
}

INSTANTIATE_TEST_SUITE_P(Engines, GoldenTest, testing::ValuesIn(EngineCases()), EngineCaseName);

}  // namespace
}  // namespace attend
