// SPDX-License-Identifier: Apache-2.0
//
// Every setting of attend-server: name, default, unit, limits and help, once. ParseOptions reads
// flags and environment and checks all that can be checked without opening a port or a file;
// main.cc calls it and hands the parts on. It knows no model or socket, and of devices only their
// size.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/attention_engine.h"
#include "engine/util/dtype.h"
#include "engine/util/log.h"
#include "server/machine.h"

namespace attend {

// Default of --batch_tokens on CUDA: a GPU takes longer to start a batch and less for its rows.
inline constexpr int64_t kCudaBatchTokens = 8192;

// attend.v1.Limits, field by field; each is a flag of its name.
struct Limits {
  int64_t message_bytes = 83886080;
  int64_t response_bytes = 83886080;
  int64_t request_tokens = 65536;
  int64_t batch_tokens = 2048;  // SetDeviceDefaults: 8192 on CUDA
  int64_t queue_requests = 512;
  int64_t queue_tokens = 262144;
  int64_t queue_bytes = 0;  // set by ParseOptions: 1/8 of memory, at least 4 messages
  int64_t kv_bytes = 0;  // set by ParseOptions: 1/4 of memory; SetDeviceDefaults: of the device's
  int64_t sessions = 65536;
  int64_t deadline_ms = 60000;
  int64_t session_ttl_seconds = 900;
  int64_t stream_items_in_flight = 16;
};

struct ModelFlag {
  std::string name;
  std::string directory;
};

struct Options {
  std::vector<std::string> listen = {"127.0.0.1:50051"};  // HOST:PORT, [IPV6]:PORT or unix:PATH
  std::string metrics_listen = "127.0.0.1:9464";          // HOST:PORT or [IPV6]:PORT
  bool allow_insecure = false;
  std::vector<ModelFlag> models = {};
  std::string device = "auto";           // EngineOptions.device
  std::string isa = "auto";              // EngineOptions.isa
  std::string compute = "auto";          // EngineOptions.compute
  std::string weight_dtype = "auto";     // EngineOptions.weight_dtype
  DType kv_dtype = DType::kUnspecified;  // RuntimeOptions.kv_dtype; unspecified = auto
  int64_t threads = 1;                   // set by ParseOptions: Machine.cores
  Limits limits = {};
  int64_t session_ttl_cap_seconds = 86400;
  int64_t chunk_us = 5000;
  int64_t drain_delay_seconds = 0;
  int64_t drain_limit_seconds = 25;
  int64_t connection_age_seconds = 600;
  int64_t stream_age_seconds = 600;
  std::string replica_id = {};  // set by ParseOptions: Machine.host_name
  bool reflection = true;
  LogFormat log_format = LogFormat::kText;
  std::set<std::string> given = {};  // names of the flags that were given, environment included

  // What to do instead of serving. `health` is the address to ask.
  std::optional<std::string> health = {};
  bool version = false;
  bool help = false;
};

// Value of an environment variable, null when it is not set: std::getenv, or a test's.
using Environment = std::function<const char*(const char* name)>;

// Flags win over ATTEND_<FLAG>; an empty variable counts as not set; other ATTEND_ variables are
// ignored, as orchestrators add theirs. With --help or --version nothing else is checked. Where two
// limits contradict each other, a default gives way to a given value; two given ones are an error.
// Errors are INVALID_ARGUMENT with one line naming flag, value and what is allowed.
absl::StatusOr<Options> ParseOptions(int argc, const char* const* argv,
                                     const Environment& environment, const Machine& machine);

// Gives what was not given the default of the device that computes; nothing changes for the CPU.
void SetDeviceDefaults(const DeviceChoice& device, Options& options);

// One flag as the README and --help show it.
struct FlagRow {
  std::string name = {};           // "message_bytes"
  std::string default_value = {};  // "83886080", or in words where the machine decides
  std::string unit = {};           // "bytes"; empty = none
  std::string allowed = {};        // "an integer from 1 to 1024"
  std::string help = {};
  bool repeatable = false;
  std::string environment = {};  // "ATTEND_MESSAGE_BYTES"; empty: --help, --version, --health
};
std::vector<FlagRow> FlagTable();

// The text of --help.
std::string HelpText();

}  // namespace attend
