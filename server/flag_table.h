// SPDX-License-Identifier: Apache-2.0
//
// The flags of attend-server, each once: name, default, unit, limits, help, and how a value is
// stored. A new setting is a field of Options and a line here. Used by options.cc, which knows
// where values come from.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "server/options.h"

namespace attend {

// Stores a value; false when it is not what FlagRow.allowed says.
using Setter = std::function<bool(const std::string& value, Options& options)>;

struct Flag {
  FlagRow row;
  Setter set;
  std::string value_if_bare = {};  // "--reflection" alone; empty = a value is required
};

// In the order of --help; the commands (--help, --version, --health) come first.
std::vector<Flag> Flags();

}  // namespace attend
