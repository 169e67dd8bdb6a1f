// SPDX-License-Identifier: Apache-2.0
//
// What the benchmark's times mean: operations and bytes that a case cannot do without, rates,
// shares of the ceilings measured in the same run, and the table and JSON that show them. Knows no
// device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/attention_engine.h"

namespace attend::gpu {

// The machine's limits, measured in the same run; 0 = not measured.
struct Ceilings {
  double copy_bytes_per_second = 0;  // device to device, bytes read and bytes written
  double matmul_flops_per_second = 0;
};

enum class CaseKind : uint8_t {
  kPrefill,  // raw attention of whole sequences
  kDecode,   // raw attention of one row per sequence over its cached keys
  kLayer,    // a layer with its projections
};

struct BenchCase {
  std::string name;
  CaseKind kind = CaseKind::kPrefill;
  AttentionSpec spec;
  DType dtype = DType::kBF16;  // of rows, weights and KV
  int64_t sequences = 1;
  int64_t rows = 1;  // of each sequence
  int64_t keys = 1;  // of each sequence, the rows' own included
  // What the case should reach: prefill in FLOP/s of the attention kernels, decode in bytes/s of
  // KV. 0 = nothing is asked.
  double bar = 0;
  double goal = 0;
};

// Medians over the repeats.
struct CaseTimes {
  StageTimes stages;
  int64_t wall_us = 0;  // Start to Wait, with the copies from and to the host
};

struct CaseResult {
  BenchCase bench;
  CaseTimes times;
};

// Multiply-adds x 2 of scores and values over visible keys, all sequences.
double AttentionFlops(const BenchCase& bench);
// Keys and values, each read once.
double KvBytes(const BenchCase& bench);
// Multiply-adds x 2 of the projections.
double ProjectionFlops(const BenchCase& bench);

// The median; of an even number the lower one. 0 of none.
int64_t Median(std::vector<int64_t> values);

std::string ReportTable(const std::string& device, const Ceilings& ceilings,
                        const std::vector<CaseResult>& results);
std::string ReportJson(const std::string& device, const Ceilings& ceilings,
                       const std::vector<CaseResult>& results);

}  // namespace attend::gpu
