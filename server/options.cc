// SPDX-License-Identifier: Apache-2.0
#include "server/options.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <cctype>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_join.h"
#include "engine/util/status_macros.h"
#include "server/address.h"
#include "server/flag_table.h"

namespace attend {
namespace {

// What was given, on one line and not endless.
std::string Quoted(std::string_view got) {
  std::string text(got.substr(0, 256));
  for (char& c : text) c = std::iscntrl(static_cast<unsigned char>(c)) ? '?' : c;
  return "\"" + text + "\"";
}

absl::Status Refuse(std::string_view flag, std::string_view got, std::string_view wanted) {
  return absl::InvalidArgumentError("--" + std::string(flag) + ": got " + Quoted(got) +
                                    ", wanted " + std::string(wanted));
}

// The values of one flag: from the command line, else from the environment, else none.
struct Given {
  std::vector<std::string> values;
  std::string source;  // of messages: "threads", or "threads (from ATTEND_THREADS)"
};

Given FromEnvironment(const Flag& flag, const Environment& environment) {
  Given given{.values = {}, .source = flag.row.name + " (from " + flag.row.environment + ")"};
  if (flag.row.environment.empty()) return given;
  const char* variable = environment(flag.row.environment.c_str());
  if (variable == nullptr || *variable == '\0') return given;
  std::string_view rest = variable;
  while (flag.row.repeatable && rest.find(';') != std::string_view::npos) {
    given.values.emplace_back(rest.substr(0, rest.find(';')));
    rest.remove_prefix(rest.find(';') + 1);
  }
  given.values.emplace_back(rest);
  return given;
}

absl::Status Apply(const Flag& flag, const Given& given, Options& options) {
  if (given.values.size() > 1 && !flag.row.repeatable) {
    return Refuse(given.source, absl::StrJoin(given.values, " and "), "one value");
  }
  for (const std::string& value : given.values) {
    if (!flag.set(value, options)) return Refuse(given.source, value, flag.row.allowed);
  }
  return absl::OkStatus();
}

absl::Status CheckListeners(const Options& options) {
  const std::string loopback =
      "a loopback address (127.x.x.x, [::1], localhost, unix:PATH), or --allow_insecure with it";
  std::set<std::string> addresses;
  for (const std::string& address : options.listen) {
    if (!options.allow_insecure && !IsLoopback(address)) {
      return Refuse("listen", address, loopback);
    }
    if (!addresses.insert(address).second && !address.ends_with(":0")) {
      return Refuse("listen", address, "different addresses");
    }
  }
  if (!options.allow_insecure && !IsLoopback(options.metrics_listen)) {
    return Refuse("metrics_listen", options.metrics_listen, loopback);
  }
  if (addresses.contains(options.metrics_listen) && !options.metrics_listen.ends_with(":0")) {
    return Refuse("metrics_listen", options.metrics_listen, "another address than --listen");
  }
  return absl::OkStatus();
}

absl::Status CheckModels(const Options& options) {
  std::set<std::string> names;
  for (const ModelFlag& model : options.models) {
    if (!names.insert(model.name).second) {
      return Refuse("model", model.name + "=" + model.directory, "different names");
    }
  }
  return absl::OkStatus();
}

// Pairs of which the first must not be below the second: else the largest request or session
// allowed could never be had. A default gives way to a given value; two given ones are refused.
absl::Status ReconcileLimits(Options& options) {
  const std::set<std::string>& given = options.given;
  Limits& limits = options.limits;
  const struct {
    const char* upper_flag;
    int64_t& upper;
    const char* lower_flag;
    int64_t& lower;
  } pairs[] = {
      {"queue_tokens", limits.queue_tokens, "request_tokens", limits.request_tokens},
      {"queue_bytes", limits.queue_bytes, "message_bytes", limits.message_bytes},
      {"session_ttl_cap_seconds", options.session_ttl_cap_seconds, "session_ttl_seconds",
       limits.session_ttl_seconds},
  };
  for (const auto& pair : pairs) {
    if (pair.upper >= pair.lower) continue;
    if (given.contains(pair.upper_flag) && given.contains(pair.lower_flag)) {
      return Refuse(
          pair.upper_flag, std::to_string(pair.upper),
          "at least --" + std::string(pair.lower_flag) + "=" + std::to_string(pair.lower));
    }
    if (given.contains(pair.upper_flag)) {
      pair.lower = pair.upper;
    } else {
      pair.upper = pair.lower;
    }
  }
  // No default gives way here: a limit equal to the delay would leave no time to drain.
  if (options.drain_limit_seconds < options.drain_delay_seconds) {
    return Refuse("drain_limit", std::to_string(options.drain_limit_seconds),
                  "at least --drain_delay=" + std::to_string(options.drain_delay_seconds));
  }
  return absl::OkStatus();
}

// Reads the command line; one entry per flag.
absl::StatusOr<std::vector<Given>> FromCommandLine(const std::vector<Flag>& flags, int argc,
                                                   const char* const* argv) {
  CLI::App app;
  app.set_help_flag();  // --help is a row of the table
  app.allow_extras();
  std::vector<CLI::Option*> parsed;
  for (const Flag& flag : flags) {
    const std::string name = flag.row.name == "help" ? "-h,--help" : "--" + flag.row.name;
    // A missing value arrives as an empty one and is refused by the setter, like any other wrong
    // value.
    parsed.push_back(app.add_option(name, CLI::callback_t())
                         ->expected(0, 1)
                         ->allow_extra_args(false)
                         ->default_str(flag.value_if_bare)
                         ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll));
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Error& error) {
    return absl::InvalidArgumentError(Quoted(error.what()) + ", see --help");
  }
  if (const std::vector<std::string> rest = app.remaining(); !rest.empty()) {
    return absl::InvalidArgumentError(Quoted(rest.front()) +
                                      " is no flag of attend-server, see --help");
  }
  std::vector<Given> given;
  for (size_t i = 0; i < flags.size(); ++i) {
    given.push_back({parsed[i]->results(), flags[i].row.name});
  }
  return given;
}

}  // namespace

