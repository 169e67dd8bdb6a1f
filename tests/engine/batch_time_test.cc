// SPDX-License-Identifier: Apache-2.0
//
// Prediction and cutting as pure functions, against made-up machines that are memory-bound for few
// rows and compute-bound for many.
#include "engine/batch_time.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "tests/support/seed.h"

namespace attend {
namespace {

AttentionSpec Layer(int width, int q_heads, int kv_heads, int head_dim) {
  AttentionSpec spec;
  spec.d_model = spec.context_width = spec.output_width = width;
  spec.q_heads = q_heads;
  spec.kv_heads = kv_heads;
  spec.head_dim = spec.v_head_dim = head_dim;
  spec.causal = true;
  return spec;
}

AttendItem Rows(int64_t rows, int64_t cached) {
  AttendItem item;
  item.rows = item.new_keys = rows;
  item.cached_keys = item.first_row = cached;
  item.causal = true;
  return item;
}

BatchWork Work(const AttentionSpec& spec, int64_t rows, int64_t cached) {
  return WorkOf(spec, DType::kBF16, Rows(rows, cached));
}

TEST(WorkOfTest, ProductsGrowWithRowsAndAttentionWithVisibleKeysOnly) {
  AttentionSpec spec = Layer(64, 4, 2, 16);
  AttendItem item = Rows(10, 990);
  item.new_keys = 0;
  item.cached_keys = 1000;
  const BatchWork work = WorkOf(spec, DType::kF32, item);
  EXPECT_DOUBLE_EQ(work.weights, 2 * 64 * 64);
  EXPECT_DOUBLE_EQ(work.product_flops, 10 * 2.0 * 64 * 64 * 2);
  EXPECT_DOUBLE_EQ(work.attend_flops, 10 * 2.0 * 996 * 128);
  EXPECT_DOUBLE_EQ(work.kv_bytes, 1000 * 2 * (16 + 16) * 4);
  item.new_keys = 10;
  item.cached_keys = 990;
  EXPECT_DOUBLE_EQ(WorkOf(spec, DType::kF32, item).product_flops,
                   work.product_flops + 10 * 2.0 * 64 * 64);
  spec.window = 10;
  EXPECT_DOUBLE_EQ(WorkOf(spec, DType::kF32, item).attend_flops, 10 * 2.0 * 10 * 128);
  EXPECT_DOUBLE_EQ(WorkOf(spec, DType::kF32, item).kv_bytes, 19 * 2 * (16 + 16) * 4);
  item.rows = 0;
  EXPECT_EQ(WorkOf(spec, DType::kF32, item).attend_flops, 0);
  EXPECT_EQ(WorkOf(spec, DType::kF32, item).rows, 10);
  spec.d_model = spec.context_width = 0;
  EXPECT_EQ(WorkOf(spec, DType::kF32, item).product_flops, 0) << "raw work brings no products";
}

TEST(WorkOfTest, ItemsOfABatchShareItsWeights) {
  const AttentionSpec spec = Layer(64, 4, 4, 16);
  BatchWork batch = Work(spec, 3, 0);
  const BatchWork item = Work(spec, 40, 100);
  batch.Add(item);
  EXPECT_EQ(batch.weights, item.weights);
  EXPECT_EQ(batch.rows, 43);
  EXPECT_EQ(batch.most_rows, 40);
  EXPECT_GT(batch.kv_bytes, item.kv_bytes);
}

// A machine: of reading and computing the slower one takes the time, and a batch has its overhead.
struct Machine {
  double weights_per_us;
  double product_flops_per_us;
  double bytes_per_us;
  double attend_flops_per_us;

