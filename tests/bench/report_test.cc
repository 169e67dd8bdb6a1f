// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/report.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tests/support/test_batches.h"

namespace attend::bench {
namespace {

using testing::HasSubstr;
using testing::Not;

// A layer of round numbers: 2 x 10^9 operations of projections, 64 x 64 keys of attention.
CaseResult Layer(double median_us) {
  CaseResult result;
  result.bench.name = "layer/case/f32";
  result.bench.spec = PlainSpec(1000, 10, 10, 100, 100);
  result.bench.sequences = Sequences(1, 250, 250);
  result.times.samples = 11;
  result.times.wall_us = {median_us, median_us * 0.9, median_us * 1.5, median_us * 0.95,
                          median_us * 1.05};
  result.before.fma = result.after.fma = 1e12;
  result.before.read = result.after.read = 1e10;
  return result;
}

CaseResult Decode(double median_us) {
  CaseResult result = Layer(median_us);
  result.bench.name = "decode/case/f32";
  result.bench.bound = Bound::kBytes;
  result.bench.sequences = Sequences(1, 1, 1000);
  return result;
}

double Operations() { return 2.0 * 250 * 1000 * 4000 + 4.0 * 250 * 250 * 1000; }

TEST(ResultTest, ShareOfOperationsIsTheirTimeAtTheLimit) {
  const CaseResult result = Layer(10000);
  EXPECT_DOUBLE_EQ(OperationsRate(result), Operations() / 0.01);
  ASSERT_TRUE(ShareOfLimit(result).has_value());
  EXPECT_NEAR(*ShareOfLimit(result), Operations() / 0.01 / 1e12, 1e-12);
  EXPECT_EQ(LimitName(result), "fma");
}

TEST(ResultTest, PhasesOfDifferentOperandsHaveTheirOwnLimits) {
  CaseResult result = Layer(10000);
  result.compute = DType::kBF16;
  EXPECT_FALSE(ShareOfLimit(result).has_value());  // dot was not measured
  result.before.dot = result.after.dot = 2e12;
  const double least = 2.0 * 250 * 1000 * 4000 / 2e12 + 4.0 * 250 * 250 * 1000 / 1e12;
  EXPECT_NEAR(*ShareOfLimit(result), least / 0.01, 1e-12);
  EXPECT_EQ(LimitName(result), "dot + fma");
}

TEST(ResultTest, ShareOfBytesIsTheirRateOfTheReadBandwidth) {
  const CaseResult result = Decode(4000);
  const double bytes = 4.0 * (4 * 1000 * 1000 + 2 * 1000 * 1000);
  EXPECT_DOUBLE_EQ(BytesRate(result), bytes / 0.004);
  EXPECT_NEAR(*ShareOfLimit(result), bytes / 0.004 / 1e10, 1e-12);
  EXPECT_EQ(LimitName(result), "read");
}

TEST(ResultTest, FloorIsTheSlowerOfComputingAndReadingInEachPhase) {
  // 250 rows: 1.5e9 operations are 1.5 ms, 12 MB + 1 MB of rows 1.3 ms; attention 0.25 ms, 2 MB 0.2
  // ms; output 0.5 ms, 4 MB + 1 MB 0.5 ms.
  EXPECT_NEAR(FloorSeconds(Layer(1)), 1.5e-3 + 0.25e-3 + 0.5e-3, 1e-9);
  // One row: bytes alone.
  const double rows = 4.0 * 1000;
  EXPECT_NEAR(FloorSeconds(Decode(1)), (4.0 * 6e6 + 2 * rows) / 1e10, 1e-9);
  CaseResult unknown = Layer(1);
  unknown.after.read = 0;
  EXPECT_EQ(FloorSeconds(unknown), 0);
}

TEST(ResultTest, NoShareWhenTheLimitMovedByMoreThanTenPercent) {
  CaseResult result = Layer(10000);
  result.after.fma = 0.92e12;
  EXPECT_TRUE(ShareOfLimit(result).has_value());
  result.after.fma = 0.90e12;
  EXPECT_FALSE(ShareOfLimit(result).has_value());
  EXPECT_THAT(TableRow(result), HasSubstr("limit moved 11 %"));
  EXPECT_THAT(TableRow(result), Not(HasSubstr("% of fma")));
  result.after.fma = 1.2e12;
  EXPECT_FALSE(ShareOfLimit(result).has_value());
  // The bandwidth is not this case's limit, but it is that of decoding.
  result = Layer(10000);
  result.after.read = 2e10;
  EXPECT_TRUE(ShareOfLimit(result).has_value());
  result = Decode(4000);
  result.after.read = 2e10;
  EXPECT_FALSE(ShareOfLimit(result).has_value());
  result = Decode(4000);
  result.after.fma = 1;
  EXPECT_TRUE(ShareOfLimit(result).has_value());
}

TEST(ResultTest, LimitsAreMeansOfBoth) {
  const Limits mean = Mean({.fma = 2, .dot = 4, .int8 = 0, .read = 6, .cache_read = 8},
                           {.fma = 4, .dot = 4, .int8 = 5, .read = 8, .cache_read = 8});
  EXPECT_EQ(mean.fma, 3);
  EXPECT_EQ(mean.dot, 4);
  EXPECT_EQ(mean.int8, 0);  // not measured before
  EXPECT_EQ(mean.read, 7);
  EXPECT_EQ(mean.cache_read, 8);
  EXPECT_EQ(Moved(2, 4), 2);
  EXPECT_EQ(Moved(4, 2), 2);
  EXPECT_EQ(Moved(0, 2), 1);
}

TEST(ReportTest, RowHoldsTheFigures) {
  CaseResult result = Layer(10000);
  result.times.project_us = 6000;
  result.times.attend_us = 3000;
  result.times.output_us = 1000;
  result.peak_bytes = 20 << 20;
  result.work_bytes = 5 << 20;
  const std::string row = TableRow(result);
  for (const char* part : {"layer/case/f32", "10.000", "9.000", "10.0 %", "225.0 GFLOP/s",
                           "22.5 % of fma", "2.250", "6.000", "3.000", "1.000", "20.0", "5.0"}) {
    EXPECT_THAT(row, HasSubstr(part));
  }
  EXPECT_THAT(TableRow(Decode(4000)), HasSubstr("6.00 GB/s"));
  EXPECT_THAT(TableRow(Decode(4000)), HasSubstr("60.0 % of read"));
}

TEST(ReportTest, WithoutTimesAndLimitsNothingIsDividedByZero) {
  CaseResult result = Layer(0);
  result.before = result.after = {};
  const std::string row = TableRow(result) + TableRow(CaseResult{});
  EXPECT_THAT(row, HasSubstr("limit not measured"));
  EXPECT_THAT(row, Not(HasSubstr("inf")));
  EXPECT_THAT(row, Not(HasSubstr("nan")));
  result.failure = "failed: no memory";
  EXPECT_THAT(TableRow(result), HasSubstr("failed: no memory"));
}

TEST(ReportTest, JsonHoldsTheFiguresOfTheTable) {
  BenchMachine machine;
  machine.cores = {0, 3};
  machine.engine.device = "a processor";
  machine.engine.threads = 2;
  machine.operations_per_cycle = 63.9;
  CaseResult moved = Layer(10000);
  moved.after.fma = 2e12;
  CaseResult failed;
  failed.bench.name = "broken";
  failed.failure = "failed: why";
  const auto report = nlohmann::json::parse(
      ReportJson(machine, {Layer(10000), moved, failed}, {{"a target", ">= 1", "0.5", false}}));
  EXPECT_EQ(report["device"], "a processor");
  EXPECT_EQ(report["cores"], (std::vector<int>{0, 3}));
  ASSERT_EQ(report["cases"].size(), 3u);
  EXPECT_DOUBLE_EQ(report["cases"][0]["median_ms"], 10);
  EXPECT_NEAR(report["cases"][0]["share_of_limit"], 0.225, 1e-9);
  EXPECT_DOUBLE_EQ(report["cases"][0]["operations"], Operations());
  EXPECT_DOUBLE_EQ(report["cases"][0]["tokens_per_second"], 250 / 0.01);
  EXPECT_TRUE(report["cases"][1]["share_of_limit"].is_null());
  EXPECT_DOUBLE_EQ(report["cases"][1]["limit_moved"], 2);
  EXPECT_EQ(report["cases"][2]["failure"], "failed: why");
  EXPECT_EQ(report["targets"][0]["reached"], false);
}

// ---- Targets ----

CaseResult Named(std::string name, double share) {
  CaseResult result = Layer(10000);
  result.bench.name = std::move(name);
  result.before.fma = result.after.fma = OperationsRate(result) / share;
  return result;
}

const TargetResult* Find(const std::vector<TargetResult>& targets, const std::string& what) {
  for (const TargetResult& target : targets) {
    if (target.what == what) return &target;
  }
  return nullptr;
}

bool Reached(const std::vector<CaseResult>& results, const std::string& what) {
  const auto targets = CheckTargets(results);
  const TargetResult* target = Find(targets, what);
  EXPECT_NE(target, nullptr) << what;
  return target != nullptr && target->reached;
}

TEST(TargetsTest, AShareOfTheLimit) {
  EXPECT_TRUE(Reached({Named("layer/bert-base/128/f32", 0.925)}, "layer/bert-base/128/f32"));
  EXPECT_FALSE(Reached({Named("layer/bert-base/128/f32", 0.915)}, "layer/bert-base/128/f32"));
  EXPECT_TRUE(Reached({Named("layer/gpt2-medium/1024/f32", 0.825)}, "layer/gpt2-medium/1024/f32"));
  EXPECT_FALSE(Reached({Named("layer/gpt2-medium/1024/f32", 0.81)}, "layer/gpt2-medium/1024/f32"));
}

TEST(TargetsTest, AMovedLimitAFailedAndAMissingCaseReachNothing) {
  CaseResult moved = Named("layer/bert-base/128/f32", 0.99);
  moved.after.fma *= 2;
  EXPECT_FALSE(Reached({moved}, "layer/bert-base/128/f32"));
  CaseResult failed = Named("layer/bert-base/128/f32", 0.99);
  failed.failure = "failed";
  EXPECT_FALSE(Reached({failed}, "layer/bert-base/128/f32"));
  EXPECT_FALSE(Reached({}, "layer/bert-base/128/f32"));
}

TEST(TargetsTest, BF16IsComparedWithDotWhereThatIsFastElseWithFp32) {
  CaseResult bf16 = Named("layer/gpt2-medium/1024/bf16", 1);
  bf16.compute = bf16.attend = DType::kBF16;
  bf16.before.dot = bf16.after.dot = OperationsRate(bf16) / 0.71;
  bf16.before.fma = bf16.after.fma = bf16.after.dot / 2;
  EXPECT_TRUE(Reached({bf16}, "layer/gpt2-medium/1024/bf16"));
  bf16.before.dot = bf16.after.dot = OperationsRate(bf16) / 0.69;
  EXPECT_FALSE(Reached({bf16}, "layer/gpt2-medium/1024/bf16"));

  const std::string slow = "layer/gpt2-medium/1024/bf16, dot is slow here";
  bf16.before.fma = bf16.after.fma = bf16.after.dot;
  CaseResult f32 = Named("layer/gpt2-medium/1024/f32", 0.9);
  f32.times.wall_us.median = bf16.times.wall_us.median;
  EXPECT_TRUE(Reached({bf16, f32}, slow));
  f32.times.wall_us.median = bf16.times.wall_us.median * 0.98;
  EXPECT_FALSE(Reached({bf16, f32}, slow));
}

TEST(TargetsTest, ManyHeadsBesideFew) {
  CaseResult many = Layer(1090), few = Layer(1000);
  many.bench.name = "layer/bert-base/8x128/f32";
  few.bench.name = "layer/bert-1-head/8x128/f32";
  EXPECT_TRUE(Reached({many, few}, "12 heads of 64 beside one of 768/f32"));
  many.times.wall_us.median = 1110;
  EXPECT_FALSE(Reached({many, few}, "12 heads of 64 beside one of 768/f32"));
}

TEST(TargetsTest, MemoryGrowsWithTheRows) {
  CaseResult longest = Layer(1), shorter = Layer(1);
  longest.bench.name = "long/transformer-base/32768/f32";
  longest.bench.sequences = Sequences(1, 32768, 32768);
  longest.work_bytes = 8000;
  shorter.bench.name = "long/transformer-base/4096/f32";
  shorter.bench.sequences = Sequences(1, 4096, 4096);
  shorter.work_bytes = 1000;
  const std::string what = "memory, " + longest.bench.name + " beside " + shorter.bench.name;
  EXPECT_TRUE(Reached({longest, shorter}, what));
  longest.work_bytes = 11000;
  EXPECT_FALSE(Reached({longest, shorter}, what));
  shorter.work_bytes = 0;
  EXPECT_FALSE(Reached({longest, shorter}, what));
}

TEST(TargetsTest, AnOddShapeBesideItsNeighbour) {
  const std::string what = "odd/bert-base/8x127/f32 beside layer/bert-base/8x128/f32";
  const CaseResult neighbour = Named("layer/bert-base/8x128/f32", 0.9);
  EXPECT_TRUE(Reached({Named("odd/bert-base/8x127/f32", 0.77), neighbour}, what));
  EXPECT_FALSE(Reached({Named("odd/bert-base/8x127/f32", 0.76), neighbour}, what));
  EXPECT_THAT(TargetsText(CheckTargets({neighbour})), HasSubstr("NOT reached"));
}

}  // namespace
}  // namespace attend::bench
