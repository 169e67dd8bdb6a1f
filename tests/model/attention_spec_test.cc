// SPDX-License-Identifier: Apache-2.0
#include "engine/attention_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

namespace attend {
namespace {

using testing::HasSubstr;

AttentionSpec Good() {
  AttentionSpec spec;
  spec.d_model = spec.context_width = spec.output_width = 48;
  spec.q_heads = 4;
  spec.kv_heads = 2;
  spec.head_dim = 12;
  spec.v_head_dim = 6;
  spec.rope = {RopePairing::kHalf, 4, {1.0, 0.1}, 1.0};
  spec.causal = true;
  spec.window = 5;
  return spec;
}

AttentionSpec GoodRaw() {
  AttentionSpec spec;
  spec.q_heads = 4;
  spec.kv_heads = 4;
  spec.head_dim = spec.v_head_dim = 8;
  spec.output_width = 32;
  return spec;
}

TEST(AttentionSpecTest, ValidSpecificationsPass) {
  EXPECT_EQ(Validate(Good()), absl::OkStatus());
  EXPECT_EQ(Validate(GoodRaw()), absl::OkStatus());
  AttentionSpec cross = Good();
  cross.causal = false;
  cross.cross = true;
  cross.context_width = 20;
  cross.rope = {};
  EXPECT_EQ(Validate(cross), absl::OkStatus());
}

TEST(AttentionSpecTest, OneWrongFieldIsNamedWithItsValue) {
  const std::vector<std::pair<std::function<void(AttentionSpec&)>, const char*>> changes = {
      {[](AttentionSpec& s) { s.q_heads = 0; }, "q_heads: got 0"},
      {[](AttentionSpec& s) { s.kv_heads = 0; }, "kv_heads: got 0"},
      {[](AttentionSpec& s) { s.kv_heads = 3; }, "kv_heads: got 3, wanted a divisor of q_heads 4"},
      {[](AttentionSpec& s) { s.kv_heads = 8; }, "kv_heads: got 8, wanted 1..4"},
      {[](AttentionSpec& s) { s.head_dim = 1025; }, "head_dim: got 1025, wanted 1..1024"},
      {[](AttentionSpec& s) { s.v_head_dim = 0; }, "v_head_dim: got 0"},
      {[](AttentionSpec& s) { s.d_model = -1; }, "d_model: got -1"},
      {[](AttentionSpec& s) { s.context_width = 20; }, "context_width: got 20, wanted 48..48"},
      {[](AttentionSpec& s) { s.output_width = 0; }, "output_width: got 0"},
      {[](AttentionSpec& s) { s.scale = NAN; }, "scale: got nan"},
      {[](AttentionSpec& s) { s.softcap = -1; }, "softcap: got -1"},
      {[](AttentionSpec& s) { s.clip_qkv = INFINITY; }, "clip_qkv: got inf"},
      {[](AttentionSpec& s) { s.qk_norm_eps = -1; }, "qk_norm_eps: got -1"},
      {[](AttentionSpec& s) { s.rope.dim = 14; }, "rope.dim: got 14, wanted 0..12"},
      {[](AttentionSpec& s) { s.rope.dim = 3; }, "rope.dim: got 3, wanted an even number"},
      {[](AttentionSpec& s) { s.rope.dim = 6; }, "rope.inverse_frequency: got 2 values, wanted 3"},
      {[](AttentionSpec& s) { s.rope.inverse_frequency[1] = NAN; },
       "rope.inverse_frequency: got nan"},
      {[](AttentionSpec& s) {
         s.alibi_slopes = {1, 2};
       },
       "alibi_slopes: got 2 values"},
      {[](AttentionSpec& s) {
         s.sinks = {1, 2, 3, NAN};
       },
       "sinks: got nan"},
      {[](AttentionSpec& s) { s.window = -1; }, "window: got -1"},
      {[](AttentionSpec& s) { s.cross = true; }, "causal: got true"},
  };
  for (const auto& [change, message] : changes) {
    AttentionSpec spec = Good();
    change(spec);
    const absl::Status status = Validate(spec);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
  AttentionSpec raw = GoodRaw();
  raw.output_width = 31;
  EXPECT_THAT(std::string(Validate(raw).message()),
              HasSubstr("output_width: got 31, wanted 32..32"));
}

TEST(AttentionSpecTest, GeometryAndPositionRuleFollowTheSpecification) {
  const KvGeometry geometry = GeometryOf(Good(), DType::kBF16);
  EXPECT_EQ(geometry, (KvGeometry{2, 12, 6, DType::kBF16}));
  EXPECT_EQ(geometry.TokenBytes(), 2 * (12 + 6) * 2);
  // Rows of 24 and 12 bytes take 32 and 16 inside blocks.
  EXPECT_EQ(geometry.BlockBytes(), 64 * 2 * (32 + 16));
  EXPECT_EQ(geometry.BlockBytes(16), 16 * 2 * (32 + 16));
  EXPECT_EQ((KvGeometry{1, 1, 1, DType::kF16}.BlockBytes(1)), 64);
  EXPECT_EQ(PositionRuleName(Good()), "rope");
  AttentionSpec raw = GoodRaw();
  EXPECT_EQ(PositionRuleName(raw), "none");
  raw.alibi_slopes = {1, 1, 1, 1};
  EXPECT_EQ(PositionRuleName(raw), "alibi");
}

}  // namespace
}  // namespace attend
