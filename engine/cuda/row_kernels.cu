// SPDX-License-Identifier: Apache-2.0
//
// Kernels over rows that are not attention: conversion of types, what happens to projected rows
// before attention (clip, norms, rotation, append to KV blocks), and KV rows in canonical order.
// Bound by memory: every element is read once and written once, in whole vectors where the shapes
// allow it. Called by batch_stages and cuda_engine.
#include <cmath>
#include <type_traits>

#include "engine/cuda/device.h"
#include "engine/cuda/elements.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/prepare.h"

namespace attend {
namespace {

using device::Bf16;
using device::F16;
using device::Global;
using device::Shared;
using device::Vector16;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxWidth = 256;  // EngineInfo::max_head_dim

// ---- Convert ----

struct ConvertParams {
  const ConvertTask* tasks;
};

template <class To, class From>
ATTEND_DEVICE To ConvertElement(From value) {
  if constexpr (std::is_same_v<From, To>) {
    return value;  // not through float: a NaN keeps its bits
  } else {
    return device::FromFloat<To>(device::ToFloat(value));
  }
}

// Eight elements, so that both sides are whole vectors.
template <class From, class To>
ATTEND_DEVICE void ConvertEight(Global<const From> from, Global<To> to) {
  constexpr int kFrom = device::kVectorElements<From>;
  constexpr int kTo = device::kVectorElements<To>;
  if constexpr (std::is_same_v<From, To>) {
#pragma unroll
    for (int i = 0; i < 8; i += kFrom) device::Store16(to + i, device::Load16(from + i));
  } else {
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; i += kFrom) {
      float part[kFrom];
      device::Unpack<From>(device::Load16(from + i), part);
#pragma unroll
      for (int j = 0; j < kFrom; ++j) values[i + j] = part[j];
    }
#pragma unroll
    for (int i = 0; i < 8; i += kTo) device::Store16(to + i, device::Pack<To>(values, i));
  }
}

template <class From, class To>
ATTEND_DEVICE void ConvertAll(const ConvertTask& task) {
  const Global<const From> from(static_cast<const From*>(task.from));
  const Global<To> to(static_cast<To*>(task.to));
  const bool aligned =
      (reinterpret_cast<uintptr_t>(task.from) | reinterpret_cast<uintptr_t>(task.to)) % 16 == 0;
  const int64_t in_vectors = aligned ? task.count / 8 * 8 : 0;
  for (int64_t i = int64_t{device::ThreadIndex()} * 8; i < in_vectors; i += kThreads * 8) {
    ConvertEight<From, To>(from + i, to + i);
  }
  for (int64_t i = in_vectors + device::ThreadIndex(); i < task.count; i += kThreads) {
    const From value = from[i];
    to[i] = ConvertElement<To>(value);
  }
}

__global__ void __launch_bounds__(kThreads) ConvertKernel(const ConvertParams params) {
  const ConvertTask task = Global<const ConvertTask>(params.tasks)[device::BlockIndex()];
  device::WithElement(task.from_dtype, [&](auto from) {
    device::WithElement(task.to_dtype,
                        [&](auto to) { ConvertAll<decltype(from), decltype(to)>(task); });
  });
}

// ---- Transform ----

// Shared memory of a block, bytes.
constexpr int kStagedOffset = 0;  // float [warps, kMaxWidth]: the head each warp works on
constexpr int kAnglesOffset = kStagedOffset + kWarps * kMaxWidth * 4;  // float [2, 2, kMaxWidth/2]:
                                                                       // of query and key, cos, sin
constexpr int kFoundOffset = kAnglesOffset + 2 * kMaxWidth * 4;        // int: FindItem's result
constexpr int kTransformShared = kFoundOffset + 16;

// The item that contains `row`: the last one whose `begin` is not above it (items without rows
// begin where their successor does). The whole block searches, each step narrows the range by its
// threads: one step for usual batches. `found` is one shared int.
ATTEND_DEVICE int FindItem(Global<const ItemShape> items, int count, int64_t ItemShape::*begin,
                           int64_t row, Shared<int> found) {
  const auto begin_of = [&](int item) {
    const ItemShape shape = items[item];
    return shape.*begin;
  };
  int first = 0;
  while (count > 1) {
    const int step = (count + kThreads - 1) / kThreads;
    const int mine = device::ThreadIndex() * step;
    if (mine < count && begin_of(first + mine) <= row &&
        (mine + step >= count || begin_of(first + mine + step) > row)) {
      found[0] = mine;
    }
    device::SyncThreads();
    const int offset = found[0];
    device::SyncThreads();  // the next step or search writes `found` again
    first += offset;
    count = count - offset < step ? count - offset : step;
  }
  return first;
}

// cos and sin of angle, times `factor`. The angle in half turns keeps what division by pi loses,
// which is more than a float's precision from angles of 2^30 on: first the whole turns are taken
// off, exactly, then the remainder of the division is added.
ATTEND_DEVICE void Rotation(double angle, double factor, float* cosine, float* sine) {
  constexpr double kPi = 3.14159265358979323846;
  constexpr double kPiRest = 1.2246467991473532e-16;  // pi - kPi
  const double half_turns = angle / kPi;
  const double rest = std::fma(-half_turns, kPiRest, std::fma(-half_turns, kPi, angle)) / kPi;
  const double in_turn = half_turns - 2 * std::rint(half_turns / 2);
  double s;
  double c;
  device::SinCosPi(in_turn + rest, &s, &c);
  *cosine = static_cast<float>(c * factor);
  *sine = static_cast<float>(s * factor);
}

// Sum over the warp's lanes, the same in every lane.
ATTEND_DEVICE double WarpSum(double value) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const auto bits = __builtin_bit_cast(uint64_t, value);
    const float low = device::WordAsFloat(static_cast<uint32_t>(bits));
    const float high = device::WordAsFloat(static_cast<uint32_t>(bits >> 32));
    const uint64_t other_low = device::FloatAsWord(device::ShuffleXor(low, mask));
    const uint64_t other_high = device::FloatAsWord(device::ShuffleXor(high, mask));
    value += __builtin_bit_cast(double, other_high << 32 | other_low);
  }
  return value;
}

