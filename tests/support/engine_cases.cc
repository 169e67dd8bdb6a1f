// SPDX-License-Identifier: Apache-2.0
#include "tests/support/engine_cases.h"

#include <cstdio>
#include <cstdlib>

namespace attend {

std::vector<EngineCase> EngineCases() {
  return {{"CpuAvx512", "cpu", "avx512"}, {"CpuAvx2", "cpu", "avx2"}, {"Cuda", "cuda", "auto"}};
}

std::string WhyNotHere(const EngineCase& engine) {
  if (engine.isa == "avx512" && !__builtin_cpu_supports("avx512bw")) {
    return "the processor has no AVX-512";
  }
  if (engine.cuda()) return std::string(ChooseDevice("cuda").status().message());
  return "";
}

bool HasBf16Products(const EngineCase& engine) {
  return engine.cuda() || (engine.isa == "avx512" && __builtin_cpu_supports("avx512bf16"));
}

DType ComputeDType(const EngineCase& engine, DType weight, const std::string& compute) {
  if (compute == "fp32") return DType::kF32;
  if (engine.cuda()) return weight;
  if (weight != DType::kBF16) return DType::kF32;
  return compute == "bf16" ? DType::kBF16 : DType::kUnspecified;
}

DType AttendDType(const EngineCase& engine, DType kv, DType layer_compute,
                  const std::string& compute) {
  if (compute == "fp32") return DType::kF32;
  if (!engine.cuda()) {
    // Under I8 weights it is what BF16 weights would compute in.
    const bool bf16 =
        layer_compute == DType::kBF16 || (layer_compute == DType::kI8 && compute == "bf16");
    const bool dot = bf16 && (kv == DType::kBF16 || kv == DType::kI8);
    return dot ? DType::kBF16 : DType::kF32;
  }
  const bool tensor_cores = layer_compute == DType::kUnspecified || layer_compute == kv;
  return tensor_cores ? kv : DType::kF32;
}

std::unique_ptr<AttentionEngine> MakeTestEngine(const EngineCase& engine,
                                                const std::string& compute, int threads,
                                                const std::string& weight_dtype) {
  EngineOptions options;
  options.weight_dtype = weight_dtype;
  options.device = engine.device;
  options.isa = engine.isa;
  options.compute = compute;
  options.threads = threads;
  options.kv_bytes = kTestKvBytes / 2;
  options.scratch_bytes = kTestKvBytes / 2;
  options.batch_tokens = kTestBatchTokens;
  auto made = MakeEngine(options);
  if (!made.ok()) {
    std::fprintf(stderr, "MakeEngine(%s): %s\n", engine.name.c_str(),
                 made.status().ToString().c_str());
    std::abort();
  }
  return *std::move(made);
}

void EngineTest::SetUp() {
  const std::string reason = WhyNotHere(GetParam());
  if (!reason.empty()) GTEST_SKIP() << reason;
  Restart();
}

void EngineTest::Restart(const std::string& compute, int threads, const std::string& weight_dtype) {
  engine.reset();  // a device holds one at a time
  engine = MakeTestEngine(GetParam(), compute, threads, weight_dtype);
  compute_ = compute;
  space = std::make_unique<BlockSpace>(*engine, 0, kTestKvBytes, random());
}

std::vector<DType> EngineTest::KvDTypes() const {
  std::vector<DType> dtypes{DType::kF32, DType::kBF16, DType::kF16};
  if (engine->info().keeps_i8) dtypes.push_back(DType::kI8);
  return dtypes;
}

void EngineTest::TakeBlocks(TestSequence& sequence) {
  sequence.blocks = space->Take(GeometryOf(*sequence.spec, sequence.kv_dtype), sequence.keys,
                                sequence.block_tokens);
}

void EngineTest::Run(std::vector<TestSequence>& sequences, int layer) {
  space->Reset();
  std::vector<AttendItem> items;
  for (TestSequence& sequence : sequences) {
    TakeBlocks(sequence);
    items.push_back(sequence.Whole());
    items.back().group = static_cast<int32_t>(items.size() - 1);
  }
  ASSERT_THAT(RunBatch(*engine, layer, *sequences[0].spec, sequences[0].kv_dtype, items), IsOk());
}

void EngineTest::Compare(const TestSequence& sequence, const ReferenceResult& expected) {
  SCOPED_TRACE(testing::Message() << "rows " << sequence.rows << ", keys " << sequence.keys
                                  << ", causal " << sequence.causal);
  EXPECT_TRUE(
      MatchesReference(sequence.output.dtype, sequence.output.bytes.data(), expected.output));
  const int64_t cells = sequence.rows * sequence.keys;
  for (size_t i = 0; i < sequence.weight_heads.size(); ++i) {
    BoundedRows wanted(sequence.rows, sequence.keys);
    const auto first = sequence.weight_heads[i] * cells;
    for (int64_t cell = 0; cell < cells; ++cell) {
      wanted.value[cell] = expected.weights.value[first + cell];
      wanted.error[cell] = expected.weights.error[first + cell];
    }
    EXPECT_TRUE(MatchesReference(DType::kF32, &sequence.weights[i * cells], wanted))
        << "attention weights of head " << sequence.weight_heads[i];
  }
}

void EngineTest::RunAndCompare(std::vector<TestSequence>& sequences, int layer,
                               const LayerWeights& weights, DType compute) {
  Run(sequences, layer);
  for (const TestSequence& sequence : sequences) {
    Compare(sequence, Expected(sequence, weights, compute));
  }
}

ReferenceResult EngineTest::Expected(const TestSequence& sequence, const LayerWeights& weights,
                                     DType compute) const {
  ReferenceNumerics numerics;
  numerics.kv_dtype = sequence.kv_dtype;
  numerics.compute_dtype = compute;
  numerics.attend_dtype =
      AttendDType(GetParam(), sequence.kv_dtype,
                  sequence.spec->raw() ? DType::kUnspecified : compute, compute_);
  numerics.scale_first = !GetParam().cuda();
  numerics.tf32 = compute_ == "tf32";
  return ReferenceAttention(*sequence.spec, weights, numerics, sequence.Reference());
}

}  // namespace attend
