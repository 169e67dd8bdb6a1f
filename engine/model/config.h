// SPDX-License-Identifier: Apache-2.0
//
// Reads config.json: typed access that names key, value and what is allowed, and the rules several
// families share (rotary positions, sliding windows, layer types, refused mechanisms). Keys may
// have aliases; a key that is null counts as absent. The family tables call it; it knows no
// tensors.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/attention_spec.h"

namespace attend {

class Config {
 public:
  // `text` is the file's content. Refuses what changes the meaning of all tensors
  // (quantization_config) or of the scores (position_embedding_type other than "absolute").
  static absl::StatusOr<Config> Parse(std::string_view text);

  // An object below this one, e.g. rope_parameters; `where` continues the path in messages.
  Config Nested(const char* name) const;

  bool Has(const char* name) const;  // present and not null
  bool IsObject(const char* name) const;
  bool IsNull(const char* name) const;  // present and null

  using Names = std::initializer_list<const char*>;

  // The value under the first of `names` that is present; two names with different values are
  // refused. Without a fallback an absent key is an error.
  absl::StatusOr<int64_t> Integer(Names names, std::optional<int64_t> fallback, int64_t low,
                                  int64_t high) const;
  absl::StatusOr<double> Number(Names names, std::optional<double> fallback) const;
  absl::StatusOr<bool> Boolean(const char* name, bool fallback) const;
  absl::StatusOr<std::string> Text(const char* name) const;
  absl::StatusOr<std::vector<std::string>> TextList(const char* name) const;

  // INVALID_ARGUMENT, "config.json: NAME: got GOT, wanted WANTED"; `name` below this object's path.
  absl::Status Wrong(std::string_view name, std::string_view got, std::string_view wanted) const;
  // The value as JSON text, for messages.
  std::string Shown(const char* name) const;

 private:
  explicit Config(nlohmann::json root, std::string path = "")
      : root_(std::move(root)), path_(std::move(path)) {}

  absl::StatusOr<const char*> Present(Names names) const;  // null = none of them

  nlohmann::json root_;
  std::string path_;  // of a nested object, with a dot at its end
};

// Limits that keep an absurd file from allocating before its tensors are compared with it.
inline constexpr int64_t kMaxLayers = 4096;
inline constexpr int64_t kMaxWidth = int64_t{1} << 20;
inline constexpr int64_t kMaxPositions = int64_t{1} << 40;

// hidden_size / num_attention_heads where head_dim has no value of its own; refused when not whole.
absl::StatusOr<int> WholeHeadDim(const Config& config, int d_model, int q_heads);

// Rotary parameters in their version-4 form (rope_theta, rope_scaling) and version-5 form
// (rope_parameters, flat or one object per layer type). Scalings other than default, linear and
// llama3 are refused by name. `layer_type` picks the object of that type where there is one.
struct RopeConfig {
  RopeSpec spec;
  std::string
      text;  // what the frequencies come from: "theta 10000", "theta 100, linear scaling ..."
};
absl::StatusOr<RopeConfig> ReadRope(const Config& config, int head_dim, double default_theta,
                                    int64_t max_positions, const std::string& layer_type);

// layer_types, one of "full_attention" and "sliding_attention" per layer; empty when the key is
// absent.
absl::StatusOr<std::vector<std::string>> ReadLayerTypes(const Config& config, int64_t layers);

}  // namespace attend
