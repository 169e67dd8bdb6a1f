// SPDX-License-Identifier: Apache-2.0
//
// Attention on the float units: queries are float, keys and values of any type are widened, every
// product and sum is float. The path of F32 models; called by batch_stages. One block makes one
// tile of up to 32 packed rows: for each tile of keys products, online softmax, weighted sum of
// values.
//
// A (row, key) pair that the row doesn't see never enters the row's arithmetic: its product is
// replaced by a mark before the softmax, and its value is skipped, not multiplied by 0 (0 x NaN).
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

// Stands for the weight of a pair that isn't visible; weights are >= 0 or NaN.
constexpr float kHidden = -1.0f;

// Shared memory of a block, bytes: q, keys, values, scores, then one float per row twice.
template <class T, int kWidth>
struct Map {
  static constexpr int kKeys = device::kTileKeys<T, kWidth>;
  // Four floats between rows: the 8 rows x 4 keys that a warp writes then use all banks once.
  static constexpr int kScoreStride = kKeys + 4;
  static constexpr int kTileElements = kKeys * kWidth;

  static constexpr int kQ = 0;                                 // float [rows, kWidth], swizzled
  static constexpr int kK = kQ + kFloatTileRows * kWidth * 4;  // T [keys, kWidth], swizzled
  static constexpr int kV = kK + kTileElements * static_cast<int>(sizeof(T));  // T [keys, kWidth]
  static constexpr int kScores = kV + kTileElements * static_cast<int>(sizeof(T));  // float
  static constexpr int kRescale = kScores + kFloatTileRows * kScoreStride * 4;      // float [rows]
  static constexpr int kFactor = kRescale + kFloatTileRows * 4;                     // float [rows]
  static constexpr int kBytes = kFactor + kFloatTileRows * 4;
  static_assert(kBytes <= 99 * 1024);
};

template <class T, int kWidth>
struct TileMemory {
  using M = Map<T, kWidth>;
  Shared<float> q = device::SharedArray<float>("q", M::kQ, kFloatTileRows* kWidth);
  Shared<T> keys = device::SharedArray<T>("keys", M::kK, M::kTileElements);
  Shared<T> values = device::SharedArray<T>("values", M::kV, M::kTileElements);
  Shared<float> scores =
      device::SharedArray<float>("scores", M::kScores, kFloatTileRows* M::kScoreStride);
  // What a row's sums so far are multiplied by, and the factor of its finished sum.
  Shared<float> rescale = device::SharedArray<float>("rescale", M::kRescale, kFloatTileRows);
  Shared<float> factor = device::SharedArray<float>("factor", M::kFactor, kFloatTileRows);
};

// Queries of the tile's rows, zeros below them.
template <int kWidth, int kRows>
ATTEND_DEVICE void CopyQueries(const AttentionParams& params, const ItemShape& item,
                               const AttentionTile& tile, Shared<float> to) {
  using Rows = device::SwizzledRows<float, kWidth>;
  constexpr int kStep = kFloatThreads / Rows::kChunks;
  const int chunk = device::ThreadIndex() % Rows::kChunks;
  const int32_t key_row = params.shape.KeyRow();
  if (chunk * Rows::kChunk >= key_row) return;
  const Global<const float> q(static_cast<const float*>(params.q));
#pragma unroll 1
  for (int row = device::ThreadIndex() / Rows::kChunks; row < kRows; row += kStep) {
    const bool valid = row < tile.rows;
    const device::PackedRow packed(tile.row_begin + (valid ? row : 0), tile.kv_head, params.group);
    const int64_t q_row = (item.row_begin + packed.query_row) * params.q_heads + packed.head;
    device::CopyAsync16(to + Rows::Offset(row, chunk), q + (q_row * key_row + chunk * Rows::kChunk),
                        valid);
  }
}

// Softmax of one row, over some threads that follow each other: thread `part` of kParts has keys
// part + kParts * i of every tile.
template <class T, int kWidth, int kRows>
class RowSoftmax {
 public:
  using M = Map<T, kWidth>;
  static constexpr int kParts = kFloatThreads / kRows;
  static constexpr int kKeysEach = M::kKeys / kParts;

