// SPDX-License-Identifier: Apache-2.0
//
// One load from its flags: chooses model, layers and sizes for the server it meets, starts the
// workers, watches them, and hands over what they saw. `attend bench` prints it; --check looks at
// several.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "client/cli/bench/report.h"

namespace attend::cli {

// What a load needs to know of the server.
struct Served {
  std::vector<v1::Model> models;
  v1::Limits limits;
  int threads = 1;  // of its engine
};

// Returns the exit code. `use` is called once, unless the load ended before its measured time (what
// happened is printed) or the flags don't fit the server: then `wrong` says why.
int RunLoad(const Globals& globals, const BenchFlags& flags, const Served& served,
            const std::function<void(const LoadReport&)>& use, std::string* wrong);

}  // namespace attend::cli
