// SPDX-License-Identifier: Apache-2.0
#include "tests/simt/float_attention_fixture.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "engine/layer_weights.h"

namespace attend {

using simt::DeviceArray;

AttentionSpec RawSpec(int q_heads, int kv_heads, int head_dim, int v_head_dim) {
  AttentionSpec spec;
  spec.q_heads = q_heads;
  spec.kv_heads = kv_heads;
  spec.head_dim = head_dim;
  spec.v_head_dim = v_head_dim;
  spec.output_width = q_heads * v_head_dim;
  spec.scale = static_cast<float>(1 / std::sqrt(double(head_dim)));
  return spec;
}

void FloatRun::MakeInputs(std::mt19937_64& random) {
  const AttentionSpec& spec = case_.spec;
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<float>& to, int64_t count, DType dtype) {
    to.resize(static_cast<size_t>(count));
    for (float& x : to) x = static_cast<float>(RoundTo(dtype, normal(random)));
  };
  for (FloatItem& item : case_.items) {
    fill(item.q, item.rows * spec.q_heads * spec.head_dim, case_.q_dtype);
    fill(item.k, item.keys * spec.kv_heads * spec.head_dim, case_.kv_dtype);
    fill(item.v, item.keys * spec.kv_heads * spec.v_head_dim, case_.kv_dtype);
    const int64_t heads = item.bias_per_head ? spec.q_heads : 1;
    fill(item.bias, heads * item.rows * item.bias_columns, DType::kF32);
    for (float& x : item.bias) {
      if (random() % 5 == 0) x = -std::numeric_limits<float>::infinity();
    }
  }
}

KvBlockShape FloatRun::Shape() const {
  const AttentionSpec& spec = case_.spec;
  return {spec.kv_heads, spec.head_dim, spec.v_head_dim,
          static_cast<int32_t>(DTypeBytes(case_.kv_dtype))};
}

void FloatRun::PlaceItems() {
  shapes_.clear();
  biases_.clear();
  addresses_.clear();
  kv_bytes_ = 64;  // address 0 belongs to nobody
  query_rows_ = 0;
  for (const FloatItem& item : case_.items) {
    ItemShape shape{};
    shape.rows = item.rows;
    shape.first_row = item.first_row;
    shape.keys = item.keys;
    shape.row_begin = query_rows_;
    shape.block_begin = static_cast<int32_t>(addresses_.size());
    shape.block_tokens = item.block_tokens;
    shape.causal = item.causal ? 1 : 0;
    biases_.push_back(nullptr);
    if (item.bias_columns > 0) {
      biases_.back() = std::make_unique<DeviceArray<float>>(item.bias, "bias");
      shape.bias = biases_.back()->data();
      shape.bias_columns = item.bias_columns;
      shape.bias_first_key = item.bias_first_key;
      shape.bias_row_stride = item.bias_columns;
      shape.bias_head_stride = item.bias_per_head ? item.rows * item.bias_columns : 0;
    }
    for (int64_t key = 0; key < item.keys; key += kBlockTokens) {
      addresses_.push_back(kv_bytes_);
      kv_bytes_ += std::max(Shape().ValueOffset(Shape().kv_heads, 0, item.block_tokens),
                            case_.block_distance);
    }
    shapes_.push_back(shape);
    query_rows_ += item.rows;
  }
}

