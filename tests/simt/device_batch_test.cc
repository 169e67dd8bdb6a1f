// SPDX-License-Identifier: Apache-2.0
//
// The layout of a batch in device memory: integers only, no kernel runs. The tasks of a layout are
// carried out here by plain loops, with host memory as the slab.
#include "engine/cuda/device_batch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/support/seed.h"
#include "tests/support/test_batches.h"

namespace attend {
namespace {

constexpr DType kF32 = DType::kF32;
constexpr DType kBF16 = DType::kBF16;

// Sequences, their items and the plan; the addresses of blocks are only numbers here.
struct Batch {
  AttentionSpec spec;
  DType kv = kF32;
  std::vector<TestSequence> sequences;
  std::vector<AttendItem> items;
  BatchPlan plan;
  BatchWork work;

  void Add(Random& random, int64_t rows, int64_t keys, DType dtype = kF32) {
    sequences.push_back(RandomSequence(random, spec, kv, dtype, dtype, rows, keys));
    TestSequence& sequence = sequences.back();
    for (int64_t block = 0; block * kBlockTokens < keys; ++block) {
      sequence.blocks.push_back((static_cast<int64_t>(sequences.size()) << 32) + block * 4096);
    }
  }
  // Items point into the sequences, which must stay where they are.
  void Plan(DType compute, DType q_dtype) {
    for (TestSequence& sequence : sequences) {
      if (items.size() < sequences.size()) items.push_back(sequence.Whole());
    }
    auto built = BuildPlan(spec.raw() ? -1 : 0, spec, kv, items);
    ASSERT_TRUE(built.ok()) << built.status();
    plan = *std::move(built);
    const auto padded = [](int64_t width) { return (width + 7) / 8 * 8; };
    work.plan = &plan;
    work.items = items;
    work.compute = compute;
    work.q_dtype = q_dtype;
    const int64_t q = int64_t{spec.q_heads} * spec.head_dim;
    work.projected_width = padded(q);
    if (spec.raw()) return;
    work.x_width = padded(spec.d_model);
    work.context_width = spec.cross ? padded(spec.context_width) : 0;
    work.kv_width = spec.cross ? padded(int64_t{spec.kv_heads} * spec.head_dim) * 2 : 0;
    work.attended_width = padded(int64_t{spec.q_heads} * spec.v_head_dim);
    work.output_width = padded(spec.output_width);
  }
};

AttentionSpec CausalSpec(int d_model, int q_heads, int kv_heads, int dim, int v_dim) {
  AttentionSpec spec = PlainSpec(d_model, q_heads, kv_heads, dim, v_dim);
  spec.causal = true;
  return spec;
}

template <class T>
const T* At(const std::vector<std::byte>& slab, int64_t offset) {
  return reinterpret_cast<const T*>(slab.data() + offset);
}

void CarryOut(const ConvertTask* tasks, int64_t count) {
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t i = 0; i < tasks[t].count; ++i) {
      StoreFloat(tasks[t].to_dtype, LoadFloat(tasks[t].from_dtype, tasks[t].from, i), tasks[t].to,
                 i);
    }
  }
}

// Every visible (packed row, key) pair of every head lies in exactly one tile, splits are aligned,
// and partial rows are given out once.
void CheckTiles(const Batch& batch, const DeviceBatch& device, const std::vector<std::byte>& slab,
                const BatchLayout& layout) {
  const BatchCounts& counts = device.counts();
  std::vector<AttentionTile> tiles(
      At<AttentionTile>(slab, layout.prefill_tiles),
      At<AttentionTile>(slab, layout.prefill_tiles) + counts.prefill_tiles);
  tiles.insert(tiles.end(), At<AttentionTile>(slab, layout.decode_tiles),
               At<AttentionTile>(slab, layout.decode_tiles) + counts.decode_tiles);
  std::map<std::array<int64_t, 3>, std::vector<KeyRange>> of_row;  // item, head, packed row
  std::set<int64_t> partial_rows;
  for (const AttentionTile& tile : tiles) {
    EXPECT_EQ(tile.key_begin % kBlockTokens, 0);
    EXPECT_GT(tile.rows, 0);
    for (int64_t row = tile.row_begin; row < tile.row_begin + tile.rows; ++row) {
      of_row[{tile.item, tile.kv_head, row}].push_back({tile.key_begin, tile.key_end});
      if (tile.partial < 0) continue;
      EXPECT_EQ(tile.key_begin / kSplitKeys, (tile.key_end - 1) / kSplitKeys);
      EXPECT_TRUE(partial_rows.insert(tile.partial + row - tile.row_begin).second);
    }
  }
  EXPECT_EQ(static_cast<int64_t>(partial_rows.size()), counts.partial_rows);
  size_t rows = 0;
  for (int place = 0; place < batch.plan.items(); ++place) {
    const AttendItem& item = device.work().item(place);
    for (int64_t head = 0; head < batch.spec.kv_heads; ++head) {
      for (int64_t row = 0; row < item.rows * batch.spec.group_size(); ++row, ++rows) {
        std::vector<KeyRange>& ranges = of_row[{place, head, row}];
        ASSERT_FALSE(ranges.empty());
        std::sort(ranges.begin(), ranges.end(),
                  [](const KeyRange& a, const KeyRange& b) { return a.begin < b.begin; });
        const KeyRange seen = VisibleKeys(
            batch.spec, item.causal, item.first_row + row / batch.spec.group_size(), item.keys());
        for (size_t i = 1; i < ranges.size(); ++i) EXPECT_EQ(ranges[i].begin, ranges[i - 1].end);
        if (seen.end == seen.begin) continue;
        EXPECT_LE(ranges.front().begin, seen.begin);
        EXPECT_GE(ranges.back().end, seen.end);
        EXPECT_LE(ranges.back().end, item.keys());
      }
    }
  }
  EXPECT_EQ(of_row.size(), rows);
}

