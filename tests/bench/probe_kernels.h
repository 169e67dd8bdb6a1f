// SPDX-License-Identifier: Apache-2.0
//
// Loops that do one thing as fast as a core can: multiply-adds in registers, or reads. Inline
// assembly, so that no compiler folds, hoists or reorders them. Each runs on one thread; limits.cc
// puts them on all cores at once and takes the time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace attend::bench {

// What this processor can run of them.
struct ProbeSet {
  bool avx512 = false;
  bool bf16_dot = false;  // vdpbf16ps, 512 bits
  bool int8_dot = false;  // vpdpbusd, 512 bits
};
ProbeSet DetectProbes();

// `rounds` rounds of independent multiply-adds; returns the operations done, two for each
// multiply-add. 24 accumulators cover the latency of every processor seen (two a cycle x 8 cycles);
// AVX2 has room for 12 (two a cycle x 5 cycles).
double RunFma512(int64_t rounds);
double RunFma256(int64_t rounds);
double RunBF16Dot(int64_t rounds);
double RunInt8Dot(int64_t rounds);

// Reads [data, data + bytes) once, whole lines in `streams` pieces side by side (1, 2, 4 or 8),
// asking for the line `ahead` bytes further on in each piece; 0 = no prefetch.
void ReadMemory(bool avx512, const std::byte* data, int64_t bytes, int streams, int64_t ahead);

// A chain of multiplications, each waiting for the one before: 3 cycles each on every x86-64
// processor of the last ten years. (A chain of additions may be folded when registers are renamed.)
// Returns the cycles.
double RunCycles(int64_t multiplications);

}  // namespace attend::bench
