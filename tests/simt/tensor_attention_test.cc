// SPDX-License-Identifier: Apache-2.0
//
// Attention on tensor cores in the emulation, against textbook attention in double on the same
// rounded inputs; bounds are computed in kernel_fixture.cc. Numbers in brackets name faults of
// other projects (research note on GPU kernels, section 5) that a test is there for. Inputs are
// random; ATTEND_TEST_SEED repeats a run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/simt/tensor_attention_fixture.h"
#include "tests/support/seed.h"

namespace attend {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kLengths[] = {1, 7, 63, 64, 65, 127, 130};
constexpr DType kOutputs[] = {DType::kF32, DType::kBF16, DType::kF16};

template <class T, size_t kSize>
T Pick(const T (&values)[kSize], std::mt19937_64& random) {
  return values[random() % kSize];
}

// A scheduling order and a time of copies of the emulation, for tests too long for all of them.
simt::Settings SomeSettings(std::mt19937_64& random) {
  simt::Settings settings;
  settings.seed = random();
  settings.order = simt::kAllOrders[random() % simt::kAllOrders.size()];
  settings.copies = random() % 2 == 0 ? simt::CopyTime::kAtWait : simt::CopyTime::kAtIssue;
  settings.sums = random() % 2 == 0 ? simt::SumOrder::kAscending : simt::SumOrder::kShuffled;
  return settings;
}

// Every kernel width, its neighbours, odd widths, keys and values of unlike widths, both types; all
// types of output. [22, 43, 47, 49, 50, 54, 68]
TEST_P(TensorAttentionTest, EveryWidthAgreesWithDouble) {
  std::mt19937_64 random(TestSeed());
  constexpr std::pair<int, int> kWidths[] = {
      {1, 1},     {8, 8},     {24, 40}, {32, 32},   {40, 24},   {64, 64},  {72, 80},
      {80, 80},   {80, 33},   {96, 96}, {90, 91},   {128, 128}, {64, 128}, {127, 65},
      {192, 128}, {192, 192}, {8, 160}, {256, 256}, {200, 136}, {255, 7},  {16, 250}};
  int index = 0;
  for (const auto& [head_dim, v_head_dim] : kWidths) {
    const DType dtype = (index + prefill()) % 2 == 0 ? DType::kBF16 : DType::kF16;
    const int group = Pick({1, 2, 3}, random);
    KernelSpec spec = Spec(group * 2, 2, head_dim, v_head_dim, dtype);
    spec.output_dtype = kOutputs[index++ % 3];
    KernelBatch batch(spec, random());
    const int64_t keys = Pick(kLengths, random);
    batch.Add(Pick({1, 7, 40, 65}, random), keys - 1, keys, true);
    batch.Add(Pick({1, 7, 40, 65}, random), 0, Pick(kLengths, random), false);
    Build(batch);
    SCOPED_TRACE("head_dim " + std::to_string(head_dim) + " v_head_dim " +
                 std::to_string(v_head_dim) + " " + DTypeName(dtype));
    const simt::ScopedSettings scoped(SomeSettings(random));
    EXPECT_TRUE(LaunchAndCompare(batch));
  }
}

// Every pair of row and key counts around the sizes of tiles, bottom-right causal and
// bidirectional, in one launch of fewer thread blocks than tiles. [1, 8, 22, 23, 28, 39, 54, 63]
TEST_P(TensorAttentionTest, EveryRowAndKeyCountAgreesWithDouble) {
  std::mt19937_64 random(TestSeed());
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    KernelBatch batch(Spec(1, 1, 16, 16, dtype), random());
    for (const int64_t rows : kLengths) {
      for (const int64_t keys : kLengths) batch.Add(rows, keys - rows, keys, random() % 2 == 0);
    }
    Build(batch);
    const simt::ScopedSettings scoped(SomeSettings(random));
    EXPECT_TRUE(LaunchAndCompare(batch, 5));
  }
}

