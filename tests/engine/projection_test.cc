// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/projection.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
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

// What a projector is told of the machine. With `tiles` BF16 goes to oneDNN, which takes vectors
// where there are no tiles; without, to our own kernel even where there are.
CpuInfo Cpu(bool tiles) {
  CpuInfo cpu = DetectCpu();
  cpu.amx_bf16 = tiles;
  return cpu;
}

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
  bool onednn = false;

  DType input() const { return compute == DType::kBF16 ? DType::kBF16 : DType::kF32; }
  Projector Make(WorkerPool& pool) const { return Projector(isa, Cpu(onednn), pool); }
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (CpuIsa isa : Isas()) {
    for (bool transposed : {false, true}) {
      cases.push_back({isa, DType::kF32, DType::kF32, transposed});
      cases.push_back({isa, DType::kF16, DType::kF32, transposed});
      cases.push_back({isa, DType::kBF16, DType::kF32, transposed});
      cases.push_back({isa, DType::kF32, DType::kI8, transposed});
      cases.push_back({isa, DType::kBF16, DType::kI8, transposed});
      if (!HasBF16(isa)) continue;
      cases.push_back({isa, DType::kBF16, DType::kBF16, transposed});
      cases.push_back({isa, DType::kBF16, DType::kBF16, transposed, true});
    }
  }
  return cases;
}

std::string Name(const Case& c) {
  return std::string(c.isa == CpuIsa::kAvx2 ? "avx2" : "avx512") + " weights " +
         DTypeName(c.weights) + " compute " + DTypeName(c.compute) + (c.onednn ? " onednn" : "");
}

std::vector<std::byte> RandomRows(int64_t count, DType dtype, std::mt19937& random) {
  std::vector<std::byte> rows(static_cast<size_t>(count * DTypeBytes(dtype)));
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < count; ++i) StoreFloat(dtype, normal(random), rows.data(), i);
  return rows;
}

// Pointers to rows that lie one after another.
std::vector<const void*> RowsAt(const void* x, int64_t rows, int64_t row_bytes) {
  std::vector<const void*> pointers;
  for (int64_t r = 0; r < rows; ++r) {
    pointers.push_back(static_cast<const std::byte*>(x) + r * row_bytes);
  }
  return pointers;
}

std::vector<OutputRow> OutputsAt(std::vector<float>& y, int64_t rows, int64_t columns) {
  std::vector<OutputRow> outputs;
  for (int64_t r = 0; r < rows; ++r) outputs.push_back({y.data() + r * columns, DType::kF32});
  return outputs;
}

std::vector<float> Multiply(Projector& projector, PackedMatrix& matrix, const std::byte* x,
                            int64_t rows) {
  std::vector<float> y(static_cast<size_t>(rows * matrix.columns()), std::nanf(""));
  const auto from = RowsAt(x, rows, matrix.inner() * DTypeBytes(matrix.input_dtype()));
  const auto to = OutputsAt(y, rows, matrix.columns());
  const Product product{&matrix, from.data(), to.data(), rows};
  EXPECT_TRUE(projector.Run({&product, 1}).ok());
  return y;
}

float ScaleOf(const std::vector<float>& values) {
  float largest = 0;
  for (float value : values) largest = std::max(largest, std::fabs(value));
  return largest / 127;
}

