// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/projection.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "engine/cpu/cpu_info.h"
#include "engine/cpu/row_convert.h"

namespace attend {
namespace {

constexpr uint32_t kSeed = 20240607;

// Sanitizers make the products some fifty times slower; they need the code paths, not every row
// count.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int64_t kRowStep = 13;
#else
constexpr int64_t kRowStep = 1;
#endif

std::vector<CpuIsa> Isas() {
  std::vector<CpuIsa> isas = {CpuIsa::kAvx2};
  if (DetectCpu().avx512) isas.push_back(CpuIsa::kAvx512);
  return isas;
}

bool HasBF16(CpuIsa isa) { return isa == CpuIsa::kAvx512 && DetectCpu().avx512_bf16; }

// A matrix as a checkpoint stores it, [out][in] or (transposed) [in][out], at an odd address.
class Weights {
 public:
  Weights(int64_t out, int64_t in, DType dtype, bool transposed, std::mt19937& random)
      : storage_(static_cast<size_t>(out * in * DTypeBytes(dtype) + 1)) {
    std::normal_distribution<float> normal;
    view.data = storage_.data() + 1;
    view.dtype = dtype;
    view.rows = out;
    view.columns = in;
    view.row_stride = transposed ? 1 : in;
    view.column_stride = transposed ? out : 1;
    for (int64_t i = 0; i < out * in; ++i)
      StoreFloat(dtype, normal(random), storage_.data() + 1, i);
  }

  WeightView view;

 private:
  std::vector<std::byte> storage_;
};

struct Case {
  CpuIsa isa;
  DType weights;
  DType compute;
  bool transposed = false;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (CpuIsa isa : Isas()) {
    for (bool transposed : {false, true}) {
      cases.push_back({isa, DType::kF32, DType::kF32, transposed});
      cases.push_back({isa, DType::kF16, DType::kF32, transposed});
      cases.push_back({isa, DType::kBF16, DType::kF32, transposed});
      if (HasBF16(isa)) cases.push_back({isa, DType::kBF16, DType::kBF16, transposed});
    }
  }
  return cases;
}

std::string Name(const Case& c) {
  return std::string(c.isa == CpuIsa::kAvx2 ? "avx2" : "avx512") + " weights " +
         DTypeName(c.weights) + " compute " + DTypeName(c.compute);
}

std::vector<std::byte> RandomRows(int64_t count, DType dtype, std::mt19937& random) {
  std::vector<std::byte> rows(static_cast<size_t>(count * DTypeBytes(dtype)));
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < count; ++i) StoreFloat(dtype, normal(random), rows.data(), i);
  return rows;
}

std::vector<float> Multiply(Projector& projector, PackedMatrix& matrix, const std::byte* x,
                            int64_t rows) {
  std::vector<float> y(static_cast<size_t>(rows * matrix.columns()), std::nanf(""));
  const Product product{&matrix, x, rows, y.data()};
  EXPECT_TRUE(projector.Run({&product, 1}).ok());
  return y;
}

TEST(ProjectionTest, AgreesWithADoubleProductWithinTheRoundingOfItsSums) {
  std::mt19937 random(kSeed);
  SCOPED_TRACE(kSeed);
  WorkerPool pool(2);
  const int64_t shapes[][2] = {{1, 1},   {3, 1},    {1, 5},     {16, 16},
                               {17, 33}, {100, 70}, {130, 768}, {2100, 65}};
  for (const Case& c : Cases()) {
    Projector projector(c.isa, pool);
    for (const auto& [out, in] : shapes) {
      SCOPED_TRACE(Name(c) + " " + std::to_string(out) + "x" + std::to_string(in));
      const Weights weights(out, in, c.weights, c.transposed, random);
      const Weights bias(out, 1, DType::kF32, false, random);
      auto matrix = projector.Pack(weights.view, bias.view, c.compute);
      ASSERT_TRUE(matrix.ok()) << matrix.status();
      EXPECT_EQ((*matrix)->compute_dtype(), c.compute);
      for (int64_t rows : {1, 5, 37}) {
        const auto x = RandomRows(rows * in, c.compute, random);
        const std::vector<float> y = Multiply(projector, **matrix, x.data(), rows);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t o = 0; o < out; ++o) {
            double sum = bias.view.At(o, 0);
            double magnitude = std::fabs(sum);
            for (int64_t i = 0; i < in; ++i) {
              const double term =
                  double{LoadFloat(c.compute, x.data(), r * in + i)} * weights.view.At(o, i);
              sum += term;
              magnitude += std::fabs(term);
            }
            // in + 1 roundings of float32, each at most epsilon / 2 of the sum of magnitudes.
            const double limit = 0.5 * (in + 1) * std::numeric_limits<float>::epsilon() * magnitude;
            ASSERT_LE(std::fabs(y[r * out + o] - sum), limit) << r << "," << o;
          }
        }
      }
    }
  }
}

