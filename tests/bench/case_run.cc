// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/case_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <random>

#include "engine/util/status_macros.h"
#include "tests/bench/random_rows.h"

namespace attend::bench {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

int64_t BlocksOf(int64_t keys) { return (keys + kBlockTokens - 1) / kBlockTokens; }

int64_t BlocksOf(const BenchCase& bench) {
  int64_t blocks = 0;
  for (const SequenceShape& shape : bench.sequences) blocks += BlocksOf(shape.keys);
  return blocks * bench.sets;
}

// Matrices of variance 1.3^2 / fan-in, so that softmax rows are neither flat nor one-hot; biases.
class RandomLayer {
 public:
  RandomLayer(const BenchCase& bench, uint64_t seed) : dtype_(bench.dtype), seed_(seed) {
    const AttentionSpec& spec = bench.spec;
    weights_.q = Matrix(int64_t{spec.q_heads} * spec.head_dim, spec.d_model);
    weights_.k = Matrix(int64_t{spec.kv_heads} * spec.head_dim, spec.context_width);
    weights_.v = Matrix(int64_t{spec.kv_heads} * spec.v_head_dim, spec.context_width);
    weights_.o = Matrix(spec.output_width, int64_t{spec.q_heads} * spec.v_head_dim);
    weights_.q_bias = Vector(weights_.q.rows);
    weights_.k_bias = Vector(weights_.k.rows);
    weights_.v_bias = Vector(weights_.v.rows);
    weights_.o_bias = Vector(weights_.o.rows);
  }
  const LayerWeights& weights() const { return weights_; }

 private:
  WeightView Matrix(int64_t rows, int64_t columns) {
    const double scale = 1.3 / std::sqrt(static_cast<double>(columns));
    tensors_.push_back(RandomRows(dtype_, rows * columns, seed_++, scale));
    return {tensors_.back().data(), dtype_, rows, columns, columns, 1};
  }
  WeightView Vector(int64_t rows) {
    tensors_.push_back(RandomRows(dtype_, rows, seed_++, 0.3));
    return {tensors_.back().data(), dtype_, rows, 1, 1, 1};
  }

  const DType dtype_;
  uint64_t seed_;
  std::vector<std::vector<std::byte>> tensors_;  // the views point to the elements, not to these
  LayerWeights weights_;
};

}  // namespace

absl::StatusOr<std::vector<LayerInfo>> AddLayers(AttentionEngine& engine, const BenchCase& bench,
                                                 uint64_t seed) {
  std::vector<LayerInfo> layers(static_cast<size_t>(bench.sets));
  if (bench.spec.raw()) return layers;
  const RandomLayer layer(bench, seed);
  for (LayerInfo& info : layers) {
    ASSIGN_OR_RETURN(info, engine.AddLayer(bench.spec, layer.weights()));
  }
  return layers;
}

int64_t KvMemory(const BenchCase& bench) {
  return BlocksOf(bench) * GeometryOf(bench.spec, bench.kv_dtype).BlockBytes();
}

CaseRun::CaseRun(AttentionEngine& engine, const BenchCase& bench,
                 const std::vector<LayerInfo>& layers, uint64_t seed)
    : engine_(engine), bench_(bench) {
  for (const LayerInfo& layer : layers) layers_.push_back(layer.index);
  const AttentionSpec& spec = bench.spec;
  for (const SequenceShape& shape : bench.sequences) {
    const int64_t first_row =
        sequences_.empty() ? 0 : sequences_.back().first_row + sequences_.back().shape.rows;
    sequences_.push_back({shape, first_row, {}});
    most_cached_ = std::max(most_cached_, sequences_.back().cached());
  }
  const int64_t rows = bench.rows();
  const int64_t width = spec.raw() ? int64_t{spec.q_heads} * spec.head_dim : spec.d_model;
  query_ = RandomRows(bench.dtype, rows * width, seed);
  if (spec.raw()) {
    key_ = RandomRows(bench.dtype, rows * spec.kv_heads * spec.head_dim, seed + 1);
    value_ = RandomRows(bench.dtype, rows * spec.kv_heads * spec.v_head_dim, seed + 2);
  }
  if (most_cached_ > 0) {
    cached_ = RandomKv(GeometryOf(spec, bench.kv_dtype), most_cached_, seed + 3);
  }
  output_.resize(static_cast<size_t>(rows * spec.output_width * DTypeBytes(bench.dtype)));
  PlaceBlocks(seed + 4);
}

