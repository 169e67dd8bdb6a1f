// SPDX-License-Identifier: Apache-2.0
#include "engine/layer_weights.h"

#include <string>

#include "engine/util/status_macros.h"

namespace attend {
namespace {

absl::Status CheckShape(const char* name, const WeightView& view, int64_t rows, int64_t columns) {
  if (view.present() && view.rows == rows && view.columns == columns) return absl::OkStatus();
  return absl::InvalidArgumentError(std::string("layer weights: ") + name + " is [" +
                                    std::to_string(view.rows) + ", " +
                                    std::to_string(view.columns) + "], wanted [" +
                                    std::to_string(rows) + ", " + std::to_string(columns) + "]");
}

}  // namespace

absl::Status CheckWeights(const AttentionSpec& spec, const LayerWeights& weights) {
  const int64_t q_width = int64_t{spec.q_heads} * spec.head_dim;
  const int64_t k_width = int64_t{spec.kv_heads} * spec.head_dim;
  const int64_t v_width = int64_t{spec.kv_heads} * spec.v_head_dim;
  const int64_t o_width = int64_t{spec.q_heads} * spec.v_head_dim;
  RETURN_IF_ERROR(CheckShape("q", weights.q, q_width, spec.d_model));
  RETURN_IF_ERROR(CheckShape("k", weights.k, k_width, spec.context_width));
  RETURN_IF_ERROR(CheckShape("v", weights.v, v_width, spec.context_width));
  RETURN_IF_ERROR(CheckShape("o", weights.o, spec.output_width, o_width));
  for (const WeightView* norm : {&weights.q_norm, &weights.k_norm}) {
    if (norm->present()) RETURN_IF_ERROR(CheckShape("q/k norm", *norm, spec.head_dim, 1));
  }
  return absl::OkStatus();
}

DType MatrixDType(const LayerWeights& weights) {
  for (const WeightView* view : {&weights.k, &weights.v, &weights.o}) {
    if (view->dtype != weights.q.dtype) return DType::kF32;
  }
  return weights.q.dtype;
}

std::vector<float> LoadVector(const WeightView& view) {
  std::vector<float> values;
  for (int64_t i = 0; view.present() && i < view.rows; ++i) values.push_back(view.At(i, 0));
  return values;
}

}  // namespace attend
