// SPDX-License-Identifier: Apache-2.0
//
// Small cases through the engine, and attend-bench as a process. Nothing here depends on how long
// anything takes.
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/bench/memory_use.h"
#include "tests/bench/probe_kernels.h"
#include "tests/bench/run_case.h"
#include "tests/support/shell.h"
#include "tests/support/test_batches.h"

namespace attend::bench {
namespace {

using testing::HasSubstr;

BenchCase Small(const AttentionSpec& spec, DType dtype, std::vector<SequenceShape> sequences) {
  BenchCase bench;
  bench.name = "small";
  bench.spec = spec;
  bench.spec.causal = true;
  bench.dtype = bench.kv_dtype = bench.weight_dtype = dtype;
  bench.sequences = std::move(sequences);
  return bench;
}

CaseResult RunSmall(const BenchCase& bench) {
  LimitProbe probe(AllowedCores(1), true);
  EXPECT_TRUE(probe.ReserveRead(1 << 20).ok());
  RunOptions options;
  options.repeats = 2;
  options.tries = 1;
  return RunCase(options, bench, probe);
}

TEST(BenchRunTest, ALayerHasTimesLimitsAndMemory) {
  const CaseResult result =
      RunSmall(Small(PlainSpec(64, 4, 2, 16, 16), DType::kF32, {{20, 20}, {7, 7}}));
  EXPECT_EQ(result.failure, "");
  EXPECT_EQ(result.times.samples, 2);
  EXPECT_GT(result.times.wall_us.min, 0);
  EXPECT_GE(result.times.wall_us.max, result.times.wall_us.median);
  EXPECT_GE(result.times.wall_us.median, result.times.wall_us.min);
  EXPECT_GT(result.before.fma, 0);
  EXPECT_GT(result.after.read, 0);
  EXPECT_GT(result.peak_bytes, 0);
  EXPECT_EQ(result.compute, DType::kF32);
}

TEST(BenchRunTest, SetsOfLayersAndCachesTakeTurns) {
  BenchCase bench = Small(PlainSpec(64, 4, 2, 16, 16), DType::kBF16, {{1, 100}, {1, 65}, {3, 130}});
  bench.bound = Bound::kBytes;
  bench.sets = 3;
  const CaseResult result = RunSmall(bench);
  EXPECT_EQ(result.failure, "");
  EXPECT_EQ(result.times.samples, 6);
}

TEST(BenchRunTest, WhatTheEngineRefusesIsTheCasesFailure) {
  BenchCase bench = Small(PlainSpec(64, 4, 2, 16, 16), DType::kF32, {{1, 1}});
  LimitProbe probe(AllowedCores(1), true);
  RunOptions options;
  options.isa = "none";
  EXPECT_THAT(RunCase(options, bench, probe).failure, HasSubstr("isa"));
}

// Raw cases of both kinds, compared with double precision.
TEST(BenchRunTest, SampledErrorIsSmallAndSeesAWrongCache) {
  const BenchCase bench = Small(PlainSpec(0, 4, 2, 32, 16), DType::kF32, {{1, 200}, {5, 70}});
  const auto engine = OpenEngine({}, bench);
  ASSERT_TRUE(engine.ok());
  const auto layers = AddLayers(**engine, bench, 1);
  ASSERT_TRUE(layers.ok());
  CaseRun run(**engine, bench, *layers, 2);
  ASSERT_TRUE(run.FillCaches().ok());
  ASSERT_TRUE(run.Step(0).ok());
  EXPECT_TRUE(run.OutputIsFinite());
  EXPECT_LT(run.SampledError(), 1e-5);

  CaseRun other(**engine, bench, *layers, 3);  // other rows over the first one's cache
  ASSERT_TRUE(other.Step(0).ok());
  EXPECT_GT(other.SampledError(), 0.1);
}

TEST(BenchRunTest, QuantilesAndEffort) {
  const Quantiles none = QuantilesOf({});
  EXPECT_EQ(none.median, 0);
  const Quantiles few = QuantilesOf({9, 1, 5, 3});
  EXPECT_EQ(few.median, 3);  // the lower middle
  EXPECT_EQ(few.min, 1);
  EXPECT_EQ(few.max, 9);
  const Quantiles many = QuantilesOf({5, 1, 2, 4, 3});
  EXPECT_EQ(many.lower, 2);
  EXPECT_EQ(many.upper, 4);
}

// ---- Probes ----

TEST(ProbesTest, OperationsAreCountedByRounds) {
  const ProbeSet set = DetectProbes();
  EXPECT_EQ(RunFma256(3), 3 * 12 * 8 * 2);
  if (!set.avx512) GTEST_SKIP() << "this processor has no AVX-512";
  EXPECT_EQ(RunFma512(3), 3 * 24 * 16 * 2);
  if (set.bf16_dot) {
    EXPECT_EQ(RunBF16Dot(3), 3 * 24 * 32 * 2);
  }
  if (set.int8_dot) {
    EXPECT_EQ(RunInt8Dot(3), 3 * 24 * 64 * 2);
  }
}

TEST(ProbesTest, LimitsAreThoseAskedFor) {
  LimitProbe probe(AllowedCores(1), true);
  ASSERT_TRUE(probe.ReserveRead(1 << 20).ok());
  const Limits limits = probe.Measure({.dot = false, .int8 = false, .read_bytes = 0});
  EXPECT_GT(limits.fma, 0);
  EXPECT_EQ(limits.dot, 0);
  EXPECT_EQ(limits.int8, 0);
  EXPECT_EQ(limits.read, 0);
  EXPECT_EQ(limits.cache_read, 0);
  EXPECT_GT(probe.Measure({.cache_read = true, .read_bytes = 1 << 30}).read, 0);  // what there is
  LimitProbe narrow(AllowedCores(1), false);
  EXPECT_EQ(narrow.Measure({}).dot, 0);
}

TEST(MemoryUseTest, ThePeakIsForgotten) {
  ReturnFreedMemory();
  ForgetPeak();
  const int64_t before = PeakResidentBytes();
  // Straight from the system: the address sanitizer keeps what was freed.
  constexpr size_t kBytes = 64 << 20;
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  std::memset(memory, 1, kBytes);
  munmap(memory, kBytes);
  const int64_t peak = PeakResidentBytes();
  if (peak == 0) GTEST_SKIP() << "no VmHWM in /proc/self/status";
  EXPECT_GE(peak - before, 60 << 20);
  ReturnFreedMemory();
  ForgetPeak();
  EXPECT_LT(PeakResidentBytes() - before, 60 << 20);
}

// ---- attend-bench ----

Outcome Bench(const std::string& flags) {
  return RunShell(std::string(ATTEND_BINARY_DIR) + "/bin/attend-bench " + flags);
}

TEST(BenchProgramTest, ASmallCaseAsTableAndAsJson) {
  const auto file = std::filesystem::temp_directory_path() /
                    ("attend-bench-" + std::to_string(getpid()) + ".json");
  const Outcome outcome =
      Bench("--threads=1 --repeats=1 --cases='^layer/bert-base/128/f32$' --json=" + file.string());
  EXPECT_EQ(outcome.code, 0) << outcome.text;
  EXPECT_THAT(outcome.text, HasSubstr("layer/bert-base/128/f32"));
  EXPECT_THAT(outcome.text, HasSubstr("limits: fma "));
  std::ifstream stream(file);
  const auto report = nlohmann::json::parse(stream);
  std::filesystem::remove(file);
  EXPECT_EQ(report["threads"], 1);
  EXPECT_EQ(report["cores"].size(), 1u);
  ASSERT_EQ(report["cases"].size(), 1u);
  EXPECT_EQ(report["cases"][0]["samples"], 1);
  EXPECT_GT(report["cases"][0]["median_ms"], 0.0);
  EXPECT_GT(report["limits"]["fma_flops"], 0.0);
}

TEST(BenchProgramTest, ListHasTheCasesThatMatch) {
  const Outcome all = Bench("--list");
  EXPECT_EQ(all.code, 0);
  EXPECT_THAT(all.text, HasSubstr("decode/gqa-32-8/8x4096/bf16\n"));
  EXPECT_EQ(Bench("--list --cases='^layer/bert-base/128/f32$'").text, "layer/bert-base/128/f32\n");
}

TEST(BenchProgramTest, WrongUseIsOneLineAndExitCode2) {
  for (const char* flags : {"--isa=sse", "--cases=no-such-case", "--threads=0", "--what"}) {
    const Outcome outcome = Bench(flags);
    EXPECT_EQ(outcome.code, 2) << flags << ": " << outcome.text;
    EXPECT_EQ(std::count(outcome.text.begin(), outcome.text.end(), '\n'), 1) << outcome.text;
  }
}

TEST(BenchProgramTest, AFileThatCanNotBeWrittenIsToldBeforeAnythingRuns) {
  const Outcome outcome = Bench(
      "--threads=1 --repeats=1 --cases='^layer/bert-base/128/f32$' --json=/no/such/folder/file");
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(outcome.text, "attend-bench: --json: can't write /no/such/folder/file\n");
}

TEST(BenchProgramTest, ACheckWithoutItsCasesReachesNothing) {
  const Outcome outcome =
      Bench("--threads=1 --repeats=1 --check --cases='^layer/bert-base/128/f32$'");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.text, HasSubstr("did not run"));
  EXPECT_THAT(outcome.text, HasSubstr("NOT reached"));
}

}  // namespace
}  // namespace attend::bench
