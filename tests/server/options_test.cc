// SPDX-License-Identifier: Apache-2.0
#include "server/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

namespace attend {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

constexpr int64_t kGiB = int64_t{1} << 30;
const Machine kMachine{.memory_bytes = 64 * kGiB, .cores = 6, .host_name = "host-1"};

absl::StatusOr<Options> Parse(std::vector<std::string> arguments,
                              const std::map<std::string, std::string>& variables = {},
                              const Machine& machine = kMachine) {
  arguments.insert(arguments.begin(), "attend-server");
  std::vector<const char*> argv;
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  const Environment environment = [&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
  return ParseOptions(static_cast<int>(argv.size()), argv.data(), environment, machine);
}

// The one-line message of an error.
std::string ErrorOf(const std::vector<std::string>& arguments,
                    const std::map<std::string, std::string>& variables = {}) {
  const auto options = Parse(arguments, variables);
  EXPECT_FALSE(options.ok());
  if (options.ok()) return "";
  EXPECT_EQ(options.status().code(), absl::StatusCode::kInvalidArgument);
  const std::string message(options.status().message());
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  return message;
}

TEST(OptionsTest, DefaultsAreThoseOfTheContract) {
  const auto options = Parse({});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_THAT(options->listen, ElementsAre("127.0.0.1:50051"));
  EXPECT_EQ(options->metrics_listen, "127.0.0.1:9464");
  EXPECT_FALSE(options->allow_insecure);
  EXPECT_TRUE(options->models.empty());
  EXPECT_EQ(options->device, "auto");
  EXPECT_EQ(options->isa, "auto");
  EXPECT_EQ(options->compute, "auto");
  EXPECT_EQ(options->kv_dtype, DType::kUnspecified);
  EXPECT_EQ(options->threads, 6);
  EXPECT_EQ(options->replica_id, "host-1");
  EXPECT_EQ(options->session_ttl_cap_seconds, 86400);
  EXPECT_EQ(options->drain_delay_seconds, 0);
  EXPECT_EQ(options->drain_limit_seconds, 25);
  EXPECT_EQ(options->connection_age_seconds, 600);
  EXPECT_EQ(options->stream_age_seconds, 600);
  EXPECT_EQ(options->chunk_us, 5000);
  EXPECT_TRUE(options->reflection);
  EXPECT_EQ(options->log_format, LogFormat::kText);
  EXPECT_FALSE(options->health.has_value());
  const Limits& limits = options->limits;
  EXPECT_EQ(limits.message_bytes, 83886080);
  EXPECT_EQ(limits.response_bytes, 83886080);
  EXPECT_EQ(limits.request_tokens, 65536);
  EXPECT_EQ(limits.batch_tokens, 2048);
  EXPECT_EQ(limits.queue_requests, 512);
  EXPECT_EQ(limits.queue_tokens, 262144);
  EXPECT_EQ(limits.queue_bytes, 8 * kGiB);
  EXPECT_EQ(limits.kv_bytes, 16 * kGiB);
  EXPECT_EQ(limits.sessions, 65536);
  EXPECT_EQ(limits.deadline_ms, 60000);
  EXPECT_EQ(limits.session_ttl_seconds, 900);
  EXPECT_EQ(limits.stream_items_in_flight, 16);
}

TEST(OptionsTest, WhatWasNotGivenFollowsTheDevice) {
  const DeviceChoice cuda{.device = "cuda",
                          .name = "GPU",
                          .why = "",
                          .free_bytes = 70 * kGiB,
                          .total_bytes = 80 * kGiB};
  auto options = Parse({});
  SetDeviceDefaults(cuda, *options);
  EXPECT_EQ(options->limits.batch_tokens, 8192);
  EXPECT_EQ(options->limits.kv_bytes, 20 * kGiB);
  EXPECT_EQ(options->limits.queue_bytes, 8 * kGiB);  // the machine's

  // Given values win, the CPU's defaults and zero too; so do variables.
  options = Parse({"--batch_tokens=2048", "--kv_bytes=0"});
  SetDeviceDefaults(cuda, *options);
  EXPECT_EQ(options->limits.batch_tokens, 2048);
  EXPECT_EQ(options->limits.kv_bytes, 0);
  options = Parse({}, {{"ATTEND_BATCH_TOKENS", "64"}, {"ATTEND_KV_BYTES", "1GiB"}});
  SetDeviceDefaults(cuda, *options);
  EXPECT_EQ(options->limits.batch_tokens, 64);
  EXPECT_EQ(options->limits.kv_bytes, kGiB);

  options = Parse({});
  SetDeviceDefaults({.device = "cpu", .name = "", .why = "no driver"}, *options);
  EXPECT_EQ(options->limits.batch_tokens, 2048);
  EXPECT_EQ(options->limits.kv_bytes, 16 * kGiB);
}

TEST(OptionsTest, HelpTellsTheDefaultsOfBothDevices) {
  const std::string help = HelpText();
  EXPECT_THAT(help, HasSubstr("default: 2048 (cuda: 8192); unit: tokens"));
  EXPECT_THAT(help,
              HasSubstr("1/4 of the machine's or container's memory (cuda: of the device's)"));
}

TEST(OptionsTest, ASmallMachineStillQueuesFourMessages) {
  const Machine small{.memory_bytes = kGiB, .cores = 1, .host_name = "h"};
  EXPECT_EQ(Parse({}, {}, small)->limits.queue_bytes, 4 * 83886080);
  EXPECT_EQ(Parse({"--message_bytes=1GiB"}, {}, small).ok(), false);
  EXPECT_EQ(Parse({"--message_bytes=512MiB"}, {}, small)->limits.queue_bytes, 2 * kGiB);
}

TEST(OptionsTest, EveryFlagIsStored) {
  const auto options = Parse({"--listen=127.0.0.1:0",
                              "--listen=[::1]:1",
                              "--listen=unix:/run/attend.sock",
                              "--metrics_listen=localhost:0",
                              "--model=bert=/models/bert",
                              "--model=a.b-c_1=x=y",
                              "--device=cpu",
                              "--threads=3",
                              "--isa=avx2",
                              "--compute=fp32",
                              "--weight_dtype=i8",
                              "--kv_dtype=f16",
                              "--message_bytes=1MiB",
                              "--response_bytes=2097152",
                              "--request_tokens=100",
                              "--batch_tokens=64",
                              "--queue_requests=7",
                              "--queue_tokens=200",
                              "--queue_bytes=3MiB",
                              "--kv_bytes=0",
                              "--sessions=5",
                              "--deadline_ms=1500",
                              "--session_ttl_seconds=2",
                              "--stream_items_in_flight=4",
                              "--session_ttl_cap_seconds=9",
                              "--chunk_us=700",
                              "--drain_delay=1",
                              "--drain_limit=2",
                              "--connection_age=3",
                              "--stream_age=4",
                              "--replica_id=r.1",
                              "--reflection=false",
                              "--log_format=json"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_THAT(options->listen, ElementsAre("127.0.0.1:0", "[::1]:1", "unix:/run/attend.sock"));
  EXPECT_EQ(options->metrics_listen, "localhost:0");
  ASSERT_EQ(options->models.size(), 2u);
  EXPECT_EQ(options->models[0].name, "bert");
  EXPECT_EQ(options->models[0].directory, "/models/bert");
  EXPECT_EQ(options->models[1].name, "a.b-c_1");
  EXPECT_EQ(options->models[1].directory, "x=y");
  EXPECT_EQ(options->device, "cpu");
  EXPECT_EQ(options->threads, 3);
  EXPECT_EQ(options->isa, "avx2");
  EXPECT_EQ(options->compute, "fp32");
  EXPECT_EQ(options->weight_dtype, "i8");
  EXPECT_EQ(options->kv_dtype, DType::kF16);
  const Limits& limits = options->limits;
  EXPECT_EQ(limits.message_bytes, 1 << 20);
  EXPECT_EQ(limits.response_bytes, 2 << 20);
  EXPECT_EQ(limits.request_tokens, 100);
  EXPECT_EQ(limits.batch_tokens, 64);
  EXPECT_EQ(limits.queue_requests, 7);
  EXPECT_EQ(limits.queue_tokens, 200);
  EXPECT_EQ(limits.queue_bytes, 3 << 20);
  EXPECT_EQ(limits.kv_bytes, 0);
  EXPECT_EQ(limits.sessions, 5);
  EXPECT_EQ(limits.deadline_ms, 1500);
  EXPECT_EQ(limits.session_ttl_seconds, 2);
  EXPECT_EQ(limits.stream_items_in_flight, 4);
  EXPECT_EQ(options->session_ttl_cap_seconds, 9);
  EXPECT_EQ(options->chunk_us, 700);
  EXPECT_EQ(options->drain_delay_seconds, 1);
  EXPECT_EQ(options->drain_limit_seconds, 2);
  EXPECT_EQ(options->connection_age_seconds, 3);
  EXPECT_EQ(options->stream_age_seconds, 4);
  EXPECT_EQ(options->replica_id, "r.1");
  EXPECT_FALSE(options->reflection);
  EXPECT_EQ(options->log_format, LogFormat::kJson);
}

TEST(OptionsTest, AValueMayFollowAfterASpace) {
  const auto options = Parse(
      {"--threads", "2", "--listen", "127.0.0.1:1", "--allow_insecure", "--listen", "0.0.0.0:2"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->threads, 2);
  EXPECT_TRUE(options->allow_insecure);
  EXPECT_THAT(options->listen, ElementsAre("127.0.0.1:1", "0.0.0.0:2"));
}

// Every integer flag at both edges of the range its own row names, and one step beyond.
TEST(OptionsTest, LimitsHoldAtTheirEdges) {
  int checked = 0;
  for (const FlagRow& row : FlagTable()) {
    long long lowest = 0;
    long long highest = 0;
    if (std::sscanf(row.allowed.c_str(), "an integer from %lld to %lld", &lowest, &highest) != 2) {
      continue;
    }
    ++checked;
    const auto with = [&](long long value) {
      return std::vector<std::string>{"--" + row.name + "=" + std::to_string(value)};
    };
    for (const long long inside : {lowest, highest}) {
      // drain_delay alone may not pass the default of drain_limit.
      if (row.name == "drain_delay" && inside == highest) continue;
      EXPECT_TRUE(Parse(with(inside)).ok()) << row.name << " " << inside;
    }
    for (const long long outside : {lowest - 1, highest + 1}) {
      EXPECT_THAT(ErrorOf(with(outside)),
                  AllOf(HasSubstr("--" + row.name + ": got \"" + std::to_string(outside) + "\""),
                        HasSubstr(std::to_string(lowest)), HasSubstr(std::to_string(highest))));
    }
    for (const char* wrong : {"", "x", "1x", "1.5", "0x10", "1e3", " 1", "99999999999999999999",
                              "18014398509481984GiB", "1 KiB", "KiB"}) {
      EXPECT_THAT(ErrorOf({"--" + row.name + "=" + wrong}), HasSubstr("--" + row.name)) << wrong;
    }
  }
  EXPECT_EQ(checked, 19);
}

TEST(OptionsTest, SizesTakeSuffixesAndCountsDoNot) {
  EXPECT_EQ(Parse({"--kv_bytes=3KiB"})->limits.kv_bytes, 3 << 10);
  EXPECT_EQ(Parse({"--kv_bytes=2GiB"})->limits.kv_bytes, 2 * kGiB);
  EXPECT_THAT(ErrorOf({"--kv_bytes=2GB"}), HasSubstr("KiB, MiB or GiB"));
  EXPECT_THAT(ErrorOf({"--sessions=2KiB"}), Not(HasSubstr("KiB, MiB")));
}

TEST(OptionsTest, GrpcsReceiveLimitOfTwoMessagesFitsAnInt) {
  EXPECT_TRUE(Parse({"--message_bytes=1073741823"}).ok());
  EXPECT_THAT(ErrorOf({"--message_bytes=1073741824"}), HasSubstr("1073741823"));
}

TEST(OptionsTest, WrongChoicesNameTheRightOnes) {
  EXPECT_EQ(ErrorOf({"--device=tpu"}), "--device: got \"tpu\", wanted auto|cpu|cuda");
  EXPECT_THAT(ErrorOf({"--isa=sse"}), HasSubstr("auto|avx2|avx512"));
  EXPECT_THAT(ErrorOf({"--compute=FP32"}), HasSubstr("auto|fp32|bf16|tf32"));
  EXPECT_THAT(ErrorOf({"--kv_dtype=i4"}), HasSubstr("auto|f32|bf16|f16|i8"));
  EXPECT_THAT(ErrorOf({"--weight_dtype=bf16"}), HasSubstr("auto|i8"));
  EXPECT_THAT(ErrorOf({"--log_format=xml"}), HasSubstr("text|json"));
  EXPECT_THAT(ErrorOf({"--reflection=maybe"}), HasSubstr("true|false"));
}

TEST(OptionsTest, UnknownFlagsAndStrayWordsAreNamed) {
  EXPECT_THAT(ErrorOf({"--thread=2"}), HasSubstr("\"--thread=2\""));
  EXPECT_THAT(ErrorOf({"--threads=2", "stray"}), HasSubstr("\"stray\""));
  EXPECT_THAT(ErrorOf({"-x"}), HasSubstr("\"-x\""));
  EXPECT_THAT(ErrorOf({"two\nlines"}), HasSubstr("two?lines"));
}

TEST(OptionsTest, AFlagWithoutAValueOrGivenTwiceIsAnError) {
  EXPECT_THAT(ErrorOf({"--threads"}), HasSubstr("--threads: got \"\""));
  EXPECT_THAT(ErrorOf({"--threads", "--device=cpu"}), HasSubstr("--threads: got \"\""));
  EXPECT_THAT(ErrorOf({"--threads=1", "--threads=2"}),
              AllOf(HasSubstr("--threads"), HasSubstr("1 and 2"), HasSubstr("one value")));
}

TEST(OptionsTest, WrongAddressesAreRefused) {
  for (const char* address :
       {"", "localhost", ":50051", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:x", "::1:50051",
        "[::1]", "[]:1", "[::1:1", "unix:", "127.0.0.1:1,127.0.0.1:2", "http://127.0.0.1:1"}) {
    EXPECT_THAT(ErrorOf({std::string("--listen=") + address}), HasSubstr("--listen")) << address;
    EXPECT_THAT(ErrorOf({std::string("--metrics_listen=") + address}),
                HasSubstr("--metrics_listen"))
        << address;
  }
  EXPECT_THAT(ErrorOf({"--metrics_listen=unix:/run/x"}), HasSubstr("--metrics_listen"));
  EXPECT_THAT(ErrorOf({"--listen=unix:" + std::string(108, 'x')}), HasSubstr("--listen"));
}

TEST(OptionsTest, BeyondLoopbackNeedsAllowInsecure) {
  for (const char* host : {"0.0.0.0", "10.0.0.1", "[::]", "example.org", "127.example.org"}) {
    for (const char* flag : {"--listen=", "--metrics_listen="}) {
      const std::string given = std::string(flag) + host + ":1";
      EXPECT_THAT(ErrorOf({given}), HasSubstr("--allow_insecure")) << given;
      EXPECT_TRUE(Parse({given, "--allow_insecure"}).ok()) << given;
      EXPECT_FALSE(Parse({given, "--allow_insecure=false"}).ok()) << given;
    }
  }
  EXPECT_TRUE(Parse({"--listen=127.8.9.10:1"}).ok());
}

TEST(OptionsTest, OneAddressCannotBeUsedTwice) {
  EXPECT_THAT(ErrorOf({"--listen=127.0.0.1:1", "--listen=127.0.0.1:1"}), HasSubstr("different"));
  EXPECT_THAT(ErrorOf({"--listen=127.0.0.1:1", "--metrics_listen=127.0.0.1:1"}),
              HasSubstr("--metrics_listen"));
  EXPECT_TRUE(Parse({"--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0"}).ok());
}

TEST(OptionsTest, ModelNamesAreCheckedAndDifferent) {
  for (const char* model :
       {"", "bert", "=dir", "bert=", "raw=dir", "none=dir", "a b=dir", "a/b=dir", "ä=dir"}) {
    EXPECT_THAT(ErrorOf({std::string("--model=") + model}), HasSubstr("--model: got")) << model;
  }
  EXPECT_TRUE(Parse({"--model=" + std::string(64, 'x') + "=dir"}).ok());
  EXPECT_FALSE(Parse({"--model=" + std::string(65, 'x') + "=dir"}).ok());
  EXPECT_THAT(ErrorOf({"--model=a=x", "--model=b=y", "--model=a=z"}),
              AllOf(HasSubstr("a=z"), HasSubstr("different names")));
}

TEST(OptionsTest, ReplicaIdsAreChecked) {
  EXPECT_TRUE(Parse({"--replica_id=" + std::string(128, 'x')}).ok());
  for (const std::string& id : {std::string(), std::string(129, 'x'), std::string("a b"),
                                std::string("a/b"), std::string("a\n")}) {
    EXPECT_THAT(ErrorOf({"--replica_id=" + id}), HasSubstr("--replica_id")) << id;
  }
}

TEST(OptionsTest, ADefaultGivesWayToAContradictingGivenLimit) {
  EXPECT_EQ(Parse({"--queue_tokens=100"})->limits.request_tokens, 100);
  EXPECT_EQ(Parse({"--request_tokens=1000000"})->limits.queue_tokens, 1000000);
  EXPECT_EQ(Parse({"--queue_bytes=1MiB"})->limits.message_bytes, 1 << 20);
  EXPECT_EQ(Parse({"--session_ttl_cap_seconds=5"})->limits.session_ttl_seconds, 5);
  EXPECT_EQ(Parse({"--session_ttl_seconds=100000"})->session_ttl_cap_seconds, 100000);
  EXPECT_EQ(Parse({"--queue_tokens=65536"})->limits.request_tokens, 65536);
}

TEST(OptionsTest, TwoGivenLimitsMayNotContradictEachOther) {
  EXPECT_EQ(ErrorOf({"--queue_tokens=10", "--request_tokens=20"}),
            "--queue_tokens: got \"10\", wanted at least --request_tokens=20");
  EXPECT_THAT(ErrorOf({"--queue_bytes=1MiB"}, {{"ATTEND_MESSAGE_BYTES", "2MiB"}}),
              HasSubstr("--message_bytes=2097152"));
  EXPECT_THAT(ErrorOf({"--session_ttl_cap_seconds=5", "--session_ttl_seconds=6"}),
              HasSubstr("--session_ttl_seconds=6"));
  EXPECT_THAT(ErrorOf({"--drain_delay=26"}), HasSubstr("--drain_delay=26"));
  EXPECT_TRUE(Parse({"--drain_delay=25"}).ok());
}

TEST(OptionsTest, TheEnvironmentIsReadAndFlagsWin) {
  const std::map<std::string, std::string> variables = {
      {"ATTEND_THREADS", "4"},
      {"ATTEND_LISTEN", "0.0.0.0:1;unix:/run/a"},
      {"ATTEND_ALLOW_INSECURE", "true"},
      {"ATTEND_MODEL", "a=x;b=y"},
      {"ATTEND_DEVICE", ""},
      {"ATTEND_VERSION", "1.2.3"},           // an image's label, no flag
      {"ATTEND_PORT", "tcp://10.0.0.1:1"}};  // what an orchestrator adds
  const auto options = Parse({"--threads=2"}, variables);
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->threads, 2);
  EXPECT_THAT(options->listen, ElementsAre("0.0.0.0:1", "unix:/run/a"));
  EXPECT_EQ(options->models.size(), 2u);
  EXPECT_EQ(options->device, "auto");
  EXPECT_FALSE(options->version);
  EXPECT_EQ(Parse({}, variables)->threads, 4);
  EXPECT_THAT(Parse({"--listen=127.0.0.1:7"}, variables)->listen, ElementsAre("127.0.0.1:7"));
}

TEST(OptionsTest, AWrongVariableIsNamed) {
  EXPECT_EQ(ErrorOf({}, {{"ATTEND_THREADS", "0"}}),
            "--threads (from ATTEND_THREADS): got \"0\", wanted an integer from 1 to 1024");
}

TEST(OptionsTest, HealthAsksTheFirstListenerUnlessAnAddressIsGiven) {
  EXPECT_EQ(Parse({"--health"})->health, "127.0.0.1:50051");
  EXPECT_EQ(Parse({"--health", "--threads=1"})->health, "127.0.0.1:50051");
  EXPECT_EQ(Parse({"--health=10.0.0.1:5"})->health, "10.0.0.1:5");
  EXPECT_EQ(Parse({"--health"}, {{"ATTEND_LISTEN", "0.0.0.0:7"}})->health, "127.0.0.1:7");
  EXPECT_EQ(Parse({"--health"}, {{"ATTEND_LISTEN", "[::]:7"}})->health, "[::1]:7");
  EXPECT_EQ(Parse({"--health=unix:/run/a"})->health, "unix:/run/a");
  EXPECT_THAT(ErrorOf({"--health=x"}), HasSubstr("--health: got \"x\""));
}

TEST(OptionsTest, HelpAndVersionWorkWhateverElseIsWrong) {
  EXPECT_TRUE(Parse({"--threads=0", "--help"})->help);
  EXPECT_TRUE(Parse({"-h"}, {{"ATTEND_THREADS", "x"}})->help);
  EXPECT_TRUE(Parse({"--version", "--listen=0.0.0.0:1"})->version);
}

TEST(OptionsTest, HelpNamesEveryFlagWithDefaultUnitLimitAndVariable) {
  const std::string help = HelpText();
  std::set<std::string> names;
  for (const FlagRow& row : FlagTable()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_THAT(help, HasSubstr("\n  --" + row.name));
    EXPECT_FALSE(row.default_value.empty() || row.allowed.empty() || row.help.empty()) << row.name;
    EXPECT_THAT(help, HasSubstr(row.help + "\n      default: " + row.default_value +
                                (row.unit.empty() ? "" : "; unit: " + row.unit) + "; allowed: " +
                                row.allowed + (row.environment.empty() ? "\n" : ";")));
    const bool command = row.name == "help" || row.name == "version" || row.name == "health";
    EXPECT_EQ(row.environment.empty(), command) << row.name;
    EXPECT_THAT(help, HasSubstr(command ? "\n" : "; " + row.environment + "\n"));
  }
  EXPECT_EQ(names.size(), 34u);
}

}  // namespace
}  // namespace attend
