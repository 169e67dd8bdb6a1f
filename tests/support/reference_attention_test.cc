// SPDX-License-Identifier: Apache-2.0
//
// The oracle's bounds for 16-bit and TF32 products: a float32 imitation of tensor-core arithmetic
// stays within them, imitations with one mistake each do not.
#include "tests/support/reference_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/matchers.h"
#include "tests/support/seed.h"
#include "tests/support/test_batches.h"

namespace attend {
namespace {

constexpr int64_t kTileKeys = 64;

// What an imitated engine does wrong.
enum class Mistake {
  kNone,
  kCutsWeights,         // towards zero instead of to nearest
  kRoundsAccumulators,  // after every tile
  kKeepsQueries,        // does not round them
  kRoundsQueriesTwice,  // before and after scaling
  kRoundsScores,
};

float Round(DType dtype, float value) { return static_cast<float>(RoundTo(dtype, value)); }

// The 16-bit value next to `value` on the side of zero.
float Cut(DType dtype, float value) {
  const int dropped = dtype == DType::kBF16 ? 16 : 13;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) >> dropped << dropped);
}

// One head over tiles of keys with a running maximum, sums in float32.
class Imitation {
 public:
  Imitation(const TestSequence& sequence, DType dtype, Mistake mistake)
      : sequence_(sequence), spec_(*sequence.spec), dtype_(dtype), mistake_(mistake) {}

  std::vector<float> Output() const {
    std::vector<float> output;
    for (int64_t row = 0; row < sequence_.rows; ++row) {
      const std::vector<float> values = Row(row);
      output.insert(output.end(), values.begin(), values.end());
    }
    return output;
  }

 private:
  float Score(int64_t row, int64_t key) const {
    const auto scale = static_cast<float>(spec_.scale);
    float dot = 0;
    for (int64_t d = 0; d < spec_.head_dim; ++d) {
      float q = LoadFloat(DType::kF32, sequence_.query.bytes.data(), row * spec_.head_dim + d);
      if (mistake_ != Mistake::kKeepsQueries) q = Round(dtype_, q);
      if (mistake_ == Mistake::kRoundsQueriesTwice) q = Round(dtype_, q * scale) / scale;
      dot += q * Stored(sequence_.source, key * spec_.head_dim + d);
    }
    return mistake_ == Mistake::kRoundsScores ? Round(dtype_, scale * dot) : scale * dot;
  }

  float Stored(const TestTensor& tensor, int64_t index) const {
    return Round(sequence_.kv_dtype, LoadFloat(tensor.dtype, tensor.bytes.data(), index));
  }

  float Weight(float weight) const {
    if (mistake_ == Mistake::kCutsWeights) return Cut(dtype_, weight);
    return Round(dtype_, weight);
  }

  std::vector<float> Row(int64_t row) const {
    std::vector<float> sums(static_cast<size_t>(spec_.v_head_dim));
    float maximum = -std::numeric_limits<float>::infinity(), total = 0;
    for (int64_t begin = 0; begin < sequence_.keys; begin += kTileKeys) {
      const int64_t end = std::min(begin + kTileKeys, sequence_.keys);
      std::vector<float> scores;
      for (int64_t key = begin; key < end; ++key) scores.push_back(Score(row, key));
      const float raised = std::max(maximum, *std::max_element(scores.begin(), scores.end()));
      const float rescale = std::exp(maximum - raised);
      maximum = raised;
      total *= rescale;
      for (float& sum : sums) sum *= rescale;
      for (int64_t key = begin; key < end; ++key) {
        const float weight = std::exp(scores[static_cast<size_t>(key - begin)] - maximum);
        total += weight;
        for (int64_t d = 0; d < spec_.v_head_dim; ++d) {
          sums[static_cast<size_t>(d)] +=
              Weight(weight) * Stored(sequence_.value, key * spec_.v_head_dim + d);
        }
      }
      if (mistake_ == Mistake::kRoundsAccumulators) {
        for (float& sum : sums) sum = Round(dtype_, sum);
      }
    }
    for (float& sum : sums) sum /= total;
    return sums;
  }

