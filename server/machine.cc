// SPDX-License-Identifier: Apache-2.0
#include "server/machine.h"

#include <dirent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string_view>
#include <thread>
#include <vector>

namespace attend {
namespace {

// Empty when the file can't be read.
std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// File descriptors of this process, without the one that reads them.
std::vector<int> OpenDescriptors() {
  std::vector<int> descriptors;
  DIR* const directory = opendir("/proc/self/fd");
  if (directory == nullptr) return descriptors;
  while (const dirent* entry = readdir(directory)) {
    const int fd = std::atoi(entry->d_name);
    if (entry->d_name[0] != '.' && fd != dirfd(directory)) descriptors.push_back(fd);
  }
  closedir(directory);
  return descriptors;
}

std::optional<int64_t> ReadInteger(const std::string& path) {
  std::istringstream text(ReadText(path));
  int64_t value = 0;
  if (!(text >> value)) return std::nullopt;
  return value;
}

std::vector<std::string> Words(const std::string& line, char separator) {
  std::vector<std::string> words;
  std::istringstream text(line);
  for (std::string word; std::getline(text, word, separator);) words.push_back(word);
  return words;
}

bool Contains(const std::vector<std::string>& words, std::string_view word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// One cgroup hierarchy: where it is mounted and which of its groups the process is in.
struct Hierarchy {
  std::string mount_point;
  std::string group;  // below the mount point: "" or "/a/b"
};

// The path of the process in the hierarchy of `controller` ("" = version 2), from
// /proc/self/cgroup.
std::optional<std::string> GroupPath(const std::string& cgroup_text,
                                     const std::string& controller) {
  std::istringstream lines(cgroup_text);
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    if (first == std::string::npos) continue;
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controller.empty() ? controllers.empty() : Contains(Words(controllers, ','), controller)) {
      return line.substr(second + 1);
    }
  }
  return std::nullopt;
}

// In /proc/self/mountinfo a line is "id parent device root mount_point options ... - type source
// options".
std::optional<Hierarchy> FindHierarchy(const std::string& root, const std::string& controller) {
  const auto path = GroupPath(ReadText(root + "/proc/self/cgroup"), controller);
  if (!path.has_value()) return std::nullopt;
  std::istringstream lines(ReadText(root + "/proc/self/mountinfo"));
  for (std::string line; std::getline(lines, line);) {
    const std::vector<std::string> words = Words(line, ' ');
    const auto dash = std::find(words.begin(), words.end(), "-");
    if (words.size() < 5 || words.end() - dash < 4) continue;
    const bool fits = controller.empty()
                          ? dash[1] == "cgroup2"
                          : dash[1] == "cgroup" && Contains(Words(dash[3], ','), controller);
    if (!fits) continue;
    // A container without its own cgroup namespace sees its group's path from the machine, mounted
    // as root.
    const std::string& mounted = words[3];
    std::string group = *path == "/" ? "" : *path;
    if (mounted != "/") {
      const bool below = group.starts_with(mounted) &&
                         (group.size() == mounted.size() || group[mounted.size()] == '/');
      group = below ? group.substr(mounted.size()) : "";
    }
    return Hierarchy{root + words[4], group};
  }
  return std::nullopt;
}

// Calls `visit` with the directory of the group and of every group above it.
template <typename Visit>
void VisitGroups(const Hierarchy& hierarchy, Visit visit) {
  std::string group = hierarchy.group;
  while (true) {
    visit(hierarchy.mount_point + group);
    if (group.empty()) return;
    group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
  }
}

void LimitCores(double quota_us, double period_us, CgroupLimits& limits) {
  if (quota_us > 0 && period_us > 0) limits.cores = std::min(limits.cores, quota_us / period_us);
}

int AffinityCores() {
  // The mask of a machine with more than CPU_SETSIZE cores needs a larger set.
  for (int cores = CPU_SETSIZE; cores <= 1 << 20; cores *= 2) {
    cpu_set_t* set = CPU_ALLOC(cores);
    const size_t bytes = CPU_ALLOC_SIZE(cores);
    const int allowed = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (allowed > 0) return allowed;
  }
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int64_t PhysicalMemory(const std::string& root) {
  std::istringstream lines(ReadText(root + "/proc/meminfo"));
  std::string name;
  int64_t kib = 0;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    if (words >> name >> kib && name == "MemTotal:") return kib * 1024;
  }
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

std::string HostName() {
  char buffer[256] = {};
  if (gethostname(buffer, sizeof(buffer) - 1) != 0) return "attend";
  std::string name = std::string(buffer).substr(0, 128);
  for (char& c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '_') c = '-';
  }
  return name.empty() ? "attend" : name;
}

}  // namespace

