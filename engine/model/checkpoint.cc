// SPDX-License-Identifier: Apache-2.0
#include "engine/model/checkpoint.h"

#define XXH_STATIC_LINKING_ONLY  // XXH3_state_t is complete, so that it needs no allocation
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/model/config.h"
#include "engine/model/families/family.h"
#include "engine/model/safetensors.h"
#include "engine/model/strict_json.h"
#include "engine/util/status_macros.h"
#include "engine/util/text.h"

namespace attend {
namespace {

// Names shown when no prefix matches.
constexpr int kShownNames = 4;

class Fingerprint {
 public:
  Fingerprint() { XXH3_128bits_reset(&state_); }
  void Add(const void* data, size_t size) { XXH3_128bits_update(&state_, data, size); }
  void Add(const std::string& text) { Add(text.c_str(), text.size() + 1); }
  std::string Hex() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(&state_);
    return absl::StrCat(absl::Hex(hash.high64, absl::kZeroPad16),
                        absl::Hex(hash.low64, absl::kZeroPad16));
  }

 private:
  XXH3_state_t state_;
};

// Whether `count` numbers at any alignment include one whose exponent bits are all set.
template <typename Word>
bool AnyNonFinite(const std::byte* data, size_t count, Word exponent) {
  Word found = 0;
  for (size_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, data + i * sizeof(Word), sizeof(Word));
    found |= (word & exponent) == exponent;
  }
  return found != 0;
}

bool AnyNonFinite(DType dtype, std::span<const std::byte> bytes) {
  if (dtype == DType::kF32)
    return AnyNonFinite<uint32_t>(bytes.data(), bytes.size() / 4, 0x7f800000);
  const uint16_t exponent = dtype == DType::kBF16 ? 0x7f80 : 0x7c00;
  return AnyNonFinite<uint16_t>(bytes.data(), bytes.size() / 2, exponent);
}

// Hashes a needed tensor and refuses infinities and NaN in it, in one pass over memory.
absl::Status CheckValues(const std::string& name, const StoredTensor& tensor, Fingerprint& print) {
  constexpr size_t kChunkBytes = 256 * 1024;  // stays in the second-level cache between both uses
  print.Add(name);
  print.Add(absl::StrCat(tensor.dtype, ShapeText(tensor.shape)));
  const DType dtype = tensor.float_dtype();
  for (size_t at = 0; at < tensor.bytes.size(); at += kChunkBytes) {
    const auto chunk = tensor.bytes.subspan(at, std::min(kChunkBytes, tensor.bytes.size() - at));
    print.Add(chunk.data(), chunk.size());
    if (!AnyNonFinite(dtype, chunk)) continue;
    int64_t element = static_cast<int64_t>(at) / DTypeBytes(dtype);
    while (std::isfinite(LoadFloat(dtype, tensor.bytes.data(), element))) ++element;
    return absl::InvalidArgumentError(
        absl::StrCat(tensor.file, ": tensor ", Quoted(name), ": element ", element, " is ",
                     LoadFloat(dtype, tensor.bytes.data(), element), ", wanted finite values"));
  }
  return absl::OkStatus();
}

const char* WeightName(WeightView LayerWeights::*weight) {
  constexpr std::pair<WeightView LayerWeights::*, const char*> kNames[] = {
      {&LayerWeights::q, "q"},           {&LayerWeights::k, "k"},
      {&LayerWeights::v, "v"},           {&LayerWeights::o, "o"},
      {&LayerWeights::q_bias, "q bias"}, {&LayerWeights::k_bias, "k bias"},
      {&LayerWeights::v_bias, "v bias"}, {&LayerWeights::o_bias, "o bias"},
      {&LayerWeights::q_norm, "q norm"}, {&LayerWeights::k_norm, "k norm"}};
  for (const auto& [member, name] : kNames) {
    if (member == weight) return name;
  }
  return "?";
}

// Points the parts of a stored tensor at the layer's weights.
absl::Status Bind(const TensorUse& use, const std::string& name, const StoredTensor& tensor,
                  ModelLayer& layer) {
  const std::string where = absl::StrCat(tensor.file, ": tensor ", Quoted(name), ": ");
  const DType dtype = tensor.float_dtype();
  if (dtype == DType::kUnspecified) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, "dtype ", tensor.dtype, ", attention weights are F32, F16 or BF16"));
  }
  int64_t rows = 0;
  for (const TensorPart& part : use.parts) rows += part.rows;
  std::vector<int64_t> wanted = {rows};
  if (use.columns > 0) wanted.push_back(use.columns);
  if (use.input_major) std::swap(wanted.front(), wanted.back());
  if (tensor.shape != wanted) {
    return absl::InvalidArgumentError(absl::StrCat(where, "shape ", ShapeText(tensor.shape),
                                                   ", config.json asks for ", ShapeText(wanted)));
  }
  const int64_t columns = std::max<int64_t>(use.columns, 1);
  WeightView view{.dtype = dtype,
                  .columns = columns,
                  .row_stride = use.input_major ? 1 : columns,
                  .column_stride = use.input_major ? rows : 1};
  UsedTensor& used = layer.tensors.emplace_back(UsedTensor{.name = name, .holds = {}});
  int64_t first_row = 0;
  for (const TensorPart& part : use.parts) {
    used.holds.push_back(WeightName(part.target));
    view.data = tensor.bytes.data() + first_row * view.row_stride * DTypeBytes(dtype);
    view.rows = part.rows;
    layer.weights.*part.target = view;
    first_row += part.rows;
  }
  layer.weight_bytes += static_cast<int64_t>(tensor.bytes.size());
  return absl::OkStatus();
}