// Groups that do and don't divide tiles, under every scheduling order of the emulation and both
// times of copies. [28, 29, 30, 31, 32, 33, 35, 61, 62, 63]
TEST_P(TensorAttentionTest, EveryGroupAgreesUnderEveryOrder) {
  std::mt19937_64 random(TestSeed());
  for (const int group : {1, 3, 6, 8, 16}) {
    KernelBatch batch(Spec(group, 1, 32, 24), random());
    batch.Add(group < 6 ? 65 : 22, 100, 130, true);
    batch.Add(1, 63, 64, true);
    Build(batch);
    SCOPED_TRACE("group " + std::to_string(group));
    simt::UnderAllOrders(random(), [&] { EXPECT_TRUE(LaunchAndCompare(batch)); });
  }
}

// Rows before the first key, after the last one, windows of every kind. [1, 20, 21, 24]
TEST_P(TensorAttentionTest, MasksAgreeWithDouble) {
  std::mt19937_64 random(TestSeed());
  for (const int64_t window : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{63}, int64_t{64},
                               int64_t{65}, int64_t{100}, std::numeric_limits<int64_t>::max()}) {
    KernelSpec spec = Spec(2, 1, 16, 8);
    spec.window = window;
    KernelBatch batch(spec, random());
    for (const bool causal : {true, false}) {
      batch.Add(70, -30, 130, causal);  // some rows before all keys
      batch.Add(140, 30, 130, causal);  // some rows after all keys
      batch.Add(3, -200, 70, causal);   // far before
      batch.Add(3, 300, 70, causal);    // far after
      batch.Add(3, int64_t{1} << 61, 70, causal);
      batch.Add(3, -(int64_t{1} << 61), 70, causal);
      batch.Add(5, 122, 127, causal);  // bottom right
    }
    Build(batch);
    SCOPED_TRACE("window " + std::to_string(window));
    const simt::ScopedSettings scoped(SomeSettings(random));
    EXPECT_TRUE(LaunchAndCompare(batch));
  }
}

// [19, 25, 27, 52]
TEST_P(TensorAttentionTest, RulesOfScoresAgreeWithDouble) {
  std::mt19937_64 random(TestSeed());
  struct Rules {
    float scale;
    float softcap;
    bool alibi;
    bool bias;
    bool sinks;
  };
  constexpr Rules kRules[] = {{-0.25f, 0, false, false, false},     {0, 0, false, false, false},
                              {0.25f, 3, false, false, false},      {0.25f, 0, true, false, false},
                              {0.25f, 0, false, true, false},       {0.25f, 0, false, false, true},
                              {0.25f, 1e-30f, false, false, false}, {-0.5f, 5, true, true, true},
                              {3e38f, 1, false, false, false}};
  for (const Rules& rules : kRules) {
    for (const int width : {16, 128, 150, 250}) {
      if (width > 16 && rules.scale != -0.5f) continue;
      KernelSpec spec = Spec(6, 2, width, width);
      spec.scale = rules.scale;
      spec.softcap = rules.softcap;
      if (rules.alibi) spec.alibi_slopes = {0.5f, 0.25f, 0.125f, 0.01f, 0, -0.1f};
      if (rules.sinks) spec.sinks = {0, 1, -3, 60, -kInf, 2};
      KernelBatch batch(spec, random());
      for (const bool causal : {true, false}) {
        KernelItem& item = batch.Add(width == 16 ? 45 : 5, 70, 130, causal);
        if (rules.bias) {
          batch.AddBias(item, causal ? 6 : 1, causal ? 50 : 110, causal ? 20 : -40);
          for (float& bias : item.bias) {
            if (random() % 8 == 0) bias = -kInf;
          }
        }
      }
      Build(batch);
      SCOPED_TRACE("scale " + std::to_string(rules.scale) + " softcap " +
                   std::to_string(rules.softcap) + " width " + std::to_string(width));
      const simt::ScopedSettings scoped(SomeSettings(random));
      EXPECT_TRUE(LaunchAndCompare(batch));
    }
  }
}

