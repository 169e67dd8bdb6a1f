// SPDX-License-Identifier: Apache-2.0
#include "tests/support/golden.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/model/safetensors.h"
#include "engine/model/strict_json.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

using nlohmann::json;

absl::StatusOr<GoldenTensor> Tensor(const TensorMap& tensors, const std::string& name,
                                    bool needed) {
  const auto place = tensors.find(name);
  if (place == tensors.end()) {
    if (needed) return absl::NotFoundError(absl::StrCat("no tensor ", name));
    return GoldenTensor();
  }
  const StoredTensor& stored = place->second;
  if (stored.dtype != "F32") {
    return absl::InvalidArgumentError(absl::StrCat(name, " is ", stored.dtype, ", wanted F32"));
  }
  GoldenTensor tensor{stored.shape, std::vector<float>(stored.bytes.size() / sizeof(float))};
  std::memcpy(tensor.values.data(), stored.bytes.data(), stored.bytes.size());
  return tensor;
}

std::vector<int64_t> Integers(const json& list) {
  return list.is_null() ? std::vector<int64_t>() : list.get<std::vector<int64_t>>();
}

absl::StatusOr<GoldenCase> ReadCase(const json& entry, const TensorMap& tensors) {
  GoldenCase golden;
  golden.id = entry.at("id");
  golden.layer = entry.at("layer");
  golden.role = entry.at("role");
  golden.kind = entry.at("kind");
  golden.causal = entry.at("causal");
  golden.window_left = entry.at("window_left");
  golden.window_right = entry.at("window_right");
  golden.lengths = Integers(entry.at("lengths"));
  golden.chunks = Integers(entry.at("chunks"));
  golden.context_lengths = Integers(entry.at("context_lengths"));
  golden.float32_tolerance = entry.at("tolerance").at("float32_abs");
  golden.half_tolerance = entry.at("tolerance").at("tf32_or_16bit_abs");
  const std::string start = golden.id + ".";
  ASSIGN_OR_RETURN(golden.hidden_states, Tensor(tensors, start + "hidden_states", true));
  ASSIGN_OR_RETURN(golden.output, Tensor(tensors, start + "output", true));
  ASSIGN_OR_RETURN(golden.context, Tensor(tensors, start + "context", golden.role == "cross"));
  ASSIGN_OR_RETURN(golden.attention_weights,
                   Tensor(tensors, start + "attention_weights", entry.at("has_attention_weights")));
  return golden;
}

}  // namespace

std::vector<std::string> GoldenVariants() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(GoldenDirectory(""))) {
    if (entry.is_directory()) names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string GoldenDirectory(const std::string& variant) {
  // Tests carried to another machine (tests/gpu/run.sh) say where the files are there.
  const char* carried = std::getenv("ATTEND_SOURCE_DIR");
  return absl::StrCat(carried != nullptr ? carried : ATTEND_SOURCE_DIR, "/tests/golden/", variant);
}

absl::StatusOr<GoldenVariant> ReadGolden(const std::string& variant) {
  const std::string directory = GoldenDirectory(variant);
  ASSIGN_OR_RETURN(const auto list, MappedFile::Open(directory + "/cases.json"));
  ASSIGN_OR_RETURN(const auto file, MappedFile::Open(directory + "/cases.safetensors"));
  ASSIGN_OR_RETURN(const TensorMap tensors, ReadTensors(*file));
  ASSIGN_OR_RETURN(const json root, ParseStrictJson(list->text(), variant + "/cases.json"));
  GoldenVariant golden;
  golden.model_type = root.at("model_type");
  for (const json& entry : root.at("cases")) {
    ASSIGN_OR_RETURN(GoldenCase read, ReadCase(entry, tensors));
    golden.cases.push_back(std::move(read));
  }
  return golden;
}

}  // namespace attend
