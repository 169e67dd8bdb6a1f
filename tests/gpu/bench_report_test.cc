// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/bench_report.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tests/support/test_batches.h"

namespace attend::gpu {
namespace {

using testing::HasSubstr;
using testing::Not;

using bench::BenchCase;
using bench::Bound;

BenchCase Case(const AttentionSpec& spec, Bound bound, int64_t sequences, int64_t rows,
               int64_t keys) {
  BenchCase bench;
  bench.name = "case";
  bench.spec = spec;
  bench.dtype = bench.kv_dtype = bench.weight_dtype = DType::kBF16;
  bench.bound = bound;
  bench.sequences = bench::Sequences(sequences, rows, keys);
  return bench;
}

bench::CaseTimes Times(double project_us, double attend_us, double output_us, double wall_us) {
  bench::CaseTimes times;
  times.wall_us.median = wall_us;
  times.project_us = project_us;
  times.attend_us = attend_us;
  times.output_us = output_us;
  return times;
}

CaseResult Decode(double attend_us) {
  CaseResult result{Case(PlainSpec(0, 32, 8, 128, 128), Bound::kBytes, 64, 1, 8192),
                    Times(0, attend_us, 0, 900)};
  result.bench.bar = 3.6e12;
  result.bench.goal = 3.9e12;
  return result;
}

TEST(BenchReportTest, TableGivesRatesSharesAndVerdicts) {
  const Ceilings ceilings{4.3e12, 790e12};
  CaseResult prefill{Case(PlainSpec(0, 16, 16, 128, 128), Bound::kOperations, 1, 8192, 8192),
                     Times(0, 1000, 0, 5000)};
  prefill.bench.bar = 330e12;
  prefill.bench.goal = 370e12;
  const std::string table = ReportTable("a device", ceilings, {Decode(600), Decode(500), prefill});
  EXPECT_THAT(table, HasSubstr("a device\n"));
  EXPECT_THAT(table, HasSubstr("4.30 TB/s"));
  EXPECT_THAT(table, HasSubstr("790 TFLOP/s"));
  // 2^31 bytes in 600 us.
  EXPECT_THAT(table, HasSubstr("3.58 TB/s   83 % of copy, 1.20 x its byte floor  below the bar"));
  EXPECT_THAT(table, HasSubstr("4.29 TB/s   100 % of copy, 1.00 x its byte floor  reaches the goal"
                               " (bar 3.6, goal 3.9)"));
  // 4 x 8192^2 x 128 x 16 in 1 ms.
  EXPECT_THAT(table, HasSubstr("549.8 TFLOP/s 70 % of matmul  reaches the goal (bar 330"));
}

TEST(BenchReportTest, WithoutCeilingsAndTimesNothingIsDividedByZero) {
  const std::string table = ReportTable("a device", {}, {Decode(0)});
  EXPECT_THAT(table, HasSubstr("0.00 TB/s   - of copy  below the bar"));
  EXPECT_THAT(table, Not(HasSubstr("floor")));
  EXPECT_THAT(table, Not(HasSubstr("inf")));
  EXPECT_THAT(table, Not(HasSubstr("nan")));
}

TEST(BenchReportTest, JsonHoldsTheFiguresOfTheTable) {
  const CaseResult layer{Case(PlainSpec(4096, 32, 8, 128, 128), Bound::kOperations, 1, 512, 512),
                         Times(60, 20, 40, 300)};
  const auto report =
      nlohmann::json::parse(ReportJson("a device", {4.3e12, 790e12}, {Decode(600), layer}));
  EXPECT_EQ(report["device"], "a device");
  EXPECT_EQ(report["copy_bytes_per_second"], 4.3e12);
  ASSERT_EQ(report["cases"].size(), 2u);
  EXPECT_DOUBLE_EQ(report["cases"][0]["kv_bytes_per_second"], 2147483648.0 / 600e-6);
  EXPECT_EQ(report["cases"][0]["bar"], 3.6e12);
  EXPECT_EQ(report["cases"][1]["attend_us"], 20);
  EXPECT_EQ(report["cases"][1]["wall_us"], 300);
  EXPECT_DOUBLE_EQ(report["cases"][1]["projection_flops_per_second"],
                   2.0 * 512 * 4096 * (4096 + 2 * 1024 + 4096) / 100e-6);
  EXPECT_FALSE(report["cases"][1].contains("bar"));
}

}  // namespace
}  // namespace attend::gpu