void CaseRun::PlaceBlocks(uint64_t seed) {
  const int64_t block_bytes = GeometryOf(bench_.spec, bench_.kv_dtype).BlockBytes();
  std::vector<int64_t> places(static_cast<size_t>(BlocksOf(bench_)));
  for (size_t i = 0; i < places.size(); ++i) places[i] = static_cast<int64_t>(i) * block_bytes;
  std::mt19937_64 random(seed);
  std::shuffle(places.begin(), places.end(), random);
  auto next = places.begin();
  for (int set = 0; set < bench_.sets; ++set) {
    for (Sequence& sequence : sequences_) {
      const auto end = next + BlocksOf(sequence.shape.keys);
      sequence.blocks.emplace_back(next, end);
      next = end;
    }
  }
}

absl::Status CaseRun::FillCaches() {
  if (most_cached_ == 0) return absl::OkStatus();
  const KvGeometry geometry = GeometryOf(bench_.spec, bench_.kv_dtype);
  const auto longest = std::max_element(
      sequences_.begin(), sequences_.end(),
      [](const Sequence& a, const Sequence& b) { return a.cached() < b.cached(); });
  const std::vector<int64_t>& from = longest->blocks.front();
  RETURN_IF_ERROR(engine_.WriteKv({geometry, from, 0, most_cached_}, cached_));
  std::vector<BlockCopy> copies;
  for (const Sequence& sequence : sequences_) {
    for (const std::vector<int64_t>& to : sequence.blocks) {
      if (&to == &from) continue;
      for (size_t block = 0; block < static_cast<size_t>(BlocksOf(sequence.cached())); ++block) {
        copies.push_back({from[block], to[block], geometry.BlockBytes()});
      }
    }
  }
  return engine_.CopyBlocks(copies);
}

std::vector<AttendItem> CaseRun::Items(int set) {
  const AttentionSpec& spec = bench_.spec;
  const auto at = [&](std::vector<std::byte>& tensor, int64_t row, int64_t width) {
    return tensor.data() + row * width * DTypeBytes(bench_.dtype);
  };
  std::vector<AttendItem> items;
  for (const Sequence& sequence : sequences_) {
    AttendItem item;
    item.group = static_cast<int32_t>(items.size());
    item.rows = item.new_keys = sequence.shape.rows;
    item.first_row = item.cached_keys = sequence.cached();
    const int64_t width = spec.raw() ? int64_t{spec.q_heads} * spec.head_dim : spec.d_model;
    item.query = {at(query_, sequence.first_row, width), bench_.dtype};
    item.key_source = item.query;
    if (spec.raw()) {
      item.key_source = {at(key_, sequence.first_row, int64_t{spec.kv_heads} * spec.head_dim),
                         bench_.dtype};
      item.value_source = {at(value_, sequence.first_row, int64_t{spec.kv_heads} * spec.v_head_dim),
                           bench_.dtype};
    }
    item.causal = spec.causal;
    item.blocks = sequence.blocks[static_cast<size_t>(set)];
    item.output = at(output_, sequence.first_row, spec.output_width);
    item.output_dtype = bench_.dtype;
    items.push_back(item);
  }
  return items;
}

absl::StatusOr<StepTimes> CaseRun::Step(int set) {
  std::fill(output_.begin(), output_.end(), std::byte{0xff});  // NaN of every type
  const std::vector<AttendItem> items = Items(set);
  ASSIGN_OR_RETURN(const BatchPlan plan, BuildPlan(layers_[static_cast<size_t>(set)], bench_.spec,
                                                   bench_.kv_dtype, items));
  const auto begin = Clock::now();
  ASSIGN_OR_RETURN(const Ticket ticket, engine_.Start(plan, items));
  ASSIGN_OR_RETURN(const StageTimes stages, engine_.Wait(ticket));
  return StepTimes{stages, 1e6 * SecondsSince(begin)};
}

bool CaseRun::OutputIsFinite() const {
  const int64_t count = static_cast<int64_t>(output_.size()) / DTypeBytes(bench_.dtype);
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(LoadFloat(bench_.dtype, output_.data(), i))) return false;
  }
  return true;
}

double CaseRun::Key(const Sequence& sequence, int64_t key, int kv_head, int i) const {
  const AttentionSpec& spec = bench_.spec;
  const bool cached = key < sequence.cached();
  const int64_t row = cached ? key : sequence.first_row + key - sequence.cached();
  return LoadFloat(cached ? bench_.kv_dtype : bench_.dtype, (cached ? cached_ : key_).data(),
                   (row * spec.kv_heads + kv_head) * spec.head_dim + i);
}

