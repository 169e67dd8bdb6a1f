// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/batch_stages.h"

#include <algorithm>

#include "engine/util/status_macros.h"

namespace attend {
namespace {

// Thread blocks per multiprocessor of kernels that loop over tiles; more wait for a place anyway.
constexpr int64_t kBlocksPerProcessor = 16;

}  // namespace

int64_t BatchStages::LoopBlocks(int64_t tiles) const {
  return std::min(tiles, int64_t{processors} * kBlocksPerProcessor);
}

absl::Status BatchStages::Queue(unsigned record_flags) {
  const BatchWork& work = batch.work();
  const auto record = [&](int stage) {
    return CudaStatus(
        cudaEventRecordWithFlags((*events)[static_cast<size_t>(stage)].get(), stream, record_flags),
        "cudaEventRecord");
  };
  RETURN_IF_ERROR(record(0));
  CUDA_RETURN_IF_ERROR(
      LaunchConvert(At<ConvertTask>(slab, layout.input_tasks), layout.counts.input_tasks, stream));
  if (!work.raw()) {
    RETURN_IF_ERROR(QueueProjections());
  }
  RETURN_IF_ERROR(QueueTransform());
  RETURN_IF_ERROR(record(1));
  RETURN_IF_ERROR(QueueAttention());
  RETURN_IF_ERROR(record(2));
  RETURN_IF_ERROR(QueueOutput());
  return record(3);
}

// Rows of the plan's one matrix: first those that have queries only, then those that have both,
// then those that have keys only.
absl::Status BatchStages::QueueProjections() {
  const BatchWork& work = batch.work();
  auto* projected = At<float>(slab, layout.projected);
  const auto run = [&](const Projection::PartRun& parts, int64_t first, int64_t rows) {
    const std::byte* x = slab + layout.x + first * work.x_width * DTypeBytes(work.compute);
    return layer->q().Run(*context, parts, x, rows, projected + first * work.projected_width,
                          stream);
  };
  const BatchCounts& room = layout.counts;
  if (work.spec().cross) {
    RETURN_IF_ERROR(run(CudaLayer::kQ, 0, room.query_rows));
    return layer->kv().Run(*context, layer->KvParts(), slab + layout.context, room.key_rows,
                           At<float>(slab, layout.projected_kv), stream);
  }
  const int64_t offset = work.plan->key_row_offset;  // 0 in a step
  RETURN_IF_ERROR(run(CudaLayer::kQ, 0, offset));
  RETURN_IF_ERROR(run(CudaLayer::kAll, offset, room.query_rows - offset));
  return run(layer->KvParts(), room.query_rows, room.x_rows - room.query_rows);
}

absl::Status BatchStages::QueueTransform() {
  const BatchWork& work = batch.work();
  const AttentionSpec& spec = work.spec();
  const AttentionParams attention = Params();
  TransformParams params{};
  params.batch = attention.batch;
  params.items = attention.items;
  params.block_address = attention.block_address;
  params.kv = kv;
  params.shape = attention.shape;
  params.kv_dtype = work.plan->kv_dtype;
  params.q_dtype = work.q_dtype;
  params.q_heads = spec.q_heads;
  params.q = slab + layout.q;
  params.q_source = At<float>(slab, layout.projected);
  params.q_stride = work.projected_width;
  int64_t key_offset = work.plan->query_rows;
  if (work.raw()) {
    params.k_source = At<float>(slab, layout.raw_k);
    params.v_source = At<float>(slab, layout.raw_v);
    params.k_stride = PaddedWidth(int64_t{spec.kv_heads} * spec.head_dim);
    params.v_stride = PaddedWidth(int64_t{spec.kv_heads} * spec.v_head_dim);
  } else {
    const int k = layer->KvParts().first;
    const float* rows = At<float>(slab, layout.projected_kv);
    if (!spec.cross) {
      key_offset = work.plan->key_row_offset;
      rows = At<float>(slab, layout.projected) + key_offset * work.projected_width;
    }
    params.k_source = rows + layer->kv().part_begin(k);
    params.v_source = rows + layer->kv().part_begin(k + 1);
    params.k_stride = params.v_stride = layer->kv().out();
    params.clip = spec.clip_qkv;
    params.norm = spec.qk_norm == QkNorm::kRmsPerHead ? 1 : 0;
    params.norm_eps = spec.qk_norm_eps;
    params.q_norm = layer->q_norm;
    params.k_norm = layer->k_norm;
    params.rope_dim = spec.rope.dim;
    params.rope_interleaved = spec.rope.pairing == RopePairing::kInterleaved ? 1 : 0;
    params.inverse_frequency = layer->inverse_frequency;
    params.attention_factor = spec.rope.attention_factor;
  }
  const int64_t rows = std::max(layout.counts.query_rows, key_offset + layout.counts.key_rows);
  return CudaStatus(LaunchTransform(params, rows, stream), "transform kernel");
}

AttentionParams BatchStages::Params() const {
  const BatchWork& work = batch.work();
  const AttentionSpec& spec = work.spec();
  AttentionParams params{};
  params.batch = At<BatchShape>(slab, layout.shape);
  params.items = At<ItemShape>(slab, layout.items);
  params.combines = At<CombineTile>(slab, layout.combines);
  params.block_address = At<int64_t>(slab, layout.blocks);
  params.kv = kv;
  params.shape = {spec.kv_heads, spec.head_dim, spec.v_head_dim,
                  static_cast<int32_t>(DTypeBytes(work.plan->kv_dtype))};
  params.q_heads = spec.q_heads;
  params.group = spec.group_size();
  params.scale = static_cast<float>(spec.scale);
  params.softcap = spec.softcap;
  params.window = spec.window;
  params.alibi_slopes = spec.alibi_slopes.empty() ? nullptr : At<float>(slab, layout.slopes);
  params.sinks = spec.sinks.empty() ? nullptr : At<float>(slab, layout.sinks);
  params.q = slab + layout.q;
  params.output = slab + layout.attended;
  params.output_dtype = work.compute;
  params.statistics = At<RowStatistics>(slab, layout.statistics);
  params.partial_output = At<float>(slab, layout.partial_output);
  params.partial_statistics = At<RowStatistics>(slab, layout.partial_statistics);
  return params;
}

absl::Status BatchStages::QueueAttention() {
  const BatchWork& work = batch.work();
  const BatchCounts& room = layout.counts;
  const DType kv_dtype = work.plan->kv_dtype;
  AttentionParams params = Params();
  params.tiles = At<AttentionTile>(slab, layout.prefill_tiles);
  params.tile_count = &params.batch->prefill_tiles;
  const int64_t prefill_blocks = LoopBlocks(room.prefill_tiles);
  if (work.tensor()) {
    CUDA_RETURN_IF_ERROR(LaunchTensorPrefill(params, kv_dtype, prefill_blocks, stream));
    params.tiles = At<AttentionTile>(slab, layout.decode_tiles);
    params.tile_count = &params.batch->decode_tiles;
    CUDA_RETURN_IF_ERROR(
        LaunchTensorDecode(params, kv_dtype, LoopBlocks(room.decode_tiles), stream));
  } else {
    CUDA_RETURN_IF_ERROR(LaunchFloatAttention(params, kv_dtype, prefill_blocks, stream));
  }
  CUDA_RETURN_IF_ERROR(LaunchCombine(params, LoopBlocks(room.combines), stream));
  if (room.weights_tasks == 0) return absl::OkStatus();
  const WeightsParams weights{params, At<WeightsTask>(slab, layout.weights_tasks),
                              room.weights_tasks};
  return CudaStatus(LaunchWeights(weights, work.q_dtype, kv_dtype, stream), "weights kernel");
}

absl::Status BatchStages::QueueOutput() {
  const BatchWork& work = batch.work();
  if (!work.raw()) {
    const std::byte* attended = slab + layout.attended;
    const int64_t rows = layout.counts.query_rows;
    const int64_t size = DTypeBytes(work.compute);
    const auto width =
        static_cast<size_t>(int64_t{work.spec().q_heads} * work.spec().v_head_dim * size);
    const auto pitch = static_cast<size_t>(work.attended_width * size);
    if (width != pitch && rows > 0) {
      std::byte* padded = slab + layout.attended_padded;
      CUDA_RETURN_IF_ERROR(cudaMemsetAsync(padded, 0, pitch * static_cast<size_t>(rows), stream));
      CUDA_RETURN_IF_ERROR(cudaMemcpy2DAsync(padded, pitch, attended, width, width,
                                             static_cast<size_t>(rows), cudaMemcpyDeviceToDevice,
                                             stream));
      attended = padded;
    }
    RETURN_IF_ERROR(layer->output->Run(*context, CudaLayer::kOutput, attended,
                                       layout.counts.query_rows, At<float>(slab, layout.output),
                                       stream));
  }
  return CudaStatus(
      LaunchConvert(At<ConvertTask>(slab, layout.output_tasks), layout.counts.output_tasks, stream),
      "convert kernel");
}

}  // namespace attend
