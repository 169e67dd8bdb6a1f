// SPDX-License-Identifier: Apache-2.0
#include "client/cli/bench/report.h"

#include <nlohmann/json.hpp>

#include "client/cli/bench/format.h"

namespace attend::cli {
namespace {

using Object = nlohmann::ordered_json;

double Ratio(double part, double whole) { return whole > 0 ? part / whole : 0; }
double Ratio(int64_t part, int64_t whole) {
  return Ratio(static_cast<double>(part), static_cast<double>(whole));
}
double Ms(int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1e6; }

// Mean milliseconds for each request.
struct Parts {
  double wait, queue, compute, rest;
};
Parts PartsOf(const RequestStats& stats) {
  const int64_t count = stats.latency.count();
  const int64_t server_ns = (stats.queue_us + stats.compute_us) * 1000;
  return {.wait = Ratio(stats.wait_ns, count) / 1e6,
          .queue = Ratio(stats.queue_us, count) / 1e3,
          .compute = Ratio(stats.compute_us, count) / 1e3,
          .rest = Ratio(stats.round_trip_ns - server_ns, count) / 1e6};
}

double SecondsOf(const LoadReport& report, Kind kind) {
  const double seconds = report.kind_seconds[static_cast<size_t>(kind)];
  return seconds > 0 ? seconds : report.seconds;
}

// The kind whose requests are one call of Attend each.
const RequestStats& CallStats(const LoadReport& report) {
  return report.stats.of(report.bench.flags.decode_loop ? Kind::kLayerCall
                                                        : MainKind(report.bench.flags));
}

// Of the round trips, what is neither queue nor computation: client, wire, both ends' copies.
double RpcShare(const RequestStats& stats) {
  const int64_t server_ns = (stats.queue_us + stats.compute_us) * 1000;
  return Ratio(stats.round_trip_ns - server_ns, stats.round_trip_ns);
}

double EngineShare(const LoadReport& report) {
  return Ratio(static_cast<double>(CallStats(report).compute_us) / 1e6, report.seconds);
}

double CpuUsPerCall(const LoadReport& report) {
  return 1e6 * Ratio(report.cpu_seconds, static_cast<double>(report.stats.calls));
}

bool IsOpenLoop(const BenchFlags& flags) { return flags.rate > 0 || flags.fairness; }

const char* ModeOf(const BenchFlags& flags) {
  if (flags.decode_loop) return "decode_loop";
  if (flags.fairness) return "fairness";
  if (flags.idle) return "idle";
  if (flags.sessions > 0) return "sessions";
  return flags.rate > 0 ? "open" : "closed";
}

std::string LayersText(const Bench& bench) {
  if (bench.layers.size() == 1) return "layer " + bench.layers.front().name();
  return Format("%zu layers, %s .. %s", bench.layers.size(), bench.layers.front().name().c_str(),
                bench.layers.back().name().c_str());
}

std::string LoadText(const Bench& bench) {
  const BenchFlags& flags = bench.flags;
  const std::string tokens = LengthRangeText(flags.tokens) + " tokens";
  if (flags.decode_loop) {
    return Format("decode loop: %ld sessions in %ld micro-batches, prompt %ld tokens",
                  flags.sessions, bench.workers, flags.prompt);
  }
  if (flags.fairness) {
    return Format("fairness: %ld sessions of %s append %g rows/s, prefills of %ld tokens",
                  flags.sessions, tokens.c_str(), flags.rate, flags.prompt);
  }
  if (flags.idle) return "after silences: 1 client, " + tokens;
  if (flags.sessions > 0) {
    return Format("%ld clients, %ld sessions: prompt of %s, %ld steps", bench.workers,
                  flags.sessions, tokens.c_str(), flags.steps);
  }
  std::string text = flags.rate > 0 ? Format("open loop: %g requests/s, at most %ld in flight",
                                             flags.rate, bench.workers)
                                    : Format("closed loop: %ld clients", bench.workers);
  text += ", " + tokens;
  if (flags.sequences > 1) text += Format(" x %ld sequences", flags.sequences);
  return text;
}

std::string HeaderText(const LoadReport& report) {
  const Bench& bench = report.bench;
  std::string text = LoadText(bench) + ", " + DTypeText(bench.flags.dtype) + "\nmodel " +
                     bench.model + " (" + LayersText(bench) + ") at " + bench.globals.server +
                     (bench.flags.echo.empty() ? "" : ", echo at " + bench.flags.echo) +
                     Format("\nmeasured %.2f s after %ld warm-up %s each\n", report.seconds,
                            bench.flags.warmup, bench.flags.decode_loop ? "steps" : "requests");
  if (report.signal != 0) text += Format("ended early by signal %d\n", report.signal);
  if (report.gave_up) {
    text += Format("given up: nothing but failures for %g s\n", bench.globals.timeout_seconds);
  }
  return text;
}

std::string RowText(Kind kind, const RequestStats& stats, double seconds, bool open_loop) {
  const LatencyHistogram& latency = stats.latency;
  const Parts parts = PartsOf(stats);
  std::string text = Format("%-12s %9ld %9.1f %9.0f", KindName(kind), latency.count(),
                            Ratio(static_cast<double>(latency.count()), seconds),
                            Ratio(static_cast<double>(stats.tokens), seconds));
  for (double share : {0.5, 0.9, 0.99, 0.999}) {
    text += Format(" %8.3f", Ms(latency.PercentileNs(share)));
  }
  text += Format(" %8.3f |", Ms(latency.max_ns()));
  if (open_loop) text += Format(" %8.3f", parts.wait);
  return text + Format(" %8.3f %8.3f %8.3f\n", parts.queue, parts.compute, parts.rest);
}

std::string LatencyTable(const LoadReport& report) {
  const bool open_loop = IsOpenLoop(report.bench.flags);
  std::string text = Format("%-12s %9s %9s %9s %8s %8s %8s %8s %8s |", "ms", "count", "per s",
                            "tokens/s", "p50", "p90", "p99", "p99.9", "max");
  if (open_loop) text += Format(" %8s", "wait");
  text += Format(" %8s %8s %8s\n", "queue", "compute", "rest");
  const Kind main = MainKind(report.bench.flags);
  for (int i = 0; i < kKinds; ++i) {
    const Kind kind = static_cast<Kind>(i);
    const RequestStats& stats = report.stats.of(kind);
    if (kind != main && stats.latency.count() == 0) continue;
    text += RowText(kind, stats, SecondsOf(report, kind), open_loop);
  }
  return text;
}

std::string TallyText(const char* name, const Tallies& tallies, bool with_message) {
  std::string text = Format("%-14s %ld", name, TotalOf(tallies));
  const char* before = ": ";
  for (const auto& [key, tally] : tallies) {
    text += Format("%s%s %ld", before, key.c_str(), tally.count);
    before = ", ";
  }
  text += "\n";
  if (!with_message) return text;
  for (const auto& [key, tally] : tallies) {
    text += Format("  first %s: %.900s\n", key.c_str(), tally.first_message.c_str());
  }
  return text;
}

std::string BreakEvenText(const LoadReport& report) {
  const LinkMeasurement* link = report.bench.link;
  if (link == nullptr) return "";
  if (link->samples) return LinkText(*link->samples, report.bench.flags.gbit);
  return Format("%-14s not measured: %.900s\n", "break-even", link->why_not.c_str());
}

std::string DecodeText(const LoadReport& report) {
  const RequestStats& step = report.stats.of(Kind::kStep);
  return Format("%-14s %.3f ms a step (p50), %.3f ms a session's token, %.1f tokens/s\n",
                "time per token", Ms(step.latency.PercentileNs(0.5)),
                Ratio(report.seconds * 1e3, static_cast<double>(step.tokens)),
                Ratio(static_cast<double>(step.tokens), report.seconds)) +
         Format("%-14s %.1f %% of the round trips are neither queue nor computation\n", "rpc share",
                100 * RpcShare(step)) +
         Format("%-14s %.1f %% of the measured time\n", "engine", 100 * EngineShare(report)) +
         BreakEvenText(report);
}

std::string BatchText(const LoadReport& report) {
  const RequestStats& stats = CallStats(report);
  const double tokens = Ratio(stats.batch_tokens, stats.calls);
  return Format("%-14s %.1f tokens, %.1f sequences; %.1f %% of batch_tokens = %ld\n", "batch fill",
                tokens, Ratio(stats.batch_sequences, stats.calls),
                100 * Ratio(tokens, static_cast<double>(report.bench.limits.batch_tokens())),
                report.bench.limits.batch_tokens());
}

double MedianMs(const LoadReport& report, Kind kind) {
  return Ms(report.stats.of(kind).latency.PercentileNs(0.5));
}
double TailMs(const LoadReport& report, Kind kind) {
  return Ms(report.stats.of(kind).latency.PercentileNs(0.99));
}

// Processor time of a server for each of its requests; nothing where it isn't known.
std::optional<double> CpuUsEach(std::optional<double> seconds, const RequestStats& stats) {
  if (!seconds || stats.latency.count() == 0) return std::nullopt;
  return 1e6 * *seconds / static_cast<double>(stats.latency.count());
}

std::string EchoText(const LoadReport& report) {
  const double rest = PartsOf(report.stats.of(Kind::kRequest)).rest;
  const double echo = PartsOf(report.stats.of(Kind::kEcho)).rest;
  std::string text = Format("%-14s %.2f: %.3f ms of a request, %.3f ms of an echo (means)\n",
                            "rest / echo", Ratio(rest, echo), rest, echo);
  const auto server = CpuUsEach(report.server_cpu_seconds, report.stats.of(Kind::kRequest));
  const auto floor = CpuUsEach(report.echo_cpu_seconds, report.stats.of(Kind::kEcho));
  if (server && floor) {
    text += Format("%-14s %.0f us for a request, %.0f us for an echo\n", "cpu servers", *server,
                   *floor);
  }
  return text;
}

std::string IdleText(const LoadReport& report) {
  return Format("%-14s %+.3f ms after a second of silence, median against median\n", "idle",
                MedianMs(report, Kind::kIdle) - MedianMs(report, Kind::kRequest));
}

std::string FairnessText(const LoadReport& report) {
  const double quiet = TailMs(report, Kind::kAppend);
  const double busy = TailMs(report, Kind::kAppendBusy);
  const double alone = MedianMs(report, Kind::kPrefill);
  const double slowed = MedianMs(report, Kind::kPrefillBusy);
  return Format("%-14s p99 of appends x %.2f during prefills: %.3f ms, %.3f ms without\n",
                "fairness", Ratio(busy, quiet), busy, quiet) +
         Format("%-14s prefill x %.2f during appends: %.1f ms, %.1f ms without (medians)\n", "",
                Ratio(slowed, alone), slowed, alone);
}

Object EchoJson(const LoadReport& report) {
  const double rest = PartsOf(report.stats.of(Kind::kRequest)).rest;
  const double echo = PartsOf(report.stats.of(Kind::kEcho)).rest;
  Object json = {{"rest_ratio", Ratio(rest, echo)}};
  if (const auto us = CpuUsEach(report.server_cpu_seconds, report.stats.of(Kind::kRequest))) {
    json["server_cpu_us_per_request"] = *us;
  }
  if (const auto us = CpuUsEach(report.echo_cpu_seconds, report.stats.of(Kind::kEcho))) {
    json["echo_cpu_us_per_request"] = *us;
  }
  return json;
}

Object LinkJson(const LoadReport& report) {
  const LinkSamples& samples = *report.bench.link->samples;
  const double gbit = report.bench.flags.gbit;
  const LinkCosts costs = CostsOf(samples);
  const auto tokens = [&](double wire_byte_us) {
    const auto even = BreakEvenTokens(costs, samples.batch.bytes, wire_byte_us);
    return even ? Object(*even) : Object();
  };
  return {{"call_us", costs.fixed_us},
          {"byte_ns", 1e3 * costs.byte_us},
          {"call_bytes", samples.batch.bytes},
          {"compute_us", costs.base_us},
          {"cached_token_us", costs.cached_us},
          {"break_even_share", kBreakEvenShare},
          {"break_even_tokens", tokens(0)},
          {"gbit", gbit},
          {"break_even_tokens_gbit", tokens(WireByteUs(gbit))}};
}

Object FairnessJson(const LoadReport& report) {
  return {
      {"append_p99_ratio", Ratio(TailMs(report, Kind::kAppendBusy), TailMs(report, Kind::kAppend))},
      {"prefill_ratio",
       Ratio(MedianMs(report, Kind::kPrefillBusy), MedianMs(report, Kind::kPrefill))}};
}

Object TallyJson(const Tallies& tallies) {
  Object reasons = Object::object();
  for (const auto& [key, tally] : tallies) reasons[key] = tally.count;
  return {{"total", TotalOf(tallies)}, {"by_reason", reasons}};
}

Object KindJson(const RequestStats& stats, double seconds) {
  const LatencyHistogram& latency = stats.latency;
  const Parts parts = PartsOf(stats);
  const double count = static_cast<double>(latency.count());
  return {{"count", latency.count()},
          {"per_second", Ratio(count, seconds)},
          {"tokens", stats.tokens},
          {"tokens_per_second", Ratio(static_cast<double>(stats.tokens), seconds)},
          {"latency_ms",
           {{"mean", latency.mean_ns() / 1e6},
            {"p50", Ms(latency.PercentileNs(0.5))},
            {"p90", Ms(latency.PercentileNs(0.9))},
            {"p99", Ms(latency.PercentileNs(0.99))},
            {"p99_9", Ms(latency.PercentileNs(0.999))},
            {"max", Ms(latency.max_ns())}}},
          {"compute_p50_ms", Ms(stats.compute.PercentileNs(0.5))},
          {"mean_ms",
           {{"wait", parts.wait},
            {"queue", parts.queue},
            {"compute", parts.compute},
            {"rest", parts.rest}}}};
}

Object LoadJson(const LoadReport& report) {
  const Bench& bench = report.bench;
  const BenchFlags& flags = bench.flags;
  Object layers = Object::array();
  for (const v1::Layer& layer : bench.layers) layers.push_back(layer.name());
  return {{"mode", ModeOf(flags)},
          {"server", bench.globals.server},
          {"echo_server", flags.echo},
          {"model", bench.model},
          {"layers", layers},
          {"dtype", DTypeText(flags.dtype)},
          {"clients", bench.workers},
          {"tokens", LengthRangeText(flags.tokens)},
          {"sequences", flags.sequences},
          {"sessions", flags.sessions},
          {"steps", flags.steps},
          {"prompt", flags.prompt},
          {"rate", flags.rate},
          {"seed", flags.seed},
          {"attempts", flags.attempts},
          {"warmup", flags.warmup}};
}

}  // namespace

Kind MainKind(const BenchFlags& flags) {
  if (flags.fairness) return Kind::kAppend;
  if (flags.idle) return Kind::kIdle;
  return flags.decode_loop || flags.sessions > 0 ? Kind::kStep : Kind::kRequest;
}

std::string ProgressLine(const Bench& bench, const LoadStats& earlier, const LoadStats& now,
                         double seconds, double elapsed, int64_t in_flight) {
  const Kind kind = MainKind(bench.flags);
  LatencyHistogram latency = now.of(kind).latency;
  latency.Subtract(earlier.of(kind).latency);
  const double tokens = static_cast<double>(now.of(kind).tokens - earlier.of(kind).tokens);
  const std::string progress = bench.flags.requests > 0
                                   ? Format("%ld/%ld", now.turns, bench.flags.requests)
                                   : Format("%.0f/%g s", elapsed, bench.flags.seconds);
  return Format(
      "%s  %.0f %ss/s  %.0f tokens/s  p50 %.2f p99 %.2f ms  in flight %ld  refused %ld  failed %ld",
      progress.c_str(), Ratio(static_cast<double>(latency.count()), seconds), KindName(kind),
      Ratio(tokens, seconds), Ms(latency.PercentileNs(0.5)), Ms(latency.PercentileNs(0.99)),
      in_flight, TotalOf(now.refused), TotalOf(now.failed));
}

std::string ReportText(const LoadReport& report) {
  const LoadStats& stats = report.stats;
  const BenchFlags& flags = report.bench.flags;
  std::string text = HeaderText(report) + "\n" + LatencyTable(report) + "\n";
  if (flags.decode_loop) text += DecodeText(report);
  if (!flags.echo.empty()) text += EchoText(report);
  if (flags.idle) text += IdleText(report);
  if (flags.fairness) text += FairnessText(report);
  text += BatchText(report);
  text += TallyText("refused", stats.refused, false) + TallyText("failed", stats.failed, true);
  if (flags.attempts > 1) text += TallyText("retried", stats.retried, false);
  if (flags.rate > 0 && !flags.fairness) {
    text += Format("%-14s %ld more than %ld ms late, %ld never sent\n", "arrivals", stats.late,
                   kLateNs / 1'000'000, stats.unsent);
  }
  if (flags.sessions > 0) {
    text += Format("%-14s %ld\n", "opened", stats.sessions_opened) +
            TallyText("sessions lost", stats.sessions_lost, false);
  }
  text += Format("%-14s", "replicas");
  for (const auto& [replica, calls] : stats.replicas) {
    text += Format(" %s %ld", replica.c_str(), calls);
  }
  return text + Format("\n%-14s %.0f us for each of %ld calls\n", "cpu here", CpuUsPerCall(report),
                       stats.calls);
}

std::string ReportJson(const LoadReport& report) {
  const LoadStats& stats = report.stats;
  Object json = LoadJson(report);
  json["measured_seconds"] = report.seconds;
  json["ended_early"] = report.signal != 0 || report.gave_up;
  Object& kinds = json["kinds"] = Object::object();
  for (int i = 0; i < kKinds; ++i) {
    const Kind kind = static_cast<Kind>(i);
    if (kind != MainKind(report.bench.flags) && stats.of(kind).latency.count() == 0) continue;
    kinds[KindName(kind)] = KindJson(stats.of(kind), SecondsOf(report, kind));
  }
  if (report.bench.flags.decode_loop) {
    const RequestStats& step = stats.of(Kind::kStep);
    json["decode"] = {
        {"step_ms", Ms(step.latency.PercentileNs(0.5))},
        {"session_token_ms", Ratio(report.seconds * 1e3, static_cast<double>(step.tokens))},
        {"rpc_share", RpcShare(step)},
        {"engine_share", EngineShare(report)}};
    const LinkMeasurement* link = report.bench.link;
    if (link != nullptr && link->samples) json["decode"]["link"] = LinkJson(report);
  }
  if (!report.bench.flags.echo.empty()) json["echo"] = EchoJson(report);
  if (report.bench.flags.idle) {
    json["idle"] = {{"extra_ms", MedianMs(report, Kind::kIdle) - MedianMs(report, Kind::kRequest)}};
  }
  if (report.bench.flags.fairness) json["fairness"] = FairnessJson(report);
  const RequestStats& calls = CallStats(report);
  const double batch_tokens = Ratio(calls.batch_tokens, calls.calls);
  const auto limit = static_cast<double>(report.bench.limits.batch_tokens());
  json["batch"] = {{"tokens", batch_tokens},
                   {"sequences", Ratio(calls.batch_sequences, calls.calls)},
                   {"fill", Ratio(batch_tokens, limit)}};
  json["refused"] = TallyJson(stats.refused);
  json["failed"] = TallyJson(stats.failed);
  json["retried"] = TallyJson(stats.retried);
  json["arrivals"] = {{"late", stats.late}, {"unsent", stats.unsent}};
  json["sessions_opened"] = stats.sessions_opened;
  json["sessions_lost"] = TallyJson(stats.sessions_lost);
  json["replicas"] = stats.replicas;
  json["calls"] = stats.calls;
  json["cpu_us_per_call"] = CpuUsPerCall(report);
  return json.dump(2, ' ', false, Object::error_handler_t::replace) + "\n";
}

int ExitCodeOf(const LoadReport& report) {
  if (report.signal != 0) return 128 + report.signal;
  int64_t answered = 0;
  for (const RequestStats& kind : report.stats.kinds) answered += kind.latency.count();
  const bool good = answered > 0 && TotalOf(report.stats.failed) == 0 && !report.gave_up;
  return good ? kOk : kFailed;
}

}  // namespace attend::cli