CgroupLimits ReadCgroupLimits(const std::string& root) {
  CgroupLimits limits;
  const auto limit_memory = [&](const std::optional<int64_t>& bytes) {
    if (bytes.has_value() && *bytes > 0)
      limits.memory_bytes = std::min(limits.memory_bytes, *bytes);
  };
  if (const auto unified = FindHierarchy(root, "")) {
    VisitGroups(*unified, [&](const std::string& directory) {
      limit_memory(ReadInteger(directory + "/memory.max"));  // "max" is no integer: no limit
      std::istringstream quota(ReadText(directory + "/cpu.max"));
      double quota_us = 0;
      double period_us = 0;
      if (quota >> quota_us >> period_us) LimitCores(quota_us, period_us, limits);
    });
  }
  if (const auto memory = FindHierarchy(root, "memory")) {
    VisitGroups(*memory, [&](const std::string& directory) {
      limit_memory(ReadInteger(directory + "/memory.limit_in_bytes"));
    });
  }
  if (const auto cpu = FindHierarchy(root, "cpu")) {
    VisitGroups(*cpu, [&](const std::string& directory) {
      const auto quota_us = ReadInteger(directory + "/cpu.cfs_quota_us");  // -1: no limit
      const auto period_us = ReadInteger(directory + "/cpu.cfs_period_us");
      LimitCores(static_cast<double>(quota_us.value_or(0)),
                 static_cast<double>(period_us.value_or(0)), limits);
    });
  }
  return limits;
}

Machine ReadMachine() { return ReadMachine("", AffinityCores()); }

Machine ReadMachine(const std::string& root, int affinity_cores) {
  const CgroupLimits limits = ReadCgroupLimits(root);
  // Rounded down: a worker more than the quota pays for is stopped by the scheduler in mid-batch,
  // and every other worker waits for it.
  const double cores = std::min<double>(affinity_cores, std::floor(limits.cores));
  return {.memory_bytes = std::min(PhysicalMemory(root), limits.memory_bytes),
          .cores = std::max(1, static_cast<int>(cores)),
          .host_name = HostName()};
}

ProcessUsage ReadProcessUsage() {
  ProcessUsage usage;
  // The name in parentheses may hold spaces; numbered fields follow it, the first is number 3 (man
  // proc).
  const std::string stat = ReadText("/proc/self/stat");
  const size_t name_end = stat.rfind(')');
  if (name_end != std::string::npos) {
    std::istringstream rest(stat.substr(name_end + 2));
    const std::vector<std::string> fields(std::istream_iterator<std::string>(rest), {});
    const auto field = [&](size_t number) {
      return number - 3 < fields.size() ? std::strtod(fields[number - 3].c_str(), nullptr) : 0.0;
    };
    const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
    usage.cpu_seconds = (field(14) + field(15)) / ticks;
    usage.virtual_bytes = static_cast<int64_t>(field(23));
    usage.resident_bytes = static_cast<int64_t>(field(24)) * sysconf(_SC_PAGESIZE);
    std::istringstream lines(ReadText("/proc/stat"));
    for (std::string line; std::getline(lines, line);) {
      if (!line.starts_with("btime ")) continue;
      usage.start_seconds = std::strtod(line.c_str() + 6, nullptr) + field(22) / ticks;
    }
  }
  usage.open_fds = static_cast<int64_t>(OpenDescriptors().size());
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) usage.max_fds = static_cast<int64_t>(limit.rlim_cur);
  return usage;
}

int64_t CountConnections(std::span<const int> ports) {
  int64_t count = 0;
  for (const int fd : OpenDescriptors()) {
    // Calls on what is no TCP socket, or is closed by now, fail.
    tcp_info info{};
    socklen_t info_size = sizeof(info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &info_size) != 0) continue;
    sockaddr_storage local{};
    socklen_t local_size = sizeof(local);
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&local), &local_size) != 0) continue;
    const int port =
        ntohs(local.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(local).sin6_port
                                          : reinterpret_cast<const sockaddr_in&>(local).sin_port);
    count += info.tcpi_state == TCP_ESTABLISHED &&
             std::find(ports.begin(), ports.end(), port) != ports.end();
  }
  return count;
}

}  // namespace attend
