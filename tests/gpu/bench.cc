// SPDX-License-Identifier: Apache-2.0
//
// attend-gpu-bench: times the engine on whole batches through the seam that the runtime uses, next
// to the device's ceilings measured in the same run. Cases run as those of attend-bench
// (tests/bench/case_run.h). Some rows of every raw case are computed again
// in double precision, so that a fast wrong answer is not a result.
//
//   attend-gpu-bench [--device=cuda] [--small] [--json=FILE]
//
// Exit code 0: all cases ran and were right. 1: one failed or was wrong. 2: no engine for the
// device.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/util/status_macros.h"
#include "tests/gpu/bench_report.h"
#include "tests/gpu/ceilings.h"
#include "tests/support/test_batches.h"

namespace attend::gpu {
namespace {

using bench::BenchCase;
using bench::Bound;

constexpr bench::Effort kEffort{.warm_ups = 3, .repeats = 11};

// ---- Cases ----

BenchCase Case(std::string name, const AttentionSpec& spec, DType dtype, int64_t sequences,
               int64_t rows, int64_t keys) {
  BenchCase bench;
  bench.name = std::move(name);
  bench.spec = spec;
  bench.dtype = bench.kv_dtype = bench.weight_dtype = dtype;
  bench.sequences = bench::Sequences(sequences, rows, keys);
  return bench;
}

// Attention alone, of whole sequences (kOperations) or of a row over cached keys (kBytes).
BenchCase RawCase(std::string name, Bound bound, bool causal, int q_heads, int kv_heads,
                  int head_dim, int64_t sequences, int64_t rows, int64_t keys, double bar = 0,
                  double goal = 0) {
  BenchCase bench = Case(std::move(name), PlainSpec(0, q_heads, kv_heads, head_dim, head_dim),
                         DType::kBF16, sequences, rows, keys);
  bench.spec.causal = causal;
  bench.bound = bound;
  bench.bar = bar;
  bench.goal = goal;
  return bench;
}

BenchCase LayerCase(std::string name, DType dtype, bool causal, int d_model, int q_heads,
                    int kv_heads, int64_t sequences, int64_t rows) {
  const int head_dim = d_model / q_heads;
  BenchCase bench = Case(std::move(name), PlainSpec(d_model, q_heads, kv_heads, head_dim, head_dim),
                         dtype, sequences, rows, rows);
  bench.spec.causal = causal;
  if (head_dim == 128) bench.spec.rope = PlainRope(RopePairing::kHalf, head_dim);
  return bench;
}

// Bars and goals are for an H200: attention kernels built on mma.sync reach them on its siblings.
std::vector<BenchCase> Cases(bool small) {
  constexpr auto kPrefill = Bound::kOperations, kDecode = Bound::kBytes;
  if (small) {
    return {RawCase("prefill, width 32", kPrefill, false, 2, 1, 32, 2, 70, 70),
            RawCase("prefill, width 32, causal", kPrefill, true, 2, 1, 32, 1, 70, 130),
            RawCase("decode, 4 heads share keys", kDecode, true, 4, 1, 32, 3, 1, 600),
            LayerCase("layer", DType::kBF16, true, 64, 4, 2, 2, 20)};
  }
  return {
      RawCase("prefill, width 128", kPrefill, false, 16, 16, 128, 2, 8192, 8192, 330e12, 370e12),
      RawCase("prefill, width 128, causal", kPrefill, true, 16, 16, 128, 2, 8192, 8192, 300e12,
              335e12),
      RawCase("prefill, width 128, 32 / 8 heads", kPrefill, true, 32, 8, 128, 4, 2048, 2048),
      RawCase("prefill, width 64", kPrefill, false, 32, 32, 64, 2, 8192, 8192),
      RawCase("prefill, width 256", kPrefill, false, 8, 8, 256, 2, 8192, 8192),
      RawCase("decode, 32 / 8 heads", kDecode, true, 32, 8, 128, 64, 1, 8192, 3.6e12, 3.9e12),
      RawCase("decode, 32 / 32 heads", kDecode, true, 32, 32, 128, 16, 1, 8192, 3.6e12, 3.9e12),
      RawCase("decode, 32 / 8 heads, short", kDecode, true, 32, 8, 128, 64, 1, 512),
      RawCase("decode, 32 / 8 heads, alone", kDecode, true, 32, 8, 128, 1, 1, 32768),
      LayerCase("Transformer base", DType::kBF16, false, 512, 8, 8, 1, 512),
      LayerCase("BERT-base", DType::kBF16, false, 768, 12, 12, 1, 128),
      LayerCase("BERT-base", DType::kBF16, false, 768, 12, 12, 8, 128),
      LayerCase("BERT-base, float32", DType::kF32, false, 768, 12, 12, 8, 128),
      LayerCase("GPT-2 medium", DType::kBF16, true, 1024, 16, 16, 1, 1024),
      LayerCase("LLaMA-7B", DType::kBF16, true, 4096, 32, 32, 1, 512),
      LayerCase("32 / 8 heads of 128", DType::kBF16, true, 4096, 32, 8, 1, 512),
  };
}

// ---- All cases ----

struct Settings {
  std::string device = "cuda";
  bool small = false;
  std::string json;
};

absl::StatusOr<std::unique_ptr<AttentionEngine>> Open(const Settings& settings,
                                                      const std::vector<BenchCase>& cases) {
  EngineOptions options;
  options.device = settings.device;
  options.threads = 2;
  options.scratch_bytes = int64_t{1} << 20;
  for (const BenchCase& bench : cases) {
    options.kv_bytes = std::max(options.kv_bytes, bench::KvMemory(bench));
    options.batch_tokens = std::max(options.batch_tokens, bench.rows());
  }
  return MakeEngine(options);
}

// Rounding to 16 bits of inputs' products, of weights and of the output; float32 is far below it.
constexpr double kLargestError = 2e-2;

absl::StatusOr<CaseResult> RunCase(AttentionEngine& engine, const BenchCase& bench,
                                   const std::vector<LayerInfo>& layers) {
  bench::CaseRun run(engine, bench, layers, 1);
  RETURN_IF_ERROR(run.FillCaches());
  CaseResult result{bench, {}};
  ASSIGN_OR_RETURN(result.times, bench::Measure(run, bench.sets, kEffort));
  if (!run.OutputIsFinite()) {
    return absl::InternalError(bench.name + ": wrong, an output is not finite");
  }
  if (!bench.spec.raw()) return result;
  const double error = run.SampledError();
  if (!(error <= kLargestError)) {
    return absl::InternalError(bench.name + ": wrong, relative error " + std::to_string(error));
  }
  return result;
}

absl::StatusOr<std::vector<CaseResult>> RunCases(AttentionEngine& engine,
                                                 const std::vector<BenchCase>& cases) {
  std::vector<std::vector<LayerInfo>> layers;  // all before the first batch
  for (const BenchCase& bench : cases) {
    ASSIGN_OR_RETURN(auto added, bench::AddLayers(engine, bench, 3));
    layers.push_back(std::move(added));
  }
  std::vector<CaseResult> results;
  for (size_t i = 0; i < cases.size(); ++i) {
    ASSIGN_OR_RETURN(CaseResult result, RunCase(engine, cases[i], layers[i]));
    results.push_back(std::move(result));
  }
  return results;
}

int Fail(const absl::Status& status, int code) {
  std::fprintf(stderr, "attend-gpu-bench: %s\n", status.ToString().c_str());
  return code;
}

int Main(const Settings& settings) {
  const std::vector<BenchCase> cases = Cases(settings.small);
  Ceilings ceilings;
  auto engine = Open(settings, cases);
  if (!engine.ok()) return Fail(engine.status(), 2);
  const EngineInfo& info = (*engine)->info();
  if (info.engine == "cuda") {
    const auto measured = settings.small ? MeasureCeilings(int64_t{1} << 20, 64)
                                         : MeasureCeilings(int64_t{4} << 30, 8192);
    if (!measured.ok()) return Fail(measured.status(), 1);
    ceilings = *measured;
  }
  const auto results = RunCases(**engine, cases);
  if (!results.ok()) return Fail(results.status(), 1);
  const std::string device = info.device + " (" + info.engine + ", " + info.isa + ")";
  std::fputs(ReportTable(device, ceilings, *results).c_str(), stdout);
  if (settings.json.empty()) return 0;
  std::ofstream file(settings.json);
  file << ReportJson(device, ceilings, *results);
  return file.flush() ? 0 : Fail(absl::UnknownError("can't write " + settings.json), 1);
}

}  // namespace
}  // namespace attend::gpu

int main(int count, char** arguments) {
  attend::gpu::Settings settings;
  for (int i = 1; i < count; ++i) {
    const std::string_view argument = arguments[i];
    if (argument == "--small") {
      settings.small = true;
    } else if (argument.starts_with("--device=")) {
      settings.device = argument.substr(9);
    } else if (argument.starts_with("--json=")) {
      settings.json = argument.substr(7);
    } else {
      std::fprintf(stderr, "attend-gpu-bench [--device=cuda] [--small] [--json=FILE]\n");
      return 2;
    }
  }
  return attend::gpu::Main(settings);
}