// No keys, no visible keys, everything hidden by bias, with and without sinks: zeros.
// [1, 3, 6, 7, 11, 12, 13, 14, 16, 18]
TEST_P(TensorAttentionTest, RowsWithoutVisibleKeysAreZero) {
  std::mt19937_64 random(TestSeed());
  for (const bool sinks : {false, true}) {
    KernelSpec spec = Spec(2, 1, 24, 24);
    if (sinks) spec.sinks = {1.5f, -kInf};
    KernelBatch batch(spec, random());
    batch.Add(3, 0, 0, false);
    batch.Add(3, 0, 0, true);
    batch.Add(130, -100, 70, true);
    KernelItem& hidden = batch.Add(3, 69, 70, false);
    batch.AddBias(hidden, 1, 70, 0);
    std::fill_n(hidden.bias.begin(), 70, -kInf);
    KernelItem& late = batch.Add(3, 69, 130, false);  // whole blocks of -inf before the first key
    batch.AddBias(late, 1, 130, 0);
    for (int64_t i = 0; i < 390; ++i) {
      if (i % 130 != 64) late.bias[i] = -kInf;
    }
    Build(batch);
    EXPECT_TRUE(LaunchAndCompare(batch));
    EXPECT_EQ(batch.Output(0, 0, 0, 0), 0);
    EXPECT_EQ(batch.Output(3, 0, 1, 23), 0);
    EXPECT_EQ(batch.Statistics(3, 0, 0).max, sinks ? 1.5f : -kInf);
    EXPECT_EQ(batch.Statistics(3, 0, 0).sum, sinks ? 1 : 0);
    EXPECT_EQ(batch.Statistics(3, 0, 1).max, -kInf);
    EXPECT_EQ(batch.Statistics(3, 0, 1).sum, 0);
  }
}

// Scores of -6e4 [8], of +-3e38 [10], a sink far above the scores, one key that dominates.
TEST_P(TensorAttentionTest, ExtremeScores) {
  std::mt19937_64 random(TestSeed());
  for (const float size : {6e4f, 1e8f, 3e38f}) {
    KernelSpec spec = Spec(2, 1, 16, 16);
    spec.scale = 1;
    KernelBatch batch(spec, random());
    KernelItem& item = batch.Add(66, 69, 70, false);
    // Row r's score of key k is -size, but size for key r % 70.
    std::fill(item.q.begin(), item.q.end(), 0.0f);
    std::fill(item.k.begin(), item.k.end(), 0.0f);
    const float root = std::sqrt(size);
    for (int64_t row = 0; row < 66 * 2; ++row) {
      item.q[row * 16] = root;
      item.q[row * 16 + 1 + row / 2 % 15] = root;
    }
    for (int64_t key = 0; key < 70; ++key) {
      item.k[key * 16] = -root * 0.5f;
      item.k[key * 16 + 1 + key % 15] = root;
    }
    Build(batch);
    ASSERT_TRUE(Launch(batch));
    for (int64_t row = 0; row < 66; ++row) {
      const RowStatistics statistics = batch.Statistics(0, row, 1);
      const int64_t residue = row % 15;
      const auto equals = (70 - residue + 14) / 15;  // keys with the largest score
      EXPECT_NEAR(statistics.max, size / 2, size * 0.02);
      EXPECT_EQ(statistics.sum, static_cast<float>(equals));
      double mean = 0;
      for (int64_t key = residue; key < 70; key += 15) mean += item.v[key * 16 + 3];
      mean /= static_cast<double>(equals);
      EXPECT_NEAR(batch.Output(0, row, 1, 3), mean, 1e-5 * (1 + std::fabs(mean)));
    }
  }
  KernelSpec spec = Spec(2, 1, 16, 16);
  spec.sinks = {3e38f, 200};
  KernelBatch batch(spec, random());
  batch.Add(5, 69, 70, false);
  Build(batch);
  EXPECT_TRUE(LaunchAndCompare(batch));
  EXPECT_EQ(batch.Output(0, 2, 0, 3), 0);
}

