// SPDX-License-Identifier: Apache-2.0
//
// What a device's times mean: rates, shares of the ceilings measured in the same run, verdicts, and
// the table and JSON that show them. What a case computes is tests/bench's. Knows no device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/bench/case_run.h"

namespace attend::gpu {

// The machine's limits, measured in the same run; 0 = not measured.
struct Ceilings {
  double copy_bytes_per_second = 0;  // device to device, bytes read and bytes written
  double matmul_flops_per_second = 0;
};

struct CaseResult {
  bench::BenchCase bench;
  bench::CaseTimes times;  // wall_us with the copies from and to the host
};

std::string ReportTable(const std::string& device, const Ceilings& ceilings,
                        const std::vector<CaseResult>& results);
std::string ReportJson(const std::string& device, const Ceilings& ceilings,
                       const std::vector<CaseResult>& results);

}  // namespace attend::gpu
