// SPDX-License-Identifier: Apache-2.0
//
// The CPU attention stage alone, on raw queries, keys and values: every feature against a textbook
// softmax in double, and bit-identity under every way to cut the same work.
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "tests/engine/attention_kernel_fixture.h"

namespace attend {
namespace {

TEST_P(AttentionKernelTest, MatchesASoftmaxInDoubleForEveryHeadWidthAndDType) {
  for (DType dtype : kDTypes) {
    for (auto [d, dv] : {std::pair{1, 1},
                         {8, 24},
                         {12, 12},
                         {32, 1},
                         {40, 40},
                         {64, 64},
                         {80, 80},
                         {96, 128},
                         {128, 96},
                         {192, 33},
                         {256, 256},
                         {7, 250}}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " d " << d << " dv " << dv);
      const AttentionSpec spec = MakeSpec(4, 2, d, dv);
      std::vector<Sequence> sequences;
      for (int64_t keys : {1, 17, 64, 65, 150}) {
        sequences.push_back(MakeSequence(spec, std::min<int64_t>(keys, 20), keys));
        sequences.back().causal = keys % 2 == 0;
      }
      Run(spec, dtype, sequences);
      for (const Sequence& sequence : sequences) ExpectMatchesReference(spec, dtype, sequence);
    }
  }
}

TEST_P(AttentionKernelTest, MatchesASoftmaxInDoubleForEveryGroupSizeAndLength) {
  for (int group : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 71}) {
    SCOPED_TRACE(testing::Message() << "group " << group);
    const AttentionSpec spec = MakeSpec(group, 1, 16, 16);
    std::vector<Sequence> sequences;
    for (int64_t keys : {63, 1023, 1024, 1025, 2100}) {
      sequences.push_back(MakeSequence(spec, group == 1 ? 70 : 3, keys < 70 ? 70 : keys));
    }
    Run(spec, DType::kF32, sequences);
    for (const Sequence& sequence : sequences) {
      ExpectMatchesReference(spec, DType::kF32, sequence);
    }
  }
}

TEST_P(AttentionKernelTest, MixturesOfFeaturesMatchASoftmaxInDouble) {
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << kSeed << " round " << round);
    AttentionSpec spec;
    std::vector<Sequence> sequences;
    RandomProblem(random_, spec, sequences);
    const DType dtype = kDTypes[round % 4];
    Run(spec, dtype, sequences, 1 + round % 3);
    for (const Sequence& sequence : sequences) ExpectMatchesReference(spec, dtype, sequence);
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionKernelTest, BitsDependNeitherOnTheBatchNorOnPiecesNorOnWorkers) {
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << kSeed << " round " << round);
    AttentionSpec spec;
    std::vector<Sequence> whole;
    RandomProblem(random_, spec, whole);
    const std::vector<DType> dot = DotDTypes();
    compute_ = dot.empty() || round % 2 == 0 ? DType::kF32 : DType::kBF16;
    const DType dtype = compute_ == DType::kF32 ? kDTypes[round / 2 % 4] : dot[round / 2 % 2];
    for (Sequence& sequence : whole) {
      // Sums of values this small underflow to zeros of both signs.
      for (float& value : sequence.v) value = round % 5 == 0 ? value * 1e-38f * 1e-7f : value;
      sequence.causal = true;  // pieces see what the whole sees
      if (sequence.keys < sequence.rows) sequence.rows = sequence.keys;
      if (sequence.bias_heads > 1) sequence.bias.clear();
      sequence.weight_end = std::min(sequence.weight_end, sequence.rows);
      sequence.weight_begin = std::min(sequence.weight_begin, sequence.weight_end);
    }
    Run(spec, dtype, whole, 1);
    for (int workers : {2, 8}) {
      std::vector<Sequence> other = whole;
      Run(spec, dtype, other, workers, workers == 8 ? Uniform(1, 40) : 0);
      for (size_t s = 0; s < whole.size(); ++s) {
        ASSERT_TRUE(SameFloats(whole[s].output, other[s].output)) << workers << " workers";
        ASSERT_TRUE(SameFloats(whole[s].weights, other[s].weights)) << workers << " workers";
      }
    }
    for (const Sequence& sequence : whole) {
      std::vector<Sequence> alone{sequence};
      Run(spec, dtype, alone, 8, 1);
      ASSERT_TRUE(SameFloats(sequence.output, alone[0].output)) << "alone, row by row";
      alone[0].weight_heads.clear();
      Run(spec, dtype, alone, 3);
      ASSERT_TRUE(SameFloats(sequence.output, alone[0].output)) << "without weights";
    }
  }
}

