// SPDX-License-Identifier: Apache-2.0
//
// The comparers and the oracle themselves: what they must refuse, and values worked out by hand.
#include "tests/support/matchers.h"

#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/test_batches.h"

namespace attend {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

BoundedRows Expected(std::vector<double> values) {
  BoundedRows rows(1, static_cast<int64_t>(values.size()));
  rows.value = std::move(values);
  return rows;
}

TEST(MatchersTest, ReferenceComparerRefusesNaNWhereANumberIsWanted) {
  const float actual[] = {1, kNaN};
  EXPECT_FALSE(MatchesReference(DType::kF32, actual, Expected({1, 2})));
}

TEST(MatchersTest, ReferenceComparerRefusesANumberWhereNaNIsWanted) {
  const float actual[] = {1, 2};
  EXPECT_FALSE(MatchesReference(DType::kF32, actual, Expected({1, kNaN})));
  const float same[] = {1, kNaN};
  EXPECT_TRUE(MatchesReference(DType::kF32, same, Expected({1, kNaN})));
}

TEST(MatchersTest, ReferenceComparerRefusesNaNEvenUnderAnInfiniteTolerance) {
  const float actual[] = {kNaN};
  BoundedRows expected = Expected({1});
  expected.error[0] = kInfinity;
  EXPECT_FALSE(MatchesReference(DType::kF32, actual, expected));
  expected.error[0] = kNaN;
  const float close[] = {1};
  EXPECT_FALSE(MatchesReference(DType::kF32, close, expected));
}

TEST(MatchersTest, ReferenceComparerTellsInfinitiesApart) {
  const float actual[] = {-kInfinity};
  EXPECT_FALSE(MatchesReference(DType::kF32, actual, Expected({kInfinity})));
  EXPECT_TRUE(MatchesReference(DType::kF32, actual, Expected({-kInfinity})));
}

TEST(MatchersTest, ReferenceComparerAllowsTheLastRoundingOnly) {
  const float actual[] = {1 + 0x1p-23f};
  EXPECT_FALSE(MatchesReference(DType::kF32, actual, Expected({1})));
  const uint16_t bf16[] = {BF16FromFloat(1.003f)};
  EXPECT_TRUE(MatchesReference(DType::kBF16, bf16, Expected({1.003})));
  EXPECT_FALSE(MatchesReference(DType::kBF16, bf16, Expected({1.012})));
}

TEST(MatchersTest, WithinComparerRefusesNaNAndOtherCounts) {
  EXPECT_FALSE(MatchesWithin(std::vector<float>{kNaN}, std::vector<float>{0}, 1));
  EXPECT_FALSE(MatchesWithin(std::vector<float>{0}, std::vector<float>{0, 0}, 1));
  EXPECT_FALSE(MatchesWithin(std::vector<float>{1.5}, std::vector<float>{0}, 1));
  EXPECT_TRUE(MatchesWithin(std::vector<float>{0.5}, std::vector<float>{0}, 1));
}

TEST(MatchersTest, SameBitsTellsZerosApart) {
  const std::vector<float> zero{0.0f}, minus_zero{-0.0f};
  EXPECT_FALSE(
      SameBits(DType::kF32, std::as_bytes(std::span(zero)), std::as_bytes(std::span(minus_zero))));
  EXPECT_TRUE(
      SameBits(DType::kF32, std::as_bytes(std::span(zero)), std::as_bytes(std::span(zero))));
}

// One head of width 1 with zero queries: every visible key weighs the same, unless a rule says
// otherwise.
ReferenceResult Uniform(AttentionSpec spec, std::vector<float> values, int64_t rows, bool causal,
                        const std::vector<float>& bias = {}) {
  const std::vector<float> zeros(values.size() + static_cast<size_t>(rows));
  ReferenceSequence sequence;
  sequence.rows = rows;
  sequence.query = {zeros.data(), DType::kF32};
  sequence.keys = static_cast<int64_t>(values.size());
  sequence.first_row = sequence.keys - rows;
  sequence.key_source = {zeros.data(), DType::kF32};
  sequence.value_source = {values.data(), DType::kF32};
  sequence.causal = causal;
  sequence.weights = true;
  if (!bias.empty()) {
    sequence.bias = {bias.data(), 0, sequence.keys, sequence.keys, 0};
  }
  return ReferenceAttention(spec, {}, {}, sequence);
}

TEST(ReferenceTest, MoreRowsThanKeysAlignAtTheBottomRight) {
  const ReferenceResult result = Uniform(PlainSpec(0, 1, 1, 1, 1), {10, 20}, 5, true);
  EXPECT_EQ(result.output.value, (std::vector<double>{0, 0, 0, 10, 15}));
}

TEST(ReferenceTest, WindowCountsTheRowItself) {
  AttentionSpec spec = PlainSpec(0, 1, 1, 1, 1);
  spec.window = 2;
  EXPECT_EQ(Uniform(spec, {0, 2, 4, 6}, 4, true).output.value, (std::vector<double>{0, 1, 3, 5}));
  EXPECT_EQ(Uniform(spec, {0, 2, 4, 6}, 4, false).output.value, (std::vector<double>{1, 2, 4, 5}));
}

TEST(ReferenceTest, BiasIsNotScaledAndMinusInfinityMasks) {
  AttentionSpec spec = PlainSpec(0, 1, 1, 1, 1);
  spec.scale = 0.125;
  const ReferenceResult result =
      Uniform(spec, {4, 8, 100}, 1, false, {0, std::log(3.0f), -kInfinity});
  EXPECT_NEAR(result.weights.value[0], 0.25, 1e-7);
  EXPECT_NEAR(result.weights.value[1], 0.75, 1e-7);
  EXPECT_EQ(result.weights.value[2], 0);
  EXPECT_NEAR(result.output.value[0], 7, 1e-6);
}

TEST(ReferenceTest, AlibiFallsWithTheDistanceOnBothSides) {
  AttentionSpec spec = PlainSpec(0, 1, 1, 1, 1);
  spec.alibi_slopes = {0.5f};
  const std::vector<double> causal = Uniform(spec, {1, 1, 1}, 3, true).weights.value;
  EXPECT_NEAR(causal[6] / causal[7], std::exp(-0.5), 1e-12);
  EXPECT_NEAR(causal[7] / causal[8], std::exp(-0.5), 1e-12);
  const std::vector<double> both = Uniform(spec, {1, 1, 1}, 3, false).weights.value;
  EXPECT_NEAR(both[3] / both[4], std::exp(-0.5), 1e-12);
  EXPECT_NEAR(both[5] / both[4], std::exp(-0.5), 1e-12);
}

TEST(ReferenceTest, SinkTakesItsShare) {
  AttentionSpec spec = PlainSpec(0, 1, 1, 1, 1);
  spec.sinks = {std::log(2.0f)};
  EXPECT_NEAR(Uniform(spec, {3, 5}, 1, false).output.value[0], 2, 1e-6);
}

}  // namespace
}  // namespace attend