  ATTEND_DEVICE RowSoftmax(const AttentionParams& params, const ItemShape& item,
                           const AttentionTile& tile)
      : row_(device::ThreadIndex() / kParts),
        part_(device::ThreadIndex() % kParts),
        valid_(row_ < tile.rows),
        packed_(tile.row_begin + (valid_ ? row_ : 0), tile.kv_head, params.group),
        span_(device::VisibleSpan(item.first_row + packed_.query_row, item.keys, item.causal != 0,
                                  params.window)),
        score_(params, item, packed_) {
    if (tile.key_end < span_.end) span_.end = tile.key_end;
  }

  // Turns the row's products with keys from `first_key` on into weights, or kHidden, and leaves
  // what the sums so far are multiplied by. True if a pair is hidden.
  ATTEND_DEVICE bool Update(int64_t first_key, const TileMemory<T, kWidth>& memory) {
    const Shared<float> scores = memory.scores + (row_ * M::kScoreStride + part_);
    float x[kKeysEach];
    bool hidden[kKeysEach];
    bool any_hidden = false;
    float maximum = max_;
#pragma unroll
    for (int i = 0; i < kKeysEach; ++i) {
      const int64_t key = first_key + part_ + kParts * i;
      hidden[i] = !valid_ || !span_.Contains(key);
      x[i] = -device::kInfinity;
      if (!hidden[i]) {
        const float bias = score_.Bias(key);
        hidden[i] = bias == -device::kInfinity;
        x[i] = score_(scores[kParts * i], key, bias);
      }
      any_hidden |= hidden[i];
      maximum = device::Max(maximum, x[i]);
    }
#pragma unroll
    for (int mask = 1; mask < kParts; mask *= 2) {
      maximum = device::Max(maximum, device::ShuffleXor(maximum, mask));
    }
    const float reference = device::Reference(maximum);
    const float rescale = device::AccurateWeight(max_, reference);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kKeysEach; ++i) {
      const float weight = device::AccurateWeight(x[i], reference);
      scores[kParts * i] = hidden[i] ? kHidden : weight;
      sum += weight;  // of a hidden pair: exp(-inf) = 0
    }
    sum_ = sum_ * rescale + sum;
    max_ = maximum;
    if (part_ == 0) memory.rescale[row_] = rescale;
    return valid_ && any_hidden;
  }

  // After the last key: the row's statistics to memory, the factor of its sum of values to the
  // block. A row without visible keys has sum 0 and factor 0: its output is zeros.
  ATTEND_DEVICE void Finish(const AttentionParams& params, const ItemShape& item,
                            const AttentionTile& tile, const TileMemory<T, kWidth>& memory) {
#pragma unroll
    for (int mask = 1; mask < kParts; mask *= 2) sum_ += device::ShuffleXor(sum_, mask);
    if (part_ != 0 || !valid_) return;
    const RowStatistics row{max_, sum_};
    if (tile.partial >= 0) {
      Global<RowStatistics>(params.partial_statistics)[tile.partial + row_] = row;
      memory.factor[row_] = 1.0f;
      return;
    }
    const device::FinishedRow finished =
        device::FinishRow(row, device::SinkOf(params, packed_.head));
    const int64_t query = (item.row_begin + packed_.query_row) * params.q_heads + packed_.head;
    Global<RowStatistics>(params.statistics)[query] = finished.statistics;
    memory.factor[row_] = finished.factor;
  }

 private:
  int row_;
  int part_;
  bool valid_;
  device::PackedRow packed_;
  device::KeySpan span_;
  device::RowScore score_;
  float max_ = -device::kInfinity;
  float sum_ = 0;  // of this thread's keys
};

// Weighted sums of values: a thread has rows group + kGroups * i and chunks column + kColumns * j.
template <class T, int kWidth, int kRows>
class ValueSums {
 public:
  using M = Map<T, kWidth>;
  static constexpr int kChunk = device::kVectorElements<T>;
  static constexpr int kChunks = kWidth / kChunk;
  static constexpr int kColumns = kChunks < 16 ? kChunks : 16;
  static constexpr int kGroups = kFloatThreads / kColumns;
  static constexpr int kRowsEach = kRows < kGroups ? 1 : kRows / kGroups;
  static constexpr int kChunksEach = kChunks / kColumns;