  const TestSequence& sequence_;
  const AttentionSpec& spec_;
  const DType dtype_;
  const Mistake mistake_;
};

// One raw head. Values have a mean, so that errors of one sign do not cancel.
TestSequence Sequence(Random& random, const AttentionSpec& spec, DType dtype, int64_t keys) {
  TestSequence sequence = RandomSequence(random, spec, dtype, DType::kF32, DType::kF32, 40, keys);
  for (int64_t key = 0; key < keys; ++key) {
    for (int64_t d = 0; d < spec.v_head_dim; ++d) {
      const int64_t at = key * spec.v_head_dim + d;
      sequence.value.Set(key, d, 2 + LoadFloat(DType::kF32, sequence.value.bytes.data(), at));
    }
  }
  return sequence;
}

struct Closeness {
  testing::AssertionResult holds;
  double typical;  // root of the mean square of error / bound
};

class SixteenBitBoundTest : public testing::TestWithParam<DType> {
 protected:
  Closeness Compare(const TestSequence& sequence, Mistake mistake) {
    const ReferenceResult expected =
        ReferenceAttention(*sequence.spec, {}, numerics_, sequence.Reference());
    const std::vector<float> output = Imitation(sequence, GetParam(), mistake).Output();
    double squares = 0;
    for (size_t i = 0; i < output.size(); ++i) {
      const double share =
          (double{output[i]} - expected.output.value[i]) / expected.output.error[i];
      squares += share * share;
    }
    return {MatchesReference(DType::kF32, output.data(), expected.output),
            std::sqrt(squares / double(output.size()))};
  }

  const ReferenceNumerics numerics_{GetParam(), DType::kF32, GetParam(), false};
  Random random_{TestSeed()};
  AttentionSpec spec_ = PlainSpec(0, 1, 1, 32, 24);
};

TEST_P(SixteenBitBoundTest, TensorCoreArithmeticLiesWithin) {
  for (double scale : {0.0, 0.18, 1.0}) {
    spec_.scale = scale;
    for (int64_t keys : {1, 2, 5, 64, 65, 300, 2000}) {
      const TestSequence sequence = Sequence(random_, spec_, GetParam(), keys);
      EXPECT_TRUE(Compare(sequence, Mistake::kNone).holds) << "scale " << scale << ", " << keys;
    }
  }
}

// One standard deviation of six at most; rounded weights lie anywhere between two powers of two, so
// somewhat less. A bound that was ten times as wide would show here.
TEST_P(SixteenBitBoundTest, IsAsWideAsSixStandardDeviations) {
  const TestSequence sequence = Sequence(random_, spec_, GetParam(), 1000);
  const double typical = Compare(sequence, Mistake::kNone).typical;
  EXPECT_GT(typical, 0.06);
  EXPECT_LT(typical, 1 / 6.0);
}

TEST_P(SixteenBitBoundTest, EveryMistakeLiesOutside) {
  for (Mistake mistake : {Mistake::kCutsWeights, Mistake::kRoundsAccumulators}) {
    const TestSequence sequence = Sequence(random_, spec_, GetParam(), 1000);
    EXPECT_FALSE(Compare(sequence, mistake).holds) << "mistake " << static_cast<int>(mistake);
  }
  // Queries and scores count more the larger the scores are.
  spec_.scale = 3;
  for (Mistake mistake :
       {Mistake::kKeepsQueries, Mistake::kRoundsQueriesTwice, Mistake::kRoundsScores}) {
    const TestSequence sequence = Sequence(random_, spec_, GetParam(), 20);
    EXPECT_TRUE(Compare(sequence, Mistake::kNone).holds);
    EXPECT_FALSE(Compare(sequence, mistake).holds) << "mistake " << static_cast<int>(mistake);
  }
}

TEST_P(SixteenBitBoundTest, AttentionWeightsKeepFloatAccuracy) {
  const TestSequence sequence = Sequence(random_, spec_, GetParam(), 70);
  ReferenceSequence asked = sequence.Reference();
  asked.weights = true;
  const BoundedRows expected = ReferenceAttention(spec_, {}, numerics_, asked).weights;
  std::vector<float> exact, rounded;
  for (double weight : expected.value) {
    exact.push_back(static_cast<float>(weight));
    rounded.push_back(Round(GetParam(), static_cast<float>(weight)));
  }
  EXPECT_TRUE(MatchesReference(DType::kF32, exact.data(), expected));
  EXPECT_FALSE(MatchesReference(DType::kF32, rounded.data(), expected));
}

