// SPDX-License-Identifier: Apache-2.0
//
// The command line of attend-bench: flags, help, and one line for what is wrong. Knows nothing of
// engines and limits.
#pragma once

#include <optional>
#include <string>
#include <variant>

namespace attend::bench {

struct Flags {
  int threads = 0;  // 0 = cores allowed
  std::string isa = "auto";
  std::string compute = "auto";
  std::string cases;  // regular expression, found anywhere in the name; empty = all
  bool list = false;
  int repeats = 0;  // 0 = by itself
  bool quick = false;
  bool check = false;
  std::string json;
};

// What to print instead of running, and the exit code: 0 with the help, 2 with one line.
struct Ending {
  int code = 0;
  std::string text;
};

// `most_threads` cores are allowed.
std::variant<Flags, Ending> ParseFlags(int count, const char* const* arguments, int most_threads);

}  // namespace attend::bench
