// SPDX-License-Identifier: Apache-2.0
//
// The built binary attend-server as a child process: flags, log, ports, signals, exit code, memory
// and its HTTP pages. Used by every integration test; knows nothing of the wire contract.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace attend {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitizer = true;
#else
inline constexpr bool kSanitizer = false;
#endif
// Longest wait for anything that must happen; never reached by a server that works.
inline constexpr std::chrono::seconds kPatience{kSanitizer ? 60 : 20};

// Looks at `condition` until it holds; false after `limit`.
bool Eventually(const std::function<bool()>& condition,
                std::chrono::milliseconds limit = kPatience);

// "--model=NAME=DIRECTORY" of a checkpoint of tests/golden; NAME is `name`, else the folder's.
std::string GoldenModelFlag(const std::string& variant, const std::string& name = {});

// By the text before the value, e.g. `attend_sessions{state="idle"}`.
using MetricValues = std::map<std::string, double>;

class ServerProcess {
 public:
  // Starts with `flags`, which win over small defaults: free ports on loopback, 16 MiB of cache,
  // messages of 4 MiB, a queue of 16 MiB, two threads.
  explicit ServerProcess(const std::vector<std::string>& flags);
  ~ServerProcess();  // kills it if it still runs; a sanitizer's report in its log fails the test
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  // Wait for a line of the log; false when the process ended without it.
  bool WaitForListening();
  bool WaitForServing();
  bool WaitForLog(const std::string& text);

  // After WaitForListening.
  const std::string& address() const { return address_; }
  const std::string& http_address() const { return http_address_; }

  void Signal(int number) const;
  // Exit code; 128 + number when a signal ended it; -1 when it had to be killed after `limit`.
  int WaitForExit(std::chrono::milliseconds limit = kPatience);

  std::string log() const;  // standard error so far
  int64_t resident_bytes() const;

  // Body of an answer with status 200; "HTTP NNN" for others, empty without an answer.
  std::string Get(const std::string& path) const;
  MetricValues Metrics() const;

 private:
  void ReadLog();

  pid_t pid_ = -1;
  bool ended_ = false;
  int exit_code_ = -1;
  int log_fd_ = -1;
  std::thread reader_;
  mutable std::mutex mutex_;
  std::condition_variable grown_;
  std::string log_;         // guarded by mutex_
  bool log_ended_ = false;  // guarded by mutex_
  std::string address_;
  std::string http_address_;
};

// Sum of the series of one name, over all labels.
double Total(const MetricValues& metrics, const std::string& name);

// Nothing is left when all sessions, calls, streams and cache memory are gone and every started
// request was answered under one code. Waits for it; says what is left, empty = nothing.
std::string WhatIsLeft(const ServerProcess& server);

}  // namespace attend
