// SPDX-License-Identifier: Apache-2.0
#include "tests/simt/kernel_fixture.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>

#include "engine/util/dtype.h"

namespace attend {
namespace {

constexpr double kUnit = 0x1p-24;  // unit roundoff of float
constexpr double kInf = std::numeric_limits<double>::infinity();

double UnitOf(DType dtype) {
  return dtype == DType::kF32 ? kUnit : dtype == DType::kBF16 ? 0x1p-8 : 0x1p-11;
}
// Largest error of rounding x to `dtype`: relative, or half a step of F16's subnormal numbers.
double Rounding(DType dtype, double x) {
  return UnitOf(dtype) * std::fabs(x) + (dtype == DType::kF16 ? 0x1p-25 : 0x1p-126);
}

void RoundAll(DType dtype, std::vector<float>& values) {
  for (float& value : values) {
    unsigned char stored[4];
    StoreFloat(dtype, value, stored, 0);
    value = LoadFloat(dtype, stored, 0);
  }
}

std::vector<float> Normal(std::mt19937_64& random, int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

template <class T>
std::unique_ptr<simt::DeviceArray<T>> OnDevice(const std::vector<T>& values, const char* name) {
  return std::make_unique<simt::DeviceArray<T>>(values, name);
}
template <class T>
std::unique_ptr<simt::DeviceArray<T>> Fresh(int64_t count, const char* name) {
  return std::make_unique<simt::DeviceArray<T>>(static_cast<size_t>(count), name);
}

// The mask in plain words: what attention_plan.h computes from integers.
bool Sees(const KernelSpec& spec, const KernelItem& item, int64_t row, int64_t key) {
  const int64_t position = item.first_row + row;
  if (item.causal && key > position) return false;
  return spec.window == 0 || std::abs(key - position) < spec.window;
}

}  // namespace

KernelBatch::KernelBatch(KernelSpec spec, uint64_t seed)
    : spec_(std::move(spec)),
      random_(seed),
      shape_{spec_.kv_heads, spec_.head_dim, spec_.v_head_dim,
             static_cast<int32_t>(DTypeBytes(spec_.kv_dtype))} {}

KernelItem& KernelBatch::Add(int64_t rows, int64_t first_row, int64_t keys, bool causal) {
  auto item = std::make_unique<KernelItem>();
  item->rows = rows;
  item->first_row = first_row;
  item->keys = keys;
  item->causal = causal;
  item->q = Normal(random_, rows * spec_.q_heads * spec_.head_dim);
  item->k = Normal(random_, keys * spec_.kv_heads * spec_.head_dim);
  item->v = Normal(random_, keys * spec_.kv_heads * spec_.v_head_dim);
  items_.push_back(std::move(item));
  return *items_.back();
}

void KernelBatch::AddBias(KernelItem& item, int heads, int64_t columns, int64_t first_key) {
  item.bias_heads = heads;
  item.bias_columns = columns;
  item.bias_first_key = first_key;
  item.bias = Normal(random_, heads * item.rows * columns);
}

void KernelBatch::Build(int tile_rows, int64_t split_keys) {
  for (auto& item : items_) {
    RoundAll(spec_.q_dtype, item->q);
    RoundAll(spec_.kv_dtype, item->k);
    RoundAll(spec_.kv_dtype, item->v);
  }
  LayOutKv();
  LayOutItems();
  CutTiles(tile_rows, split_keys);
  params_.batch = batch_->data();
  params_.items = item_shapes_->data();
  params_.tiles = tiles_->data();
  params_.tile_count = tile_count_->data();
  params_.block_address = block_address_->data();
  params_.kv = sparse_kv_ != nullptr ? sparse_kv_->data() : kv_->data();
  params_.shape = shape_;
  params_.q_heads = spec_.q_heads;
  params_.group = spec_.group();
  params_.scale = spec_.scale;
  params_.softcap = spec_.softcap;
  params_.window = spec_.window;
  if (!spec_.alibi_slopes.empty()) alibi_ = OnDevice(spec_.alibi_slopes, "alibi");
  if (!spec_.sinks.empty()) sinks_ = OnDevice(spec_.sinks, "sinks");
  params_.alibi_slopes = alibi_ != nullptr ? alibi_->data() : nullptr;
  params_.sinks = sinks_ != nullptr ? sinks_->data() : nullptr;
  params_.q = q_->data();
  params_.output_dtype = spec_.output_dtype;
}

// Blocks in random order; rows past an item's keys stay uninitialised.
void KernelBatch::LayOutKv() {
  std::vector<int64_t> first_byte;
  block_begin_ = {0};
  for (const auto& item : items_) {
    const auto blocks = static_cast<int32_t>((item->keys + kBlockTokens - 1) / kBlockTokens);
    block_begin_.push_back(block_begin_.back() + blocks);
  }
  const int32_t count = block_begin_.back();
  const int64_t block_bytes =
      shape_.ValueOffset(shape_.kv_heads, 0, kBlockTokens);  // also room for short ones
  const int64_t step = spread_bytes_ > 0 ? spread_bytes_ : block_bytes;
  std::vector<int64_t> address(static_cast<size_t>(count));
  for (int32_t b = 0; b < count; ++b) address[b] = b * step;
  std::shuffle(address.begin(), address.end(), random_);
  std::byte* kv;
  if (spread_bytes_ > 0) {
    sparse_kv_ = std::make_unique<simt::SparseBuffer>(count * step + block_bytes, "kv");
    kv = sparse_kv_->data();
  } else {
    kv_ = Fresh<std::byte>(count * block_bytes, "kv");
    kv = kv_->data();
  }
  for (size_t i = 0; i < items_.size(); ++i) {
    const KernelItem& item = *items_[i];
    for (int64_t key = 0; key < item.keys; ++key) {
      const int64_t block = address[block_begin_[i] + key / kBlockTokens];
      const auto token = static_cast<int32_t>(key % kBlockTokens);
      const auto put = [&](int64_t offset, const float* from, int width, int row) {
        std::byte* to = kv + block + offset;
        std::memset(to, 0, row * DTypeBytes(spec_.kv_dtype));
        for (int d = 0; d < width; ++d) StoreFloat(spec_.kv_dtype, from[d], to, d);
        simt::MarkInitialized(to, row * DTypeBytes(spec_.kv_dtype));
      };
      for (int head = 0; head < spec_.kv_heads; ++head) {
        const int64_t row = key * spec_.kv_heads + head;
        put(shape_.KeyOffset(head, token, item.block_tokens), &item.k[row * spec_.head_dim],
            spec_.head_dim, shape_.KeyRow());
        put(shape_.ValueOffset(head, token, item.block_tokens), &item.v[row * spec_.v_head_dim],
            spec_.v_head_dim, shape_.ValueRow());
      }
    }
  }
  block_address_ = OnDevice(address, "block_address");
}

void KernelBatch::LayOutItems() {
  std::vector<ItemShape> shapes;
  row_begin_.clear();
  query_rows_ = 0;
  bias_.clear();
  for (size_t i = 0; i < items_.size(); ++i) {
    const KernelItem& item = *items_[i];
    ItemShape shape{};
    shape.rows = item.rows;
    shape.first_row = item.first_row;
    shape.keys = item.keys;
    shape.cached_keys = item.keys;
    shape.row_begin = query_rows_;
    shape.block_begin = block_begin_[i];
    shape.block_tokens = item.block_tokens;
    shape.causal = item.causal ? 1 : 0;
    if (!item.bias.empty()) {
      bias_.push_back(OnDevice(item.bias, "bias"));
      shape.bias = bias_.back()->data();
      shape.bias_row_stride = item.bias_columns;
      shape.bias_head_stride = item.bias_heads == 1 ? 0 : item.rows * item.bias_columns;
      shape.bias_columns = item.bias_columns;
      shape.bias_first_key = item.bias_first_key;
    }
    shapes.push_back(shape);
    row_begin_.push_back(query_rows_);
    query_rows_ += item.rows;
  }
  const int64_t row_bytes = shape_.Padded(spec_.head_dim) * DTypeBytes(spec_.q_dtype);
  std::vector<std::byte> q(static_cast<size_t>(query_rows_ * spec_.q_heads * row_bytes));
  for (size_t i = 0; i < items_.size(); ++i) {
    for (int64_t row = 0; row < items_[i]->rows * spec_.q_heads; ++row) {
      std::byte* to = q.data() + (row_begin_[i] * spec_.q_heads + row) * row_bytes;
      for (int d = 0; d < spec_.head_dim; ++d) {
        StoreFloat(spec_.q_dtype, items_[i]->q[row * spec_.head_dim + d], to, d);
      }
    }
  }
  q_ = OnDevice(q, "q");
  item_shapes_ = OnDevice(shapes, "items");
  BatchShape batch{};
  batch.items = static_cast<int32_t>(items_.size());
  batch.query_rows = query_rows_;
  batch_ = OnDevice(std::vector<BatchShape>{batch}, "batch");
}

void KernelBatch::CutTiles(int tile_rows, int64_t split_keys) {
  tile_list_.clear();
  partial_rows_ = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    const KernelItem& item = *items_[i];
    const int64_t packed = item.rows * spec_.group();
    for (int kv_head = 0; kv_head < spec_.kv_heads; ++kv_head) {
      for (int64_t row = 0; row < packed; row += tile_rows) {
        AttentionTile tile{};
        tile.row_begin = row;
        tile.rows = static_cast<int32_t>(std::min<int64_t>(tile_rows, packed - row));
        tile.item = static_cast<int32_t>(i);
        tile.kv_head = kv_head;
        tile.partial = -1;
        int64_t begin = item.keys, end = 0;
        for (int64_t r = row / spec_.group(); r <= (row + tile.rows - 1) / spec_.group(); ++r) {
          for (int64_t key = 0; key < item.keys; ++key) {
            if (!Sees(spec_, item, r, key)) continue;
            begin = std::min(begin, key);
            end = std::max(end, key + 1);
          }
        }
        begin = begin < end ? begin / kBlockTokens * kBlockTokens : 0;
        tile.key_begin = begin;
        tile.key_end = end;
        if (split_keys == 0 || end - begin <= split_keys) {
          tile_list_.push_back(tile);
          continue;
        }
        for (int64_t from = begin / split_keys * split_keys; from < end; from += split_keys) {
          tile.key_begin = std::max(begin, from);
          tile.key_end = std::min(end, from + split_keys);
          tile.partial = partial_rows_;
          partial_rows_ += tile.rows;
          tile_list_.push_back(tile);
        }
      }
    }
  }
  std::shuffle(tile_list_.begin(), tile_list_.end(), random_);
  tiles_ = OnDevice(tile_list_, "tiles");
  tile_count_ = OnDevice(std::vector<int32_t>{static_cast<int32_t>(tile_list_.size())}, "count");
}

bool KernelBatch::Run(const Kernel& kernel, int64_t blocks) {
  const int64_t rows = query_rows_ * spec_.q_heads;
  output_ = Fresh<std::byte>(rows * spec_.v_head_dim * DTypeBytes(spec_.output_dtype), "output");
  statistics_ = Fresh<RowStatistics>(rows, "statistics");
  partial_output_ = Fresh<float>(partial_rows_ * spec_.v_head_dim, "partial_output");
  partial_statistics_ = Fresh<RowStatistics>(partial_rows_, "partial_statistics");
  params_.output = output_->data();
  params_.statistics = statistics_->data();
  params_.partial_output = partial_output_->data();
  params_.partial_statistics = partial_statistics_->data();
  return kernel(params_, blocks) == cudaSuccess;
}

std::vector<std::byte> KernelBatch::ItemBits(size_t item) const {
  const int64_t rows = items_[item]->rows * spec_.q_heads;
  const int64_t first = row_begin_[item] * spec_.q_heads;
  const int64_t row_bytes = spec_.v_head_dim * DTypeBytes(spec_.output_dtype);
  const auto* statistics = reinterpret_cast<const std::byte*>(statistics_->data() + first);
  std::vector<std::byte> bits(output_->data() + first * row_bytes,
                              output_->data() + (first + rows) * row_bytes);
  bits.insert(bits.end(), statistics, statistics + rows * sizeof(RowStatistics));
  return bits;
}

float KernelBatch::Output(size_t item, int64_t row, int head, int column) const {
  return LoadFloat(spec_.output_dtype, output_->data(),
                   OutputRow(item, row, head) * spec_.v_head_dim + column);
}

RowStatistics KernelBatch::Statistics(size_t item, int64_t row, int head) const {
  return statistics_->data()[OutputRow(item, row, head)];
}

std::vector<KernelBatch::Visible> KernelBatch::VisibleScores(const KernelItem& item, int64_t row,
                                                             int head) const {
  std::vector<Visible> scores;
  const int64_t position = item.first_row + row;
  for (int64_t key = 0; key < item.keys; ++key) {
    if (!Sees(spec_, item, row, key)) continue;
    double product = 0, magnitude = 0;
    for (int d = 0; d < spec_.head_dim; ++d) {
      const double term =
          double(item.q[(row * spec_.q_heads + head) * spec_.head_dim + d]) *
          double(item.k[(key * spec_.kv_heads + head / spec_.group()) * spec_.head_dim + d]);
      product += term;
      magnitude += std::fabs(term);
    }
    double score = spec_.scale * product;
    double error = std::fabs(spec_.scale) * magnitude * kUnit * (spec_.head_dim + 2);
    if (spec_.softcap > 0) {
      score = spec_.softcap * std::tanh(score / spec_.softcap);
      error += 8 * kUnit * spec_.softcap;
    }
    double added = 0;
    if (!spec_.alibi_slopes.empty()) {
      const auto ahead = double(key - position);
      added = spec_.alibi_slopes[head] * (item.causal ? ahead : -std::fabs(ahead));
    }
    const int64_t column = key - item.bias_first_key;
    if (!item.bias.empty() && column >= 0 && column < item.bias_columns) {
      const int bias_head = item.bias_heads == 1 ? 0 : head;
      const double bias = item.bias[(bias_head * item.rows + row) * item.bias_columns + column];
      if (bias == -kInf) continue;
      error += 2 * kUnit * std::fabs(bias);
      added += bias;
    }
    score += added;
    error += 4 * kUnit * (std::fabs(added) + std::fabs(score));
    if (!std::isfinite(score)) error = 0;  // its weight is 0 or NaN, exactly
    scores.push_back({key, score, error});
  }
  return scores;
}

// Bounds: a weight exp(s - max) is off by what both scores are off by, by exp's error and, times a
// value, by its rounding to the KV type; sums of n weights by n roundings; what falls below exp's
// smallest result counts as an absolute error.
ExpectedRow KernelBatch::Expected(size_t item_index, int64_t row, int head) const {
  const KernelItem& item = *items_[item_index];
  const std::vector<Visible> scores = VisibleScores(item, row, head);
  const double sink = spec_.sinks.empty() ? -kInf : double(spec_.sinks[head]);
  ExpectedRow expected{sink, 0, 0, 0, {}, {}};
  double score_error = 0;
  for (const Visible& visible : scores) {
    if (visible.score > expected.max) expected.max = visible.score;
    score_error = std::max(score_error, visible.error);
  }
  const double reference = expected.max == -kInf ? 0 : expected.max;
  expected.sum = std::exp(sink - reference);
  const auto terms = double(scores.size() + 4);
  // Differences of scores are rounded too, relative to the larger one.
  double relative = 2 * score_error + 8 * kUnit + terms * kUnit;
  std::vector<double> weighted(spec_.v_head_dim, 0.0), magnitude(spec_.v_head_dim, 0.0),
      values(spec_.v_head_dim, 0.0);
  for (const Visible& visible : scores) {
    const double weight = std::exp(visible.score - reference);
    expected.sum += weight;
    // The argument of exp2 is rounded: far keys are off by more, and weigh less.
    const double own = weight > 0 ? 1 + std::fabs(visible.score - reference) * 3 * kUnit : 1;
    for (int d = 0; d < spec_.v_head_dim; ++d) {
      const int64_t at =
          (visible.key * spec_.kv_heads + head / spec_.group()) * spec_.v_head_dim + d;
      const double value = item.v[at];
      weighted[d] += weight * value;
      magnitude[d] += weight * own * std::fabs(value);
      values[d] += std::fabs(value);
    }
  }
  relative += 64 * 3 * kUnit;  // weights that matter are above exp(-64)
  const double factor = expected.sum == 0 ? 0 : 1 / expected.sum;
  const double weight_rounding =
      spec_.q_dtype == DType::kF32 ? 0 : UnitOf(spec_.kv_dtype);  // float kernels don't round them
  const double smallest = spec_.kv_dtype == DType::kF16 && weight_rounding > 0 ? 0x1p-25 : 0x1p-120;
  expected.max_error = score_error + 2 * kUnit * std::fabs(expected.max);
  expected.sum_error = relative * expected.sum;
  for (int d = 0; d < spec_.v_head_dim; ++d) {
    const double output = weighted[d] * factor;
    const double error =
        factor * (magnitude[d] * (weight_rounding + 2 * relative) + values[d] * smallest);
    expected.output.push_back(output);
    expected.output_error.push_back(error +
                                    Rounding(spec_.output_dtype, std::fabs(output) + error));
  }
  return expected;
}

// A row as written, or its splits added up.
RowStatistics KernelBatch::MergedRow(size_t item, int64_t row, int head,
                                     std::vector<double>& output) const {
  std::vector<std::pair<int64_t, int64_t>> partial;  // (key_begin, partial row)
  const int64_t packed = row * spec_.group() + head % spec_.group();
  for (const AttentionTile& tile : tile_list_) {
    if (tile.item != static_cast<int32_t>(item) || tile.kv_head != head / spec_.group()) continue;
    if (tile.partial < 0 || packed < tile.row_begin || packed >= tile.row_begin + tile.rows)
      continue;
    partial.push_back({tile.key_begin, tile.partial + packed - tile.row_begin});
  }
  output.assign(spec_.v_head_dim, 0);
  if (partial.empty()) {
    for (int d = 0; d < spec_.v_head_dim; ++d) output[d] = Output(item, row, head, d);
    return Statistics(item, row, head);
  }
  double maximum = spec_.sinks.empty() ? -kInf : double(spec_.sinks[head]);
  for (const auto& [key, at] : partial) {
    maximum = std::max(maximum, double(partial_statistics_->data()[at].max));
  }
  const double reference = maximum == -kInf ? 0 : maximum;
  double sum = spec_.sinks.empty() ? 0 : std::exp(double(spec_.sinks[head]) - reference);
  for (const auto& [key, at] : partial) {
    const RowStatistics part = partial_statistics_->data()[at];
    const double rescale = std::exp(double(part.max) - reference);
    sum += part.sum * rescale;
    for (int d = 0; d < spec_.v_head_dim; ++d) {
      output[d] += partial_output_->data()[at * spec_.v_head_dim + d] * rescale;
    }
  }
  for (double& value : output) value *= sum == 0 ? 0 : 1 / sum;
  return {static_cast<float>(maximum), static_cast<float>(sum)};
}

testing::AssertionResult KernelBatch::Matches() const {
  if (partial_rows_ == 0 && (!output_->Written() || !statistics_->Written())) {
    return testing::AssertionFailure() << "outputs were not all written";
  }
  if (!partial_output_->Written() || !partial_statistics_->Written()) {
    return testing::AssertionFailure() << "partial outputs were not all written";
  }
  const auto same = [](double actual, double expected, double error) {
    if (std::isnan(expected) || std::isnan(actual)) {
      return std::isnan(expected) && std::isnan(actual);
    }
    if (std::isinf(expected) || std::isinf(actual)) return expected == actual;
    return std::fabs(actual - expected) <= error;
  };
  for (size_t i = 0; i < items_.size(); ++i) {
    for (int64_t row = 0; row < items_[i]->rows; ++row) {
      for (int head = 0; head < spec_.q_heads; ++head) {
        const ExpectedRow expected = Expected(i, row, head);
        std::vector<double> output;
        const RowStatistics statistics = MergedRow(i, row, head, output);
        const auto fail = [&](const std::string& what, double actual, double wanted, double error) {
          return testing::AssertionFailure()
                 << "item " << i << " row " << row << " head " << head << " " << what << ": "
                 << actual << ", want " << wanted << " +- " << error;
        };
        if (!same(statistics.max, expected.max, expected.max_error)) {
          return fail("max", statistics.max, expected.max, expected.max_error);
        }
        if (!same(statistics.sum, expected.sum, expected.sum_error)) {
          return fail("sum", statistics.sum, expected.sum, expected.sum_error);
        }
        for (int d = 0; d < spec_.v_head_dim; ++d) {
          if (!same(output[d], expected.output[d], expected.output_error[d])) {
            return fail("column " + std::to_string(d), output[d], expected.output[d],
                        expected.output_error[d]);
          }
        }
      }
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace attend
