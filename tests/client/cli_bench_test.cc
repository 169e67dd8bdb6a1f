// SPDX-License-Identifier: Apache-2.0
//
// `attend bench` against a real server: what it counts in each kind of load, what it does when the
// server refuses, dies or restarts, and its exit codes. No test looks at speed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <latch>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "tests/client/fake_attention.h"
#include "tests/integration/server_process.h"
#include "tests/support/shell.h"

namespace attend {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

json JsonOf(const Outcome& outcome) {
  json parsed = json::parse(outcome.text, nullptr, false);
  EXPECT_FALSE(parsed.is_discarded()) << outcome.text;
  return parsed;
}

std::string Command(const std::string& address, const std::string& flags) {
  return ATTEND_BINARY_DIR "/bin/attend --server " + address + " bench " + flags;
}

// `attend bench` while it runs.
class Bench {
 public:
  // A shell of its own, so that the exit code is what a user's shell says: 128 + a signal's number.
  Bench(const std::string& address, const std::string& flags)
      : outcome_(std::async(std::launch::async, [this, address, flags] {
          return RunShell("{ sh -c 'echo $$ > " + pid_file_ + "; exec " + Command(address, flags) +
                          "'; exit $?; }");
        })) {}
  ~Bench() {
    if (outcome_.valid()) Signal(SIGKILL);
    std::filesystem::remove(pid_file_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  // Of a run that has not been waited for.
  void Signal(int number) const {
    pid_t pid = 0;
    EXPECT_TRUE(Eventually([&] { return bool(std::ifstream(pid_file_) >> pid); }));
    if (pid > 0) kill(pid, number);
  }
  Outcome Wait() { return outcome_.get(); }

 private:
  static std::string NewPidFile() {
    static int count = 0;
    return testing::TempDir() + "attend_bench_" + std::to_string(getpid()) + "_" +
           std::to_string(++count);
  }

  const std::string pid_file_ = NewPidFile();
  std::future<Outcome> outcome_;
};

class CliBenchTest : public testing::Test {
 protected:
  // The model has two layers, 30 wide, with sessions.
  void Start(std::vector<std::string> flags = {}) {
    flags.push_back(GoldenModelFlag("llama"));
    server_ = std::make_unique<ServerProcess>(flags);
    ASSERT_TRUE(server_->WaitForServing()) << server_->log();
  }
  Outcome Run(const std::string& flags) const {
    return RunShell(Command(server_->address(), flags));
  }
  // The report of a run in which nothing failed.
  json Report(const std::string& flags) const {
    const Outcome outcome = Run(flags + " --json");
    EXPECT_EQ(outcome.code, 0) << outcome.text;
    json report = JsonOf(outcome);
    EXPECT_EQ(report["failed"]["total"], 0);
    EXPECT_EQ(report["ended_early"], false);
    EXPECT_GT(report["measured_seconds"], 0);
    EXPECT_GT(report["cpu_us_per_call"], 0);
    return report;
  }
  bool WaitForAnswers(double count) const {
    return Eventually([&] { return AttendsAnswered() >= count; });
  }
  double AttendsAnswered() const {
    double answered = 0;
    for (const auto& [name, value] : server_->Metrics()) {
      if (name.starts_with("attend_requests_total") &&
          name.find("\"Attend") != std::string::npos &&  // Attend, AttendStream
          name.find("\"OK\"") != std::string::npos) {
        answered += value;
      }
    }
    return answered;
  }

  std::unique_ptr<ServerProcess> server_;
};

void ExpectOrdered(const json& latency) {
  const char* names[] = {"p50", "p90", "p99", "p99_9", "max"};
  EXPECT_GT(latency["p50"], 0);
  for (int i = 0; i < 4; ++i) {
    EXPECT_LE(latency[names[i]].get<double>(), latency[names[i + 1]].get<double>()) << names[i];
  }
}

TEST_F(CliBenchTest, AClosedLoopCountsEveryRequestAndNoWarmUp) {
  Start();
  const json report = Report("--clients 3 --tokens 2:9 --requests 60 --warmup 4");
  EXPECT_EQ(report["mode"], "closed");
  EXPECT_EQ(report["model"], "llama");
  EXPECT_EQ(report["clients"], 3);
  const json& requests = report["kinds"]["request"];
  EXPECT_EQ(requests["count"], 60);
  EXPECT_GE(requests["tokens"], 2 * 60);
  EXPECT_LE(requests["tokens"], 9 * 60);
  ExpectOrdered(requests["latency_ms"]);
  EXPECT_GT(requests["mean_ms"]["compute"], 0);
  EXPECT_EQ(requests["mean_ms"]["wait"], 0);
  EXPECT_EQ(report["replicas"], json({{"test-1", 60}}));
  EXPECT_GE(report["batch"]["tokens"], 2);
  EXPECT_GE(report["batch"]["sequences"], 1);
  EXPECT_NEAR(report["batch"]["fill"], report["batch"]["tokens"].get<double>() / 2048, 1e-9);
  EXPECT_EQ(AttendsAnswered(), 60 + 3 * 4);
  EXPECT_EQ(WhatIsLeft(*server_), "");
}

TEST_F(CliBenchTest, ARequestMayHoldSeveralSequencesOfAnyType) {
  Start();
  for (const char* dtype : {"f32", "f16", "bf16"}) {
    const json report = Report(std::string("--clients 1 --tokens 5 --sequences 3 --requests 4") +
                               " --layer 1 --dtype " + dtype);
    EXPECT_EQ(report["kinds"]["request"]["tokens"], 4 * 3 * 5);
    EXPECT_EQ(report["layers"], json({"1"}));
    EXPECT_EQ(report["dtype"], dtype);
  }
}

TEST_F(CliBenchTest, TheTableIsQuietInPipes) {
  Start();
  const Outcome outcome = Run("--clients 2 --tokens 3 --seconds 1.2");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.text,
              AllOf(StartsWith("closed loop: 2 clients, 3 tokens, f32\nmodel llama (layer 0)"),
                    HasSubstr("after 2 warm-up requests each"), HasSubstr("\nrequest  "),
                    HasSubstr("\nrefused        0\nfailed         0\n"), HasSubstr("test-1 "),
                    Not(HasSubstr("\r")), Not(HasSubstr("\033"))));
}

TEST_F(CliBenchTest, AnOpenLoopSendsEveryArrivalOfItsRequests) {
  Start();
  const json report = Report("--rate 2000 --clients 4 --tokens 1:4 --requests 100");
  EXPECT_EQ(report["mode"], "open");
  EXPECT_EQ(report["kinds"]["request"]["count"], 100);
  EXPECT_EQ(report["arrivals"]["unsent"], 0);
  // Its 100 arrivals take 50 ms on average, and more than a third of that always.
  EXPECT_GT(report["measured_seconds"], 0.015);
}

TEST_F(CliBenchTest, AnOpenLoopThatOneClientCannotServeIsLate) {
  Start();
  // A million a second: the last of them is due long before 10 calls can be done.
  const json report = Report("--rate 1000000 --clients 1 --tokens 1 --requests 2000");
  const json& requests = report["kinds"]["request"];
  EXPECT_EQ(requests["count"], 2000);
  EXPECT_GT(report["arrivals"]["late"], 1000);
  // Latency counts from the scheduled time, so that waiting is part of it.
  EXPECT_GT(requests["mean_ms"]["wait"], 1);
  EXPECT_GT(requests["latency_ms"]["mean"], requests["mean_ms"]["wait"].get<double>());
}

TEST_F(CliBenchTest, AnOpenLoopByTimeSaysWhatItCouldNotSend) {
  Start();
  const json report = Report("--rate 1000000 --clients 1 --tokens 1 --seconds 0.2");
  const double answered = report["kinds"]["request"]["count"];
  // A Poisson number of 200,000 arrivals; five deviations.
  EXPECT_NEAR(answered + report["arrivals"]["unsent"].get<double>(), 200000, 5 * 450);
}

TEST_F(CliBenchTest, SessionsBeginWithAPromptAndAreReplacedAfterTheirSteps) {
  Start();
  const json report = Report("--sessions 5 --clients 2 --tokens 4 --steps 3 --requests 100");
  EXPECT_EQ(report["mode"], "sessions");
  const json& kinds = report["kinds"];
  EXPECT_EQ(kinds["prompt"]["count"].get<int>() + kinds["step"]["count"].get<int>(), 100);
  EXPECT_EQ(kinds["prompt"]["tokens"], 4 * kinds["prompt"]["count"].get<int>());
  EXPECT_GE(kinds["prompt"]["count"], 25);  // one call in four
  EXPECT_LE(kinds["prompt"]["count"], 30);
  EXPECT_EQ(report["sessions_opened"], kinds["prompt"]["count"]);
  EXPECT_EQ(report["sessions_lost"]["total"], 0);
  EXPECT_EQ(WhatIsLeft(*server_), "");
}

TEST_F(CliBenchTest, TheDecodeLoopCallsEveryLayerForEveryStep) {
  Start();
  const json report =
      Report("--decode_loop --sessions 5 --micro_batches 2 --prompt 7 --steps 4 --requests 21");
  EXPECT_EQ(report["mode"], "decode_loop");
  EXPECT_EQ(report["layers"], json({"0", "1"}));
  const json& step = report["kinds"]["step"];
  EXPECT_EQ(step["count"], 21);
  EXPECT_GE(step["tokens"], 21 * 2);
  EXPECT_LE(step["tokens"], 21 * 3);
  EXPECT_EQ(report["kinds"]["layer_call"]["count"], 2 * 21);
  EXPECT_EQ(report["kinds"]["layer_call"]["tokens"], 2 * step["tokens"].get<int>());
  const json& decode = report["decode"];
  EXPECT_GT(decode["rpc_share"], 0);
  EXPECT_LT(decode["rpc_share"], 1);
  EXPECT_GT(decode["engine_share"], 0);
  EXPECT_EQ(decode["step_ms"], step["latency_ms"]["p50"]);
  EXPECT_GT(decode["session_token_ms"], 0);
  EXPECT_EQ(report["sessions_opened"], 5);
  EXPECT_EQ(WhatIsLeft(*server_), "");

  EXPECT_EQ(Report("--decode_loop --layers 1 --sessions 1 --requests 3")["layers"], json({"0"}));
  EXPECT_THAT(Run("--decode_loop --requests 3").text,
              AllOf(HasSubstr("decode loop: 32 sessions in 2 micro-batches"),
                    HasSubstr("\ntime per token "), HasSubstr("\nrpc share ")));
}

TEST_F(CliBenchTest, TheDecodeLoopsHistoriesDoNotGrow) {
  Start({"--kv_bytes=1MiB"});  // about 2,000 tokens of this model
  const json report = Report("--decode_loop --sessions 2 --prompt 70 --steps 10 --requests 3000");
  EXPECT_EQ(report["refused"]["total"], 0);
  EXPECT_EQ(report["kinds"]["step"]["count"], 3000);
}

TEST_F(CliBenchTest, HistoriesOfALayerWithASelectableMaskAreCausal) {
  server_ = std::make_unique<ServerProcess>(std::vector{GoldenModelFlag("torch_mha")});
  ASSERT_TRUE(server_->WaitForServing()) << server_->log();
  EXPECT_EQ(
      Report("--sessions 3 --clients 2 --tokens 4 --steps 3 --requests 30")["refused"]["total"], 0);
  const json report = Report("--decode_loop --sessions 3 --prompt 5 --steps 3 --requests 30");
  EXPECT_EQ(report["kinds"]["step"]["count"], 30);
  EXPECT_EQ(Report("--clients 1 --requests 3")["kinds"]["request"]["count"], 3);  // no context
}

TEST_F(CliBenchTest, RefusedStepsOfTheDecodeLoopDoNotGrowItsHistories) {
  // Room for one block of 64 tokens (16,384 bytes) in both layers for each of 8 sessions, and for
  // two more.
  Start({"--queue_requests=1", "--kv_bytes=294912"});
  const json report =
      Report("--decode_loop --sessions 8 --micro_batches 8 --steps 62 --requests 4000");
  const int refused = report["refused"]["total"];
  EXPECT_GT(refused, 0);
  EXPECT_EQ(report["refused"]["by_reason"], json({{"QUEUE_FULL", refused}}));
  EXPECT_EQ(report["kinds"]["step"]["count"], 4000 - refused);
}

TEST_F(CliBenchTest, TheDecodeLoopSurvivesTheAgeOfItsStreams) {
  Start({"--stream_age=1"});
  const json report = Report("--decode_loop --sessions 4 --prompt 3 --seconds 2");
  const int refused = report["refused"]["total"];
  EXPECT_GE(refused, 2);  // each of two streams once at least
  EXPECT_EQ(report["refused"]["by_reason"], json({{"DRAINING", refused}}));
  const json again = Report("--decode_loop --sessions 4 --prompt 3 --seconds 2 --attempts 3");
  EXPECT_EQ(again["refused"]["total"], 0);
  EXPECT_GE(again["retried"]["by_reason"]["DRAINING"], 2);
}

TEST_F(CliBenchTest, RefusalsAreResultsAndNoFailures) {
  Start({"--queue_requests=1"});
  const json report = Report("--clients 8 --tokens 64:128 --requests 400");
  const int refused = report["refused"]["total"];
  EXPECT_GT(refused, 0);
  EXPECT_EQ(report["refused"]["by_reason"], json({{"QUEUE_FULL", refused}}));
  EXPECT_EQ(report["kinds"]["request"]["count"], 400 - refused);
}

TEST_F(CliBenchTest, AKilledServerCountsAsFailuresAndEndsTheRun) {
  for (const char* load : {"--tokens 4", "--tokens 4 --rate 1000", "--sessions 6 --tokens 4",
                           "--decode_loop --sessions 4"}) {
    Start();
    // A few seconds, as each client has to connect within them too.
    Bench bench(server_->address(),
                std::string(load) + " --requests 1000000000 --timeout 4 --json");
    ASSERT_TRUE(WaitForAnswers(100)) << load;
    server_->Signal(SIGKILL);
    const Outcome outcome = bench.Wait();
    EXPECT_EQ(outcome.code, 1) << outcome.text;
    const json report = JsonOf(outcome);
    EXPECT_EQ(report["ended_early"], true) << load;
    EXPECT_GT(report["failed"]["by_reason"]["UNAVAILABLE"], 0) << load;
    EXPECT_LT(report["measured_seconds"], kPatience.count()) << load;
    EXPECT_FALSE(report["replicas"].empty()) << load;
  }
}

TEST_F(CliBenchTest, SessionsOfARestartedServerAreCountedAndReplaced) {
  for (const char* load :
       {"--sessions 6 --clients 3 --tokens 4", "--decode_loop --sessions 4 --prompt 3"}) {
    Start();
    const std::string address = server_->address();
    Bench bench(address, std::string(load) + " --seconds 600 --json");
    ASSERT_TRUE(WaitForAnswers(100)) << load;
    server_->Signal(SIGKILL);
    server_->WaitForExit();
    Start({"--listen=" + address});
    ASSERT_TRUE(WaitForAnswers(100)) << load;
    bench.Signal(SIGINT);
    const Outcome outcome = bench.Wait();
    EXPECT_EQ(outcome.code, 130) << outcome.text;
    const json report = JsonOf(outcome);
    const int lost = report["sessions_lost"]["total"];
    EXPECT_GT(lost, 0) << load;
    EXPECT_EQ(report["sessions_lost"]["by_reason"], json({{"SESSION_LOST_IN_RESTART", lost}}));
    EXPECT_GT(report["sessions_opened"], 4) << load;
    EXPECT_EQ(report["ended_early"], true);
    EXPECT_EQ(WhatIsLeft(*server_), "") << load;
  }
}

TEST_F(CliBenchTest, CtrlCEndsEarlyReportsAndClosesSessions) {
  Start();
  for (const char* load : {"", "--sessions 4", "--decode_loop"}) {
    const double before = AttendsAnswered();
    Bench bench(server_->address(), std::string(load) + " --seconds 600");
    ASSERT_TRUE(WaitForAnswers(before + 200)) << load;
    bench.Signal(SIGINT);
    const Outcome outcome = bench.Wait();
    EXPECT_EQ(outcome.code, 130);
    EXPECT_THAT(outcome.text,
                AllOf(HasSubstr("ended early by signal 2\n"), HasSubstr("failed   ")));
    EXPECT_EQ(WhatIsLeft(*server_), "") << load;
  }
}

TEST_F(CliBenchTest, WithoutAServerItSaysSo) {
  const Outcome outcome = RunShell(Command("127.0.0.1:1", ""));
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.text, StartsWith("attend: UNAVAILABLE"));
}

TEST_F(CliBenchTest, WrongUsageSaysWhatIsAllowed) {
  Start({GoldenModelFlag("bert")});
  for (const auto& [flags, message] : std::vector<std::pair<std::string, std::string>>{
           {"--tokens 5:3", "wanted a length from 1"},
           {"--clients 0", "got 0, wanted 1 to 4096"},
           {"--clients 1.5", "--clients"},
           {"--rate 0", "--rate"},
           {"--rate 5 --sessions 3", "excludes"},
           {"--seconds 1 --requests 1", "excludes"},
           {"--decode_loop --layer 0", "excludes"},
           {"--prompt 3", "--decode_loop"},
           {"--dtype f64", "wanted f32|f16|bf16"},
           {"", "--model: got none, wanted one of"},
           {"--model gpt", "--model: got gpt, wanted one of"},
           {"--model llama --layer 9",
            "--layer: got 9, wanted one of the self-attention layers of"},
           {"--model llama --decode_loop --layers 3", "--layers: got 3, wanted at most 2"},
           {"--model bert --sessions 3",
            "--model: got bert without self-attention layers that keep sessions"},
           {"--model bert --decode_loop --layers 2",
            "--model: got bert without self-attention layers that keep sessions"},
           {"--model bert --layer 0 --sessions 3",
            "--layer: got 0, wanted one of the self-attention layers that keep sessions of model"},
           {"--model llama --tokens 65537", "got requests of up to 65537 rows, wanted at most"},
           {"--model llama --tokens 1:40000", "message_bytes = 4194304"}}) {
    const Outcome outcome = Run(flags);
    EXPECT_EQ(outcome.code, 2) << flags << "\n" << outcome.text;
    EXPECT_THAT(outcome.text,
                AllOf(StartsWith("attend: "), HasSubstr(message), HasSubstr("--help")));
  }
}

// ---- Against a server whose failures are scripted ----

class CliBenchFakeTest : public testing::Test {
 protected:
  CliBenchFakeTest() { server_.info.mutable_limits()->set_request_tokens(100); }

