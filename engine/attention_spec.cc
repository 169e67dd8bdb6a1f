// SPDX-License-Identifier: Apache-2.0
#include "engine/attention_spec.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "engine/util/error.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

// Widths stay far below 2^31 when multiplied with each other's element sizes.
constexpr int64_t kMaxWidth = int64_t{1} << 24;
constexpr int64_t kMaxHeads = 65536;

absl::Status InRange(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return InvalidField(field, absl::StrCat(value), absl::StrCat(low, "..", high));
}

absl::Status Finite(const char* field, double value, bool may_be_negative) {
  if (std::isfinite(value) && (may_be_negative || value >= 0)) return absl::OkStatus();
  return InvalidField(field, absl::StrCat(value),
                      may_be_negative ? "a finite number" : "a finite number >= 0");
}

template <typename T>
absl::Status OnePerHead(const char* field, const std::vector<T>& values, int q_heads) {
  if (values.empty()) return absl::OkStatus();
  if (static_cast<int64_t>(values.size()) != q_heads) {
    return InvalidField(field, absl::StrCat(values.size(), " values"),
                        absl::StrCat("none or ", q_heads, ", one per query head"));
  }
  for (const T value : values) RETURN_IF_ERROR(Finite(field, value, true));
  return absl::OkStatus();
}

absl::Status ValidateShape(const AttentionSpec& spec) {
  RETURN_IF_ERROR(InRange("q_heads", spec.q_heads, 1, kMaxHeads));
  RETURN_IF_ERROR(InRange("kv_heads", spec.kv_heads, 1, spec.q_heads));
  if (spec.q_heads % spec.kv_heads != 0) {
    return InvalidField("kv_heads", absl::StrCat(spec.kv_heads),
                        absl::StrCat("a divisor of q_heads ", spec.q_heads));
  }
  RETURN_IF_ERROR(InRange("head_dim", spec.head_dim, 1, kMaxHeadDim));
  RETURN_IF_ERROR(InRange("v_head_dim", spec.v_head_dim, 1, kMaxHeadDim));
  RETURN_IF_ERROR(InRange("d_model", spec.d_model, 0, kMaxWidth));
  if (spec.raw()) {
    RETURN_IF_ERROR(InRange("context_width", spec.context_width, 0, 0));
    const int64_t width = int64_t{spec.q_heads} * spec.v_head_dim;
    return InRange("output_width", spec.output_width, width, width);
  }
  const bool own_source = !spec.cross;
  RETURN_IF_ERROR(InRange("context_width", spec.context_width, own_source ? spec.d_model : 1,
                          own_source ? spec.d_model : kMaxWidth));
  return InRange("output_width", spec.output_width, 1, kMaxWidth);
}

absl::Status ValidateRope(const AttentionSpec& spec) {
  const RopeSpec& rope = spec.rope;
  RETURN_IF_ERROR(InRange("rope.dim", rope.dim, 0, spec.head_dim));
  if (rope.dim % 2 != 0) return InvalidField("rope.dim", absl::StrCat(rope.dim), "an even number");
  if (static_cast<int64_t>(rope.inverse_frequency.size()) != rope.dim / 2) {
    return InvalidField("rope.inverse_frequency",
                        absl::StrCat(rope.inverse_frequency.size(), " values"),
                        absl::StrCat(rope.dim / 2));
  }
  for (const double frequency : rope.inverse_frequency) {
    RETURN_IF_ERROR(Finite("rope.inverse_frequency", frequency, true));
  }
  return Finite("rope.attention_factor", rope.attention_factor, true);
}

}  // namespace

absl::Status Validate(const AttentionSpec& spec) {
  RETURN_IF_ERROR(ValidateShape(spec));
  RETURN_IF_ERROR(ValidateRope(spec));
  RETURN_IF_ERROR(Finite("scale", spec.scale, true));
  RETURN_IF_ERROR(Finite("softcap", spec.softcap, false));
  if (spec.softcap > 0 && spec.softcap < kMinSoftcap) {
    return InvalidField("softcap", absl::StrCat(spec.softcap), "0 (off) or at least 1e-30");
  }
  RETURN_IF_ERROR(Finite("clip_qkv", spec.clip_qkv, false));
  RETURN_IF_ERROR(Finite("qk_norm_eps", spec.qk_norm_eps, false));
  RETURN_IF_ERROR(OnePerHead("alibi_slopes", spec.alibi_slopes, spec.q_heads));
  RETURN_IF_ERROR(OnePerHead("sinks", spec.sinks, spec.q_heads));
  if (spec.window < 0) return InvalidField("window", absl::StrCat(spec.window), ">= 0");
  if (spec.cross && spec.causal) {
    return InvalidField("causal", "true",
                        "false in cross-attention: a context has no order of rows");
  }
  return absl::OkStatus();
}

KvGeometry GeometryOf(const AttentionSpec& spec, DType kv_dtype) {
  return {spec.kv_heads, spec.head_dim, spec.v_head_dim, kv_dtype};
}

std::string PositionRuleName(const AttentionSpec& spec) {
  if (spec.rope.dim > 0) return "rope";
  return spec.alibi_slopes.empty() ? "none" : "alibi";
}

}  // namespace attend
