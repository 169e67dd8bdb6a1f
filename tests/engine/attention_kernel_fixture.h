// SPDX-License-Identifier: Apache-2.0
//
// Harness of the CPU attention stage's tests: runs sequences of raw queries, keys and values
// through AppendAndAttend, and knows what a textbook softmax in double gives for them.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "engine/attention_spec.h"
#include "engine/cpu/attention_kernel.h"
#include "engine/cpu/attention_workspace.h"
#include "engine/cpu/cpu_info.h"

namespace attend {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One sequence: the last `rows` of its keys' positions query all keys.
struct Sequence {
  int64_t rows = 0;
  int64_t keys = 0;
  bool causal = true;
  int block_tokens = kBlockTokens;
  std::vector<float> q, k, v;
  std::vector<float> bias;  // [bias_heads, rows, bias_columns], right-aligned
  int64_t bias_heads = 1;
  int64_t bias_columns = 0;
  std::vector<int32_t> weight_heads;
  int64_t weight_begin = 0;
  int64_t weight_end = 0;

  // Results.
  std::vector<float> output;   // [rows, q_heads, v_head_dim]
  std::vector<float> weights;  // [heads, asked rows, keys]
};

class AttentionKernelTest : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    const CpuInfo cpu = DetectCpu();
    if (GetParam() == CpuIsa::kAvx512 && !cpu.avx512) GTEST_SKIP() << "this CPU has no AVX-512";
    if (!cpu.avx2) GTEST_SKIP() << "this CPU has no AVX2";
    RecordProperty("seed", kSeed);
  }

  AttentionSpec MakeSpec(int q_heads, int kv_heads, int head_dim, int v_head_dim) {
    AttentionSpec spec;
    spec.q_heads = q_heads;
    spec.kv_heads = kv_heads;
    spec.head_dim = head_dim;
    spec.v_head_dim = v_head_dim;
    spec.output_width = q_heads * v_head_dim;
    spec.scale = 1 / std::sqrt(double(head_dim));
    return spec;
  }

  std::vector<float> RandomFloats(int64_t count, float amplitude = 1) {
    std::normal_distribution<float> normal(0, amplitude);
    std::vector<float> values(count);
    for (float& value : values) value = normal(random_);
    return values;
  }

  Sequence MakeSequence(const AttentionSpec& spec, int64_t rows, int64_t keys) {
    Sequence sequence;
    sequence.rows = rows;
    sequence.keys = keys;
    sequence.q = RandomFloats(rows * spec.q_heads * spec.head_dim);
    sequence.k = RandomFloats(keys * spec.kv_heads * spec.head_dim);
    sequence.v = RandomFloats(keys * spec.kv_heads * spec.v_head_dim);
    return sequence;
  }

  // Runs the sequences as one batch, in fresh blocks full of NaN. `first_rows` of every sequence's
  // rows and keys go in a first call each, the others in a second one (0: all at once).
  void Run(const AttentionSpec& spec, DType kv_dtype, std::vector<Sequence>& sequences,
           int workers = 2, int64_t piece_rows = 0);

  int64_t Uniform(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

  // The dtype that bf16 dot products are tried with, or none where they are not to be had.
  std::vector<DType> DotDTypes() const {
    if (GetParam() != CpuIsa::kAvx512 || !DetectCpu().avx512_bf16) return {};
    return {DType::kBF16, DType::kI8};
  }

  // Of the following runs.
  DType compute_ = DType::kF32;
  DType output_dtype_ = DType::kF32;
  AttentionWorkspace workspace_;  // of all batches of a test

  static constexpr int kSeed = 20240611;
  std::mt19937 random_{kSeed};
};

inline constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kI8};

// Rows of `width` values as the dtype holds them: rounded, or for I8 integers times a scale.
void RoundRows(DType dtype, int width, std::vector<float>& values);

// Compares outputs and asked weights of all rows with the reference, within the rounding of
// float32 and, with `compute` BF16, of queries and weights to bf16.
void ExpectMatchesReference(const AttentionSpec& spec, DType kv_dtype, const Sequence& sequence,
                            DType compute = DType::kF32);
// Compares outputs over I8 blocks with attention over the unquantised keys and values. No softcap,
// no NaN.
void ExpectNearUnquantised(const AttentionSpec& spec, const Sequence& sequence);

testing::AssertionResult SameFloats(const std::vector<float>& a, const std::vector<float>& b);

// A spec and sequences with any mixture of features.
void RandomProblem(std::mt19937& random, AttentionSpec& spec, std::vector<Sequence>& sequences);

}  // namespace attend