  // One call of any method that goes well, in the order of the script.
  void PassNext() { server_.FailNext({.status = {}, .applied = true}); }
  Outcome Run(const std::string& flags) const {
    return RunShell(Command(server_.address(), flags));
  }

  std::latch released_{1};  // outlives the handlers that wait for it
  client::FakeAttention server_;
};

TEST_F(CliBenchFakeTest, WrongAnswersAreFailures) {
  // Echoes rows of 2, where its layer says 0.
  const Outcome outcome = Run("--clients 1 --warmup 0 --tokens 3 --requests 2");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.text,
              AllOf(HasSubstr("failed         2: WRONG_ANSWER 2\n"),
                    HasSubstr("first WRONG_ANSWER: output: got f32 [3, 2] in 24 bytes, wanted")));
}

TEST_F(CliBenchFakeTest, AttemptsAreCountedAsRetried) {
  for (int attempts : {1, 3}) {
    PassNext();  // ListModels
    const grpc::Status draining = client::StatusWithReason(grpc::UNAVAILABLE, v1::DRAINING);
    server_.FailNext({.status = draining, .pushback = "0"});
    server_.FailNext({.status = draining, .pushback = "0"});
    const json report = JsonOf(Run("--clients 1 --warmup 0 --tokens 3 --requests 3 --json" +
                                   (" --attempts " + std::to_string(attempts))));
    EXPECT_EQ(report["refused"]["total"], attempts == 1 ? 2 : 0);
    EXPECT_EQ(report["retried"]["by_reason"],
              attempts == 1 ? json::object() : json({{"DRAINING", 2}}));
    EXPECT_EQ(report["calls"], attempts == 1 ? 3 : 5);
  }
}

