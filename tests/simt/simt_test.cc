// SPDX-License-Identifier: Apache-2.0
//
// What the emulated device computes: lane maps, collectives, conversions, memory, orders. What it
// refuses is tested in controls_test.cc.
#include "tests/simt/simt.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "engine/cuda/device.h"
#include "tests/simt/device_array.h"
#include "tests/support/seed.h"

namespace attend {
namespace {

using namespace device;  // NOLINT: as kernels do
using simt::DeviceArray;

template <class T>
uint16_t Bits(float value) {
  return FromFloat<T>(value).bits;
}
template <class T>
float Value(uint16_t bits) {
  return ToFloat(T{bits});
}

// ---- Lane maps ----

// One block of one warp. c [16, 16] = a b, a [16, 16]; b is [16, 16] by columns (as keys) or by
// rows (as values).
struct ProductParams {
  const uint16_t* a;
  const uint16_t* b;
  float* c;
  int b_by_rows;
};
constexpr int kProductSharedBytes = 1024;

template <class T>
__global__ void __launch_bounds__(32) Product(const __grid_constant__ ProductParams params) {
  const int lane = ThreadIndex();
  Shared<T> a = SharedArray<T>("a", 0, 256);
  Shared<T> b = SharedArray<T>("b", 512, 256);
  CopyAsync16(a + lane * 8, Global(params.a) + lane * 8, true);
  CopyAsync16(b + lane * 8, Global(params.b) + lane * 8, true);
  CommitCopies();
  WaitCopies<0>();
  SyncWarp();
  uint32_t a_words[4];
  uint32_t b_words[4];
  LoadMatrix4(a_words, a + (lane % 16) * 16 + 8 * (lane / 16));
  if (params.b_by_rows) {
    LoadMatrix4Transposed(b_words, b + (lane % 16) * 16 + 8 * (lane / 16));
  } else {
    LoadMatrix4(b_words, b + (8 * (lane / 16) + lane % 8) * 16 + 8 * ((lane / 8) % 2));
  }
  float d[2][4] = {};
  for (int n = 0; n < 2; ++n) {
    MultiplyAccumulate<T>(d[n], a_words, b_words[2 * n], b_words[2 * n + 1]);
  }
  Global<float> c(params.c);
  for (int n = 0; n < 2; ++n) {
    for (int i = 0; i < 4; ++i) {
      c[(lane / 4 + 8 * (i / 2)) * 16 + 8 * n + 2 * (lane % 4) + i % 2] = d[n][i];
    }
  }
}

// Small whole numbers: the product is exact in any order, so a wrong map can't hide in a tolerance.
template <class T>
void ExpectExactProduct(bool b_by_rows, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint16_t> a(256);
  std::vector<uint16_t> b(256);
  for (auto* matrix : {&a, &b}) {
    for (uint16_t& x : *matrix)
      x = Bits<T>(static_cast<float>(static_cast<int>(random() % 33) - 16));
  }
  DeviceArray<uint16_t> device_a(a, "a");
  DeviceArray<uint16_t> device_b(b, "b");
  DeviceArray<float> c(256, "c");
  const ProductParams params = {device_a.data(), device_b.data(), c.data(), b_by_rows};
  ASSERT_EQ(Launch(Product<T>, "Product", {1, 32, kProductSharedBytes}, params, nullptr),
            cudaSuccess);
  ASSERT_TRUE(c.Written());
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 16; ++column) {
      float expected = 0;
      for (int k = 0; k < 16; ++k) {
        expected += Value<T>(a[row * 16 + k]) *
                    Value<T>(b_by_rows ? b[k * 16 + column] : b[column * 16 + k]);
      }
      ASSERT_EQ(c[row * 16 + column], expected) << row << ", " << column;
    }
  }
}

TEST(SimtTest, FragmentsFromMatricesGiveTheProduct) {
  const uint64_t seed = TestSeed();
  for (const simt::Order order : simt::kAllOrders) {
    for (const simt::SumOrder sums : {simt::SumOrder::kAscending, simt::SumOrder::kShuffled}) {
      const simt::ScopedSettings scoped({.seed = seed, .order = order, .sums = sums});
      for (const bool b_by_rows : {false, true}) {
        ExpectExactProduct<Bf16>(b_by_rows, seed);
        ExpectExactProduct<F16>(b_by_rows, seed);
      }
    }
  }
}

