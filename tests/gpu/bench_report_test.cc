// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/bench_report.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tests/support/test_batches.h"

namespace attend::gpu {
namespace {

using testing::HasSubstr;
using testing::Not;

BenchCase Raw(CaseKind kind, int q_heads, int kv_heads, int head_dim, int v_head_dim) {
  BenchCase bench{.name = "case", .kind = kind, .spec = {}};
  bench.spec = PlainSpec(0, q_heads, kv_heads, head_dim, v_head_dim);
  return bench;
}

TEST(BenchReportTest, FlopsCountTwoProductsOverTheVisibleKeys) {
  BenchCase bench = Raw(CaseKind::kPrefill, 16, 16, 128, 128);
  bench.sequences = 2;
  bench.rows = bench.keys = 8192;
  EXPECT_DOUBLE_EQ(AttentionFlops(bench), 4.0 * 8192 * 8192 * 128 * 16 * 2);
  bench.spec.causal = true;
  EXPECT_DOUBLE_EQ(AttentionFlops(bench), 4.0 * (8192.0 * 8193 / 2) * 128 * 16 * 2);
  bench.spec.v_head_dim = 64;
  EXPECT_DOUBLE_EQ(AttentionFlops(bench), 2.0 * (8192.0 * 8193 / 2) * 192 * 16 * 2);
  bench.spec.window = 1;
  EXPECT_DOUBLE_EQ(AttentionFlops(bench), 2.0 * 8192 * 192 * 16 * 2);
}

TEST(BenchReportTest, RowsEndAtTheLastKey) {
  BenchCase bench = Raw(CaseKind::kDecode, 1, 1, 1, 1);
  bench.spec.causal = true;
  bench.rows = 2;
  bench.keys = 10;  // rows see 9 and 10 keys
  EXPECT_DOUBLE_EQ(AttentionFlops(bench), 4.0 * 19);
}

TEST(BenchReportTest, KvBytesCountEveryKeyAndValueOnce) {
  BenchCase bench = Raw(CaseKind::kDecode, 32, 8, 128, 128);
  bench.sequences = 64;
  bench.keys = 8192;
  EXPECT_DOUBLE_EQ(KvBytes(bench), 2147483648.0);
  bench.dtype = DType::kF32;
  EXPECT_DOUBLE_EQ(KvBytes(bench), 2 * 2147483648.0);
}

TEST(BenchReportTest, ProjectionsOfAGroupedLayer) {
  BenchCase bench{.name = "layer", .kind = CaseKind::kLayer, .spec = {}};
  bench.spec = PlainSpec(4096, 32, 8, 128, 128);
  bench.sequences = 1;
  bench.rows = bench.keys = 512;
  EXPECT_DOUBLE_EQ(ProjectionFlops(bench), 2.0 * 512 * 4096 * (4096 + 2 * 1024 + 4096));
}

TEST(BenchReportTest, MedianIsTheLowerMiddle) {
  EXPECT_EQ(Median({}), 0);
  EXPECT_EQ(Median({7}), 7);
  EXPECT_EQ(Median({9, 1}), 1);
  EXPECT_EQ(Median({9, 1, 5}), 5);
}

CaseResult Decode(int64_t attend_us) {
  CaseResult result{Raw(CaseKind::kDecode, 32, 8, 128, 128), {{0, attend_us, 0}, 900}};
  result.bench.sequences = 64;
  result.bench.keys = 8192;
  result.bench.bar = 3.6e12;
  result.bench.goal = 3.9e12;
  return result;
}

TEST(BenchReportTest, TableGivesRatesSharesAndVerdicts) {
  const Ceilings ceilings{4.3e12, 790e12};
  CaseResult prefill{Raw(CaseKind::kPrefill, 16, 16, 128, 128), {{0, 1000, 0}, 5000}};
  prefill.bench.rows = prefill.bench.keys = 8192;
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
  CaseResult layer{BenchCase{.name = "layer", .kind = CaseKind::kLayer, .spec = {}}, {}};
  layer.bench.spec = PlainSpec(4096, 32, 8, 128, 128);
  layer.bench.rows = layer.bench.keys = 512;
  layer.times = {{60, 20, 40}, 300};
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
