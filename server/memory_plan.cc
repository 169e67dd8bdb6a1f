// SPDX-License-Identifier: Apache-2.0
#include "server/memory_plan.h"

#include <algorithm>

#include "engine/attention_plan.h"
#include "engine/kv_geometry.h"

namespace attend {
namespace {

// What engine/cuda takes beside the slabs of its batches: the products' workspace, rows of KV on
// their way, captured graphs, loaded code. The pinned buffers mirror parts of the slabs.
constexpr int64_t kBesideSlabs = int64_t{256} << 20;
constexpr int64_t kPinnedBesideSlabs = int64_t{16} << 20;

// Bytes of one row of everything a batch computes: input, q, k, v, attention output, output.
int64_t ActivationBytes(const AttentionSpec& spec) {
  return 4 * (int64_t{spec.d_model} + spec.output_width +
              int64_t{spec.q_heads} * (spec.head_dim + spec.v_head_dim) +
              int64_t{spec.kv_heads} * (spec.head_dim + spec.v_head_dim));
}

// The same on the device, with what comes along with a row that is an item of its own.
int64_t WorkspaceRowBytes(const AttentionSpec& spec) {
  AttendItem item;
  item.rows = 1;
  item.new_keys = 1;
  return WorkspaceBytes(spec, item);
}

int64_t KvBlockBytes(const Options& options, const Checkpoint& checkpoint,
                     const AttentionSpec& spec) {
  return GeometryOf(spec, KvDTypeOf(checkpoint, options.kv_dtype)).BlockBytes();
}

// The CPU multiplies F16 weights as F32, CUDA every type as it is, unless told to compute in fp32.
int64_t PackedBytes(const ModelLayer& layer, const Options& options, bool cuda) {
  if (options.weight_dtype == "i8") return layer.weight_bytes / DTypeBytes(layer.weight_dtype);
  const bool widened = cuda ? options.compute == "fp32" && DTypeBytes(layer.weight_dtype) == 2
                            : layer.weight_dtype == DType::kF16;
  return layer.weight_bytes * (widened ? 2 : 1);
}

}  // namespace

std::string Mebibytes(int64_t bytes) { return std::to_string((bytes + (1 << 19)) >> 20) + " MiB"; }

MemoryPlan PlanMemory(const Options& options, const DeviceChoice& device,
                      const NamedCheckpoints& checkpoints) {
  const Limits& limits = options.limits;
  MemoryPlan plan;
  plan.cuda = device.device == "cuda";
  plan.kv = limits.kv_bytes;
  plan.queue = limits.queue_bytes + 4 * limits.message_bytes;
  // Raw k and v of one message, widened from 16 bits, with room for blocks and slabs.
  plan.scratch = 4 * limits.message_bytes;
  int64_t row_bytes = 0;
  for (const auto& [name, checkpoint] : checkpoints) {
    for (const ModelLayer& layer : checkpoint.layers) {
      plan.weights += PackedBytes(layer, options, plan.cuda);
      row_bytes = std::max(row_bytes,
                           plan.cuda ? WorkspaceRowBytes(layer.spec) : ActivationBytes(layer.spec));
      const int64_t sequence = KvBlockBytes(options, checkpoint, layer.spec) *
                               (limits.request_tokens / kBlockTokens + 1);
      plan.scratch = std::max(plan.scratch, sequence / 7 * 8 + (int64_t{16} << 20));
    }
  }
  plan.staging = limits.batch_tokens * row_bytes;
  if (plan.cuda) {
    // One row of any request fits: raw keys and values of 16 bits as given and as floats, its bias,
    // and the attention weights it is answered with.
    plan.batch_workspace =
        std::max(plan.staging, 4 * limits.message_bytes + 2 * limits.response_bytes);
    const int64_t slabs = kDeviceSlabs * DeviceSlabBytes(plan.batch_workspace);
    plan.workspace = slabs + kBesideSlabs;
    plan.staging = slabs + kPinnedBesideSlabs;
  }
  return plan;
}

absl::Status CheckMemory(const MemoryPlan& plan, const DeviceChoice& device,
                         int64_t machine_bytes) {
  const std::string kept = "weights " + Mebibytes(plan.weights) + " + kv " + Mebibytes(plan.kv) +
                           " + scratch " + Mebibytes(plan.scratch);
  const std::string kv_flag = "--kv_bytes=" + std::to_string(plan.kv) + ": ";
  if (plan.DeviceBytes() > device.free_bytes) {
    const int64_t room = device.free_bytes - (plan.DeviceBytes() - plan.kv);
    return absl::InvalidArgumentError(
        kv_flag + kept + " + workspace " + Mebibytes(plan.workspace) + " = " +
        Mebibytes(plan.DeviceBytes()) + " do not fit into the free " +
        Mebibytes(device.free_bytes) + " of " + Mebibytes(device.total_bytes) + " of " +
        device.name + "; lower " +
        (room >= 0 ? "--kv_bytes to " + std::to_string(room >> 20) + "MiB at most"
                   : "--kv_bytes and --message_bytes, --response_bytes, --batch_tokens or "
                     "--request_tokens, or serve fewer models"));
  }
  if (plan.HostBytes() > machine_bytes) {
    const std::string waiting = "queue " + Mebibytes(plan.queue) + " + staging " +
                                Mebibytes(plan.staging) + " = " + Mebibytes(plan.HostBytes()) +
                                " do not fit into the memory of " + Mebibytes(machine_bytes);
    if (plan.cuda) {
      return absl::InvalidArgumentError(
          "--queue_bytes: " + waiting +
          "; lower --queue_bytes, --message_bytes, --response_bytes or --batch_tokens");
    }
    return absl::InvalidArgumentError(
        kv_flag + kept + " + " + waiting +
        "; lower --kv_bytes, --queue_bytes, --request_tokens or --message_bytes");
  }
  return absl::OkStatus();
}

}  // namespace attend
