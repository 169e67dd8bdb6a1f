// SPDX-License-Identifier: Apache-2.0
#include "tests/support/reference_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

namespace attend {
namespace {

constexpr double kUnit = 0x1p-24;        // unit roundoff of float32
constexpr double kDeviations = 6;        // standard deviations a sum of roundings may be away
constexpr double kFunction = 8 * kUnit;  // relative error allowed to exp, tanh, 1/sqrt, sin, cos
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A rounding error spread evenly over +-1, at kDeviations.
const double kEvenRounding = kDeviations / std::sqrt(3.0);

// Unit roundoff and smallest subnormal of a 16-bit type; nothing for F32, whose roundings are part
// of every step's bound.
struct Rounding {
  explicit Rounding(DType dtype)
      : unit(dtype == DType::kBF16  ? 0x1p-8
             : dtype == DType::kF16 ? 0x1p-11
                                    : 0),
        subnormal(dtype == DType::kF16 ? 0x1p-24 : 0) {}
  double unit;
  double subnormal;  // BF16's are as small as float32's
};

double SumError(int64_t terms) { return kDeviations * std::sqrt(double(terms)) * kUnit; }

// A sum of products in double with the error of the same sum in float32.
struct Sum {
  double value = 0;
  double squares = 0;  // of the terms
  double carried = 0;  // squares of the terms' own errors
  int64_t terms = 0;