TEST(ProjectionTest, AgreesWithADoubleProductWithinTheRoundingOfItsSums) {
  std::mt19937 random(kSeed);
  SCOPED_TRACE(kSeed);
  WorkerPool pool(2);
  const int64_t shapes[][2] = {{1, 1},    {3, 1},     {1, 5},     {16, 16},  {17, 33},
                               {100, 70}, {130, 768}, {2100, 65}, {70, 4101}};
  for (const Case& c : Cases()) {
    Projector projector = c.Make(pool);
    for (const auto& [out, in] : shapes) {
      SCOPED_TRACE(Name(c) + " " + std::to_string(out) + "x" + std::to_string(in));
      const Weights weights(out, in, c.weights, c.transposed, random);
      const Weights bias(out, 1, DType::kF32, false, random);
      auto matrix = projector.Pack(weights.view, bias.view, c.compute);
      ASSERT_TRUE(matrix.ok()) << matrix.status();
      EXPECT_EQ((*matrix)->compute_dtype(), c.compute);
      for (int64_t rows : {1, 5, 37}) {
        const auto x = RandomRows(rows * in, c.input(), random);
        const std::vector<float> y = Multiply(projector, **matrix, x.data(), rows);
        if (c.compute == DType::kI8) continue;  // has bounds of its own, below
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t o = 0; o < out; ++o) {
            double sum = bias.view.At(o, 0);
            double magnitude = std::fabs(sum);
            for (int64_t i = 0; i < in; ++i) {
              const double term =
                  double{LoadFloat(c.input(), x.data(), r * in + i)} * weights.view.At(o, i);
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
                                     {100, 96}, {768, 768}, {200, 2051}};
  for (const Case& c : Cases()) {
    if (c.transposed) continue;
    Projector alone = c.Make(one), pair = c.Make(two), many = c.Make(eight);
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
      const auto x = RandomRows(kRows * in, c.input(), random);
      const int64_t row_bytes = in * DTypeBytes(c.input());
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
    Projector projector = c.Make(pool);
    constexpr int64_t kOut = 72, kIn = 771, kRows = 300;
    const Weights weights(kOut, kIn, c.weights, false, random);
    auto matrix = projector.Pack(weights.view, WeightView(), c.compute);
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    const auto x = RandomRows(kRows * kIn, c.input(), random);
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
    Projector projector = c.Make(pool);
    constexpr int64_t kOut = 50, kIn = 67, kRows = 29;
    const Weights weights(kOut, kIn, c.weights, c.transposed, random);
    auto matrix = projector.Pack(weights.view, WeightView(), c.compute);
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    auto x = RandomRows(kRows * kIn, c.input(), random);
    const auto clean = Multiply(projector, **matrix, x.data(), kRows);
    StoreFloat(c.input(), std::nanf(""), x.data(), 7 * kIn + kIn - 1);
    StoreFloat(c.input(), INFINITY, x.data(), 13 * kIn);
    const auto y = Multiply(projector, **matrix, x.data(), kRows);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t o = 0; o < kOut; ++o) {
        if (r == 7 || (r == 13 && c.compute == DType::kI8))
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
  for (const Case& c : Cases()) {
    if (c.transposed) continue;
    SCOPED_TRACE(Name(c));
    Projector projector = c.Make(pool);
    constexpr int64_t kIn = 40;
    const Weights a(96, kIn, c.weights, false, random), b(32, kIn, c.weights, false, random);
    auto first = projector.Pack(a.view, WeightView(), c.compute);
    auto second = projector.Pack(b.view, WeightView(), c.compute);
    ASSERT_TRUE(first.ok() && second.ok());
    const auto x = RandomRows(20 * kIn, c.input(), random);
    const int64_t row_bytes = kIn * DTypeBytes(c.input());
    const auto rows = RowsAt(x.data(), 20, row_bytes);
    // The second product's rows are inside the first one's, the third's reach beyond them.
    const auto all = Multiply(projector, **first, x.data(), 15);
    const auto inside = Multiply(projector, **second, x.data() + 2 * row_bytes, 8);
    const auto beyond = Multiply(projector, **second, x.data() + 12 * row_bytes, 8);
    std::vector<float> y_all(15 * 96), y_inside(8 * 32), y_beyond(8 * 32);
    const auto to_all = OutputsAt(y_all, 15, 96);
    const auto to_inside = OutputsAt(y_inside, 8, 32), to_beyond = OutputsAt(y_beyond, 8, 32);
    const Product products[] = {{first->get(), rows.data(), to_all.data(), 15},
                                {first->get(), rows.data(), nullptr, 0},
                                {second->get(), rows.data() + 2, to_inside.data(), 8},
                                {second->get(), rows.data() + 12, to_beyond.data(), 8}};
    ASSERT_TRUE(projector.Run(products).ok());
    EXPECT_EQ(y_all, all);
    EXPECT_EQ(y_inside, inside);
    EXPECT_EQ(y_beyond, beyond);
  }
}

TEST(ProjectionTest, OutputRowsHaveTheirOwnPlacesAndDtypesAndNothingBesideThemIsWritten) {
  std::mt19937 random(kSeed + 6);
  WorkerPool pool(2);
  constexpr int64_t kIn = 33, kRows = 41, kGap = 7;
  for (const Case& c : Cases()) {
    if (c.transposed) continue;
    for (int64_t out : {1, 15, 16, 63, 64, 70, 129}) {
      SCOPED_TRACE(Name(c) + " " + std::to_string(out));
      Projector projector = c.Make(pool);
      const Weights weights(out, kIn, c.weights, false, random);
      const Weights bias(out, 1, DType::kF32, false, random);
      auto matrix = projector.Pack(weights.view, bias.view, c.compute);
      ASSERT_TRUE(matrix.ok()) << matrix.status();
      const auto x = RandomRows(kRows * kIn, c.input(), random);
      const auto expected = Multiply(projector, **matrix, x.data(), kRows);
      const auto from = RowsAt(x.data(), kRows, kIn * DTypeBytes(c.input()));
      std::vector<std::vector<std::byte>> buffers;
      std::vector<OutputRow> to;
      const DType dtypes[] = {DType::kF32, DType::kF16, DType::kBF16};
      for (int64_t r = 0; r < kRows; ++r) {
        const DType dtype = dtypes[r % 3];
        buffers.emplace_back(out * DTypeBytes(dtype) + kGap, std::byte{0xa5});
        to.push_back({buffers.back().data(), dtype});
      }
      const Product product{matrix->get(), from.data(), to.data(), kRows};
      ASSERT_TRUE(projector.Run({&product, 1}).ok());
      for (int64_t r = 0; r < kRows; ++r) {
        const DType dtype = dtypes[r % 3];
        std::vector<std::byte> wanted(buffers[r].size(), std::byte{0xa5});
        for (int64_t o = 0; o < out; ++o) {
          StoreFloat(dtype, expected[r * out + o], wanted.data(), o);
        }
        ASSERT_EQ(buffers[r], wanted) << "row " << r;
      }
    }
  }
}

TEST(ProjectionTest, RowsMayEndWhereMemoryEnds) {
  std::mt19937 random(kSeed + 7);
  WorkerPool pool(1);
  const int64_t page = sysconf(_SC_PAGESIZE);
  auto* pages = static_cast<std::byte*>(
      mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(pages, MAP_FAILED);
  ASSERT_EQ(mprotect(pages + page, page, PROT_NONE), 0);
  for (const Case& c : Cases()) {
    if (c.transposed) continue;
    Projector projector = c.Make(pool);
    for (int64_t in : {1, 2, 3, 37, 64}) {
      SCOPED_TRACE(Name(c) + " " + std::to_string(in));
      const Weights weights(20, in, c.weights, false, random);
      auto matrix = projector.Pack(weights.view, WeightView(), c.compute);
      ASSERT_TRUE(matrix.ok()) << matrix.status();
      const auto x = RandomRows(3 * in, c.input(), random);
      std::byte* at_the_end = pages + page - x.size();
      std::copy(x.begin(), x.end(), at_the_end);
      EXPECT_EQ(Multiply(projector, **matrix, at_the_end, 3),
                Multiply(projector, **matrix, x.data(), 3));
    }
  }
  munmap(pages, 2 * page);
}

// Everything an I8 product is made of, one value at a time; and how far that is from the product
// of the values before they were rounded.
TEST(ProjectionTest, I8ProductsAreExactSumsOfRoundedOperandsOnEveryInstructionSet) {
  std::mt19937 random(kSeed + 8);
  SCOPED_TRACE(kSeed + 8);
  WorkerPool pool(2);
  const int64_t shapes[][2] = {{1, 1}, {17, 33}, {70, 4101}, {130, 768}};
  for (const Case& c : Cases()) {
    if (c.compute != DType::kI8) continue;
    Projector projector = c.Make(pool);
    for (const auto& [out, in] : shapes) {
      SCOPED_TRACE(Name(c) + " " + std::to_string(out) + "x" + std::to_string(in));
      const Weights weights(out, in, c.weights, c.transposed, random);
      const Weights bias(out, 1, DType::kF32, false, random);
      auto matrix = projector.Pack(weights.view, bias.view, c.compute);
      ASSERT_TRUE(matrix.ok()) << matrix.status();
      constexpr int64_t kRows = 9;
      auto x = RandomRows(kRows * in, DType::kF32, random);
      for (int64_t i = 0; i < in; ++i) StoreFloat(DType::kF32, 0, x.data(), 3 * in + i);
      const auto y = Multiply(projector, **matrix, x.data(), kRows);
      for (int64_t r = 0; r < kRows; ++r) {
        std::vector<float> row(in);
        for (int64_t i = 0; i < in; ++i) row[i] = LoadFloat(DType::kF32, x.data(), r * in + i);
        const float x_scale = ScaleOf(row);
        const float factor =
            x_scale == 0 ? 0
                         : 127 / (*std::max_element(row.begin(), row.end(), [](float a, float b) {
                             return std::fabs(a) < std::fabs(b);
                           }));
        for (int64_t o = 0; o < out; ++o) {
          std::vector<float> column(in);
          for (int64_t i = 0; i < in; ++i) column[i] = weights.view.At(o, i);
          const float w_scale = ScaleOf(column);
          int64_t sum = 0;
          double exact = bias.view.At(o, 0), limit = 1e-6 * std::fabs(exact);
          for (int64_t i = 0; i < in; ++i) {
            sum += std::lround(std::nearbyint(row[i] * std::fabs(factor))) *
                   std::lround(std::nearbyint(column[i] / w_scale));
            exact += double{row[i]} * column[i];
            // Half a step of one times the other; 1e-5 covers the steps' own rounding.
            limit += (0.5 + 1e-5) * (std::fabs(row[i]) * w_scale + std::fabs(column[i]) * x_scale) +
                     0.26 * x_scale * w_scale;
          }
          ASSERT_EQ(y[r * out + o],
                    std::fma(static_cast<float>(sum), x_scale * w_scale, bias.view.At(o, 0)))
              << r << "," << o;
          ASSERT_LE(std::fabs(y[r * out + o] - exact), limit) << r << "," << o;
        }
      }
    }
  }
}

TEST(ProjectionTest, I8WeightsThatAreNotFiniteShowInTheirColumnOnly) {
  std::mt19937 random(kSeed + 9);
  WorkerPool pool(1);
  for (CpuIsa isa : Isas()) {
    Projector projector(isa, DetectCpu(), pool);
    std::vector<float> values(20 * 30, 1.0f);
    values[7 * 30 + 4] = INFINITY;
    values[11 * 30 + 29] = std::nanf("");
    const WeightView view{values.data(), DType::kF32, 20, 30, 30, 1};
    auto matrix = projector.Pack(view, WeightView(), DType::kI8);
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    const auto x = RandomRows(2 * 30, DType::kF32, random);
    const auto y = Multiply(projector, **matrix, x.data(), 2);
    for (int64_t i = 0; i < 40; ++i) {
      EXPECT_EQ(std::isnan(y[i]), i % 20 == 7 || i % 20 == 11) << i;
    }
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
