// SPDX-License-Identifier: Apache-2.0
#include "client/cli/bench/check.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <utility>

#include "client/cli/bench/format.h"

namespace attend::cli {
namespace {

constexpr double kMostOfEcho = 1.10;  // times the echo's round trip, beside computation
constexpr double kLeastOfCeiling = 0.90;
constexpr double kMostIdleMs = 1.5;
constexpr double kLeastOfEngineDecoding = 0.90;
constexpr double kLeastOfEngineMixed = 0.85;
constexpr double kMostAppendRatio = 2;
constexpr double kMostPrefillRatio = 1.25;

constexpr int64_t kManyClients = 16;
constexpr LengthRange kMixedLengths{.first = 16, .last = 512};
constexpr int64_t kContexts[] = {kPrefillTokens, 65536};
constexpr size_t kDecodeLayers = 32;

double Us(const LatencyHistogram& times, double share = 0.5) {
  return static_cast<double>(times.PercentileNs(share)) / 1e3;
}

std::string LoadName(const LoadReport& report) {
  const Bench& bench = report.bench;
  return bench.model + ", " + LengthRangeText(bench.flags.tokens) + " tokens, " +
         std::to_string(bench.workers) + (bench.workers == 1 ? " client" : " clients");
}

// A load with failures or without answers says nothing; `kind` is one that it must have.
std::optional<std::string> FaultOf(const LoadReport& report, Kind kind) {
  if (const int64_t failed = TotalOf(report.stats.failed); failed > 0) {
    return std::to_string(failed) +
           " failed: " + report.stats.failed.begin()->second.first_message.substr(0, 160);
  }
  if (report.stats.of(kind).latency.count() > 0) return std::nullopt;
  return std::string("no ") + KindName(kind) + " was answered";
}

Target Unreached(Target target, const std::string& value) {
  target.value = value;
  return target;
}

}  // namespace

Target RoundTripTarget(const LoadReport& report) {
  Target target{.what = "round trip: " + LoadName(report),
                .wanted = Format("<= computation + %.2f x echo", kMostOfEcho)};
  for (const Kind kind : {Kind::kRequest, Kind::kEcho}) {
    if (auto fault = FaultOf(report, kind)) return Unreached(std::move(target), *fault);
  }
  const RequestStats& requests = report.stats.of(Kind::kRequest);
  const double round_trip = Us(requests.latency);
  const double compute = Us(requests.compute);
  const double echo = Us(report.stats.of(Kind::kEcho).latency);
  target.value = Format("%.0f us = %.0f + %.2f x %.0f", round_trip, compute,
                        (round_trip - compute) / echo, echo);
  target.reached = round_trip <= compute + kMostOfEcho * echo;
  return target;
}

Target CeilingTarget(const LoadReport& report, double compute_us, int threads, int cores) {
  Target target{.what = "throughput: " + LoadName(report),
                .wanted = Format(">= %.0f %% of %d cores over computation and echo",
                                 100 * kLeastOfCeiling, cores)};
  for (const Kind kind : {Kind::kRequest, Kind::kEcho}) {
    if (auto fault = FaultOf(report, kind)) return Unreached(std::move(target), *fault);
  }
  const auto echoes = static_cast<double>(report.stats.of(Kind::kEcho).latency.count());
  if (!report.echo_cpu_seconds) {
    return Unreached(std::move(target), "no processor time of an echo server on this host");
  }
  const double echo_us = 1e6 * (*report.echo_cpu_seconds + report.echo_client_cpu_seconds) / echoes;
  const double ceiling = 1e6 * cores / (compute_us * threads + echo_us);
  const double seconds = report.kind_seconds[static_cast<size_t>(Kind::kRequest)];
  const double rate =
      static_cast<double>(report.stats.of(Kind::kRequest).latency.count()) / seconds;
  target.value = Format("%.1f %%: %.0f of %.0f = %d / (%d x %.0f us + %.0f us) a second",
                        100 * rate / ceiling, rate, ceiling, cores, threads, compute_us, echo_us);
  target.reached = rate >= kLeastOfCeiling * ceiling;
  return target;
}

Target IdleTarget(const LoadReport& report) {
  Target target{.what = "after a second of silence: " + LoadName(report),
                .wanted = Format("<= busy median + %.1f ms", kMostIdleMs)};
  for (const Kind kind : {Kind::kRequest, Kind::kIdle}) {
    if (auto fault = FaultOf(report, kind)) return Unreached(std::move(target), *fault);
  }
  const double busy = Us(report.stats.of(Kind::kRequest).latency) / 1e3;
  const double idle = Us(report.stats.of(Kind::kIdle).latency) / 1e3;
  target.value = Format("%+.3f ms: %.3f, busy %.3f", idle - busy, idle, busy);
  target.reached = idle - busy <= kMostIdleMs;
  return target;
}

Target ThroughputTarget(const LoadReport& report, double engine) {
  const Bench& bench = report.bench;
  const bool decoding = bench.flags.decode_loop;
  const double least = decoding ? kLeastOfEngineDecoding : kLeastOfEngineMixed;
  Target target{.what = decoding ? Format("decode loop: %s, %zu layers x %ld sessions, %ld streams",
                                          bench.model.c_str(), bench.layers.size(),
                                          bench.flags.sessions, bench.workers)
                                 : "mixed lengths: " + LoadName(report),
                .wanted = Format(">= %.0f %% of the engine's tokens/s", 100 * least) +
                          (engine > 0 ? "" : " while it computes")};
  if (auto fault = FaultOf(report, decoding ? Kind::kStep : Kind::kRequest)) {
    return Unreached(std::move(target), *fault);
  }
  const auto tokens =
      static_cast<double>(report.stats.of(decoding ? Kind::kStep : Kind::kRequest).tokens);
  const RequestStats& calls = report.stats.of(decoding ? Kind::kLayerCall : Kind::kRequest);
  if (decoding) engine /= static_cast<double>(bench.layers.size());  // a step is a call of each
  if (engine == 0 && calls.engine_us > 0) engine = 1e6 * tokens / calls.engine_us;
  const double rate = tokens / report.seconds;
  target.value =
      Format("%.1f %%: %.0f of %.0f", engine > 0 ? 100 * rate / engine : 0, rate, engine);
  target.reached = engine > 0 && rate >= least * engine;
  return target;
}

Target FairnessTarget(const LoadReport& report) {
  Target target{.what = Format("fairness: %s, prefills of %ld tokens", report.bench.model.c_str(),
                               report.bench.flags.prompt),
                .wanted = Format("p99 of appends <= %g x, or prefills <= %g x", kMostAppendRatio,
                                 kMostPrefillRatio)};
  for (const Kind kind : {Kind::kAppend, Kind::kAppendBusy, Kind::kPrefill, Kind::kPrefillBusy}) {
    if (auto fault = FaultOf(report, kind)) return Unreached(std::move(target), *fault);
  }
  const auto of = [&](Kind kind, double share) { return Us(report.stats.of(kind).latency, share); };
  const double appends = of(Kind::kAppendBusy, 0.99) / of(Kind::kAppend, 0.99);
  const double prefills = of(Kind::kPrefillBusy, 0.5) / of(Kind::kPrefill, 0.5);
  target.value = Format("appends x %.2f, prefills x %.2f", appends, prefills);
  target.reached = appends <= kMostAppendRatio || prefills <= kMostPrefillRatio;
  return target;
}

std::vector<std::string> NotChecked(const BenchFlags& flags, int threads, size_t layers) {
  std::vector<std::string> reasons = {
      threads == 1 ? "engine on a core of its own (where threads run can't be seen from here)"
                   : Format("engine with --threads=1 on a core of its own (it has %d)", threads)};
  const size_t rates = flags.engine_tokens_per_second.size();
  if (rates < 2) {
    reasons.push_back(Format("attend-bench's tokens/s %s (no --engine_tokens_per_second)",
                             rates == 0 ? "on mixed lengths and decoding" : "decoding"));
  }
  if (layers > 0 && layers != kDecodeLayers) {
    reasons.push_back(
        Format("decoding on %zu layers (the model has %zu that fit)", kDecodeLayers, layers));
  }
  if (flags.prompt > 0) {
    reasons.push_back(Format("fairness at %ld and %ld tokens (--prompt asked for %ld)",
                             kContexts[0], kContexts[1], flags.prompt));
  }
  return reasons;
}

std::string TargetsText(const std::vector<Target>& targets,
                        const std::vector<std::string>& not_checked) {
  const char* format = "%-64s  %-52s  %-56s  %s\n";
  std::string text = Format(format, "target", "wanted", "value", "verdict");
  for (const Target& target : targets) {
    text += Format(format, target.what.c_str(), target.wanted.c_str(), target.value.c_str(),
                   target.reached ? "reached" : "NOT reached");
  }
  const char* before = "not checked: ";
  for (const std::string& reason : not_checked) {
    text += before + reason;
    before = "; ";
  }
  return text + (not_checked.empty() ? "" : "\n");
}

std::string TargetsJson(const std::vector<Target>& targets,
                        const std::vector<std::string>& not_checked) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  bool reached = true;
  for (const Target& target : targets) {
    reached = reached && target.reached;
    list.push_back({{"what", target.what},
                    {"wanted", target.wanted},
                    {"value", target.value},
                    {"reached", target.reached}});
  }
  const nlohmann::ordered_json json = {
      {"targets", list}, {"not_checked", not_checked}, {"reached", reached}};
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

namespace {

class Checker {
 public:
  Checker(const Globals& globals, const BenchFlags& flags, const Served& served)
      : globals_(globals), flags_(flags), served_(served) {}

