// SPDX-License-Identifier: Apache-2.0
//
// `attend bench` with two servers, attend-server and attend-echo as real processes: what is sent to
// which, the scenarios that compare (silence, fairness, --check), and what the echo server returns.
// No test looks at speed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "client/attend_client.h"
#include "tests/integration/server_process.h"
#include "tests/support/shell.h"

namespace attend {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr const char* kEcho = ATTEND_BINARY_DIR "/bin/attend-echo ";

// attend-echo as a child process.
class EchoProcess {
 public:
  explicit EchoProcess(const std::string& listen = "127.0.0.1:0")
      : pipe_(popen((std::string("exec ") + kEcho + "--listen=" + listen).c_str(), "r")) {
    char address[256] = {};
    EXPECT_EQ(fscanf(pipe_, "listening %255s pid %d", address, &pid_), 2);
    address_ = address;
  }
  ~EchoProcess() {
    if (pid_ > 0) kill(pid_, SIGTERM);
    EXPECT_EQ(pclose(pipe_), 0);
  }
  EchoProcess(const EchoProcess&) = delete;
  EchoProcess& operator=(const EchoProcess&) = delete;

  const std::string& address() const { return address_; }

 private:
  FILE* pipe_;
  int pid_ = 0;
  std::string address_;
};

v1::AttendRequest Request(int64_t rows, const std::string& layer) {
  v1::AttendRequest request;
  request.set_model("a model");
  request.set_layer(layer);
  request.add_sequences()->set_length(rows);
  v1::Tensor* tensor = request.mutable_hidden_states();
  tensor->set_dtype(v1::DTYPE_F32);
  tensor->add_shape(rows);
  tensor->add_shape(2);
  tensor->set_data(std::string(static_cast<size_t>(rows) * 8, 'x'));
  return request;
}

void ExpectEchoes(const std::string& address) {
  const auto client = client::Client::Connect(address, {.deadline = kPatience});
  ASSERT_TRUE(client.ok()) << client.error().ToString();
  EXPECT_EQ(client->server().ByteSizeLong(), 0u);
  for (const int64_t rows : {0, 1, 1'000'000}) {
    for (const char* layer : {"0", "decoder.10.cross"}) {
      const v1::AttendRequest request = Request(rows, layer);
      const auto response = client->Attend(request);
      ASSERT_TRUE(response.ok()) << response.error().ToString();
      EXPECT_EQ(response->output().SerializeAsString(),
                request.hidden_states().SerializeAsString());
      EXPECT_FALSE(response->has_error());
    }
  }
  client::Stream stream = client->OpenStream();
  for (const int64_t rows : {3, 5}) ASSERT_TRUE(stream.Send(Request(rows, "1")).ok());
  for (const int64_t rows : {3, 5}) {
    const auto response = stream.Receive();
    ASSERT_TRUE(response.ok()) << response.error().ToString();
    EXPECT_EQ(response->output().shape(0), rows);
  }
}

TEST(EchoServerTest, ReturnsAnyRequestAsAnAnswer) { ExpectEchoes(EchoProcess().address()); }

TEST(EchoServerTest, AlsoOnAUnixSocket) {
  const std::string path = testing::TempDir() + "attend_echo_" + std::to_string(getpid());
  const EchoProcess echo("unix:" + path);
  EXPECT_EQ(echo.address(), "unix:" + path);
  ExpectEchoes(echo.address());
}

TEST(EchoServerTest, WrongFlagsSayWhatIsAllowed) {
  for (const auto& [flags, message] : std::vector<std::pair<std::string, std::string>>{
           {"--listen=nowhere:1:2", "--listen: got nowhere:1:2, wanted an address"},
           {"--threads=0", "--threads"},
           {"--port=1", "--port"}}) {
    const Outcome outcome = RunShell(kEcho + flags);
    EXPECT_EQ(outcome.code, 2) << outcome.text;
    EXPECT_THAT(outcome.text, HasSubstr(message));
  }
}

class CliBenchEchoTest : public testing::Test {
 protected:
  // Two layers, 30 wide, with sessions.
  CliBenchEchoTest() : server_({GoldenModelFlag("llama")}) {
    EXPECT_TRUE(server_.WaitForServing()) << server_.log();
  }
  Outcome Run(const std::string& flags) const {
    return RunShell(ATTEND_BINARY_DIR "/bin/attend --server " + server_.address() + " bench " +
                    flags);
  }
  std::string Echo() const { return "--echo " + echo_.address() + " "; }
  // The report of a run in which nothing failed.
  json Report(const std::string& flags) const {
    const Outcome outcome = Run(flags + " --json");
    EXPECT_EQ(outcome.code, 0) << outcome.text;
    json parsed = json::parse(outcome.text, nullptr, false);
    EXPECT_FALSE(parsed.is_discarded()) << outcome.text;
    return parsed;
  }
  double AttendsAnswered() const {
    double answered = 0;
    for (const auto& [name, value] : server_.Metrics()) {
      if (name.starts_with("attend_requests_total") &&
          name.find("\"Attend\"") != std::string::npos) {
        answered += value;
      }
    }
    return answered;
  }

