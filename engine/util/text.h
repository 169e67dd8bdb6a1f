// SPDX-License-Identifier: Apache-2.0
//
// How values appear in messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace attend {

// "[2, 8, 128]"; more than eight dimensions are cut.
std::string ShapeText(std::span<const int64_t> shape);

// Bytes of the UTF-8 character that `text`, not empty, begins with; 0 when it begins with none
// (Unicode 15, table 3-7).
size_t Utf8Length(std::string_view text);

// `text` without what is not UTF-8 (each such byte becomes '?'), cut at a character within `limit`
// bytes.
std::string CleanText(std::string_view text, size_t limit);

}  // namespace attend
