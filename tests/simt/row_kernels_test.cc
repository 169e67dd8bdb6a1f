// SPDX-License-Identifier: Apache-2.0
//
// Row kernels in the emulation: conversions against engine/util/dtype.h bit for bit, the transform
// of projected rows against double, KV rows between blocks and canonical order. Inputs are random;
// ATTEND_TEST_SEED repeats a run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/cuda/kernels.h"
#include "engine/util/dtype.h"
#include "tests/simt/device_array.h"
#include "tests/support/seed.h"

namespace attend {
namespace {

using simt::DeviceArray;
using simt::UnderAllOrders;

constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr double kUlp = 0x1p-24;  // unit roundoff of float32

double UnitRoundoff(DType dtype) {
  return dtype == DType::kF32 ? kUlp : dtype == DType::kBF16 ? 0x1p-8 : 0x1p-11;
}

// ---- Convert ----

// Numbers at every edge: signs, subnormals, ties, overflow of F16, infinities, NaNs; then random
// bits.
std::vector<std::byte> EdgeValues(DType dtype, int64_t count, std::mt19937_64& random) {
  std::vector<std::byte> bytes(static_cast<size_t>(count * DTypeBytes(dtype)));
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float edges[] = {0.0f,        -0.0f,         1.0f,         -1.0f,          65504.0f,
                         65519.99f,   65520.0f,      -65520.f,     kInf,           -kInf,
                         NAN,         -NAN,          0x1p-14f,     0x1p-24f,       0x1p-25f,
                         0x1.8p-25f,  0x1.8p-24f,    0x1p-126f,    0x1p-149f,      3.4e38f,
                         1 + 0x1p-8f, 1 + 0x1.8p-8f, 1 + 0x1p-11f, 1 + 0x1.8p-10f, 1 + 0x1p-9f};
  for (int64_t i = 0; i < count; ++i) {
    if (i < static_cast<int64_t>(std::size(edges))) {
      StoreFloat(dtype, edges[i], bytes.data(), i);
    } else {
      const uint64_t bits = random();
      std::memcpy(bytes.data() + i * DTypeBytes(dtype), &bits,
                  static_cast<size_t>(DTypeBytes(dtype)));
    }
  }
  return bytes;
}

TEST(ConvertTest, EveryPairOfTypesGivesTheBitsOfTheHost) {
  std::mt19937_64 random(TestSeed());
  for (const DType from : kFloats) {
    for (const DType to : kFloats) {
      // Counts around the vector of 8, the block of 2048, and none; the last two are not aligned.
      const int64_t counts[] = {0, 1, 7, 8, 9, 2048 + 5, 4099, 33, 64};
      std::vector<std::vector<std::byte>> inputs;
      std::vector<std::unique_ptr<DeviceArray<std::byte>>> sources;
      std::vector<std::unique_ptr<DeviceArray<std::byte>>> targets;
      std::vector<ConvertTask> tasks;
      for (const int64_t count : counts) {
        const bool shifted = tasks.size() >= std::size(counts) - 2;
        inputs.push_back(EdgeValues(from, count, random));
        sources.push_back(std::make_unique<DeviceArray<std::byte>>(
            inputs.back(), "from", shifted ? static_cast<size_t>(DTypeBytes(from)) : 0));
        targets.push_back(std::make_unique<DeviceArray<std::byte>>(
            static_cast<size_t>(count * DTypeBytes(to)), "to",
            shifted ? static_cast<size_t>(DTypeBytes(to)) : 0));
        tasks.push_back({sources.back()->data(), targets.back()->data(), count, from, to});
      }
      const DeviceArray<ConvertTask> on_device(tasks, "tasks");
      ASSERT_EQ(LaunchConvert(on_device.data(), static_cast<int64_t>(tasks.size()), nullptr),
                cudaSuccess);
      for (size_t t = 0; t < tasks.size(); ++t) {
        ASSERT_TRUE(targets[t]->Written());
        for (int64_t i = 0; i < counts[t]; ++i) {
          const float value = LoadFloat(from, inputs[t].data(), i);
          const float got = LoadFloat(to, targets[t]->data(), i);
          std::byte want[4];
          StoreFloat(to, value, want, 0);
          if (std::isnan(value)) {
            ASSERT_TRUE(std::isnan(got))
                << DTypeName(from) << " to " << DTypeName(to) << " at " << i;
            if (from != to) continue;
            std::memcpy(want, inputs[t].data() + i * DTypeBytes(to),
                        static_cast<size_t>(DTypeBytes(to)));
          }
          ASSERT_EQ(std::memcmp(targets[t]->data() + i * DTypeBytes(to), want,
                                static_cast<size_t>(DTypeBytes(to))),
                    0)
              << DTypeName(from) << " to " << DTypeName(to) << " at " << i << ": " << value;
        }
      }
    }
  }
}

TEST(ConvertTest, NoTasksLaunchNothing) {
  EXPECT_EQ(LaunchConvert(nullptr, 0, nullptr), cudaSuccess);
}

// ---- Transform ----

struct TestItem {
  int64_t rows;
  int64_t new_keys;  // 0, rows (the same rows), or any number without rows
  int64_t first_row;
  int64_t cached_keys;
  int32_t block_tokens = kBlockTokens;
};

struct TransformCase {
  KvBlockShape shape;
  int q_heads;
  DType kv_dtype = DType::kF32;
  DType q_dtype = DType::kF32;
  float clip = 0;
  bool norm = false;
  bool norm_weights = true;
  int rope_dim = 0;
  bool interleaved = false;
  double attention_factor = 1.0;
  bool two_matrices = false;         // key_row_offset = query_rows
  std::vector<TestItem> items = {};  // those with query rows only, with both, with new keys only
  int64_t extra_blocks = 0;          // thread blocks beyond the rows
  int64_t block_distance = 0;        // bytes between KV blocks; 0 = just what they need
};

// Everything one launch reads and writes.
class TransformRun {
 public:
  TransformRun(const TransformCase& c, uint64_t seed) : case_(c), random_(seed) {
    Plan();
    Fill(q_source_, query_rows_ * c.q_heads * c.shape.head_dim);
    Fill(k_source_, key_rows_ * c.shape.kv_heads * c.shape.head_dim);
    Fill(v_source_, key_rows_ * c.shape.kv_heads * c.shape.v_head_dim);
    if (c.norm && c.norm_weights) {
      Fill(q_norm_, c.shape.head_dim);
      Fill(k_norm_, c.shape.head_dim);
    }
    for (int i = 0; i < c.rope_dim / 2; ++i) {
      frequencies_.push_back(std::pow(10000.0, -2.0 * i / c.rope_dim));
    }
  }

