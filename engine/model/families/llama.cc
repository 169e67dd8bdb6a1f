// SPDX-License-Identifier: Apache-2.0
//
// The LLaMA shape: separate projections, grouped-query heads, rotary positions, causal; families
// differ in biases, q/k norms, sliding windows and defaults.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/model/families/family.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

enum class BiasRule {
  kNever,
  kQueryKeyValue,     // q, k, v always, o never
  kAttentionBiasKey,  // all four when attention_bias is true
};
enum class WindowRule {
  kNever,
  kEveryLayer,           // sliding_window, when not null
  kFromMaxWindowLayers,  // layers >= max_window_layers, when use_sliding_window
};

struct LlamaRow {
  const char* model_type;
  BiasRule biases;
  bool qk_norm;  // RMS norm of every q and k head
  WindowRule windows;
  // When config.json does not say:
  int64_t kv_heads;  // 0 = as many as query heads
  int64_t head_dim;  // 0 = hidden_size / heads
  int64_t max_positions;
};
constexpr LlamaRow kLlama = {"llama", BiasRule::kAttentionBiasKey, false, WindowRule::kNever, 0, 0,
                             2048};
constexpr LlamaRow kMistral = {"mistral", BiasRule::kNever, false, WindowRule::kEveryLayer, 8, 0,
                               131072};
constexpr LlamaRow kQwen2 = {
    "qwen2", BiasRule::kQueryKeyValue, false, WindowRule::kFromMaxWindowLayers, 32, 0, 32768};
constexpr LlamaRow kQwen3 = {
    "qwen3", BiasRule::kAttentionBiasKey, true, WindowRule::kFromMaxWindowLayers, 32, 128, 32768};

// Class defaults that the four families share.
constexpr int64_t kDefaultHidden = 4096;
constexpr int64_t kDefaultLayers = 32;
constexpr int64_t kDefaultHeads = 32;
constexpr int64_t kDefaultWindow = 4096;
constexpr int64_t kDefaultMaxWindowLayers = 28;
constexpr double kDefaultTheta = 10000;
constexpr double kDefaultRmsEps = 1e-6;

constexpr char kFull[] = "full_attention";
constexpr char kSliding[] = "sliding_attention";

absl::StatusOr<AttentionSpec> BaseSpec(const LlamaRow& row, const Config& config) {
  ASSIGN_OR_RETURN(const int64_t hidden,
                   config.Integer({"hidden_size"}, kDefaultHidden, 1, kMaxWidth));
  ASSIGN_OR_RETURN(const int64_t heads,
                   config.Integer({"num_attention_heads"}, kDefaultHeads, 1, kMaxWidth));
  // A null says "derive", an absent key the class default.
  const bool derive_kv = row.kv_heads == 0 || config.IsNull("num_key_value_heads");
  ASSIGN_OR_RETURN(
      const int64_t kv_heads,
      config.Integer({"num_key_value_heads"}, derive_kv ? heads : row.kv_heads, 1, heads));
  if (kv_heads > heads || heads % kv_heads != 0) {
    return config.Wrong("num_key_value_heads", absl::StrCat(kv_heads),
                        absl::StrCat("a divisor of num_attention_heads ", heads));
  }
  AttentionSpec spec;
  spec.d_model = spec.context_width = spec.output_width = static_cast<int>(hidden);
  spec.q_heads = static_cast<int>(heads);
  spec.kv_heads = static_cast<int>(kv_heads);
  int64_t head_dim = row.head_dim;
  if (!config.Has("head_dim") && (head_dim == 0 || config.IsNull("head_dim"))) {
    ASSIGN_OR_RETURN(head_dim, WholeHeadDim(config, spec.d_model, spec.q_heads));
  }
  ASSIGN_OR_RETURN(head_dim, config.Integer({"head_dim"}, head_dim, 1, kMaxHeadDim));
  spec.head_dim = spec.v_head_dim = static_cast<int>(head_dim);
  spec.scale = UsualScale(spec.head_dim);
  spec.causal = true;
  if (row.qk_norm) {
    spec.qk_norm = QkNorm::kRmsPerHead;
    ASSIGN_OR_RETURN(const double eps, config.Number({"rms_norm_eps"}, kDefaultRmsEps));
    spec.qk_norm_eps = static_cast<float>(eps);
  }
  return spec;
}

// The window of sliding layers; 0 = the file has none.
absl::StatusOr<int64_t> SlidingWindow(const LlamaRow& row, const Config& config) {
  if (row.windows == WindowRule::kNever || config.IsNull("sliding_window")) return 0;
  if (row.windows == WindowRule::kFromMaxWindowLayers) {
    ASSIGN_OR_RETURN(const bool used, config.Boolean("use_sliding_window", false));
    if (!used) return 0;
  }
  return config.Integer({"sliding_window"}, kDefaultWindow, 1, kMaxPositions);
}

