// SPDX-License-Identifier: Apache-2.0
//
// `attend bench --check`: runs the loads that the service's targets are about, one after another,
// and says of each target what was wanted, what came out and whether that is enough; also what of
// the targets' conditions it could not check. What a report says of a target is arithmetic; the
// loads are run.h's.
#pragma once

#include <string>
#include <vector>

#include "client/cli/bench/run.h"

namespace attend::cli {

struct Target {
  std::string what = {};
  std::string wanted = {};
  std::string value = {};
  bool reached = false;
};

// Of one client with an echo server: the round trip against computation and echo.
Target RoundTripTarget(const LoadReport& report);
// Of many clients with an echo server: requests per second against what the cores allow, which
// spend what computing takes alone (`compute_us` on `threads` threads) and what an echo costs.
Target CeilingTarget(const LoadReport& report, double compute_us, int threads, int cores);
Target IdleTarget(const LoadReport& report);
// Tokens per second against the engine's: `engine` of them (in the decode loop through one layer),
// or where that is 0 what it does while it computes.
Target ThroughputTarget(const LoadReport& report, double engine);
Target FairnessTarget(const LoadReport& report);

// Which conditions of the targets the loads did not have, or nobody here can see, each with its
// reason. `threads` are the server's; `layers` are those of the decode loop, 0 = it did not run.
std::vector<std::string> NotChecked(const BenchFlags& flags, int threads, size_t layers);

std::string TargetsText(const std::vector<Target>& targets,
                        const std::vector<std::string>& not_checked);
std::string TargetsJson(const std::vector<Target>& targets,
                        const std::vector<std::string>& not_checked);

// Returns the exit code: 1 when a target was not reached or a load failed.
int RunCheck(const Globals& globals, const BenchFlags& flags, const Served& served);

}  // namespace attend::cli