TEST(ProjectionTest, ARowsBitsDoNotDependOnTheRowsBesideItNorOnTheThreads) {
  std::mt19937 random(kSeed + 1);
  SCOPED_TRACE(kSeed + 1);
  WorkerPool one(1), two(2), eight(8);
  std::uniform_int_distribution<int64_t> any_rows(1, 300);
  const int64_t fixed_shapes[][2] = {{1, 1},    {1, 257},   {64, 1},    {48, 17},
                                     {100, 96}, {768, 768}, {200, 2049}};
  for (const Case& c : Cases()) {
    if (c.transposed) continue;
    Projector alone(c.isa, one), pair(c.isa, two), many(c.isa, eight);
    for (int round = 0; round < 12; ++round) {
      int64_t out = std::uniform_int_distribution<int64_t>(1, 300)(random);
      int64_t in = std::uniform_int_distribution<int64_t>(1, 700)(random);
      if (round < 7) out = fixed_shapes[round][0], in = fixed_shapes[round][1];
      SCOPED_TRACE(Name(c) + " " + std::to_string(out) + "x" + std::to_string(in));
      const Weights weights(out, in, c.weights, false, random);
      const Weights bias(out, 1, DType::kF32, false, random);
      auto matrix = alone.Pack(weights.view, bias.view, c.compute);
      auto matrix_pair = pair.Pack(weights.view, bias.view, c.compute);
      auto matrix_many = many.Pack(weights.view, bias.view, c.compute);
      ASSERT_TRUE(matrix.ok() && matrix_pair.ok() && matrix_many.ok()) << matrix.status();

      constexpr int64_t kRows = 300;
      const auto x = RandomRows(kRows * in, c.compute, random);
      const int64_t row_bytes = in * DTypeBytes(c.compute);
      const auto expected = Multiply(alone, **matrix, x.data(), kRows);
      const auto check = [&](Projector& projector, PackedMatrix& packed, int64_t first,
                             int64_t rows) {
        const auto y = Multiply(projector, packed, x.data() + first * row_bytes, rows);
        ASSERT_EQ(std::memcmp(y.data(), expected.data() + first * out, y.size() * sizeof(float)), 0)
            << "rows " << first << " + " << rows;
      };
      for (int64_t row = 0; row < kRows; row += kRowStep) check(alone, **matrix, row, 1);
      for (int64_t rows : {2, 3, 8, 15, 16, 17, 31, 64, 65, 255, 256, 257, 300}) {
        check(alone, **matrix, 0, rows);
      }
      for (int i = 0; i < 12; ++i) {
        const int64_t rows = any_rows(random);
        const int64_t first = std::uniform_int_distribution<int64_t>(0, kRows - rows)(random);
        check(alone, **matrix, first, rows);
        check(pair, **matrix_pair, first, rows);
        check(many, **matrix_many, first, rows);
      }
    }
  }
}