// One head of one row: where it comes from, what happens to it, where it goes.
struct HeadWork {
  const float* from;
  int32_t width;
  int32_t padded_width;
  bool norm;
  bool rotate;
  const float* norm_weight;  // [width] or null
  int32_t angles;            // first angle of its position in the shared array
  DType dtype;
  std::byte* to;  // padded_width elements, 16-byte aligned
};

// Clip and norm of a head, into `staged` with zero tails. By one warp.
ATTEND_DEVICE void StageHead(const TransformParams& params, const HeadWork& work,
                             Shared<float> staged, int lane) {
  constexpr int kPerLane = kMaxWidth / 32;
  float x[kPerLane];
  double squares = 0;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int d = lane + 32 * j;
    x[j] = 0;
    if (d < work.width) x[j] = Global<const float>(work.from)[d];
    if (params.clip > 0) {  // comparisons that a NaN fails
      x[j] = x[j] > params.clip ? params.clip : x[j] < -params.clip ? -params.clip : x[j];
    }
    squares += static_cast<double>(x[j]) * x[j];
  }
  if (work.norm) {
    const double mean = WarpSum(squares) / work.width;
    const float factor = static_cast<float>(1.0 / device::SquareRoot(mean + params.norm_eps));
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int d = lane + 32 * j;
      x[j] *= factor;
      if (work.norm_weight != nullptr && d < work.width) {
        x[j] *= Global<const float>(work.norm_weight)[d];
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int d = lane + 32 * j;
    if (d < work.padded_width) staged[d] = d < work.width ? x[j] : 0.0f;
  }
}

// (x, y) -> (x cos - y sin, y cos + x sin) of every pair; each lane owns its pairs.
ATTEND_DEVICE void RotateHead(const TransformParams& params, Shared<float> angles,
                              Shared<float> staged, int lane) {
  const int pairs = params.rope_dim / 2;
  for (int pair = lane; pair < pairs; pair += 32) {
    const int first = params.rope_interleaved != 0 ? 2 * pair : pair;
    const int second = params.rope_interleaved != 0 ? first + 1 : first + pairs;
    const float x = staged[first];
    const float y = staged[second];
    const float cosine = angles[pair];
    const float sine = angles[kMaxWidth / 2 + pair];
    staged[first] = x * cosine - y * sine;
    staged[second] = y * cosine + x * sine;
  }
}

template <class T>
ATTEND_DEVICE void StoreHead(Shared<float> staged, int padded_width, std::byte* to, int lane) {
  constexpr int kElements = device::kVectorElements<T>;
  for (int d = lane * kElements; d < padded_width; d += 32 * kElements) {
    float values[kElements];
#pragma unroll
    for (int i = 0; i < kElements; i += 4) {
      const Vector16 part = device::Load16(staged + d + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) values[i + j] = device::WordAsFloat(part.word[j]);
    }
    device::Store16(Global<std::byte>(to) + int64_t{d} * static_cast<int>(sizeof(T)),
                    device::Pack<T>(values, 0));
  }
}

// Addresses of a new key's block and its place there.
struct KeySlot {
  std::byte* block;
  int32_t token;
  int32_t block_tokens;
};

