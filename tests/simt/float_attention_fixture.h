// SPDX-License-Identifier: Apache-2.0
//
// Harness of the float attention's tests: some raw sequences with the tiles that the engine would
// make of them, run through attention, combine and weights in the emulation and compared with the
// double oracle. A test changes inputs between MakeInputs() and Run().
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/attention_spec.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/prepare.h"
#include "tests/simt/device_array.h"
#include "tests/support/reference_attention.h"

namespace attend {

// One raw sequence.
struct FloatItem {
  int64_t rows = 0;
  int64_t keys = 0;
  int64_t first_row = 0;
  bool causal = true;
  int32_t block_tokens = kBlockTokens;
  int64_t bias_columns = 0;  // 0 = no bias
  int64_t bias_first_key = 0;
  bool bias_per_head = false;

  // Filled by MakeInputs.
  std::vector<float> q = {};  // [rows, q_heads, head_dim]
  std::vector<float> k = {};  // [keys, kv_heads, head_dim], as kept in the KV dtype
  std::vector<float> v = {};  // [keys, kv_heads, v_head_dim], the same
  std::vector<float> bias = {};
};

struct FloatCase {
  AttentionSpec spec;
  DType kv_dtype = DType::kF32;
  DType output_dtype = DType::kF32;
  DType q_dtype = DType::kF32;  // of the weights kernel; attention reads float
  std::vector<FloatItem> items = {};
  int64_t split_keys = 0;  // > 0: items of few packed rows are split
  std::vector<int> empty_after =
      {};                      // splits after which an empty one follows; -1 = before the first
  int64_t blocks = 3;          // thread blocks of a launch
  int64_t block_distance = 0;  // bytes between KV blocks; 0 = just what they need
};

// A spec of raw attention with scale 1 / sqrt(head_dim).
AttentionSpec RawSpec(int q_heads, int kv_heads, int head_dim, int v_head_dim);

class FloatRun {
 public:
  explicit FloatRun(FloatCase c) : case_(std::move(c)) {}

  // Normal random inputs, rounded to the KV dtype.
  void MakeInputs(std::mt19937_64& random);
  FloatCase& config() { return case_; }
  FloatItem& item(size_t index) { return case_.items[index]; }

  // Attention, combine and weights; all that they must write was written.
  void Run();
  // Against double, every element of output and weights. Rows' statistics are behind the weights.
  void CheckAgainstDouble() const;

  // [rows, q_heads, v_head_dim] of all items, as bytes of the output dtype.
  const std::vector<std::byte>& output() const { return output_; }
  float Output(size_t item, int64_t row, int64_t head, int64_t d) const;
  RowStatistics Statistics(size_t item, int64_t row, int64_t head) const;
  // [q_heads, rows, keys] of an item.
  const std::vector<float>& weights(size_t item) const { return weights_[item]; }

 private:
  void PlaceItems();
  void MakeTiles();
  void WriteBlocks(std::byte* kv) const;
  std::vector<float> QueryRows() const;
  std::vector<std::byte> StoredQueries() const;
  void RunWeights(const AttentionParams& params);
  KvBlockShape Shape() const;

  FloatCase case_;
  std::vector<ItemShape> shapes_;
  std::vector<std::unique_ptr<simt::DeviceArray<float>>> biases_;
  std::vector<int64_t> addresses_;
  int64_t kv_bytes_ = 0;
  int64_t query_rows_ = 0;
  std::vector<AttentionTile> tiles_;
  std::vector<CombineTile> combines_;
  int64_t partial_rows_ = 0;

  std::vector<std::byte> output_;
  std::vector<RowStatistics> statistics_;
  std::vector<std::vector<float>> weights_;
};

}  // namespace attend
