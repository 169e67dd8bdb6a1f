// SPDX-License-Identifier: Apache-2.0
//
// The oracle: textbook attention of one sequence through one layer, in double and in plain loops,
// without blocks, tiles or online softmax. Next to every value it carries how far a correct float32
// engine may be from it. Tests compare engines with it; it knows no engine.
//
// Error model. Bounds are computed, never tuned per test. u = 2^-24 is the unit roundoff of
// float32.
//   Roundings are taken as independent and of zero mean (Higham and Mary, "A new approach to
//   probabilistic rounding error analysis", 2019), so errors add in quadrature. The partial sums of
//   n terms t with sum S stay near |S| + R, R = sqrt(sum t^2), in any order that does not depend on
//   the values, so a sum is off by at most kDeviations * sqrt(n) * u * (|S| + R), plus what its
//   terms were off by. A rounding to a 16-bit type is done here too, on the same operand; the
//   engine's differs only where the operand's own error can carry it over a rounding boundary, and
//   by that step.
//   Weights of values that an engine rounds to a 16-bit type of unit roundoff w (2^-8 for BF16,
//   2^-11 for F16) are rounded relative to a running maximum that only the engine knows. So the
//   rounding itself is an error here: spread evenly over +-w, standard deviation w / sqrt(3), and
//   independent from key to key; and never more than w of every term together.
//   Tensor cores cut bits off instead of rounding, about once per 16 terms: n / 8 units of u, all
//   of one sign at worst, which stays below 6 sqrt(n) for n <= 2304 terms.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/attention_plan.h"
#include "engine/layer_weights.h"

namespace attend {

// Row-major values, each with its error bound.
struct BoundedRows {
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<double> value;
  std::vector<double> error;

  BoundedRows() = default;
  BoundedRows(int64_t rows, int64_t columns)
      : rows(rows),
        columns(columns),
        value(static_cast<size_t>(rows * columns)),
        error(static_cast<size_t>(rows * columns)) {}
};

// All of one sequence, its whole history at once.
struct ReferenceSequence {
  int64_t rows = 0;
  InputRows query;        // [rows, d_model]; raw: [rows, q_heads, head_dim]
  int64_t first_row = 0;  // absolute position of row 0
  int64_t keys = 0;
  InputRows key_source;    // [keys, context_width]; raw: [keys, kv_heads, head_dim]
  InputRows value_source;  // raw: [keys, kv_heads, v_head_dim]
  bool causal = false;
  BiasView bias;
  bool weights = false;  // ReferenceResult.weights is wanted
};

// In which types an engine keeps and multiplies. F32 = float32 throughout; I8 as in
// engine/kv_geometry.h, for products with one scale per input row and one per output.
struct ReferenceNumerics {
  DType kv_dtype = DType::kF32;
  DType compute_dtype = DType::kF32;  // of both operands of every projection
  DType attend_dtype = DType::kF32;   // of queries and of the weights of values
  bool scale_first = false;           // queries are rounded to attend_dtype after their scale
  bool tf32 = false;                  // F32 projections keep 10 bits of their operands' mantissas
};

struct ReferenceResult {
  BoundedRows keys;     // [keys, kv_heads * head_dim], as stored
  BoundedRows values;   // [keys, kv_heads * v_head_dim], as stored
  BoundedRows weights;  // [q_heads * rows, keys], not rounded; empty when not wanted
  BoundedRows output;   // [rows, output_width]
};

// `weights` is not read when the spec is raw.
ReferenceResult ReferenceAttention(const AttentionSpec& spec, const LayerWeights& weights,
                                   const ReferenceNumerics& numerics,
                                   const ReferenceSequence& sequence);

// Whether a row at absolute position `position` sees key `key`, before bias.
bool ReferenceVisible(const AttentionSpec& spec, bool causal, int64_t position, int64_t key);

// `value` as it reads back from an array of `dtype`.
double RoundTo(DType dtype, double value);

}  // namespace attend
