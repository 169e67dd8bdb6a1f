// SPDX-License-Identifier: Apache-2.0
//
// attend-gpu-bench: times the engine on whole batches through the seam that the runtime uses, next
// to the device's ceilings measured in the same run. Some rows of every raw case are computed again
// in double precision, so that a fast wrong answer is not a result.
//
//   attend-gpu-bench [--device=cuda] [--small] [--json=FILE]
//
// Exit code 0: all cases ran and were right. 1: one failed or was wrong. 2: no engine for the
// device.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/util/status_macros.h"
#include "tests/gpu/bench_report.h"
#include "tests/gpu/ceilings.h"
#include "tests/gpu/random_rows.h"
#include "tests/support/test_batches.h"

namespace attend::gpu {
namespace {

constexpr int kWarmUps = 3, kRepeats = 11;

// ---- Cases ----

BenchCase RawCase(std::string name, CaseKind kind, bool causal, int q_heads, int kv_heads,
                  int head_dim, int64_t sequences, int64_t rows, int64_t keys, double bar = 0,
                  double goal = 0) {
  BenchCase bench{std::move(name),
                  kind,
                  PlainSpec(0, q_heads, kv_heads, head_dim, head_dim),
                  DType::kBF16,
                  sequences,
                  rows,
                  keys,
                  bar,
                  goal};
  bench.spec.causal = causal;
  return bench;
}

BenchCase LayerCase(std::string name, DType dtype, bool causal, int d_model, int q_heads,
                    int kv_heads, int64_t sequences, int64_t rows) {
  const int head_dim = d_model / q_heads;
  BenchCase bench{std::move(name),
                  CaseKind::kLayer,
                  PlainSpec(d_model, q_heads, kv_heads, head_dim, head_dim),
                  dtype,
                  sequences,
                  rows,
                  rows,
                  0,
                  0};
  bench.spec.causal = causal;
  if (head_dim == 128) bench.spec.rope = PlainRope(RopePairing::kHalf, head_dim);
  return bench;
}

// Bars and goals are for an H200: attention kernels built on mma.sync reach them on its siblings.
std::vector<BenchCase> Cases(bool small) {
  constexpr auto kPrefill = CaseKind::kPrefill, kDecode = CaseKind::kDecode;
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

int64_t BlocksOf(const BenchCase& bench) { return (bench.keys + kBlockTokens - 1) / kBlockTokens; }

int64_t KvMemory(const BenchCase& bench) {
  return bench.sequences * BlocksOf(bench) * GeometryOf(bench.spec, bench.dtype).BlockBytes();
}

// ---- One case ----

// The rows of one sequence; every sequence of a case has the same ones, in blocks of its own.
class CaseRun {
 public:
  CaseRun(AttentionEngine& engine, const BenchCase& bench, int layer, uint64_t seed);

  // Keys that are cached before the batch: all but the row's own when decoding.
  absl::Status FillCache();
  absl::StatusOr<CaseTimes> Measure();
  // Norm of the difference to double precision over the norm, sampled rows and heads; raw only.
  double SampledError() const;

 private:
  int64_t cached() const { return bench_.kind == CaseKind::kDecode ? bench_.keys - 1 : 0; }
  const std::byte* KeyRows(const std::vector<std::byte>& rows, int64_t first, int width) const {
    return rows.data() + first * bench_.spec.kv_heads * width * DTypeBytes(bench_.dtype);
  }
  std::vector<AttendItem> Items();
  std::vector<double> Expected(int64_t row, int head) const;

  AttentionEngine& engine_;
  const BenchCase& bench_;
  const int layer_;
  std::vector<std::byte> query_, key_, value_;
  std::vector<std::vector<int64_t>> blocks_;
  int64_t output_bytes_;           // of a sequence
  std::vector<std::byte> output_;  // all sequences
};

CaseRun::CaseRun(AttentionEngine& engine, const BenchCase& bench, int layer, uint64_t seed)
    : engine_(engine), bench_(bench), layer_(layer) {
  const AttentionSpec& spec = bench.spec;
  const int64_t query_width = spec.raw() ? int64_t{spec.q_heads} * spec.head_dim : spec.d_model;
  query_ = RandomRows(bench.dtype, bench.rows * query_width, seed);
  if (spec.raw()) {
    key_ = RandomRows(bench.dtype, bench.keys * spec.kv_heads * spec.head_dim, seed + 1);
    value_ = RandomRows(bench.dtype, bench.keys * spec.kv_heads * spec.v_head_dim, seed + 2);
  }
  output_bytes_ = bench.rows * spec.output_width * DTypeBytes(bench.dtype);
  output_.resize(static_cast<size_t>(bench.sequences * output_bytes_));
  std::vector<int64_t> places(static_cast<size_t>(bench.sequences * BlocksOf(bench)));
  for (size_t i = 0; i < places.size(); ++i) {
    places[i] = static_cast<int64_t>(i) * GeometryOf(spec, bench.dtype).BlockBytes();
  }
  Random random(seed);
  std::shuffle(places.begin(), places.end(), random);
  for (int64_t s = 0; s < bench.sequences; ++s) {
    const auto first = places.begin() + s * BlocksOf(bench);
    blocks_.emplace_back(first, first + BlocksOf(bench));
  }
}

absl::Status CaseRun::FillCache() {
  if (cached() == 0) return absl::OkStatus();
  const AttentionSpec& spec = bench_.spec;
  const KvGeometry geometry = GeometryOf(spec, bench_.dtype);
  std::vector<std::byte> canonical(
      key_.begin(), key_.begin() + (KeyRows(key_, cached(), spec.head_dim) - key_.data()));
  canonical.insert(canonical.end(), value_.begin(),
                   value_.begin() + (KeyRows(value_, cached(), spec.v_head_dim) - value_.data()));
  for (const std::vector<int64_t>& blocks : blocks_) {
    RETURN_IF_ERROR(engine_.WriteKv({geometry, blocks, 0, cached()}, canonical));
  }
  return absl::OkStatus();
}

std::vector<AttendItem> CaseRun::Items() {
  std::vector<AttendItem> items;
  for (int64_t s = 0; s < bench_.sequences; ++s) {
    AttendItem item;
    item.group = static_cast<int32_t>(s);
    item.rows = bench_.rows;
    item.query = {query_.data(), bench_.dtype};
    item.first_row = bench_.keys - bench_.rows;
    item.cached_keys = cached();
    item.new_keys = bench_.keys - cached();
    item.key_source = item.query;
    if (bench_.spec.raw()) {
      item.key_source = {KeyRows(key_, cached(), bench_.spec.head_dim), bench_.dtype};
      item.value_source = {KeyRows(value_, cached(), bench_.spec.v_head_dim), bench_.dtype};
    }
    item.causal = bench_.spec.causal;
    item.blocks = blocks_[static_cast<size_t>(s)];
    item.output = output_.data() + s * output_bytes_;
    item.output_dtype = bench_.dtype;
    items.push_back(item);
  }
  return items;
}

absl::StatusOr<CaseTimes> CaseRun::Measure() {
  const std::vector<AttendItem> items = Items();
  ASSIGN_OR_RETURN(const BatchPlan plan, BuildPlan(layer_, bench_.spec, bench_.dtype, items));
  std::vector<int64_t> project, attend, output, wall;
  for (int i = 0; i < kWarmUps + kRepeats; ++i) {
    std::fill(output_.begin(), output_.end(), std::byte{0xff});  // NaN of every type
    const auto begin = std::chrono::steady_clock::now();
    ASSIGN_OR_RETURN(const Ticket ticket, engine_.Start(plan, items));
    ASSIGN_OR_RETURN(const StageTimes stages, engine_.Wait(ticket));
    const auto time = std::chrono::steady_clock::now() - begin;
    if (i < kWarmUps) continue;
    project.push_back(stages.project_us);
    attend.push_back(stages.attend_us);
    output.push_back(stages.output_us);
    wall.push_back(std::chrono::duration_cast<std::chrono::microseconds>(time).count());
  }
  return CaseTimes{{Median(project), Median(attend), Median(output)}, Median(wall)};
}

std::vector<double> CaseRun::Expected(int64_t row, int head) const {
  const AttentionSpec& spec = bench_.spec;
  const int kv_head = head / spec.group_size();
  const int64_t position = bench_.keys - bench_.rows + row;
  const KeyRange range = VisibleKeys(spec, spec.causal, position, bench_.keys);
  const auto at = [&](const std::vector<std::byte>& rows, int64_t index) {
    return double{LoadFloat(bench_.dtype, rows.data(), index)};
  };
  std::vector<double> scores;
  for (int64_t key = range.begin; key < range.end; ++key) {
    double score = 0;
    for (int i = 0; i < spec.head_dim; ++i) {
      score += at(query_, (row * spec.q_heads + head) * spec.head_dim + i) *
               at(key_, (key * spec.kv_heads + kv_head) * spec.head_dim + i);
    }
    scores.push_back(score * spec.scale);
  }
  const double max = *std::max_element(scores.begin(), scores.end());
  std::vector<double> expected(static_cast<size_t>(spec.v_head_dim), 0.0);
  double sum = 0;
  for (int64_t key = range.begin; key < range.end; ++key) {
    const double weight = std::exp(scores[static_cast<size_t>(key - range.begin)] - max);
    sum += weight;
    for (int i = 0; i < spec.v_head_dim; ++i) {
      expected[static_cast<size_t>(i)] +=
          weight * at(value_, (key * spec.kv_heads + kv_head) * spec.v_head_dim + i);
    }
  }
  for (double& value : expected) value /= sum;
  return expected;
}

double CaseRun::SampledError() const {
  const AttentionSpec& spec = bench_.spec;
  Random random(7);
  double difference = 0, norm = 0;
  for (int sample = 0; sample < 16; ++sample) {
    // The first and the last of everything, then any.
    const int64_t row = sample == 0   ? 0
                        : sample == 1 ? bench_.rows - 1
                                      : Uniform(random, 0, bench_.rows - 1);
    const int64_t sequence =
        sample % 2 == 0 ? bench_.sequences - 1 : Uniform(random, 0, bench_.sequences - 1);
    const int head = static_cast<int>(Uniform(random, 0, spec.q_heads - 1));
    const std::vector<double> expected = Expected(row, head);
    const std::byte* output = output_.data() + sequence * output_bytes_;
    for (int i = 0; i < spec.v_head_dim; ++i) {
      const double value =
          LoadFloat(bench_.dtype, output, (row * spec.q_heads + head) * spec.v_head_dim + i);
      difference +=
          (value - expected[static_cast<size_t>(i)]) * (value - expected[static_cast<size_t>(i)]);
      norm += expected[static_cast<size_t>(i)] * expected[static_cast<size_t>(i)];
    }
  }
  return std::sqrt(difference / norm);
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
    options.kv_bytes = std::max(options.kv_bytes, KvMemory(bench));
    options.batch_tokens = std::max(options.batch_tokens, bench.sequences * bench.rows);
  }
  return MakeEngine(options);
}

// Rounding to 16 bits of inputs' products, of weights and of the output; float32 is far below it.
constexpr double kLargestError = 2e-2;

absl::StatusOr<CaseResult> RunCase(AttentionEngine& engine, const BenchCase& bench, int layer) {
  CaseRun run(engine, bench, layer, 1);
  RETURN_IF_ERROR(run.FillCache());
  CaseResult result{bench, {}};
  ASSIGN_OR_RETURN(result.times, run.Measure());
  if (bench.kind == CaseKind::kLayer) return result;
  const double error = run.SampledError();
  if (!(error <= kLargestError)) {
    return absl::InternalError(bench.name + ": wrong, relative error " + std::to_string(error));
  }
  return result;
}

absl::StatusOr<std::vector<CaseResult>> RunCases(AttentionEngine& engine,
                                                 const std::vector<BenchCase>& cases) {
  Random random(3);
  std::vector<int> layers;  // all before the first batch
  for (const BenchCase& bench : cases) {
    layers.push_back(-1);
    if (bench.kind != CaseKind::kLayer) continue;
    const TestLayer layer(random, bench.spec, bench.dtype);
    ASSIGN_OR_RETURN(const LayerInfo info, engine.AddLayer(bench.spec, layer.weights()));
    layers.back() = info.index;
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