TEST(ProjectionTest, EveryRowCountFrom1To300GivesTheSameBits) {
  std::mt19937 random(kSeed + 2);
  SCOPED_TRACE(kSeed + 2);
  WorkerPool pool(2);
  for (const Case& c : Cases()) {
    if (c.transposed || c.weights == DType::kF16) continue;
    SCOPED_TRACE(Name(c));
    Projector projector(c.isa, pool);
    constexpr int64_t kOut = 72, kIn = 771, kRows = 300;
    const Weights weights(kOut, kIn, c.weights, false, random);
    auto matrix = projector.Pack(weights.view, WeightView(), c.compute);
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    const auto x = RandomRows(kRows * kIn, c.compute, random);
    const auto all = Multiply(projector, **matrix, x.data(), kRows);
    for (int64_t rows = 1; rows < kRows; rows += kRowStep) {
      const auto y = Multiply(projector, **matrix, x.data(), rows);
      ASSERT_EQ(std::memcmp(y.data(), all.data(), y.size() * sizeof(float)), 0) << rows << " rows";
    }
  }
}

TEST(ProjectionTest, NaNAndInfinityStayInTheirRow) {
  std::mt19937 random(kSeed + 3);
  WorkerPool pool(2);
  for (const Case& c : Cases()) {
    SCOPED_TRACE(Name(c));
    Projector projector(c.isa, pool);
    constexpr int64_t kOut = 50, kIn = 67, kRows = 29;
    const Weights weights(kOut, kIn, c.weights, c.transposed, random);
    auto matrix = projector.Pack(weights.view, WeightView(), c.compute);
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    auto x = RandomRows(kRows * kIn, c.compute, random);
    const auto clean = Multiply(projector, **matrix, x.data(), kRows);
    StoreFloat(c.compute, std::nanf(""), x.data(), 7 * kIn + kIn - 1);
    StoreFloat(c.compute, INFINITY, x.data(), 13 * kIn);
    const auto y = Multiply(projector, **matrix, x.data(), kRows);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t o = 0; o < kOut; ++o) {
        if (r == 7)
          ASSERT_TRUE(std::isnan(y[r * kOut + o]));
        else if (r == 13)
          ASSERT_FALSE(std::isfinite(y[r * kOut + o]));
        else
          ASSERT_EQ(y[r * kOut + o], clean[r * kOut + o]) << r << "," << o;
      }
    }
  }
}

TEST(ProjectionTest, ProductsOfOnePhaseKeepTheirOwnRowsAndOutputs) {
  std::mt19937 random(kSeed + 4);
  WorkerPool pool(2);
  for (CpuIsa isa : Isas()) {
    Projector projector(isa, pool);
    constexpr int64_t kIn = 40;
    const Weights a(96, kIn, DType::kF32, false, random), b(32, kIn, DType::kF32, false, random);
    auto first = projector.Pack(a.view, WeightView(), DType::kF32);
    auto second = projector.Pack(b.view, WeightView(), DType::kF32);
    ASSERT_TRUE(first.ok() && second.ok());
    const auto x = RandomRows(20 * kIn, DType::kF32, random);
    const std::byte* tail = x.data() + 12 * kIn * 4;
    const auto expected_first = Multiply(projector, **first, x.data(), 15);
    const auto expected_second = Multiply(projector, **second, tail, 8);
    std::vector<float> y_first(15 * 96), y_second(8 * 32);
    const Product products[] = {{first->get(), x.data(), 15, y_first.data()},
                                {first->get(), x.data(), 0, nullptr},
                                {second->get(), tail, 8, y_second.data()}};
    ASSERT_TRUE(projector.Run(products).ok());
    EXPECT_EQ(y_first, expected_first);
    EXPECT_EQ(y_second, expected_second);
  }
}

