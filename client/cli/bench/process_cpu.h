// SPDX-License-Identifier: Apache-2.0
//
// Processor time, user and system: of this process, and of a server that runs on this host, found
// by the address it listens on; none for others and where /proc doesn't tell. Knows no requests.
#pragma once

#include <optional>
#include <string>

namespace attend::cli {

// Of this process so far.
double CpuSeconds();

class ServerCpu {
 public:
  // HOST:PORT of a loopback address, or unix:PATH.
  explicit ServerCpu(const std::string& address);

  // Of the server's process so far.
  std::optional<double> seconds() const;

 private:
  int pid_ = 0;  // 0 = not found
};

}  // namespace attend::cli