  void Add(double x, double dx, double y, double dy) {
    const double product = x * y;
    value += product;
    squares += product * product;
    carried += dx * dx * y * y + x * x * dy * dy;
    ++terms;
  }
  double Error() const {
    return SumError(terms) * (std::fabs(value) + std::sqrt(squares)) + std::sqrt(carried);
  }
};

BoundedRows Load(const InputRows& input, int64_t rows, int64_t columns) {
  BoundedRows loaded(rows, columns);
  for (int64_t i = 0; i < rows * columns; ++i)
    loaded.value[i] = LoadFloat(input.dtype, input.data, i);
  return loaded;
}

// What the rounding of a value with error `error` adds to later sums, at kDeviations. An error
// below a step makes the engine's value a step away or not at all: the variance is that of a step
// taken with the probability that the error reaches the boundary, `distance` away. A larger one
// stays and gets the difference of two even roundings, step^2 / 6.
double CarriedError(double error, double step, double distance) {
  if (error >= step) return std::hypot(error, kDeviations * step / std::sqrt(6.0));
  const double probability = std::erfc(kDeviations * distance / (error * std::sqrt(2.0)));
  return step * std::max(1.0, kDeviations * std::sqrt(probability));
}

// Rounds every `group` consecutive elements of a row to int8 multiples of their largest magnitude /
// 127; all become NaN when one is not finite. As Round below otherwise.
BoundedRows RoundToI8(int64_t group, BoundedRows& x) {
  BoundedRows carried = x;
  for (size_t begin = 0; begin < x.value.size(); begin += static_cast<size_t>(group)) {
    double largest = 0, largest_error = 0;
    for (size_t i = begin; i < begin + static_cast<size_t>(group); ++i) {
      const double magnitude = std::isfinite(x.value[i]) ? std::fabs(x.value[i]) : NAN;
      if (!(magnitude <= largest)) largest = std::isnan(largest) ? largest : magnitude;
      largest_error = std::max(largest_error, x.error[i]);
    }
    const double step = static_cast<float>(static_cast<float>(largest) / 127.0f);
    const double step_error = largest_error / 127 + 2 * kUnit * step;
    for (size_t i = begin; i < begin + static_cast<size_t>(group); ++i) {
      const double steps = step == 0 ? 0 : std::nearbyint(x.value[i] / step);
      // In value / step, an error of the step counts, too.
      const double error = x.error[i] + std::fabs(steps) * step_error;
      const double distance = std::max(0.0, step / 2 - std::fabs(x.value[i] - steps * step));
      x.value[i] = carried.value[i] = steps * step;
      const double scale_error = std::fabs(steps) * step_error;
      x.error[i] = scale_error + (error >= distance ? 2 * (step + error) : 0);
      carried.error[i] = error > 0 ? scale_error + CarriedError(error, step, distance) : 0;
    }
  }
  return carried;
}

// Rounds to `dtype`. `x` becomes the rounded values, its bound how far another correct rounding may
// be (twice: all of it, and the comparer's own); returned is what later sums compute with. `group`
// elements share a scale of I8.
BoundedRows Round(DType dtype, int64_t group, BoundedRows& x) {
  if (dtype == DType::kF32) return x;  // its roundings are part of every step's bound
  if (dtype == DType::kI8) return RoundToI8(group, x);
  const Rounding rounding(dtype);
  BoundedRows carried = x;
  for (size_t i = 0; i < x.value.size(); ++i) {
    const double value = x.value[i], error = x.error[i];
    const double rounded = RoundTo(dtype, value);
    const double reach =
        std::max(rounded - RoundTo(dtype, value - error), RoundTo(dtype, value + error) - rounded);
    x.value[i] = carried.value[i] = rounded;
    x.error[i] = carried.error[i] = 0;
    if (!std::isfinite(rounded) || !(reach > 0)) continue;
    const double spacing =
        rounded == 0 ? reach : std::ldexp(2 * rounding.unit, std::ilogb(rounded));
    const double step = std::max(spacing, rounding.subnormal);
    const double distance = std::max(0.0, step / 2 - std::fabs(value - rounded));
    x.error[i] = 2 * reach;
    carried.error[i] = CarriedError(error, step, distance);
  }
  return carried;
}

// What operands cut or rounded to TF32 add to a sum of products, whichever the engine does. With
// t = 2^-11, a rounded operand is off by +-t evenly; one that is cut by 0 to -2t, evenly around -t.
double Tf32Error(const Sum& sum) {
  constexpr double kUnitTf32 = 0x1p-11;
  return kUnitTf32 *
         (2 * std::fabs(sum.value) + kEvenRounding * std::sqrt(2.0) * std::sqrt(sum.squares));
}

// y = x W^T + b.
BoundedRows Project(const ReferenceNumerics& numerics, const BoundedRows& x,
                    const WeightView& matrix, const WeightView& bias) {
  BoundedRows y(x.rows, matrix.rows);
  BoundedRows weights(matrix.rows, matrix.columns);
  for (int64_t o = 0; o < matrix.rows; ++o) {
    for (int64_t i = 0; i < matrix.columns; ++i) {
      weights.value[o * matrix.columns + i] = matrix.At(o, i);
    }
  }
  if (numerics.compute_dtype == DType::kI8) weights = RoundToI8(matrix.columns, weights);
  const std::vector<double>&w = weights.value, &dw = weights.error;
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t o = 0; o < matrix.rows; ++o) {
      Sum sum;
      sum.Add(bias.present() ? bias.At(o, 0) : 0, 0, 1, 0);
      for (int64_t i = 0; i < x.columns; ++i) {
        sum.Add(x.value[r * x.columns + i], x.error[r * x.columns + i], w[o * x.columns + i],
                dw[o * x.columns + i]);
      }
      y.value[r * y.columns + o] = sum.value;
      y.error[r * y.columns + o] = sum.Error();
      if (numerics.tf32 && numerics.compute_dtype == DType::kF32) {
        y.error[r * y.columns + o] += Tf32Error(sum);
      }
    }
  }
  return y;
}

void Clip(double limit, BoundedRows& x) {
  if (limit <= 0) return;
  for (double& value : x.value) {
    if (!std::isnan(value)) value = std::clamp(value, -limit, limit);
  }
}

