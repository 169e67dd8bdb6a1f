// SPDX-License-Identifier: Apache-2.0
//
// The seed of a random test: printed always, taken from ATTEND_TEST_SEED to run a failure again.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace attend {

inline uint64_t TestSeed() {
  const char* given = std::getenv("ATTEND_TEST_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
  std::printf("seed: ATTEND_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace attend
