// SPDX-License-Identifier: Apache-2.0
//
// The cases of attend-bench: the reference layers that DESIGN's texts name, decoding, mixed
// batches, long sequences and shapes nobody tunes for. Called by main.cc; knows what is computed,
// not how fast it should be (targets.cc).
#pragma once

#include <vector>

#include "tests/bench/bench_case.h"

namespace attend::bench {

struct CaseOptions {
  bool i8 = true;  // the engine keeps keys and values in I8
  // What the sets of a decode case read in a round: more than any cache holds.
  int64_t cold_bytes = int64_t{600} << 20;
};

// Names are GROUP/MODEL/SHAPE/TYPES, e.g. "layer/bert-base/8x128/f32"; SHAPE is sequences x rows,
// of decode sequences x cached keys. TYPES: f32 and bf16 = weights, KV and rows; i8 = weights and
// KV, kv8 = only KV, rows are BF16.
std::vector<BenchCase> AllCases(const CaseOptions& options);

}  // namespace attend::bench
