// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/bench_case.h"

namespace attend::bench {
namespace {

// Of a [rows, columns] matrix; I8 has a scale for each output, F32.
double MatrixBytes(DType dtype, double rows, double columns) {
  const double scales = dtype == DType::kI8 ? rows * sizeof(float) : 0;
  return rows * columns * static_cast<double>(DTypeBytes(dtype)) + scales;
}

struct Widths {
  explicit Widths(const AttentionSpec& spec)
      : q(double{1} * spec.q_heads * spec.head_dim),
        k(double{1} * spec.kv_heads * spec.head_dim),
        v(double{1} * spec.kv_heads * spec.v_head_dim),
        heads(double{1} * spec.q_heads * spec.v_head_dim) {}
  double q, k, v, heads;
};

}  // namespace

int64_t BenchCase::rows() const {
  int64_t rows = 0;
  for (const SequenceShape& sequence : sequences) rows += sequence.rows;
  return rows;
}

std::vector<SequenceShape> Sequences(int64_t count, int64_t rows, int64_t keys) {
  return std::vector<SequenceShape>(static_cast<size_t>(count), SequenceShape{rows, keys});
}

double AttentionOperations(const BenchCase& bench) {
  const AttentionSpec& spec = bench.spec;
  double pairs = 0;  // (row, visible key)
  for (const SequenceShape& sequence : bench.sequences) {
    for (int64_t row = 0; row < sequence.rows; ++row) {
      const int64_t position = sequence.keys - sequence.rows + row;
      const KeyRange range = VisibleKeys(spec, spec.causal, position, sequence.keys);
      pairs += static_cast<double>(range.end - range.begin);
    }
  }
  return 2.0 * pairs * spec.q_heads * (spec.head_dim + spec.v_head_dim);
}

double ProjectionOperations(const BenchCase& bench) {
  const CaseWork work = WorkOf(bench);
  return work.project.operations + work.output.operations;
}

double KvBytes(const BenchCase& bench) {
  int64_t keys = 0;
  for (const SequenceShape& sequence : bench.sequences) keys += sequence.keys;
  return static_cast<double>(keys * GeometryOf(bench.spec, bench.kv_dtype).TokenBytes());
}

double WeightBytes(const BenchCase& bench) {
  if (bench.spec.raw()) return 0;
  const Widths widths(bench.spec);
  return MatrixBytes(bench.weight_dtype, widths.q + widths.k + widths.v, bench.spec.d_model) +
         MatrixBytes(bench.weight_dtype, bench.spec.output_width, widths.heads);
}

CaseWork WorkOf(const BenchCase& bench) {
  const AttentionSpec& spec = bench.spec;
  const Widths widths(spec);
  const auto rows = static_cast<double>(bench.rows());
  const auto element = static_cast<double>(DTypeBytes(bench.dtype));
  CaseWork work;
  work.attend.operations = AttentionOperations(bench);
  work.attend.bytes = KvBytes(bench);
  if (spec.raw()) {
    work.project.bytes = rows * (widths.q + widths.k + widths.v) * element;
    work.output.bytes = rows * widths.heads * element;
    return work;
  }
  const double output_weights = MatrixBytes(bench.weight_dtype, spec.output_width, widths.heads);
  work.project.operations = 2 * rows * (widths.q + widths.k + widths.v) * spec.d_model;
  work.project.bytes = WeightBytes(bench) - output_weights + rows * spec.d_model * element;
  work.output.operations = 2 * rows * widths.heads * spec.output_width;
  work.output.bytes = output_weights + rows * spec.output_width * element;
  return work;
}

}  // namespace attend::bench
