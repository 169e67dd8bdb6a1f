// SPDX-License-Identifier: Apache-2.0
#include "tests/support/test_batches.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/util/check.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A block without padding, every byte of which WriteKv reaches. A token is as wide as a thread
// block of the CUDA engine's copy: the emulated device pays for every thread.
constexpr KvGeometry kFillGeometry{8, 32, 32, DType::kF32};
constexpr int64_t kFillBytes = 131072;

}  // namespace

int64_t Uniform(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

void TestTensor::FillRows(int64_t first, int64_t count, float value) {
  for (int64_t i = first * columns; i < (first + count) * columns; ++i) {
    StoreFloat(dtype, value, bytes.data(), i);
  }
}

TestTensor RandomTensor(Random& random, DType dtype, int64_t rows, int64_t columns, double scale) {
  TestTensor tensor{dtype, rows, columns, {}};
  tensor.bytes.resize(static_cast<size_t>(rows * columns * DTypeBytes(dtype)));
  std::normal_distribution<double> normal(0, scale);
  for (int64_t i = 0; i < rows * columns; ++i) {
    StoreFloat(dtype, static_cast<float>(normal(random)), tensor.bytes.data(), i);
  }
  return tensor;
}

TestLayer::TestLayer(Random& random, const AttentionSpec& spec, DType weight_dtype) : spec_(spec) {
  const int64_t q_width = int64_t{spec.q_heads} * spec.head_dim;
  const int64_t k_width = int64_t{spec.kv_heads} * spec.head_dim;
  const int64_t v_width = int64_t{spec.kv_heads} * spec.v_head_dim;
  const int64_t heads_width = int64_t{spec.q_heads} * spec.v_head_dim;
  weights_.q = Matrix(random, weight_dtype, q_width, spec.d_model, false);
  weights_.k = Matrix(random, weight_dtype, k_width, spec.context_width, false);
  weights_.v = Matrix(random, weight_dtype, v_width, spec.context_width, true);
  weights_.o = Matrix(random, weight_dtype, spec.output_width, heads_width, true);
  weights_.q_bias = Vector(random, weight_dtype, q_width, 0);
  weights_.k_bias = Vector(random, weight_dtype, k_width, 0);
  weights_.v_bias = Vector(random, weight_dtype, v_width, 0);
  weights_.o_bias = Vector(random, weight_dtype, spec.output_width, 0);
  if (spec.qk_norm == QkNorm::kRmsPerHead) {
    weights_.q_norm = Vector(random, weight_dtype, spec.head_dim, 1);
    weights_.k_norm = Vector(random, weight_dtype, spec.head_dim, 1);
  }
}

WeightView TestLayer::Matrix(Random& random, DType dtype, int64_t rows, int64_t columns,
                             bool transposed) {
  tensors_.push_back(RandomTensor(random, dtype, rows, columns, 1.3 / std::sqrt(double(columns))));
  WeightView view{tensors_.back().bytes.data(), dtype, rows, columns, columns, 1};
  if (transposed) {
    view.row_stride = 1;
    view.column_stride = rows;
  }
  return view;
}

WeightView TestLayer::Vector(Random& random, DType dtype, int64_t rows, double mean) {
  tensors_.push_back(RandomTensor(random, dtype, rows, 1, 0.3));
  TestTensor& vector = tensors_.back();
  for (int64_t i = 0; i < rows; ++i) {
    vector.Set(i, 0, static_cast<float>(mean) + LoadFloat(dtype, vector.bytes.data(), i));
  }
  return {vector.bytes.data(), dtype, rows, 1, 1, 1};
}

AttentionSpec PlainSpec(int d_model, int q_heads, int kv_heads, int head_dim, int v_head_dim) {
  AttentionSpec spec;
  spec.d_model = d_model;
  spec.context_width = d_model;
  spec.output_width = d_model == 0 ? q_heads * v_head_dim : d_model;
  spec.q_heads = q_heads;
  spec.kv_heads = kv_heads;
  spec.head_dim = head_dim;
  spec.v_head_dim = v_head_dim;
  spec.scale = 1 / std::sqrt(double(head_dim));
  return spec;
}

RopeSpec PlainRope(RopePairing pairing, int dim) {
  RopeSpec rope{pairing, dim, {}, 1.0};
  for (int i = 0; i < dim / 2; ++i) rope.inverse_frequency.push_back(std::pow(1e4, -2.0 * i / dim));
  return rope;
}

BlockSpace::BlockSpace(AttentionEngine& engine, int64_t base, int64_t bytes, uint64_t seed)
    : engine_(engine), base_(base), end_(base + bytes), next_(base), filled_(base), random_(seed) {
  CHECK(base % kFillBytes == 0);
  CHECK(kFillGeometry.BlockBytes() == kFillBytes);
}

std::vector<int64_t> BlockSpace::Take(const KvGeometry& geometry, int64_t keys,
                                      int32_t block_tokens) {
  const int64_t block_bytes = geometry.BlockBytes(block_tokens);
  CHECK(block_tokens == kBlockTokens || keys <= block_tokens);
  std::vector<int64_t> blocks;
  for (int64_t key = 0; key < keys; key += block_tokens) {
    blocks.push_back(next_);
    next_ += block_bytes;
  }
  FillTo(next_);
  std::shuffle(blocks.begin(), blocks.end(), random_);
  return blocks;
}

void BlockSpace::FillTo(int64_t end) {
  std::vector<int64_t> blocks;
  for (; filled_ < end; filled_ += kFillBytes) blocks.push_back(filled_);
  CHECK(filled_ <= end_);
  const auto keys = static_cast<int64_t>(blocks.size()) * kBlockTokens;
  const std::vector<std::byte> nan(static_cast<size_t>(keys * kFillGeometry.TokenBytes()),
                                   std::byte{0xff});
  CHECK(engine_.WriteKv({kFillGeometry, blocks, 0, keys}, nan).ok());
}

AttendItem TestSequence::Item(int64_t row_begin, int64_t row_end, int64_t key_begin,
                              int64_t key_end) {
  AttendItem item;
  item.rows = row_end - row_begin;
  item.query = query.Rows(row_begin);
  item.first_row = first_row + row_begin;
  item.new_keys = key_end - key_begin;
  if (item.new_keys > 0) item.key_source = (own_source ? source : query).Rows(key_begin);
  if (item.new_keys > 0 && spec->raw()) item.value_source = value.Rows(key_begin);
  item.cached_keys = key_begin;
  item.causal = causal;
  item.blocks = blocks;
  item.block_tokens = block_tokens;
  if (bias_heads > 0) {
    const int64_t head_stride = bias_heads > 1 ? rows * bias_columns : 0;
    item.bias = {bias.data() + row_begin * bias_columns, head_stride, bias_columns, bias_columns,
                 bias_first_key};
  }
  if (!weight_heads.empty()) {
    item.weights = {weights.data() + row_begin * keys,
                    weight_heads.data(),
                    static_cast<int32_t>(weight_heads.size()),
                    0,
                    item.rows,
                    rows * keys,
                    keys};
  }
  item.output = output.Row(row_begin);
  item.output_dtype = output.dtype;
  return item;
}

void TestSequence::AskWeights(std::vector<int32_t> heads) {
  weight_heads = std::move(heads);
  weights.assign(weight_heads.size() * static_cast<size_t>(rows * keys), 0.0f);
}

void TestSequence::AddBias(Random& random, int64_t heads, int64_t first_key, int64_t columns,
                           double masked_share) {
  bias_heads = heads;
  bias_first_key = first_key;
  bias_columns = columns;
  bias.resize(static_cast<size_t>(heads * rows * columns));
  std::normal_distribution<float> normal;
  std::bernoulli_distribution masked(masked_share);
  for (float& value : bias) value = masked(random) ? -kInfinity : normal(random);
}

ReferenceSequence TestSequence::Reference() const {
  ReferenceSequence reference;
  reference.rows = rows;
  reference.query = query.Rows(0);
  reference.first_row = first_row;
  reference.keys = keys;
  reference.key_source = (own_source ? source : query).Rows(0);
  if (spec->raw()) reference.value_source = value.Rows(0);
  reference.causal = causal;
  reference.weights = !weight_heads.empty();
  if (bias_heads > 0) {
    reference.bias = {bias.data(), bias_heads > 1 ? rows * bias_columns : 0, bias_columns,
                      bias_columns, bias_first_key};
  }
  return reference;
}

TestSequence RandomSequence(Random& random, const AttentionSpec& spec, DType kv_dtype,
                            DType input_dtype, DType output_dtype, int64_t rows, int64_t keys,
                            double scale) {
  TestSequence sequence;
  sequence.spec = &spec;
  sequence.kv_dtype = kv_dtype;
  sequence.rows = rows;
  sequence.keys = keys;
  sequence.first_row = keys - rows;
  sequence.causal = spec.causal;
  sequence.own_source = spec.raw() || spec.cross;
  CHECK(sequence.own_source || rows == keys);
  const int64_t query_width = spec.raw() ? int64_t{spec.q_heads} * spec.head_dim : spec.d_model;
  sequence.query = RandomTensor(random, input_dtype, rows, query_width, scale);
  if (sequence.own_source) {
    const int64_t width = spec.raw() ? int64_t{spec.kv_heads} * spec.head_dim : spec.context_width;
    sequence.source = RandomTensor(random, input_dtype, keys, width, scale);
  }
  if (spec.raw()) {
    sequence.value =
        RandomTensor(random, input_dtype, keys, int64_t{spec.kv_heads} * spec.v_head_dim);
  }
  // NaN, so that an output that was not written cannot pass.
  sequence.output = RandomTensor(random, output_dtype, rows, spec.output_width);
  sequence.output.FillRows(0, rows, std::numeric_limits<float>::quiet_NaN());
  return sequence;
}

absl::Status RunBatch(AttentionEngine& engine, int layer, const AttentionSpec& spec, DType kv_dtype,
                      std::span<const AttendItem> items) {
  ASSIGN_OR_RETURN(const BatchPlan plan, BuildPlan(layer, spec, kv_dtype, items));
  ASSIGN_OR_RETURN(const Ticket ticket, engine.Start(plan, items));
  return engine.Wait(ticket).status();
}

}  // namespace attend