TEST(RowConvertTest, GivesTheBitsOfTheScalarConversionsForEveryHalfAndManyFloats) {
  std::mt19937 random(kSeed + 5);
  std::vector<uint16_t> halves(65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  std::vector<uint32_t> floats(100003);
  for (uint32_t& bits : floats) bits = static_cast<uint32_t>(random());
  const float special[] = {0.0f,  -0.0f,    INFINITY, -INFINITY,  65504, 65519.99f,
                           65520, 0x1p-24f, 0x1p-25f, 0x1.8p-25f, 1e-40f};
  for (size_t i = 0; i < std::size(special); ++i) std::memcpy(&floats[i], &special[i], 4);
  for (CpuIsa isa : Isas()) {
    for (DType half : {DType::kF16, DType::kBF16}) {
      std::vector<uint32_t> wide(halves.size());
      ConvertElements(isa, half, halves.data(), DType::kF32, wide.data(), 65536);
      std::vector<uint16_t> narrow(floats.size());
      ConvertElements(isa, DType::kF32, floats.data(), half, narrow.data(), 100003);
      for (size_t i = 0; i < halves.size(); ++i) {
        const float expected = LoadFloat(half, halves.data(), static_cast<int64_t>(i));
        ASSERT_EQ(wide[i], std::bit_cast<uint32_t>(expected)) << DTypeName(half) << " " << i;
      }
      for (size_t i = 0; i < floats.size(); ++i) {
        const float value = std::bit_cast<float>(floats[i]);
        const uint16_t expected = half == DType::kF16 ? F16FromFloat(value) : BF16FromFloat(value);
        ASSERT_EQ(narrow[i], expected) << DTypeName(half) << " " << std::hex << floats[i];
      }
    }
  }
}

TEST(CpuInfoTest, RefusesWhatTheProcessorOrTheFlagCannotMean) {
  CpuInfo cpu{.name = "test", .vendor = "GenuineIntel", .family = 6, .avx2 = true};
  EXPECT_EQ(*ChooseIsa("auto", cpu), CpuIsa::kAvx2);
  EXPECT_EQ(ChooseIsa("avx512", cpu).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ChooseIsa("sse", cpu).status().code(), absl::StatusCode::kInvalidArgument);
  cpu.avx512 = true;
  EXPECT_EQ(*ChooseIsa("auto", cpu), CpuIsa::kAvx512);
  EXPECT_EQ(*ChooseIsa("avx2", cpu), CpuIsa::kAvx2);
  EXPECT_EQ(ChooseCompute("bf16", CpuIsa::kAvx512, cpu).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(*ChooseCompute("auto", CpuIsa::kAvx512, cpu), DType::kF32);
  cpu.avx512_bf16 = true;  // Intel without AMX: bf16 products at half the fp32 rate
  EXPECT_EQ(*ChooseCompute("auto", CpuIsa::kAvx512, cpu), DType::kF32);
  EXPECT_EQ(*ChooseCompute("bf16", CpuIsa::kAvx512, cpu), DType::kBF16);
  EXPECT_EQ(ChooseCompute("bf16", CpuIsa::kAvx2, cpu).status().code(),
            absl::StatusCode::kInvalidArgument);
  cpu.amx_bf16 = true;
  EXPECT_EQ(*ChooseCompute("auto", CpuIsa::kAvx512, cpu), DType::kBF16);
  cpu.amx_bf16 = false;
  cpu.vendor = "AuthenticAMD";
  cpu.family = 0x1a;
  EXPECT_EQ(*ChooseCompute("auto", CpuIsa::kAvx512, cpu), DType::kBF16);
  EXPECT_EQ(*ChooseCompute("fp32", CpuIsa::kAvx512, cpu), DType::kF32);
  EXPECT_EQ(*ChooseCompute("auto", CpuIsa::kAvx2, cpu), DType::kF32);
  cpu.avx2 = false;
  EXPECT_EQ(ChooseIsa("auto", cpu).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace attend
