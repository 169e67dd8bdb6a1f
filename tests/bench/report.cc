// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/report.h"

#include <cstdio>
#include <nlohmann/json.hpp>

namespace attend::bench {
namespace {

std::string Text(const char* format, auto... values) {
  char text[256];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

double Megabytes(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// "12.3", "-" of 0.
std::string Figure(double value, const char* format) {
  return value > 0 ? Text(format, value) : "-";
}

// Between the quarters, of the median.
double Spread(const Quantiles& times) {
  return times.median > 0 ? (times.upper - times.lower) / times.median : 0;
}

std::string Rate(const CaseResult& result) {
  return result.bench.bound == Bound::kBytes ? Text("%8.2f GB/s   ", BytesRate(result) / 1e9)
                                             : Text("%8.1f GFLOP/s", OperationsRate(result) / 1e9);
}

std::string ShareText(const CaseResult& result) {
  const auto share = ShareOfLimit(result);
  if (share) return Text("%5.1f %% of %-10s", 100 * *share, LimitName(result).c_str());
  const double moved = LimitsMoved(result);
  if (moved > kMostMoved)
    return Text("%-21s", Text("limit moved %.0f %%", 100 * (moved - 1)).c_str());
  return Text("%-21s", "limit not measured");
}

nlohmann::ordered_json LimitsJson(const Limits& limits) {
  return {{"fma_flops", limits.fma},
          {"dot_flops", limits.dot},
          {"int8_ops", limits.int8},
          {"read_bytes_per_second", limits.read},
          {"cache_read_bytes_per_second", limits.cache_read}};
}

nlohmann::ordered_json CaseJson(const CaseResult& result) {
  const BenchCase& bench = result.bench;
  nlohmann::ordered_json json{{"name", bench.name}};
  if (!result.failure.empty()) {
    json["failure"] = result.failure;
    return json;
  }
  const Quantiles& wall = result.times.wall_us;
  json["sequences"] = bench.sequences.size();
  json["rows"] = bench.rows();
  json["sets"] = bench.sets;
  json["compute_dtype"] = DTypeName(result.compute);
  json["attend_dtype"] = DTypeName(result.attend);
  json["kv_dtype"] = DTypeName(bench.kv_dtype);
  json["weight_dtype"] = DTypeName(bench.weight_dtype);
  json["samples"] = result.times.samples;
  json["median_ms"] = wall.median / 1e3;
  json["min_ms"] = wall.min / 1e3;
  json["max_ms"] = wall.max / 1e3;
  json["quarters_ms"] = {wall.lower / 1e3, wall.upper / 1e3};
  json["project_ms"] = result.times.project_us / 1e3;
  json["attend_ms"] = result.times.attend_us / 1e3;
  json["output_ms"] = result.times.output_us / 1e3;
  json["operations"] = WorkOf(bench).operations();
  json["stored_bytes"] = StoredBytes(bench);
  const double seconds = wall.median / 1e6;
  json["tokens_per_second"] = seconds > 0 ? static_cast<double>(bench.rows()) / seconds : 0;
  json["flops_per_second"] = OperationsRate(result);
  json["stored_bytes_per_second"] = BytesRate(result);
  json["limit"] = LimitName(result);
  const auto share = ShareOfLimit(result);
  json["share_of_limit"] = share ? nlohmann::ordered_json(*share) : nlohmann::ordered_json();
  json["limit_moved"] = LimitsMoved(result);
  json["floor_ms"] = FloorSeconds(result) * 1e3;
  json["limits_before"] = LimitsJson(result.before);
  json["limits_after"] = LimitsJson(result.after);
  json["peak_bytes"] = result.peak_bytes;
  json["work_bytes"] = result.work_bytes;
  return json;
}

}  // namespace

std::string HeaderText(const BenchMachine& machine) {
  std::string text = Text("%s, %s, %d threads on cores", machine.engine.device.c_str(),
                          machine.engine.isa.c_str(), machine.engine.threads);
  for (const int core : machine.cores) text += Text(" %d", core);
  text += Text(", %s\n", machine.engine.numerics_id.c_str());
  const Limits& limits = machine.limits;
  text += "limits: fma " + Figure(limits.fma / 1e9, "%.0f GFLOP/s");
  text += " (" + Figure(machine.operations_per_cycle, "%.1f") + " a cycle and core), dot ";
  text += Figure(limits.dot / 1e9, "%.0f GFLOP/s") + ", int8 ";
  text += Figure(limits.int8 / 1e9, "%.0f Gop/s") + ", read ";
  text +=
      Figure(limits.read / 1e9, "%.1f GB/s") + Text(" of %.0f MiB", Megabytes(machine.read_bytes));
  text += ", cache " + Figure(limits.cache_read / 1e9, "%.0f GB/s") + "\n";
  return text;
}

std::string TableHead() {
  return Text("%-36s %9s %9s %7s %16s  %-21s %9s %9s %9s %9s %8s %8s\n", "case", "ms", "least",
              "spread", "useful", "share of the limit", "floor", "project", "attend", "output",
              "peak MiB", "work MiB");
}

std::string TableRow(const CaseResult& result) {
  std::string row = Text("%-36s ", result.bench.name.c_str());
  if (!result.failure.empty()) return row + result.failure + "\n";
  const Quantiles& wall = result.times.wall_us;
  row += Text("%9.3f %9.3f %5.1f %%    ", wall.median / 1e3, wall.min / 1e3, 100 * Spread(wall));
  row += Rate(result) + "  " + ShareText(result);
  row += Text(" %9s", Figure(FloorSeconds(result) * 1e3, "%.3f").c_str());
  row += Text(" %9.3f %9.3f %9.3f", result.times.project_us / 1e3, result.times.attend_us / 1e3,
              result.times.output_us / 1e3);
  return row + Text(" %8.1f %8.1f\n", Megabytes(result.peak_bytes), Megabytes(result.work_bytes));
}

std::string TargetsText(const std::vector<TargetResult>& targets) {
  std::string text = Text("\n%-64s %-40s %-24s %s\n", "target", "wanted", "value", "verdict");
  for (const TargetResult& target : targets) {
    text += Text("%-64s %-40s %-24s %s\n", target.what.c_str(), target.wanted.c_str(),
                 target.value.c_str(), target.reached ? "reached" : "NOT reached");
  }
  return text;
}

std::string ReportJson(const BenchMachine& machine, const std::vector<CaseResult>& results,
                       const std::vector<TargetResult>& targets) {
  nlohmann::ordered_json report{{"device", machine.engine.device},
                                {"isa", machine.engine.isa},
                                {"numerics_id", machine.engine.numerics_id},
                                {"threads", machine.engine.threads},
                                {"cores", machine.cores},
                                {"read_bytes", machine.read_bytes},
                                {"fma_operations_per_cycle", machine.operations_per_cycle},
                                {"limits", LimitsJson(machine.limits)}};
  report["cases"] = nlohmann::ordered_json::array();
  for (const CaseResult& result : results) report["cases"].push_back(CaseJson(result));
  for (const TargetResult& target : targets) {
    report["targets"].push_back({{"what", target.what},
                                 {"wanted", target.wanted},
                                 {"value", target.value},
                                 {"reached", target.reached}});
  }
  return report.dump(2) + "\n";
}

}  // namespace attend::bench
