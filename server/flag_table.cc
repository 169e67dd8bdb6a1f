// SPDX-License-Identifier: Apache-2.0
#include "server/flag_table.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <utility>

#include "absl/strings/str_join.h"
#include "server/address.h"

namespace attend {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;
constexpr int64_t kTiB = int64_t{1} << 40;
constexpr int64_t kYearSeconds = 365 * 86400;

bool ParseInteger(std::string_view text, int64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

bool ParseBytes(std::string_view text, int64_t& value) {
  int64_t unit = 1;
  for (const auto& [suffix, bytes] :
       {std::pair<std::string_view, int64_t>{"KiB", 1024}, {"MiB", kMiB}, {"GiB", kGiB}}) {
    if (!text.ends_with(suffix)) continue;
    text.remove_suffix(suffix.size());
    unit = bytes;
  }
  int64_t count = 0;
  return ParseInteger(text, count) && !__builtin_mul_overflow(count, unit, &value);
}

bool ParseBool(const std::string& text, bool& value) {
  value = text == "true";
  return value || text == "false";
}

bool IsName(std::string_view text, size_t limit) {
  return !text.empty() && text.size() <= limit && std::all_of(text.begin(), text.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
  });
}

std::string EnvironmentName(const std::string& flag) {
  std::string name = "ATTEND_" + flag;
  for (char& c : name) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

// The flags under construction; defaults are those of Options{} unless the machine decides.
class Table {
 public:
  template <typename Field>
  Flag& Integer(std::string name, Field field, std::string unit, int64_t lowest, int64_t highest,
                std::string help) {
    const std::string range =
        "an integer from " + std::to_string(lowest) + " to " + std::to_string(highest);
    const bool bytes = unit == "bytes";
    const auto set = [=](const std::string& value, Options& options) {
      int64_t& target = field(options);
      return (bytes ? ParseBytes(value, target) : ParseInteger(value, target)) &&
             target >= lowest && target <= highest;
    };
    return Add({.name = std::move(name),
                .default_value = std::to_string(field(defaults_)),
                .unit = std::move(unit),
                .allowed = bytes ? range + ", KiB, MiB or GiB may follow" : range,
                .help = std::move(help)},
               set);
  }

  Flag& Choice(std::string name, std::string default_value, std::vector<std::string> choices,
               std::function<void(const std::string&, Options&)> store, std::string help) {
    const std::string allowed = absl::StrJoin(choices, "|");
    const auto set = [choices, store](const std::string& value, Options& options) {
      if (std::find(choices.begin(), choices.end(), value) == choices.end()) return false;
      store(value, options);
      return true;
    };
    return Add({.name = std::move(name),
                .default_value = std::move(default_value),
                .allowed = allowed,
                .help = std::move(help)},
               set);
  }

  template <typename Field>
  Flag& Bool(std::string name, Field field, std::string help) {
    const auto set = [=](const std::string& value, Options& options) {
      return ParseBool(value, field(options));
    };
    Flag& flag = Add({.name = std::move(name),
                      .default_value = field(defaults_) ? "true" : "false",
                      .allowed = "true|false",
                      .help = std::move(help)},
                     set);
    flag.value_if_bare = "true";
    return flag;
  }

  Flag& Add(FlagRow row, Setter set) {
    row.environment = EnvironmentName(row.name);
    flags_.push_back({std::move(row), std::move(set)});
    return flags_.back();
  }

  std::vector<Flag> Take() { return std::move(flags_); }

 private:
  Options defaults_;
  std::vector<Flag> flags_;
};

// An accessor of one field, for reading its default and for storing.
#define FIELD(member) \
  [](Options & options) -> auto& { return options.member; }

void AddListeners(Table& table) {
  const std::string address = "HOST:PORT or [IPV6]:PORT with a port from 0 to 65535";
  table.Add({.name = "listen",
             .default_value = Options{}.listen.front(),
             .allowed = address + ", or unix:PATH",
             .help = "Where gRPC is served; port 0 takes a free one.",
             .repeatable = true},
            [](const std::string& value, Options& options) {
              options.listen.push_back(value);
              return IsAddress(value, /*unix_allowed=*/true);
            });
  table.Add({.name = "metrics_listen",
             .default_value = Options{}.metrics_listen,
             .allowed = address,
             .help = "Where /metrics, /healthz and /readyz are served over HTTP."},
            [](const std::string& value, Options& options) {
              options.metrics_listen = value;
              return IsAddress(value, /*unix_allowed=*/false);
            });
  table.Bool("allow_insecure", FIELD(allow_insecure),
             "Permits listeners beyond loopback without TLS.");
}

void AddModelAndEngine(Table& table) {
  table.Add({.name = "model",
             .default_value = "none",
             .allowed = "NAME=DIRECTORY with a NAME of 1 to 64 of A-Z a-z 0-9 . _ - other than raw "
                        "and none",
             .help = "A checkpoint in Hugging Face layout to load and the name it is called by.",
             .repeatable = true},
            [](const std::string& value, Options& options) {
              const size_t equals = value.find('=');
              if (equals == std::string::npos || equals + 1 == value.size()) return false;
              const std::string name = value.substr(0, equals);
              options.models.push_back({name, value.substr(equals + 1)});
              // Both are values of the metrics label `model`.
              return IsName(name, 64) && name != "raw" && name != "none";
            });
  const auto store = [](std::string Options::*member) {
    return [member](const std::string& value, Options& options) { options.*member = value; };
  };
  table.Choice(
      "device", Options{}.device, {"auto", "cpu", "cuda"}, store(&Options::device),
      "What computes; auto takes CUDA where this build and machine have it, and says in the "
      "log why not.");
  table.Integer("threads", FIELD(threads), "threads", 1, 1024, "Worker threads of the CPU engine.")
      .row.default_value = "cores allowed by affinity and cgroup quota";
  table.Choice("isa", Options{}.isa, {"auto", "avx2", "avx512"}, store(&Options::isa),
               "Highest instruction set the CPU engine uses.");
  table.Choice("compute", Options{}.compute, {"auto", "fp32", "bf16", "tf32"},
               store(&Options::compute),
               "Products of BF16 weights; auto goes by CPU model, on CUDA it is bf16. F32 weights "
               "compute in fp32, with tf32 (CUDA only) in TF32.");
  table.Choice(
      "weight_dtype", Options{}.weight_dtype, {"auto", "i8"}, store(&Options::weight_dtype),
      "How weights are kept; auto is as in the checkpoint. i8: rounded at load with a scale "
      "per output, and inputs with one per row (CPU only).");
  table.Choice(
      "kv_dtype", "auto", {"auto", "f32", "bf16", "f16", "i8"},
      [](const std::string& value, Options& options) {
        options.kv_dtype = value == "f32"    ? DType::kF32
                           : value == "bf16" ? DType::kBF16
                           : value == "f16"  ? DType::kF16
                           : value == "i8"   ? DType::kI8
                                             : DType::kUnspecified;
      },
      "How keys and values are stored; auto is bf16 for BF16 models, else f32. i8: with a scale "
      "per "
      "head and row (CPU only).");
}

void AddLimits(Table& table) {
  // gRPC's receive limit is twice this and an int.
  constexpr int64_t kMessageBytes = kGiB - 1;
  table.Integer("message_bytes", FIELD(limits.message_bytes), "bytes", 1024, kMessageBytes,
                "Largest request message.");
  // A protobuf message is below 2 GiB.
  table.Integer(
      "response_bytes", FIELD(limits.response_bytes), "bytes", 1024, 2 * kGiB - 1,
      "Largest response message; larger answers are refused before anything is computed.");
  table.Integer("request_tokens", FIELD(limits.request_tokens), "tokens", 1, 1 << 24,
                "Most rows of one request.");
  table
      .Integer("batch_tokens", FIELD(limits.batch_tokens), "tokens", 1, 1 << 20,
               "Most rows of one batch; larger work is cut into chunks.")
      .row.default_value += " (cuda: " + std::to_string(kCudaBatchTokens) + ")";
  table.Integer("queue_requests", FIELD(limits.queue_requests), "requests", 1, 1 << 20,
                "Most requests admitted and not yet answered.");
  table.Integer("queue_tokens", FIELD(limits.queue_tokens), "tokens", 1, int64_t{1} << 32,
                "Most rows admitted and not yet answered; not below request_tokens.");
  table
      .Integer("queue_bytes", FIELD(limits.queue_bytes), "bytes", 1024, 64 * kTiB,
               "Most message bytes admitted and not yet answered; not below message_bytes.")
      .row.default_value = "1/8 of memory, at least 4 x message_bytes";
  table
      .Integer("kv_bytes", FIELD(limits.kv_bytes), "bytes", 0, 64 * kTiB,
               "Memory for keys and values of sessions; on CUDA the device's.")
      .row.default_value = "1/4 of the machine's or container's memory (cuda: of the device's)";
  table.Integer("sessions", FIELD(limits.sessions), "sessions", 1, 1 << 24, "Most open sessions.");
  table.Integer("deadline_ms", FIELD(limits.deadline_ms), "ms", 1, 3600000,
                "Longest deadline; later ones, and none, are taken as this one.");
  table.Integer("session_ttl_seconds", FIELD(limits.session_ttl_seconds), "s", 1, kYearSeconds,
                "Idle time after which a session expires when its opener names none.");
  table.Integer("stream_items_in_flight", FIELD(limits.stream_items_in_flight), "items", 1, 1024,
                "Unanswered items of a stream above which the server stops reading it.");
  table.Integer("session_ttl_cap_seconds", FIELD(session_ttl_cap_seconds), "s", 1, kYearSeconds,
                "Longest idle time a session may ask for; not below session_ttl_seconds.");
}

void AddOperation(Table& table) {
  table.Integer("chunk_us", FIELD(chunk_us), "us", 100, 60000000,
                "Predicted time of a chunk of long work while sessions append: small keeps appends "
                "fast, large the long work.");
  table.Integer("drain_delay", FIELD(drain_delay_seconds), "s", 0, 3600,
                "Time from the signal to stop during which everything is still served.");
  table.Integer("drain_limit", FIELD(drain_limit_seconds), "s", 0, 86400,
                "Time from the signal to stop to the exit at the latest; not below drain_delay.");
  table.Integer("connection_age", FIELD(connection_age_seconds), "s", 1, kYearSeconds,
                "Age at which clients are asked to reconnect, +- 10 %.");
  table.Integer("stream_age", FIELD(stream_age_seconds), "s", 1, kYearSeconds,
                "Age at which streams end after answering what was accepted.");
  table.Add({.name = "replica_id",
             .default_value = "host name",
             .allowed = "1 to 128 of A-Z a-z 0-9 . _ -",
             .help = "Name of this server in session ids and in the metadata attend-replica."},
            [](const std::string& value, Options& options) {
              options.replica_id = value;
              return IsName(value, 128);
            });
  table.Bool("reflection", FIELD(reflection), "Serves gRPC server reflection.");
  table.Choice(
      "log_format", "text", {"text", "json"},
      [](const std::string& value, Options& options) {
        options.log_format = value == "json" ? LogFormat::kJson : LogFormat::kText;
      },
      "Form of the log lines on stderr.");
}

// Not settings: never read from the environment.
void AddCommands(Table& table) {
  Flag& health = table.Add(
      {.name = "health",
       .default_value = "the first --listen",
       .allowed = "HOST:PORT, [IPV6]:PORT or unix:PATH",
       .help = "Asks a running server for its health, exits 0 when it serves and 1 otherwise."},
      [](const std::string& value, Options& options) {
        options.health = value;
        return value == "true" || IsAddress(value, /*unix_allowed=*/true);
      });
  health.value_if_bare = "true";
  health.row.environment.clear();
  table.Bool("version", FIELD(version), "Prints the version and exits.").row.environment.clear();
  table.Bool("help", FIELD(help), "Prints this text and exits.").row.environment.clear();
}

#undef FIELD

}  // namespace

std::vector<Flag> Flags() {
  Table table;
  AddCommands(table);  // first: --help works whatever else is wrong
  AddListeners(table);
  AddModelAndEngine(table);
  AddLimits(table);
  AddOperation(table);
  return table.Take();
}

}  // namespace attend