TEST_F(CliBenchFakeTest, AClientThatCannotStartEndsTheRunAtOnce) {
  PassNext();
  server_.FailNext({.status = {grpc::StatusCode::INTERNAL, "no more"}});  // an OpenSession
  const Outcome outcome =
      Run("--decode_loop --sessions 3 --micro_batches 3 --seconds 100000 --timeout 80000");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.text, HasSubstr("attend: INTERNAL: no more\n"));
  EXPECT_THAT(outcome.text, Not(HasSubstr("measured")));
}

TEST_F(CliBenchFakeTest, ASignalBeforeTheStartWaitsForNoAnswer) {
  PassNext();
  server_.FailNext({.status = {}, .during = [this] { released_.wait(); }});
  Bench bench(server_.address(), "--clients 2 --tokens 3 --timeout 80000");
  EXPECT_TRUE(Eventually([&] { return !server_.seen("Attend").empty(); }));
  bench.Signal(SIGTERM);
  const Outcome outcome = bench.Wait();
  released_.count_down();
  EXPECT_EQ(outcome.code, 143);
  EXPECT_THAT(outcome.text, HasSubstr("attend: ended by signal 15 before the load began\n"));
}

TEST_F(CliBenchFakeTest, ASecondSignalOfTheOtherKindEndsAtOnce) {
  PassNext();
  server_.FailNext({.status = {}, .during = [this] { released_.wait(); }});
  Bench bench(server_.address(),
              "--clients 1 --tokens 3 --warmup 0 --seconds 100000 --timeout 80000");
  EXPECT_TRUE(Eventually([&] { return !server_.seen("Attend").empty(); }));
  bench.Signal(SIGINT);
  bench.Signal(SIGTERM);
  // Two threads may take them in either order; the second ends it, whichever that is.
  EXPECT_THAT(bench.Wait().code, AnyOf(143, 130));
  released_.count_down();
}