void FloatRun::MakeTiles() {
  const AttentionSpec& spec = case_.spec;
  const int64_t group = spec.group_size();
  tiles_.clear();
  combines_.clear();
  partial_rows_ = 0;
  for (size_t i = 0; i < case_.items.size(); ++i) {
    const FloatItem& item = case_.items[i];
    const int64_t packed = item.rows * group;
    const bool few = packed <= kDecodeRows && case_.split_keys > 0;
    for (int64_t row = 0; row < packed; row += kFloatTileRows) {
      AttentionTile tile{};
      tile.item = static_cast<int32_t>(i);
      tile.row_begin = row;
      tile.rows = static_cast<int32_t>(std::min<int64_t>(kFloatTileRows, packed - row));
      tile.partial = -1;
      tile.few = packed <= kDecodeRows ? 1 : 0;
      const KeyRange first =
          VisibleKeys(spec, item.causal, item.first_row + row / group, item.keys);
      const KeyRange last =
          VisibleKeys(spec, item.causal, item.first_row + (row + tile.rows - 1) / group, item.keys);
      tile.key_end = std::min(std::max(first.end, last.end), item.keys);
      tile.key_begin = std::min(first.begin, tile.key_end) / kBlockTokens * kBlockTokens;
      for (tile.kv_head = 0; tile.kv_head < spec.kv_heads; ++tile.kv_head) {
        if (!few) {
          tiles_.push_back(tile);
          continue;
        }
        CombineTile combine{row, partial_rows_, tile.item, tile.kv_head, tile.rows, 0};
        const auto add = [&](int64_t begin, int64_t end) {
          AttentionTile part = tile;
          part.key_begin = begin;
          part.key_end = end;
          part.partial = partial_rows_;
          partial_rows_ += tile.rows;
          tiles_.push_back(part);
          ++combine.splits;
        };
        const auto add_empty = [&](int after) {
          if (std::count(case_.empty_after.begin(), case_.empty_after.end(), after) > 0) {
            add(tile.key_begin, tile.key_begin);
          }
        };
        add_empty(-1);
        int split = 0;
        for (int64_t key = tile.key_begin; key < tile.key_end; key += case_.split_keys) {
          add(key, std::min(key + case_.split_keys, tile.key_end));
          add_empty(split++);
        }
        combines_.push_back(combine);
      }
    }
  }
}

void FloatRun::WriteBlocks(std::byte* kv) const {
  const AttentionSpec& spec = case_.spec;
  const KvBlockShape shape = Shape();
  const auto write = [&](std::byte* row, const float* from, int width, int padded) {
    for (int d = 0; d < padded; ++d) StoreFloat(case_.kv_dtype, d < width ? from[d] : 0, row, d);
    simt::MarkInitialized(row, static_cast<size_t>(padded * shape.element_bytes));
  };
  for (size_t i = 0; i < case_.items.size(); ++i) {
    const FloatItem& item = case_.items[i];
    for (int64_t key = 0; key < item.keys; ++key) {
      const int64_t place = shapes_[i].block_begin + key / kBlockTokens;
      std::byte* block = kv + addresses_[static_cast<size_t>(place)];
      const auto token = static_cast<int32_t>(key % kBlockTokens);
      for (int head = 0; head < spec.kv_heads; ++head) {
        const int64_t at = key * spec.kv_heads + head;
        write(block + shape.KeyOffset(head, token, item.block_tokens),
              item.k.data() + at * spec.head_dim, spec.head_dim, shape.KeyRow());
        write(block + shape.ValueOffset(head, token, item.block_tokens),
              item.v.data() + at * spec.v_head_dim, spec.v_head_dim, shape.ValueRow());
      }
    }
  }
}

// [query rows, q_heads, KeyRow()].
std::vector<float> FloatRun::QueryRows() const {
  const AttentionSpec& spec = case_.spec;
  const int padded = Shape().KeyRow();
  std::vector<float> rows(static_cast<size_t>(query_rows_ * spec.q_heads * padded), 0.0f);
  float* to = rows.data();
  for (const FloatItem& item : case_.items) {
    for (int64_t head = 0; head < item.rows * spec.q_heads; ++head, to += padded) {
      std::copy_n(item.q.data() + head * spec.head_dim, spec.head_dim, to);
    }
  }
  return rows;
}

std::vector<std::byte> FloatRun::StoredQueries() const {
  const std::vector<float> rows = QueryRows();
  std::vector<std::byte> stored(rows.size() * static_cast<size_t>(DTypeBytes(case_.q_dtype)));
  for (size_t i = 0; i < rows.size(); ++i) {
    StoreFloat(case_.q_dtype, rows[i], stored.data(), static_cast<int64_t>(i));
  }
  return stored;
}

