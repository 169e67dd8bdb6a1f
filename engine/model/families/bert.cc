// SPDX-License-Identifier: Apache-2.0
//
// The BERT shape: four projections with biases, no position rule, bidirectional (causal with
// is_decoder), cross-attention with add_cross_attention. Sentence encoders (MiniLM, ...) are this
// shape.
#include "absl/strings/str_cat.h"
#include "engine/model/families/family.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

struct BertRow {
  const char* model_type;
  const char* prefix;
  // When config.json does not say:
  int hidden_size;
  int heads;
};
constexpr BertRow kBert = {"bert", "bert.", 768, 12};
constexpr BertRow kRoberta = {"roberta", "roberta.", 768, 12};
constexpr BertRow kXlmRoberta = {"xlm-roberta", "roberta.", 768, 12};
constexpr BertRow kCamembert = {"camembert", "roberta.", 768, 12};
constexpr BertRow kElectra = {"electra", "electra.", 256, 4};
constexpr int64_t kDefaultLayers = 12;
constexpr int64_t kDefaultPositions = 512;

// `module` is "attention" or "crossattention" of encoder layer `index`.
LayerDescription DescribeModule(const AttentionSpec& spec, const std::string& base,
                                const std::string& module) {
  LayerDescription layer{.module = absl::StrCat(base, module), .spec = spec};
  const int64_t width = spec.d_model;
  const std::string self = layer.module + ".self.";
  AddProjection(layer, self + "query", {{&LayerWeights::q, &LayerWeights::q_bias, width}}, width,
                true);
  AddProjection(layer, self + "key", {{&LayerWeights::k, &LayerWeights::k_bias, width}}, width,
                true);
  AddProjection(layer, self + "value", {{&LayerWeights::v, &LayerWeights::v_bias, width}}, width,
                true);
  AddProjection(layer, layer.module + ".output.dense",
                {{&LayerWeights::o, &LayerWeights::o_bias, width}}, width, true);
  layer.owned = {layer.module + "."};
  return layer;
}

absl::StatusOr<AttentionSpec> SelfSpec(const BertRow& row, const Config& config) {
  ASSIGN_OR_RETURN(const int64_t hidden,
                   config.Integer({"hidden_size"}, row.hidden_size, 1, kMaxWidth));
  ASSIGN_OR_RETURN(const int64_t heads,
                   config.Integer({"num_attention_heads"}, row.heads, 1, hidden));
  AttentionSpec spec;
  spec.d_model = spec.context_width = spec.output_width = static_cast<int>(hidden);
  spec.q_heads = spec.kv_heads = static_cast<int>(heads);
  ASSIGN_OR_RETURN(spec.head_dim, WholeHeadDim(config, spec.d_model, spec.q_heads));
  spec.v_head_dim = spec.head_dim;
  spec.scale = UsualScale(spec.head_dim);
  ASSIGN_OR_RETURN(spec.causal, config.Boolean("is_decoder", false));
  return spec;
}

absl::StatusOr<ModelDescription> Describe(const BertRow& row, const Config& config) {
  ASSIGN_OR_RETURN(const AttentionSpec self, SelfSpec(row, config));
  ASSIGN_OR_RETURN(const bool has_cross, config.Boolean("add_cross_attention", false));
  if (has_cross && !self.causal) {
    return config.Wrong("add_cross_attention", "true without is_decoder", "both or neither");
  }
  ASSIGN_OR_RETURN(const int64_t layers,
                   config.Integer({"num_hidden_layers"}, kDefaultLayers, 1, kMaxLayers));
  ModelDescription model{.prefixes = {row.prefix, ""},
                         .ignored = {"output.LayerNorm.weight", "output.LayerNorm.bias",
                                     "output.LayerNorm.gamma", "output.LayerNorm.beta"}};
  ASSIGN_OR_RETURN(model.max_positions, config.Integer({"max_position_embeddings"},
                                                       kDefaultPositions, 1, kMaxPositions));
  AttentionSpec cross = self;
  cross.causal = false;
  cross.cross = true;
  for (int64_t i = 0; i < layers; ++i) {
    const std::string base = absl::StrCat("encoder.layer.", i, ".");
    LayerDescription layer = DescribeModule(self, base, "attention");
    layer.name = absl::StrCat(i, has_cross ? ".self" : "");
    layer.input_point = "input of the layer (no norm before attention)";
    if (!has_cross) layer.owned.push_back(base + "crossattention.");
    model.layers.push_back(std::move(layer));
    if (!has_cross) continue;
    layer = DescribeModule(cross, base, "crossattention");
    layer.name = absl::StrCat(i, ".cross");
    layer.input_point = "output of attention.output, its LayerNorm included";
    model.layers.push_back(std::move(layer));
  }
  return model;
}

template <const BertRow& row>
absl::StatusOr<ModelDescription> DescribeRow(const Config& config) {
  return Describe(row, config);
}

template <const BertRow& row>
constexpr Family kFamily = {row.model_type, &DescribeRow<row>};

constexpr Family kFamilies[] = {kFamily<kBert>, kFamily<kRoberta>, kFamily<kXlmRoberta>,
                                kFamily<kCamembert>, kFamily<kElectra>};

}  // namespace

std::span<const Family> BertFamilies() { return kFamilies; }

}  // namespace attend