class CliBenchStepTest : public CliBenchFakeTest {
 protected:
  // Layer and position of each item, all of one session.
  std::vector<std::pair<std::string, int64_t>> Calls() const {
    std::vector<std::pair<std::string, int64_t>> calls;
    for (const auto& call : server_.seen("AttendStream")) {
      calls.emplace_back(call.attend.layer(), call.attend.sequences(0).position());
    }
    return calls;
  }
};

TEST_F(CliBenchStepTest, AStepThatFailedIsRepeatedFromItsBeginningOnEveryLayer) {
  server_.output_width = 2;
  for (int i = 0; i < 2; ++i) PassNext();  // ListModels, OpenSession
  std::vector<std::pair<std::string, int64_t>> wanted;
  constexpr int kRounds = 4;
  for (int i = 0; i < kRounds; ++i) {
    for (int j = 0; j < 3; ++j) PassNext();  // a step, and the first layer of the next
    server_.FailNext(
        {.status = client::StatusWithReason(grpc::RESOURCE_EXHAUSTED, v1::QUEUE_FULL)});
    server_.FailNext({.status = {grpc::StatusCode::UNAVAILABLE, "gone"}, .applied = i % 2 == 0});
    for (const auto& [layer, position] :
         {std::pair("0", i), std::pair("1", i), std::pair("0", i + 1), std::pair("1", i + 1),
          std::pair("0", i + 1)}) {
      wanted.emplace_back(layer, position);
    }
  }
  for (const char* layer : {"0", "1"}) wanted.emplace_back(layer, kRounds);
  const Outcome outcome = Run("--decode_loop --sessions 1 --warmup 0 --json --requests " +
                              std::to_string(3 * kRounds + 1));
  EXPECT_EQ(outcome.code, 1);
  const json report = JsonOf(outcome);
  EXPECT_EQ(report["kinds"]["step"]["count"], kRounds + 1);
  EXPECT_EQ(report["refused"]["total"], kRounds);
  EXPECT_EQ(report["failed"]["total"], kRounds);
  EXPECT_EQ(report["sessions_opened"], 1);
  EXPECT_EQ(report["calls"], 5 * kRounds + 2);
  EXPECT_EQ(Calls(), wanted);
  EXPECT_EQ(server_.open_sessions(), 0u);
}