TEST_P(AttentionKernelTest, TilesOfEverySizeThatIsSplitOverSegmentsKeepTheirBits) {
  struct Tile {
    int64_t rows;
    int group;
  };
  for (const Tile tile : {Tile{1, 1},
                          {16, 1},
                          {17, 1},
                          {24, 1},
                          {31, 1},
                          {32, 1},
                          {33, 1},
                          {4, 8},
                          {2, 12},
                          {3, 7}}) {
    const AttentionSpec spec = MakeSpec(tile.group, 1, 40, 24);
    std::vector<Sequence> alone = {MakeSequence(spec, tile.rows, 5003)};
    std::vector<Sequence> split = alone;
    Run(spec, DType::kF32, alone, 1);
    Run(spec, DType::kF32, split, 8);
    ASSERT_TRUE(SameFloats(alone[0].output, split[0].output))
        << tile.rows << " rows of " << tile.group << " heads";
    ExpectMatchesReference(spec, DType::kF32, split[0]);
  }
}

TEST_P(AttentionKernelTest, BitsDoNotDependOnTheRoomOfAShortBlock) {
  const AttentionSpec spec = MakeSpec(6, 2, 20, 36);
  for (DType dtype : kDTypes) {
    for (int64_t keys : {1, 15, 16, 17, 33, 48}) {
      std::vector<Sequence> whole{MakeSequence(spec, std::min<int64_t>(keys, 9), keys)};
      Run(spec, dtype, whole);
      for (int tokens : {16, 32, 48}) {
        if (keys > tokens) continue;
        std::vector<Sequence> shorter = whole;
        shorter[0].block_tokens = tokens;
        Run(spec, dtype, shorter);
        EXPECT_TRUE(SameFloats(whole[0].output, shorter[0].output)) << keys << " in " << tokens;
      }
    }
  }
}

TEST_P(AttentionKernelTest, NanInKeysAndValuesReachesExactlyTheRowsThatSeeThem) {
  const AttentionSpec spec = MakeSpec(4, 2, 24, 40);
  std::vector<std::pair<DType, DType>> cases;  // of blocks, of products
  for (DType dtype : kDTypes) cases.push_back({dtype, DType::kF32});
  for (DType dtype : DotDTypes()) cases.push_back({dtype, DType::kBF16});
  for (const auto& [dtype, compute] : cases) {
    compute_ = compute;
    for (int64_t spoiled : {0, 7, 63, 64, 100, 129}) {
      for (bool in_value : {false, true}) {
        for (bool masked_by_bias : {false, true}) {
          std::vector<Sequence> clean{MakeSequence(spec, 130, 130)};
          Sequence& sequence = clean[0];
          if (masked_by_bias) {  // odd rows do not see the key
            sequence.bias_columns = sequence.keys;
            sequence.bias.assign(sequence.rows * sequence.keys, 0.0f);
            for (int64_t i = 1; i < sequence.rows; i += 2) {
              sequence.bias[i * sequence.keys + spoiled] = -kInf;
            }
          }
          std::vector<Sequence> dirty = clean;
          const int width = in_value ? spec.v_head_dim : spec.head_dim;
          std::vector<float>& where = in_value ? dirty[0].v : dirty[0].k;
          for (int i = 0; i < spec.kv_heads * width; ++i) {
            where[spoiled * spec.kv_heads * width + i] = in_value && spoiled % 2 == 1 ? kInf : kNan;
          }
          Run(spec, dtype, clean);
          Run(spec, dtype, dirty);
          for (int64_t row = 0; row < sequence.rows; ++row) {
            const bool sees = row >= spoiled && !(masked_by_bias && row % 2 == 1);
            for (int i = 0; i < spec.output_width; ++i) {
              const float got = dirty[0].output[row * spec.output_width + i];
              const float without = clean[0].output[row * spec.output_width + i];
              ASSERT_TRUE(sees ? !std::isfinite(got)
                               : std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(without))
                  << "row " << row << " key " << spoiled << " value " << in_value;
            }
          }
        }
      }
    }
  }
}

