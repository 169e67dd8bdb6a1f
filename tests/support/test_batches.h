// SPDX-License-Identifier: Apache-2.0
//
// What engine tests compute on: seeded random tensors, layers and sequences, blocks of KV memory in
// shuffled order and full of NaN, and one call that runs a batch. The oracle's view of a sequence
// is made here too, so that a test names every number once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <random>
#include <span>
#include <vector>

#include "engine/attention_engine.h"
#include "tests/support/reference_attention.h"

namespace attend {

using Random = std::mt19937_64;

// Uniform in [low, high].
int64_t Uniform(Random& random, int64_t low, int64_t high);

// An owned [rows, columns] tensor.
struct TestTensor {
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<std::byte> bytes;

  InputRows Rows(int64_t first) const {
    return {bytes.data() + first * columns * DTypeBytes(dtype), dtype};
  }
  std::byte* Row(int64_t row) { return bytes.data() + row * columns * DTypeBytes(dtype); }
  void Set(int64_t row, int64_t column, float value) {
    StoreFloat(dtype, value, bytes.data(), row * columns + column);
  }
  void FillRows(int64_t first, int64_t count, float value);
};

// Normal values of standard deviation `scale`.
TestTensor RandomTensor(Random& random, DType dtype, int64_t rows, int64_t columns,
                        double scale = 1);

// A layer with random weights, all biases and, where the spec asks for them, norms. The matrices
// have variance 1.3^2 / fan-in, so that softmax rows are neither flat nor one-hot.
class TestLayer {
 public:
  TestLayer(Random& random, const AttentionSpec& spec, DType weight_dtype);

  const AttentionSpec& spec() const { return spec_; }
  const LayerWeights& weights() const { return weights_; }

 private:
  WeightView Matrix(Random& random, DType dtype, int64_t rows, int64_t columns, bool transposed);
  WeightView Vector(Random& random, DType dtype, int64_t rows, double mean);

  AttentionSpec spec_;
  std::deque<TestTensor> tensors_;
  LayerWeights weights_;
};

// Specs to vary. `d_model` 0 = raw.
AttentionSpec PlainSpec(int d_model, int q_heads, int kv_heads, int head_dim, int v_head_dim);
RopeSpec PlainRope(RopePairing pairing, int dim);

// Hands out block addresses of an engine's KV memory in random order. Every block is full of NaN
// (all bits set, a NaN in every dtype) when it is handed out.
class BlockSpace {
 public:
  // Uses the addresses [base, base + bytes), both multiples of 2048.
  BlockSpace(AttentionEngine& engine, int64_t base, int64_t bytes, uint64_t seed);

  // Blocks for `keys` keys. Below kBlockTokens, `block_tokens` makes one short block.
  std::vector<int64_t> Take(const KvGeometry& geometry, int64_t keys,
                            int32_t block_tokens = kBlockTokens);
  // Everything is free again.
  void Reset() { next_ = filled_ = base_; }

 private:
  void FillTo(int64_t end);

  AttentionEngine& engine_;
  int64_t base_, end_;
  int64_t next_, filled_;
  Random random_;
};

// One sequence: inputs, blocks, outputs. Pieces of it are the items of a batch.
struct TestSequence {
  const AttentionSpec* spec = nullptr;  // borrowed
  DType kv_dtype = DType::kF32;
  int64_t rows = 0;
  int64_t keys = 0;
  int64_t first_row = 0;  // absolute position of row 0
  bool causal = false;
  bool own_source = false;  // keys come from `source`, not from `query`
  TestTensor query;
  TestTensor source;  // cross, raw
  TestTensor value;   // raw

  int64_t bias_heads = 0;  // 0 = none, 1, q_heads
  int64_t bias_first_key = 0;
  int64_t bias_columns = 0;
  std::vector<float> bias;  // [bias_heads, rows, bias_columns]

  std::vector<int64_t> blocks;
  int32_t block_tokens = kBlockTokens;
  std::vector<int32_t> weight_heads;  // of `weights`; empty = not asked
  std::vector<float> weights;         // [weight_heads, rows, keys]
  TestTensor output;

  // Rows [row_begin, row_end) and new keys [key_begin, key_end), the ones before being cached.
  AttendItem Item(int64_t row_begin, int64_t row_end, int64_t key_begin, int64_t key_end);
  AttendItem Whole() { return Item(0, rows, 0, keys); }

  void AskWeights(std::vector<int32_t> heads);
  void AddBias(Random& random, int64_t heads, int64_t first_key, int64_t columns,
               double masked_share);
  ReferenceSequence Reference() const;
};

// `rows` and `keys` differ only in raw and cross sequences; rows end at the last key (bottom-right
// aligned). Blocks are the caller's to take.
TestSequence RandomSequence(Random& random, const AttentionSpec& spec, DType kv_dtype,
                            DType input_dtype, DType output_dtype, int64_t rows, int64_t keys,
                            double scale = 1);

// Plans and runs one batch. `layer` -1 = raw.
absl::Status RunBatch(AttentionEngine& engine, int layer, const AttentionSpec& spec, DType kv_dtype,
                      std::span<const AttendItem> items);

}  // namespace attend
