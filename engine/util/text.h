// SPDX-License-Identifier: Apache-2.0
//
// How values appear in messages.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace attend {

// "[2, 8, 128]"; more than eight dimensions are cut.
std::string ShapeText(std::span<const int64_t> shape);

}  // namespace attend