// `head` counts the queries' heads, then the keys', then the values'; without a query, from the
// keys' on. `row` is the query row, `key` the new key's.
ATTEND_DEVICE HeadWork DescribeHead(const TransformParams& params, int head, bool has_query,
                                    int64_t row, int64_t key, const KeySlot& slot,
                                    bool two_angles) {
  const KvBlockShape& shape = params.shape;
  HeadWork work;
  work.width = shape.head_dim;
  work.padded_width = shape.KeyRow();
  work.norm = params.norm != 0;
  work.rotate = params.rope_dim > 0;
  work.angles = 0;
  if (has_query && head < params.q_heads) {
    work.from = params.q_source + row * params.q_stride + int64_t{head} * shape.head_dim;
    work.norm_weight = params.q_norm;
    work.dtype = params.q_dtype;
    work.to = static_cast<std::byte*>(params.q) +
              (row * params.q_heads + head) * work.padded_width * DTypeBytes(work.dtype);
    return work;
  }
  int kv_head = has_query ? head - params.q_heads : head;
  work.dtype = params.kv_dtype;
  if (kv_head < shape.kv_heads) {
    work.from = params.k_source + key * params.k_stride + int64_t{kv_head} * shape.head_dim;
    work.norm_weight = params.k_norm;
    work.angles = two_angles ? kMaxWidth : 0;
    work.to = slot.block + shape.KeyOffset(kv_head, slot.token, slot.block_tokens);
    return work;
  }
  kv_head -= shape.kv_heads;
  work.width = shape.v_head_dim;
  work.padded_width = shape.ValueRow();
  work.norm = false;
  work.rotate = false;
  work.norm_weight = nullptr;
  work.from = params.v_source + key * params.v_stride + int64_t{kv_head} * shape.v_head_dim;
  work.to = slot.block + shape.ValueOffset(kv_head, slot.token, slot.block_tokens);
  return work;
}

__global__ void __launch_bounds__(kThreads, 3) TransformKernel(const TransformParams params) {
  const int lane = device::ThreadIndex() % 32;
  const int warp = device::ThreadIndex() / 32;
  const BatchShape batch = Global<const BatchShape>(params.batch)[0];
  const int64_t row = device::BlockIndex();
  const int64_t key = row - batch.key_row_offset;
  const bool has_query = row < batch.query_rows;
  const bool has_key = key >= 0 && key < batch.key_rows;
  if (!has_query && !has_key) return;  // the whole block

  const Shared<float> staged =
      device::SharedArray<float>("staged", kStagedOffset, kWarps * kMaxWidth) + warp * kMaxWidth;
  const Shared<float> angles = device::SharedArray<float>("angles", kAnglesOffset, 2 * kMaxWidth);
  const Shared<int> found = device::SharedArray<int>("found", kFoundOffset, 1);
  const Global<const ItemShape> items(params.items);

  int64_t query_position = 0;
  int64_t key_position = 0;
  KeySlot slot{};
  if (has_query) {
    const ItemShape item = items[FindItem(items, batch.items, &ItemShape::row_begin, row, found)];
    query_position = item.first_row + (row - item.row_begin);
    key_position = query_position;
  }
  if (has_key) {
    const ItemShape item =
        items[FindItem(items, batch.items, &ItemShape::new_key_begin, key, found)];
    key_position = item.cached_keys + (key - item.new_key_begin);
    if (!has_query) query_position = key_position;
    const int64_t address =
        Global<const int64_t>(params.block_address)[item.block_begin + key_position / kBlockTokens];
    slot.block = params.kv + address;
    slot.token = static_cast<int32_t>(key_position % kBlockTokens);
    slot.block_tokens = item.block_tokens;
  }

  const bool two_angles = key_position != query_position;
  const int pairs = params.rope_dim / 2;
  for (int i = device::ThreadIndex(); i < (two_angles ? 2 : 1) * pairs; i += kThreads) {
    const int of_key = i / pairs;
    const int pair = i % pairs;
    const double position = static_cast<double>(of_key != 0 ? key_position : query_position);
    const double frequency = Global<const double>(params.inverse_frequency)[pair];
    float cosine;
    float sine;
    Rotation(position * frequency, params.attention_factor, &cosine, &sine);
    angles[of_key * kMaxWidth + pair] = cosine;
    angles[of_key * kMaxWidth + kMaxWidth / 2 + pair] = sine;
  }
  device::SyncThreads();

  const int heads = (has_query ? params.q_heads : 0) + (has_key ? 2 * params.shape.kv_heads : 0);
  for (int head = warp; head < heads; head += kWarps) {
    const HeadWork work = DescribeHead(params, head, has_query, row, key, slot, two_angles);
    StageHead(params, work, staged, lane);
    device::SyncWarp();
    if (work.rotate) {
      RotateHead(params, angles + work.angles, staged, lane);
      device::SyncWarp();
    }
    device::WithElement(work.dtype, [&](auto element) {
      StoreHead<decltype(element)>(staged, work.padded_width, work.to, lane);
    });
    device::SyncWarp();  // the next head is staged in the same place
  }
}