  int Run() {
    RequestLoads();
    BenchFlags mixed = Load();
    mixed.clients = kManyClients;
    mixed.tokens = kMixedLengths;
    Measure("mixed lengths", mixed,
            [this](const LoadReport& report) { return ThroughputTarget(report, EngineTokens(0)); });
    BenchFlags decode = Load();
    decode.decode_loop = true;
    decode.sessions = kDecodeSessions;
    decode.prompt = kDecodePrompt;
    decode.dtype = v1::DTYPE_BF16;
    Measure("decode loop", decode, [this](const LoadReport& report) {
      decode_layers_ = report.bench.layers.size();
      return ThroughputTarget(report, EngineTokens(1));
    });
    for (const int64_t context : kContexts) {
      if (flags_.prompt > 0 && context != kContexts[0]) break;  // the one that was asked for
      BenchFlags fairness = Load();
      fairness.fairness = true;
      fairness.prompt = flags_.prompt > 0 ? flags_.prompt : context;
      fairness.sessions = kAppenders;
      fairness.rate = kAppendRate;
      Measure("fairness", fairness, FairnessTarget);
    }
    if (StopSignal() != 0) return 128 + StopSignal();
    const std::vector<std::string> not_checked =
        NotChecked(flags_, served_.threads, decode_layers_);
    const std::string text =
        flags_.json ? TargetsJson(targets_, not_checked) : TargetsText(targets_, not_checked);
    std::fputs(text.c_str(), stdout);
    const auto reached = [](const Target& target) { return target.reached; };
    return std::all_of(targets_.begin(), targets_.end(), reached) ? kOk : kFailed;
  }

