// SPDX-License-Identifier: Apache-2.0
//
// Float attention, combine and attention weights in the emulation: against double, with hidden
// values that are not numbers, extreme scores, rows that see nothing, and splits. Inputs are
// random; ATTEND_TEST_SEED repeats a run.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "tests/simt/float_attention_fixture.h"
#include "tests/support/seed.h"

namespace attend {
namespace {

using simt::DeviceArray;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};

bool SameBits(float a, float b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

// Runs the case on random inputs and compares it with double.
void Check(FloatCase c, uint64_t seed) {
  std::mt19937_64 random(seed);
  FloatRun run(std::move(c));
  run.MakeInputs(random);
  run.Run();
  if (!testing::Test::HasFatalFailure()) run.CheckAgainstDouble();
}

TEST(FloatAttentionTest, ShapesOfEveryTypeMatchDouble) {
  std::mt19937_64 random(TestSeed());
  const int64_t rows[] = {0, 1, 7, 63, 64, 65, 130};
  const int64_t keys[] = {0, 1, 7, 63, 64, 65, 130, 600};
  const int groups[] = {1, 3, 8};
  const int widths[] = {1, 5, 12, 24, 64, 80, 128, 200, 256};
  int turn = 0;
  for (const DType kv_dtype : kFloats) {
    for (size_t w = 0; w < std::size(widths); ++w) {
      for (int repeat = 0; repeat < 2; ++repeat, ++turn) {
        const int group = groups[turn % 3];
        const int other = widths[random() % std::size(widths)];
        FloatCase c{.spec = RawSpec(2 * group, 2, repeat == 0 ? widths[w] : other,
                                    repeat == 0 ? other : widths[w])};
        c.kv_dtype = kv_dtype;
        c.output_dtype = kFloats[turn % 2 == 0 ? 0 : turn % 3];
        c.q_dtype = repeat == 0 ? DType::kF32 : kv_dtype;
        for (int i = 0; i < 3; ++i) {
          FloatItem item;
          item.rows = rows[random() % (widths[w] > 80 ? 4 : 7)];
          item.keys = keys[random() % (i > 0 ? 7 : 8)];
          item.causal = random() % 2 == 0;
          item.first_row = item.causal ? std::max<int64_t>(item.keys - item.rows, 0) : 0;
          if (item.keys <= 16) item.block_tokens = 16;
          c.items.push_back(item);
        }
        if (turn % 3 == 0) c.split_keys = 64;
        SCOPED_TRACE(std::string(DTypeName(kv_dtype)) + " widths " +
                     std::to_string(c.spec.head_dim) + ", " + std::to_string(c.spec.v_head_dim) +
                     " group " + std::to_string(group));
        Check(std::move(c), random());
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(FloatAttentionTest, EveryRowAndKeyCountAtAnEdge) {
  std::mt19937_64 random(TestSeed());
  for (const int64_t rows : {1, 8, 9, 31, 32, 33}) {
    for (const int64_t keys : {1, 63, 64, 65, 127, 128, 129}) {
      FloatCase c{.spec = RawSpec(1, 1, 8, 8)};
      c.items = {{.rows = rows, .keys = keys, .first_row = keys - rows},
                 {.rows = rows, .keys = keys, .first_row = 0, .causal = false}};
      SCOPED_TRACE(std::to_string(rows) + " rows " + std::to_string(keys) + " keys");
      Check(std::move(c), random());
      if (HasFatalFailure()) return;
    }
  }
}

// ---- Rules ----

FloatCase RulesCase() {
  FloatCase c{.spec = RawSpec(6, 2, 24, 12)};
  c.items = {{.rows = 13, .keys = 141, .first_row = 128},
             {.rows = 3, .keys = 70, .first_row = 67},
             {.rows = 9, .keys = 66, .first_row = 40, .causal = false}};
  c.split_keys = 64;
  return c;
}

void AddBias(FloatCase& c) {
  c.items[0].bias_columns = 141;
  c.items[1].bias_columns = 90;  // columns before key 0 and past the last key count for nothing
  c.items[1].bias_first_key = -10;
  c.items[1].bias_per_head = true;
  c.items[2].bias_columns = 30;
  c.items[2].bias_first_key = 36;  // keys before have bias 0
}

void AddHeadRules(FloatCase& c) {
  for (int head = 0; head < c.spec.q_heads; ++head) {
    c.spec.alibi_slopes.push_back(std::exp2(-static_cast<float>(head)));
    c.spec.sinks.push_back(static_cast<float>(head) - 2.5f);
  }
}

TEST(FloatAttentionTest, EachRuleMatchesDouble) {
  const uint64_t seed = TestSeed();
  for (const DType kv_dtype : {DType::kF32, DType::kBF16}) {
    for (int rule = 0; rule < 7; ++rule) {
      FloatCase c = RulesCase();
      c.kv_dtype = kv_dtype;
      if (rule == 0 || rule == 6) c.spec.softcap = 1.5f;
      if (rule == 1 || rule == 6) AddBias(c);
      if (rule == 2 || rule == 6) c.spec.window = 50;
      if (rule == 3) c.spec.window = 1;
      if (rule == 4 || rule == 6) AddHeadRules(c);
      if (rule == 4) c.spec.sinks.clear();
      if (rule == 5) {
        AddHeadRules(c);
        c.spec.alibi_slopes.clear();
        c.spec.sinks[1] = 100;  // far above the scores
        c.spec.sinks[2] = -kInf;
      }
      SCOPED_TRACE("rule " + std::to_string(rule));
      Check(std::move(c), seed + static_cast<uint64_t>(rule));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(FloatAttentionTest, EveryOrderOfThreadsGivesTheSame) {
  const uint64_t seed = TestSeed();
  simt::UnderAllOrders(seed, [&] {
    for (const int width : {24, 200}) {
      FloatCase c = RulesCase();
      c.spec.head_dim = width;
      c.items[0].rows = 3;
      c.spec.window = 100;
      AddBias(c);
      Check(std::move(c), seed);
    }
  });
}

TEST(FloatAttentionTest, NegativeScaleAndPositions) {
  FloatCase c{.spec = RawSpec(2, 1, 12, 12)};
  c.spec.scale = -0.7f;
  c.items = {{.rows = 40, .keys = 70, .first_row = -5},  // the first rows see nothing
             {.rows = 2, .keys = 3, .first_row = int64_t{1} << 40}};
  Check(std::move(c), TestSeed());
}

// ---- Rows that see nothing ----

TEST(FloatAttentionTest, RowsWithoutVisibleKeysAreZero) {
  std::mt19937_64 random(TestSeed());
  for (const bool with_sinks : {false, true}) {
    for (const int64_t split_keys : {int64_t{0}, int64_t{64}}) {
      FloatCase c{.spec = RawSpec(2, 1, 8, 5)};
      c.spec.window = 4;
      if (with_sinks) c.spec.sinks = {0.5f, -3.0f};
      c.split_keys = split_keys;
      c.items = {{.rows = 2, .keys = 0, .first_row = 0},
                 {.rows = 3, .keys = 70, .first_row = -3},
                 {.rows = 20, .keys = 70, .first_row = 80},  // the window lies past the keys
                 {.rows = 2, .keys = 5, .first_row = 3, .bias_columns = 5}};
      FloatRun run(c);
      run.MakeInputs(random);
      std::fill(run.item(3).bias.begin(), run.item(3).bias.end(), -kInf);
      run.Run();
      if (HasFatalFailure()) return;
      for (size_t i = 0; i < c.items.size(); ++i) {
        for (int64_t row = 0; row < c.items[i].rows; ++row) {
          for (int64_t head = 0; head < 2; ++head) {
            for (int64_t d = 0; d < 5; ++d) ASSERT_EQ(run.Output(i, row, head, d), 0);
            const RowStatistics statistics = run.Statistics(i, row, head);
            ASSERT_EQ(statistics.max, with_sinks ? c.spec.sinks[head] : -kInf);
            ASSERT_EQ(statistics.sum, with_sinks ? 1 : 0);
          }
        }
        for (const float weight : run.weights(i)) ASSERT_EQ(weight, 0);
      }
    }
  }
}

TEST(FloatAttentionTest, NoTilesAndNoItemsRunAndWriteNothing) {
  FloatCase c{.spec = RawSpec(1, 1, 8, 8)};
  Check(c, 1);
  c.items = {{.rows = 0, .keys = 9}};
  Check(c, 1);
}

// ---- Values that are not numbers ----

// What lies behind keys that a row doesn't see may be anything and changes no bit of the row.
TEST(FloatAttentionTest, HiddenKeysOfAnyContentChangeNoBit) {
  std::mt19937_64 random(TestSeed());
  for (const DType kv_dtype : kFloats) {
    for (const bool window : {false, true}) {
      FloatCase c{.spec = RawSpec(4, 2, 24, 72)};
      c.kv_dtype = kv_dtype;
      if (window) c.spec.window = 9;
      c.split_keys = 64;
      c.items = {{.rows = 40, .keys = 100, .first_row = 50},  // keys 90.. nobody sees
                 {.rows = 4, .keys = 70, .first_row = 60},
                 {.rows = 4, .keys = 70, .first_row = 66, .causal = false, .bias_columns = 70}};
      FloatRun run(c);
      run.MakeInputs(random);
      // Only bias hides key 69 of the last item from all rows but the last.
      for (int64_t row = 0; row < 3; ++row) run.item(2).bias[row * 70 + 69] = -kInf;
      run.item(2).bias[3 * 70 + 69] = 0;
      run.Run();
      const std::vector<std::byte> clean = run.output();
      const std::vector<float> clean_weights = run.weights(1);
      const float bad[] = {kNan, kInf, -kInf};
      for (size_t i = 0; i < c.items.size(); ++i) {
        FloatItem& item = run.item(i);
        const int64_t seen_by_last = item.first_row + item.rows - 1;
        for (int64_t key = 0; key < item.keys; ++key) {
          // Only the last row sees its own key; before the window nobody sees any.
          const bool before = window && key <= item.first_row - 9;
          if (key < seen_by_last && !before) continue;
          for (int64_t d = 0; d < 2 * 24; ++d) item.k[key * 48 + d] = bad[random() % 3];
          for (int64_t d = 0; d < 2 * 72; ++d) item.v[key * 144 + d] = bad[random() % 3];
        }
      }
      run.Run();
      if (HasFatalFailure()) return;
      size_t at = 0;
      for (const FloatItem& item : c.items) {
        const size_t row_bytes = 4 * 72 * 4;
        const auto rows = static_cast<size_t>(item.rows - 1);  // the last row sees a bad key
        ASSERT_EQ(std::memcmp(run.output().data() + at, clean.data() + at, rows * row_bytes), 0)
            << DTypeName(kv_dtype);
        at += (rows + 1) * row_bytes;
      }
      for (int64_t head = 0; head < 4; ++head) {
        for (int64_t row = 0; row < 3; ++row) {
          const int64_t from = (head * 4 + row) * 70;
          ASSERT_EQ(std::memcmp(&run.weights(1)[from], &clean_weights[from], 70 * sizeof(float)),
                    0);
        }
      }
    }
  }
}

TEST(FloatAttentionTest, VisibleNanShows) {
  std::mt19937_64 random(TestSeed());
  for (const int64_t split_keys : {int64_t{0}, int64_t{64}}) {
    FloatCase c{.spec = RawSpec(2, 2, 8, 6)};
    c.split_keys = split_keys;
    c.items = {{.rows = 4, .keys = 200, .first_row = 196},
               {.rows = 4, .keys = 200, .first_row = 196, .bias_columns = 200},
               {.rows = 1, .keys = 3, .first_row = 2},
               {.rows = 4, .keys = 200, .first_row = 196}};
    FloatRun clean(c);
    clean.MakeInputs(random);
    for (int64_t row = 0; row < 4; ++row) clean.item(1).bias[row * 200 + 130] = 0;
    clean.Run();
    FloatRun bad(clean.config());
    bad.item(0).v[(70 * 2 + 1) * 6 + 4] = kNan;   // key 70, head 1, column 4
    bad.item(1).k[(130 * 2 + 0) * 8 + 3] = kNan;  // key 130, head 0
    for (float& x : bad.item(2).k) x = kNan;      // all scores
    bad.item(3).q[(2 * 2 + 1) * 8] = kNan;        // row 2, head 1: every score of it
    bad.Run();
    if (HasFatalFailure()) return;
    for (size_t i = 0; i < 4; ++i) {
      for (int64_t row = 0; row < c.items[i].rows; ++row) {
        for (int64_t head = 0; head < 2; ++head) {
          for (int64_t d = 0; d < 6; ++d) {
            const bool nan = i == 0   ? head == 1 && d == 4
                             : i == 1 ? head == 0
                                      : i == 2 || (row == 2 && head == 1);
            const float got = bad.Output(i, row, head, d);
            ASSERT_TRUE(nan ? std::isnan(got) : SameBits(got, clean.Output(i, row, head, d)))
                << "item " << i << " row " << row << " head " << head << " d " << d;
          }
        }
      }
    }
    for (int64_t key = 0; key < 200; ++key) {  // row 0 of head 0
      const bool hidden = key > 196 || bad.item(1).bias[key] == -kInf;
      const float weight = bad.weights(1)[key];
      ASSERT_TRUE(hidden ? weight == 0 : std::isnan(weight)) << key;
    }
  }
}

// Whether or not some row of the tile has hidden keys: a row's bits don't depend on its company.
TEST(FloatAttentionTest, VisibleNanShowsAtWeightZero) {
  std::mt19937_64 random(1);
  for (const bool causal : {false, true}) {
    FloatCase c{.spec = RawSpec(1, 1, 1, 1)};
    c.spec.scale = 1;
    c.items = {{.rows = 2, .keys = 128, .first_row = 126, .causal = causal}};
    FloatRun run(c);
    run.MakeInputs(random);
    run.item(0).q = {1, 1};
    run.item(0).k.assign(128, 0.0f);
    run.item(0).k[66] = -1e4f;
    run.item(0).v[66] = kNan;
    run.Run();
    EXPECT_EQ(run.weights(0)[66], 0);
    EXPECT_TRUE(std::isnan(run.Output(0, 0, 0, 0)));
    EXPECT_TRUE(std::isnan(run.Output(0, 1, 0, 0)));
  }
}

// ---- Extreme scores ----

TEST(FloatAttentionTest, ScoresUpToTheLargestFloat) {
  for (const int64_t split_keys : {int64_t{0}, int64_t{64}}) {
    FloatCase c{.spec = RawSpec(1, 1, 1, 1)};
    c.spec.scale = 1;
    c.split_keys = split_keys;
    c.items = {{.rows = 2, .keys = 130, .first_row = 128, .causal = false}};
    FloatRun run(c);
    std::mt19937_64 random(1);
    run.MakeInputs(random);
    run.item(0).q = {3e38f, -3e38f};
    for (int64_t key = 0; key < 130; ++key) {
      run.item(0).k[key] = key == 77 ? 1.0f : key == 3 ? -1.0f : 0.5f;
    }
    run.Run();
    EXPECT_EQ(run.Output(0, 0, 0, 0), run.item(0).v[77]);
    EXPECT_EQ(run.Output(0, 1, 0, 0), run.item(0).v[3]);
    EXPECT_EQ(run.Statistics(0, 0, 0).max, 3e38f);
    EXPECT_EQ(run.Statistics(0, 0, 0).sum, 1);
    for (int64_t key = 0; key < 130; ++key) EXPECT_EQ(run.weights(0)[key], key == 77 ? 1 : 0);
    // Far below zero, all equal: no score may pass for hidden.
    run.item(0).q = {-3e38f, -6e4f};
    for (float& k : run.item(0).k) k = 1;
    run.Run();
    run.CheckAgainstDouble();
  }
}

// ---- Splits ----

TEST(FloatAttentionTest, AnyNumberOfSplitsSomeEmptyMatchesDouble) {
  std::mt19937_64 random(TestSeed());
  const std::pair<int64_t, std::vector<int>> cases[] = {
      {1, {}}, {2, {}}, {3, {}}, {5, {-1, 1, 4}}, {17, {-1, 0, 16}}, {1, {-1, 0}}};
  for (const auto& [splits, empty] : cases) {
    for (const int group : {1, 3, 8}) {
      FloatCase c{.spec = RawSpec(group * 2, 2, 12, 40)};
      c.output_dtype = group == 3 ? DType::kBF16 : DType::kF32;
      c.split_keys = 64;
      c.empty_after = empty;
      c.items = {{.rows = 2, .keys = splits * 64 - 7, .first_row = splits * 64 - 9}};
      if (splits == 5) c.spec.sinks.assign(static_cast<size_t>(group * 2), 1.5f);
      SCOPED_TRACE(std::to_string(splits) + " splits, group " + std::to_string(group));
      Check(std::move(c), random());
      if (HasFatalFailure()) return;
    }
  }
}

// An empty split's values are never read; a NaN sum is, whatever the maximum.
TEST(CombineTest, EmptySplitsAreSkippedAndNanSumsShow) {
  constexpr int kSplits = 70;
  constexpr int kRows = 3;
  constexpr int kWidth = 5;
  std::vector<RowStatistics> statistics(kSplits * kRows, {-kInf, 0.0f});
  std::vector<float> values(kSplits * kRows * kWidth, kNan);
  for (const int split : {3, 40, 69}) {
    for (int row = 0; row < 2; ++row) {
      statistics[split * kRows + row] = {static_cast<float>(split), 2.0f};
      for (int d = 0; d < kWidth; ++d) values[(split * kRows + row) * kWidth + d] = 1.0f + d;
    }
  }
  statistics[5 * kRows + 1] = {-kInf, kNan};
  const DeviceArray<BatchShape> batch({BatchShape{1, 0, 0, 1, 3, 0, 3}}, "batch");
  ItemShape item{};
  item.rows = kRows;
  const DeviceArray<ItemShape> items({item}, "items");
  const DeviceArray<CombineTile> combines({CombineTile{0, 0, 0, 0, kRows, kSplits}}, "combines");
  const DeviceArray<RowStatistics> partial_statistics(statistics, "partial_statistics");
  const DeviceArray<float> partial_output(values, "partial_output");
  const DeviceArray<float> output(kRows * kWidth, "output");
  const DeviceArray<RowStatistics> out_statistics(kRows, "statistics");
  AttentionParams params{};
  params.batch = batch.data();
  params.items = items.data();
  params.combines = combines.data();
  params.shape = {1, 8, kWidth, 4};
  params.q_heads = 1;
  params.group = 1;
  params.output = output.data();
  params.output_dtype = DType::kF32;
  params.statistics = out_statistics.data();
  params.partial_output = partial_output.data();
  params.partial_statistics = partial_statistics.data();
  ASSERT_EQ(LaunchCombine(params, 5, nullptr), cudaSuccess);
  ASSERT_TRUE(output.Written() && out_statistics.Written());
  for (int d = 0; d < kWidth; ++d) {
    EXPECT_NEAR(output[d], (1.0 + d) / 2, 1e-6 * (1 + d));
    EXPECT_TRUE(std::isnan(output[kWidth + d]));
    EXPECT_EQ(output[2 * kWidth + d], 0);  // all splits are empty
  }
  EXPECT_EQ(out_statistics[0].max, 69);
  EXPECT_TRUE(std::isnan(out_statistics[1].sum));
  EXPECT_EQ(out_statistics[2].max, -kInf);
  EXPECT_EQ(out_statistics[2].sum, 0);
}

// ---- Independence ----

// A row's bits depend on its query and its keys: not on the other items, on the number of thread
// blocks, or on other rows' queries.
TEST(FloatAttentionTest, BitsDontDependOnCompany) {
  std::mt19937_64 random(TestSeed());
  FloatCase c{.spec = RawSpec(6, 2, 20, 16)};
  c.split_keys = 64;
  c.items = {{.rows = 37, .keys = 137, .first_row = 100},
             {.rows = 2, .keys = 333, .first_row = 331}};
  FloatRun both(c);
  both.MakeInputs(random);
  both.Run();
  for (size_t i = 0; i < 2; ++i) {
    FloatCase alone = c;
    alone.items = {both.item(i)};
    alone.blocks = 50;
    FloatRun run(alone);
    if (i == 0) {
      for (size_t x = 6 * 20; x < 7 * 6 * 20; ++x) run.item(0).q[x] = 1e30f;  // rows 1 to 6
    }
    run.Run();
    if (HasFatalFailure()) return;
    for (int64_t row = 0; row < c.items[i].rows; ++row) {
      if (i == 0 && row >= 1 && row < 7) continue;
      for (int64_t head = 0; head < 6; ++head) {
        for (int64_t d = 0; d < 16; ++d) {
          ASSERT_TRUE(SameBits(run.Output(0, row, head, d), both.Output(i, row, head, d)))
              << "item " << i << " row " << row;
        }
      }
    }
  }
}

// ---- Sizes ----

TEST(FloatAttentionTest, BlocksFarApartAreReached) {
  FloatCase c{.spec = RawSpec(2, 1, 8, 8)};
  c.kv_dtype = DType::kF16;
  c.block_distance = (int64_t{5} << 30) + 64;
  c.items = {{.rows = 3, .keys = 200, .first_row = 197}};
  Check(std::move(c), TestSeed());
}

TEST(FloatAttentionTest, HundredsOfHeads) {
  FloatCase c{.spec = RawSpec(600, 300, 3, 2)};
  c.blocks = 7;
  c.items = {{.rows = 1, .keys = 5, .first_row = 4, .block_tokens = 16}};
  Check(std::move(c), TestSeed());
}

TEST(FloatAttentionTest, SharedMemoryFitsEveryArchitecture) {
  EXPECT_EQ(PrepareFloatAttention(99 * 1024), cudaSuccess);
  EXPECT_EQ(PrepareWeights(99 * 1024), cudaSuccess);
  EXPECT_EQ(PrepareFloatAttention(48 * 1024), cudaErrorInvalidValue);
  EXPECT_EQ(PrepareWeights(32 * 1024), cudaErrorInvalidValue);
}

// Rows of eight chunks read and written without bank conflicts: the swizzle's and stride's purpose.
TEST(FloatAttentionTest, SharedMemoryHasFewBankConflicts) {
  simt::Settings settings = simt::settings();
  settings.count_banks = true;
  const simt::ScopedSettings scoped(settings);
  for (const int width : {64, 128}) {
    FloatCase c{.spec = RawSpec(1, 1, width, width)};
    c.items = {{.rows = 32, .keys = 640, .first_row = 0, .causal = false}};
    simt::ResetCounters();
    Check(std::move(c), 1);
    const simt::Counters& counters = simt::counters();
    EXPECT_LT(counters.shared_conflicts * 20, counters.shared_wavefronts) << width;
  }
}

}  // namespace
}  // namespace attend
