// SPDX-License-Identifier: Apache-2.0
//
// Both kernels of attention on tensor cores, prefill and decode, behind one parameter of a test.
// Any item can be cut into the tiles of either.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "engine/cuda/kernels.h"
#include "engine/cuda/prepare.h"
#include "tests/simt/kernel_fixture.h"

namespace attend {

// The two kernels of attention on tensor cores: which tiles they take and how they are launched.
enum class TensorPath { kPrefill, kDecode };

class TensorAttentionTest : public testing::TestWithParam<TensorPath> {
 protected:
  static void SetUpTestSuite() {
    ASSERT_EQ(PrepareTensorPrefill(99 * 1024), cudaSuccess);
    ASSERT_EQ(PrepareTensorDecode(99 * 1024), cudaSuccess);
  }

  bool prefill() const { return GetParam() == TensorPath::kPrefill; }
  // Tile height for heads of `spec`.
  int TileRows(const KernelSpec& spec) const {
    return prefill() ? TensorTileRows(std::max(spec.head_dim, spec.v_head_dim)) : kDecodeRows;
  }
  void Build(KernelBatch& batch, int64_t split_keys = 0) const {
    batch.Build(TileRows(batch.spec()), split_keys);
  }
  bool Launch(KernelBatch& batch, int64_t blocks = 2) const {
    const DType dtype = batch.spec().kv_dtype;
    return batch.Run(
        [&](const AttentionParams& params, int64_t grid) {
          return prefill() ? LaunchTensorPrefill(params, dtype, grid, nullptr)
                           : LaunchTensorDecode(params, dtype, grid, nullptr);
        },
        blocks);
  }
  testing::AssertionResult LaunchAndCompare(KernelBatch& batch, int64_t blocks = 2) const {
    if (!Launch(batch, blocks)) return testing::AssertionFailure() << "launch failed";
    return batch.Matches();
  }

  static KernelSpec Spec(int q_heads, int kv_heads, int head_dim, int v_head_dim,
                         DType dtype = DType::kBF16) {
    KernelSpec spec;
    spec.q_heads = q_heads;
    spec.kv_heads = kv_heads;
    spec.head_dim = head_dim;
    spec.v_head_dim = v_head_dim;
    spec.scale = 1 / std::sqrt(static_cast<float>(head_dim));
    spec.kv_dtype = spec.q_dtype = dtype;
    return spec;
  }
};

inline std::string PathName(const testing::TestParamInfo<TensorPath>& info) {
  return info.param == TensorPath::kPrefill ? "Prefill" : "Decode";
}

}  // namespace attend
