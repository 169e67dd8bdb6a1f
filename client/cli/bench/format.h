// SPDX-License-Identifier: Apache-2.0
//
// printf into a string, for the lines that `attend bench` shows.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <string>

namespace attend::cli {

// At most 1,023 bytes of it.
[[gnu::format(printf, 1, 2)]] inline std::string Format(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  return text;
}

}  // namespace attend::cli
