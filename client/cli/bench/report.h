// SPDX-License-Identifier: Apache-2.0
//
// What `attend bench` shows: a line of progress, the table at the end, or the same as JSON. Pure
// text from numbers.
#pragma once

#include <array>
#include <optional>
#include <string>

#include "client/cli/bench/context.h"
#include "client/cli/bench/stats.h"

namespace attend::cli {

struct LoadReport {
  const Bench& bench;
  const LoadStats& stats;
  double seconds = 0;      // measured
  double cpu_seconds = 0;  // of this process meanwhile
  int signal = 0;          // that ended it early, 0 = none
  bool gave_up = false;    // nothing but failures for --timeout
  // How long requests of each kind could be sent; 0 = `seconds`.
  std::array<double, kKinds> kind_seconds{};
  // Of the servers' processes meanwhile, where they run on this host.
  std::optional<double> server_cpu_seconds = std::nullopt;
  std::optional<double> echo_cpu_seconds = std::nullopt;
  double echo_client_cpu_seconds = 0;  // of this process in the echo's turns
};

// The kind whose latency and rate stand for the load.
Kind MainKind(const BenchFlags& flags);

// Between two looks at a running load, `seconds` apart; `elapsed` is the measured time so far.
std::string ProgressLine(const Bench& bench, const LoadStats& earlier, const LoadStats& now,
                         double seconds, double elapsed, int64_t in_flight);
std::string ReportText(const LoadReport& report);
std::string ReportJson(const LoadReport& report);

// 0 when nothing failed and something was answered, else 1; 128 + signal.
int ExitCodeOf(const LoadReport& report);

}  // namespace attend::cli
