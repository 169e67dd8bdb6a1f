// SPDX-License-Identifier: Apache-2.0
//
// What one attention layer computes: pure mathematics, no weights, no family names. Checkpoint
// adapters (engine/model) and raw requests (server/convert) produce it; the plan and the engines
// read it.
//
// Order of operations: project -> clip -> q/k norm -> RoPE -> append k, v -> scale x (q.k) ->
// softcap -> ALiBi and attention bias -> mask -> softmax (with sinks) -> weighted sum of v ->
// concatenate heads -> output projection. Query head h reads key/value head h / (q_heads /
// kv_heads).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/kv_geometry.h"

namespace attend {

inline constexpr int kMaxHeadDim = 1024;
// A smaller softcap's reciprocal is not a finite float.
inline constexpr float kMinSoftcap = 1e-30f;

enum class Mask : uint8_t { kFromModel = 0, kCausal = 1, kBidirectional = 2 };

// Normalisation of each query and key head before RoPE: x * weight / sqrt(mean(x^2) + eps) over
// head_dim.
enum class QkNorm : uint8_t { kNone, kRmsPerHead };

enum class RopePairing : uint8_t {
  kHalf,         // rotates pairs (i, i + dim / 2)
  kInterleaved,  // rotates pairs (2i, 2i + 1)
};

// Rotary position embedding (Su et al. 2021) of the first `dim` elements of each query and key
// head: (x, y) -> (x cos a - y sin a, y cos a + x sin a), a = position * inverse_frequency[pair].
struct RopeSpec {
  RopePairing pairing = RopePairing::kHalf;
  int dim = 0;                            // even, <= head_dim; 0 = no rotation
  std::vector<double> inverse_frequency;  // [dim / 2], scaling already applied
  double attention_factor = 1.0;          // multiplies cos and sin

  friend bool operator==(const RopeSpec&, const RopeSpec&) = default;
};

struct AttentionSpec {
  int d_model = 0;        // width of hidden states; 0 = raw: the caller projects
  int context_width = 0;  // width of the source of K and V; = d_model in self-attention, 0 in raw
  int output_width = 0;   // width after W^O; raw: q_heads * v_head_dim
  int q_heads = 1;
  int kv_heads = 1;  // divides q_heads
  int head_dim = 1;  // 1..kMaxHeadDim, queries and keys
  int v_head_dim = 1;

  double scale = 1.0;  // multiplies q.k
  float softcap = 0;   // cap * tanh(score / cap); 0 = off
  float clip_qkv = 0;  // clamp of q, k, v to [-clip, clip]; 0 = off
  QkNorm qk_norm = QkNorm::kNone;
  float qk_norm_eps = 0;
  RopeSpec rope;
  std::vector<float> alibi_slopes;  // [q_heads] or empty
  std::vector<float> sinks;         // [q_heads] or empty

  bool causal = false;
  int64_t window =
      0;  // keys a row sees, its own included; bidirectional: |j - p| < window; 0 = none
  bool cross = false;  // K and V come from a context, not from the hidden states
  bool mask_selectable =
      false;  // plain module: the caller chooses causality, and may give a context

  bool raw() const { return d_model == 0; }
  int group_size() const { return q_heads / kv_heads; }
  bool keeps_history() const { return causal || cross || mask_selectable; }

  friend bool operator==(const AttentionSpec&, const AttentionSpec&) = default;
};

// INVALID_ARGUMENT naming the field when a value is out of range or two do not fit together.
absl::Status Validate(const AttentionSpec& spec);

// The same mathematics over keys kept in `kv_dtype`.
KvGeometry GeometryOf(const AttentionSpec& spec, DType kv_dtype);

// "none", "rope" or "alibi".
std::string PositionRuleName(const AttentionSpec& spec);

}  // namespace attend
