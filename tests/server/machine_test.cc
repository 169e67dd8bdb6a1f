// SPDX-License-Identifier: Apache-2.0
#include "server/machine.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <regex>
#include <vector>

namespace attend {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

// A folder that stands for "/".
class MachineTest : public testing::Test {
 protected:
  MachineTest() {
    std::string pattern = (std::filesystem::temp_directory_path() / "machine_testXXXXXX").string();
    root_ = mkdtemp(pattern.data());
    Write("proc/meminfo", "MemTotal:       16777216 kB\nMemFree:        1 kB\n");
  }
  ~MachineTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path full = std::filesystem::path(root_) / path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  void UseVersion2(const std::string& group) {
    Write("proc/self/cgroup", "0::" + group + "\n");
    Write("proc/self/mountinfo",
          "22 27 0:21 / /proc rw - proc proc rw\n"
          "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n");
  }
  // `mounted`: the group that the mount shows as its root.
  void UseVersion1(const std::string& group, const std::string& mounted) {
    Write("proc/self/cgroup", "9:name=systemd:/x\n4:memory:" + group + "\n3:cpu,cpuacct:" + group +
                                  "\n2:cpuset:/other\n");
    Write("proc/self/mountinfo",
          "32 31 0:29 " + mounted +
              " /sys/fs/cgroup/cpu rw shared:1 - cgroup cgroup rw,cpuacct,cpu\n" + "33 31 0:30 " +
              mounted + " /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
  }

  std::string root_;
};

TEST_F(MachineTest, WithoutACgroupTheMachineDecides) {
  const Machine machine = ReadMachine(root_, 6);
  EXPECT_EQ(machine.memory_bytes, 16 * kGiB);
  EXPECT_EQ(machine.cores, 6);
}

TEST_F(MachineTest, Version2LimitsOfTheGroupAreTaken) {
  UseVersion2("/pod/container");
  Write("sys/fs/cgroup/pod/container/memory.max", "4294967296\n");
  Write("sys/fs/cgroup/pod/container/cpu.max", "300000 100000\n");
  const Machine machine = ReadMachine(root_, 8);
  EXPECT_EQ(machine.memory_bytes, 4 * kGiB);
  EXPECT_EQ(machine.cores, 3);
}

TEST_F(MachineTest, ALowerLimitOfAGroupAboveWins) {
  UseVersion2("/pod/container");
  Write("sys/fs/cgroup/pod/container/memory.max", "8589934592\n");
  Write("sys/fs/cgroup/pod/memory.max", "2147483648\n");
  Write("sys/fs/cgroup/memory.max", "max\n");
  Write("sys/fs/cgroup/pod/container/cpu.max", "max 100000\n");
  Write("sys/fs/cgroup/pod/cpu.max", "200000 100000\n");
  const Machine machine = ReadMachine(root_, 8);
  EXPECT_EQ(machine.memory_bytes, 2 * kGiB);
  EXPECT_EQ(machine.cores, 2);
}

TEST_F(MachineTest, MaxIsNoLimit) {
  UseVersion2("/");
  Write("sys/fs/cgroup/memory.max", "max\n");
  Write("sys/fs/cgroup/cpu.max", "max 100000\n");
  const Machine machine = ReadMachine(root_, 8);
  EXPECT_EQ(machine.memory_bytes, 16 * kGiB);
  EXPECT_EQ(machine.cores, 8);
}

TEST_F(MachineTest, AQuotaIsRoundedDownButNeverToNothing) {
  UseVersion2("/");
  Write("sys/fs/cgroup/cpu.max", "290000 100000\n");
  EXPECT_EQ(ReadMachine(root_, 8).cores, 2);
  Write("sys/fs/cgroup/cpu.max", "50000 100000\n");
  EXPECT_EQ(ReadMachine(root_, 8).cores, 1);
}

TEST_F(MachineTest, AffinityBelowTheQuotaWins) {
  UseVersion2("/");
  Write("sys/fs/cgroup/cpu.max", "600000 100000\n");
  EXPECT_EQ(ReadMachine(root_, 2).cores, 2);
}

TEST_F(MachineTest, Version1LimitsOfTheGroupAreTaken) {
  UseVersion1("/pod/container", "/");
  Write("sys/fs/cgroup/memory/pod/container/memory.limit_in_bytes", "1073741824\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("sys/fs/cgroup/cpu/pod/container/cpu.cfs_quota_us", "400000\n");
  Write("sys/fs/cgroup/cpu/pod/container/cpu.cfs_period_us", "100000\n");
  Write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  Write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  const Machine machine = ReadMachine(root_, 8);
  EXPECT_EQ(machine.memory_bytes, kGiB);
  EXPECT_EQ(machine.cores, 4);
}

TEST_F(MachineTest, AVersion1GroupMountedAsTheRootIsFound) {
  UseVersion1("/docker/abc", "/docker/abc");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n");
  EXPECT_EQ(ReadMachine(root_, 8).memory_bytes, kGiB);
}

TEST_F(MachineTest, TheRealMachineGivesUsableNumbers) {
  const Machine machine = ReadMachine();
  EXPECT_GT(machine.memory_bytes, 64 << 20);
  EXPECT_GE(machine.cores, 1);
  EXPECT_TRUE(std::regex_match(machine.host_name, std::regex("[A-Za-z0-9._-]{1,128}")));
}

// A socket on loopback; a port of 0 takes a free one.
class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) { EXPECT_GE(fd, 0); }
  ~Socket() { close(fd_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  static sockaddr_in Loopback(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
  }
  int port() const {
    sockaddr_in address{};
    socklen_t size = sizeof(address);
    EXPECT_EQ(getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    return ntohs(address.sin_port);
  }
  int fd() const { return fd_; }

 private:
  const int fd_;
};

TEST(ConnectionsTest, OnlyAcceptedAndEstablishedOnesOnOurPortsCount) {
  const Socket listener(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address = Socket::Loopback(0);
  ASSERT_EQ(bind(listener.fd(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(listener.fd(), 4), 0);
  const int port = listener.port();
  EXPECT_EQ(CountConnections(std::array{port}), 0);  // it listens

  address = Socket::Loopback(port);
  const Socket first(socket(AF_INET, SOCK_STREAM, 0));
  ASSERT_EQ(connect(first.fd(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const Socket first_accepted(accept(listener.fd(), nullptr, nullptr));
  EXPECT_EQ(CountConnections(std::array{port}), 1);  // the client's end has another port
  EXPECT_EQ(CountConnections(std::array{first.port(), port}), 2);
  EXPECT_EQ(CountConnections(std::vector<int>{}), 0);

  const Socket second(socket(AF_INET, SOCK_STREAM, 0));
  ASSERT_EQ(connect(second.fd(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(CountConnections(std::array{port}), 1);  // nobody accepted it
  const Socket second_accepted(accept(listener.fd(), nullptr, nullptr));
  EXPECT_EQ(CountConnections(std::array{port}), 2);

  shutdown(first.fd(), SHUT_WR);
  char byte = 0;
  ASSERT_EQ(recv(first_accepted.fd(), &byte, 1, 0), 0);  // now it is half closed
  EXPECT_EQ(CountConnections(std::array{port}), 1);
}

TEST(ProcessUsageTest, TheNumbersAreThoseOfALivingProcess) {
  const ProcessUsage before = ReadProcessUsage();
  EXPECT_GT(before.resident_bytes, 1 << 20);
  EXPECT_GT(before.virtual_bytes, before.resident_bytes);
  EXPECT_GE(before.open_fds, 1);
  EXPECT_GT(before.max_fds, before.open_fds);
  const double now = static_cast<double>(time(nullptr));
  EXPECT_GT(before.start_seconds, now - 900);  // the longest a test may run
  EXPECT_LE(before.start_seconds, now + 2);
  const int descriptor = dup(0);
  EXPECT_EQ(ReadProcessUsage().open_fds, before.open_fds + 1);
  close(descriptor);
}

}  // namespace
}  // namespace attend