// Every word of every lane by device.h's description, without a product in between.
struct MatrixParams {
  uint32_t* words;  // [2][32][4]
};
__global__ void LoadMatrices(const __grid_constant__ MatrixParams params) {
  const int lane = ThreadIndex();
  Shared<uint16_t> matrices = SharedArray<uint16_t>("matrices", 0, 256);
  for (int i = lane; i < 256; i += 32) matrices[i] = static_cast<uint16_t>(i);
  SyncWarp();
  uint32_t words[4];
  LoadMatrix4(words, matrices + lane * 8);
  for (int i = 0; i < 4; ++i) Global(params.words)[lane * 4 + i] = words[i];
  LoadMatrix4Transposed(words, matrices + lane * 8);
  for (int i = 0; i < 4; ++i) Global(params.words)[128 + lane * 4 + i] = words[i];
}

TEST(SimtTest, MatrixWordsLieInTheLanesThatTheInstructionNames) {
  DeviceArray<uint32_t> words(256, "words");
  Launch(LoadMatrices, "LoadMatrices", {1, 32, 512}, MatrixParams{words.data()}, nullptr);
  const auto element = [](int matrix, int row, int column) {
    return static_cast<uint32_t>(matrix * 64 + row * 8 + column);
  };
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4;
      const int column = 2 * (lane % 4);
      EXPECT_EQ(words[lane * 4 + i], element(i, row, column) | element(i, row, column + 1) << 16);
      EXPECT_EQ(words[128 + lane * 4 + i], element(i, column, row) | element(i, column + 1, row)
                                                                         << 16);
    }
  }
}

// d = a e, e the first unit vector: d's first column is a's.
struct EveryHalfParams {
  float* values;  // [65536]
};
__global__ void EveryHalf(const __grid_constant__ EveryHalfParams params) {
  const int lane = ThreadIndex();
  const int first = BlockIndex() * 16;
  const auto word = [&](int row) {
    return lane % 4 == 0 ? static_cast<uint32_t>(first + row) : 0u;  // column 0, column 1 is 0
  };
  const uint32_t a[4] = {word(lane / 4), word(lane / 4 + 8), 0, 0};
  float d[4] = {};
  MultiplyAccumulate<F16>(d, a, lane == 0 ? 0x3c00u : 0u, 0);
  if (lane % 4 != 0) return;
  Global(params.values)[first + lane / 4] = d[0];
  Global(params.values)[first + lane / 4 + 8] = d[2];
}

TEST(SimtTest, ProductsReadEveryHalfAsTheConversionDoes) {
  DeviceArray<float> values(65536, "values");
  Launch(EveryHalf, "EveryHalf", {4096, 32, 0}, EveryHalfParams{values.data()}, nullptr);
  for (int bits = 0; bits < 65536; ++bits) {
    const float expected = FloatFromF16(static_cast<uint16_t>(bits));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(values[bits])) << bits;
    } else {
      ASSERT_EQ(values[bits], expected) << bits;
    }
  }
}

TEST(SimtTest, ShuffledSumsDifferByRoundingAndByTheSeedOnly) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> matrix(256);
  for (uint16_t& x : matrix) x = Bits<Bf16>(normal(random));
  DeviceArray<uint16_t> a(matrix, "a");
  const auto run = [&](simt::SumOrder sums, uint64_t seed) {
    const simt::ScopedSettings scoped({.seed = seed, .sums = sums});
    DeviceArray<float> c(256, "c");
    const ProductParams params = {a.data(), a.data(), c.data(), 0};
    Launch(Product<Bf16>, "Product", {1, 32, kProductSharedBytes}, params, nullptr);
    return c.values();
  };
  const auto ascending = run(simt::SumOrder::kAscending, 1);
  const auto shuffled = run(simt::SumOrder::kShuffled, 1);
  EXPECT_NE(ascending, shuffled);
  EXPECT_EQ(shuffled, run(simt::SumOrder::kShuffled, 1));
  EXPECT_NE(shuffled, run(simt::SumOrder::kShuffled, 2));
  for (size_t i = 0; i < ascending.size(); ++i) {
    EXPECT_NEAR(ascending[i], shuffled[i], 16 * 16 * 0x1p-23f);
  }
}

// ---- Collectives and barriers ----

struct FloatParams {
  const float* in;
  float* out;
  int count;
};