TEST(DeviceBatchTest, TilesCoverWhatRowsSeeOnce) {
  Random random(TestSeed());
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    Batch batch;
    const int group = static_cast<int>(Uniform(random, 1, 9));
    const int kv_heads = static_cast<int>(Uniform(random, 1, 3));
    batch.spec = PlainSpec(0, group * kv_heads, kv_heads, 8, 8);
    batch.spec.causal = round % 2 == 0;
    if (round % 3 == 0) batch.spec.window = Uniform(random, 1, 1500);
    batch.kv = round % 4 < 2 ? kBF16 : kF32;
    for (int i = 0; i < 4; ++i) batch.Add(random, Uniform(random, 0, 70), Uniform(random, 0, 2000));
    batch.Add(random, 1, 1 + round * 64);
    batch.Plan(kF32, batch.kv);
    const DeviceBatch device(batch.work);
    const BatchLayout layout = device.Place(device.counts());
    std::vector<std::byte> slab(static_cast<size_t>(layout.bytes));
    device.Fill(layout, slab.data(), slab.data());
    CheckTiles(batch, device, slab, layout);
  }
}

TEST(DeviceBatchTest, HowAnItemIsCutDependsOnTheItemAlone) {
  Random random(3);
  const auto tiles_of = [&](bool with_others) {
    Batch batch;
    batch.spec = CausalSpec(0, 8, 2, 16, 16);
    batch.kv = kBF16;
    batch.Add(random, 4, 1700);
    if (with_others) {
      for (int64_t keys : {1, 90, 3000}) batch.Add(random, 1, keys);
    }
    batch.Plan(kF32, kBF16);
    const DeviceBatch device(batch.work);
    const BatchLayout layout = device.Place(device.counts());
    std::vector<std::byte> slab(static_cast<size_t>(layout.bytes));
    device.Fill(layout, slab.data(), slab.data());
    std::set<std::array<int64_t, 5>> tiles;
    const auto* first = At<AttentionTile>(slab, layout.decode_tiles);
    for (int64_t t = 0; t < device.counts().decode_tiles; ++t) {
      if (first[t].item != 0) continue;
      tiles.insert({first[t].kv_head, first[t].row_begin, first[t].rows, first[t].key_begin,
                    first[t].key_end});
    }
    return tiles;
  };
  const auto alone = tiles_of(false);
  EXPECT_EQ(alone.size(), 8u);  // two heads, four splits
  EXPECT_EQ(tiles_of(true), alone);
}

