// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/run_case.h"

#include <algorithm>
#include <cmath>

#include "engine/cpu/cpu_info.h"
#include "engine/util/status_macros.h"
#include "tests/bench/memory_use.h"

namespace attend::bench {
namespace {

// Operands of the attention's products, by the engine's rule (engine/cpu/attention_kernel.h): bf16
// where bf16 weights would be multiplied as such and keys and values are not wider.
absl::StatusOr<DType> AttendDType(const RunOptions& options, const BenchCase& bench,
                                  DType compute) {
  const bool narrow = bench.kv_dtype == DType::kBF16 || bench.kv_dtype == DType::kI8;
  if (!narrow || compute == DType::kF32) return DType::kF32;
  const CpuInfo cpu = DetectCpu();
  ASSIGN_OR_RETURN(const CpuIsa isa, ChooseIsa(options.isa, cpu));
  return ChooseCompute(options.compute, isa, cpu);
}

absl::Status Run(const RunOptions& options, LimitProbe& probe, CaseResult& result) {
  const BenchCase& bench = result.bench;
  ReturnFreedMemory();
  ForgetPeak();
  const int64_t resident = ResidentBytes();
  ASSIGN_OR_RETURN(const auto engine, OpenEngine(options, bench));
  ASSIGN_OR_RETURN(const std::vector<LayerInfo> layers, AddLayers(*engine, bench, 1));
  result.compute = layers.front().compute_dtype;
  if ((bench.weight_dtype == DType::kI8) != (result.compute == DType::kI8)) {
    return absl::UnimplementedError(std::string("the engine computes in ") +
                                    DTypeName(result.compute));
  }
  ASSIGN_OR_RETURN(result.attend, AttendDType(options, bench, result.compute));
  CaseRun run(*engine, bench, layers, 2);
  RETURN_IF_ERROR(run.FillCaches());
  ReturnFreedMemory();
  const int64_t ready = ResidentBytes();
  ForgetPeak();

  const LimitsWanted wanted{.dot = result.compute != DType::kF32,
                            .int8 = result.compute == DType::kI8,
                            .read_bytes = StreamedBytes(bench)};
  // The first batch makes workspaces, primitives and KV memory, and says how often the case fits.
  ASSIGN_OR_RETURN(const StepTimes first, run.Step(0));
  const double round_seconds = first.wall_us / 1e6 * bench.sets;
  Effort effort{.warm_ups = 2,
                .repeats = options.repeats,
                .most_seconds = options.most_seconds,
                .least_repeats = options.least_repeats};
  if (round_seconds > options.most_seconds / 4) effort.warm_ups = bench.sets > 1 ? 1 : 0;
  const double more = std::ceil(options.least_seconds / std::max(round_seconds, 1e-6));
  effort.repeats = std::max(effort.repeats, static_cast<int>(std::min(more, 1000.0)));
  for (int left = options.tries; left > 0; --left) {
    result.before = probe.Measure(wanted);
    ASSIGN_OR_RETURN(result.times, Measure(run, bench.sets, effort));
    result.after = probe.Measure(wanted);
    if (LimitsMoved(result) <= kMostMoved) break;
    effort.warm_ups = 0;
  }
  if (!run.OutputIsFinite()) return absl::InternalError("an output is not finite");
  const int64_t peak = PeakResidentBytes();
  result.peak_bytes = std::max<int64_t>(0, peak - resident);
  result.work_bytes = std::max<int64_t>(0, peak - ready);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<AttentionEngine>> OpenEngine(const RunOptions& options,
                                                            const BenchCase& bench) {
  EngineOptions engine;
  engine.device = "cpu";
  engine.isa = options.isa;
  engine.compute = options.compute;
  engine.threads = options.threads;
  if (bench.weight_dtype == DType::kI8) engine.weight_dtype = "i8";
  engine.kv_bytes = KvMemory(bench);
  engine.scratch_bytes = int64_t{1} << 20;
  engine.batch_tokens = std::max(engine.batch_tokens, bench.rows());
  return MakeEngine(engine);
}

int64_t StreamedBytes(const BenchCase& bench) {
  return static_cast<int64_t>(StoredBytes(bench)) * bench.sets;
}

CaseResult RunCase(const RunOptions& options, const BenchCase& bench, LimitProbe& probe) {
  CaseResult result;
  result.bench = bench;
  const absl::Status status = Run(options, probe, result);
  if (!status.ok()) result.failure = "failed: " + std::string(status.message());
  return result;
}

}  // namespace attend::bench
