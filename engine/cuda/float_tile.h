// SPDX-License-Identifier: Apache-2.0
//
// Products of query rows and keys on the float units: how a tile of keys lies in shared memory, how
// it gets there, and which products each thread of a block makes. Used by the float attention and
// by attention weights; knows nothing of scores and softmax.
#pragma once

#include "engine/cuda/device.h"
#include "engine/cuda/elements.h"
#include "engine/cuda/kernels.h"

namespace attend::device {

inline constexpr int kFloatThreads = 128;  // of a block

// Keys of a tile for head widths up to kWidth. Fewer of wide ones: 32 query rows, keys, values and
// scores take less than 99 KiB, the least of an architecture (sm_86, sm_89).
template <class T, int kWidth>
inline constexpr int kTileKeys = kWidth <= 128    ? 64
                                 : sizeof(T) == 2 ? 32
                                                  : 16;

// Rows of kWidth elements of T in shared memory. Chunk c (16 bytes) of row r lies at chunk
// c ^ (r % 8): eight threads that read one chunk of eight rows then use all 32 banks once.
template <class T, int kWidth>
struct SwizzledRows {
  static constexpr int kChunk = kVectorElements<T>;  // elements
  static constexpr int kChunks = kWidth / kChunk;    // of a row
  static_assert(kChunks % 8 == 0);

  ATTEND_DEVICE static int Offset(int row, int chunk) {
    return row * kWidth + (chunk ^ (row % 8)) * kChunk;
  }
};

// Starts copying `count` rows, `stride` elements apart, of `chunks` chunks each into kRows rows;
// rows from `count` on become zeros. Row r of the destination is swizzled or plain. `from` is
// readable even when nothing is copied.
template <class T, int kWidth, int kRows, bool kSwizzled>
ATTEND_DEVICE void CopyRows(Shared<T> to, Global<const T> from, int count, int stride, int chunks) {
  using Rows = SwizzledRows<T, kWidth>;
  constexpr int kStep = kFloatThreads / Rows::kChunks;  // rows that the block copies at once
  const int chunk = ThreadIndex() % Rows::kChunks;
  if (chunk >= chunks) return;
#pragma unroll
  for (int i = 0; i < kRows; i += kStep) {
    const int row = ThreadIndex() / Rows::kChunks + i;
    const bool valid = row < count;
    const int at = kSwizzled ? Rows::Offset(row, chunk) : row * kWidth + chunk * Rows::kChunk;
    CopyAsync16(to + at, valid ? from + (int64_t{row} * stride + chunk * Rows::kChunk) : from,
                valid);
  }
}

// The products of a block: thread t has rows FirstRow() + 8 i and keys FirstKey() + 4 j. Warps
// differ in keys, so that few rows keep all of them busy.
template <class T, int kWidth, int kRows>
struct ProductTile {
  static constexpr int kKeys = kTileKeys<T, kWidth>;
  static constexpr int kRowsEach = kRows / 8;
  static constexpr int kKeysEach = kKeys / 16;

  ATTEND_DEVICE static int FirstRow() { return ThreadIndex() % 32 / 4; }
  ATTEND_DEVICE static int FirstKey() {
    return ThreadIndex() / 32 * (kKeys / 4) + ThreadIndex() % 4;
  }

  // products[i][j] = q . k over the first `chunks` chunks of T; each sum runs over the elements in
  // ascending order. Both sides are swizzled.
  ATTEND_DEVICE static void Multiply(Shared<float> q, Shared<T> keys, int chunks,
                                     float (&products)[kRowsEach][kKeysEach]) {
    using Rows = SwizzledRows<float, kWidth>;
    using Keys = SwizzledRows<T, kWidth>;
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
      for (int j = 0; j < kKeysEach; ++j) products[i][j] = 0;
    }
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      float k[kKeysEach][Keys::kChunk];
#pragma unroll
      for (int j = 0; j < kKeysEach; ++j) {
        Unpack<T>(Load16(keys + Keys::Offset(FirstKey() + 4 * j, chunk)), k[j]);
      }
#pragma unroll
      for (int part = 0; part < Keys::kChunk / 4; ++part) {
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) {
          float x[4];
          const int q_chunk = chunk * (Keys::kChunk / 4) + part;
          Unpack<float>(Load16(q + Rows::Offset(FirstRow() + 8 * i, q_chunk)), x);
#pragma unroll
          for (int d = 0; d < 4; ++d) {
#pragma unroll
            for (int j = 0; j < kKeysEach; ++j) products[i][j] += x[d] * k[j][4 * part + d];
          }
        }
      }
    }
  }
};

// Where the keys or values of one key head begin that lie in the block of key `key`.
template <class T>
ATTEND_DEVICE Global<const T> RowsAt(const AttentionParams& params, const ItemShape& item,
                                     int64_t block_address, int32_t kv_head, int64_t key,
                                     bool values) {
  const int token = static_cast<int>(key % kBlockTokens);
  const int64_t offset = values ? params.shape.ValueOffset(kv_head, token, item.block_tokens)
                                : params.shape.KeyOffset(kv_head, token, item.block_tokens);
  return Global<const T>(reinterpret_cast<const T*>(params.kv + block_address + offset));
}

ATTEND_DEVICE int64_t BlockAddress(const AttentionParams& params, const ItemShape& item,
                                   int64_t key) {
  return Global<const int64_t>(params.block_address)[item.block_begin + key / kBlockTokens];
}

// ---- Which kernel (host) ----

// A kernel's KV type and the widest head it takes.
template <class T, int kWidth>
struct KernelCase {
  using Element = T;
  static constexpr int kHeadWidth = kWidth;
};
// f(KernelCase) for each kernel that exists, up to the first error.
template <class F>
cudaError_t ForEachCase(const F& f) {
  cudaError_t error = cudaSuccess;
  const auto call = [&](auto kernel_case) {
    if (error == cudaSuccess) error = f(kernel_case);
  };
  call(KernelCase<float, 64>{});
  call(KernelCase<float, 128>{});
  call(KernelCase<float, 256>{});
  call(KernelCase<Bf16, 64>{});
  call(KernelCase<Bf16, 128>{});
  call(KernelCase<Bf16, 256>{});
  call(KernelCase<F16, 64>{});
  call(KernelCase<F16, 128>{});
  call(KernelCase<F16, 256>{});
  return error;
}
template <class T, class F>
cudaError_t WithWidth(int width, const F& f) {
  if (width <= 64) return f(KernelCase<T, 64>{});
  if (width <= 128) return f(KernelCase<T, 128>{});
  if (width <= 256) return f(KernelCase<T, 256>{});
  return cudaErrorInvalidValue;
}
// f(KernelCase) of the narrowest kernel that holds both widths.
template <class F>
cudaError_t WithCase(DType kv_dtype, const KvBlockShape& shape, const F& f) {
  const int width = shape.head_dim > shape.v_head_dim ? shape.head_dim : shape.v_head_dim;
  if (kv_dtype == DType::kF32) return WithWidth<float>(width, f);
  if (kv_dtype == DType::kBF16) return WithWidth<Bf16>(width, f);
  if (kv_dtype == DType::kF16) return WithWidth<F16>(width, f);
  return cudaErrorInvalidValue;
}

}  // namespace attend::device