// x <- x w / sqrt(mean(x^2) + eps) for every head.
void NormHeads(const AttentionSpec& spec, const WeightView& weight, BoundedRows& x) {
  if (spec.qk_norm == QkNorm::kNone) return;
  const int64_t dim = spec.head_dim;
  for (int64_t head = 0; head < x.rows * x.columns / dim; ++head) {
    double* value = &x.value[head * dim];
    double* error = &x.error[head * dim];
    double squares = 0, carried = 0;
    for (int64_t d = 0; d < dim; ++d) {
      squares += value[d] * value[d];
      carried += value[d] * value[d] * error[d] * error[d];
    }
    const double mean = squares / double(dim) + double(spec.qk_norm_eps);
    const double factor = 1 / std::sqrt(mean);
    // d(1/sqrt(m)) = -dm / (2 m) / sqrt(m), dm = 2 sum |x| dx / dim.
    const double factor_error = std::sqrt(carried) / double(dim) / mean + SumError(dim) + kFunction;
    for (int64_t d = 0; d < dim; ++d) {
      const double w = weight.present() ? weight.At(d, 0) : 1;
      error[d] =
          std::fabs(w) * factor * (error[d] + std::fabs(value[d]) * (factor_error + 3 * kUnit));
      value[d] *= factor * w;
    }
  }
}

void Rotate(const RopeSpec& rope, int64_t head_dim, int64_t first_position, BoundedRows& x) {
  if (rope.dim == 0) return;
  const int64_t heads = x.columns / head_dim;
  const bool half = rope.pairing == RopePairing::kHalf;
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t pair = 0; pair < rope.dim / 2; ++pair) {
      const double angle = double(first_position + r) * rope.inverse_frequency[pair];
      const double c = std::cos(angle) * rope.attention_factor;
      const double s = std::sin(angle) * rope.attention_factor;
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t base = r * x.columns + head * head_dim;
        const int64_t i = base + (half ? pair : 2 * pair);
        const int64_t j = base + (half ? pair + rope.dim / 2 : 2 * pair + 1);
        const double a = x.value[i], b = x.value[j];
        const double da = x.error[i], db = x.error[j];
        const double rounding = std::fabs(rope.attention_factor) * (std::fabs(a) + std::fabs(b)) *
                                (kFunction + 2 * kUnit);
        x.value[i] = a * c - b * s;
        x.value[j] = b * c + a * s;
        x.error[i] = std::hypot(c * da, s * db) + rounding;
        x.error[j] = std::hypot(c * db, s * da) + rounding;
      }
    }
  }
}

// One (head, row): scores, then softmax in place.
class RowOfScores {
 public:
  RowOfScores(const AttentionSpec& spec, const ReferenceSequence& sequence, int64_t head,
              int64_t row)
      : spec_(spec), sequence_(sequence), head_(head), row_(row) {}

  void AddKey(const BoundedRows& q, const BoundedRows& k, int64_t key) {
    const int64_t from_q = row_ * q.columns + head_ * spec_.head_dim;
    const int64_t from_k = key * k.columns + head_ / spec_.group_size() * spec_.head_dim;
    Sum dot;
    for (int64_t d = 0; d < spec_.head_dim; ++d) {
      dot.Add(q.value[from_q + d], q.error[from_q + d], k.value[from_k + d], k.error[from_k + d]);
    }
    // 4 u |s|: scale, and a change of the base of exp.
    double score = spec_.scale * dot.value;
    double error = std::fabs(spec_.scale) * dot.Error() + 4 * kUnit * std::fabs(score);
    if (spec_.softcap > 0) {
      const double cap = spec_.softcap;
      score = cap * std::tanh(score / cap);
      error = error + cap * kFunction;
    }
    double added = 0;
    if (!spec_.alibi_slopes.empty()) {
      double distance = double(key - (sequence_.first_row + row_));
      if (!sequence_.causal) distance = -std::fabs(distance);
      added += spec_.alibi_slopes[head_] * distance;
      error += 4 * kUnit * std::fabs(added);
    }
    const double bias = Bias(key);
    if (bias == -kInfinity) return;
    added += bias;
    score += added;
    error += 4 * kUnit * (std::fabs(score) + std::fabs(added));
    keys_.push_back(key);
    score_.push_back(score);
    error_.push_back(error);
  }