// Tiles of one query row end between the two tokens that blocks of BF16 hold together.
TEST_P(AttentionKernelTest, NanBesideTheLastKeyOfALowTileDoesNotReachIt) {
  const AttentionSpec spec = MakeSpec(8, 1, 23, 40);
  std::vector<std::pair<DType, DType>> cases;  // of blocks, of products
  for (DType dtype : kDTypes) cases.push_back({dtype, DType::kF32});
  for (DType dtype : DotDTypes()) cases.push_back({dtype, DType::kBF16});
  for (const auto& [dtype, compute] : cases) {
    compute_ = compute;
    std::vector<Sequence> clean{MakeSequence(spec, 40, 130)};
    Run(spec, dtype, clean, 14);
    std::vector<Sequence> high = clean;
    Run(spec, dtype, high, 1);
    EXPECT_TRUE(SameFloats(clean[0].output, high[0].output)) << DTypeName(dtype);
    for (int64_t spoiled : {98, 99, 100, 101, 102}) {
      for (bool in_value : {false, true}) {
        std::vector<Sequence> dirty = clean;
        const int64_t width = spec.kv_heads * (in_value ? spec.v_head_dim : spec.head_dim);
        std::fill_n((in_value ? dirty[0].v : dirty[0].k).begin() + spoiled * width, width, kNan);
        Run(spec, dtype, dirty, 14);
        for (int64_t i = 0; i < 40 * spec.output_width; ++i) {
          const bool sees = 90 + i / spec.output_width >= spoiled;
          ASSERT_TRUE(sees ? std::isnan(dirty[0].output[i])
                           : dirty[0].output[i] == clean[0].output[i])
              << DTypeName(dtype) << " key " << spoiled << " value " << in_value << " at " << i;
        }
      }
    }
  }
}

TEST_P(AttentionKernelTest, NanInAQuerySpoilsItsOwnRowAndHeadOnly) {
  const AttentionSpec spec = MakeSpec(4, 2, 16, 16);
  std::vector<Sequence> clean{MakeSequence(spec, 13, 70)};
  std::vector<Sequence> dirty = clean;
  dirty[0].q[(5 * spec.q_heads + 2) * spec.head_dim + 3] = kNan;
  Run(spec, DType::kF32, clean);
  Run(spec, DType::kF32, dirty);
  for (int64_t i = 0; i < static_cast<int64_t>(clean[0].output.size()); ++i) {
    const bool spoiled = i / spec.v_head_dim == 5 * spec.q_heads + 2;
    ASSERT_EQ(std::isnan(dirty[0].output[i]), spoiled) << i;
    if (!spoiled) {
      ASSERT_EQ(dirty[0].output[i], clean[0].output[i]);
    }
  }
}

TEST_P(AttentionKernelTest, OutputsAreRoundedOnceToTheirDType) {
  for (const int width : {5, 16, 40, 64}) {
    const AttentionSpec spec = MakeSpec(4, 2, 32, width);
    std::vector<Sequence> sequences{MakeSequence(spec, 21, 70), MakeSequence(spec, 1, 3)};
    sequences[0].v[3] = kNan;
    sequences[1].v[0] = 1e30f;  // beyond F16
    output_dtype_ = DType::kF32;
    Run(spec, DType::kF32, sequences);
    for (const DType dtype : {DType::kF16, DType::kBF16}) {
      std::vector<Sequence> rounded = sequences;
      output_dtype_ = dtype;
      Run(spec, DType::kF32, rounded);
      for (size_t s = 0; s < sequences.size(); ++s) {
        std::vector<float> expected = sequences[s].output;
        RoundRows(dtype, width, expected);
        ASSERT_TRUE(SameFloats(rounded[s].output, expected))
            << DTypeName(dtype) << " of " << width << " elements";
      }
    }
  }
}