void FloatRun::Run() {
  const AttentionSpec& spec = case_.spec;
  ASSERT_EQ(PrepareFloatAttention(99 * 1024), cudaSuccess);
  ASSERT_EQ(PrepareWeights(99 * 1024), cudaSuccess);
  PlaceItems();
  MakeTiles();
  simt::SparseBuffer kv(static_cast<size_t>(kv_bytes_), "kv");
  WriteBlocks(kv.data());
  const DeviceArray<BatchShape> batch(
      {BatchShape{static_cast<int32_t>(shapes_.size()), static_cast<int32_t>(tiles_.size()), 0,
                  static_cast<int32_t>(combines_.size()), query_rows_, 0, query_rows_}},
      "batch");
  const DeviceArray<ItemShape> items(shapes_, "items");
  const DeviceArray<AttentionTile> tiles(tiles_, "tiles");
  const DeviceArray<CombineTile> combines(combines_, "combines");
  const DeviceArray<int64_t> addresses(addresses_, "block_address");
  const DeviceArray<float> slopes(spec.alibi_slopes, "alibi_slopes");
  const DeviceArray<float> sinks(spec.sinks, "sinks");
  const DeviceArray<float> q(QueryRows(), "q");
  const auto rows = static_cast<size_t>(query_rows_ * spec.q_heads);
  const DeviceArray<std::byte> output(
      rows * static_cast<size_t>(spec.v_head_dim * DTypeBytes(case_.output_dtype)), "output");
  const DeviceArray<RowStatistics> statistics(rows, "statistics");
  const auto partial_rows = static_cast<size_t>(partial_rows_);
  const DeviceArray<float> partial_output(partial_rows * static_cast<size_t>(spec.v_head_dim),
                                          "partial_output");
  const DeviceArray<RowStatistics> partial_statistics(partial_rows, "partial_statistics");

  AttentionParams params{};
  params.batch = batch.data();
  params.items = items.data();
  params.tiles = tiles.data();
  params.tile_count = &batch.data()->prefill_tiles;
  params.combines = combines.data();
  params.block_address = addresses.data();
  params.kv = kv.data();
  params.shape = Shape();
  params.q_heads = spec.q_heads;
  params.group = spec.group_size();
  params.scale = static_cast<float>(spec.scale);
  params.softcap = spec.softcap;
  params.window = spec.window;
  params.alibi_slopes = spec.alibi_slopes.empty() ? nullptr : slopes.data();
  params.sinks = spec.sinks.empty() ? nullptr : sinks.data();
  params.q = q.data();
  params.output = output.data();
  params.output_dtype = case_.output_dtype;
  params.statistics = statistics.data();
  params.partial_output = partial_output.data();
  params.partial_statistics = partial_statistics.data();
  ASSERT_EQ(LaunchFloatAttention(params, case_.kv_dtype, case_.blocks, nullptr), cudaSuccess);
  ASSERT_EQ(LaunchCombine(params, case_.blocks, nullptr), cudaSuccess);
  ASSERT_TRUE(output.Written());
  ASSERT_TRUE(statistics.Written());
  output_ = output.values();
  statistics_ = statistics.values();
  const DeviceArray<std::byte> stored(StoredQueries(), "q");
  params.q = stored.data();
  RunWeights(params);
}

void FloatRun::RunWeights(const AttentionParams& params) {
  const int64_t heads = case_.spec.q_heads;
  std::vector<std::unique_ptr<DeviceArray<float>>> outs;
  std::vector<WeightsTask> tasks;
  for (size_t i = 0; i < case_.items.size(); ++i) {
    const FloatItem& item = case_.items[i];
    outs.push_back(std::make_unique<DeviceArray<float>>(
        static_cast<size_t>(heads * item.rows * item.keys), "weights"));
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t row = 0; row < item.rows; row += kWeightsRows) {
        tasks.push_back({outs.back()->data() + (head * item.rows + row) * item.keys, row, item.keys,
                         static_cast<int32_t>(std::min<int64_t>(kWeightsRows, item.rows - row)),
                         static_cast<int32_t>(i), static_cast<int32_t>(head), 0});
      }
    }
  }
  const DeviceArray<WeightsTask> on_device(tasks, "tasks");
  const WeightsParams weights{params, on_device.data(), static_cast<int64_t>(tasks.size())};
  ASSERT_EQ(LaunchWeights(weights, case_.q_dtype, case_.kv_dtype, nullptr), cudaSuccess);
  weights_.clear();
  for (const auto& out : outs) {
    ASSERT_TRUE(out->Written());
    weights_.push_back(out->values());
  }
}