TEST_F(CliBenchStepTest, EachMicroBatchHasAStreamOnAConnectionOfItsOwn) {
  server_.output_width = 2;
  const json report = JsonOf(Run("--decode_loop --sessions 5 --warmup 1 --requests 20 --json"));
  EXPECT_EQ(report["kinds"]["step"]["count"], 20);
  EXPECT_EQ(report["failed"]["total"], 0);
  EXPECT_EQ(server_.streams(), 2);
  EXPECT_TRUE(server_.seen("Attend").empty());
  std::map<std::string, int> items;                          // by connection
  std::map<std::string, std::set<std::string>> connections;  // by session
  for (const auto& [method, peer, item, metadata] : server_.seen("AttendStream")) {
    EXPECT_EQ(item.layer(), items[peer]++ % 2 == 0 ? "0" : "1") << peer;
    for (const v1::Sequence& sequence : item.sequences()) {
      connections[sequence.session_id()].insert(peer);
    }
  }
  EXPECT_EQ(items.size(), 2u);
  EXPECT_EQ(connections.size(), 5u + 1);  // one measures what a call costs
  for (const auto& [session, peers] : connections) EXPECT_EQ(peers.size(), 1u) << session;
}

TEST_F(CliBenchStepTest, AStreamThatEndsFailsItsStepAndTheNextOneOpensAnother) {
  server_.output_width = 2;
  for (int i = 0; i < 2; ++i) PassNext();  // ListModels, OpenSession
  for (int i = 0; i < 3; ++i) PassNext();
  server_.FailNext({.status = {grpc::StatusCode::UNAVAILABLE, "the server goes away"}});
  const Outcome outcome =
      Run("--decode_loop --sessions 1 --micro_batches 1 --warmup 0 --requests 3");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.text, AllOf(HasSubstr("\nfailed         1: UNAVAILABLE 1\n"),
                                  HasSubstr("first UNAVAILABLE: UNAVAILABLE: the server goes")));
  EXPECT_EQ(server_.streams(), 2);
}

TEST_F(CliBenchStepTest, SoIsAStepWithAWrongAnswer) {
  const json report = JsonOf(Run("--decode_loop --sessions 1 --warmup 0 --requests 3 --json"));
  EXPECT_EQ(report["failed"]["by_reason"], json({{"WRONG_ANSWER", 3}}));
  EXPECT_EQ(Calls(), std::vector(3, std::pair<std::string, int64_t>("0", 0)));
}

}  // namespace
}  // namespace attend
