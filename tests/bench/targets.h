// SPDX-License-Identifier: Apache-2.0
//
// The engine's targets and whether results reach them: shares of limits and ratios between cases,
// never a time. Pure arithmetic; `attend-bench --check` prints it.
#pragma once

#include <string>
#include <vector>

#include "tests/bench/result.h"

namespace attend::bench {

struct TargetResult {
  std::string what;
  std::string wanted;
  std::string value;  // what was seen, or why nothing can be said
  bool reached = false;
};

// Every target, also those whose cases did not run: not reached.
std::vector<TargetResult> CheckTargets(const std::vector<CaseResult>& results);

// True if a target needs the case.
bool IsTargetCase(const std::string& name);

}  // namespace attend::bench
