// SPDX-License-Identifier: Apache-2.0
//
// The weights of one attention layer as a checkpoint adapter hands them to an engine: views into
// mapped files, not yet packed. Matrices are indexed (out, in); the strides say how the file stores
// them, so fused and transposed tensors need no copy.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "engine/attention_spec.h"

namespace attend {

// A matrix or vector inside a mapped file. Borrowed; any alignment.
struct WeightView {
  const void* data = nullptr;  // null = absent
  DType dtype = DType::kUnspecified;
  int64_t rows = 0;        // out features (vectors: elements)
  int64_t columns = 1;     // in features (vectors: 1)
  int64_t row_stride = 1;  // elements between (o, i) and (o + 1, i)
  int64_t column_stride = 1;

  bool present() const { return data != nullptr; }
  float At(int64_t row, int64_t column) const {
    return LoadFloat(dtype, data, row * row_stride + column * column_stride);
  }
};

struct LayerWeights {
  WeightView q;                               // [q_heads * head_dim, d_model]
  WeightView k;                               // [kv_heads * head_dim, context_width]
  WeightView v;                               // [kv_heads * v_head_dim, context_width]
  WeightView o;                               // [output_width, q_heads * v_head_dim]
  WeightView q_bias, k_bias, v_bias, o_bias;  // [rows of the matrix] or absent
  WeightView q_norm, k_norm;                  // [head_dim] or absent
};

// INVALID_ARGUMENT naming the matrix whose shape is not what the spec says.
absl::Status CheckWeights(const AttentionSpec& spec, const LayerWeights& weights);

// The type all four matrices have; F32 where they differ.
DType MatrixDType(const LayerWeights& weights);

// A vector's values; none when it is absent.
std::vector<float> LoadVector(const WeightView& view);

}  // namespace attend
