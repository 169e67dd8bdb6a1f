// SPDX-License-Identifier: Apache-2.0
#include "engine/model/inspect.h"

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/model/safetensors.h"
#include "engine/model/strict_json.h"

namespace attend {
namespace {

using json = nlohmann::ordered_json;

constexpr char kInsideModule[] = "in an attention module, but not part of what it computes here";
constexpr char kOutsideModules[] = "outside the attention modules";

absl::Status CheckFolder(const std::string& directory) {
  std::error_code error;
  const std::filesystem::directory_iterator folder(directory, error);
  if (!error) return absl::OkStatus();
  const std::string message = absl::StrCat(directory, ": ", error.message());
  if (error == std::errc::permission_denied) return absl::PermissionDeniedError(message);
  return absl::NotFoundError(message);
}

// Empty when there is none.
std::string ModelType(const std::string& directory) {
  const auto file = MappedFile::Open(absl::StrCat(directory, "/config.json"));
  if (!file.ok()) return "";
  const auto config = ParseStrictJson((*file)->text(), "config.json");
  if (!config.ok() || !config->contains("model_type")) return "";
  const auto& model_type = (*config)["model_type"];
  return model_type.is_string() ? model_type.get<std::string>() : "";
}

// Of a tensor that the accepted `checkpoint` does not use. The loader has refused any tensor of a
// module that could change what the module computes.
const char* WhyIgnored(const Checkpoint& checkpoint, const std::string& name) {
  for (const ModelLayer& layer : checkpoint.layers) {
    if (name.starts_with(absl::StrCat(layer.module, "."))) return kInsideModule;
  }
  return kOutsideModules;
}

void ExplainTensors(const Checkpoint& checkpoint, std::vector<InspectedTensor>& tensors) {
  std::map<std::string, const UsedTensor*> used;
  for (const ModelLayer& layer : checkpoint.layers) {
    for (const UsedTensor& tensor : layer.tensors) used.emplace(tensor.name, &tensor);
  }
  for (InspectedTensor& tensor : tensors) {
    const auto found = used.find(tensor.name);
    if (found != used.end()) {
      tensor.holds = found->second->holds;
    } else {
      tensor.ignored_because = WhyIgnored(checkpoint, tensor.name);
    }
  }
}

json RopeJson(const ModelLayer& layer) {
  const RopeSpec& rope = layer.spec.rope;
  if (rope.dim == 0) return nullptr;
  return {{"dim", rope.dim},
          {"pairing", rope.pairing == RopePairing::kHalf ? "half" : "interleaved"},
          {"from", layer.rope_text},
          {"inverse_frequency", rope.inverse_frequency},
          {"attention_factor", rope.attention_factor}};
}

json LayerJson(const ModelLayer& layer, DType kv_dtype) {
  const AttentionSpec& spec = layer.spec;
  const bool takes_context = spec.cross || spec.mask_selectable;
  json tensors = json::array();
  for (const UsedTensor& tensor : layer.tensors) {
    tensors.push_back({{"name", tensor.name}, {"holds", tensor.holds}});
  }
  return {
      {"name", layer.name},
      {"module", layer.module},
      {"input_point", layer.input_point},
      {"d_model", spec.d_model},
      {"context_width", takes_context ? spec.context_width : 0},
      {"output_width", spec.output_width},
      {"q_heads", spec.q_heads},
      {"kv_heads", spec.kv_heads},
      {"head_dim", spec.head_dim},
      {"v_head_dim", spec.v_head_dim},
      {"scale", spec.scale},
      {"causal", spec.causal},
      {"mask_selectable", spec.mask_selectable},
      {"window", spec.window},
      {"positions", PositionRuleName(spec)},
      {"rope", RopeJson(layer)},
      {"alibi_slopes", spec.alibi_slopes},
      {"softcap", spec.softcap},
      {"clip_qkv", spec.clip_qkv},
      {"sinks", spec.sinks},
      {"qk_norm", spec.qk_norm != QkNorm::kNone},
      {"qk_norm_eps", spec.qk_norm_eps},
      {"sessions", spec.keeps_history()},
      {"cross_attention", takes_context},
      {"weight_dtype", DTypeName(layer.weight_dtype)},
      {"weight_bytes", layer.weight_bytes},
      {"kv_bytes_per_token", spec.keeps_history() ? GeometryOf(spec, kv_dtype).TokenBytes() : 0},
      {"tensors", std::move(tensors)}};
}

}  // namespace

absl::StatusOr<Inspection> InspectCheckpoint(const std::string& directory) {
  if (absl::Status folder = CheckFolder(directory); !folder.ok()) return folder;
  Inspection inspection{.directory = directory,
                        .checkpoint = {},
                        .refused_because = {},
                        .model_type = ModelType(directory),
                        .tensors = {},
                        .tensors_unreadable = {}};
  const auto folder = ReadTensorFolder(directory);
  if (folder.ok()) {
    for (const auto& [name, tensor] : folder->tensors) {
      inspection.tensors.push_back({.name = name,
                                    .dtype = tensor.dtype,
                                    .shape = tensor.shape,
                                    .bytes = static_cast<int64_t>(tensor.bytes.size()),
                                    .file = tensor.file,
                                    .holds = {},
                                    .ignored_because = {}});
    }
  } else {
    inspection.tensors_unreadable = std::string(folder.status().message());
  }
  auto checkpoint = LoadCheckpoint(directory);
  if (checkpoint.ok()) {
    ExplainTensors(*checkpoint, inspection.tensors);
    inspection.checkpoint = *std::move(checkpoint);
  } else {
    inspection.refused_because = std::string(checkpoint.status().message());
  }
  return inspection;
}

std::string InspectionJson(const Inspection& inspection) {
  json root = {{"directory", inspection.directory},
               {"accepted", inspection.checkpoint.has_value()},
               {"refused_because", inspection.refused_because},
               {"model_type", inspection.model_type}};
  if (inspection.checkpoint.has_value()) {
    const Checkpoint& checkpoint = *inspection.checkpoint;
    const DType kv_dtype = KvDTypeOf(checkpoint);
    root["weight_dtype"] = DTypeName(checkpoint.weight_dtype);
    root["kv_dtype"] = DTypeName(kv_dtype);
    root["max_positions"] = checkpoint.max_positions;
    root["fingerprint"] = checkpoint.fingerprint;
    root["layers"] = json::array();
    for (const ModelLayer& layer : checkpoint.layers) {
      root["layers"].push_back(LayerJson(layer, kv_dtype));
    }
  }
  root["tensors_unreadable"] = inspection.tensors_unreadable;
  root["tensors"] = json::array();
  for (const InspectedTensor& tensor : inspection.tensors) {
    root["tensors"].push_back({{"name", tensor.name},
                               {"dtype", tensor.dtype},
                               {"shape", tensor.shape},
                               {"bytes", tensor.bytes},
                               {"file", tensor.file},
                               {"holds", tensor.holds},
                               {"ignored_because", tensor.ignored_because}});
  }
  return root.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace attend