// Sums of a warp by ShuffleXor, of a block by shared memory; the block's sum from thread 0's
// Shuffle.
__global__ void BlockSums(const __grid_constant__ FloatParams params) {
  const int thread = ThreadIndex();
  const int warps = BlockThreads() / 32;
  Shared<float> sums = SharedArray<float>("sums", 0, warps);
  float value = Global(params.in)[int64_t{BlockIndex()} * BlockThreads() + thread];
  const bool odd = SyncThreadsOr(static_cast<int>(value) % 2 == 1);
  for (int mask = 16; mask > 0; mask /= 2) value += ShuffleXor(value, mask);
  if (thread % 32 == 0) sums[thread / 32] = value;
  SyncThreads();
  float total = 0;
  for (int warp = 0; warp < warps; ++warp) total += sums[warp];
  const bool large = Any(thread == 37 && total > 1000);
  total = Shuffle(thread % 32 == 5 ? total : -1.0f, 5);
  Global(params.out)[int64_t{BlockIndex()} * BlockThreads() + thread] =
      total + (odd ? 0.5f : 0.0f) + (large ? 0.25f : 0.0f);
}

TEST(SimtTest, CollectivesAndBarriersSumInEveryOrder) {
  constexpr int kBlocks = 5;
  constexpr int kThreads = 96;
  std::vector<float> in(kBlocks * kThreads);
  std::iota(in.begin(), in.end(), 0.0f);
  for (int i = 0; i < kThreads; ++i) in[i] = 2;  // no odd one in block 0
  const DeviceArray<float> device_in(in, "in");
  for (const simt::Order order : simt::kAllOrders) {
    const simt::ScopedSettings scoped({.seed = 7, .order = order});
    DeviceArray<float> out(in.size(), "out");
    ASSERT_EQ(Launch(BlockSums, "BlockSums", {kBlocks, kThreads, 64},
                     FloatParams{device_in.data(), out.data(), 0}, nullptr),
              cudaSuccess);
    for (int i = 0; i < kBlocks * kThreads; ++i) {
      const int block = i / kThreads;
      float expected = 0;
      for (int j = 0; j < kThreads; ++j) expected += in[block * kThreads + j];
      // Thread 37 is in warp 1.
      if (i % kThreads / 32 == 1 && expected > 1000) expected += 0.25f;
      if (block > 0) expected += 0.5f;
      ASSERT_EQ(out[i], expected) << "order " << simt::OrderName(order) << ", thread " << i;
    }
  }
}

// Warp 0 produces, warp 1 consumes, warp 2 knows nothing: two barriers of 64 threads.
__global__ void ProduceAndConsume(const __grid_constant__ FloatParams params) {
  const int warp = ThreadIndex() / 32;
  const int lane = ThreadIndex() % 32;
  Shared<float> slot = SharedArray<float>("slot", 0, 32);
  if (warp == 2) return;
  for (int i = 0; i < params.count; ++i) {
    if (warp == 0) {
      slot[lane] = static_cast<float>(i * 32 + lane);
      SyncNamed(1, 64);  // full
      SyncNamed(2, 64);  // free
    } else {
      SyncNamed(1, 64);
      Global(params.out)[i * 32 + lane] = slot[31 - lane];
      SyncNamed(2, 64);
    }
  }
}

TEST(SimtTest, NamedBarriersOrderTheirWarps) {
  for (const simt::Order order : simt::kAllOrders) {
    const simt::ScopedSettings scoped({.seed = 3, .order = order});
    DeviceArray<float> out(5 * 32, "out");
    ASSERT_EQ(Launch(ProduceAndConsume, "ProduceAndConsume", {1, 96, 128},
                     FloatParams{nullptr, out.data(), 5}, nullptr),
              cudaSuccess);
    for (int i = 0; i < 5 * 32; ++i) ASSERT_EQ(out[i], i / 32 * 32 + 31 - i % 32);
  }
}

// Two threads write the halves of one word: no race.
struct HalvesParams {
  uint16_t* out;
};
__global__ void WriteHalves(const __grid_constant__ HalvesParams params) {
  Shared<uint16_t> halves = SharedArray<uint16_t>("halves", 0, 64);
  const int thread = ThreadIndex();
  halves[thread] = static_cast<uint16_t>(thread);
  SyncThreads();
  Shared<uint32_t> words(reinterpret_cast<uint32_t*>(halves.data()));
  const uint32_t word = words[thread / 2];
  Global(params.out)[thread] = static_cast<uint16_t>(thread % 2 == 0 ? word : word >> 16);
}

