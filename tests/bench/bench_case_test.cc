// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/bench_case.h"

#include <gtest/gtest.h>

#include <set>

#include "tests/bench/cases.h"
#include "tests/bench/targets.h"
#include "tests/support/test_batches.h"

namespace attend::bench {
namespace {

BenchCase Case(const AttentionSpec& spec, DType dtype, std::vector<SequenceShape> sequences) {
  BenchCase bench;
  bench.spec = spec;
  bench.dtype = bench.kv_dtype = bench.weight_dtype = dtype;
  bench.sequences = std::move(sequences);
  return bench;
}

TEST(BenchCaseTest, OperationsAreTwoProductsOverTheVisibleKeys) {
  BenchCase bench = Case(PlainSpec(0, 16, 16, 128, 128), DType::kBF16, Sequences(2, 8192, 8192));
  EXPECT_DOUBLE_EQ(AttentionOperations(bench), 4.0 * 8192 * 8192 * 128 * 16 * 2);
  bench.spec.causal = true;
  EXPECT_DOUBLE_EQ(AttentionOperations(bench), 4.0 * (8192.0 * 8193 / 2) * 128 * 16 * 2);
  bench.spec.v_head_dim = 64;
  EXPECT_DOUBLE_EQ(AttentionOperations(bench), 2.0 * (8192.0 * 8193 / 2) * 192 * 16 * 2);
  bench.spec.window = 1;
  EXPECT_DOUBLE_EQ(AttentionOperations(bench), 2.0 * 8192 * 192 * 16 * 2);
}

TEST(BenchCaseTest, RowsEndAtTheLastKeyAndSequencesAddUp) {
  BenchCase bench = Case(PlainSpec(0, 1, 1, 1, 1), DType::kF32, {{2, 10}, {1, 5}});
  bench.spec.causal = true;  // rows see 9 and 10 keys, and 5
  EXPECT_DOUBLE_EQ(AttentionOperations(bench), 4.0 * 24);
  EXPECT_EQ(bench.rows(), 3);
}

TEST(BenchCaseTest, KvBytesCountEveryKeyAndValueOnceAndI8ItsScales) {
  BenchCase bench = Case(PlainSpec(0, 32, 8, 128, 128), DType::kBF16, Sequences(64, 1, 8192));
  EXPECT_DOUBLE_EQ(KvBytes(bench), 2147483648.0);
  bench.kv_dtype = DType::kF32;
  EXPECT_DOUBLE_EQ(KvBytes(bench), 2 * 2147483648.0);
  bench.kv_dtype = DType::kI8;
  EXPECT_DOUBLE_EQ(KvBytes(bench), 2147483648.0 / 2 + 64.0 * 8192 * 8 * 2 * 4);
  EXPECT_DOUBLE_EQ(StoredBytes(bench), KvBytes(bench));  // raw: no weights
}

TEST(BenchCaseTest, WorkOfAGroupedLayerByPhase) {
  BenchCase bench = Case(PlainSpec(4096, 32, 8, 128, 128), DType::kBF16, Sequences(1, 512, 512));
  const CaseWork work = WorkOf(bench);
  EXPECT_DOUBLE_EQ(work.project.operations, 2.0 * 512 * 4096 * (4096 + 2 * 1024));
  EXPECT_DOUBLE_EQ(work.output.operations, 2.0 * 512 * 4096 * 4096);
  EXPECT_DOUBLE_EQ(work.attend.operations, AttentionOperations(bench));
  EXPECT_DOUBLE_EQ(ProjectionOperations(bench), 2.0 * 512 * 4096 * (4096 + 2 * 1024 + 4096));
  // Weights and rows of 2 bytes.
  EXPECT_DOUBLE_EQ(work.project.bytes, 2.0 * 4096 * (4096 + 2048) + 2.0 * 512 * 4096);
  EXPECT_DOUBLE_EQ(work.output.bytes, 2.0 * 4096 * 4096 + 2.0 * 512 * 4096);
  EXPECT_DOUBLE_EQ(work.attend.bytes, 2.0 * 512 * 2048);
  EXPECT_DOUBLE_EQ(WeightBytes(bench), 2.0 * 4096 * (4096 + 2048 + 4096));
  bench.weight_dtype = DType::kI8;
  EXPECT_DOUBLE_EQ(WeightBytes(bench),
                   1.0 * 4096 * (4096 + 2048 + 4096) + 4.0 * (4096 + 2048 + 4096));
}

TEST(BenchCaseTest, CasesHaveNamesOfTheirOwnAndValidSpecs) {
  std::set<std::string> names;
  for (const BenchCase& bench : AllCases({})) {
    EXPECT_TRUE(names.insert(bench.name).second) << bench.name;
    EXPECT_TRUE(Validate(bench.spec).ok()) << bench.name << ": " << Validate(bench.spec);
    EXPECT_FALSE(bench.sequences.empty()) << bench.name;
  }
  // What the issue names, among others.
  for (const char* name :
       {"layer/transformer-base/512/f32", "layer/bert-base/128/bf16", "layer/bert-base/8x128/f32",
        "layer/gpt2-medium/1024/bf16", "layer/llama-7b/512/f32", "layer/gqa-32-8/512/bf16",
        "decode/gqa-32-8/1x4096/bf16", "decode/gqa-32-8/32x4096/i8",
        "decode/gpt2-medium/8x1024/f32", "mixed/bert-base/2048/f32",
        "long/transformer-base/32768/f32", "odd/bert-base/8x127/bf16"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
}

TEST(BenchCaseTest, EveryCaseOfATargetExists) {
  std::set<std::string> names;
  for (const BenchCase& bench : AllCases({.i8 = false})) names.insert(bench.name);
  int targets = 0;
  for (const std::string& name : names) targets += IsTargetCase(name) ? 1 : 0;
  // A name that is in no list would leave its target unreached for ever.
  for (const TargetResult& target : CheckTargets({})) {
    EXPECT_FALSE(target.reached) << target.what;
    const std::string missing = target.value.substr(0, target.value.find(' '));
    EXPECT_TRUE(names.contains(missing)) << target.what << ": " << target.value;
  }
  EXPECT_GT(targets, 20);
}

TEST(BenchCaseTest, DecodeReadsMoreThanAnyCacheHolds) {
  const CaseOptions options{.cold_bytes = int64_t{600} << 20};
  for (const BenchCase& bench : AllCases(options)) {
    if (bench.bound != Bound::kBytes) continue;
    EXPECT_GE(StoredBytes(bench) * bench.sets, options.cold_bytes) << bench.name;
    EXPECT_LE(StoredBytes(bench) * (bench.sets - 1), options.cold_bytes) << bench.name;
  }
}

TEST(BenchCaseTest, WithoutI8NoCaseNeedsIt) {
  for (const BenchCase& bench : AllCases({.i8 = false})) {
    EXPECT_NE(bench.weight_dtype, DType::kI8) << bench.name;
    EXPECT_NE(bench.kv_dtype, DType::kI8) << bench.name;
  }
}

TEST(BenchCaseTest, MixedLengthsAddUp) {
  for (const BenchCase& bench : AllCases({})) {
    if (!bench.name.starts_with("mixed/")) continue;
    EXPECT_EQ(bench.rows(), 2048) << bench.name;
    for (const SequenceShape& shape : bench.sequences) {
      EXPECT_GE(shape.rows, 16) << bench.name;
      EXPECT_LE(shape.rows, 512) << bench.name;
    }
  }
}

}  // namespace
}  // namespace attend::bench