  std::vector<float>& q_source() { return q_source_; }
  std::vector<float>& k_source() { return k_source_; }
  std::vector<float>& v_source() { return v_source_; }

  // Runs the kernel and compares all that it wrote, and all that it must leave alone.
  void Check() {
    const TransformCase& c = case_;
    const DeviceArray<BatchShape> batch({BatchShape{static_cast<int32_t>(items_.size()), 0, 0, 0,
                                                    query_rows_, key_rows_, key_row_offset_}},
                                        "batch");
    const DeviceArray<ItemShape> items(items_, "items");
    const DeviceArray<int64_t> addresses(addresses_, "block_address");
    const DeviceArray<float> q_source(q_source_, "q_source");
    const DeviceArray<float> k_source(k_source_, "k_source");
    const DeviceArray<float> v_source(v_source_, "v_source");
    const DeviceArray<float> q_norm(q_norm_, "q_norm");
    const DeviceArray<float> k_norm(k_norm_, "k_norm");
    const DeviceArray<double> frequencies(frequencies_, "inverse_frequency");
    simt::SparseBuffer kv(static_cast<size_t>(kv_bytes_), "kv");
    FillBlocks(kv.data(), 0x5a);
    DeviceArray<std::byte> q(
        static_cast<size_t>(query_rows_ * c.q_heads * c.shape.KeyRow() * DTypeBytes(c.q_dtype)),
        "q");
    TransformParams params{};
    params.batch = batch.data();
    params.items = items.data();
    params.block_address = addresses.data();
    params.kv = kv.data();
    params.shape = c.shape;
    params.kv_dtype = c.kv_dtype;
    params.q_dtype = c.q_dtype;
    params.q_heads = c.q_heads;
    params.clip = c.clip;
    params.norm = c.norm ? 1 : 0;
    params.norm_eps = 1e-6f;
    params.q_norm = q_norm_.empty() ? nullptr : q_norm.data();
    params.k_norm = k_norm_.empty() ? nullptr : k_norm.data();
    params.rope_dim = c.rope_dim;
    params.rope_interleaved = c.interleaved ? 1 : 0;
    params.inverse_frequency = frequencies.data();
    params.attention_factor = c.attention_factor;
    params.q_source = q_source.data();
    params.k_source = k_source.data();
    params.v_source = v_source.data();
    params.q_stride = int64_t{c.q_heads} * c.shape.head_dim;
    params.k_stride = int64_t{c.shape.kv_heads} * c.shape.head_dim;
    params.v_stride = int64_t{c.shape.kv_heads} * c.shape.v_head_dim;
    params.q = q.data();
    const int64_t rows = std::max(query_rows_, key_row_offset_ + key_rows_);
    ASSERT_EQ(LaunchTransform(params, rows + c.extra_blocks, nullptr), cudaSuccess);

    ASSERT_TRUE(q.Written());
    for (size_t i = 0; i < items_.size(); ++i) {
      const ItemShape& item = items_[i];
      for (int64_t row = 0; row < item.rows; ++row) CheckQuery(item, row, q.data());
      for (int64_t k = 0; k < c.items[i].new_keys; ++k) CheckKey(item, k, kv.data());
    }
    for (size_t b = 0; b < addresses_.size(); ++b) {  // what is left is as it was
      for (int64_t i = 0; i < BlockBytes(b); ++i) {
        ASSERT_EQ(kv.data()[addresses_[b] + i], std::byte{0x5a}) << "block " << b << " byte " << i;
      }
    }
  }