double CaseRun::Value(const Sequence& sequence, int64_t key, int kv_head, int i) const {
  const AttentionSpec& spec = bench_.spec;
  const bool cached = key < sequence.cached();
  const int64_t row = cached ? key : sequence.first_row + key - sequence.cached();
  const int64_t before = cached ? most_cached_ * spec.kv_heads * spec.head_dim : 0;
  return LoadFloat(cached ? bench_.kv_dtype : bench_.dtype, (cached ? cached_ : value_).data(),
                   before + (row * spec.kv_heads + kv_head) * spec.v_head_dim + i);
}

std::vector<double> CaseRun::Expected(const Sequence& sequence, int64_t row, int head) const {
  const AttentionSpec& spec = bench_.spec;
  const int kv_head = head / spec.group_size();
  const KeyRange range =
      VisibleKeys(spec, spec.causal, sequence.cached() + row, sequence.shape.keys);
  const int64_t query = ((sequence.first_row + row) * spec.q_heads + head) * spec.head_dim;
  std::vector<double> scores;
  for (int64_t key = range.begin; key < range.end; ++key) {
    double score = 0;
    for (int i = 0; i < spec.head_dim; ++i) {
      score += LoadFloat(bench_.dtype, query_.data(), query + i) * Key(sequence, key, kv_head, i);
    }
    scores.push_back(score * spec.scale);
  }
  const double max = *std::max_element(scores.begin(), scores.end());
  std::vector<double> expected(static_cast<size_t>(spec.v_head_dim), 0.0);
  double sum = 0;
  for (int64_t key = range.begin; key < range.end; ++key) {
    const double weight = std::exp(scores[static_cast<size_t>(key - range.begin)] - max);
    sum += weight;
    for (int i = 0; i < spec.v_head_dim; ++i) {
      expected[static_cast<size_t>(i)] += weight * Value(sequence, key, kv_head, i);
    }
  }
  for (double& value : expected) value /= sum;
  return expected;
}

double CaseRun::SampledError() const {
  const AttentionSpec& spec = bench_.spec;
  std::mt19937_64 random(7);
  const auto below = [&](int64_t end) {
    return std::uniform_int_distribution<int64_t>(0, end - 1)(random);
  };
  double difference = 0, norm = 0;
  for (int sample = 0; sample < 16; ++sample) {
    // The first and the last of everything, then any.
    const Sequence& sequence =
        sample % 2 == 0
            ? sequences_.back()
            : sequences_[static_cast<size_t>(below(static_cast<int64_t>(sequences_.size())))];
    const int64_t rows = sequence.shape.rows;
    const int64_t row = sample == 0 ? 0 : sample == 1 ? rows - 1 : below(rows);
    const int head = static_cast<int>(below(spec.q_heads));
    const std::vector<double> expected = Expected(sequence, row, head);
    for (int i = 0; i < spec.v_head_dim; ++i) {
      const int64_t index =
          ((sequence.first_row + row) * spec.q_heads + head) * spec.v_head_dim + i;
      const double value = LoadFloat(bench_.dtype, output_.data(), index);
      const double wanted = expected[static_cast<size_t>(i)];
      difference += (value - wanted) * (value - wanted);
      norm += wanted * wanted;
    }
  }
  return std::sqrt(difference / norm);
}

Quantiles QuantilesOf(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
  };
  return {at(0.5), values.front(), values.back(), at(0.25), at(0.75)};
}

absl::StatusOr<CaseTimes> Measure(CaseRun& run, int sets, const Effort& effort) {
  std::vector<double> wall, project, attend, output;
  const auto begin = Clock::now();
  for (int repeat = -effort.warm_ups; repeat < effort.repeats; ++repeat) {
    const bool late = SecondsSince(begin) > effort.most_seconds;
    if (late && repeat >= effort.least_repeats) break;
    if (late && repeat < 0) repeat = 0;
    for (int set = 0; set < sets; ++set) {
      ASSIGN_OR_RETURN(const StepTimes step, run.Step(set));
      if (repeat < 0) continue;
      wall.push_back(step.wall_us);
      project.push_back(static_cast<double>(step.stages.project_us));
      attend.push_back(static_cast<double>(step.stages.attend_us));
      output.push_back(static_cast<double>(step.stages.output_us));
    }
  }
  CaseTimes times{.samples = static_cast<int>(wall.size()), .wall_us = QuantilesOf(wall)};
  times.project_us = QuantilesOf(project).median;
  times.attend_us = QuantilesOf(attend).median;
  times.output_us = QuantilesOf(output).median;
  return times;
}

}  // namespace attend::bench