 private:
  void RequestLoads() {
    double compute_us = 0;
    BenchFlags one = Load();
    one.clients = 1;
    one.echo = flags_.echo;
    Measure("round trip", one, [&](const LoadReport& report) {
      compute_us = Us(report.stats.of(Kind::kRequest).compute);
      return RoundTripTarget(report);
    });
    BenchFlags many = one;
    many.clients = kManyClients;
    Measure("throughput", many, [&](const LoadReport& report) {
      const auto cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
      return CeilingTarget(report, compute_us, served_.threads, cores);
    });
    BenchFlags idle = Load();
    idle.idle = true;
    Measure("silence", idle, IdleTarget);
  }

  // What all loads take from the user.
  BenchFlags Load() const {
    BenchFlags load;
    load.model = flags_.model;
    load.seconds = flags_.seconds;
    load.warmup = flags_.warmup;
    load.dtype = flags_.dtype;
    load.seed = flags_.seed;
    return load;
  }

  double EngineTokens(size_t index) const {
    return index < flags_.engine_tokens_per_second.size() ? flags_.engine_tokens_per_second[index]
                                                          : 0;
  }

  // On the model that was asked for, else on the first that fits.
  void Measure(const char* name, BenchFlags load,
               const std::function<Target(const LoadReport&)>& judge) {
    std::string wrong = "no model is loaded";
    for (const v1::Model& model : served_.models) {
      if (StopSignal() != 0) return;
      if (!flags_.model.empty() && model.name() != flags_.model) continue;
      load.model = model.name();
      Target target{.what = name, .wanted = "a load that starts", .value = "see above"};
      RunLoad(
          globals_, load, served_,
          [&](const LoadReport& report) {
            if (!flags_.json) std::printf("%s\n", ReportText(report).c_str());
            target = judge(report);
          },
          &wrong);
      if (!wrong.empty()) continue;
      targets_.push_back(std::move(target));
      return;
    }
    targets_.push_back({.what = name, .wanted = "a model that fits", .value = wrong});
  }

  const Globals& globals_;
  const BenchFlags& flags_;
  const Served& served_;
  std::vector<Target> targets_;
  size_t decode_layers_ = 0;
};

}  // namespace

int RunCheck(const Globals& globals, const BenchFlags& flags, const Served& served) {
  return Checker(globals, flags, served).Run();
}

}  // namespace attend::cli
