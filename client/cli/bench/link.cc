// SPDX-License-Identifier: Apache-2.0
#include "client/cli/bench/link.h"

#include <algorithm>

#include "client/cli/bench/format.h"

namespace attend::cli {
namespace {

// How many times the RPC computation must take at the break-even.
constexpr double kTimes = (1 - kBreakEvenShare) / kBreakEvenShare;

std::string BreakEvenLine(const LinkSamples& samples, const std::string& name,
                          const std::string& rpc, double wire_byte_us) {
  const LinkCosts costs = CostsOf(samples);
  const auto tokens = BreakEvenTokens(costs, samples.batch.bytes, wire_byte_us);
  std::string text = Format("  %-12s ", name.c_str());
  if (!tokens) return text + "unknown: a cached token costs less than can be measured\n";
  if (*tokens <= 0) {
    return text + Format("any history: %.0f x %s is no more than %.0f us\n", kTimes, rpc.c_str(),
                         costs.base_us);
  }
  const double each = *tokens / static_cast<double>(std::max<int64_t>(1, samples.batch.rows));
  return text + Format("%.0f cached tokens a call (%.0f a session): ", *tokens, each) +
         Format("(%.0f x %s - %.0f us) / %.4f us\n", kTimes, rpc.c_str(), costs.base_us,
                costs.cached_us);
}

}  // namespace

LinkCosts CostsOf(const LinkSamples& samples) {
  LinkCosts costs;
  const double bytes = samples.rows.bytes - samples.row.bytes;
  if (bytes > 0) {
    costs.byte_us = std::max(0.0, (samples.rows.rest_us - samples.row.rest_us) / bytes);
  }
  costs.fixed_us = std::max(0.0, samples.row.rest_us - costs.byte_us * samples.row.bytes);
  const double cached = samples.cached.cached - samples.row.cached;
  if (cached > 0) {
    costs.cached_us = std::max(0.0, (samples.cached.compute_us - samples.row.compute_us) / cached);
  }
  costs.base_us = std::max(0.0, samples.batch.compute_us - costs.cached_us * samples.batch.cached);
  return costs;
}

double WireByteUs(double gbit) { return 8e-3 / gbit; }

double RpcUs(const LinkCosts& costs, double bytes, double wire_byte_us) {
  return costs.fixed_us + bytes * (costs.byte_us + wire_byte_us);
}

std::optional<double> BreakEvenTokens(const LinkCosts& costs, double bytes, double wire_byte_us) {
  const double missing = kTimes * RpcUs(costs, bytes, wire_byte_us) - costs.base_us;
  if (missing <= 0) return 0;
  if (costs.cached_us <= 0) return std::nullopt;
  return missing / costs.cached_us;
}

std::string LinkText(const LinkSamples& samples, double gbit) {
  const LinkCosts costs = CostsOf(samples);
  const double bytes = samples.batch.bytes;
  const double wire = WireByteUs(gbit);
  const std::string network = Format("%g Gbit/s", gbit);
  return Format("%-14s %.0f us a call + %.3f ns a byte: %.0f us for %.0f bytes, %.0f us for %.0f\n",
                "link", costs.fixed_us, 1e3 * costs.byte_us, samples.row.rest_us, samples.row.bytes,
                samples.rows.rest_us, samples.rows.bytes) +
         Format("%-14s %.0f us for the %.0f bytes of a micro-batch's call, measured\n", "",
                samples.batch.rest_us, bytes) +
         Format("%-14s %.0f us a call of %ld rows + %.4f us a cached token\n", "engine",
                costs.base_us, samples.batch.rows, costs.cached_us) +
         Format("%-14s the network is below %.0f %% of a call of %ld rows and %.0f bytes from\n",
                "break-even", 100 * kBreakEvenShare, samples.batch.rows, bytes) +
         BreakEvenLine(samples, "this link", Format("%.0f us", RpcUs(costs, bytes, 0)), 0) +
         BreakEvenLine(samples, network,
                       Format("(%.0f us + %.0f x (%.3f + %.3f) ns)", costs.fixed_us, bytes,
                              1e3 * costs.byte_us, 1e3 * wire),
                       wire);
}

}  // namespace attend::cli