// Offsets are ascending parts of the slab without overlap.
TEST(DeviceBatchTest, PartsOfTheSlabDoNotOverlap) {
  Random random(5);
  Batch batch;
  batch.spec = CausalSpec(40, 4, 2, 12, 20);
  batch.spec.alibi_slopes.assign(4, 0.5f);
  batch.spec.sinks.assign(4, 1.0f);
  for (int64_t rows : {1, 5, 70}) batch.Add(random, rows, rows);
  batch.sequences[1].AskWeights({0, 3});
  batch.Plan(kBF16, kF32);
  const DeviceBatch device(batch.work);
  const BatchLayout l = device.Place(device.counts());
  const std::vector<std::pair<int64_t, int64_t>> parts = {
      {l.shape, sizeof(BatchShape)},
      {l.items, 3 * sizeof(ItemShape)},
      {l.prefill_tiles, device.counts().prefill_tiles * sizeof(AttentionTile)},
      {l.input_tasks, device.counts().input_tasks * sizeof(ConvertTask)},
      {l.output_tasks, device.counts().output_tasks * sizeof(ConvertTask)},
      {l.weights_tasks, device.counts().weights_tasks * sizeof(WeightsTask)},
      {l.blocks, device.counts().blocks * 8},
      {l.slopes, 4 * 4},
      {l.sinks, 4 * 4},
      {l.given, device.counts().given_bytes},
      {l.x, 76 * 40 * 2},
      {l.projected, 76 * 48 * 4},
      {l.q, 76 * 4 * 12 * 4},
      {l.attended, 76 * 80 * 2},
      {l.output, 76 * 40 * 4},
      {l.statistics, 76 * 4 * sizeof(RowStatistics)},
      {l.results, device.counts().result_bytes}};
  for (size_t i = 0; i + 1 < parts.size(); ++i) {
    EXPECT_LE(parts[i].first + parts[i].second, parts[i + 1].first) << "part " << i;
    EXPECT_EQ(parts[i].first % 256, 0);
  }
  EXPECT_LE(parts.back().first + parts.back().second, l.bytes);
  EXPECT_EQ(l.x, l.upload_bytes);
}

TEST(DeviceBatchTest, RowsArriveWhereTheProductsReadThem) {
  Random random(TestSeed());
  for (const auto& [d_model, cross] : {std::pair{40, false}, {33, false}, {24, true}}) {
    Batch batch;
    batch.spec = PlainSpec(d_model, 2, 1, 8, 8);
    batch.spec.causal = !cross;
    batch.spec.cross = cross;
    if (cross) batch.spec.context_width = 21;
    const DType dtypes[] = {kF32, kBF16, DType::kF16};
    for (int i = 0; i < 5; ++i) {
      const int64_t rows = Uniform(random, 0, 800);
      batch.Add(random, rows, cross ? Uniform(random, 0, 90) : rows, dtypes[i % 3]);
    }
    // Two pieces of one sequence: rows without keys, keys without rows.
    if (!cross) {
      for (int i = 0; i < 3; ++i) batch.items.push_back(batch.sequences[i].Whole());
      batch.items.push_back(batch.sequences[3].Whole());
      batch.items.back().new_keys = 0;
      batch.items.back().cached_keys = batch.sequences[3].keys;
      batch.items.push_back(batch.sequences[4].Whole());
      batch.items.back().rows = 0;
    }
    batch.Plan(kBF16, kF32);
    const DeviceBatch device(batch.work);
    const BatchLayout layout = device.Place(device.counts());
    std::vector<std::byte> slab(static_cast<size_t>(layout.bytes), std::byte{0xff});
    device.Fill(layout, slab.data(), slab.data());
    CarryOut(At<ConvertTask>(slab, layout.input_tasks), layout.counts.input_tasks);
    const auto check = [&](int64_t base, int64_t row, int64_t stride, const InputRows& rows,
                           int64_t count, int64_t width) {
      for (int64_t i = 0; i < count * stride; ++i) {
        const int64_t column = i % stride;
        const float given =
            column < width ? LoadFloat(rows.dtype, rows.data, i / stride * width + column) : 0;
        ASSERT_EQ(LoadFloat(kBF16, slab.data() + base, row * stride + i),
                  FloatFromBF16(BF16FromFloat(given)));
      }
    };
    for (int place = 0; place < batch.plan.items(); ++place) {
      const AttendItem& item = device.work().item(place);
      check(layout.x, batch.plan.row_begin[place], batch.work.x_width, item.query, item.rows,
            d_model);
      if (cross) {
        check(layout.context, batch.plan.new_key_begin[place], batch.work.context_width,
              item.key_source, item.new_keys, 21);
      } else {
        check(layout.x, batch.plan.key_row_offset + batch.plan.new_key_begin[place],
              batch.work.x_width, item.key_source, item.new_keys, d_model);
      }
    }
  }
}

