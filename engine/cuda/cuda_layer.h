// SPDX-License-Identifier: Apache-2.0
//
// One attention layer on the device: its packed matrices and the constants its kernels read. Made
// once at load, immutable afterwards.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/cuda/cuda_owners.h"
#include "engine/cuda/projection.h"
#include "engine/layer_weights.h"

namespace attend {

struct CudaLayer {
  AttentionSpec spec;
  DType compute = DType::kF32;  // operands of the products: F32, BF16 or F16
  std::vector<Projection>
      input;  // one matrix {q, k, v} where all read the same width, else {q}, {k, v}
  std::optional<Projection> output;
  DeviceMemory constants;                     // what the three pointers below point into
  const float* q_norm = nullptr;              // [head_dim] or null
  const float* k_norm = nullptr;              // [head_dim] or null
  const double* inverse_frequency = nullptr;  // [rope.dim / 2] or null

  bool merged() const { return input.size() == 1; }
  const Projection& q() const { return input.front(); }
  const Projection& kv() const { return input.back(); }
  static constexpr Projection::PartRun kQ = {0, 1};
  static constexpr Projection::PartRun kAll = {0, 3};  // merged only
  static constexpr Projection::PartRun kOutput = {0, 1};
  Projection::PartRun KvParts() const {
    return merged() ? Projection::PartRun{1, 3} : Projection::PartRun{0, 2};
  }
  int64_t bytes() const;
};

// `compute` is EngineOptions::compute; `max_rows` the most rows of a batch.
absl::StatusOr<CudaLayer> MakeCudaLayer(const AttentionSpec& spec, const LayerWeights& weights,
                                        const std::string& compute, int64_t max_rows,
                                        LtContext& context, cudaStream_t stream);

}  // namespace attend
