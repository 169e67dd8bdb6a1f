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

}  // namespace attend
