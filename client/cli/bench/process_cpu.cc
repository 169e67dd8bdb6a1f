// SPDX-License-Identifier: Apache-2.0
#include "client/cli/bench/process_cpu.h"

#include <time.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>
#include <vector>

namespace attend::cli {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> Words(const std::string& line) {
  std::istringstream stream(line);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

bool IsLoopback(std::string_view host) {
  return host.starts_with("127.") || host == "localhost" || host == "[::1]";
}

// The inode of the socket that listens on `address`; empty without.
std::string ListenerInode(const std::string& address) {
  constexpr std::string_view kUnix = "unix:";
  if (address.starts_with(kUnix)) {
    const std::string path = address.substr(kUnix.size());
    std::ifstream table("/proc/net/unix");
    for (std::string line; std::getline(table, line);) {
      // Num RefCount Protocol Flags Type St Inode Path; flag 0x10000 = listening
      const std::vector<std::string> words = Words(line);
      if (words.size() == 8 && words[7] == path && words[3] == "00010000") return words[6];
    }
    return "";
  }
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || !IsLoopback(std::string_view(address).substr(0, colon))) {
    return "";
  }
  char port[8];
  std::snprintf(port, sizeof(port), ":%04X", std::atoi(address.c_str() + colon + 1) & 0xffff);
  for (const char* name : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream table(name);
    for (std::string line; std::getline(table, line);) {
      // sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode; 0A = listening
      const std::vector<std::string> words = Words(line);
      if (words.size() >= 10 && words[3] == "0A" && words[1].ends_with(port)) return words[9];
    }
  }
  return "";
}

// 0 when no process that may be looked at has it open.
int ProcessWithSocket(const std::string& inode) {
  const std::string wanted = "socket:[" + inode + "]";
  std::error_code error;
  for (auto entry = fs::directory_iterator("/proc", error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    int pid = 0;
    if (std::from_chars(name.data(), name.data() + name.size(), pid).ec != std::errc()) continue;
    std::error_code no_access;  // of another user
    auto file = fs::directory_iterator(entry->path() / "fd", no_access);
    for (; !no_access && file != fs::directory_iterator(); file.increment(no_access)) {
      std::error_code closed;
      if (fs::read_symlink(file->path(), closed) == wanted) return pid;
    }
  }
  return 0;
}

}  // namespace

double CpuSeconds() {
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

ServerCpu::ServerCpu(const std::string& address) {
  const std::string inode = ListenerInode(address);
  if (!inode.empty()) pid_ = ProcessWithSocket(inode);
}

std::optional<double> ServerCpu::seconds() const {
  if (pid_ == 0) return std::nullopt;
  std::ifstream file("/proc/" + std::to_string(pid_) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');  // a name may hold anything
  if (name_end == std::string::npos) return std::nullopt;
  // After the name: state is field 3, utime 14, stime 15.
  const std::vector<std::string> words = Words(line.substr(name_end + 1));
  if (words.size() < 13) return std::nullopt;
  const double ticks = std::atof(words[11].c_str()) + std::atof(words[12].c_str());
  return ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

}  // namespace attend::cli
