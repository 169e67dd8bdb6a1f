// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/cuda_layer.h"

#include <cstring>
#include <utility>

#include "engine/util/status_macros.h"

namespace attend {
namespace {

absl::Status UploadConstants(const LayerWeights& weights, cudaStream_t stream, CudaLayer& layer) {
  const std::vector<float> q_norm = LoadVector(weights.q_norm);
  const std::vector<float> k_norm = LoadVector(weights.k_norm);
  const std::vector<double>& frequency = layer.spec.rope.inverse_frequency;
  // Doubles first: each part then starts aligned.
  std::vector<std::byte> bytes;
  const auto add = [&bytes](const auto& values) {
    const size_t offset = bytes.size();
    bytes.resize(offset + values.size() * sizeof(values[0]));
    if (!values.empty()) {
      std::memcpy(bytes.data() + offset, values.data(), bytes.size() - offset);
    }
    return offset;
  };
  const size_t frequency_at = add(frequency);
  const size_t q_norm_at = add(q_norm);
  const size_t k_norm_at = add(k_norm);
  if (bytes.empty()) return absl::OkStatus();
  CUDA_RETURN_IF_ERROR(layer.constants.Allocate(bytes.size()));
  CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(layer.constants.data(), bytes.data(), bytes.size(),
                                       cudaMemcpyHostToDevice, stream));
  CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
  std::byte* base = layer.constants.data();
  if (!frequency.empty()) {
    layer.inverse_frequency = reinterpret_cast<double*>(base + frequency_at);
  }
  if (!q_norm.empty()) layer.q_norm = reinterpret_cast<float*>(base + q_norm_at);
  if (!k_norm.empty()) layer.k_norm = reinterpret_cast<float*>(base + k_norm_at);
  return absl::OkStatus();
}

}  // namespace

int64_t CudaLayer::bytes() const {
  int64_t bytes = output->bytes();
  for (const Projection& projection : input) bytes += projection.bytes();
  return bytes;
}

absl::StatusOr<CudaLayer> MakeCudaLayer(const AttentionSpec& spec, const LayerWeights& weights,
                                        const std::string& compute, int64_t max_rows,
                                        LtContext& context, cudaStream_t stream) {
  RETURN_IF_ERROR(CheckWeights(spec, weights));
  CudaLayer layer;
  layer.spec = spec;
  layer.compute = compute == "fp32" ? DType::kF32 : MatrixDType(weights);
  const bool tf32 = compute == "tf32" && layer.compute == DType::kF32;
  const Projection::Part q{&weights.q, &weights.q_bias};
  const Projection::Part k{&weights.k, &weights.k_bias};
  const Projection::Part v{&weights.v, &weights.v_bias};
  const Projection::Part o{&weights.o, &weights.o_bias};
  const auto add = [&](std::vector<Projection::Part> parts, std::vector<Projection::PartRun> runs) {
    return Projection::Make(context, parts, runs, layer.compute, tf32, max_rows, stream);
  };
  if (spec.d_model == spec.context_width) {
    ASSIGN_OR_RETURN(Projection all, add({q, k, v}, {CudaLayer::kAll, CudaLayer::kQ, {1, 3}}));
    layer.input.push_back(std::move(all));
  } else {
    ASSIGN_OR_RETURN(Projection queries, add({q}, {CudaLayer::kQ}));
    ASSIGN_OR_RETURN(Projection keys, add({k, v}, {{0, 2}}));
    layer.input.push_back(std::move(queries));
    layer.input.push_back(std::move(keys));
  }
  ASSIGN_OR_RETURN(layer.output, add({o}, {CudaLayer::kOutput}));
  RETURN_IF_ERROR(UploadConstants(weights, stream, layer));
  return layer;
}

}  // namespace attend
