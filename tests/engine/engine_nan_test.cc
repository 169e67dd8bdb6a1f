// SPDX-License-Identifier: Apache-2.0
//
// What every engine owes its callers, 2: what is not visible never enters the arithmetic, what is
// visible and not a number shows, and neither leaves its sequence.
#include <limits>
#include <vector>

#include "tests/support/engine_cases.h"

namespace attend {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr DType kF32 = DType::kF32;
// Engines may attend over 16-bit keys with other kernels.

class EngineNanTest : public EngineTest {
 protected:
  // A causal sequence, one with a window and one that is masked by its bias; the first `rows`
  // differ in what they see of the keys from `first` on.
  std::vector<TestSequence> Sequences(const AttentionSpec& spec, DType kv, int64_t rows,
                                      int64_t keys) {
    std::vector<TestSequence> sequences;
    for (int i = 0; i < 3; ++i) {
      sequences.push_back(RandomSequence(random, spec, kv, kF32, kF32, rows, keys));
    }
    return sequences;
  }
  static void Poison(TestSequence& sequence, int64_t first, int64_t count, float value) {
    sequence.source.FillRows(first, count, value);
    sequence.value.FillRows(first, count, value);
  }
};

TEST_P(EngineNanTest, KeysAfterACausalRowChangeNoBitOfIt) {
  for (DType kv : KvDTypes()) {
    SCOPED_TRACE(DTypeName(kv));
    AttentionSpec spec = PlainSpec(0, 4, 2, 24, 20);
    spec.causal = true;
    for (const auto& [length, first] :
         {std::pair<int64_t, int64_t>{9, 4}, {130, 65}, {130, 128}, {1100, 1030}}) {
      std::vector<TestSequence> sequences = Sequences(spec, kv, length, length);
      Run(sequences);
      const TestTensor clean = sequences[1].output, neighbour = sequences[2].output;
      for (float poison : {kNaN, kInfinity, -kInfinity, 1e30f}) {
        Poison(sequences[1], first, length - first, poison);
        Run(sequences);
        const size_t bytes = static_cast<size_t>(first * clean.columns * 4);
        EXPECT_TRUE(SameBits(kF32, std::span(sequences[1].output.bytes).first(bytes),
                             std::span(clean.bytes).first(bytes)))
            << "length " << length << ", " << poison << " from key " << first << " on";
        EXPECT_TRUE(SameBits(kF32, sequences[2].output.bytes, neighbour.bytes));
      }
    }
  }
}

TEST_P(EngineNanTest, KeysOutsideAWindowChangeNoBit) {
  for (DType kv : KvDTypes()) {
    SCOPED_TRACE(DTypeName(kv));
    for (bool causal : {true, false}) {
      AttentionSpec spec = PlainSpec(0, 4, 2, 24, 20);
      spec.causal = causal;
      spec.window = 10;
      std::vector<TestSequence> sequences = Sequences(spec, kv, 30, 200);  // rows 170 .. 199
      Run(sequences);
      const TestTensor clean = sequences[1].output;
      Poison(sequences[1], 0, 161, kNaN);  // row 170 sees keys from 161 on
      Run(sequences);
      EXPECT_TRUE(SameBits(kF32, sequences[1].output.bytes, clean.bytes));
      Poison(sequences[1], 161, 1, kNaN);
      RunAndCompare(sequences);
      EXPECT_TRUE(std::isnan(LoadFloat(kF32, sequences[1].output.bytes.data(), 0)));
    }
  }
}

TEST_P(EngineNanTest, KeysMaskedByTheBiasChangeNoBit) {
  for (DType kv : KvDTypes()) {
    SCOPED_TRACE(DTypeName(kv));
    AttentionSpec spec = PlainSpec(0, 4, 2, 24, 20);
    std::vector<TestSequence> sequences = Sequences(spec, kv, 5, 140);
    TestSequence& sequence = sequences[1];
    sequence.AddBias(random, 1, 0, 140, 0);
    for (int64_t key = 0; key < 140; ++key) {
      if (key % 3 != 0 && !(key >= 64 && key < 128)) continue;
      for (int64_t row = 0; row < 5; ++row) sequence.bias[row * 140 + key] = -kInfinity;
    }
    Run(sequences);
    const TestTensor clean = sequence.output;
    for (int64_t key = 0; key < 140; ++key) {
      if (sequence.bias[key] == -kInfinity)
        Poison(sequence, key, 1, key % 2 == 0 ? kNaN : kInfinity);
    }
    Run(sequences);
    EXPECT_TRUE(SameBits(kF32, sequence.output.bytes, clean.bytes));
  }
}

TEST_P(EngineNanTest, BiasCellsOutsideTheKeysAreIgnored) {
  for (DType kv : KvDTypes()) {
    SCOPED_TRACE(DTypeName(kv));
    AttentionSpec spec = PlainSpec(0, 2, 1, 8, 8);
    std::vector<TestSequence> sequences = Sequences(spec, kv, 3, 70);
    TestSequence& sequence = sequences[0];
    sequence.AddBias(random, 1, -4, 80, 0);  // keys -4 .. 75
    Run(sequences);
    const TestTensor clean = sequence.output;
    for (int64_t row = 0; row < 3; ++row) {
      for (int64_t column = 0; column < 80; ++column) {
        if (column < 4 || column >= 74) sequence.bias[row * 80 + column] = kNaN;
      }
    }
    Run(sequences);
    EXPECT_TRUE(SameBits(kF32, sequence.output.bytes, clean.bytes));
  }
}

TEST_P(EngineNanTest, NaNInAVisibleKeyShowsInEveryRowThatSeesItAndNowhereElse) {
  for (DType kv : KvDTypes()) {
    SCOPED_TRACE(DTypeName(kv));
    AttentionSpec spec = PlainSpec(0, 4, 2, 24, 20);
    spec.causal = true;
    for (int64_t before : {0, 980}) {  // inside one segment, over two
      std::vector<TestSequence> sequences = Sequences(spec, kv, 100, 180 + before);
      for (TestSequence& sequence : sequences) sequence.AskWeights({0, 3});
      Run(sequences);
      const TestTensor neighbours[] = {sequences[0].output, sequences[2].output};
      sequences[1].source.Set(130 + before, 3, kNaN);  // key head 0
      sequences[1].value.Set(150 + before, 25, kNaN);  // value head 1, element 5
      RunAndCompare(sequences);                        // the oracle knows where NaN belongs
      sequences[1].source.Set(17, 30, kNaN);           // key head 1, seen by all
      RunAndCompare(sequences);
      EXPECT_TRUE(SameBits(kF32, sequences[0].output.bytes, neighbours[0].bytes));
      EXPECT_TRUE(SameBits(kF32, sequences[2].output.bytes, neighbours[1].bytes));
    }
  }
}

TEST_P(EngineNanTest, NaNInAQueryShowsInItsRowAndHeadOnly) {
  for (DType kv : KvDTypes()) {
    SCOPED_TRACE(DTypeName(kv));
    AttentionSpec spec = PlainSpec(0, 4, 2, 24, 20);
    std::vector<TestSequence> sequences = Sequences(spec, kv, 20, 90);
    sequences[1].query.Set(7, 30, kNaN);  // head 1
    RunAndCompare(sequences);
  }
}

// Everything around the hidden states of a sequence is NaN: padding rows, and stale memory
// (BlockSpace).
TEST_P(EngineNanTest, PaddingRowsAreNeverRead) {
  const TestLayer layer(random, PlainSpec(32, 4, 2, 8, 8), kF32);
  auto info = engine->AddLayer(layer.spec(), layer.weights());
  ASSERT_THAT(info, IsOk());
  TestTensor padded = RandomTensor(random, kF32, 3 * 20, 32);
  std::vector<TestSequence> sequences;
  for (int64_t i = 0; i < 3; ++i) {
    const int64_t length = 20 - 7 * i;
    sequences.push_back(RandomSequence(random, layer.spec(), kF32, kF32, kF32, length, length));
    sequences.back().query.bytes.assign(padded.Row(20 * i), padded.Row(20 * i + length));
    padded.FillRows(20 * i + length, 20 - length, kNaN);
  }
  Run(sequences, info->index);
  std::vector<TestTensor> alone;
  std::vector<AttendItem> items;
  space->Reset();
  for (int64_t i = 0; i < 3; ++i) {
    alone.push_back(sequences[i].output);
    TakeBlocks(sequences[i]);
    items.push_back(sequences[i].Whole());
    items.back().query = items.back().key_source = padded.Rows(20 * i);
  }
  ASSERT_THAT(RunBatch(*engine, info->index, layer.spec(), kF32, items), IsOk());
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(SameBits(kF32, sequences[i].output.bytes, alone[i].bytes));
    Compare(sequences[i], Expected(sequences[i], layer.weights(), info->compute_dtype));
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, EngineNanTest, testing::ValuesIn(EngineCases()), EngineCaseName);

}  // namespace
}  // namespace attend