  StageTimes Run(const BatchWork& work) const {
    return {static_cast<int64_t>(20 + std::max(work.weights / weights_per_us,
                                               work.product_flops / product_flops_per_us)),
            static_cast<int64_t>(10 + std::max(work.kv_bytes / bytes_per_us,
                                               work.attend_flops / attend_flops_per_us)),
            0};
  }
};

void Measure(const Machine& machine, const BatchWork& work, BatchTime& time) {
  const StageTimes stages = machine.Run(work);
  time.Observe(work, double(stages.project_us + stages.attend_us), stages);
}

double Took(const Machine& machine, const BatchWork& work) {
  const StageTimes stages = machine.Run(work);
  return double(stages.project_us + stages.attend_us);
}

TEST(BatchTimeTest, LearnsOneRowAndManyRowsApartWhateverTheTraffic) {
  const AttentionSpec spec = Layer(4096, 32, 8, 128);
  const Machine machine{20000, 500000, 40000, 200000};
  std::mt19937_64 random(TestSeed());
  BatchTime time;
  for (int i = 0; i < 40; ++i) {
    Measure(machine, Work(spec, 1, 4096), time);
    Measure(machine, Work(spec, 256 + static_cast<int64_t>(random() % 512), 4096), time);
  }
  const auto expect_close = [&](int64_t rows, int64_t cached) {
    const BatchWork work = Work(spec, rows, cached);
    EXPECT_NEAR(time.PredictUs(work) / Took(machine, work), 1, 0.25) << rows << " at " << cached;
  };
  expect_close(1, 4096);
  expect_close(512, 4096);
  expect_close(1, 60000);
  expect_close(512, 60000);
  // Hours of decoding teach nothing wrong about prefills.
  for (int i = 0; i < 20000; ++i) Measure(machine, Work(spec, 1, 4096), time);
  expect_close(1, 4096);
  expect_close(512, 4096);
  // Nor do weights that take longer to read: many rows still take the time of their arithmetic.
  Machine slow = machine;
  slow.weights_per_us /= 3;
  const BatchWork step = Work(spec, 1, 128);
  for (int i = 0; i < 200; ++i) Measure(slow, step, time);
  EXPECT_NEAR(time.PredictUs(step) / Took(slow, step), 1, 0.1);
  expect_close(512, 4096);
}

TEST(BatchTimeTest, OverheadOfTinyBatchesIsNotTheTimeOfReading) {
  const AttentionSpec tiny = Layer(0, 2, 1, 16);
  const AttentionSpec large = Layer(0, 16, 1, 64);
  const Machine machine{20000, 500000, 40000, 200000};
  BatchTime time;  // of raw work, whatever its shape
  for (int i = 0; i < 100; ++i) Measure(machine, Work(tiny, 6, 0), time);
  EXPECT_LT(time.PredictUs(Work(large, 1, 32768)), 5 * Took(machine, Work(large, 1, 32768)));
}

TEST(BatchTimeTest, IsUnknownUntilManyRowsWereMeasured) {
  const AttentionSpec spec = Layer(768, 12, 12, 64);
  BatchTime time;
  EXPECT_FALSE(time.Known(Work(spec, 1, 0)));
  EXPECT_GT(time.PredictUs(Work(spec, 100, 0)), 0);
  const Machine machine{20000, 500000, 40000, 200000};
  for (int i = 0; i < 5; ++i) Measure(machine, Work(spec, StageTime::kManyRows - 1, 0), time);
  EXPECT_FALSE(time.Known(Work(spec, 100, 0)));
  AttendItem keys_only = Rows(64, 0);
  keys_only.rows = 0;
  const BatchWork keys = WorkOf(spec, DType::kBF16, keys_only);
  Measure(machine, keys, time);
  EXPECT_TRUE(time.Known(keys));
  EXPECT_FALSE(time.Known(Work(spec, 100, 0))) << "no row has attended";
  Measure(machine, Work(spec, StageTime::kManyRows, 0), time);
  EXPECT_TRUE(time.Known(Work(spec, 100, 0)));
}

TEST(BatchTimeTest, FollowsAMachineThatBecomesSlowerAndForgivesASingleHiccup) {
  const AttentionSpec spec = Layer(768, 12, 12, 64);
  const BatchWork work = Work(spec, 128, 0);
  BatchTime time;
  for (int i = 0; i < 30; ++i) time.Observe(work, 1000, {600, 400, 0});
  EXPECT_NEAR(time.PredictUs(work), 1000, 20);
  time.Observe(work, 1e6, {600000, 400000, 0});
  EXPECT_LT(time.PredictUs(work), 2000);
  for (int i = 0; i < 30; ++i) time.Observe(work, 3000, {1800, 1200, 0});
  EXPECT_NEAR(time.PredictUs(work), 3000, 60);
}

TEST(BatchTimeTest, SmallChunksAfterAnInterruptedBatchBringTheRateBack) {
  const AttentionSpec spec = Layer(1024, 16, 16, 64);
  const Machine machine{20000, 500000, 40000, 200000};
  BatchTime time;
  for (int i = 0; i < 20; ++i) Measure(machine, Work(spec, 256, 2000), time);
  for (int i = 0; i < 5; ++i) time.Observe(Work(spec, 48, 2000), 1e5, {60000, 40000, 0});
  int64_t rows = 0;
  for (int i = 0; i < 40; ++i) {
    rows =
        MostRows(2048, [&](int64_t most) { return time.PredictUs(Work(spec, most, 2000)) < 5000; });
    Measure(machine, Work(spec, std::max<int64_t>(rows, 1), 2000), time);
  }
  EXPECT_GE(rows, 64) << "86 take 5000 us";
}

TEST(BatchTimeTest, AStageOfLessThanAMicrosecondTeachesNothing) {
  const AttentionSpec spec = Layer(768, 12, 12, 64);
  const BatchWork work = Work(spec, 256, 0);
  BatchTime time;
  time.Observe(work, 1000, {600, 400, 0});
  const double predicted = time.PredictUs(work);
  time.Observe(Work(spec, 1, 0), 6, {5, 0, 0});
  EXPECT_NEAR(time.PredictUs(work), predicted, predicted / 100);
}

TEST(BatchTimeTest, RawWorkTakesAllItsTimeForAttention) {
  const AttentionSpec spec = Layer(0, 8, 8, 64);
  BatchTime time;
  for (int i = 0; i < 20; ++i) time.Observe(Work(spec, 256, 0), 1000, {300, 650, 50});
  EXPECT_NEAR(time.PredictUs(Work(spec, 256, 0)), 1000, 20);
}

TEST(BatchTimeTest, DoesWithoutStageTimesAndWithoutWork) {
  const AttentionSpec spec = Layer(768, 12, 12, 64);
  const BatchWork work = Work(spec, 128, 500);
  BatchTime time;
  for (int i = 0; i < 50; ++i) time.Observe(work, 800, {});
  EXPECT_NEAR(time.PredictUs(work), 800, 10);
  time.Observe({}, 800, {});
  EXPECT_NEAR(time.PredictUs(work), 800, 10);
  EXPECT_EQ(time.PredictUs({}), 0);
}

// Chunk after chunk of a prefill beside appends, as the runtime cuts it: how long the chunks take.
struct Chunks {
  double longest_us = 0;  // from the second one on
  int64_t fewest_rows = 1 << 30;
  int64_t count = 0;
};
Chunks Prefill(const AttentionSpec& spec, const Machine& machine, int64_t cached, int64_t rows,
               double chunk_us) {
  BatchTime time;
  Chunks chunks;
  for (int64_t at = cached; at < cached + rows; ++chunks.count) {
    Measure(machine, Work(spec, 1, 128), time);
    const bool known = time.Known(Work(spec, 100, at));
    const int64_t left = cached + rows - at;
    const int64_t most = MostRows(std::min<int64_t>(left, 2048), [&](int64_t count) {
      return time.PredictUs(Work(spec, count, at)) <= chunk_us ||
             (!known && count <= StageTime::kManyRows);
    });
    const BatchWork work = Work(spec, std::max<int64_t>(1, most), at);
    Measure(machine, work, time);
    if (chunks.count >= 3) chunks.longest_us = std::max(chunks.longest_us, Took(machine, work));
    if (work.rows < left) chunks.fewest_rows = std::min(chunks.fewest_rows, work.rows);
    at += work.rows;
  }
  return chunks;
}

TEST(ChunkTest, ChunksTakeWhatWasAskedOrOneRow) {
  const Machine machine{20000, 500000, 40000, 200000};
  const AttentionSpec wide = Layer(4096, 32, 8, 128);
  const AttentionSpec tiny = Layer(64, 4, 4, 16);
  for (const double chunk_us : {5000.0, 20000.0, 100000.0}) {
    for (const int64_t cached : {int64_t{0}, int64_t{8192}}) {
      const Chunks chunks = Prefill(wide, machine, cached, 4096, chunk_us);
      EXPECT_LE(chunks.longest_us, 1.5 * chunk_us) << cached;
      EXPECT_LE(chunks.count, 4096 / 2) << "chunks shorter than asked";
    }
  }
  // A million keys: a row reads four gigabytes.
  const Chunks enormous = Prefill(wide, machine, 1 << 20, 40, 5000);
  EXPECT_EQ(enormous.fewest_rows, 1);
  // A pass over the weights takes longer than the chunk: still one row at a time, and it ends.
  EXPECT_EQ(Prefill(wide, machine, 0, 64, 100).fewest_rows, 1);
  // Tiny layers are cut by tokens only.
  EXPECT_EQ(Prefill(tiny, machine, 0, 4096, 20000).count, 2);
}

TEST(BatchBudgetTest, ShortChunksOnlyWhileSomebodyIsLikelyToCome) {
  constexpr int64_t kNow = 10'000'000;
  EXPECT_EQ(BatchBudgetUs(5000, 1e9, kNow, {}), 100000);
  EXPECT_EQ(BatchBudgetUs(5000, 1e9, kNow, {.append_us = kNow}), 5000);
  EXPECT_EQ(BatchBudgetUs(5000, 1e9, kNow, {.append_us = kNow - 499'999}), 5000);
  EXPECT_EQ(BatchBudgetUs(5000, 1e9, kNow, {.append_us = kNow - 500'000}), 100000);
  EXPECT_EQ(BatchBudgetUs(5000, 6000, kNow, {.append_us = kNow}), 5000);
  // Requests that take less than a chunk only count against truly long work.
  EXPECT_EQ(BatchBudgetUs(5000, 6000, kNow, {.short_us = kNow}), 100000);
  EXPECT_EQ(BatchBudgetUs(5000, 1e9, kNow, {.short_us = kNow}), 5000);
  EXPECT_EQ(BatchBudgetUs(5000, 1e9, kNow, {.short_us = kNow - 500'000}), 100000);
  // Long work has a third of the engine beside batches that take longer than chunks.
  RecentWork recent;
  recent.append_us = kNow;
  recent.few_rows_batch_us = 8000;
  EXPECT_EQ(BatchBudgetUs(100, 1e9, kNow, recent), 4000);
  EXPECT_EQ(BatchBudgetUs(5000, 1e9, kNow, recent), 5000);
  recent.few_rows_batch_us = 1e9;
  EXPECT_EQ(BatchBudgetUs(100, 1e9, kNow, recent), 100000);
  // A longer chunk than an undisturbed one: the flag wins.
  EXPECT_EQ(BatchBudgetUs(300000, 1e9, kNow, {}), 300000);
  EXPECT_EQ(BatchBudgetUs(300000, 1e9, kNow, {.append_us = kNow}), 300000);
}

TEST(MostRowsTest, WholeBlocksThenWholeTilesThenAnyNumber) {
  const auto rows = [](int64_t most, int64_t limit) {
    return MostRows(most, [limit](int64_t count) { return count <= limit; });
  };
  EXPECT_EQ(rows(5000, 0), 0);
  EXPECT_EQ(rows(5000, 1), 1);
  EXPECT_EQ(rows(5000, 15), 15);
  EXPECT_EQ(rows(5000, 31), 16);
  EXPECT_EQ(rows(5000, 63), 48);
  EXPECT_EQ(rows(5000, 64), 64);
  EXPECT_EQ(rows(5000, 1000), 960);
  EXPECT_EQ(rows(1, 1000), 1);
  EXPECT_EQ(rows(0, 1000), 0);
}

}  // namespace
}  // namespace attend