float FloatRun::Output(size_t item, int64_t row, int64_t head, int64_t d) const {
  const int64_t at = (shapes_[item].row_begin + row) * case_.spec.q_heads + head;
  return LoadFloat(case_.output_dtype, output_.data(), at * case_.spec.v_head_dim + d);
}

RowStatistics FloatRun::Statistics(size_t item, int64_t row, int64_t head) const {
  return statistics_[static_cast<size_t>((shapes_[item].row_begin + row) * case_.spec.q_heads +
                                         head)];
}

void FloatRun::CheckAgainstDouble() const {
  const AttentionSpec& spec = case_.spec;
  for (size_t i = 0; i < case_.items.size(); ++i) {
    const FloatItem& item = case_.items[i];
    if (item.rows == 0) continue;
    ReferenceSequence sequence;
    sequence.rows = item.rows;
    sequence.query = {item.q.data(), DType::kF32};
    sequence.first_row = item.first_row;
    sequence.keys = item.keys;
    sequence.key_source = {item.k.data(), DType::kF32};
    sequence.value_source = {item.v.data(), DType::kF32};
    sequence.causal = item.causal;
    sequence.bias = {item.bias_columns > 0 ? item.bias.data() : nullptr,
                     item.bias_per_head ? item.rows * item.bias_columns : 0, item.bias_columns,
                     item.bias_columns, item.bias_first_key};
    sequence.weights = true;
    const ReferenceResult want = ReferenceAttention(spec, LayerWeights{}, {}, sequence);
    for (int64_t row = 0; row < item.rows; ++row) {
      for (int64_t column = 0; column < spec.output_width; ++column) {
        const int64_t at = row * spec.output_width + column;
        const double value = Output(i, row, column / spec.v_head_dim, column % spec.v_head_dim);
        const double error = want.output.error[at];
        // Rounding to the output's type: half a step, of a value that is off by `error`.
        const double step = RoundTo(case_.output_dtype, want.output.value[at] + error) -
                            RoundTo(case_.output_dtype, want.output.value[at] - error);
        const double unit = case_.output_dtype == DType::kF32    ? 0x1p-24
                            : case_.output_dtype == DType::kBF16 ? 0x1p-8
                                                                 : 0x1p-11;
        const double bound =
            error + std::abs(step) + unit * std::abs(want.output.value[at]) + 0x1p-25;
        ASSERT_TRUE(std::abs(value - want.output.value[at]) <= bound)
            << "item " << i << " row " << row << " column " << column << ": " << value << ", want "
            << want.output.value[at] << " +- " << bound;
      }
      for (int64_t head = 0; head < spec.q_heads; ++head) {
        for (int64_t key = 0; key < item.keys; ++key) {
          const int64_t at = (head * item.rows + row) * item.keys + key;
          const double value = weights_[i][static_cast<size_t>(at)];
          const double bound = want.weights.error[at] + 0x1p-149;
          ASSERT_TRUE(std::abs(value - want.weights.value[at]) <= bound)
              << "item " << i << " head " << head << " row " << row << " key " << key << ": "
              << value << ", want " << want.weights.value[at] << " +- " << bound;
          const bool hidden = want.weights.value[at] == 0 && want.weights.error[at] == 0;
          ASSERT_TRUE(!hidden || value == 0) << "a hidden key weighs " << value;
        }
      }
    }
  }
}

}  // namespace attend
