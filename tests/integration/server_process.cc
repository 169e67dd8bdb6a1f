// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/server_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

extern char** environ;

namespace attend {
namespace {

constexpr std::chrono::milliseconds kLookEvery{2};

std::string NameOf(const std::string& flag) { return flag.substr(0, flag.find('=')); }

std::string WordAfter(const std::string& text, const std::string& key) {
  const size_t begin = text.find(key);
  if (begin == std::string::npos) return "";
  const size_t value = begin + key.size();
  return text.substr(value, text.find_first_of(" \n", value) - value);
}

}  // namespace

bool Eventually(const std::function<bool()>& condition, std::chrono::milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(kLookEvery);
  }
  return true;
}

std::string GoldenModelFlag(const std::string& variant, const std::string& name) {
  return "--model=" + (name.empty() ? variant : name) + "=" + ATTEND_SOURCE_DIR "/tests/golden/" +
         variant;
}

ServerProcess::ServerProcess(const std::vector<std::string>& flags) {
  std::vector<std::string> arguments = {ATTEND_BINARY_DIR "/bin/attend-server"};
  std::set<std::string> given;
  for (const std::string& flag : flags) given.insert(NameOf(flag));
  for (const char* flag :
       {"--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", "--message_bytes=4MiB",
        "--queue_bytes=16MiB", "--kv_bytes=16MiB", "--threads=2", "--replica_id=test-1"}) {
    if (!given.contains(NameOf(flag))) arguments.push_back(flag);
  }
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);

  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) std::abort();
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  if (posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ) != 0) pid_ = -1;
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  log_fd_ = ends[0];
  ended_ = pid_ < 0;
  reader_ = std::thread([this] { ReadLog(); });
}

ServerProcess::~ServerProcess() {
  if (!ended_) {
    Signal(SIGKILL);
    WaitForExit();
  }
  reader_.join();
  close(log_fd_);
  for (const char* report : {"ThreadSanitizer", "AddressSanitizer", "runtime error:"}) {
    if (log_.find(report) != std::string::npos) ADD_FAILURE() << log_;
  }
}

void ServerProcess::ReadLog() {
  char buffer[4096];
  for (ssize_t got = 0; (got = read(log_fd_, buffer, sizeof(buffer))) > 0;) {
    const std::lock_guard lock(mutex_);
    log_.append(buffer, static_cast<size_t>(got));
    grown_.notify_all();
  }
  const std::lock_guard lock(mutex_);
  log_ended_ = true;
  grown_.notify_all();
}

bool ServerProcess::WaitForLog(const std::string& text) {
  std::unique_lock lock(mutex_);
  const auto found = [&] { return log_.find(text) != std::string::npos; };
  grown_.wait_for(lock, kPatience, [&] { return found() || log_ended_; });
  return found();
}

bool ServerProcess::WaitForListening() {
  if (!WaitForLog(" http=127.0.0.1:")) return false;
  address_ = WordAfter(log(), " grpc=");
  http_address_ = WordAfter(log(), " http=");
  return !address_.empty() && !http_address_.empty();
}

bool ServerProcess::WaitForServing() {
  return WaitForListening() && WaitForLog(" serving version=");
}

void ServerProcess::Signal(int number) const {
  if (!ended_) kill(pid_, number);
}

int ServerProcess::WaitForExit(std::chrono::milliseconds limit) {
  if (ended_) return exit_code_;
  int status = 0;
  const bool in_time = Eventually([&] { return waitpid(pid_, &status, WNOHANG) == pid_; }, limit);
  if (!in_time) {
    kill(pid_, SIGKILL);
    waitpid(pid_, &status, 0);
  }
  ended_ = true;
  exit_code_ = !in_time ? -1 : WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return exit_code_;
}

std::string ServerProcess::log() const {
  const std::lock_guard lock(mutex_);
  return log_;
}

int64_t ServerProcess::resident_bytes() const {
  std::ifstream file("/proc/" + std::to_string(pid_) + "/statm");
  int64_t total = 0;
  int64_t resident = 0;
  file >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

std::string ServerProcess::Get(const std::string& path) const {
  const size_t colon = http_address_.rfind(':');
  sockaddr_in target{};
  target.sin_family = AF_INET;
  target.sin_port = htons(static_cast<uint16_t>(std::atoi(http_address_.c_str() + colon + 1)));
  inet_pton(AF_INET, http_address_.substr(0, colon).c_str(), &target.sin_addr);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::string answer;
  const std::string request = "GET " + path + " HTTP/1.1\r\nHost: test\r\n\r\n";
  if (connect(fd, reinterpret_cast<const sockaddr*>(&target), sizeof(target)) == 0 &&
      send(fd, request.data(), request.size(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(request.size())) {
    char buffer[16384];
    for (ssize_t got = 0; (got = recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
      answer.append(buffer, static_cast<size_t>(got));
    }
  }
  close(fd);
  const size_t body = answer.find("\r\n\r\n");
  if (body == std::string::npos) return "";
  const std::string code = answer.substr(answer.find(' ') + 1, 3);
  return code == "200" ? answer.substr(body + 4) : "HTTP " + code;
}

MetricValues ServerProcess::Metrics() const {
  MetricValues values;
  std::istringstream page(Get("/metrics"));
  for (std::string line; std::getline(page, line);) {
    const size_t space = line.rfind(' ');
    if (line.empty() || line[0] == '#' || space == std::string::npos) continue;
    values[line.substr(0, space)] = std::strtod(line.c_str() + space + 1, nullptr);
  }
  return values;
}

double Total(const MetricValues& metrics, const std::string& name) {
  double total = 0;
  for (auto it = metrics.lower_bound(name); it != metrics.end() && it->first.starts_with(name);
       ++it) {
    if (it->first.size() == name.size() || it->first[name.size()] == '{') total += it->second;
  }
  return total;
}

std::string WhatIsLeft(const ServerProcess& server) {
  std::string left;
  Eventually([&] {
    const MetricValues metrics = server.Metrics();
    left = metrics.empty() ? "no metrics page" : "";
    const auto zero = [&](const std::string& name, double value) {
      if (value != 0) left += name + " " + std::to_string(value) + "; ";
    };
    zero("in flight",
         Total(metrics, "attend_requests_started_total") - Total(metrics, "attend_requests_total"));
    for (const char* name :
         {"attend_queue_requests", "attend_queue_tokens", "attend_running_requests",
          "attend_streams", "attend_sessions", "attend_kv_utilization_ratio"}) {
      zero(name, Total(metrics, name));
    }
    return left.empty();
  });
  return left;
}

}  // namespace attend