INSTANTIATE_TEST_SUITE_P(Types, SixteenBitBoundTest, testing::Values(DType::kBF16, DType::kF16),
                         [](const auto& info) { return std::string(DTypeName(info.param)); });

// Keys of one layer, projected in float32 from operands changed by `change`.
template <class Change>
std::vector<float> Keys(const TestSequence& sequence, const LayerWeights& weights,
                        const Change& change) {
  std::vector<float> keys;
  for (int64_t row = 0; row < sequence.rows; ++row) {
    for (int64_t o = 0; o < weights.k.rows; ++o) {
      float sum = weights.k_bias.At(o, 0);
      for (int64_t i = 0; i < weights.k.columns; ++i) {
        sum += change(LoadFloat(DType::kF32, sequence.query.bytes.data(),
                                row * weights.k.columns + i)) *
               change(weights.k.At(o, i));
      }
      keys.push_back(sum);
    }
  }
  return keys;
}

float RoundToTf32(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>((bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fffu);
}

TEST(Tf32BoundTest, RoundedAndCutOperandsLieWithinAndFewerBitsDoNot) {
  Random random(TestSeed());
  const TestLayer layer(random, PlainSpec(96, 2, 2, 24, 24), DType::kF32);
  const TestSequence sequence =
      RandomSequence(random, layer.spec(), DType::kF32, DType::kF32, DType::kF32, 30, 30);
  const auto matches = [&](bool tf32, const auto& change) {
    ReferenceNumerics numerics;
    numerics.tf32 = tf32;
    const ReferenceResult expected =
        ReferenceAttention(layer.spec(), layer.weights(), numerics, sequence.Reference());
    return MatchesReference(DType::kF32, Keys(sequence, layer.weights(), change).data(),
                            expected.keys);
  };
  const auto keep = [](float value) { return value; };
  const auto cut = [](float value) { return Cut(DType::kF16, value); };  // as many bits as TF32
  const auto bf16 = [](float value) { return Round(DType::kBF16, value); };
  EXPECT_TRUE(matches(true, keep));
  EXPECT_TRUE(matches(true, RoundToTf32));
  EXPECT_TRUE(matches(true, cut));
  EXPECT_FALSE(matches(true, bf16));
  EXPECT_TRUE(matches(false, keep));
  EXPECT_FALSE(matches(false, RoundToTf32));
}

TEST(F16ProductsTest, OperandsAreRoundedAndOverflow) {
  Random random(TestSeed());
  const TestLayer layer(random, PlainSpec(40, 2, 2, 16, 16), DType::kF16);
  TestSequence sequence =
      RandomSequence(random, layer.spec(), DType::kF32, DType::kF32, DType::kF32, 5, 5);
  const auto keys = [&](DType compute) {
    return ReferenceAttention(layer.spec(), layer.weights(), {DType::kF32, compute},
                              sequence.Reference())
        .keys;
  };
  const auto f16 = [](float value) { return Round(DType::kF16, value); };
  const std::vector<float> rounded = Keys(sequence, layer.weights(), f16);
  EXPECT_TRUE(MatchesReference(DType::kF32, rounded.data(), keys(DType::kF16)));
  EXPECT_FALSE(MatchesReference(DType::kF32, rounded.data(), keys(DType::kF32)));
  sequence.query.Set(2, 7, 65520);  // rounds to infinity
  const BoundedRows overflown = keys(DType::kF16);
  for (int64_t i = 0; i < 5 * 32; ++i) EXPECT_EQ(std::isinf(overflown.value[i]), i / 32 == 2);
  const std::vector<float> infinite = Keys(sequence, layer.weights(), f16);
  EXPECT_TRUE(MatchesReference(DType::kF32, infinite.data(), overflown));
}

}  // namespace
}  // namespace attend