// "full_attention" or "sliding_attention" for each layer.
absl::StatusOr<std::vector<std::string>> LayerTypes(const LlamaRow& row, const Config& config,
                                                    int64_t layers, int64_t window) {
  ASSIGN_OR_RETURN(std::vector<std::string> types, ReadLayerTypes(config, layers));
  if (!types.empty()) {
    if (window == 0 && std::find(types.begin(), types.end(), kSliding) != types.end()) {
      return config.Wrong(
          "layer_types", kSliding,
          absl::StrCat("only full_attention: this ", row.model_type, " has no window"));
    }
    return types;
  }
  int64_t first_sliding = 0;
  if (row.windows == WindowRule::kFromMaxWindowLayers) {
    ASSIGN_OR_RETURN(first_sliding, config.Integer({"max_window_layers"}, kDefaultMaxWindowLayers,
                                                   0, kMaxPositions));
  }
  for (int64_t i = 0; i < layers; ++i) {
    types.push_back(window > 0 && i >= first_sliding ? kSliding : kFull);
  }
  return types;
}

LayerDescription DescribeLayer(const AttentionSpec& spec, int64_t index, bool qkv_bias,
                               bool o_bias) {
  LayerDescription layer{.name = absl::StrCat(index),
                         .module = absl::StrCat("layers.", index, ".self_attn"),
                         .input_point = "output of input_layernorm",
                         .spec = spec};
  const int64_t q_rows = int64_t{spec.q_heads} * spec.head_dim;
  const int64_t kv_rows = int64_t{spec.kv_heads} * spec.head_dim;
  const std::string base = layer.module + ".";
  AddProjection(layer, base + "q_proj", {{&LayerWeights::q, &LayerWeights::q_bias, q_rows}},
                spec.d_model, qkv_bias);
  AddProjection(layer, base + "k_proj", {{&LayerWeights::k, &LayerWeights::k_bias, kv_rows}},
                spec.d_model, qkv_bias);
  AddProjection(layer, base + "v_proj", {{&LayerWeights::v, &LayerWeights::v_bias, kv_rows}},
                spec.d_model, qkv_bias);
  AddProjection(layer, base + "o_proj", {{&LayerWeights::o, &LayerWeights::o_bias, spec.d_model}},
                q_rows, o_bias);
  if (spec.qk_norm != QkNorm::kNone) {
    layer.tensors.push_back({base + "q_norm.weight", {{&LayerWeights::q_norm, spec.head_dim}}});
    layer.tensors.push_back({base + "k_norm.weight", {{&LayerWeights::k_norm, spec.head_dim}}});
  }
  layer.owned = {base};
  return layer;
}

absl::StatusOr<ModelDescription> Describe(const LlamaRow& row, const Config& config) {
  ASSIGN_OR_RETURN(AttentionSpec spec, BaseSpec(row, config));
  ASSIGN_OR_RETURN(const int64_t layers,
                   config.Integer({"num_hidden_layers"}, kDefaultLayers, 1, kMaxLayers));
  ASSIGN_OR_RETURN(const int64_t window, SlidingWindow(row, config));
  ASSIGN_OR_RETURN(const std::vector<std::string> types, LayerTypes(row, config, layers, window));
  bool all_biases = false;
  if (row.biases == BiasRule::kAttentionBiasKey) {
    ASSIGN_OR_RETURN(all_biases, config.Boolean("attention_bias", false));
  }
  ModelDescription model{
      .prefixes = {"model.", "", "language_model.model.", "model.language_model.", "transformer."},
      .ignored = {"rotary_emb.inv_freq"}};
  ASSIGN_OR_RETURN(model.max_positions, config.Integer({"max_position_embeddings"},
                                                       row.max_positions, 1, kMaxPositions));
  for (int64_t i = 0; i < layers; ++i) {
    spec.window = types[i] == kSliding ? window : 0;
    ASSIGN_OR_RETURN(RopeConfig rope,
                     ReadRope(config, spec.head_dim, kDefaultTheta, model.max_positions, types[i]));
    spec.rope = std::move(rope.spec);
    model.layers.push_back(
        DescribeLayer(spec, i, all_biases || row.biases == BiasRule::kQueryKeyValue, all_biases));
    model.layers.back().rope_text = std::move(rope.text);
  }
  return model;
}

template <const LlamaRow& row>
absl::StatusOr<ModelDescription> DescribeRow(const Config& config) {
  return Describe(row, config);
}

template <const LlamaRow& row>
constexpr Family kFamily = {row.model_type, &DescribeRow<row>};

constexpr Family kFamilies[] = {kFamily<kLlama>, kFamily<kMistral>, kFamily<kQwen2>,
                                kFamily<kQwen3>};

}  // namespace

std::span<const Family> LlamaFamilies() { return kFamilies; }

}  // namespace attend
