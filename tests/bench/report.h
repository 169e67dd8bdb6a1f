// SPDX-License-Identifier: Apache-2.0
//
// What attend-bench shows: the lines of its table and the same as JSON. Pure text from results;
// main.cc prints it.
#pragma once

#include <string>
#include <vector>

#include "tests/bench/result.h"
#include "tests/bench/targets.h"

namespace attend::bench {

// What ran, and on what.
struct BenchMachine {
  EngineInfo engine;
  std::vector<int> cores;
  Limits limits;  // at the start
  int64_t read_bytes = 0;
  double operations_per_cycle = 0;  // of one core, by the fma probe; 0 = not measured
};

std::string HeaderText(const BenchMachine& machine);
std::string TableHead();
std::string TableRow(const CaseResult& result);
std::string TargetsText(const std::vector<TargetResult>& targets);
// `targets` empty: not asked for.
std::string ReportJson(const BenchMachine& machine, const std::vector<CaseResult>& results,
                       const std::vector<TargetResult>& targets);

}  // namespace attend::bench
