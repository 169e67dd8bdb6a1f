// SPDX-License-Identifier: Apache-2.0
//
// What the machine, or the container around this process, allows (defaults of options.cc) and what
// the process uses of it (metrics.cc). Reads /proc and cgroup files, versions 1 and 2; decides
// nothing.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace attend {

struct Machine {
  int64_t memory_bytes = 0;  // the smaller of physical memory and the cgroup's limit
  int cores = 1;             // the smaller of the affinity mask and the cgroup's quota, at least 1
  std::string host_name;     // [A-Za-z0-9._-]{1,128}: other characters are replaced by '-'
};

// `affinity_cores` and `root` replace the affinity mask and "/" in tests.
Machine ReadMachine();
Machine ReadMachine(const std::string& root, int affinity_cores);

// Limits of the control group `root`/proc/self is in and of every group above it; a group that
// can't be read limits nothing.
struct CgroupLimits {
  int64_t memory_bytes = INT64_MAX;
  double cores = 1e9;
};
CgroupLimits ReadCgroupLimits(const std::string& root);

struct ProcessUsage {
  double cpu_seconds = 0;  // user and system
  int64_t resident_bytes = 0;
  int64_t virtual_bytes = 0;
  int64_t open_fds = 0;
  int64_t max_fds = 0;
  double start_seconds = 0;  // Unix time
};
ProcessUsage ReadProcessUsage();

// Established TCP connections that this process has accepted on one of `ports`. Goes through its
// own descriptors: the tables in /proc/net list every socket of the machine, and reading them takes
// a tenth of a second where tens of thousands linger.
int64_t CountConnections(std::span<const int> ports);

}  // namespace attend
