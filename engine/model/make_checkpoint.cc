// SPDX-License-Identifier: Apache-2.0
#include "engine/model/make_checkpoint.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/model/config.h"
#include "engine/model/families/family.h"
#include "engine/util/error.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

using nlohmann::json;

// Above 1, so that scores spread and attention is far from uniform even over many keys.
constexpr double kMatrixGain = 1.3;  // standard deviation x sqrt(fan-in)
constexpr double kBiasDeviation = 0.1;
constexpr size_t kHeaderAlignment = 64;
constexpr int64_t kChunkElements = int64_t{1} << 20;

// Key names are those of config.json; sizes are those of the published models.
struct Preset {
  const char* name;
  const char* layers_key;
  const char* heads_key;
  const char* config;
};
constexpr Preset kPresets[] = {
    {"transformer-base", "num_layers", "num_heads", R"({
      "model_type": "torch_multihead_attention", "embed_dim": 512, "num_heads": 8, "num_layers": 1,
      "bias": true, "kdim": null, "vdim": null, "batch_first": true})"},
    {"bert-base", "num_hidden_layers", "num_attention_heads", R"({
      "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 768,
      "num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 3072,
      "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
      "initializer_range": 0.02, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
      "pad_token_id": 0, "position_embedding_type": "absolute", "type_vocab_size": 2,
      "vocab_size": 30522})"},
    {"gpt2-medium", "n_layer", "n_head", R"({
      "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 1024, "n_head": 16,
      "n_layer": 24, "n_positions": 1024, "n_ctx": 1024, "activation_function": "gelu_new",
      "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "bos_token_id": 50256,
      "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
      "scale_attn_weights": true, "scale_attn_by_inverse_layer_idx": false,
      "add_cross_attention": false, "vocab_size": 50257})"},
    {"llama-7b", "num_hidden_layers", "num_attention_heads", R"({
      "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
      "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": null,
      "head_dim": null, "intermediate_size": 11008, "attention_bias": false, "hidden_act": "silu",
      "initializer_range": 0.02, "max_position_embeddings": 2048, "rms_norm_eps": 1e-06,
      "rope_scaling": null, "rope_theta": 10000.0, "tie_word_embeddings": false,
      "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 32000})"},
    {"llama2-gqa", "num_hidden_layers", "num_attention_heads", R"({
      "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
      "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
      "head_dim": null, "intermediate_size": 11008, "attention_bias": false, "hidden_act": "silu",
      "initializer_range": 0.02, "max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
      "rope_scaling": null, "rope_theta": 10000.0, "tie_word_embeddings": false,
      "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 32000})"},
};

uint64_t Mix(uint64_t value) {  // splitmix64's finalizer (Steele, Lea, Flood 2014)
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

// Element `index` of a random stream: the sum of four uniform 16-bit numbers, close to normal with
// mean 0 and deviation 1. Integers only up to the last step, so that every machine writes the same
// bytes.
double NormalAt(uint64_t stream, uint64_t index) {
  const uint64_t bits = Mix(stream + (index + 1) * 0x9e3779b97f4a7c15);
  const int64_t sum = static_cast<int64_t>((bits & 0xffff) + (bits >> 16 & 0xffff) +
                                           (bits >> 32 & 0xffff) + (bits >> 48));
  constexpr double kMean = 2.0 * 65535;
  constexpr double kDeviation = 37837.227;  // sqrt(4 (2^32 - 1) / 12)
  return (static_cast<double>(sum) - kMean) / kDeviation;
}

struct PlannedTensor {
  std::string name;
  std::vector<int64_t> shape;
  double deviation = 0;

  int64_t elements() const {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    return count;
  }
};

std::vector<PlannedTensor> PlanTensors(const ModelDescription& model) {
  std::vector<PlannedTensor> tensors;
  for (const LayerDescription& layer : model.layers) {
    for (const TensorUse& use : layer.tensors) {
      PlannedTensor tensor{.name = model.prefixes.front() + use.name, .shape = {0}};
      for (const TensorPart& part : use.parts) tensor.shape[0] += part.rows;
      if (use.columns > 0) tensor.shape.push_back(use.columns);
      if (use.input_major) std::swap(tensor.shape.front(), tensor.shape.back());
      tensor.deviation = use.columns > 0 ? kMatrixGain / std::sqrt(static_cast<double>(use.columns))
                                         : kBiasDeviation;
      tensors.push_back(std::move(tensor));
    }
  }
  return tensors;
}

// Length prefix and header; the tensors follow in the order of the list.
std::string Header(const std::vector<PlannedTensor>& tensors, DType dtype, int64_t& data_bytes) {
  json header = {{"__metadata__", {{"format", "pt"}}}};
  data_bytes = 0;
  for (const PlannedTensor& tensor : tensors) {
    const int64_t end = data_bytes + tensor.elements() * DTypeBytes(dtype);
    header[tensor.name] = {
        {"dtype", DTypeName(dtype)}, {"shape", tensor.shape}, {"data_offsets", {data_bytes, end}}};
    data_bytes = end;
  }
  std::string text = header.dump();
  const size_t total = text.size() + sizeof(uint64_t);
  text.append((kHeaderAlignment - total % kHeaderAlignment) % kHeaderAlignment, ' ');
  const uint64_t length = text.size();
  std::string prefix(sizeof(length), '\0');
  std::memcpy(prefix.data(), &length, sizeof(length));
  return prefix + text;
}

void WriteTensors(const std::vector<PlannedTensor>& tensors, const CheckpointRecipe& recipe,
                  int64_t data_bytes, std::ofstream& out) {
  const int64_t width = DTypeBytes(recipe.dtype);
  std::vector<char> chunk(static_cast<size_t>(kChunkElements * width));
  int64_t done = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint64_t stream = Mix(Mix(recipe.seed) + i + 1);
    const int64_t elements = tensors[i].elements();
    for (int64_t first = 0; first < elements && out.good(); first += kChunkElements) {
      const int64_t count = std::min(kChunkElements, elements - first);
      for (int64_t j = 0; j < count; ++j) {
        const double value = NormalAt(stream, static_cast<uint64_t>(first + j));
        StoreFloat(recipe.dtype, static_cast<float>(value * tensors[i].deviation), chunk.data(), j);
      }
      out.write(chunk.data(), count * width);
      done += count * width;
      if (recipe.progress) recipe.progress(done, data_bytes);
    }
  }
}

