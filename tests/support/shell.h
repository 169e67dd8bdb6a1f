// SPDX-License-Identifier: Apache-2.0
//
// Runs a command with the shell and keeps what it printed. For tests of the built binaries.
#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <string>

namespace attend {

struct Outcome {
  int code = -1;     // exit code; -1 = it did not run or was ended by a signal
  std::string text;  // standard output and error together
};

inline Outcome RunShell(const std::string& command) {
  Outcome outcome;
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return outcome;
  char buffer[4096];
  for (size_t got; (got = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) {
    outcome.text.append(buffer, got);
  }
  const int status = pclose(pipe);
  if (WIFEXITED(status)) outcome.code = WEXITSTATUS(status);
  return outcome;
}

}  // namespace attend