  ServerProcess server_;
  EchoProcess echo_;
};

TEST_F(CliBenchEchoTest, BothServersGetTheSameNumberOfRequests) {
  for (const char* load : {"--clients 3 --tokens 2:9", "--clients 3 --tokens 5 --rate 5000",
                           "--clients 1 --tokens 4 --sequences 3 --dtype bf16"}) {
    const double before = AttendsAnswered();
    const json report = Report(Echo() + load + " --requests 50 --warmup 1");
    const json& kinds = report["kinds"];
    EXPECT_EQ(kinds["request"]["count"], 50) << load;
    EXPECT_EQ(kinds["echo"]["count"], 50) << load;
    EXPECT_GT(kinds["echo"]["latency_ms"]["p50"], 0);
    EXPECT_GT(kinds["request"]["mean_ms"]["compute"], 0);
    EXPECT_EQ(kinds["echo"]["mean_ms"]["compute"], 0);
    EXPECT_GT(kinds["request"]["per_second"], 0);
    EXPECT_GT(kinds["echo"]["per_second"], 0);
    EXPECT_EQ(report["replicas"], json({{"test-1", 50}}));
    EXPECT_GT(report["echo"]["rest_ratio"], 0);
    EXPECT_TRUE(report["echo"].contains("server_cpu_us_per_request"));
    EXPECT_TRUE(report["echo"].contains("echo_cpu_us_per_request"));
    EXPECT_EQ(AttendsAnswered() - before, 50 + (load[10] == '3' ? 3 : 1)) << load;
  }
}

TEST_F(CliBenchEchoTest, TheTableComparesThem) {
  const Outcome outcome = Run(Echo() + "--clients 2 --tokens 3 --requests 30");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.text, AllOf(HasSubstr(", echo at " + echo_.address() + "\n"),
                                  HasSubstr("\nrequest  "), HasSubstr("\necho  "),
                                  HasSubstr("\nrest / echo    "), HasSubstr("\ncpu servers    ")));
}

TEST_F(CliBenchEchoTest, ByTimeBothHaveTurns) {
  const json kinds = Report(Echo() + "--clients 2 --tokens 2 --seconds 1.5")["kinds"];
  EXPECT_GT(kinds["request"]["count"], 0);
  EXPECT_GT(kinds["echo"]["count"], 0);
}

TEST_F(CliBenchEchoTest, ASilenceIsFollowedByOneRequest) {
  const json report = Report("--idle --tokens 3 --requests 2");
  EXPECT_EQ(report["mode"], "idle");
  EXPECT_EQ(report["kinds"]["idle"]["count"], 2);
  EXPECT_GE(report["kinds"]["request"]["count"], 2);
  EXPECT_GE(report["measured_seconds"], 2);
  EXPECT_TRUE(report["idle"].contains("extra_ms"));
  EXPECT_THAT(Run("--idle --tokens 3 --requests 1").text, HasSubstr("after a second of silence"));
}

TEST_F(CliBenchEchoTest, FairnessHasAppendsAndPrefillsAloneAndTogether) {
  const json report =
      Report("--fairness --prompt 700 --tokens 5 --sessions 3 --rate 300 --steps 7 --requests 1");
  EXPECT_EQ(report["mode"], "fairness");
  EXPECT_EQ(report["sessions_opened"], 4);
  for (const char* kind : {"append", "append_busy", "prefill", "prefill_busy"}) {
    EXPECT_GT(report["kinds"][kind]["count"], 0) << kind;
    EXPECT_GT(report["kinds"][kind]["per_second"], 0) << kind;
  }
  for (const char* kind : {"prefill", "prefill_busy"}) {
    EXPECT_EQ(report["kinds"][kind]["tokens"], 700 * report["kinds"][kind]["count"].get<int>());
  }
  EXPECT_GT(report["fairness"]["append_p99_ratio"], 0);
  EXPECT_GT(report["fairness"]["prefill_ratio"], 0);
  EXPECT_EQ(WhatIsLeft(server_), "");
  EXPECT_THAT(Run("--fairness --prompt 64 --requests 1").text,
              AllOf(StartsWith("fairness: 4 sessions of 128 tokens append 100 rows/s, prefills of "
                               "64 tokens, f32\n"),
                    HasSubstr("\nfairness       p99 of appends x ")));
}

