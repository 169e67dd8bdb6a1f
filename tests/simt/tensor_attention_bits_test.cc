// SPDX-License-Identifier: Apache-2.0
//
// What a row of attention on tensor cores depends on: its query and the keys it sees, bit for bit;
// and what the kernels cost in the emulation's counters. Numbers in brackets name faults of other
// projects (research note on GPU kernels, section 5) that a test is there for.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/simt/tensor_attention_fixture.h"
#include "tests/support/seed.h"

namespace attend {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class TensorAttentionBitsTest : public TensorAttentionTest {
 protected:
  // Runs the same random batch clean and after `poison` changed it. Rows of item 0 for which
  // `sees(row)` is false must keep their bits, the others must be what double arithmetic says.
  void PoisonChangesOnly(const KernelSpec& spec, const std::function<void(KernelBatch&)>& add,
                         const std::function<void(KernelItem&)>& poison,
                         const std::function<bool(int64_t row)>& sees, uint64_t seed) {
    KernelBatch clean(spec, seed);
    add(clean);
    Build(clean);
    ASSERT_TRUE(LaunchAndCompare(clean));
    KernelBatch poisoned(spec, seed);
    add(poisoned);
    poison(poisoned.item(0));
    Build(poisoned);
    ASSERT_TRUE(LaunchAndCompare(poisoned));
    int64_t changed = 0;
    for (int64_t row = 0; row < clean.item(0).rows; ++row) {
      for (int head = 0; head < spec.q_heads; ++head) {
        for (int d = 0; d < spec.v_head_dim; ++d) {
          const float before = clean.Output(0, row, head, d);
          const float after = poisoned.Output(0, row, head, d);
          if (!sees(row)) {
            ASSERT_EQ(before, after) << "row " << row << " head " << head << " column " << d;
          }
          changed += std::isfinite(after) ? 0 : 1;
        }
      }
    }
    EXPECT_GT(changed, 0) << "nothing saw the poison";
  }
};

// A value that isn't finite, in a key that some rows of the tile see and others don't: causal,
// window, hidden by bias. [9, 36, 37, 38]
TEST_P(TensorAttentionBitsTest, ValuesThatAreNotFiniteReachTheRowsThatSeeThem) {
  std::mt19937_64 random(TestSeed());
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const float value : {kNan, kInf, -kInf}) {
      for (const int width : {24, 72, 128, 160, 256}) {
        const int64_t rows = prefill() ? 70 : 7;
        // Keys in both halves of the fragments' 16.
        const int64_t first = (prefill() ? 0 : 62) + (width == 128 ? 7 : 0);
        const int64_t keys = first + rows;
        const int64_t key = first + rows / 2;
        SCOPED_TRACE(std::string(DTypeName(dtype)) + " value " + std::to_string(value) + " width " +
                     std::to_string(width));
        const auto poison = [&](KernelItem& item) {
          item.v[(key * 2 + 1) * width + 5] = value;
          item.v[(key * 2) * width + width - 1] = value;
          item.v[(key * 2) * width + width - 2] = -value;
        };
        KernelSpec spec = Spec(4, 2, width, width, dtype);
        PoisonChangesOnly(
            spec, [&](KernelBatch& batch) { batch.Add(rows, first, keys, true); }, poison,
            [&](int64_t row) { return first + row >= key; }, random());
        if (width != 24 && width != 128) continue;
        spec.window = 5;
        PoisonChangesOnly(
            spec, [&](KernelBatch& batch) { batch.Add(rows, first, keys, false); }, poison,
            [&](int64_t row) { return std::abs(first + row - key) < 5; }, random());
        spec.window = 0;
        PoisonChangesOnly(
            spec,
            [&](KernelBatch& batch) {
              KernelItem& item = batch.Add(rows, first, keys, false);
              batch.AddBias(item, 1, keys, 0);
              for (int64_t row = 0; row < rows; row += 2) item.bias[row * keys + key] = -kInf;
            },
            poison, [&](int64_t row) { return row % 2 != 0; }, random());
      }
    }
  }
}

// [9, 38, 68]
TEST_P(TensorAttentionBitsTest, KeysAndQueriesThatAreNotFiniteReachTheirRowsOnly) {
  std::mt19937_64 random(TestSeed());
  for (const float value : {kNan, kInf}) {
    const int64_t rows = 20, keys = 130, key = 120;
    const KernelSpec spec = Spec(4, 2, 40, 40);
    PoisonChangesOnly(
        spec, [&](KernelBatch& batch) { batch.Add(rows, keys - rows, keys, true); },
        [&](KernelItem& item) {
          // Both heads; a sign of its own for every query makes +-inf scores.
          for (int head = 0; head < 2; ++head) item.k[(key * 2 + head) * 40 + 7] = value;
        },
        [&](int64_t row) { return keys - rows + row >= key; }, random());
    PoisonChangesOnly(
        spec, [&](KernelBatch& batch) { batch.Add(rows, keys - rows, keys, true); },
        [&](KernelItem& item) { item.q[(11 * 4 + 2) * 40 + 7] = kNan; },
        [&](int64_t row) { return row == 11; }, random());
  }
}

