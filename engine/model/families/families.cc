// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "engine/model/families/family.h"

namespace attend {

std::vector<Family> SupportedFamilies() {
  std::vector<Family> all;
  for (const auto table : {BertFamilies(), LlamaFamilies(), Gpt2Families(), PlainFamilies()}) {
    all.insert(all.end(), table.begin(), table.end());
  }
  return all;
}

void AddProjection(LayerDescription& layer, const std::string& module,
                   const std::vector<ProjectionPart>& parts, int64_t columns, bool bias,
                   bool input_major) {
  TensorUse weight{.name = module + ".weight", .columns = columns, .input_major = input_major};
  TensorUse bias_vector{.name = module + ".bias"};
  for (const ProjectionPart& part : parts) {
    weight.parts.push_back({part.weight, part.rows});
    bias_vector.parts.push_back({part.bias, part.rows});
  }
  layer.tensors.push_back(std::move(weight));
  if (bias) layer.tensors.push_back(std::move(bias_vector));
}

double UsualScale(int head_dim) { return 1.0 / std::sqrt(static_cast<double>(head_dim)); }

}  // namespace attend