 private:
  void Plan() {
    const TransformCase& c = case_;
    for (const TestItem& item : c.items) {
      if (item.rows > 0 && item.new_keys == 0 && !c.two_matrices) key_row_offset_ += item.rows;
      ItemShape shape{};
      shape.rows = item.rows;
      shape.first_row = item.first_row;
      shape.cached_keys = item.cached_keys;
      shape.keys = item.cached_keys + item.new_keys;
      shape.row_begin = query_rows_;
      shape.new_key_begin = key_rows_;
      shape.block_tokens = item.block_tokens;
      shape.causal = 1;
      // Only blocks that get new keys have memory; the others must not be touched.
      shape.block_begin = static_cast<int32_t>(addresses_.size() - item.cached_keys / kBlockTokens);
      if (shape.block_begin < 0) shape.block_begin = 0;
      const int64_t first = item.cached_keys / kBlockTokens;
      const int64_t last = (shape.keys + kBlockTokens - 1) / kBlockTokens;
      if (item.new_keys > 0) {
        while (static_cast<int64_t>(addresses_.size()) < shape.block_begin + first) AddBlock(0);
        for (int64_t block = first; block < last; ++block) AddBlock(item.block_tokens);
      }
      items_.push_back(shape);
      query_rows_ += item.rows;
      key_rows_ += item.new_keys;
    }
    if (c.two_matrices) key_row_offset_ = query_rows_;
    kv_bytes_ = std::max<int64_t>(kv_bytes_, 16);
  }
  void AddBlock(int32_t tokens) {
    const int64_t bytes = case_.shape.ValueOffset(case_.shape.kv_heads, 0, tokens);
    addresses_.push_back(kv_bytes_);
    tokens_.push_back(tokens);
    kv_bytes_ += std::max(bytes, tokens > 0 ? case_.block_distance : 0);
  }
  int64_t BlockBytes(size_t block) const {
    return case_.shape.ValueOffset(case_.shape.kv_heads, 0, tokens_[block]);
  }
  void FillBlocks(std::byte* kv, int value) const {
    for (size_t b = 0; b < addresses_.size(); ++b) {
      std::memset(kv + addresses_[b], value, static_cast<size_t>(BlockBytes(b)));
    }
  }
  void Fill(std::vector<float>& to, int64_t count) {
    std::normal_distribution<float> normal;
    to.resize(static_cast<size_t>(count));
    for (float& x : to) x = normal(random_);
  }