// ---- KV rows ----

// Copies one key's row of every head between its block and canonical order. Unit is the widest
// type that every row is made of; widths are counted in units.
template <class Unit, bool kWrite>
ATTEND_DEVICE void CopyHeads(std::byte* in_block, std::byte* canonical, int heads, int width,
                             int padded_width, int64_t head_stride) {
  const Global<Unit> rows(reinterpret_cast<Unit*>(in_block));
  const Global<Unit> packed(reinterpret_cast<Unit*>(canonical));
  const int row = kWrite ? padded_width : width;  // tails are written, not read
  for (int i = device::ThreadIndex(); i < heads * row; i += kThreads) {
    const int head = i / row;
    const int d = i % row;
    const int64_t in_row = head * head_stride + d;
    const int64_t in_packed = int64_t{head} * width + d;
    if constexpr (kWrite) {
      Unit value{};
      if (d < width) value = packed[in_packed];
      rows[in_row] = value;
    } else {
      const Unit value = rows[in_row];
      packed[in_packed] = value;
    }
  }
}

// One block per key.
template <class Unit, bool kWrite>
__global__ void __launch_bounds__(kThreads) KvRowsKernel(const KvRowsParams params) {
  const KvBlockShape& shape = params.shape;
  constexpr int kUnit = static_cast<int>(sizeof(Unit));
  const int64_t key = params.first_key + device::BlockIndex();
  const int token = static_cast<int>(key % kBlockTokens);
  const int64_t address = Global<const int64_t>(params.block_address)[key / kBlockTokens];
  std::byte* block = params.kv + address;
  const int64_t key_bytes = int64_t{shape.kv_heads} * shape.head_dim * shape.element_bytes;
  const int64_t value_bytes = int64_t{shape.kv_heads} * shape.v_head_dim * shape.element_bytes;
  const auto units = [&](int elements) { return elements * shape.element_bytes / kUnit; };
  CopyHeads<Unit, kWrite>(block + shape.KeyOffset(0, token, kBlockTokens),
                          params.canonical + device::BlockIndex() * key_bytes, shape.kv_heads,
                          units(shape.head_dim), units(shape.KeyRow()),
                          shape.KeyOffset(1, 0, kBlockTokens) / kUnit);
  CopyHeads<Unit, kWrite>(
      block + shape.ValueOffset(0, token, kBlockTokens),
      params.canonical + params.keys * key_bytes + device::BlockIndex() * value_bytes,
      shape.kv_heads, units(shape.v_head_dim), units(shape.ValueRow()),
      (shape.ValueOffset(1, 0, kBlockTokens) - shape.ValueOffset(0, 0, kBlockTokens)) / kUnit);
}

template <bool kWrite>
cudaError_t LaunchKvRows(const KvRowsParams& params, cudaStream_t stream) {
  const char* name = kWrite ? "write_kv_rows" : "read_kv_rows";
  const device::LaunchShape shape{params.keys, kThreads, 0};
  const KvBlockShape& kv = params.shape;
  const bool vectors = kv.head_dim == kv.KeyRow() && kv.v_head_dim == kv.ValueRow() &&
                       reinterpret_cast<uintptr_t>(params.canonical) % 16 == 0;
  if (vectors) {
    return device::Launch(&KvRowsKernel<Vector16, kWrite>, name, shape, params, stream);
  }
  if (kv.element_bytes == 4) {
    return device::Launch(&KvRowsKernel<uint32_t, kWrite>, name, shape, params, stream);
  }
  return device::Launch(&KvRowsKernel<uint16_t, kWrite>, name, shape, params, stream);
}

}  // namespace

cudaError_t LaunchConvert(const ConvertTask* tasks, int64_t task_count, cudaStream_t stream) {
  return device::Launch(&ConvertKernel, "convert", {task_count, kThreads, 0}, ConvertParams{tasks},
                        stream);
}

cudaError_t LaunchTransform(const TransformParams& params, int64_t blocks, cudaStream_t stream) {
  return device::Launch(&TransformKernel, "transform", {blocks, kThreads, kTransformShared}, params,
                        stream);
}

cudaError_t LaunchReadKvRows(const KvRowsParams& params, cudaStream_t stream) {
  return LaunchKvRows<false>(params, stream);
}

cudaError_t LaunchWriteKvRows(const KvRowsParams& params, cudaStream_t stream) {
  return LaunchKvRows<true>(params, stream);
}

cudaError_t PrepareKernels(int shared_limit) {
  for (const auto prepare :
       {PrepareFloatAttention, PrepareWeights, PrepareTensorPrefill, PrepareTensorDecode}) {
    const cudaError_t error = prepare(shared_limit);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace attend
