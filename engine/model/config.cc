// SPDX-License-Identifier: Apache-2.0
#include "engine/model/config.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/model/strict_json.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

using nlohmann::json;

constexpr char kFileName[] = "config.json";
constexpr size_t kShownBytes = 80;

// The lower limit may be open: a wavelength factor of 0 divides by zero.
absl::StatusOr<double> PositiveNumber(const Config& config, Config::Names names,
                                      std::optional<double> fallback) {
  ASSIGN_OR_RETURN(const double value, config.Number(names, fallback));
  if (value > 0) return value;
  return config.Wrong(*names.begin(), absl::StrCat(value), "a number > 0");
}

// rope_scaling when it says anything, else rope_parameters of the layer type, else nothing.
absl::StatusOr<std::optional<Config>> RopeObject(const Config& config,
                                                 const std::string& layer_type) {
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    if (!config.Has(name)) continue;
    if (!config.IsObject(name)) return config.Wrong(name, config.Shown(name), "an object or null");
    Config object = config.Nested(name);
    if (object.IsObject(layer_type.c_str())) return object.Nested(layer_type.c_str());
    for (const char* other : {"full_attention", "sliding_attention"}) {
      if (object.Has(other)) {
        return config.Wrong(name, object.Shown(other), absl::StrCat("an object for ", layer_type));
      }
    }
    if (config.Shown(name) != "{}") return object;
  }
  return std::nullopt;
}

absl::StatusOr<std::string> RopeType(const Config& rope) {
  std::string type = "default";
  const bool new_name = rope.Has("rope_type");
  if (new_name || rope.Has("type")) {
    ASSIGN_OR_RETURN(type, rope.Text(new_name ? "rope_type" : "type"));
  }
  if (new_name && rope.Has("type") && rope.Shown("type") != rope.Shown("rope_type")) {
    return rope.Wrong("type", rope.Shown("type"),
                      absl::StrCat("the value of rope_type, ", rope.Shown("rope_type")));
  }
  if (type != "default" && type != "linear" && type != "llama3") {
    return rope.Wrong(new_name ? "rope_type" : "type", Quoted(type),
                      "a scaling this build supports: default, linear, llama3");
  }
  return type;
}

// Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1).
absl::Status ApplyLlama3(const Config& config, const Config& rope, int64_t max_positions,
                         RopeConfig& read) {
  ASSIGN_OR_RETURN(const double factor, PositiveNumber(rope, {"factor"}, std::nullopt));
  ASSIGN_OR_RETURN(const double low, PositiveNumber(rope, {"low_freq_factor"}, std::nullopt));
  ASSIGN_OR_RETURN(const double high, PositiveNumber(rope, {"high_freq_factor"}, std::nullopt));
  if (high <= low) {
    return rope.Wrong("high_freq_factor", absl::StrCat(high),
                      absl::StrCat("a number above low_freq_factor, ", low));
  }
  constexpr char kOriginal[] = "original_max_position_embeddings";
  const Config& holder = config.Has(kOriginal) ? config : rope;
  ASSIGN_OR_RETURN(const double original,
                   PositiveNumber(holder, {kOriginal}, static_cast<double>(max_positions)));
  absl::StrAppend(&read.text, ", llama3 scaling by ", factor, " over ", original,
                  " positions, frequency factors ", low, " and ", high);
  for (double& frequency : read.spec.inverse_frequency) {
    const double wavelength = 2 * M_PI / frequency;
    if (wavelength < original / high) continue;
    if (wavelength > original / low) {
      frequency /= factor;
      continue;
    }
    const double kept = (original / wavelength - low) / (high - low);
    frequency = (1 - kept) * frequency / factor + kept * frequency;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Config> Config::Parse(std::string_view text) {
  ASSIGN_OR_RETURN(json root, ParseStrictJson(text, kFileName));
  Config config(std::move(root));
  if (config.Has("quantization_config")) {
    return config.Wrong("quantization_config", config.Shown("quantization_config"),
                        "a checkpoint with F32, F16 or BF16 weights");
  }
  if (config.Has("position_embedding_type") &&
      config.Shown("position_embedding_type") != "\"absolute\"") {
    return config.Wrong("position_embedding_type", config.Shown("position_embedding_type"),
                        "\"absolute\"");
  }
  return config;
}

Config Config::Nested(const char* name) const {
  return Config(root_.at(name), absl::StrCat(path_, name, "."));
}

bool Config::Has(const char* name) const {
  const auto place = root_.find(name);
  return place != root_.end() && !place->is_null();
}

bool Config::IsObject(const char* name) const { return Has(name) && root_[name].is_object(); }

bool Config::IsNull(const char* name) const {
  const auto place = root_.find(name);
  return place != root_.end() && place->is_null();
}

std::string Config::Shown(const char* name) const {
  const auto place = root_.find(name);
  if (place == root_.end()) return "nothing";
  std::string text = place->dump();
  if (text.size() > kShownBytes) text = absl::StrCat(text.substr(0, kShownBytes), "...");
  return text;
}

absl::Status Config::Wrong(std::string_view name, std::string_view got,
                           std::string_view wanted) const {
  return absl::InvalidArgumentError(absl::StrCat(kFileName, ": ", path_, std::string(name),
                                                 ": got ", std::string(got), ", wanted ",
                                                 std::string(wanted)));
}

absl::StatusOr<const char*> Config::Present(Names names) const {
  const char* found = nullptr;
  for (const char* name : names) {
    if (!Has(name)) continue;
    if (found == nullptr) {
      found = name;
    } else if (root_[name] != root_[found]) {
      return Wrong(name, Shown(name), absl::StrCat("the value of ", found, ", ", Shown(found)));
    }
  }
  return found;
}

absl::StatusOr<int64_t> Config::Integer(Names names, std::optional<int64_t> fallback, int64_t low,
                                        int64_t high) const {
  ASSIGN_OR_RETURN(const char* name, Present(names));
  const std::string wanted = absl::StrCat("an integer, ", low, "..", high);
  if (name == nullptr) {
    if (fallback.has_value()) return *fallback;
    return Wrong(*names.begin(), "nothing", wanted);
  }
  const json& value = root_[name];
  const bool too_large = value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX;
  if (!value.is_number_integer() || too_large) return Wrong(name, Shown(name), wanted);
  const int64_t number = value.get<int64_t>();
  if (number < low || number > high) return Wrong(name, Shown(name), wanted);
  return number;
}

absl::StatusOr<double> Config::Number(Names names, std::optional<double> fallback) const {
  ASSIGN_OR_RETURN(const char* name, Present(names));
  if (name == nullptr) {
    if (fallback.has_value()) return *fallback;
    return Wrong(*names.begin(), "nothing", "a number");
  }
  if (!root_[name].is_number()) return Wrong(name, Shown(name), "a number");
  return root_[name].get<double>();
}

absl::StatusOr<bool> Config::Boolean(const char* name, bool fallback) const {
  if (!Has(name)) return fallback;
  if (!root_[name].is_boolean()) return Wrong(name, Shown(name), "true or false");
  return root_[name].get<bool>();
}

absl::StatusOr<std::string> Config::Text(const char* name) const {
  if (!Has(name) || !root_[name].is_string()) return Wrong(name, Shown(name), "a string");
  return root_[name].get<std::string>();
}

absl::StatusOr<std::vector<std::string>> Config::TextList(const char* name) const {
  const auto place = root_.find(name);
  if (place == root_.end() || !place->is_array())
    return Wrong(name, Shown(name), "a list of strings");
  std::vector<std::string> values;
  for (const json& item : *place) {
    if (!item.is_string()) return Wrong(name, Shown(name), "a list of strings");
    values.push_back(item.get<std::string>());
  }
  return values;
}

absl::StatusOr<int> WholeHeadDim(const Config& config, int d_model, int q_heads) {
  if (d_model % q_heads == 0) return d_model / q_heads;
  return config.Wrong("num_attention_heads", absl::StrCat(q_heads),
                      absl::StrCat("a divisor of the hidden size ", d_model));
}

absl::StatusOr<RopeConfig> ReadRope(const Config& config, int head_dim, double default_theta,
                                    int64_t max_positions, const std::string& layer_type) {
  ASSIGN_OR_RETURN(const std::optional<Config> object, RopeObject(config, layer_type));
  ASSIGN_OR_RETURN(double theta, PositiveNumber(config, {"rope_theta"}, default_theta));
  ASSIGN_OR_RETURN(double rotated, PositiveNumber(config, {"partial_rotary_factor"}, 1.0));
  std::string type = "default";
  if (object.has_value()) {
    ASSIGN_OR_RETURN(type, RopeType(*object));
    ASSIGN_OR_RETURN(theta, PositiveNumber(*object, {"rope_theta"}, theta));
    ASSIGN_OR_RETURN(rotated, PositiveNumber(*object, {"partial_rotary_factor"}, rotated));
  }
  if (rotated > 1) return config.Wrong("partial_rotary_factor", absl::StrCat(rotated), "0..1");

  RopeConfig read{.spec = {}, .text = absl::StrCat("theta ", theta)};
  RopeSpec& spec = read.spec;
  spec.dim = static_cast<int>(head_dim * rotated);
  if (spec.dim < 2 || spec.dim % 2 != 0) {
    return config.Wrong("head_dim", absl::StrCat(head_dim),
                        absl::StrCat("an even number of rotated dimensions, not ", spec.dim));
  }
  for (int i = 0; i < spec.dim / 2; ++i) {
    spec.inverse_frequency.push_back(std::pow(theta, -2.0 * i / spec.dim));
  }
  if (type == "linear") {
    ASSIGN_OR_RETURN(const double factor, PositiveNumber(*object, {"factor"}, std::nullopt));
    absl::StrAppend(&read.text, ", linear scaling by ", factor);
    for (double& frequency : spec.inverse_frequency) frequency /= factor;
  } else if (type == "llama3") {
    RETURN_IF_ERROR(ApplyLlama3(config, *object, max_positions, read));
  }
  return read;
}

absl::StatusOr<std::vector<std::string>> ReadLayerTypes(const Config& config, int64_t layers) {
  if (!config.Has("layer_types")) return std::vector<std::string>();
  ASSIGN_OR_RETURN(std::vector<std::string> types, config.TextList("layer_types"));
  if (static_cast<int64_t>(types.size()) != layers) {
    return config.Wrong("layer_types", absl::StrCat(types.size(), " values"),
                        absl::StrCat(layers, ", one per layer"));
  }
  for (const std::string& type : types) {
    if (type != "full_attention" && type != "sliding_attention") {
      return config.Wrong("layer_types", Quoted(type), "full_attention or sliding_attention");
    }
  }
  return types;
}

}  // namespace attend
