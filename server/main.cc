// SPDX-License-Identifier: Apache-2.0
//
// attend-server: options, signals, exit codes. 0 = stopped as asked, 1 = the engine failed or
// stopped twice, 2 = wrong flag, checkpoint or port.
#include <google/protobuf/stubs/logging.h>
#include <malloc.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "server/health_client.h"
#include "server/server.h"

namespace {

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

// gRPC receives into small blocks, which would go back to the system after every request and cost a
// page fault for each page of the next one. Kept: what the largest messages took; blocks above the
// threshold are mapped, as by default.
void KeepFreedMemory(int64_t machine_bytes) {
  constexpr int64_t kMost = 512 << 20;
  mallopt(M_TRIM_THRESHOLD, static_cast<int>(std::min(kMost, machine_bytes / 16)));
  mallopt(M_TOP_PAD, 4 << 20);
  mallopt(M_MMAP_THRESHOLD, 4 << 20);
}

// Without destructors: connections must end with the process (see Server::Drain), and the signal
// thread may hold references.
[[noreturn]] void Leave(attend::Server& server, int code) {
  server.RemoveSocketFiles();
  std::fflush(stderr);
  _exit(code);
}

}  // namespace

int main(int argc, char** argv) {
  // Libraries must not add lines of their own to the log, some of which clients can provoke.
  setenv("GRPC_VERBOSITY", "NONE", 0);
  google::protobuf::SetLogHandler(nullptr);
  const attend::Machine machine = attend::ReadMachine();
  absl::StatusOr<attend::Options> options = attend::ParseOptions(
      argc, argv, [](const char* name) -> const char* { return std::getenv(name); }, machine);
  if (!options.ok()) {
    std::fprintf(stderr, "attend-server: %s\n", std::string(options.status().message()).c_str());
    return 2;
  }
  if (options->help) {
    std::fputs(attend::HelpText().c_str(), stdout);
    return 0;
  }
  if (options->version) {
    std::printf("attend-server %s\n", ATTEND_VERSION);
    return 0;
  }
  if (options->health.has_value()) return attend::AskHealth(*options->health);

  // One thread takes the signals; all others are created with them blocked.
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  KeepFreedMemory(machine.memory_bytes);
  attend::Logger logger(options->log_format);
  auto server = std::make_unique<attend::Server>(*options, machine, logger);
  std::thread([&, signals] {
    for (int count = 0;; ++count) {
      int signal = 0;
      sigwait(&signals, &signal);
      if (count > 0) _exit(1);  // the server may be gone
      if (server->loading()) {
        logger.Write(attend::LogLevel::kInfo, "stopped", {{"while", "loading"}});
        Leave(*server, 0);
      }
      server->RequestStop();
    }
  }).detach();

  if (absl::Status status = server->Start(); !status.ok()) {
    std::fprintf(stderr, "attend-server: %s\n", std::string(status.message()).c_str());
    Leave(*server, 2);
  }
  Leave(*server, server->Run().ok() ? 0 : 1);
}
