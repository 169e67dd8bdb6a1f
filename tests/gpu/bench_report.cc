// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/bench_report.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace attend::gpu {
namespace {

std::string Text(const char* format, auto... values) {
  char text[256];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

// Per second of the attention kernels; 0 where their time was too short to be seen.
double Rate(double amount, int64_t us) {
  return us > 0 ? amount * 1e6 / static_cast<double>(us) : 0;
}

// "47 %", or "-" where the ceiling was not measured.
std::string Share(double value, double ceiling) {
  return ceiling > 0 ? Text("%.0f %%", 100 * value / ceiling) : "-";
}

std::string AgainstBar(double value, const BenchCase& bench, double unit) {
  if (bench.bar == 0) return "";
  const char* verdict = value >= bench.goal  ? "reaches the goal"
                        : value >= bench.bar ? "reaches the bar"
                                             : "below the bar";
  return Text("  %s (bar %.3g, goal %.3g)", verdict, bench.bar / unit, bench.goal / unit);
}

std::string Row(const CaseResult& result, const Ceilings& ceilings) {
  const BenchCase& bench = result.bench;
  const StageTimes& stages = result.times.stages;
  std::string row =
      Text("%-34s %4lld x %6lld over %6lld %10lld us", bench.name.c_str(),
           static_cast<long long>(bench.sequences), static_cast<long long>(bench.rows),
           static_cast<long long>(bench.keys), static_cast<long long>(stages.attend_us));
  if (bench.kind == CaseKind::kDecode) {
    const double rate = Rate(KvBytes(bench), stages.attend_us);
    row += Text(" %7.2f TB/s   %s of copy", rate / 1e12,
                Share(rate, ceilings.copy_bytes_per_second).c_str());
    if (ceilings.copy_bytes_per_second > 0 && rate > 0) {
      row += Text(", %.2f x its byte floor", ceilings.copy_bytes_per_second / rate);
    }
    return row + AgainstBar(rate, bench, 1e12);
  }
  const double rate = Rate(AttentionFlops(bench), stages.attend_us);
  row += Text(" %7.1f TFLOP/s %s of matmul", rate / 1e12,
              Share(rate, ceilings.matmul_flops_per_second).c_str());
  if (bench.kind == CaseKind::kPrefill) return row + AgainstBar(rate, bench, 1e12);
  const int64_t projected_us = stages.project_us + stages.output_us;
  const double projected = Rate(ProjectionFlops(bench), projected_us);
  return row + Text("; project %lld + output %lld us, %.1f TFLOP/s; with copies %lld us",
                    static_cast<long long>(stages.project_us),
                    static_cast<long long>(stages.output_us), projected / 1e12,
                    static_cast<long long>(result.times.wall_us));
}

}  // namespace

double AttentionFlops(const BenchCase& bench) {
  double pairs = 0;  // (row, visible key)
  for (int64_t row = 0; row < bench.rows; ++row) {
    const int64_t position = bench.keys - bench.rows + row;
    const KeyRange range = VisibleKeys(bench.spec, bench.spec.causal, position, bench.keys);
    pairs += static_cast<double>(range.end - range.begin);
  }
  return 2.0 * pairs * bench.spec.q_heads * (bench.spec.head_dim + bench.spec.v_head_dim) *
         static_cast<double>(bench.sequences);
}

double KvBytes(const BenchCase& bench) {
  const KvGeometry geometry = GeometryOf(bench.spec, bench.dtype);
  return static_cast<double>(bench.sequences * bench.keys * geometry.TokenBytes());
}

double ProjectionFlops(const BenchCase& bench) {
  const AttentionSpec& spec = bench.spec;
  const double q = double{1} * spec.q_heads * spec.head_dim * spec.d_model;
  const double kv =
      double{1} * spec.kv_heads * (spec.head_dim + spec.v_head_dim) * spec.context_width;
  const double o = double{1} * spec.output_width * spec.q_heads * spec.v_head_dim;
  return 2 * static_cast<double>(bench.sequences * bench.rows) * (q + kv + o);
}

int64_t Median(std::vector<int64_t> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + (static_cast<std::ptrdiff_t>(values.size()) - 1) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string ReportTable(const std::string& device, const Ceilings& ceilings,
                        const std::vector<CaseResult>& results) {
  std::string table = device + "\n";
  if (ceilings.copy_bytes_per_second > 0) {
    table += Text("copy, device to device: %.2f TB/s (bytes read and written)\n",
                  ceilings.copy_bytes_per_second / 1e12);
  }
  if (ceilings.matmul_flops_per_second > 0) {
    table +=
        Text("matrix product, bfloat16: %.0f TFLOP/s\n", ceilings.matmul_flops_per_second / 1e12);
  }
  table += Text("%-34s %28s %13s\n", "case", "sequences x rows over keys", "attention");
  for (const CaseResult& result : results) table += Row(result, ceilings) + "\n";
  return table;
}

std::string ReportJson(const std::string& device, const Ceilings& ceilings,
                       const std::vector<CaseResult>& results) {
  nlohmann::ordered_json report;
  report["device"] = device;
  report["copy_bytes_per_second"] = ceilings.copy_bytes_per_second;
  report["matmul_flops_per_second"] = ceilings.matmul_flops_per_second;
  report["cases"] = nlohmann::ordered_json::array();
  for (const CaseResult& result : results) {
    const BenchCase& bench = result.bench;
    const StageTimes& stages = result.times.stages;
    nlohmann::ordered_json entry{{"name", bench.name},
                                 {"dtype", DTypeName(bench.dtype)},
                                 {"sequences", bench.sequences},
                                 {"rows", bench.rows},
                                 {"keys", bench.keys},
                                 {"project_us", stages.project_us},
                                 {"attend_us", stages.attend_us},
                                 {"output_us", stages.output_us},
                                 {"wall_us", result.times.wall_us}};
    if (bench.kind == CaseKind::kDecode) {
      entry["kv_bytes_per_second"] = Rate(KvBytes(bench), stages.attend_us);
    } else {
      entry["attention_flops_per_second"] = Rate(AttentionFlops(bench), stages.attend_us);
    }
    if (bench.kind == CaseKind::kLayer) {
      entry["projection_flops_per_second"] =
          Rate(ProjectionFlops(bench), stages.project_us + stages.output_us);
    }
    if (bench.bar > 0) {
      entry["bar"] = bench.bar;
      entry["goal"] = bench.goal;
    }
    report["cases"].push_back(std::move(entry));
  }
  return report.dump(2) + "\n";
}

}  // namespace attend::gpu