  // One head after clip, norm and rotation, with its bound before the last rounding: every float
  // operation adds half a unit in the last place of its result, which is never above |x| + |y|.
  void CheckHead(const float* from, int width, int padded, bool transformed,
                 const std::vector<float>& weight, int64_t position, DType dtype, std::byte* got,
                 const std::string& what) const {
    const TransformCase& c = case_;
    std::vector<double> x(from, from + width);
    std::vector<double> error(x.size(), 0.0);
    for (double& value : x) {
      if (c.clip > 0 && value > c.clip) value = c.clip;
      if (c.clip > 0 && value < -c.clip) value = -c.clip;
    }
    if (transformed && c.norm) {
      double squares = 0;
      for (const double value : x) squares += value * value;
      const double factor = 1 / std::sqrt(squares / width + double{1e-6f});
      for (size_t d = 0; d < x.size(); ++d) {
        x[d] *= factor * (weight.empty() ? 1.0 : double{weight[d]});
        error[d] = 3.01 * kUlp * std::abs(x[d]);
      }
    }
    for (int pair = 0; transformed && pair < c.rope_dim / 2; ++pair) {
      const int first = c.interleaved ? 2 * pair : pair;
      const int second = c.interleaved ? first + 1 : first + c.rope_dim / 2;
      const double angle = static_cast<double>(position) * frequencies_[static_cast<size_t>(pair)];
      const double cosine = std::cos(angle) * c.attention_factor;
      const double sine = std::sin(angle) * c.attention_factor;
      const double a = x[first];
      const double b = x[second];
      x[first] = a * cosine - b * sine;
      x[second] = b * cosine + a * sine;
      const double bound = (error[first] + error[second] + 4 * kUlp * (std::abs(a) + std::abs(b))) *
                           std::abs(c.attention_factor);
      error[first] = bound;
      error[second] = bound;
    }
    for (int d = 0; d < padded; ++d) {
      const double value = LoadFloat(dtype, got, d);
      if (d >= width) {
        ASSERT_EQ(value, 0) << what << " tail " << d;
        continue;
      }
      if (std::isnan(x[d])) {
        ASSERT_TRUE(std::isnan(value)) << what << " element " << d;
        continue;
      }
      const double last = dtype == DType::kF32 ? 0 : UnitRoundoff(dtype) * std::abs(x[d]) + 0x1p-25;
      const double bound = error[d] * 1.01 + last;
      ASSERT_TRUE(std::abs(value - x[d]) <= bound)
          << what << " element " << d << ": " << value << ", want " << x[d] << " +- " << bound;
    }
    // Checked bytes become the background that untouched bytes are compared with.
    std::memset(got, 0x5a, static_cast<size_t>(padded * DTypeBytes(dtype)));
  }
  void CheckQuery(const ItemShape& item, int64_t row, std::byte* q) {
    const TransformCase& c = case_;
    for (int head = 0; head < c.q_heads; ++head) {
      const int64_t at = (item.row_begin + row) * c.q_heads + head;
      CheckHead(
          q_source_.data() + at * c.shape.head_dim, c.shape.head_dim, c.shape.KeyRow(), true,
          q_norm_, item.first_row + row, c.q_dtype,
          q + at * c.shape.KeyRow() * DTypeBytes(c.q_dtype),
          "query row " + std::to_string(item.row_begin + row) + " head " + std::to_string(head));
    }
  }
  void CheckKey(const ItemShape& item, int64_t k, std::byte* kv) {
    const TransformCase& c = case_;
    const int64_t key = item.cached_keys + k;
    std::byte* block = kv + addresses_[static_cast<size_t>(item.block_begin + key / kBlockTokens)];
    const auto token = static_cast<int32_t>(key % kBlockTokens);
    for (int head = 0; head < c.shape.kv_heads; ++head) {
      const int64_t at = (item.new_key_begin + k) * c.shape.kv_heads + head;
      const std::string what = " of key " + std::to_string(key) + " head " + std::to_string(head);
      CheckHead(k_source_.data() + at * c.shape.head_dim, c.shape.head_dim, c.shape.KeyRow(), true,
                k_norm_, key, c.kv_dtype, block + c.shape.KeyOffset(head, token, item.block_tokens),
                "key" + what);
      CheckHead(v_source_.data() + at * c.shape.v_head_dim, c.shape.v_head_dim, c.shape.ValueRow(),
                false, {}, 0, c.kv_dtype,
                block + c.shape.ValueOffset(head, token, item.block_tokens), "value" + what);
    }
  }