// Writes a file under a temporary name and renames it once it is complete.
absl::Status WriteFile(const std::filesystem::path& path,
                       const std::function<void(std::ofstream&)>& write) {
  std::filesystem::path temporary = path;
  temporary += ".part";
  std::error_code error;
  std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
  write(out);
  out.close();
  if (out.good()) {
    std::filesystem::rename(temporary, path, error);
    if (!error) return absl::OkStatus();
  }
  const std::string reason = error ? error.message() : std::strerror(errno);
  std::filesystem::remove(temporary, error);
  return absl::InternalError(absl::StrCat("writing ", path.string(), " failed: ", reason));
}

absl::StatusOr<json> ConfigOf(const CheckpointRecipe& recipe) {
  const auto* preset = std::find_if(std::begin(kPresets), std::end(kPresets),
                                    [&](const Preset& row) { return recipe.preset == row.name; });
  if (preset == std::end(kPresets)) {
    return InvalidField("preset", recipe.preset, absl::StrJoin(CheckpointPresets(), ", "));
  }
  if (recipe.layers < 0 || recipe.layers > kMaxLayers) {
    return InvalidField("layers", absl::StrCat(recipe.layers),
                        absl::StrCat("0 (the preset's) ..", kMaxLayers));
  }
  if (recipe.heads < 0) {
    return InvalidField("heads", absl::StrCat(recipe.heads), "0 (the preset's) or more");
  }
  json config = json::parse(preset->config);
  if (recipe.layers > 0) config[preset->layers_key] = recipe.layers;
  if (recipe.heads > 0) config[preset->heads_key] = recipe.heads;
  switch (recipe.dtype) {
    case DType::kF32:
      config["torch_dtype"] = "float32";
      break;
    case DType::kF16:
      config["torch_dtype"] = "float16";
      break;
    case DType::kBF16:
      config["torch_dtype"] = "bfloat16";
      break;
    default:
      return InvalidField("dtype", DTypeName(recipe.dtype), "F32, BF16 or F16");
  }
  return config;
}

absl::StatusOr<ModelDescription> Describe(const std::string& config_text) {
  ASSIGN_OR_RETURN(const Config config, Config::Parse(config_text));
  ASSIGN_OR_RETURN(const std::string model_type, config.Text("model_type"));
  for (const Family& family : SupportedFamilies()) {
    if (model_type != family.model_type) continue;
    ASSIGN_OR_RETURN(ModelDescription model, family.describe(config));
    for (const LayerDescription& layer : model.layers) RETURN_IF_ERROR(Validate(layer.spec));
    return model;
  }
  return absl::InternalError(absl::StrCat("no family ", model_type));
}

absl::Status PrepareFolder(const std::string& directory) {
  std::error_code error;
  if (directory.empty()) return InvalidField("directory", "nothing", "a folder to create");
  std::filesystem::create_directories(directory, error);
  if (error)
    return absl::InternalError(absl::StrCat("creating ", directory, ": ", error.message()));
  const bool empty = std::filesystem::is_empty(directory, error);
  if (error) return absl::InternalError(absl::StrCat("reading ", directory, ": ", error.message()));
  if (empty) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(directory, " is not empty, wanted a new folder"));
}

}  // namespace

std::vector<std::string> CheckpointPresets() {
  std::vector<std::string> names;
  for (const Preset& preset : kPresets) names.push_back(preset.name);
  return names;
}

absl::Status MakeCheckpoint(const CheckpointRecipe& recipe) {
  ASSIGN_OR_RETURN(const json config, ConfigOf(recipe));
  const std::string config_text = config.dump(2) + "\n";
  ASSIGN_OR_RETURN(const ModelDescription model, Describe(config_text));
  RETURN_IF_ERROR(PrepareFolder(recipe.directory));

  const std::vector<PlannedTensor> tensors = PlanTensors(model);
  int64_t data_bytes = 0;
  const std::string header = Header(tensors, recipe.dtype, data_bytes);
  const std::filesystem::path folder(recipe.directory);
  RETURN_IF_ERROR(WriteFile(folder / "model.safetensors", [&](std::ofstream& out) {
    out.write(header.data(), static_cast<std::streamsize>(header.size()));
    WriteTensors(tensors, recipe, data_bytes, out);
  }));
  return WriteFile(folder / "config.json", [&](std::ofstream& out) { out << config_text; });
}

}  // namespace attend
