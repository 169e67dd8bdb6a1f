// SPDX-License-Identifier: Apache-2.0
//
// Rows whose keys were split over several blocks: their splits become one softmax. Splits are added
// in ascending order whatever the batch looks like, so that a row's bits don't depend on it. Called
// by batch_stages after the attention that wrote the splits.
#include "engine/cuda/device.h"
#include "engine/cuda/elements.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/score.h"

namespace attend {
namespace {

using device::Global;

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxWidth = 256;            // EngineInfo::max_head_dim
constexpr int kPerLane = kMaxWidth / 32;  // values of a row: lane + 32 j

// One row by one warp.
ATTEND_DEVICE void CombineRow(const AttentionParams& params, const CombineTile& tile, int row,
                              int lane) {
  const int32_t width = params.shape.v_head_dim;
  const Global<const RowStatistics> statistics(params.partial_statistics);
  const auto partial_row = [&](int split) {
    return tile.partial + int64_t{split} * tile.rows + row;
  };

  float maximum = -device::kInfinity;
  for (int split = lane; split < tile.splits; split += 32) {
    const RowStatistics part = statistics[partial_row(split)];
    maximum = device::Max(maximum, part.max);
  }
  for (int mask = 16; mask > 0; mask /= 2) {
    maximum = device::Max(maximum, device::ShuffleXor(maximum, mask));
  }
  const float reference = device::Reference(maximum);

  float sum = 0;
  float values[kPerLane] = {};
  for (int split = 0; split < tile.splits; ++split) {
    const RowStatistics part = statistics[partial_row(split)];
    // Without visible keys a split weighs nothing and its values may be anything. A sum that is NaN
    // isn't 0: it shows, also where the split's maximum is -inf.
    if (part.sum == 0) continue;
    const float weight = device::AccurateWeight(part.max, reference);
    sum += part.sum * weight;
    const Global<const float> from(params.partial_output + partial_row(split) * width);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int d = lane + 32 * j;
      if (d < width) values[j] += from[d] * weight;
    }
  }

  const ItemShape item = Global<const ItemShape>(params.items)[tile.item];
  const device::PackedRow packed(tile.row_begin + row, tile.kv_head, params.group);
  const int64_t query = (item.row_begin + packed.query_row) * params.q_heads + packed.head;
  const device::FinishedRow finished =
      device::FinishRow({maximum, sum}, device::SinkOf(params, packed.head));
  if (lane == 0) Global<RowStatistics>(params.statistics)[query] = finished.statistics;
  device::WithElement(params.output_dtype, [&](auto element) {
    using T = decltype(element);
    const Global<T> out = Global<T>(static_cast<T*>(params.output)) + query * width;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int d = lane + 32 * j;
      if (d < width) out[d] = device::FromFloat<T>(values[j] * finished.factor);
    }
  });
}

__global__ void __launch_bounds__(kThreads) CombineKernel(const AttentionParams params) {
  const int lane = device::ThreadIndex() % 32;
  const int warp = device::ThreadIndex() / 32;
  const BatchShape batch = Global<const BatchShape>(params.batch)[0];
  for (int64_t i = device::BlockIndex(); i < batch.combines; i += device::GridBlocks()) {
    const CombineTile tile = Global<const CombineTile>(params.combines)[i];
    for (int row = warp; row < tile.rows; row += kWarps) CombineRow(params, tile, row, lane);
  }
}

}  // namespace

cudaError_t LaunchCombine(const AttentionParams& params, int64_t blocks, cudaStream_t stream) {
  return device::Launch(&CombineKernel, "combine", {blocks, kThreads, 0}, params, stream);
}

}  // namespace attend