  TransformCase case_;
  std::mt19937_64 random_;
  std::vector<ItemShape> items_;
  std::vector<int64_t> addresses_;
  std::vector<int32_t> tokens_;
  int64_t kv_bytes_ = 0;
  int64_t query_rows_ = 0;
  int64_t key_rows_ = 0;
  int64_t key_row_offset_ = 0;
  std::vector<float> q_source_, k_source_, v_source_, q_norm_, k_norm_;
  std::vector<double> frequencies_;
};

constexpr KvBlockShape Shape(int kv_heads, int head_dim, int v_head_dim, DType dtype) {
  return {kv_heads, head_dim, v_head_dim, static_cast<int32_t>(DTypeBytes(dtype))};
}

// Items with query rows only, both and new keys only; empty ones between them and at the ends.
std::vector<TestItem> MixedItems() {
  return {{0, 0, 0, 0}, {3, 0, 70, 70},   {0, 0, 5, 5},  {2, 2, 62, 62},   {1, 1, 130, 130},
          {0, 0, 0, 0}, {5, 5, 0, 0, 16}, {0, 4, 0, 63}, {0, 3, 0, 0, 16}, {0, 0, 0, 0}};
}

TEST(TransformTest, OddWidthsOfEveryTypeMatchDouble) {
  uint64_t seed = TestSeed();
  const int widths[] = {1, 5, 12, 24, 64, 80, 128, 200, 256};
  for (const DType kv_dtype : kFloats) {
    for (const DType q_dtype : {DType::kF32, kv_dtype}) {
      for (size_t i = 0; i < std::size(widths); ++i) {
        TransformCase c{
            .shape = Shape(2, widths[i], widths[(i * 5 + 3) % std::size(widths)], kv_dtype),
            .q_heads = 6};
        c.kv_dtype = kv_dtype;
        c.q_dtype = q_dtype;
        c.clip = i % 2 == 0 ? 1.5f : 0;
        c.norm = i % 3 != 0;
        c.norm_weights = i % 3 == 1;
        c.rope_dim = i % 4 == 3 ? widths[i] / 4 * 2 : widths[i] / 2 * 2;
        c.interleaved = i % 2 == 1;
        c.attention_factor = i % 2 == 0 ? 1.0 : 1.3689;
        c.two_matrices = i % 5 == 4;
        c.items = MixedItems();
        c.extra_blocks = 2;
        SCOPED_TRACE("width " + std::to_string(widths[i]) + " kv " + DTypeName(kv_dtype));
        TransformRun(c, seed++).Check();
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(TransformTest, EveryOrderOfThreadsGivesTheSame) {
  const uint64_t seed = TestSeed();
  UnderAllOrders(seed, [&] {
    TransformCase c{.shape = Shape(3, 24, 12, DType::kBF16), .q_heads = 9};
    c.kv_dtype = DType::kBF16;
    c.q_dtype = DType::kBF16;
    c.clip = 2;
    c.norm = true;
    c.rope_dim = 16;
    c.items = MixedItems();
    TransformRun(c, seed).Check();
  });
}

TEST(TransformTest, FarPositionsRotateAsPrecisely) {
  uint64_t seed = TestSeed();
  for (const bool interleaved : {false, true}) {
    for (const int64_t position : {int64_t{131071}, int64_t{1} << 31, (int64_t{1} << 40) - 3,
                                   int64_t{1} << 40, int64_t{-5}, -(int64_t{1} << 40)}) {
      TransformCase c{.shape = Shape(1, 80, 8, DType::kF32), .q_heads = 2};
      c.rope_dim = 64;
      c.interleaved = interleaved;
      c.items = {{2, 2, position, 17}};  // the query's position isn't the key's
      SCOPED_TRACE(position);
      TransformRun(c, seed++).Check();
    }
  }
}

TEST(TransformTest, NanSurvivesTheClipAndStaysInItsHead) {
  TransformCase c{.shape = Shape(2, 12, 12, DType::kF16), .q_heads = 2};
  c.kv_dtype = DType::kF16;
  c.q_dtype = DType::kF16;
  c.clip = 1;
  c.rope_dim = 8;
  c.items = {{2, 2, 0, 0}};
  TransformRun run(c, TestSeed());
  run.q_source()[12 + 3] = NAN;       // row 0, head 1
  run.k_source()[2 * 12 + 11] = NAN;  // key 1, head 0, not rotated
  run.v_source()[5] = NAN;
  run.v_source()[6] = std::numeric_limits<float>::infinity();  // clipped to 1
  run.Check();
}

TEST(TransformTest, LargeAndTinyHeadsAreNormalisedInRange) {
  TransformCase c{.shape = Shape(1, 64, 4, DType::kF32), .q_heads = 3};
  c.norm = true;
  c.items = {{1, 0, 0, 0}};
  TransformRun run(c, TestSeed());
  for (int d = 0; d < 64; ++d) run.q_source()[d] *= 1e30f;  // squares are beyond float
  for (int d = 64; d < 128; ++d) run.q_source()[d] *= 1e-30f;
  run.Check();
}

TEST(TransformTest, BlocksFarApartAreReached) {
  TransformCase c{.shape = Shape(2, 8, 8, DType::kBF16), .q_heads = 2};
  c.kv_dtype = DType::kBF16;
  c.items = {{3, 3, 62, 62}, {1, 1, 0, 0}};
  c.block_distance = (int64_t{3} << 30) + 64;
  TransformRun(c, TestSeed()).Check();
}

TEST(TransformTest, ThousandsOfHeads) {
  TransformCase c{.shape = Shape(2500, 3, 1, DType::kF32), .q_heads = 5000};
  c.two_matrices = true;
  c.items = {{1, 1, 0, 0, 16}};
  TransformRun(c, TestSeed()).Check();
}

TEST(TransformTest, ManyItemsAreSearchedInSteps) {
  TransformCase c{.shape = Shape(1, 4, 4, DType::kF32), .q_heads = 1};
  std::mt19937_64 random(TestSeed());
  for (int i = 0; i < 700; ++i) {  // more than the threads of a block
    const int64_t rows = static_cast<int64_t>(random() % 2);
    c.items.push_back({rows, rows, i, i % 64, 16 * (1 + i % 64 / 16)});
  }
  c.rope_dim = 4;
  TransformRun(c, random()).Check();
}

TEST(TransformTest, EmptyBatchOfAGraphWritesNothing) {
  TransformCase c{.shape = Shape(1, 8, 8, DType::kBF16), .q_heads = 1};
  c.kv_dtype = DType::kBF16;
  c.extra_blocks = 4;
  TransformRun(c, 1).Check();
}

// ---- KV rows ----

TEST(KvRowsTest, RoundTripOfEveryWidthKeepsBitsAndNeighbours) {
  std::mt19937_64 random(TestSeed());
  const int widths[] = {1, 5, 12, 24, 64, 200};
  const std::pair<int64_t, int64_t> ranges[] = {{0, 1}, {63, 2}, {5, 130}, {64, 64}, {10, 0}};
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    for (size_t w = 0; w < std::size(widths); ++w) {
      const KvBlockShape shape = Shape(3, widths[w], widths[(w + 4) % 6], dtype);
      const int64_t block_bytes = shape.ValueOffset(3, 0, kBlockTokens);
      const DeviceArray<int64_t> addresses({2 * block_bytes, 0, block_bytes}, "block_address");
      for (const auto& [first_key, keys] : ranges) {
        const int64_t bytes = keys * 3 * (shape.head_dim + shape.v_head_dim) * shape.element_bytes;
        std::vector<std::byte> given(static_cast<size_t>(bytes));
        for (std::byte& x : given) x = static_cast<std::byte>(random());
        const DeviceArray<std::byte> canonical(given, "canonical");
        DeviceArray<std::byte> kv(
            std::vector<std::byte>(static_cast<size_t>(3 * block_bytes), std::byte{0x5a}), "kv");
        KvRowsParams params{addresses.data(), kv.data(), shape, first_key, keys, canonical.data()};
        ASSERT_EQ(LaunchWriteKvRows(params, nullptr), cudaSuccess);

        // Every element where the layout says, tails zero, the rest as it was.
        std::vector<std::byte> want(static_cast<size_t>(3 * block_bytes), std::byte{0x5a});
        const std::byte* next = given.data();
        for (const bool values : {false, true}) {
          const int width = values ? shape.v_head_dim : shape.head_dim;
          const int padded = values ? shape.ValueRow() : shape.KeyRow();
          for (int64_t key = first_key; key < first_key + keys; ++key) {
            for (int head = 0; head < 3; ++head) {
              const auto token = static_cast<int32_t>(key % kBlockTokens);
              std::byte* row = want.data() + addresses[static_cast<size_t>(key / kBlockTokens)] +
                               (values ? shape.ValueOffset(head, token, kBlockTokens)
                                       : shape.KeyOffset(head, token, kBlockTokens));
              std::memset(row, 0, static_cast<size_t>(padded * shape.element_bytes));
              std::memcpy(row, next, static_cast<size_t>(width * shape.element_bytes));
              next += width * shape.element_bytes;
            }
          }
        }
        ASSERT_EQ(kv.values(), want) << "width " << widths[w] << " first key " << first_key;

        const DeviceArray<std::byte> back(given.size(), "back");
        params.canonical = back.data();
        ASSERT_EQ(LaunchReadKvRows(params, nullptr), cudaSuccess);
        ASSERT_TRUE(back.Written());
        ASSERT_EQ(back.values(), given) << "width " << widths[w] << " first key " << first_key;
      }
    }
  }
}

}  // namespace
}  // namespace attend