absl::StatusOr<Options> ParseOptions(int argc, const char* const* argv,
                                     const Environment& environment, const Machine& machine) {
  const std::vector<Flag> flags = Flags();
  ASSIGN_OR_RETURN(std::vector<Given> given, FromCommandLine(flags, argc, argv));
  Options options;
  options.listen.clear();
  options.threads = std::clamp(machine.cores, 1, 1024);
  options.limits.kv_bytes = machine.memory_bytes / 4;
  options.replica_id = machine.host_name;
  for (size_t i = 0; i < flags.size(); ++i) {
    if (given[i].values.empty()) given[i] = FromEnvironment(flags[i], environment);
    if (!given[i].values.empty()) options.given.insert(flags[i].row.name);
    RETURN_IF_ERROR(Apply(flags[i], given[i], options));
    if (options.help || options.version) return options;
  }
  if (options.listen.empty()) options.listen = Options{}.listen;
  if (options.health.has_value()) {  // asks another process: the settings are not used
    if (*options.health == "true") options.health = options.listen.front();
    options.health = Reachable(*options.health);
    return options;
  }
  if (options.limits.queue_bytes == 0) {
    options.limits.queue_bytes =
        std::max(machine.memory_bytes / 8, 4 * options.limits.message_bytes);
  }
  RETURN_IF_ERROR(CheckListeners(options));
  RETURN_IF_ERROR(CheckModels(options));
  RETURN_IF_ERROR(ReconcileLimits(options));
  return options;
}

void SetDeviceDefaults(const DeviceChoice& device, Options& options) {
  if (device.device != "cuda") return;
  Limits& limits = options.limits;
  if (!options.given.contains("batch_tokens")) limits.batch_tokens = kCudaBatchTokens;
  if (!options.given.contains("kv_bytes")) limits.kv_bytes = device.total_bytes / 4;
}

std::vector<FlagRow> FlagTable() {
  std::vector<FlagRow> rows;
  for (Flag& flag : Flags()) rows.push_back(std::move(flag.row));
  return rows;
}

std::string HelpText() {
  std::string text =
      "attend-server: attention over gRPC.\n\n"
      "Every flag is --name=value; the environment variable shown with it does the same, the flag\n"
      "wins. To give several values, repeat the flag or put ; between them in the variable.\n";
  for (const FlagRow& row : FlagTable()) {
    text += "\n  --" + row.name + (row.repeatable ? " (repeatable)" : "") + "\n      " + row.help;
    text +=
        "\n      default: " + row.default_value + (row.unit.empty() ? "" : "; unit: " + row.unit);
    text += "; allowed: " + row.allowed;
    if (!row.environment.empty()) text += "; " + row.environment;
    text += "\n";
  }
  return text;
}

}  // namespace attend