TEST_P(AttentionKernelTest, ARowWithoutAVisibleKeyIsZero) {
  for (bool sinks : {false, true}) {
    AttentionSpec spec = MakeSpec(2, 1, 8, 8);
    if (sinks) spec.sinks = {0.5f, -1.0f};
    std::vector<Sequence> sequences{MakeSequence(spec, 5, 2), MakeSequence(spec, 3, 0),
                                    MakeSequence(spec, 4, 70)};
    sequences[2].bias_columns = 70;
    sequences[2].bias.assign(4 * 70, 0.0f);
    std::fill_n(sequences[2].bias.begin() + 70, 70, -kInf);  // row 1
    for (Sequence& sequence : sequences) {
      sequence.weight_heads = {0, 1};
      sequence.weight_end = sequence.rows;
    }
    Run(spec, DType::kF32, sequences);
    for (const Sequence& sequence : sequences) {
      ExpectMatchesReference(spec, DType::kF32, sequence);
    }
    for (int i = 0; i < 3 * spec.output_width; ++i) EXPECT_EQ(sequences[0].output[i], 0.0f);
    EXPECT_NE(sequences[0].output[3 * spec.output_width], 0.0f);
  }
}

TEST_P(AttentionKernelTest, ExtremeScoresGiveFiniteWeights) {
  AttentionSpec spec = MakeSpec(1, 1, 1, 1);
  const auto run = [&](std::vector<float> keys) {
    Sequence sequence;
    sequence.rows = 1;
    sequence.keys = static_cast<int64_t>(keys.size());
    sequence.causal = false;
    sequence.q = {1.0f};
    sequence.k = keys;
    for (size_t j = 0; j < keys.size(); ++j) sequence.v.push_back(float(j));
    sequence.weight_heads = {0};
    sequence.weight_end = 1;
    std::vector<Sequence> sequences{sequence};
    Run(spec, DType::kF32, sequences);
    return sequences[0];
  };
  EXPECT_EQ(run({-3e38f, -3e38f, -3e38f}).output[0], 1.0f);
  EXPECT_EQ(run({3e38f, 3e38f, -3e38f}).output[0], 0.5f);
  EXPECT_EQ(run({-1e4f, 1e4f, 0}).output[0], 1.0f);
  EXPECT_EQ(run({-kInf, 2, -kInf}).output[0], 1.0f);
  EXPECT_TRUE(std::isnan(run({0, kInf, 0}).output[0]));
  EXPECT_TRUE(std::isnan(run({0, kNan, 5}).output[0]));
  spec.softcap = 50;
  const Sequence capped = run({1, 4400, 5000, 10000, -10000});
  for (int j : {1, 2, 3}) EXPECT_NEAR(capped.weights[j], 1.0 / 3, 1e-6);
  EXPECT_NEAR(capped.weights[0], 0, 1e-6);
  EXPECT_EQ(run({3e38f, -3e38f, kInf}).weights[0], 0.5f);
}

TEST_P(AttentionKernelTest, DotProductsMatchASoftmaxInDoubleWithinTheRoundingOfBF16) {
  if (DotDTypes().empty()) GTEST_SKIP() << "no AVX512_BF16 with this instruction set";
  compute_ = DType::kBF16;
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << kSeed << " round " << round);
    AttentionSpec spec;
    std::vector<Sequence> sequences;
    RandomProblem(random_, spec, sequences);
    const DType dtype = DotDTypes()[round % 2];
    Run(spec, dtype, sequences, 1 + round % 3);
    for (const Sequence& sequence : sequences) {
      ExpectMatchesReference(spec, dtype, sequence, DType::kBF16);
    }
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionKernelTest, DotProductsAreNotUsedOverOtherBlocks) {
  const AttentionSpec spec = MakeSpec(4, 2, 24, 40);
  for (DType dtype : {DType::kF32, DType::kF16}) {
    std::vector<Sequence> floats{MakeSequence(spec, 9, 70)};
    std::vector<Sequence> asked = floats;
    compute_ = DType::kF32;
    Run(spec, dtype, floats);
    compute_ = DType::kBF16;
    Run(spec, dtype, asked);
    EXPECT_TRUE(SameFloats(floats[0].output, asked[0].output));
  }
}