  // Chunks past the width read chunk 0; StorePart leaves them out.
  ATTEND_DEVICE explicit ValueSums(int chunks) : chunks_(chunks) {
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
      for (int j = 0; j < kChunksEach; ++j) {
#pragma unroll
        for (int d = 0; d < kChunk; ++d) sum_[i][j][d] = 0;
      }
    }
  }

  // Adds the first `keys` keys of a tile; others in the last group of four have weight 0 or
  // kHidden. Without kSome, no pair is hidden.
  template <bool kSome>
  ATTEND_DEVICE void Add(int keys, const TileMemory<T, kWidth>& memory) {
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const float rescale = memory.rescale[Row(i)];
#pragma unroll
      for (int j = 0; j < kChunksEach; ++j) {
#pragma unroll
        for (int d = 0; d < kChunk; ++d) sum_[i][j][d] *= rescale;
      }
    }
#pragma unroll 1
    for (int key = 0; key < keys; key += 4) {
      float weight[kRowsEach][4];
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        device::Unpack<float>(device::Load16(memory.scores + (Row(i) * M::kScoreStride + key)),
                              weight[i]);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int j = 0; j < kChunksEach; ++j) {
          float value[kChunk];
          const int chunk = Chunk(j) < chunks_ ? Chunk(j) : 0;
          device::Unpack<T>(device::Load16(memory.values + ((key + k) * kWidth + chunk * kChunk)),
                            value);
#pragma unroll
          for (int i = 0; i < kRowsEach; ++i) {
            if (kSome && weight[i][k] == kHidden) continue;
#pragma unroll
            for (int d = 0; d < kChunk; ++d) sum_[i][j][d] += weight[i][k] * value[d];
          }
        }
      }
    }
  }

  ATTEND_DEVICE void Store(const AttentionParams& params, const ItemShape& item,
                           const AttentionTile& tile, const TileMemory<T, kWidth>& memory) {
    const int32_t width = params.shape.v_head_dim;
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int row = Group() + kGroups * i;
      if (row >= tile.rows) continue;
      const float factor = memory.factor[row];
      DType dtype = DType::kF32;
      void* out = nullptr;
      if (tile.partial >= 0) {
        out = params.partial_output + (tile.partial + row) * width;
      } else {
        const device::PackedRow packed(tile.row_begin + row, tile.kv_head, params.group);
        const int64_t query = (item.row_begin + packed.query_row) * params.q_heads + packed.head;
        dtype = params.output_dtype;
        out = static_cast<std::byte*>(params.output) + query * width * DTypeBytes(dtype);
      }
#pragma unroll
      for (int j = 0; j < kChunksEach; ++j) {
#pragma unroll
        for (int d = 0; d < kChunk; ++d) sum_[i][j][d] *= factor;
        device::StorePart(dtype, out, Chunk(j) * kChunk, width, sum_[i][j]);
      }
    }
  }

 private:
  ATTEND_DEVICE static int Group() { return device::ThreadIndex() / kColumns; }
  // Groups beyond the rows repeat one and store nothing.
  ATTEND_DEVICE static int Row(int i) { return (Group() + kGroups * i) % kRows; }
  ATTEND_DEVICE static int Chunk(int j) { return device::ThreadIndex() % kColumns + kColumns * j; }

  int chunks_;
  float sum_[kRowsEach][kChunksEach][kChunk];
};

