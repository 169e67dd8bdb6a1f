// SPDX-License-Identifier: Apache-2.0
//
// What a load generator sends and when, from its flags and a seed: lengths of sequences, arrival
// times, input values. No clock and no network; used by `attend bench`.
#pragma once

#include <cstdint>
#include <mutex>
#include <random>
#include <string>
#include <string_view>

#include "client/attend_client.h"

namespace attend::cli {

// Lengths of sequences, each between both ends equally likely.
struct LengthRange {
  int64_t first = 128;
  int64_t last = 128;
};

// "128" or "16:512", from 1 to 1,000,000. On error returns what is wrong and leaves `range` alone.
std::string ParseLengthRange(std::string_view text, LengthRange* range);
std::string LengthRangeText(const LengthRange& range);

// Arrivals of an open loop: independent of each other (Poisson), `rate` per second on average.
// Thread-safe.
class ArrivalSchedule {
 public:
  ArrivalSchedule(double rate, uint64_t seed) : rate_(rate), random_(seed) {}
  // Seconds from the start to the next arrival, which is never before the last one; each arrival
  // is told once, to one thread.
  double Next();

 private:
  const double rate_;
  std::mutex mutex_;
  std::mt19937_64 random_;  // guarded by mutex_
  double now_ = 0;          // guarded by mutex_
};

// `count` little-endian elements, multiples of 1/64 in [-2, 2): exact in F32, F16 and BF16, so that
// equal seeds give equal numbers in every type.
std::string MakeInput(v1::DType dtype, int64_t count, uint64_t seed);

// True if any element of a row of F32, F16 or BF16 is not a number.
bool HasNaN(v1::DType dtype, std::string_view row);

}  // namespace attend::cli