TEST_P(AttentionKernelTest, QuantisedBlocksStayNearTheUnquantisedResult) {
  for (auto [d, dv] : {std::pair{64, 64}, {7, 33}, {128, 16}}) {
    const AttentionSpec spec = MakeSpec(4, 2, d, dv);
    std::vector<Sequence> sequences{MakeSequence(spec, 40, 200), MakeSequence(spec, 1, 1500)};
    std::fill_n(sequences[0].k.begin(), spec.kv_heads * d, 0.0f);  // a scale of 0
    std::fill_n(sequences[0].v.begin(), spec.kv_heads * dv, 0.0f);
    Run(spec, DType::kI8, sequences);
    for (const Sequence& sequence : sequences) ExpectNearUnquantised(spec, sequence);
  }
}

TEST_P(AttentionKernelTest, QuantisedRowsComeOutWithTheirScales) {
  const AttentionSpec spec = MakeSpec(2, 2, 5, 3);
  const KvGeometry geometry = GeometryOf(spec, DType::kI8);
  std::vector<float> k{0, -127, 63.5f, 1.5f, 2.5f, 0, 0, 0, 0, 0};
  std::vector<float> v{kInf, 1, 2, -254, 3, 5};
  AttendItem item;
  item.new_keys = 1;
  item.key_source = {k.data(), DType::kF32};
  item.value_source = {v.data(), DType::kF32};
  const std::vector<int64_t> blocks{0};
  item.blocks = blocks;
  const std::vector<AttendItem> items{item};
  const absl::StatusOr<BatchPlan> plan = BuildPlan(-1, spec, DType::kI8, items);
  ASSERT_TRUE(plan.ok()) << plan.status();
  alignas(64) static std::byte memory[64 * 1024];
  WorkerPool pool(1);
  AppendAndAttend(GetParam(),
                  AttentionBatch{&*plan, items, nullptr, k.data(), v.data(), memory, nullptr}, pool,
                  workspace_);
  std::vector<std::byte> rows(geometry.TokenBytes());
  CopyKvOut(geometry, blocks, 0, 1, memory, rows.data());
  const int8_t expected[16] = {0, -127, 64, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, -127, 2, 2};
  for (int i = 0; i < 16; ++i) EXPECT_EQ(static_cast<int8_t>(rows[i]), expected[i]) << i;
  float scales[4];
  std::memcpy(scales, rows.data() + 16, sizeof(scales));
  EXPECT_EQ(scales[0], 1.0f);
  EXPECT_EQ(scales[1], 0.0f);
  EXPECT_TRUE(std::isnan(scales[2]));
  EXPECT_EQ(scales[3], 2.0f);
}

TEST_P(AttentionKernelTest, BlocksCopyOutAndInAsCanonicalRows) {
  for (DType dtype : kDTypes) {
    const KvGeometry geometry{2, 5, 3, dtype};
    const std::vector<int64_t> blocks{geometry.BlockBytes(), 0};
    std::vector<std::byte> memory(2 * geometry.BlockBytes());
    std::vector<std::byte> rows(70 * geometry.TokenBytes());
    for (std::byte& byte : rows) byte = static_cast<std::byte>(random_());
    CopyKvIn(geometry, blocks, 20, 70, rows.data(), memory.data());
    std::vector<std::byte> back(rows.size());
    CopyKvOut(geometry, blocks, 20, 70, memory.data(), back.data());
    EXPECT_EQ(rows, back) << DTypeName(dtype);
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, AttentionKernelTest, testing::Values(CpuIsa::kAvx2, CpuIsa::kAvx512),
                         [](const auto& info) {
                           return info.param == CpuIsa::kAvx2 ? "avx2" : "avx512";
                         });

}  // namespace
}  // namespace attend
