// SPDX-License-Identifier: Apache-2.0
//
// What came of a case of attend-bench, and what its times mean beside the limits: rates, the share
// of the limit, the floor. Pure arithmetic; the report and the targets read it.
#pragma once

#include <optional>
#include <string>

#include "tests/bench/case_run.h"
#include "tests/bench/limits.h"

namespace attend::bench {

// Limits that moved more than this during a case can't be compared with.
inline constexpr double kMostMoved = 1.10;

struct CaseResult {
  BenchCase bench;
  std::string failure;          // why there are no times; empty otherwise
  DType compute = DType::kF32;  // operands of the projections' products
  DType attend = DType::kF32;   // operands of the attention's products
  CaseTimes times;
  Limits before, after;
  int64_t peak_bytes = 0;  // resident, of all the case needed
  int64_t work_bytes = 0;  // of it, what its batches added to weights, caches, inputs and outputs
};

// Of the limits that this case's share is of. 1 = they stayed.
double LimitsMoved(const CaseResult& result);

// Operations and stored bytes per second, at the median.
double OperationsRate(const CaseResult& result);
double BytesRate(const CaseResult& result);

// The least seconds by the limits: in each phase the larger of its operations over their limit and
// its bytes over the read bandwidth. 0 when a limit it needs was not measured.
double FloorSeconds(const CaseResult& result);

// Of the limit named by LimitName: cases bound by operations, the time that these need at least
// over the median; bound by bytes, BytesRate over the read bandwidth. None when the limits moved or
// were not measured.
std::optional<double> ShareOfLimit(const CaseResult& result);
// "fma", "dot", "int8 + dot", "read"
std::string LimitName(const CaseResult& result);

}  // namespace attend::bench
