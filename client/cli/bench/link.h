// SPDX-License-Identifier: Apache-2.0
//
// What the network costs a decode loop, as arithmetic: a call costs a fixed time and a time for
// each byte, computing it a base and a time for each cached token; from how many cached tokens on
// is the network's share small? Pure numbers: measured by the decode loop's worker, printed by the
// report. Times in microseconds, bytes of both directions together.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace attend::cli {

// The share of a call's time that the network may take at the break-even.
inline constexpr double kBreakEvenShare = 0.2;

// Medians of calls of a layer, one at a time. `rest` is what is neither queue nor computation.
struct LinkSamples {
  struct Call {
    int64_t rows = 0;
    double bytes = 0;
    double cached = 0;  // tokens of all its sequences
    double rest_us = 0;
    double compute_us = 0;
  };
  Call batch;   // a step of one micro-batch
  Call row;     // one row without history
  Call cached;  // one row with a history
  Call rows;    // many rows
};

struct LinkCosts {
  double fixed_us = 0;
  double byte_us = 0;
  double base_us = 0;    // computing the micro-batch with nothing cached
  double cached_us = 0;  // for each cached token; 0 = not measurable
};
LinkCosts CostsOf(const LinkSamples& samples);

// What each byte costs more on a network of so many Gbit/s.
double WireByteUs(double gbit);
// Of a call of `bytes` bytes.
double RpcUs(const LinkCosts& costs, double bytes, double wire_byte_us);
// Cached tokens of a call from which on its RPC is at most kBreakEvenShare of RPC and computation;
// 0 = always. Nothing when computation does not grow with them.
std::optional<double> BreakEvenTokens(const LinkCosts& costs, double bytes, double wire_byte_us);

// The costs and both break-evens, with the arithmetic.
std::string LinkText(const LinkSamples& samples, double gbit);

// What the decode loop found out after its measured time.
struct LinkMeasurement {
  std::optional<LinkSamples> samples;
  std::string why_not;  // without samples
};

}  // namespace attend::cli
