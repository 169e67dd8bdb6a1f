// SPDX-License-Identifier: Apache-2.0
//
// What `attend bench` shows: a line of progress, the table at the end, or the same as JSON. Pure
// text from numbers.
#pragma once

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