  // Probabilities p and their relative errors. With p = exp(s - m) / sum: dp/p <= ds + |sum(p ds)|
  // + what exp, the sum and the rescaling of partial sums add.
  void Softmax() {
    double maximum = -kInfinity;
    for (double score : score_) {
      if (std::isnan(score)) maximum = score;
      if (!std::isnan(maximum)) maximum = std::max(maximum, score);
    }
    const bool sink = !spec_.sinks.empty();
    if (sink) maximum = std::max(maximum, double(spec_.sinks[head_]));
    double sum = sink ? std::exp(double(spec_.sinks[head_]) - maximum) : 0;
    for (double& score : score_) {
      const double shifted = score - maximum;
      score = std::exp(shifted);
      sum += score;
    }
    double carried = 0;
    for (size_t i = 0; i < score_.size(); ++i) {
      score_[i] /= sum;
      carried += score_[i] * error_[i] * score_[i] * error_[i];
    }
    const int64_t count = int64_t(score_.size()) + 1;
    const double rounding = kFunction * (1 + std::sqrt(double(count) / 16)) + SumError(count);
    for (double& error : error_) error += std::sqrt(carried) + rounding;
  }

  const std::vector<int64_t>& keys() const { return keys_; }
  const std::vector<double>& p() const { return score_; }
  const std::vector<double>& relative_error() const { return error_; }

 private:
  double Bias(int64_t key) const {
    const BiasView& bias = sequence_.bias;
    const int64_t column = key - bias.first_key;
    if (bias.data == nullptr || column < 0 || column >= bias.columns) return 0;
    return bias.data[head_ * bias.head_stride + row_ * bias.row_stride + column];
  }

  const AttentionSpec& spec_;
  const ReferenceSequence& sequence_;
  int64_t head_, row_;
  std::vector<int64_t> keys_;  // visible
  std::vector<double> score_, error_;
};

// Head `kv_head`'s element `d` of the weighted sum of values, and how far off it may be when every
// weight is rounded. Weights are at most 1 before the engine divides by their sum, so the smallest
// subnormal counts relative to the largest weight.
std::pair<double, double> WeightedSum(const RowOfScores& scores, const Rounding& rounding,
                                      const BoundedRows& v, int64_t column) {
  double largest = 0;
  for (double p : scores.p()) largest = std::max(largest, p);
  Sum sum;
  double squares = 0, most = 0;  // of the roundings
  for (size_t i = 0; i < scores.keys().size(); ++i) {
    const int64_t from = scores.keys()[i] * v.columns + column;
    const double p = scores.p()[i];
    sum.Add(p, p * scores.relative_error()[i], v.value[from], v.error[from]);
    const double step = std::max(p * rounding.unit, largest * rounding.subnormal / 2);
    const double rounded = step * std::fabs(v.value[from]);
    squares += rounded * rounded;
    most += rounded;
  }
  return {sum.value, sum.Error() + std::min(most, kEvenRounding * std::sqrt(squares))};
}

BoundedRows RoundQueries(const AttentionSpec& spec, const ReferenceNumerics& numerics,
                         BoundedRows q) {
  const double scale = numerics.scale_first ? spec.scale : 1;
  const auto times = [&q](double factor) {
    for (double& value : q.value) value *= factor;
    for (double& error : q.error) error *= std::fabs(factor);
  };
  if (scale == 0 || numerics.attend_dtype == DType::kF32) return q;
  times(scale);
  q = Round(numerics.attend_dtype, spec.head_dim, q);
  times(1 / scale);
  return q;
}

