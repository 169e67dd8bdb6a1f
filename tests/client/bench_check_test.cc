// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of `attend bench`: what a link and cached tokens cost, where the break-even is,
// what a report says of each of the service's targets, and whose processor time is read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <string>

#include "client/cli/bench/check.h"
#include "client/cli/bench/process_cpu.h"
#include "tests/client/fake_attention.h"

namespace attend::cli {
namespace {

using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

// 100 us a call and 0.5 ns a byte; 1,000 us for a micro-batch and 0.02 us a cached token.
LinkSamples Samples() {
  return {
      .batch = {.rows = 16, .bytes = 200'000, .cached = 160, .rest_us = 210, .compute_us = 1003.2},
      .row = {.rows = 1, .bytes = 16'000, .cached = 0, .rest_us = 108, .compute_us = 900},
      .cached = {.rows = 1, .bytes = 16'000, .cached = 2000, .rest_us = 108, .compute_us = 940},
      .rows = {.rows = 64, .bytes = 1'016'000, .cached = 0, .rest_us = 608, .compute_us = 0}};
}

TEST(LinkTest, CostsAreTheLineThroughTheSamples) {
  const LinkCosts costs = CostsOf(Samples());
  EXPECT_NEAR(costs.fixed_us, 100, 1e-9);
  EXPECT_NEAR(costs.byte_us, 5e-4, 1e-12);
  EXPECT_NEAR(costs.base_us, 1000, 1e-9);
  EXPECT_NEAR(costs.cached_us, 0.02, 1e-12);
  EXPECT_NEAR(RpcUs(costs, 200'000, 0), 200, 1e-9);
  EXPECT_NEAR(RpcUs(costs, 200'000, WireByteUs(8)), 400, 1e-9);  // 1 ns a byte
}

TEST(LinkTest, AtTheBreakEvenTheNetworkTakesAFifth) {
  LinkSamples samples = Samples();
  samples.batch.compute_us = 103.2;
  const LinkCosts costs = CostsOf(samples);
  for (const double wire : {0.0, WireByteUs(25), WireByteUs(1)}) {
    const double rpc = RpcUs(costs, 200'000, wire);
    const double tokens = BreakEvenTokens(costs, 200'000, wire).value_or(-1);
    EXPECT_NEAR(rpc / (rpc + costs.base_us + tokens * costs.cached_us), 0.2, 1e-9);
  }
  EXPECT_NEAR(*BreakEvenTokens(costs, 200'000, 0), (4 * 200 - 100) / 0.02, 1e-6);
}

TEST(LinkTest, SomeBreakEvensAreEverywhereOrNowhere) {
  LinkSamples samples = Samples();
  EXPECT_EQ(BreakEvenTokens(CostsOf(samples), 200'000, 0), 0);  // 4 x 200 us < 1,000 us
  samples.cached.compute_us = 890;                              // noise
  EXPECT_EQ(CostsOf(samples).cached_us, 0);
  EXPECT_EQ(BreakEvenTokens(CostsOf(samples), 200'000, 0), 0);
  EXPECT_FALSE(BreakEvenTokens(CostsOf(samples), 2'000'000, 0));
  samples.rows.bytes = samples.row.bytes;  // a width that leaves no room for many rows
  EXPECT_EQ(CostsOf(samples).byte_us, 0);
  EXPECT_EQ(CostsOf(samples).fixed_us, 108);
}

TEST(LinkTest, TheTextHoldsTheArithmetic) {
  LinkSamples samples = Samples();
  samples.batch.compute_us = 103.2;
  const std::string text = LinkText(samples, 8);
  EXPECT_THAT(text, HasSubstr("link           100 us a call + 0.500 ns a byte: 108 us for 16000"));
  EXPECT_THAT(text, HasSubstr("engine         100 us a call of 16 rows + 0.0200 us a cached"));
  EXPECT_THAT(text, HasSubstr("35000 cached tokens a call (2188 a session): (4 x 200 us - 100 us)"
                              " / 0.0200 us\n"));
  EXPECT_THAT(text, HasSubstr("8 Gbit/s     75000 cached tokens a call (4688 a session): "
                              "(4 x (100 us + 200000 x (0.500 + 1.000) ns) - 100 us) / 0.0200"));
  samples.cached.compute_us = 0;
  EXPECT_THAT(LinkText(samples, 8), HasSubstr("unknown: a cached token costs less than"));
  EXPECT_THAT(LinkText(Samples(), 8), HasSubstr("this link    any history: 4 x "));
}

class TargetTest : public testing::Test {
 protected:
  TargetTest() {
    v1::Layer layer;
    layer.set_name("0");
    bench_.layers.push_back(layer);
    bench_.model = "tiny";
  }
  // `count` answers of one call each, of `us` each, the engine busy for `compute_us` of it with
  // nothing else.
  void Add(Kind kind, int count, int64_t us, int64_t compute_us = 0, int64_t tokens = 1) {
    v1::Timing timing;
    timing.set_compute_us(compute_us);
    timing.set_batch_tokens(tokens);
    for (int i = 0; i < count; ++i) {
      stats_.of(kind).latency.Add(us * 1000);
      AddCall(timing, tokens, us * 1000, &stats_.of(kind));
    }
  }
  LoadReport Report() const { return {.bench = bench_, .stats = stats_, .seconds = 2}; }

  Globals globals_;
  BenchFlags flags_;
  Bench bench_{globals_, flags_};
  LoadStats stats_;
};

TEST_F(TargetTest, ARoundTripMayTakeATenthMoreThanComputationAndEcho) {
  Add(Kind::kRequest, 3, 2090, 1000);
  Add(Kind::kEcho, 3, 1000);
  const Target target = RoundTripTarget(Report());
  EXPECT_TRUE(target.reached) << target.value;
  EXPECT_THAT(target.value, HasSubstr(" + 1.09 x "));
  EXPECT_EQ(target.wanted, "<= computation + 1.10 x echo");
  Add(Kind::kRequest, 4, 2120, 1000);
  EXPECT_FALSE(RoundTripTarget(Report()).reached);
}

TEST_F(TargetTest, ThroughputIsAgainstTheCoresOverComputationAndEcho) {
  Add(Kind::kRequest, 911, 10);
  Add(Kind::kEcho, 1000, 10);
  LoadReport report = Report();
  report.kind_seconds[static_cast<size_t>(Kind::kRequest)] = 1;
  EXPECT_THAT(CeilingTarget(report, 900, 2, 2).value, StartsWith("no processor time"));
  EXPECT_FALSE(CeilingTarget(report, 900, 2, 2).reached);
  report.echo_cpu_seconds = 0.15;
  report.echo_client_cpu_seconds = 0.05;
  // 2 cores / (2 x 0.9 ms + 0.2 ms) = 1,000 a second
  const Target target = CeilingTarget(report, 900, 2, 2);
  EXPECT_TRUE(target.reached);
  EXPECT_THAT(target.value, StartsWith("91.1 %: 911 of 1000 = 2 / (2 x 900 us + 200 us)"));
  EXPECT_FALSE(CeilingTarget(report, 800, 2, 2).reached);
}

TEST_F(TargetTest, ASilenceMayCostAMillisecondAndAHalf) {
  Add(Kind::kRequest, 3, 2000);
  Add(Kind::kIdle, 1, 3490);
  EXPECT_TRUE(IdleTarget(Report()).reached);
  Add(Kind::kIdle, 2, 3600);
  EXPECT_FALSE(IdleTarget(Report()).reached);
}

TEST_F(TargetTest, TokensAreAgainstThoseOfTheEngine) {
  Add(Kind::kRequest, 8, 300'000, 220'000, 100);       // 400 a second in 2 s; 1.76 s computing
  EXPECT_TRUE(ThroughputTarget(Report(), 0).reached);  // 88 %
  EXPECT_THAT(ThroughputTarget(Report(), 0).value, StartsWith("88.0 %: 400 of 455"));
  EXPECT_TRUE(ThroughputTarget(Report(), 470).reached);
  EXPECT_FALSE(ThroughputTarget(Report(), 480).reached);
  flags_.decode_loop = true;
  Add(Kind::kStep, 8, 1000, 0, 100);
  Add(Kind::kLayerCall, 8, 1000, 220'000, 100);
  EXPECT_FALSE(ThroughputTarget(Report(), 0).reached);  // 90 % here
  EXPECT_TRUE(ThroughputTarget(Report(), 440).reached);
  bench_.layers.push_back(bench_.layers.front());
  EXPECT_TRUE(ThroughputTarget(Report(), 880).reached);
  EXPECT_FALSE(ThroughputTarget(Report(), 900).reached);
}

TEST_F(TargetTest, SharedBatchesCountOnceForTheEngine) {
  v1::Timing timing;
  timing.set_compute_us(1000);
  timing.set_batch_tokens(40);
  for (int i = 0; i < 4; ++i) AddCall(timing, 10, 0, &stats_.of(Kind::kRequest));
  EXPECT_EQ(stats_.of(Kind::kRequest).engine_us, 1000);
  EXPECT_EQ(stats_.of(Kind::kRequest).compute_us, 4000);
}

TEST_F(TargetTest, FairnessIsShortTailsOrQuickPrefills) {
  const auto reached = [this](int64_t appends, int64_t prefills) {
    stats_ = {};
    Add(Kind::kAppend, 100, 1000);
    Add(Kind::kPrefill, 3, 100'000);
    Add(Kind::kAppendBusy, 100, appends);
    Add(Kind::kPrefillBusy, 3, prefills);
    return FairnessTarget(Report()).reached;
  };
  EXPECT_TRUE(reached(1900, 200'000));
  EXPECT_TRUE(reached(9000, 120'000));
  EXPECT_FALSE(reached(2200, 130'000));
}

TEST_F(TargetTest, ALoadWithFailuresOrWithoutAnswersReachesNothing) {
  EXPECT_EQ(IdleTarget(Report()).value, "no request was answered");
  Add(Kind::kRequest, 3, 2000);
  EXPECT_EQ(IdleTarget(Report()).value, "no idle was answered");
  EXPECT_EQ(RoundTripTarget(Report()).value, "no echo was answered");
  EXPECT_EQ(FairnessTarget(Report()).value, "no append was answered");
  for (const Kind kind : {Kind::kIdle, Kind::kEcho, Kind::kAppend, Kind::kAppendBusy,
                          Kind::kPrefill, Kind::kPrefillBusy}) {
    Add(kind, 3, 2000);
  }
  stats_.AddWrongAnswer("output: row 0 has a NaN");
  LoadReport report = Report();
  for (const Target& target :
       {RoundTripTarget(report), CeilingTarget(report, 1, 1, 1), IdleTarget(report),
        ThroughputTarget(report, 1), FairnessTarget(report)}) {
    EXPECT_FALSE(target.reached);
    EXPECT_EQ(target.value, "1 failed: output: row 0 has a NaN");
  }
}

TEST(TargetsTest, WhatWasNotCheckedHasItsReason) {
  BenchFlags flags;
  EXPECT_THAT(NotChecked(flags, 2, 4),
              ElementsAre(HasSubstr("--threads=1 on a core of its own (it has 2)"),
                          HasSubstr("tokens/s on mixed lengths and decoding (no --engine_"),
                          HasSubstr("on 32 layers (the model has 4 that fit)")));
  flags.engine_tokens_per_second = {1};
  EXPECT_THAT(NotChecked(flags, 1, 0),
              ElementsAre(HasSubstr("can't be seen"), HasSubstr("tokens/s decoding (no --eng")));
  flags.engine_tokens_per_second = {1, 2};
  EXPECT_THAT(NotChecked(flags, 1, 32), ElementsAre(HasSubstr("can't be seen")));
  flags.prompt = 200;
  EXPECT_THAT(NotChecked(flags, 1, 32),
              ElementsAre(HasSubstr("can't be seen"),
                          "fairness at 8192 and 65536 tokens (--prompt asked for 200)"));
}

TEST(TargetsTest, AreATableOrJson) {
  const std::vector<Target> targets = {
      {.what = "one", .wanted = "<= 1", .value = "0.5", .reached = true},
      {.what = "two", .wanted = "<= 2", .value = "2.5"}};
  EXPECT_THAT(TargetsText(targets, {}), HasSubstr("  reached\ntwo "));
  EXPECT_THAT(TargetsText(targets, {}), EndsWith("  NOT reached\n"));
  EXPECT_THAT(TargetsText(targets, {"a", "b"}), EndsWith("  NOT reached\nnot checked: a; b\n"));
  const auto json = nlohmann::json::parse(TargetsJson(targets, {"a", "b"}));
  EXPECT_EQ(json["not_checked"], nlohmann::json({"a", "b"}));
  EXPECT_EQ(json["reached"], false);
  EXPECT_EQ(json["targets"][0]["reached"], true);
  EXPECT_EQ(json["targets"][1]["value"], "2.5");
}

TEST(ServerCpuTest, IsThatOfTheProcessThatListens) {
  while (CpuSeconds() < 0.1) {
  }
  const client::FakeAttention server;
  const auto seconds = ServerCpu(server.address()).seconds();
  ASSERT_TRUE(seconds);
  EXPECT_GE(*seconds, 0.09);
  EXPECT_LE(*seconds, CpuSeconds() + 0.1);  // the kernel counts both in its own way
}

TEST(ServerCpuTest, AlsoOfAUnixSocket) {
  const std::string path = testing::TempDir() + "attend_cpu_" + std::to_string(getpid());
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const int socket_fd = socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(bind(socket_fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_FALSE(ServerCpu("unix:" + path).seconds());  // nobody listens yet
  ASSERT_EQ(listen(socket_fd, 1), 0);
  EXPECT_TRUE(ServerCpu("unix:" + path).seconds());
  close(socket_fd);
  unlink(path.c_str());
}

TEST(ServerCpuTest, IsUnknownElsewhere) {
  for (const char* address : {"", "127.0.0.1:1", "10.0.0.1:50051", "unix:/nowhere", "localhost"}) {
    EXPECT_FALSE(ServerCpu(address).seconds()) << address;
  }
}

}  // namespace
}  // namespace attend::cli
