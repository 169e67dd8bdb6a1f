// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/attention_kernel_fixture.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

namespace attend {
namespace {

// A sequence's item for rows and keys up to `end_row` / the matching key, after `begin_row` ones
// were done.
AttendItem MakeItem(Sequence& sequence, int64_t begin_row, int64_t end_row,
                    std::span<const int64_t> blocks) {
  const int64_t offset = sequence.keys - sequence.rows;  // of the last row's key from the row
  AttendItem item;
  item.rows = end_row - begin_row;
  item.first_row = offset + begin_row;
  item.cached_keys = begin_row == 0 ? 0 : offset + begin_row;
  item.new_keys = offset + end_row - item.cached_keys;
  item.query = {sequence.q.data(), DType::kF32};
  item.key_source = {sequence.k.data(), DType::kF32};
  item.value_source = {sequence.v.data(), DType::kF32};
  item.output = sequence.output.data();
  item.causal = sequence.causal;
  item.blocks = blocks;
  item.block_tokens = sequence.block_tokens;
  if (!sequence.bias.empty()) {
    item.bias.data = sequence.bias.data() + begin_row * sequence.bias_columns;
    item.bias.head_stride = sequence.bias_heads == 1 ? 0 : sequence.rows * sequence.bias_columns;
    item.bias.row_stride = sequence.bias_columns;
    item.bias.columns = sequence.bias_columns;
    item.bias.first_key = sequence.keys - sequence.bias_columns;
  }
  const int64_t from = std::max(sequence.weight_begin, begin_row);
  const int64_t to = std::min(sequence.weight_end, end_row);
  if (from < to) {
    item.weights.heads = sequence.weight_heads.data();
    item.weights.head_count = static_cast<int32_t>(sequence.weight_heads.size());
    item.weights.row_begin = from - begin_row;
    item.weights.row_end = to - begin_row;
    item.weights.row_stride = sequence.keys;
    item.weights.head_stride = (sequence.weight_end - sequence.weight_begin) * sequence.keys;
    item.weights.data = sequence.weights.data() + (from - sequence.weight_begin) * sequence.keys;
  }
  return item;
}

// Softmax attention of one row and head, in double; `bound` holds
// what float32 rounding may add: one epsilon per term of each sum, scores through the exponential.
struct ReferenceRow {
  std::vector<double> output;
  std::vector<double> weights;
  double bound = 0;
};

// With `compute` BF16 queries and weights may be rounded to bf16, too.
ReferenceRow Reference(const AttentionSpec& spec, const Sequence& sequence, DType compute,
                       int64_t row, int head) {
  const double eps = std::ldexp(1.0, -24);
  const double rounding = compute == DType::kBF16 ? std::ldexp(1.0, -9) : 0;
  const int kv_head = head / spec.group_size();
  const int64_t position = sequence.keys - sequence.rows + row;
  const float* q = sequence.q.data() + (row * spec.q_heads + head) * spec.head_dim;
  ReferenceRow result{std::vector<double>(spec.v_head_dim), std::vector<double>(sequence.keys), 0};
  std::vector<double> scores(sequence.keys, -kInf);
  std::vector<bool> visible(sequence.keys);
  double maximum = -kInf, score_error = 0, largest_value = 0;
  int64_t count = 0;
  for (int64_t j = 0; j < sequence.keys; ++j) {
    if (sequence.causal && j > position) continue;
    if (spec.window > 0 && j <= position - spec.window) continue;
    if (spec.window > 0 && !sequence.causal && j >= position + spec.window) continue;
    double bias = 0;
    if (const int64_t c = j - (sequence.keys - sequence.bias_columns);
        !sequence.bias.empty() && c >= 0) {
      const int64_t bias_row = (sequence.bias_heads == 1 ? 0 : head * sequence.rows) + row;
      bias = sequence.bias[bias_row * sequence.bias_columns + c];
    }
    if (bias == -kInf) continue;
    const float* k = sequence.k.data() + (j * spec.kv_heads + kv_head) * spec.head_dim;
    double dot = 0, magnitude = 0;
    for (int d = 0; d < spec.head_dim; ++d) {
      const double product = double(q[d]) * double(k[d]);
      dot += product;
      magnitude += std::abs(product);
    }
    double score = dot * spec.scale;
    if (spec.softcap > 0) score = spec.softcap * std::tanh(score / spec.softcap);
    double distance = 0;
    if (!spec.alibi_slopes.empty()) {
      distance = spec.alibi_slopes[head] * std::abs(double(j - position));
    }
    score += bias - distance;
    visible[j] = true;
    scores[j] = score;
    ++count;
    if (!(score <= maximum)) maximum = score;
    const double terms = (spec.head_dim + 5) * magnitude * spec.scale + 4 * std::abs(distance) +
                         4 * std::abs(bias) + 8 * double(spec.softcap) + 3 * std::abs(score);
    score_error = std::max(score_error, eps * terms + rounding * magnitude * spec.scale);
    const float* v = sequence.v.data() + (j * spec.kv_heads + kv_head) * spec.v_head_dim;
    for (int d = 0; d < spec.v_head_dim; ++d) {
      largest_value = std::max(largest_value, std::abs(double(v[d])));
    }
  }
  if (count == 0) return result;
  double sum = 0;
  if (!spec.sinks.empty()) {
    if (!(spec.sinks[head] <= maximum)) maximum = spec.sinks[head];
    sum = std::exp(spec.sinks[head] - maximum);
  }
  for (int64_t j = 0; j < sequence.keys; ++j) {
    if (visible[j]) sum += std::exp(scores[j] - maximum);
  }
  for (int64_t j = 0; j < sequence.keys; ++j) {
    if (!visible[j]) continue;
    result.weights[j] = std::exp(scores[j] - maximum) / sum;
    const float* v = sequence.v.data() + (j * spec.kv_heads + kv_head) * spec.v_head_dim;
    for (int d = 0; d < spec.v_head_dim; ++d) {
      result.output[d] += result.weights[j] * double(v[d]);
    }
  }
  // Sums in a segment have at most 16 x (4 or 8) + 64 additions; merging adds four per segment.
  const double steps = std::min<double>(count, 1024) + 4.0 * (double(count) / 1024 + 1) + 32;
  result.bound =
      (2 * score_error + 2 * steps * eps + 2 * rounding) * std::max(largest_value, 1.0) + 1e-37;
  return result;
}

}  // namespace

void RoundRows(DType dtype, int width, std::vector<float>& values) {
  for (size_t begin = 0; begin < values.size(); begin += static_cast<size_t>(width)) {
    float* row = values.data() + begin;
    float most = 0;
    bool finite = true;
    for (int i = 0; i < width; ++i) {
      finite &= std::isfinite(row[i]);
      most = std::max(most, std::abs(row[i]));
    }
    for (int i = 0; i < width; ++i) {
      unsigned char bytes[4];
      const float scale = finite ? most / 127 : kNan;
      if (dtype == DType::kI8) {
        row[i] = scale == 0 ? 0 : std::nearbyint(row[i] / scale) * scale;
      } else {
        StoreFloat(dtype, row[i], bytes, 0);
        row[i] = LoadFloat(dtype, bytes, 0);
      }
    }
  }
}

void AttentionKernelTest::Run(const AttentionSpec& spec, DType kv_dtype,
                              std::vector<Sequence>& sequences, int workers, int64_t piece_rows) {
  WorkerPool pool(workers);
  const int64_t block_bytes = GeometryOf(spec, kv_dtype).BlockBytes();
  std::vector<std::vector<int64_t>> blocks(sequences.size());
  int64_t next = 0;
  for (size_t s = 0; s < sequences.size(); ++s) {
    for (int64_t key = 0; key < sequences[s].keys; key += kBlockTokens) {
      blocks[s].insert(blocks[s].begin(), next++ * block_bytes);  // not in memory order
    }
    sequences[s].output.assign(sequences[s].rows * spec.output_width, kNan);
    sequences[s].weights.assign(sequences[s].weight_heads.size() *
                                    (sequences[s].weight_end - sequences[s].weight_begin) *
                                    sequences[s].keys,
                                0.0f);
  }
  void* memory = ::operator new (next* block_bytes + 64, std::align_val_t{64});
  std::memset(memory, 0xff, next * block_bytes + 64);

  int64_t longest = 0;
  for (const Sequence& sequence : sequences) longest = std::max(longest, sequence.rows);
  if (piece_rows == 0) piece_rows = std::max<int64_t>(longest, 1);
  for (int64_t begin = 0; begin == 0 || begin < longest; begin += piece_rows) {
    std::vector<AttendItem> items;
    std::vector<Sequence*> owners;
    std::vector<int64_t> first;
    for (size_t s = 0; s < sequences.size(); ++s) {
      Sequence& sequence = sequences[s];
      if (begin > 0 && begin >= sequence.rows) continue;
      items.push_back(
          MakeItem(sequence, begin, std::min(begin + piece_rows, sequence.rows), blocks[s]));
      owners.push_back(&sequence);
    }
    const absl::StatusOr<BatchPlan> plan = BuildPlan(-1, spec, kv_dtype, items);
    ASSERT_TRUE(plan.ok()) << plan.status();
    std::vector<float> q, k, v;
    const auto append = [](std::vector<float>& to, const std::vector<float>& from, int64_t row,
                           int64_t rows, int64_t width) {
      to.insert(to.end(), from.begin() + row * width, from.begin() + (row + rows) * width);
    };
    for (int32_t index : plan->order) {
      const AttendItem& item = items[index];
      append(q, owners[index]->q, begin, item.rows, spec.q_heads * spec.head_dim);
      append(k, owners[index]->k, item.cached_keys, item.new_keys, spec.kv_heads * spec.head_dim);
      append(v, owners[index]->v, item.cached_keys, item.new_keys, spec.kv_heads * spec.v_head_dim);
    }
    std::vector<float> output(plan->query_rows * spec.output_width, kNan);
    // Rows in F16 and BF16 lie where their floats will.
    std::vector<OutputRow> rows(plan->query_rows);
    for (int64_t r = 0; r < plan->query_rows; ++r) {
      rows[r] = {output.data() + r * spec.output_width, output_dtype_};
    }
    const AttentionBatch batch{&*plan,      items,    q.data(),
                               k.data(),    v.data(), static_cast<std::byte*>(memory),
                               rows.data(), compute_};
    AppendAndAttend(GetParam(), batch, pool, workspace_);
    for (const OutputRow& row : rows) {
      std::vector<float> floats(spec.output_width);
      for (int64_t i = 0; i < spec.output_width; ++i) floats[i] = LoadFloat(row.dtype, row.data, i);
      std::copy(floats.begin(), floats.end(), static_cast<float*>(row.data));
    }
    for (int p = 0; p < plan->items(); ++p) {
      std::copy(output.begin() + plan->row_begin[p] * spec.output_width,
                output.begin() + plan->row_begin[p + 1] * spec.output_width,
                owners[plan->order[p]]->output.begin() + begin * spec.output_width);
    }
  }
  ::operator delete (memory, std::align_val_t{64});
}

void ExpectMatchesReference(const AttentionSpec& spec, DType kv_dtype, const Sequence& sequence,
                            DType compute) {
  Sequence stored = sequence;  // keys and values as the blocks hold them
  RoundRows(kv_dtype, spec.head_dim, stored.k);
  RoundRows(kv_dtype, spec.v_head_dim, stored.v);
  for (int64_t row = 0; row < sequence.rows; ++row) {
    for (int head = 0; head < spec.q_heads; ++head) {
      const ReferenceRow expected = Reference(spec, stored, compute, row, head);
      const float* actual = sequence.output.data() + (row * spec.q_heads + head) * spec.v_head_dim;
      for (int d = 0; d < spec.v_head_dim; ++d) {
        const bool same = std::isnan(expected.output[d])
                              ? std::isnan(actual[d])
                              : std::abs(actual[d] - expected.output[d]) <= expected.bound;
        ASSERT_TRUE(same) << "row " << row << " head " << head << " element " << d << ": got "
                          << actual[d] << ", wanted " << expected.output[d] << " within "
                          << expected.bound << "; keys " << sequence.keys;
      }
      if (row < sequence.weight_begin || row >= sequence.weight_end) continue;
      for (size_t h = 0; h < sequence.weight_heads.size(); ++h) {
        if (sequence.weight_heads[h] != head) continue;
        const int64_t asked = sequence.weight_end - sequence.weight_begin;
        const float* weights =
            sequence.weights.data() + (h * asked + row - sequence.weight_begin) * sequence.keys;
        for (int64_t j = 0; j < sequence.keys; ++j) {
          ASSERT_NEAR(weights[j], expected.weights[j], expected.bound) << "key " << j;
        }
      }
    }
  }
}

void ExpectNearUnquantised(const AttentionSpec& spec, const Sequence& sequence) {
  float most_k = 0, most_v = 0;
  for (float x : sequence.k) most_k = std::max(most_k, std::abs(x));
  for (float x : sequence.v) most_v = std::max(most_v, std::abs(x));
  for (int64_t row = 0; row < sequence.rows; ++row) {
    for (int head = 0; head < spec.q_heads; ++head) {
      const ReferenceRow exact = Reference(spec, sequence, DType::kF32, row, head);
      double q_sum = 0;
      for (int d = 0; d < spec.head_dim; ++d) {
        q_sum += std::abs(sequence.q[(row * spec.q_heads + head) * spec.head_dim + d]);
      }
      // A score moves by at most `moved`, so a weight by a factor within exp(2 moved).
      const double moved = spec.scale * q_sum * most_k / 254;
      const double bound = std::expm1(2 * moved) * most_v + most_v / 254 + 2 * exact.bound;
      for (int d = 0; d < spec.v_head_dim; ++d) {
        const size_t at = (row * spec.q_heads + head) * spec.v_head_dim + d;
        ASSERT_NEAR(sequence.output[at], exact.output[d], bound) << "row " << row;
      }
    }
  }
}

testing::AssertionResult SameFloats(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return testing::AssertionFailure() << a.size() << " and " << b.size();
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i])) {
      return testing::AssertionFailure() << "element " << i << ": " << a[i] << " and " << b[i];
    }
  }
  return testing::AssertionSuccess();
}

