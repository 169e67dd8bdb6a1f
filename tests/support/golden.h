// SPDX-License-Identifier: Apache-2.0
//
// Golden cases of tests/golden as plain structs (the format: tests/golden/README.md). Tests of the
// model loader, of engines and of the server compare with them; nothing here computes attention.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace attend {

// Row-major; no shape = the case has no such tensor.
struct GoldenTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;
};

struct GoldenCase {
  std::string id;  // "case0"
  std::string layer;
  std::string role;  // "self" or "cross"
  std::string kind;  // "full" or "incremental"
  bool causal = false;
  int64_t window_left = -1;  // row i sees key j iff i - j <= window_left and j - i <= window_right;
  int64_t window_right = -1;             // -1 = no limit
  std::vector<int64_t> lengths;          // rows of each sequence
  std::vector<int64_t> chunks;           // incremental: rows of each call
  std::vector<int64_t> context_lengths;  // cross: rows of each context
  double float32_tolerance = 0;
  double half_tolerance = 0;       // TF32, BF16 or F16 products
  GoldenTensor hidden_states;      // [sequences, longest length, d_model]
  GoldenTensor output;             // the same
  GoldenTensor context;            // [sequences, longest context, width]
  GoldenTensor attention_weights;  // [sequences, heads, queries, keys]
};

struct GoldenVariant {
  std::string model_type;
  std::vector<GoldenCase> cases;
};

// Names of the folders of tests/golden, sorted.
std::vector<std::string> GoldenVariants();

// The checkpoint folder of a variant.
std::string GoldenDirectory(const std::string& variant);

absl::StatusOr<GoldenVariant> ReadGolden(const std::string& variant);

}  // namespace attend