TEST(SimtTest, HalvesOfAWordAreApart) {
  DeviceArray<uint16_t> out(64, "out");
  Launch(WriteHalves, "WriteHalves", {1, 64, 128}, HalvesParams{out.data()}, nullptr);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(out[i], i);
}

// ---- Memory ----

struct FarParams {
  uint16_t* data;
  int64_t stride;
};
__global__ void WriteFar(const __grid_constant__ FarParams params) {
  if (ThreadIndex() != 0) return;
  Global(params.data)[BlockIndex() * params.stride] = static_cast<uint16_t>(BlockIndex() + 1);
}

TEST(SimtTest, OffsetsBeyond32BitsTakeNoMemory) {
  constexpr int64_t kStride = int64_t{3} << 30;  // elements
  const simt::SparseBuffer buffer(4 * kStride * sizeof(uint16_t), "far");
  auto* data = reinterpret_cast<uint16_t*>(buffer.data());
  ASSERT_EQ(Launch(WriteFar, "WriteFar", {4, 32, 0}, FarParams{data, kStride}, nullptr),
            cudaSuccess);
  for (int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(data[i * kStride], i + 1);
    EXPECT_TRUE(simt::IsInitialized(data + i * kStride, 2));
    EXPECT_FALSE(simt::IsInitialized(data + i * kStride, 4));
  }
}

TEST(SimtTest, MemoryKnowsWhatWasWritten) {
  const DeviceArray<float> array(100, "array");
  EXPECT_FALSE(array.Written());
  simt::MarkInitialized(array.data(), 99 * 4 + 3);
  EXPECT_FALSE(array.Written());
  EXPECT_TRUE(simt::IsInitialized(array.data(), 99 * 4));
  simt::MarkInitialized(array.data() + 99, 4);
  EXPECT_TRUE(array.Written());
  simt::MarkUninitialized(reinterpret_cast<std::byte*>(array.data()) + 41, 1);
  EXPECT_FALSE(simt::IsInitialized(array.data() + 10, 4));
  EXPECT_TRUE(simt::IsInitialized(array.data(), 40));
  EXPECT_TRUE(simt::IsInitialized(array.data() + 11, 89 * 4));
  EXPECT_TRUE(simt::IsRegistered(array.data(), 400));
  EXPECT_FALSE(simt::IsRegistered(array.data(), 401));
}

TEST(SimtTest, CopiesMoveWhatWasWritten) {
  const DeviceArray<uint8_t> from(200, "from");
  for (size_t i = 0; i < 200; i += 3) simt::MarkInitialized(from.data() + i, 1);
  for (const size_t shift : {0, 8, 3}) {  // the maps' bytes in step, and not
    const DeviceArray<uint8_t> to(208, "to");
    simt::MarkInitialized(to.data(), 208);
    simt::CopyInitialized(to.data() + shift + 5, from.data() + 5, 150);
    for (size_t i = 0; i < 208; ++i) {
      const bool copied = i >= shift + 5 && i < shift + 155;
      ASSERT_EQ(simt::IsInitialized(to.data() + i, 1), !copied || (i - shift) % 3 == 0) << i;
    }
  }
}

// ---- Orders ----

std::vector<int> blocks_run;
std::vector<int> threads_run;  // of block 0, after a barrier

struct NoParams {};
__global__ void Trace(const __grid_constant__ NoParams) {
  if (ThreadIndex() == 0) blocks_run.push_back(BlockIndex());
  SyncThreads();
  if (BlockIndex() == 0) threads_run.push_back(ThreadIndex());
}

TEST(SimtTest, OrdersRunEveryBlockAndThreadOnceEachInItsOwnWay) {
  std::set<std::vector<int>> block_orders;
  std::set<std::vector<int>> thread_orders;
  for (const simt::Order order : simt::kAllOrders) {
    for (const uint64_t seed : {11, 12}) {
      const simt::ScopedSettings scoped({.seed = seed, .order = order});
      blocks_run.clear();
      threads_run.clear();
      Launch(Trace, "Trace", {24, 64, 0}, NoParams{}, nullptr);
      block_orders.insert(blocks_run);
      thread_orders.insert(threads_run);
      for (auto* run : {&blocks_run, &threads_run}) {
        const size_t count = run->size();
        EXPECT_EQ(count, run == &blocks_run ? 24u : 64u);
        EXPECT_EQ(std::set<int>(run->begin(), run->end()).size(), count);
      }
    }
  }
  EXPECT_GE(block_orders.size(), 4u);   // ascending, descending, one by each seed
  EXPECT_GE(thread_orders.size(), 4u);  // ascending, descending, two random ones
}