// A row alone, in a batch, in tiles with other rows, with its blocks elsewhere: the same bits.
// [57, 72]
TEST_P(TensorAttentionBitsTest, RowsDoNotDependOnTheirCompany) {
  std::mt19937_64 random(TestSeed());
  for (const bool rules : {false, true}) {
    KernelSpec spec = Spec(3, 1, 48, 40);
    spec.output_dtype = DType::kBF16;
    if (rules) spec.softcap = 20;
    const uint64_t seed = random();
    const auto slice = [&](KernelBatch& batch, const KernelItem& from, int64_t begin, int64_t end) {
      KernelItem& item = batch.Add(end - begin, from.first_row + begin, from.keys, from.causal);
      item.k = from.k;
      item.v = from.v;
      item.q.assign(from.q.begin() + begin * 3 * 48, from.q.begin() + end * 3 * 48);
    };
    KernelBatch whole(spec, seed);
    whole.Add(70, 64, 134, true);
    const KernelItem source = whole.item(0);
    Build(whole);
    ASSERT_TRUE(LaunchAndCompare(whole));
    KernelBatch pieces(spec, seed + 1);
    pieces.Add(9, 5, 80, false);
    const std::vector<int64_t> cuts = {0, 1, 2, 30, 69, 70};
    for (size_t i = 0; i + 1 < cuts.size(); ++i) slice(pieces, source, cuts[i], cuts[i + 1]);
    Build(pieces);
    ASSERT_TRUE(LaunchAndCompare(pieces, 3));
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      for (int64_t row = cuts[i]; row < cuts[i + 1]; ++row) {
        for (int head = 0; head < 3; ++head) {
          const RowStatistics a = whole.Statistics(0, row, head);
          const RowStatistics b = pieces.Statistics(i + 1, row - cuts[i], head);
          ASSERT_EQ(a.max, b.max) << row;
          ASSERT_EQ(a.sum, b.sum) << row;
          for (int d = 0; d < 40; ++d) {
            ASSERT_EQ(whole.Output(0, row, head, d), pieces.Output(i + 1, row - cuts[i], head, d))
                << "row " << row << " head " << head << " column " << d;
          }
        }
      }
    }
  }
}

// Runs under any order of threads and time of copies give the same bits. [58, 60, 61]
TEST_P(TensorAttentionBitsTest, OrdersOfThreadsDoNotShow) {
  std::mt19937_64 random(TestSeed());
  KernelBatch batch(Spec(2, 1, 80, 80, DType::kF16), random());
  batch.Add(65, 65, 130, true);
  Build(batch);
  ASSERT_TRUE(LaunchAndCompare(batch));
  const auto bits = batch.ItemBits(0);
  simt::UnderAllOrders(random(), [&] {
    EXPECT_TRUE(LaunchAndCompare(batch));
    EXPECT_EQ(batch.ItemBits(0), bits);
  });
}

// No bank is hit twice by ldmatrix or by what copies write, at any width; as many products and
// fragment loads as planned.
TEST_P(TensorAttentionBitsTest, SharedMemoryHasNoConflictsAndCountsAreAsPlanned) {
  std::mt19937_64 random(TestSeed());
  for (const int width : {32, 64, 80, 96, 128, 192, 256}) {
    SCOPED_TRACE("width " + std::to_string(width));
    KernelSpec spec = Spec(1, 1, width, width);
    KernelBatch batch(spec, random());
    const int rows = TileRows(spec);
    batch.Add(rows, 0, 128, false);
    Build(batch);
    simt::Settings settings;
    settings.count_banks = true;
    const simt::ScopedSettings scoped(settings);
    simt::ResetCounters();
    ASSERT_TRUE(LaunchAndCompare(batch, 1));
    EXPECT_EQ(simt::counters().ldmatrix_conflicts, 0);
    EXPECT_EQ(simt::counters().shared_conflicts, 0);
    const int64_t row_tiles = rows / 16;
    const int64_t steps = width / 16;
    EXPECT_EQ(simt::counters().mma, 2 * 2 * row_tiles * 8 * steps);
    const int64_t warps = width == 192 ? 8 : 4;
    EXPECT_EQ(simt::counters().ldmatrix,
              prefill() ? 2 * (warps * steps * 8 + row_tiles * steps) : 2 * 4 * 2 * steps);
    EXPECT_EQ(simt::counters().block_barriers, prefill() ? 2 + 2 * 2 : 4);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, TensorAttentionBitsTest,
                         testing::Values(TensorPath::kPrefill, TensorPath::kDecode), PathName);

}  // namespace
}  // namespace attend
