// SPDX-License-Identifier: Apache-2.0
//
// Attention weights that somebody asked for: after the attention of the same rows, from the row
// statistics it left. Scores are made again by the float units and go to memory as weights at once:
// a block has 8 rows of one head and never more than two tiles of keys. Called by batch_stages.
#include "engine/cuda/device.h"
#include "engine/cuda/elements.h"
#include "engine/cuda/float_tile.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/prepare.h"
#include "engine/cuda/score.h"

namespace attend {
namespace {

using device::Global;
using device::kFloatThreads;
using device::Shared;

static_assert(kWeightsRows == 8);  // ProductTile's rows of one thread

struct LaunchParams {
  WeightsParams weights;
  DType q_dtype;
};

// Shared memory of a block, bytes: q as float, then two tiles of keys.
template <class T, int kWidth>
struct Map {
  static constexpr int kTileElements = device::kTileKeys<T, kWidth> * kWidth;

  static constexpr int kQ = 0;                               // float [rows, kWidth], swizzled
  static constexpr int kK = kQ + kWeightsRows * kWidth * 4;  // T [2, keys, kWidth], swizzled
  static constexpr int kBytes = kK + 2 * kTileElements * static_cast<int>(sizeof(T));
  static_assert(kBytes <= 99 * 1024);
};

// Queries of the task's rows, widened; zeros below them.
template <int kWidth>
ATTEND_DEVICE void LoadQueries(const AttentionParams& params, const ItemShape& item,
                               const WeightsTask& task, DType q_dtype, Shared<float> to) {
  const int32_t key_row = params.shape.KeyRow();
  device::WithElement(q_dtype, [&](auto element) {
    using T = decltype(element);
    const Global<const T> q(static_cast<const T*>(params.q));
    for (int i = device::ThreadIndex(); i < kWeightsRows * key_row; i += kFloatThreads) {
      const int row = i / key_row;
      const int d = i % key_row;
      float value = 0;
      if (row < task.rows) {
        const int64_t q_row = (item.row_begin + task.row_begin + row) * params.q_heads + task.head;
        const T stored = q[q_row * key_row + d];
        value = device::ToFloat(stored);
      }
      to[device::SwizzledRows<float, kWidth>::Offset(row, d / 4) + d % 4] = value;
    }
  });
}

// Zeros for the task's rows at keys [begin, end).
ATTEND_DEVICE void StoreZeros(const WeightsTask& task, int64_t begin, int64_t end) {
  for (int row = 0; row < task.rows; ++row) {
    const Global<float> out = Global<float>(task.out) + row * task.row_stride;
    for (int64_t key = begin + device::ThreadIndex(); key < end; key += kFloatThreads) out[key] = 0;
  }
}

// This thread's row: row FirstRow() of the task.
struct WeightsRow {
  device::KeySpan span;
  device::RowScore score;
  float reference;
  float factor;

  ATTEND_DEVICE WeightsRow(const AttentionParams& params, const ItemShape& item,
                           const WeightsTask& task, int row)
      : WeightsRow(
            params, item, task,
            device::PackedRow((task.row_begin + row) * params.group + task.head % params.group,
                              task.head / params.group, params.group)) {}

  ATTEND_DEVICE float Weight(float product, int64_t key) const {
    if (!span.Contains(key)) return 0;
    const float bias = score.Bias(key);
    if (bias == -device::kInfinity) return 0;
    return device::AccurateWeight(score(product, key, bias), reference) * factor;
  }

