// SPDX-License-Identifier: Apache-2.0
//
// The engines of this build as parameters of one test suite, and the fixture that makes one. An
// engine is added here once and then has to pass every contract test.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "engine/attention_engine.h"
#include "tests/support/matchers.h"
#include "tests/support/test_batches.h"

namespace attend {

struct EngineCase {
  std::string name;  // of the test instance
  std::string device;
  std::string isa;  // CUDA: "auto", whatever the device is

  bool cuda() const { return device == "cuda"; }

  friend std::ostream& operator<<(std::ostream& stream, const EngineCase& engine) {
    return stream << engine.name;
  }
};

std::vector<EngineCase> EngineCases();
// Why this machine cannot run the case; empty when it can.
std::string WhyNotHere(const EngineCase& engine);
// Whether the case has BF16 products; `compute` "bf16" is refused elsewhere.
bool HasBf16Products(const EngineCase& engine);

// Type of the products of a layer with weights of `weight` under `compute`; unspecified where the
// engine chooses (CPU, BF16 weights, "auto").
DType ComputeDType(const EngineCase& engine, DType weight, const std::string& compute);
// Type of attention's products over KV of `kv`, in a layer that computes in `layer_compute` or in
// raw attention (unspecified).
DType AttendDType(const EngineCase& engine, DType kv, DType layer_compute,
                  const std::string& compute);
// Whether rows have the same bits in whatever pieces they come. CUDA promises it for equal calls,
// alone and in any batch: how a call's rows share tiles decides the order of its sums.
inline bool SameBitsInPieces(const EngineCase& engine) { return !engine.cuda(); }
inline std::string EngineCaseName(const testing::TestParamInfo<EngineCase>& info) {
  return info.param.name;
}

// KV memory of every test engine: half session memory, half scratch.
inline constexpr int64_t kTestKvBytes = int64_t{32} << 20;
// No test has more rows or new keys in a batch.
inline constexpr int64_t kTestBatchTokens = 1 << 14;

std::unique_ptr<AttentionEngine> MakeTestEngine(const EngineCase& engine,
                                                const std::string& compute = "auto",
                                                int threads = 2,
                                                const std::string& weight_dtype = "auto");

// A fresh engine per test; `space` covers its whole KV memory.
class EngineTest : public testing::TestWithParam<EngineCase> {
 protected:
  void SetUp() override;
  void Restart(const std::string& compute = "auto", int threads = 2,
               const std::string& weight_dtype = "auto");
  // What the engine can keep keys and values in.
  std::vector<DType> KvDTypes() const;

  // Runs the sequences whole, as one batch in fresh blocks, and compares outputs and asked
  // attention weights with the oracle's. Raw sequences: layer -1, no weights.
  void RunAndCompare(std::vector<TestSequence>& sequences, int layer = -1,
                     const LayerWeights& weights = {}, DType compute = DType::kF32);
  // What this engine owes for a sequence through a layer that computes in `compute`.
  ReferenceResult Expected(const TestSequence& sequence, const LayerWeights& weights = {},
                           DType compute = DType::kF32) const;
  // Only runs.
  void Run(std::vector<TestSequence>& sequences, int layer = -1);
  void Compare(const TestSequence& sequence, const ReferenceResult& expected);
  void TakeBlocks(TestSequence& sequence);

  std::unique_ptr<AttentionEngine> engine;
  std::unique_ptr<BlockSpace> space;
  Random random{20240607};

 private:
  std::string compute_;  // the engine's option
};

}  // namespace attend
