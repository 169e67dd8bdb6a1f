// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/memory_use.h"

#include <malloc.h>

#include <fstream>
#include <string>

namespace attend::bench {
namespace {

int64_t StatusBytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key + ":")) return std::stoll(line.substr(key.size() + 1)) * 1024;
  }
  return 0;
}

}  // namespace

int64_t ResidentBytes() { return StatusBytes("VmRSS"); }

int64_t PeakResidentBytes() { return StatusBytes("VmHWM"); }

void ForgetPeak() { std::ofstream("/proc/self/clear_refs") << 5; }

void ReturnFreedMemory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 20);  // fixed, too: by default it grows with what was freed
  malloc_trim(0);
}

}  // namespace attend::bench
