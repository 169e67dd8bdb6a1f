// SPDX-License-Identifier: Apache-2.0
//
// GPT-2: one fused projection stored [in, out] (Conv1D), causal, no position rule inside attention,
// a scale that two flags change; with add_cross_attention a second module per layer.
#include "absl/strings/str_cat.h"
#include "engine/model/families/family.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

// Class defaults.
constexpr int64_t kDefaultHidden = 768;
constexpr int64_t kDefaultLayers = 12;
constexpr int64_t kDefaultHeads = 12;
constexpr int64_t kDefaultPositions = 1024;

constexpr ProjectionPart Query(int64_t rows) {
  return {&LayerWeights::q, &LayerWeights::q_bias, rows};
}
constexpr ProjectionPart Key(int64_t rows) {
  return {&LayerWeights::k, &LayerWeights::k_bias, rows};
}
constexpr ProjectionPart Value(int64_t rows) {
  return {&LayerWeights::v, &LayerWeights::v_bias, rows};
}
constexpr ProjectionPart Output(int64_t rows) {
  return {&LayerWeights::o, &LayerWeights::o_bias, rows};
}

LayerDescription DescribeSelf(const AttentionSpec& spec, const std::string& base) {
  const int64_t width = spec.d_model;
  LayerDescription layer{.module = base + "attn", .input_point = "output of ln_1", .spec = spec};
  AddProjection(layer, base + "attn.c_attn", {Query(width), Key(width), Value(width)}, width, true,
                /*input_major=*/true);
  AddProjection(layer, base + "attn.c_proj", {Output(width)}, width, true, /*input_major=*/true);
  layer.owned = {base + "attn."};
  return layer;
}

LayerDescription DescribeCross(AttentionSpec spec, const std::string& base) {
  spec.causal = false;
  spec.cross = true;
  const int64_t width = spec.d_model;
  LayerDescription layer{
      .module = base + "crossattention", .input_point = "output of ln_cross_attn", .spec = spec};
  const std::string module = layer.module + ".";
  AddProjection(layer, module + "q_attn", {Query(width)}, width, true, /*input_major=*/true);
  AddProjection(layer, module + "c_attn", {Key(width), Value(width)}, width, true,
                /*input_major=*/true);
  AddProjection(layer, module + "c_proj", {Output(width)}, width, true, /*input_major=*/true);
  layer.owned = {module};
  return layer;
}

absl::StatusOr<AttentionSpec> BaseSpec(const Config& config) {
  ASSIGN_OR_RETURN(const int64_t hidden,
                   config.Integer({"n_embd", "hidden_size"}, kDefaultHidden, 1, kMaxWidth));
  ASSIGN_OR_RETURN(const int64_t heads,
                   config.Integer({"n_head", "num_attention_heads"}, kDefaultHeads, 1, hidden));
  AttentionSpec spec;
  spec.d_model = spec.context_width = spec.output_width = static_cast<int>(hidden);
  spec.q_heads = spec.kv_heads = static_cast<int>(heads);
  ASSIGN_OR_RETURN(spec.head_dim, WholeHeadDim(config, spec.d_model, spec.q_heads));
  spec.v_head_dim = spec.head_dim;
  ASSIGN_OR_RETURN(const bool scaled, config.Boolean("scale_attn_weights", true));
  spec.scale = scaled ? UsualScale(spec.head_dim) : 1.0;
  spec.causal = true;
  return spec;
}

absl::StatusOr<ModelDescription> Describe(const Config& config) {
  ASSIGN_OR_RETURN(const AttentionSpec base_spec, BaseSpec(config));
  ASSIGN_OR_RETURN(const int64_t layers,
                   config.Integer({"n_layer", "num_hidden_layers"}, kDefaultLayers, 1, kMaxLayers));
  ASSIGN_OR_RETURN(const bool by_layer, config.Boolean("scale_attn_by_inverse_layer_idx", false));
  ASSIGN_OR_RETURN(const bool has_cross, config.Boolean("add_cross_attention", false));
  // The mask buffers "bias" and "masked_bias" of old files are not biases of a projection.
  ModelDescription model{.prefixes = {"transformer.", ""}, .ignored = {"bias", "masked_bias"}};
  ASSIGN_OR_RETURN(model.max_positions, config.Integer({"n_positions", "max_position_embeddings"},
                                                       kDefaultPositions, 1, kMaxPositions));
  for (int64_t i = 0; i < layers; ++i) {
    const std::string base = absl::StrCat("h.", i, ".");
    AttentionSpec spec = base_spec;
    if (by_layer) spec.scale /= static_cast<double>(i + 1);
    LayerDescription layer = DescribeSelf(spec, base);
    layer.name = absl::StrCat(i, has_cross ? ".self" : "");
    if (!has_cross) layer.owned.push_back(base + "crossattention.");
    model.layers.push_back(std::move(layer));
    if (!has_cross) continue;
    layer = DescribeCross(spec, base);
    layer.name = absl::StrCat(i, ".cross");
    model.layers.push_back(std::move(layer));
  }
  return model;
}

constexpr Family kFamilies[] = {{"gpt2", &Describe}};

}  // namespace

std::span<const Family> Gpt2Families() { return kFamilies; }

}  // namespace attend