void RandomProblem(std::mt19937& random, AttentionSpec& spec, std::vector<Sequence>& sequences) {
  const auto uniform = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<float>& values, int64_t count) {
    values.resize(count);
    for (float& value : values) value = normal(random);
  };
  const int groups[] = {1, 2, 3, 4, 6, 8};
  spec.kv_heads = static_cast<int>(uniform(1, 2));
  spec.q_heads = spec.kv_heads * groups[uniform(0, 5)];
  spec.head_dim = static_cast<int>(uniform(1, 40));
  spec.v_head_dim = static_cast<int>(uniform(1, 40));
  spec.output_width = spec.q_heads * spec.v_head_dim;
  spec.scale = 1 / std::sqrt(double(spec.head_dim));
  if (uniform(0, 2) == 0) spec.window = uniform(1, 90);
  if (uniform(0, 2) == 0) spec.softcap = 2.5f;
  for (int h = 0; h < spec.q_heads && spec.window % 2 == 1; ++h) {
    spec.alibi_slopes.push_back(std::ldexp(1.0f, -h));
  }
  const bool sinks = uniform(0, 2) == 0;
  for (int h = 0; h < spec.q_heads && sinks; ++h) spec.sinks.push_back(normal(random));
  const int64_t count = uniform(1, 4);
  for (int64_t s = 0; s < count; ++s) {
    Sequence sequence;
    sequence.rows = uniform(1, 100);
    sequence.keys = uniform(1, uniform(0, 3) == 0 ? 2500 : 200);
    sequence.causal = uniform(0, 2) > 0;
    fill(sequence.q, sequence.rows * spec.q_heads * spec.head_dim);
    fill(sequence.k, sequence.keys * spec.kv_heads * spec.head_dim);
    fill(sequence.v, sequence.keys * spec.kv_heads * spec.v_head_dim);
    if (uniform(0, 1) == 0) {
      sequence.bias_columns = uniform(1, sequence.keys);
      sequence.bias_heads = uniform(0, 1) == 0 ? 1 : spec.q_heads;
      fill(sequence.bias, sequence.bias_heads * sequence.rows * sequence.bias_columns);
      for (float& value : sequence.bias) value = uniform(0, 3) == 0 ? -kInf : value;
    }
    if (uniform(0, 1) == 0) {
      sequence.weight_heads = {spec.q_heads - 1, 0};
      sequence.weight_begin = uniform(0, sequence.rows - 1);
      sequence.weight_end = uniform(sequence.weight_begin, sequence.rows);
    }
    sequences.push_back(sequence);
  }
}

}  // namespace attend
