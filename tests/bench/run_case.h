// SPDX-License-Identifier: Apache-2.0
//
// One case of attend-bench from nothing to its result: an engine of its own, so that the memory it
// takes is seen, the limits before and after, and another try when they moved meanwhile. Called by
// main.cc.
#pragma once

#include <memory>
#include <string>

#include "tests/bench/limits.h"
#include "tests/bench/result.h"

namespace attend::bench {

struct RunOptions {
  std::string isa = "auto";
  std::string compute = "auto";
  int threads = 1;
  int repeats = 11;       // of each set; short cases repeat until least_seconds, long ones
  int least_repeats = 3;  // only so often when most_seconds are over
  double least_seconds = 0;
  double most_seconds = 1.5;  // of the batches between two looks at the limits
  int tries = 5;              // until the limits stay
};

absl::StatusOr<std::unique_ptr<AttentionEngine>> OpenEngine(const RunOptions& options,
                                                            const BenchCase& bench);

// What the sets of the case read in a round.
int64_t StreamedBytes(const BenchCase& bench);

// Failures are in the result.
CaseResult RunCase(const RunOptions& options, const BenchCase& bench, LimitProbe& probe);

}  // namespace attend::bench