TEST(DeviceBatchTest, ResultsReachTheItems) {
  Random random(TestSeed());
  for (int width : {40, 33}) {
    Batch batch;
    batch.spec = CausalSpec(width, 2, 1, 8, 8);
    const DType dtypes[] = {kF32, kBF16, DType::kF16};
    for (int i = 0; i < 3; ++i) {
      const int64_t rows = Uniform(random, 1, 700);
      batch.Add(random, rows, rows, dtypes[i]);
      batch.sequences.back().AskWeights({1, 0});
    }
    batch.Plan(kF32, kF32);
    const DeviceBatch device(batch.work);
    const BatchLayout layout = device.Place(device.counts());
    std::vector<std::byte> slab(static_cast<size_t>(layout.bytes), std::byte{0xff});
    device.Fill(layout, slab.data(), slab.data());
    // Outputs and weights are numbered by their places.
    const int64_t stride = batch.work.output_width;
    auto* output = reinterpret_cast<float*>(slab.data() + layout.output);
    for (int64_t i = 0; i < batch.plan.query_rows * stride; ++i) {
      output[i] = static_cast<float>(i % 251);
    }
    CarryOut(At<ConvertTask>(slab, layout.output_tasks), layout.counts.output_tasks);
    const auto* tasks = At<WeightsTask>(slab, layout.weights_tasks);
    for (int64_t t = 0; t < layout.counts.weights_tasks; ++t) {
      const AttendItem& item = device.work().item(tasks[t].item);
      for (int64_t row = 0; row < tasks[t].rows; ++row) {
        for (int64_t key = 0; key < item.keys(); ++key) {
          tasks[t].out[row * tasks[t].row_stride + key] =
              static_cast<float>(tasks[t].head * 1000000 + (tasks[t].row_begin + row) * 1000 + key);
        }
      }
    }
    device.Collect(slab.data() + layout.results);
    for (int place = 0; place < batch.plan.items(); ++place) {
      const TestSequence& sequence = batch.sequences[batch.plan.order[place]];
      for (int64_t i = 0; i < sequence.rows * width; ++i) {
        const int64_t from = (batch.plan.row_begin[place] + i / width) * stride + i % width;
        ASSERT_EQ(LoadFloat(sequence.output.dtype, sequence.output.bytes.data(), i),
                  static_cast<float>(from % 251));
      }
      for (int64_t i = 0; i < 2 * sequence.rows * sequence.keys; ++i) {
        const int64_t cell = i % (sequence.rows * sequence.keys);
        const int64_t head = i < sequence.rows * sequence.keys ? 1 : 0;
        ASSERT_EQ(sequence.weights[static_cast<size_t>(i)],
                  static_cast<float>(head * 1000000 + cell / sequence.keys * 1000 +
                                     cell % sequence.keys));
      }
    }
  }
}

TEST(DeviceBatchTest, StepsOfSimilarSizeShareALayout) {
  Random random(7);
  const auto layout_of = [&](int items, int64_t cached) {
    Batch batch;
    batch.spec = CausalSpec(32, 4, 2, 8, 8);
    for (int i = 0; i < items; ++i) batch.Add(random, cached + 1, cached + 1);
    for (TestSequence& sequence : batch.sequences) {
      batch.items.push_back(sequence.Item(cached, cached + 1, cached, cached + 1));
    }
    batch.Plan(kF32, kF32);
    const DeviceBatch device(batch.work);
    EXPECT_TRUE(device.is_step());
    const BatchCounts room = device.RoundedCounts();
    EXPECT_GE(room.query_rows, items);
    const BatchLayout layout = device.Place(room);
    // What is not used says so.
    std::vector<std::byte> slab(static_cast<size_t>(layout.bytes), std::byte{0xff});
    device.Fill(layout, slab.data(), slab.data());
    for (int64_t t = device.counts().input_tasks; t < room.input_tasks; ++t) {
      EXPECT_EQ(At<ConvertTask>(slab, layout.input_tasks)[t].count, 0);
    }
    EXPECT_EQ(At<BatchShape>(slab, layout.shape)->query_rows, items);
    return room;
  };
  EXPECT_EQ(layout_of(5, 100), layout_of(7, 110));
  EXPECT_NE(layout_of(5, 100), layout_of(9, 100));
}

TEST(DeviceBatchTest, OnlyPlainStepsAreSteps) {
  Random random(8);
  const auto is_step = [&](bool weights, bool bias, int64_t rows) {
    Batch batch;
    batch.spec = CausalSpec(32, 4, 2, 8, 8);
    batch.Add(random, rows, rows);
    if (weights) batch.sequences[0].AskWeights({0});
    if (bias) batch.sequences[0].AddBias(random, 1, 0, rows, 0);
    batch.Plan(kF32, kF32);
    return DeviceBatch(batch.work).is_step();
  };
  EXPECT_TRUE(is_step(false, false, 1));
  EXPECT_FALSE(is_step(true, false, 1));
  EXPECT_FALSE(is_step(false, true, 1));
  EXPECT_FALSE(is_step(false, false, 2));
}

}  // namespace
}  // namespace attend