// Tiles of one split each: not divided, without sinks, and written where no key is visible.
// [2, 5, 23, 57, 59]
TEST_P(TensorAttentionTest, SplitsAddUpToTheWhole) {
  std::mt19937_64 random(TestSeed());
  for (const int64_t split : {64, 128}) {
    KernelSpec spec = Spec(4, 2, 40, 33, DType::kF16);
    spec.sinks = {0, 1, 2, -1};
    spec.window = 150;
    KernelBatch batch(spec, random());
    batch.Add(6, 250, 256, true);
    batch.Add(40, 200, 260, true);  // rows that see nothing of a split
    batch.Add(40, 30, 300, false);
    batch.Add(2, 60, 62, true);  // one tile
    Build(batch, split);
    const simt::ScopedSettings scoped(SomeSettings(random));
    EXPECT_TRUE(LaunchAndCompare(batch, 4));
  }
}

// [41, 42, 48]
TEST_P(TensorAttentionTest, BlocksFurtherApartThan32Bits) {
  std::mt19937_64 random(TestSeed());
  KernelBatch batch(Spec(2, 2, 64, 64), random());
  batch.Add(17, 180, 200, true);
  batch.SpreadBlocks((int64_t{1} << 32) + (1 << 20));
  Build(batch);
  EXPECT_TRUE(LaunchAndCompare(batch));
}

// Blocks with less room, for short sequences. [39, 40]
TEST_P(TensorAttentionTest, ShortBlocks) {
  std::mt19937_64 random(TestSeed());
  for (const int tokens : {16, 32, 48}) {
    KernelBatch batch(Spec(4, 2, 72, 24), random());
    for (const int64_t keys : {1, tokens - 1, tokens}) {
      batch.Add(keys, 0, keys, true).block_tokens = tokens;
    }
    Build(batch);
    EXPECT_TRUE(LaunchAndCompare(batch));
  }
}

// More thread blocks than tiles, one for all, none. [16, 63]
TEST_P(TensorAttentionTest, AnyGridDoesAllTiles) {
  std::mt19937_64 random(TestSeed());
  KernelBatch batch(Spec(2, 1, 48, 48), random());
  batch.Add(70, 0, 70, true);
  batch.Add(3, 66, 70, false);
  Build(batch);
  ASSERT_TRUE(Launch(batch, 1));
  const auto bits = batch.ItemBits(0);
  for (const int64_t blocks : {1, 3, 40}) {
    EXPECT_TRUE(LaunchAndCompare(batch, blocks));
    EXPECT_EQ(batch.ItemBits(0), bits);
  }
  EXPECT_TRUE(Launch(batch, 0));
}

INSTANTIATE_TEST_SUITE_P(Kernels, TensorAttentionTest,
                         testing::Values(TensorPath::kPrefill, TensorPath::kDecode), PathName);

TEST(TensorAttentionLaunchTest, RefusesWhatItCannotRun) {
  AttentionParams params{};
  params.shape = {1, 64, 64, 4};
  EXPECT_EQ(LaunchTensorPrefill(params, DType::kF32, 1, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(LaunchTensorDecode(params, DType::kF32, 1, nullptr), cudaErrorInvalidValue);
  params.shape = {1, 257, 64, 2};
  EXPECT_EQ(LaunchTensorPrefill(params, DType::kBF16, 1, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(LaunchTensorDecode(params, DType::kF16, 1, nullptr), cudaErrorInvalidValue);
}

// 99 KiB, the least of the supported devices, is enough; less is refused. [76]
TEST(TensorAttentionLaunchTest, FitsTheSmallestDevice) {
  EXPECT_EQ(PrepareTensorPrefill(99 * 1024), cudaSuccess);
  EXPECT_EQ(PrepareTensorDecode(99 * 1024), cudaSuccess);
  EXPECT_EQ(PrepareTensorPrefill(48 * 1024), cudaErrorInvalidValue);
  EXPECT_EQ(PrepareTensorDecode(48 * 1024), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace attend
