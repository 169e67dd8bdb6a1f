// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/head_transform.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <random>
#include <vector>

#include "engine/cpu/cpu_info.h"

namespace attend {
namespace {

constexpr uint32_t kSeed = 20240711;

std::vector<CpuIsa> Isas() {
  std::vector<CpuIsa> isas = {CpuIsa::kAvx2};
  if (DetectCpu().avx512) isas.push_back(CpuIsa::kAvx512);
  return isas;
}

RopeSpec Rope(int dim, RopePairing pairing) {
  RopeSpec rope;
  rope.dim = dim;
  rope.pairing = pairing;
  rope.attention_factor = dim == 64 ? 1.1 : 1.0;
  for (int i = 0; i < dim / 2; ++i) rope.inverse_frequency.push_back(std::pow(1e4, -2.0 * i / dim));
  return rope;
}

TEST(HeadTransformTest, AnglesAreThoseOfTheMathematicsToTheLastBitButRounding) {
  for (CpuIsa isa : Isas()) {
    for (int dim : {2, 6, 20, 64, 128, 256}) {
      const RopeSpec rope = Rope(dim, RopePairing::kHalf);
      const auto angles = std::make_unique<RopeAngles>();
      for (int64_t position : {0L, 1L, 2L, 3L, 5L, 100L, 4095L, 131071L, 1000003L, -1L, -77L}) {
        ComputeRopeAngles(isa, rope, position, *angles);
        for (int i = 0; i < dim / 2; ++i) {
          const double angle = static_cast<double>(position) * rope.inverse_frequency[i];
          const long double cosine = std::cos(static_cast<long double>(angle));
          const long double sine = std::sin(static_cast<long double>(angle));
          // Half a unit in the last place of a float, and the double arithmetic before it.
          const double half = 0.5 * rope.attention_factor * 0x1p-23;
          EXPECT_NEAR(angles->cosine[i], cosine * rope.attention_factor,
                      half * std::fabs(static_cast<double>(cosine)) + 1e-15);
          EXPECT_NEAR(angles->sine[i], sine * rope.attention_factor,
                      half * std::fabs(static_cast<double>(sine)) + 1e-15);
        }
      }
    }
  }
}

TEST(HeadTransformTest, RotatesPairsOfEitherPairing) {
  std::mt19937 random(kSeed);
  std::normal_distribution<float> normal;
  for (CpuIsa isa : Isas()) {
    for (int dim : {2, 6, 20, 34, 64, 128}) {
      for (RopePairing pairing : {RopePairing::kHalf, RopePairing::kInterleaved}) {
        const RopeSpec rope = Rope(dim, pairing);
        const auto angles = std::make_unique<RopeAngles>();
        ComputeRopeAngles(isa, rope, 1234, *angles);
        std::vector<float> head(static_cast<size_t>(dim) + 3);
        for (float& value : head) value = normal(random);
        std::vector<float> turned = head;
        RotateHead(isa, rope, *angles, turned.data());
        for (int i = 0; i < dim / 2; ++i) {
          const int first = pairing == RopePairing::kHalf ? i : 2 * i;
          const int second = pairing == RopePairing::kHalf ? dim / 2 + i : 2 * i + 1;
          const double x = head[first], y = head[second];
          const double c = angles->cosine[i], s = angles->sine[i];
          EXPECT_NEAR(turned[first], x * c - y * s, 2e-7 * (std::fabs(x) + std::fabs(y)));
          EXPECT_NEAR(turned[second], y * c + x * s, 2e-7 * (std::fabs(x) + std::fabs(y)));
        }
        for (int i = dim; i < dim + 3; ++i) EXPECT_EQ(turned[i], head[i]) << "beyond the rotation";
      }
    }
  }
}

TEST(HeadTransformTest, NormalisesToTheRootMeanSquare) {
  std::mt19937 random(kSeed + 1);
  std::normal_distribution<float> normal;
  for (CpuIsa isa : Isas()) {
    for (int dim : {1, 7, 8, 40, 64, 129}) {
      std::vector<float> head(dim), weight(dim);
      double sum = 0;
      for (int i = 0; i < dim; ++i) {
        head[i] = normal(random), weight[i] = normal(random);
        sum += double{head[i]} * head[i];
      }
      const double factor = 1 / std::sqrt(sum / dim + 1e-5f);
      for (const float* by : std::initializer_list<const float*>{nullptr, weight.data()}) {
        std::vector<float> result = head;
        NormaliseHead(isa, by, 1e-5f, dim, result.data());
        for (int i = 0; i < dim; ++i) {
          const double wanted = head[i] * factor * (by == nullptr ? 1 : by[i]);
          EXPECT_NEAR(result[i], wanted, 2e-7 * std::fabs(wanted)) << dim << " " << i;
        }
      }
    }
  }
}

TEST(HeadTransformTest, EveryInstructionSetGivesTheSameBits) {
  if (Isas().size() < 2) GTEST_SKIP() << "this processor has one instruction set only";
  std::mt19937 random(kSeed + 2);
  std::normal_distribution<float> normal;
  for (int dim : {2, 6, 20, 34, 40, 64, 80, 128}) {
    for (RopePairing pairing : {RopePairing::kHalf, RopePairing::kInterleaved}) {
      const RopeSpec rope = Rope(dim, pairing);
      for (int64_t position : {1L, 77L, 65537L, 999999L}) {
        std::vector<float> narrow(dim);
        for (float& value : narrow) value = normal(random);
        std::vector<float> wide = narrow;
        const auto run = [&](CpuIsa isa, std::vector<float>& head) {
          const auto angles = std::make_unique<RopeAngles>();
          ComputeRopeAngles(isa, rope, position, *angles);
          NormaliseHead(isa, nullptr, 1e-6f, dim, head.data());
          RotateHead(isa, rope, *angles, head.data());
        };
        run(CpuIsa::kAvx2, narrow);
        run(CpuIsa::kAvx512, wide);
        ASSERT_EQ(std::memcmp(narrow.data(), wide.data(), dim * sizeof(float)), 0)
            << dim << " at " << position;
      }
    }
  }
}

}  // namespace
}  // namespace attend