BoundedRows Attend(const AttentionSpec& spec, const ReferenceNumerics& numerics,
                   const ReferenceSequence& sequence, const BoundedRows& q, const BoundedRows& k,
                   const BoundedRows& v, BoundedRows& weights) {
  const Rounding rounding(numerics.attend_dtype);
  const int64_t v_dim = spec.v_head_dim;
  BoundedRows heads(sequence.rows, spec.q_heads * v_dim);
  if (sequence.weights) {
    weights = BoundedRows(spec.q_heads * sequence.rows, sequence.keys);
  }
  for (int64_t head = 0; head < spec.q_heads; ++head) {
    const int64_t kv_head = head / spec.group_size();
    for (int64_t row = 0; row < sequence.rows; ++row) {
      RowOfScores scores(spec, sequence, head, row);
      for (int64_t key = 0; key < sequence.keys; ++key) {
        if (!ReferenceVisible(spec, sequence.causal, sequence.first_row + row, key)) continue;
        scores.AddKey(q, k, key);
      }
      scores.Softmax();
      for (int64_t d = 0; d < v_dim; ++d) {
        const int64_t to = row * heads.columns + head * v_dim + d;
        std::tie(heads.value[to], heads.error[to]) =
            WeightedSum(scores, rounding, v, kv_head * v_dim + d);
      }
      if (!sequence.weights) continue;
      for (size_t i = 0; i < scores.keys().size(); ++i) {
        const int64_t cell = (head * sequence.rows + row) * sequence.keys + scores.keys()[i];
        weights.value[cell] = scores.p()[i];
        weights.error[cell] = std::min(scores.p()[i] * scores.relative_error()[i], 1.0);
      }
    }
  }
  return heads;
}

}  // namespace

bool ReferenceVisible(const AttentionSpec& spec, bool causal, int64_t position, int64_t key) {
  if (causal && key > position) return false;
  if (spec.window == 0) return true;
  const int64_t distance = key > position ? key - position : position - key;
  return distance < spec.window;
}

double RoundTo(DType dtype, double value) {
  // Through float first: a double rounding, as the engine rounds its float32 values.
  float stored = static_cast<float>(value);
  if (dtype == DType::kBF16) stored = FloatFromBF16(BF16FromFloat(stored));
  if (dtype == DType::kF16) stored = FloatFromF16(F16FromFloat(stored));
  return stored;
}

ReferenceResult ReferenceAttention(const AttentionSpec& spec, const LayerWeights& weights,
                                   const ReferenceNumerics& numerics,
                                   const ReferenceSequence& sequence) {
  ReferenceResult result;
  if (spec.raw()) {
    BoundedRows q = Load(sequence.query, sequence.rows, spec.q_heads * spec.head_dim);
    result.keys = Load(sequence.key_source, sequence.keys, spec.kv_heads * spec.head_dim);
    result.values = Load(sequence.value_source, sequence.keys, spec.kv_heads * spec.v_head_dim);
    const BoundedRows k = Round(numerics.kv_dtype, spec.head_dim, result.keys);
    const BoundedRows v = Round(numerics.kv_dtype, spec.v_head_dim, result.values);
    q = RoundQueries(spec, numerics, q);
    result.output = Attend(spec, numerics, sequence, q, k, v, result.weights);
    return result;
  }
  BoundedRows x = Load(sequence.query, sequence.rows, spec.d_model);
  BoundedRows source = Load(sequence.key_source, sequence.keys, spec.context_width);
  Round(numerics.compute_dtype, spec.d_model, x);
  Round(numerics.compute_dtype, spec.context_width, source);
  BoundedRows q = Project(numerics, x, weights.q, weights.q_bias);
  result.keys = Project(numerics, source, weights.k, weights.k_bias);
  result.values = Project(numerics, source, weights.v, weights.v_bias);
  for (BoundedRows* rows : {&q, &result.keys, &result.values}) Clip(spec.clip_qkv, *rows);
  NormHeads(spec, weights.q_norm, q);
  NormHeads(spec, weights.k_norm, result.keys);
  Rotate(spec.rope, spec.head_dim, sequence.first_row, q);
  Rotate(spec.rope, spec.head_dim, 0, result.keys);
  const BoundedRows k = Round(numerics.kv_dtype, spec.head_dim, result.keys);
  const BoundedRows v = Round(numerics.kv_dtype, spec.v_head_dim, result.values);
  q = RoundQueries(spec, numerics, q);
  BoundedRows heads = Attend(spec, numerics, sequence, q, k, v, result.weights);
  heads = Round(numerics.compute_dtype, heads.columns, heads);
  result.output = Project(numerics, heads, weights.o, weights.o_bias);
  return result;
}

}  // namespace attend
