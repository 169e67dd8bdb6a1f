// SPDX-License-Identifier: Apache-2.0
//
// JSON of files that nobody vouches for: config.json, safetensors headers, shard indices. Stricter
// than the library it uses: one object, no duplicate keys (an escaped spelling is the same key),
// bounded nesting and strings, nothing but whitespace around it. Knows no keys.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace attend {

// `where` starts the error message, e.g. "model.safetensors: header". INVALID_ARGUMENT on any
// violation.
absl::StatusOr<nlohmann::json> ParseStrictJson(std::string_view text, const std::string& where);

// A name out of such a file in single quotes, control characters escaped, cut after 100 characters.
std::string Quoted(std::string_view name);

}  // namespace attend