 private:
  ATTEND_DEVICE WeightsRow(const AttentionParams& params, const ItemShape& item,
                           const WeightsTask& task, const device::PackedRow& row)
      : span(device::VisibleSpan(item.first_row + row.query_row, item.keys, item.causal != 0,
                                 params.window)),
        score(params, item, row) {
    const RowStatistics statistics = Global<const RowStatistics>(
        params.statistics)[(item.row_begin + row.query_row) * params.q_heads + task.head];
    reference = device::Reference(statistics.max);
    factor = device::Reciprocal(statistics.sum);
  }
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kFloatThreads) WeightsKernel(const LaunchParams launch) {
  using M = Map<T, kWidth>;
  using Products = device::ProductTile<T, kWidth, kWeightsRows>;
  constexpr int kKeys = Products::kKeys;
  const AttentionParams& params = launch.weights.attention;
  const WeightsTask task = Global<const WeightsTask>(launch.weights.tasks)[device::BlockIndex()];
  if (task.rows == 0) return;  // the whole block
  const ItemShape item = Global<const ItemShape>(params.items)[task.item];
  const Shared<float> q = device::SharedArray<float>("q", M::kQ, kWeightsRows * kWidth);
  const Shared<T> stages = device::SharedArray<T>("keys", M::kK, 2 * M::kTileElements);
  const int row = Products::FirstRow();
  const int32_t kv_head = task.head / params.group;

  // Keys that any row sees: both ends grow with the row, and those of an empty span may lie past
  // the keys.
  const int64_t position = item.first_row + task.row_begin;
  const bool causal = item.causal != 0;
  const int64_t first =
      device::VisibleSpan(position, item.keys, causal, params.window).begin / kKeys * kKeys;
  const int64_t last =
      device::VisibleSpan(position + task.rows - 1, item.keys, causal, params.window).end;
  const int64_t end = last < item.keys ? last : item.keys;
  const int64_t begin = first < end ? first : end;
  StoreZeros(task, 0, begin);
  StoreZeros(task, end, item.keys);
  if (begin == end) return;

  const auto copy_keys = [&](int64_t first_key, int stage) {
    const int64_t left = end - first_key;
    device::CopyRows<T, kWidth, kKeys, true>(
        stages + stage * M::kTileElements,
        device::RowsAt<T>(params, item, device::BlockAddress(params, item, first_key), kv_head,
                          first_key, /*values=*/false),
        static_cast<int>(left < kKeys ? left : kKeys), params.shape.KeyRow(),
        params.shape.KeyRow() / device::kVectorElements<T>);
  };
  copy_keys(begin, 0);
  device::CommitCopies();
  LoadQueries<kWidth>(params, item, task, launch.q_dtype, q);
  const WeightsRow of_row(params, item, task, row < task.rows ? row : 0);
  const Global<float> out = Global<float>(task.out) + row * task.row_stride;
  int stage = 0;
  for (int64_t first_key = begin; first_key < end; first_key += kKeys) {
    device::WaitCopies<0>();
    device::SyncThreads();  // this stage is there, the other one is done with
    if (first_key + kKeys < end) copy_keys(first_key + kKeys, 1 - stage);
    device::CommitCopies();
    float products[1][Products::kKeysEach];
    Products::Multiply(q, stages + stage * M::kTileElements,
                       params.shape.KeyRow() / device::kVectorElements<T>, products);
#pragma unroll
    for (int j = 0; j < Products::kKeysEach; ++j) {
      const int64_t key = first_key + Products::FirstKey() + 4 * j;
      if (row < task.rows && key < end) out[key] = of_row.Weight(products[0][j], key);
    }
    stage = 1 - stage;
  }
}

}  // namespace

cudaError_t LaunchWeights(const WeightsParams& params, DType q_dtype, DType kv_dtype,
                          cudaStream_t stream) {
  return device::WithCase(kv_dtype, params.attention.shape, [&](auto kernel_case) {
    using Case = decltype(kernel_case);
    using T = typename Case::Element;
    return device::Launch(&WeightsKernel<T, Case::kHeadWidth>, "attention_weights",
                          {params.task_count, kFloatThreads, Map<T, Case::kHeadWidth>::kBytes},
                          LaunchParams{params, q_dtype}, stream);
  });
}

cudaError_t PrepareWeights(int shared_limit) {
  return device::ForEachCase([&](auto kernel_case) {
    using Case = decltype(kernel_case);
    using T = typename Case::Element;
    constexpr int kBytes = Map<T, Case::kHeadWidth>::kBytes;
    if (kBytes > shared_limit) return cudaErrorInvalidValue;
    return device::AllowSharedMemory(&WeightsKernel<T, Case::kHeadWidth>, kBytes);
  });
}

}  // namespace attend
