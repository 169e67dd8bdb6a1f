// SPDX-License-Identifier: Apache-2.0
#include "engine/util/text.h"

#include <algorithm>

namespace attend {

std::string ShapeText(std::span<const int64_t> shape) {
  constexpr size_t kShown = 8;
  std::string text = "[";
  for (size_t i = 0; i < std::min(shape.size(), kShown); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  if (shape.size() > kShown) text += ", ... (" + std::to_string(shape.size()) + " dimensions)";
  return text + "]";
}

size_t Utf8Length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Overlong forms, surrogates and values above U+10FFFF.
  const unsigned char second = byte(1);
  if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
      (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f)) {
    return 0;
  }
  return length;
}

std::string CleanText(std::string_view text, size_t limit) {
  std::string clean;
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    const size_t bytes = std::max<size_t>(length, 1);
    if (clean.size() + bytes > limit) break;
    if (length == 0) {
      clean.push_back('?');
    } else {
      clean.append(text.substr(0, bytes));
    }
    text.remove_prefix(bytes);
  }
  return clean;
}

}  // namespace attend
