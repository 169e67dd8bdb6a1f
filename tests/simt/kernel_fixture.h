// SPDX-License-Identifier: Apache-2.0
//
// Attention kernels by themselves in the emulation: a batch of random items laid out in device
// memory as the engine would (KV blocks in any order, packed rows, tiles, splits), one launch, and
// the comparison of everything it wrote with textbook attention in double on the same rounded
// inputs. Memory that a kernel has no business with is uninitialised, which the emulation reports.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/cuda/kernels.h"
#include "tests/simt/device_array.h"

namespace attend {

// What all items of a batch share.
struct KernelSpec {
  int q_heads = 1;
  int kv_heads = 1;
  int head_dim = 64;
  int v_head_dim = 64;
  float scale = 0.125f;
  float softcap = 0;
  int64_t window = 0;
  std::vector<float> alibi_slopes;  // [q_heads] or none
  std::vector<float> sinks;         // [q_heads] or none
  DType kv_dtype = DType::kBF16;
  DType q_dtype = DType::kBF16;
  DType output_dtype = DType::kF32;

  int group() const { return q_heads / kv_heads; }
};

// One sequence. q, k and v are random normal numbers that tests may change before Build, which
// rounds them to their types.
struct KernelItem {
  int64_t rows = 0;
  int64_t first_row = 0;
  int64_t keys = 0;
  bool causal = false;
  int block_tokens = kBlockTokens;
  std::vector<float> q;     // [rows, q_heads, head_dim]
  std::vector<float> k;     // [keys, kv_heads, head_dim]
  std::vector<float> v;     // [keys, kv_heads, v_head_dim]
  std::vector<float> bias;  // [bias_heads, rows, bias_columns], empty = none
  int bias_heads = 1;       // 1 or q_heads
  int64_t bias_columns = 0;
  int64_t bias_first_key = 0;
};

// What one (row, head) should be, and how far a right answer may be from it.
struct ExpectedRow {
  double max;
  double max_error;
  double sum;
  double sum_error;
  std::vector<double> output;  // [v_head_dim]
  std::vector<double> output_error;
};

class KernelBatch {
 public:
  using Kernel = std::function<cudaError_t(const AttentionParams&, int64_t blocks)>;

  KernelBatch(KernelSpec spec, uint64_t seed);

  KernelItem& Add(int64_t rows, int64_t first_row, int64_t keys, bool causal);
  // Rows [0, rows) of random bias for keys [first_key, first_key + columns).
  void AddBias(KernelItem& item, int heads, int64_t columns, int64_t first_key);
  // Puts blocks this far apart, in untouched memory, instead of side by side. Before Build.
  void SpreadBlocks(int64_t bytes) { spread_bytes_ = bytes; }

  // Lays everything out in device memory, and cuts items into tiles of up to `tile_rows` packed
  // rows; with `split_keys` > 0 rows with more keys are split at its multiples.
  void Build(int tile_rows, int64_t split_keys = 0);
  // Runs the kernel with a grid of `blocks` on fresh outputs. False after a captured violation.
  bool Run(const Kernel& kernel, int64_t blocks = 3);
  // Everything was written and is right. Splits are merged in double first.
  testing::AssertionResult Matches() const;

  // Output and statistics of one item, as bytes: equal bytes are equal bits.
  std::vector<std::byte> ItemBits(size_t item) const;
  float Output(size_t item, int64_t row, int head, int column) const;
  RowStatistics Statistics(size_t item, int64_t row, int head) const;
  ExpectedRow Expected(size_t item, int64_t row, int head) const;

  const KernelSpec& spec() const { return spec_; }
  KernelItem& item(size_t index) { return *items_[index]; }
  const AttentionParams& params() const { return params_; }
  size_t tiles() const { return tile_list_.size(); }

 private:
  struct Visible {
    int64_t key;
    double score;
    double error;
  };

  void LayOutKv();
  void LayOutItems();
  void CutTiles(int tile_rows, int64_t split_keys);
  std::vector<Visible> VisibleScores(const KernelItem& item, int64_t row, int head) const;
  // Index of a row of q, output and statistics.
  int64_t OutputRow(size_t item, int64_t row, int head) const {
    return (row_begin_[item] + row) * spec_.q_heads + head;
  }
  RowStatistics MergedRow(size_t item, int64_t row, int head, std::vector<double>& output) const;

  KernelSpec spec_;
  std::mt19937_64 random_;
  KvBlockShape shape_;
  int64_t spread_bytes_ = 0;
  std::vector<std::unique_ptr<KernelItem>> items_;
  std::vector<int64_t> row_begin_;
  std::vector<int32_t> block_begin_;
  std::vector<AttentionTile> tile_list_;
  int64_t query_rows_ = 0;
  int64_t partial_rows_ = 0;

  template <class T>
  using Device = std::unique_ptr<simt::DeviceArray<T>>;
  std::unique_ptr<simt::SparseBuffer> sparse_kv_;
  Device<std::byte> kv_;
  Device<int64_t> block_address_;
  Device<BatchShape> batch_;
  Device<ItemShape> item_shapes_;
  Device<AttentionTile> tiles_;
  Device<int32_t> tile_count_;
  Device<std::byte> q_;
  Device<float> alibi_;
  Device<float> sinks_;
  std::vector<Device<float>> bias_;
  Device<std::byte> output_;
  Device<RowStatistics> statistics_;
  Device<float> partial_output_;
  Device<RowStatistics> partial_statistics_;
  AttentionParams params_{};
};

}  // namespace attend