// The one prefix under which the first layer's first tensor exists.
absl::StatusOr<std::string> FindPrefix(const ModelDescription& model, const TensorMap& tensors) {
  const std::string& probe = model.layers.front().tensors.front().name;
  std::vector<std::string> matching, tried;
  for (const std::string& prefix : model.prefixes) {
    tried.push_back(Quoted(prefix + probe));
    if (tensors.contains(prefix + probe)) matching.push_back(prefix);
  }
  if (matching.size() == 1) return matching.front();
  if (matching.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("the tensors are ambiguous: ", Quoted(matching[0] + probe), " and ",
                     Quoted(matching[1] + probe), " both exist, wanted one stack"));
  }
  std::vector<std::string> found;
  for (const auto& [name, tensor] : tensors) {
    if (found.size() == kShownNames) break;
    found.push_back(Quoted(name));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "expected a tensor ", absl::StrJoin(tried, " or "), ", found ", tensors.size(),
      " tensors: ", absl::StrJoin(found, ", "), tensors.size() > found.size() ? ", ..." : ""));
}

// A tensor of the layer that the description does not use changes what the layer computes.
absl::Status RefuseUnused(const LayerDescription& layer, const std::vector<std::string>& ignored,
                          const std::string& prefix, const std::set<std::string>& used,
                          const TensorMap& tensors) {
  for (const std::string& owned : layer.owned) {
    const std::string start = prefix + owned;
    for (auto place = tensors.lower_bound(start);
         place != tensors.end() && place->first.starts_with(start); ++place) {
      const std::string rest = place->first.substr(start.size());
      if (used.contains(place->first) ||
          std::find(ignored.begin(), ignored.end(), rest) != ignored.end()) {
        continue;
      }
      return absl::InvalidArgumentError(
          absl::StrCat(place->second.file, ": tensor ", Quoted(place->first), " belongs to layer ",
                       layer.name, ", but config.json describes a layer without it"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<ModelLayer> LoadLayer(const LayerDescription& description, const std::string& prefix,
                                     const TensorMap& tensors, std::set<std::string>& used,
                                     Fingerprint& print) {
  ModelLayer layer{.name = description.name,
                   .module = prefix + description.module,
                   .input_point = description.input_point,
                   .rope_text = description.rope_text,
                   .spec = description.spec,
                   .weights = {},
                   .tensors = {}};
  if (layer.module.empty()) layer.module = "(root)";
  if (const absl::Status valid = Validate(layer.spec); !valid.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("layer ", layer.name, ": ", valid.message()));
  }
  for (const TensorUse& use : description.tensors) {
    const std::string name = prefix + use.name;
    const auto tensor = tensors.find(name);
    if (tensor == tensors.end()) {
      return absl::InvalidArgumentError(absl::StrCat("layer ", layer.name, ": expected tensor ",
                                                     Quoted(name), ", the files do not hold it"));
    }
    RETURN_IF_ERROR(Bind(use, name, tensor->second, layer));
    if (used.insert(name).second) RETURN_IF_ERROR(CheckValues(name, tensor->second, print));
  }
  layer.weight_dtype = layer.weights.q.dtype;
  return layer;
}

absl::StatusOr<const Family> FindFamily(const std::string& model_type) {
  std::vector<std::string> names;
  for (const Family& family : SupportedFamilies()) {
    if (model_type == family.model_type) return family;
    names.push_back(std::string(family.model_type));
  }
  return absl::InvalidArgumentError(absl::StrCat("config.json: model_type: got ",
                                                 Quoted(model_type),
                                                 ", supported: ", absl::StrJoin(names, ", ")));
}

absl::StatusOr<Checkpoint> Load(const std::string& directory) {
  ASSIGN_OR_RETURN(const std::shared_ptr<MappedFile> config_file,
                   MappedFile::Open(absl::StrCat(directory, "/config.json")));
  ASSIGN_OR_RETURN(const Config config, Config::Parse(config_file->text()));
  Checkpoint checkpoint;
  ASSIGN_OR_RETURN(checkpoint.family, config.Text("model_type"));
  ASSIGN_OR_RETURN(const Family family, FindFamily(checkpoint.family));
  ASSIGN_OR_RETURN(const ModelDescription model, family.describe(config));
  checkpoint.max_positions = model.max_positions;

  ASSIGN_OR_RETURN(TensorFolder folder, ReadTensorFolder(directory));
  ASSIGN_OR_RETURN(const std::string prefix, FindPrefix(model, folder.tensors));
  Fingerprint print;
  print.Add(config_file->text().data(), config_file->text().size());
  std::set<std::string> used;
  for (const LayerDescription& description : model.layers) {
    ASSIGN_OR_RETURN(ModelLayer layer, LoadLayer(description, prefix, folder.tensors, used, print));
    checkpoint.layers.push_back(std::move(layer));
  }
  for (const LayerDescription& description : model.layers) {
    RETURN_IF_ERROR(RefuseUnused(description, model.ignored, prefix, used, folder.tensors));
  }
  checkpoint.weight_dtype = checkpoint.layers.front().weight_dtype;
  checkpoint.fingerprint = print.Hex();
  checkpoint.files = std::move(folder.files);
  return checkpoint;
}

}  // namespace

DType KvDTypeOf(const Checkpoint& checkpoint, DType asked) {
  if (asked != DType::kUnspecified) return asked;
  return checkpoint.weight_dtype == DType::kBF16 ? DType::kBF16 : DType::kF32;
}

absl::StatusOr<Checkpoint> LoadCheckpoint(const std::string& directory) {
  absl::StatusOr<Checkpoint> checkpoint = Load(directory);
  if (checkpoint.ok()) return checkpoint;
  return absl::Status(checkpoint.status().code(),
                      absl::StrCat(directory, ": ", checkpoint.status().message()));
}

}  // namespace attend