// ---- Counters ----

struct BanksParams {
  int row_chunks;  // of 16 bytes
  int swizzled;
};
// 16 rows of chunks, one lane a row, are stored and read as matrices.
__global__ void Banks(const __grid_constant__ BanksParams params) {
  const int lane = ThreadIndex();
  Shared<uint16_t> tile = SharedArray<uint16_t>("tile", 0, 32 * params.row_chunks * 8);
  const auto chunk = [&](int row, int column) {
    return tile + (row * params.row_chunks + (params.swizzled ? column ^ (row & 7) : column)) * 8;
  };
  for (int i = lane; i < 32 * params.row_chunks; i += 32) {
    Store16(chunk(i / params.row_chunks, i % params.row_chunks), Vector16{});
  }
  SyncWarp();
  uint32_t words[4];
  LoadMatrix4(words, chunk(lane % 16, lane / 16));
}

TEST(SimtTest, BankConflictsAreCounted) {
  const simt::ScopedSettings scoped({.count_banks = true});
  const auto count = [](int row_chunks, bool swizzled) {
    simt::ResetCounters();
    Launch(Banks, "Banks", {1, 32, 32 * row_chunks * 16}, BanksParams{row_chunks, swizzled},
           nullptr);
    return simt::counters();
  };
  // Rows of 128 bytes: eight rows of a column share their banks unless swizzled.
  EXPECT_EQ(count(8, false).ldmatrix_conflicts, 4 * 7);
  EXPECT_EQ(count(8, true).ldmatrix_conflicts, 0);
  // Rows of 80 bytes spread by themselves.
  EXPECT_EQ(count(5, false).ldmatrix_conflicts, 0);
  // Rows are stored chunk after chunk: no conflicts either way.
  EXPECT_EQ(count(8, false).shared_conflicts, 0);
  EXPECT_EQ(count(8, true).shared_conflicts, 0);
  EXPECT_EQ(count(8, true).shared_wavefronts, 8 * 4);
  EXPECT_EQ(count(8, true).ldmatrix, 1);
  EXPECT_EQ(count(8, true).warp_syncs, 1);
}

__global__ void Columns(const __grid_constant__ BanksParams params) {
  Shared<float> tile = SharedArray<float>("tile", 0, 32 * 33);
  tile[ThreadIndex() * (32 + params.swizzled)] = 1;
}

TEST(SimtTest, BankConflictsOfWordsAreCounted) {
  const simt::ScopedSettings scoped({.count_banks = true});
  for (const int padding : {0, 1}) {
    simt::ResetCounters();
    Launch(Columns, "Columns", {1, 32, 32 * 33 * 4}, BanksParams{0, padding}, nullptr);
    EXPECT_EQ(simt::counters().shared_conflicts, padding ? 0 : 31);
  }
}

// ---- Arithmetic ----

TEST(SimtTest, ArithmeticKeepsWhatTheDevicePromises) {
  EXPECT_EQ(Exp2Fast(-127.0f), 0.0f);
  EXPECT_EQ(Exp2Fast(-126.0f), 0x1p-126f);
  EXPECT_EQ(Exp2(-127.0f), 0x1p-127f);
  EXPECT_EQ(Exp2Fast(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_TRUE(std::isnan(Exp2Fast(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_EQ(Max(1.0f, std::numeric_limits<float>::quiet_NaN()), 1.0f);
  EXPECT_EQ(Pack2<Bf16>(1.0f, -2.0f), 0xc0003f80u);
  EXPECT_EQ(Pack2<F16>(1.0f, 70000.0f), 0x7c003c00u);
  for (const double x : {0.0, 0.25, -0.25, 0.5, 1.0, 1.75, -3.3, 12345.678, 1e15 + 0.5}) {
    double sine = 0;
    double cosine = 0;
    SinCosPi(x, &sine, &cosine);
    const long double turn = std::fmod(static_cast<long double>(x), 2.0L);
    EXPECT_NEAR(sine, static_cast<double>(std::sin(turn * M_PIl)), 1e-15) << x;
    EXPECT_NEAR(cosine, static_cast<double>(std::cos(turn * M_PIl)), 1e-15) << x;
  }
}

}  // namespace
}  // namespace attend