// One tile of up to kRows rows. Values of a key tile arrive while its products are made, the next
// keys during softmax and sums.
template <class T, int kWidth, int kRows>
ATTEND_DEVICE void AttendTile(const AttentionParams& params, const AttentionTile& tile,
                              const TileMemory<T, kWidth>& memory) {
  using Products = device::ProductTile<T, kWidth, kRows>;
  constexpr int kKeys = Products::kKeys;
  constexpr int kChunk = device::kVectorElements<T>;
  const ItemShape item = Global<const ItemShape>(params.items)[tile.item];
  const int key_chunks = params.shape.KeyRow() / kChunk;
  const int value_chunks = params.shape.ValueRow() / kChunk;
  const auto keys_of = [&](int64_t first_key) {
    const int64_t left = tile.key_end - first_key;
    return static_cast<int>(left < kKeys ? left : kKeys);
  };
  const auto copy_keys = [&](int64_t first_key, int64_t address) {
    device::CopyRows<T, kWidth, kKeys, true>(
        memory.keys,
        device::RowsAt<T>(params, item, address, tile.kv_head, first_key, /*values=*/false),
        keys_of(first_key), params.shape.KeyRow(), key_chunks);
  };
  RowSoftmax<T, kWidth, kRows> softmax(params, item, tile);
  ValueSums<T, kWidth, kRows> sums(value_chunks);

  int64_t address = 0;  // of the block that holds the current keys
  if (tile.key_begin < tile.key_end) {
    address = device::BlockAddress(params, item, tile.key_begin);
    CopyQueries<kWidth, kRows>(params, item, tile, memory.q);
    copy_keys(tile.key_begin, address);
  }
  device::CommitCopies();
  for (int64_t first_key = tile.key_begin; first_key < tile.key_end; first_key += kKeys) {
    const int64_t next_key = first_key + kKeys;
    const int64_t next_address =
        next_key < tile.key_end ? device::BlockAddress(params, item, next_key) : 0;
    device::WaitCopies<0>();
    device::SyncThreads();  // keys are there; values and scores of the last tile are done with
    device::CopyRows<T, kWidth, kKeys, false>(
        memory.values,
        device::RowsAt<T>(params, item, address, tile.kv_head, first_key, /*values=*/true),
        keys_of(first_key), params.shape.ValueRow(), value_chunks);
    device::CommitCopies();
    float products[Products::kRowsEach][Products::kKeysEach];
    Products::Multiply(memory.q, memory.keys, key_chunks, products);
#pragma unroll
    for (int i = 0; i < Products::kRowsEach; ++i) {
#pragma unroll
      for (int j = 0; j < Products::kKeysEach; ++j) {
        memory.scores[(Products::FirstRow() + 8 * i) * Map<T, kWidth>::kScoreStride +
                      Products::FirstKey() + 4 * j] = products[i][j];
      }
    }
    device::SyncThreads();  // products are complete, keys are done with
    if (next_key < tile.key_end) copy_keys(next_key, next_address);
    device::CommitCopies();  // after the last keys an empty group, so that the wait counts the same
    const bool hidden = softmax.Update(first_key, memory);
    device::WaitCopies<1>();  // for the values, not for the next keys
    if (device::SyncThreadsOr(hidden)) {
      sums.template Add<true>(keys_of(first_key), memory);
    } else {
      sums.template Add<false>(keys_of(first_key), memory);
    }
    address = next_address;
  }
  softmax.Finish(params, item, tile, memory);
  device::SyncThreads();
  sums.Store(params, item, tile, memory);
  device::SyncThreads();  // the next tile may have no keys and write factors at once
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kFloatThreads, kWidth <= 64 ? 3 : 2)
    FloatAttentionKernel(const AttentionParams params) {
  const TileMemory<T, kWidth> memory;
  const int32_t count = Global<const int32_t>(params.tile_count)[0];
  for (int64_t i = device::BlockIndex(); i < count; i += device::GridBlocks()) {
    const AttentionTile tile = Global<const AttentionTile>(params.tiles)[i];
    if (tile.few != 0 && tile.rows <= 8) {
      AttendTile<T, kWidth, 8>(params, tile, memory);
    } else {
      AttendTile<T, kWidth, kFloatTileRows>(params, tile, memory);
    }
  }
}

}  // namespace

cudaError_t LaunchFloatAttention(const AttentionParams& params, DType kv_dtype, int64_t blocks,
                                 cudaStream_t stream) {
  return device::WithCase(kv_dtype, params.shape, [&](auto kernel_case) {
    using Case = decltype(kernel_case);
    using T = typename Case::Element;
    return device::Launch(&FloatAttentionKernel<T, Case::kHeadWidth>, "float_attention",
                          {blocks, kFloatThreads, Map<T, Case::kHeadWidth>::kBytes}, params,
                          stream);
  });
}

cudaError_t PrepareFloatAttention(int shared_limit) {
  return device::ForEachCase([&](auto kernel_case) {
    using Case = decltype(kernel_case);
    using T = typename Case::Element;
    constexpr int kBytes = Map<T, Case::kHeadWidth>::kBytes;
    if (kBytes > shared_limit) return cudaErrorInvalidValue;
    return device::AllowSharedMemory(&FloatAttentionKernel<T, Case::kHeadWidth>, kBytes);
  });
}

}  // namespace attend
