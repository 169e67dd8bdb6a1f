// SPDX-License-Identifier: Apache-2.0
//
// Plain PyTorch modules: torch_multihead_attention (the tensors of torch.nn.MultiheadAttention) and
// torch_merged_qkv (two Linears, qkv and out). Their files do not say whether the mask is causal or
// where keys come from, so the caller chooses. One module stands at the top of the file; several
// carry the names of torch.nn.TransformerEncoder, layers.N.self_attn.
#include "absl/strings/str_cat.h"
#include "engine/model/families/family.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

constexpr char kInputPoint[] = "input of the module (query)";

struct PlainModel {
  AttentionSpec spec;
  bool bias = true;
  int64_t layers = 1;
};

absl::StatusOr<PlainModel> ReadModel(const Config& config) {
  PlainModel model;
  ASSIGN_OR_RETURN(const int64_t width, config.Integer({"embed_dim"}, std::nullopt, 1, kMaxWidth));
  ASSIGN_OR_RETURN(const int64_t heads, config.Integer({"num_heads"}, std::nullopt, 1, width));
  ASSIGN_OR_RETURN(model.bias, config.Boolean("bias", true));
  ASSIGN_OR_RETURN(model.layers, config.Integer({"num_layers"}, 1, 1, kMaxLayers));
  AttentionSpec& spec = model.spec;
  spec.d_model = spec.context_width = spec.output_width = static_cast<int>(width);
  spec.q_heads = spec.kv_heads = static_cast<int>(heads);
  if (width % heads != 0) {
    return config.Wrong("num_heads", absl::StrCat(heads),
                        absl::StrCat("a divisor of embed_dim ", width));
  }
  spec.head_dim = spec.v_head_dim = static_cast<int>(width / heads);
  spec.scale = UsualScale(spec.head_dim);
  spec.mask_selectable = true;
  return model;
}

// Layers without tensors; `owned` are the beginnings of tensor names inside one module.
ModelDescription DescribeModules(const PlainModel& plain, const std::vector<std::string>& owned) {
  ModelDescription model{.prefixes = {""}};
  for (int64_t i = 0; i < plain.layers; ++i) {
    LayerDescription layer{.name = absl::StrCat(i), .input_point = kInputPoint, .spec = plain.spec};
    if (plain.layers > 1) layer.module = absl::StrCat("layers.", i, ".self_attn");
    const std::string base = layer.module.empty() ? "" : layer.module + ".";
    for (const std::string& start : owned) layer.owned.push_back(base + start);
    model.layers.push_back(std::move(layer));
  }
  return model;
}

std::string Base(const LayerDescription& layer) {
  return layer.module.empty() ? "" : layer.module + ".";
}

absl::StatusOr<ModelDescription> DescribeMultiheadAttention(const Config& config) {
  ASSIGN_OR_RETURN(PlainModel plain, ReadModel(config));
  const int64_t width = plain.spec.d_model;
  ASSIGN_OR_RETURN(const int64_t key_width, config.Integer({"kdim"}, width, 1, kMaxWidth));
  ASSIGN_OR_RETURN(const int64_t value_width, config.Integer({"vdim"}, width, 1, kMaxWidth));
  if (key_width != value_width) {
    return config.Wrong("vdim", absl::StrCat(value_width),
                        absl::StrCat("kdim ", key_width, ": one context gives keys and values"));
  }
  const bool fused = key_width == width;
  if (!fused) {  // only a context of that width fits, and a context has no causal order
    plain.spec.context_width = static_cast<int>(key_width);
    plain.spec.cross = true;
    plain.spec.mask_selectable = false;
  }
  ModelDescription model = DescribeModules(
      plain, {"in_proj_", "q_proj_", "k_proj_", "v_proj_", "out_proj.", "bias_k", "bias_v"});
  for (LayerDescription& layer : model.layers) {
    const std::string base = Base(layer);
    if (fused) {
      layer.tensors.push_back(
          {base + "in_proj_weight",
           {{&LayerWeights::q, width}, {&LayerWeights::k, width}, {&LayerWeights::v, width}},
           width});
    } else {
      layer.tensors.push_back({base + "q_proj_weight", {{&LayerWeights::q, width}}, width});
      layer.tensors.push_back({base + "k_proj_weight", {{&LayerWeights::k, width}}, key_width});
      layer.tensors.push_back({base + "v_proj_weight", {{&LayerWeights::v, width}}, key_width});
    }
    if (plain.bias) {
      layer.tensors.push_back({base + "in_proj_bias",
                               {{&LayerWeights::q_bias, width},
                                {&LayerWeights::k_bias, width},
                                {&LayerWeights::v_bias, width}}});
    }
    AddProjection(layer, base + "out_proj", {{&LayerWeights::o, &LayerWeights::o_bias, width}},
                  width, plain.bias);
  }
  return model;
}

absl::StatusOr<ModelDescription> DescribeMergedQkv(const Config& config) {
  ASSIGN_OR_RETURN(const PlainModel plain, ReadModel(config));
  const int64_t width = plain.spec.d_model;
  ModelDescription model = DescribeModules(plain, {"qkv.", "out."});
  for (LayerDescription& layer : model.layers) {
    const std::string base = Base(layer);
    AddProjection(layer, base + "qkv",
                  {{&LayerWeights::q, &LayerWeights::q_bias, width},
                   {&LayerWeights::k, &LayerWeights::k_bias, width},
                   {&LayerWeights::v, &LayerWeights::v_bias, width}},
                  width, plain.bias);
    AddProjection(layer, base + "out", {{&LayerWeights::o, &LayerWeights::o_bias, width}}, width,
                  plain.bias);
  }
  return model;
}

constexpr Family kFamilies[] = {{"torch_multihead_attention", &DescribeMultiheadAttention},
                                {"torch_merged_qkv", &DescribeMergedQkv}};

}  // namespace

std::span<const Family> PlainFamilies() { return kFamilies; }

}  // namespace attend
