// SPDX-License-Identifier: Apache-2.0
//
// attend-bench: the CPU engine alone, without gRPC, beside the limits of the cores it runs on.
// Chooses the cases, runs one after the other, prints as it goes.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <regex>

#include "server/machine.h"
#include "tests/bench/cases.h"
#include "tests/bench/flags.h"
#include "tests/bench/report.h"
#include "tests/bench/run_case.h"

namespace attend::bench {
namespace {

// Reads of the probe beyond this say nothing more about memory.
constexpr int64_t kMostReadBytes = int64_t{800} << 20;

// A batch of more takes seconds.
constexpr int64_t kMostQuickRows = 16384;

int Fail(const std::string& message, int code) {
  std::fprintf(stderr, "attend-bench: %s\n", message.c_str());
  return code;
}

RunOptions RunOptionsOf(const Flags& flags) {
  RunOptions options{.isa = flags.isa, .compute = flags.compute, .threads = flags.threads};
  if (flags.quick) {
    options.repeats = 3;
    options.least_repeats = 3;
    options.most_seconds = 0.3;
    options.least_seconds = 0.02;
    options.tries = 1;
  } else {
    options.least_seconds = 0.25;
  }
  if (flags.repeats > 0) {
    options.repeats = flags.repeats;
    options.most_seconds = 1e9;
    options.least_seconds = 0;
  }
  return options;
}

std::vector<BenchCase> ChosenCases(const Flags& flags, const CaseOptions& options) {
  std::vector<BenchCase> cases = AllCases(options);
  const std::regex pattern(flags.cases);
  std::erase_if(cases, [&](const BenchCase& bench) {
    if (flags.cases.empty() && flags.check) return !IsTargetCase(bench.name);
    if (flags.cases.empty()) return flags.quick && bench.rows() > kMostQuickRows;
    return !std::regex_search(bench.name, pattern);
  });
  return cases;
}

// On a terminal: which case runs, replaced by its row.
class Progress {
 public:
  explicit Progress(size_t cases) : cases_(cases), terminal_(isatty(STDERR_FILENO) != 0) {}
  void Begin(const std::string& name) {
    ++begun_;
    if (!terminal_) return;
    std::fprintf(stderr, "\r[%zu/%zu] %s\033[K", begun_, cases_, name.c_str());
  }
  void End() const {
    if (terminal_) std::fputs("\r\033[K", stderr);
  }

 private:
  const size_t cases_;
  const bool terminal_;
  size_t begun_ = 0;
};

// What the engine says of itself, before there are cases.
absl::StatusOr<EngineInfo> ReadEngineInfo(const RunOptions& options) {
  BenchCase nothing;
  nothing.spec.output_width = 1;
  const auto engine = OpenEngine(options, nothing);
  if (!engine.ok()) return engine.status();
  return (*engine)->info();
}

int RunAll(const Flags& flags, const EngineInfo& engine, const std::vector<BenchCase>& cases,
           int64_t memory_bytes) {
  std::ofstream json;
  if (!flags.json.empty()) {
    json.open(flags.json);
    if (!json) return Fail("--json: can't write " + flags.json, 2);
  }
  BenchMachine machine;
  machine.engine = engine;
  machine.cores = AllowedCores(flags.threads);
  RunOnCores(machine.cores);
  LimitProbe probe(machine.cores, engine.isa == "avx512");
  machine.read_bytes = int64_t{1} << 20;
  for (const BenchCase& bench : cases) {
    machine.read_bytes = std::max(machine.read_bytes, StreamedBytes(bench));
  }
  machine.read_bytes = std::min({machine.read_bytes, kMostReadBytes, memory_bytes / 8});
  const absl::Status reserved = probe.ReserveRead(machine.read_bytes);
  if (!reserved.ok()) return Fail(std::string(reserved.message()), 1);
  machine.limits = probe.Measure({.cache_read = true, .read_bytes = machine.read_bytes});
  machine.operations_per_cycle = probe.OperationsPerCycle();
  std::fputs((HeaderText(machine) + TableHead()).c_str(), stdout);

  const RunOptions options = RunOptionsOf(flags);
  std::vector<CaseResult> results;
  Progress progress(cases.size());
  bool failed = false;
  for (const BenchCase& bench : cases) {
    progress.Begin(bench.name);
    results.push_back(RunCase(options, bench, probe));
    progress.End();
    failed = failed || !results.back().failure.empty();
    std::fputs(TableRow(results.back()).c_str(), stdout);
    std::fflush(stdout);
  }
  std::vector<TargetResult> targets;
  if (flags.check) targets = CheckTargets(results);
  for (const TargetResult& target : targets) failed = failed || !target.reached;
  if (flags.check) std::fputs(TargetsText(targets).c_str(), stdout);
  if (!flags.json.empty()) {
    json << ReportJson(machine, results, targets);
    if (!json.flush()) return Fail("--json: can't write " + flags.json, 1);
  }
  return failed ? 1 : 0;
}

int Main(int count, char** arguments) {
  const Machine machine = ReadMachine();
  const auto parsed = ParseFlags(count, arguments, machine.cores);
  if (const auto* ending = std::get_if<Ending>(&parsed)) {
    std::fputs(ending->text.c_str(), ending->code == 0 ? stdout : stderr);
    return ending->code;
  }
  const Flags& flags = std::get<Flags>(parsed);
  const auto engine = ReadEngineInfo(RunOptionsOf(flags));
  if (!engine.ok()) return Fail(std::string(engine.status().message()), 2);
  CaseOptions options{.i8 = engine->keeps_i8};
  options.cold_bytes = std::min(options.cold_bytes, machine.memory_bytes / 8);
  const std::vector<BenchCase> cases = ChosenCases(flags, options);
  if (cases.empty()) return Fail("--cases: got " + flags.cases + ", wanted what --list has", 2);
  if (flags.list) {
    for (const BenchCase& bench : cases) std::printf("%s\n", bench.name.c_str());
    return 0;
  }
  return RunAll(flags, *engine, cases, machine.memory_bytes);
}

}  // namespace
}  // namespace attend::bench

int main(int count, char** arguments) { return attend::bench::Main(count, arguments); }