TEST_F(CliBenchEchoTest, TheDecodeLoopPrintsItsBreakEven) {
  const json link =
      Report("--decode_loop --sessions 4 --prompt 3 --gbit 10 --requests 5")["decode"]["link"];
  EXPECT_EQ(link["gbit"], 10);
  EXPECT_EQ(link["call_bytes"], 2 * 2 * 30 * 4);
  EXPECT_GT(link["call_us"], 0);
  EXPECT_TRUE(link.contains("break_even_tokens"));
  EXPECT_EQ(WhatIsLeft(server_), "");
  EXPECT_THAT(Run("--decode_loop --sessions 4 --requests 5").text,
              AllOf(HasSubstr("\nlink   "), HasSubstr("\nbreak-even   "), HasSubstr("25 Gbit/s")));
}

TEST_F(CliBenchEchoTest, ABreakEvenThatCannotBeMeasuredIsNoFailure) {
  ServerProcess small({GoldenModelFlag("llama"), "--kv_bytes=1MiB"});
  ASSERT_TRUE(small.WaitForServing()) << small.log();
  const Outcome outcome = RunShell(ATTEND_BINARY_DIR "/bin/attend --server " + small.address() +
                                   " bench --decode_loop --sessions 4 --prompt 70 --requests 5");
  EXPECT_EQ(outcome.code, 0) << outcome.text;
  EXPECT_THAT(outcome.text, HasSubstr("break-even     not measured: RESOURCE_EXHAUSTED"));
  EXPECT_EQ(WhatIsLeft(small), "");
}

TEST_F(CliBenchEchoTest, CheckSaysOfEachTargetWhatCameOut) {
  const Outcome outcome =
      Run("--check " + Echo() + "--seconds 0.3 --prompt 200 --engine_tokens_per_second 1,1e9");
  EXPECT_EQ(outcome.code, 1) << outcome.text;  // nobody decodes a thousand million tokens a second
  for (const char* target :
       {"\nround trip: llama, 128 tokens, 1 client ",
        "\nthroughput: llama, 128 tokens, 16 clients ", "\nafter a second of silence: llama",
        "\nmixed lengths: llama, 16:512 tokens, 16 clients ",
        "\ndecode loop: llama, 2 layers x 32 sessions, 2 streams ",
        "\nfairness: llama, prefills of 200 tokens "}) {
    EXPECT_THAT(outcome.text, HasSubstr(target));
  }
  EXPECT_THAT(outcome.text, HasSubstr(" of 500000000 "));
  EXPECT_THAT(outcome.text, HasSubstr("NOT reached\n"));
  EXPECT_THAT(outcome.text, HasSubstr("\nnot checked: engine "));
}

TEST_F(CliBenchEchoTest, WrongUsageSaysWhatIsAllowed) {
  for (const auto& [flags, message] : std::vector<std::pair<std::string, std::string>>{
           {"--echo 127.0.0.1:1", "--echo: UNAVAILABLE"},
           {"--echo nonsense", "--echo: "},
           {"--echo ''", "--echo: got"},
           {"--echo " + server_.address(), "wanted an attend-echo server"},
           {Echo() + "--sessions 3", "excludes"},
           {Echo() + "--decode_loop", "excludes"},
           {Echo() + "--idle", "excludes"},
           {"--idle --clients 2", "excludes"},
           {"--idle --rate 2", "excludes"},
           {"--fairness --clients 2", "excludes"},
           {"--fairness --decode_loop", "excludes"},
           {"--check", "requires"},
           {"--check " + Echo() + "--clients 3", "excludes"},
           {"--check " + Echo() + "--requests 3", "excludes"},
           {"--engine_tokens_per_second 3", "requires"},
           {"--gbit 3", "requires"},
           {"--prompt 3", "--prompt requires --decode_loop, --fairness or --check"},
           {"--rate 3 --sessions 2", "--rate excludes --sessions"},
           {"--check " + Echo() + "--engine_tokens_per_second 1,2,3", "engine_tokens_per_second"},
           {"--check " + Echo() + "--engine_tokens_per_second many", "got many"},
           {"--fairness --prompt 0.5", "--prompt"}}) {
    const Outcome outcome = Run(flags);
    EXPECT_EQ(outcome.code, 2) << flags << "\n" << outcome.text;
    EXPECT_THAT(outcome.text, AllOf(StartsWith("attend: "), HasSubstr(message))) << flags;
  }
}

}  // namespace
}  // namespace attend
