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
double Rate(double amount, double us) { return us > 0 ? amount * 1e6 / us : 0; }

bool IsDecode(const bench::BenchCase& bench) {
  return bench.spec.raw() && bench.bound == bench::Bound::kBytes;
}

// "47 %", or "-" where the ceiling was not measured.
std::string Share(double value, double ceiling) {
  return ceiling > 0 ? Text("%.0f %%", 100 * value / ceiling) : "-";
}

std::string AgainstBar(double value, const bench::BenchCase& bench, double unit) {
  if (bench.bar == 0) return "";
  const char* verdict = value >= bench.goal  ? "reaches the goal"
                        : value >= bench.bar ? "reaches the bar"
                                             : "below the bar";
  return Text("  %s (bar %.3g, goal %.3g)", verdict, bench.bar / unit, bench.goal / unit);
}

std::string Row(const CaseResult& result, const Ceilings& ceilings) {
  const bench::BenchCase& bench = result.bench;
  const bench::CaseTimes& times = result.times;
  const bench::SequenceShape& shape = bench.sequences.front();  // all are alike
  std::string row =
      Text("%-34s %4zu x %6lld over %6lld %10.0f us", bench.name.c_str(), bench.sequences.size(),
           static_cast<long long>(shape.rows), static_cast<long long>(shape.keys), times.attend_us);
  if (IsDecode(bench)) {
    const double rate = Rate(bench::KvBytes(bench), times.attend_us);
    row += Text(" %7.2f TB/s   %s of copy", rate / 1e12,
                Share(rate, ceilings.copy_bytes_per_second).c_str());
    if (ceilings.copy_bytes_per_second > 0 && rate > 0) {
      row += Text(", %.2f x its byte floor", ceilings.copy_bytes_per_second / rate);
    }
    return row + AgainstBar(rate, bench, 1e12);
  }
  const double rate = Rate(bench::AttentionOperations(bench), times.attend_us);
  row += Text(" %7.1f TFLOP/s %s of matmul", rate / 1e12,
              Share(rate, ceilings.matmul_flops_per_second).c_str());
  if (bench.spec.raw()) return row + AgainstBar(rate, bench, 1e12);
  const double projected_us = times.project_us + times.output_us;
  const double projected = Rate(bench::ProjectionOperations(bench), projected_us);
  return row + Text("; project %.0f + output %.0f us, %.1f TFLOP/s; with copies %.0f us",
                    times.project_us, times.output_us, projected / 1e12, times.wall_us.median);
}

}  // namespace

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
    const bench::BenchCase& bench = result.bench;
    const bench::CaseTimes& times = result.times;
    nlohmann::ordered_json entry{{"name", bench.name},
                                 {"dtype", DTypeName(bench.dtype)},
                                 {"sequences", bench.sequences.size()},
                                 {"rows", bench.sequences.front().rows},
                                 {"keys", bench.sequences.front().keys},
                                 {"project_us", times.project_us},
                                 {"attend_us", times.attend_us},
                                 {"output_us", times.output_us},
                                 {"wall_us", times.wall_us.median}};
    if (IsDecode(bench)) {
      entry["kv_bytes_per_second"] = Rate(bench::KvBytes(bench), times.attend_us);
    } else {
      entry["attention_flops_per_second"] =
          Rate(bench::AttentionOperations(bench), times.attend_us);
    }
    if (!bench.spec.raw()) {
      entry["projection_flops_per_second"] =
          Rate(bench::ProjectionOperations(bench), times.project_us + times.output_us);
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
