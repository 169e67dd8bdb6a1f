// SPDX-License-Identifier: Apache-2.0
//
// `attend bench`: flags of the load generator and which of them go together. The load itself is in
// bench/.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "client/cli/bench/check.h"

namespace attend::cli {
namespace {

constexpr const char* kFooter =
    "Each client has a connection of its own and one call in flight. Warm-up requests are sent\n"
    "first and not counted. A request or step counts when it is answered.\n"
    "\n"
    "wait     open loop: from the scheduled arrival until a client was free, part of the latency\n"
    "late     open loop: arrivals that waited over 1 ms, answered or not: all clients were busy, "
    "or\n"
    "         this machine was; never sent: due before the end, and no client was free until then\n"
    "queue    in the server until its first batch started\n"
    "compute  in batches of the server\n"
    "rest     of the round trip: client, wire, copies at both ends\n"
    "batch    fill is the mean over requests of the last batch that each was in\n"
    "refused  QUEUE_FULL, KV_EXHAUSTED, QUOTA, DRAINING, STARTING: a result, no failure. A client\n"
    "         of a closed loop waits as long as the server says (at least 1 ms) and goes on;\n"
    "         after a failure it waits 100 ms.\n"
    "failed   everything else, wrong shapes and NaN in a sampled row of the answer included\n"
    "\n"
    "Decode loop: time per token is that of a step, one call for each layer; rpc share is the "
    "rest\n"
    "over the round trips; engine is the sum of compute over the measured time, above 100 % where\n"
    "micro-batches shared batches. Afterwards one client alone measures what a call and a byte\n"
    "cost on this link, and computation with and without 2048 cached tokens: the break-even is\n"
    "the number of cached tokens of a call from which on its rest is at most a fifth of it.\n"
    "\n"
    "--echo: the servers take turns, never at once, and get the same requests. rest / echo is "
    "what\n"
    "this service costs beside a gRPC server that does nothing. cpu servers is known on this "
    "host.\n"
    "--fairness: appends alone, prefills alone, both, in turn; appends count from when they were\n"
    "due.\n"
    "\n"
    "cpu here counts all calls of the measured time: lost, refused, opening, closing ones too.\n"
    "\n"
    "Exit codes: 0 nothing failed, 1 any request failed, none was answered or a client could not\n"
    "start, 2 wrong usage, 130 after SIGINT (Ctrl-C), 143 after SIGTERM. A signal ends early, "
    "after\n"
    "the calls in flight, and still reports; a second one ends at once.\n"
    "\n"
    "Example: attend bench --model bert --clients 16 --tokens 16:512 --seconds 10";

int FailUsage(const std::string& what) {
  std::fprintf(stderr, "attend: %s\nTry: attend bench --help\n", what.c_str());
  return kUsage;
}

// What flags mean together, beyond what the parser checks; what is wrong, empty = nothing.
std::string Settle(BenchFlags* flags) {
  if (flags->decode_loop && flags->sessions == 0) flags->sessions = kDecodeSessions;
  if (flags->fairness) {
    if (flags->sessions == 0) flags->sessions = kAppenders;
    if (flags->rate == 0) flags->rate = kAppendRate;
    if (flags->prompt == 0) flags->prompt = kPrefillTokens;
  } else if (flags->rate > 0 && flags->sessions > 0) {
    return "--rate excludes --sessions, without --fairness";
  }
  if (flags->prompt > 0 && !flags->decode_loop && !flags->fairness && !flags->check) {
    return "--prompt requires --decode_loop, --fairness or --check";
  }
  return "";
}

// Empty, or why what --echo names is none.
std::string CheckEcho(const Globals& globals, const std::string& address) {
  Globals echo = globals;
  echo.server = address;
  const auto client = Connect(echo, {.max_attempts = 1});
  if (!client.ok()) return "--echo: " + client.error().ToString();
  if (client->server().ByteSizeLong() == 0) return "";  // an empty request, unchanged
  return "--echo: got " + address + ", which answers, wanted an attend-echo server";
}

int RunBench(const Globals& globals, BenchFlags& flags) {
  std::string wrong = Settle(&flags);
  if (!wrong.empty()) return FailUsage(wrong);
  auto client = Connect(globals, {.max_attempts = flags.attempts});
  if (!client.ok()) return Fail(client.error());
  auto models = client->ListModels();
  if (!models.ok()) return Fail(models.error());
  if (!flags.echo.empty()) wrong = CheckEcho(globals, flags.echo);
  if (!wrong.empty()) return FailUsage(wrong);
  const Served served{.models = *std::move(models),
                      .limits = client->server().limits(),
                      .threads = client->server().threads()};
  if (flags.check) return RunCheck(globals, flags, served);
  const auto print = [&flags](const LoadReport& report) {
    std::fputs((flags.json ? ReportJson(report) : ReportText(report)).c_str(), stdout);
  };
  const int code = RunLoad(globals, flags, served, print, &wrong);
  return wrong.empty() ? code : FailUsage(wrong);
}

CLI::Validator Between(double first, double last) {
  return CLI::Validator(
      [first, last](std::string& text) {
        char* end = nullptr;
        const double value = std::strtod(text.c_str(), &end);
        if (!text.empty() && *end == '\0' && value >= first && value <= last) return std::string();
        char wanted[64];
        std::snprintf(wanted, sizeof(wanted), ", wanted %.12g to %.12g", first, last);
        return "got " + text + wanted;
      },
      "");
}

template <typename Value>
CLI::Option* AddNumber(CLI::App* command, const std::string& name, Value& value, double first,
                       double last, const std::string& help) {
  return command->add_option(name, value, help)
      ->check(Between(first, last))
      ->type_name("N")
      ->capture_default_str();
}

// Help with the first name of each option only: others are accepted silently.
class MainNames final : public CLI::Formatter {
  std::string make_option_name(const CLI::Option* option, bool positional) const override {
    const bool all = !option->get_snames().empty();  // -h,--help
    return option->get_name(positional, all);
  }
};

// Flags that scenarios leave to the user or refuse.
struct LoadOptions {
  CLI::Option* clients;
  CLI::Option* rate;
  CLI::Option* sequences;
  CLI::Option* sessions;
  CLI::Option* requests;
};

LoadOptions AddLoadFlags(CLI::App* bench, BenchFlags& flags) {
  LoadOptions options{};
  options.clients =
      AddNumber(bench, "--clients", flags.clients, 1, 4096, "Calls in flight at most");
  auto* seconds = AddNumber(bench, "--seconds", flags.seconds, 0.001, 1e6, "Measure for this long");
  options.requests =
      AddNumber(
          bench, "--requests", flags.requests, 1, 1e15,
          "Measure so many requests instead (with --echo of each server; steps in the decode "
          "loop, silences with --idle, rounds of 3 s with --fairness), answered or not; gives up "
          "when a run of nothing but failures lasts longer than --timeout")
          ->excludes(seconds)
          ->default_str("");
  AddNumber(bench, "--warmup", flags.warmup, 0, 1e6, "Requests of each client not counted");
  options.rate = AddNumber(bench, "--rate", flags.rate, 0.001, 1e7,
                           "Open loop: requests per second, at random times; latencies count from "
                           "the scheduled time, with at most --clients in flight")
                     ->default_str("");
  options.sequences =
      AddNumber(bench, "--sequences", flags.sequences, 1, 65536, "Sequences of each request");
  options.sessions =
      AddNumber(bench, "--sessions", flags.sessions, 1, 1e6,
                "Conversations: a prompt of --tokens, then one-token steps in a session; split "
                "among the clients")
          ->default_str("")
          ->excludes(options.sequences);
  AddNumber(bench, "--steps", flags.steps, 0, 1e9,
            "Steps before a session is replaced (decode loop, --fairness: is cut to its prompt)");
  return options;
}

void AddScenarioFlags(CLI::App* bench, BenchFlags& flags, CLI::Option* layer,
                      const LoadOptions& load) {
  auto* decode = bench
                     ->add_flag("--decode_loop,--decode-loop", flags.decode_loop,
                                "Steps of --sessions (32): one call for each layer in turn, "
                                "micro-batches overlapping")
                     ->excludes(layer)
                     ->excludes(load.rate)
                     ->excludes(load.sequences)
                     ->excludes(load.clients);
  AddNumber(bench, "--layers", flags.layers, 1, 1e6, "Layers of the decode loop (default: all)")
      ->needs(decode)
      ->default_str("");
  AddNumber(bench, "--micro_batches,--micro-batches", flags.micro_batches, 1, 4096,
            "Parts of the sessions that overlap")
      ->needs(decode);
  AddNumber(bench, "--gbit", flags.gbit, 0.001, 1e6,
            "Decode loop: Gbit/s of the network that the break-even is computed for, too")
      ->needs(decode);
  AddNumber(bench, "--prompt", flags.prompt, 0, 1e6,
            "Decode loop: tokens cached before the first step; --fairness: tokens of a prefill "
            "(8192)");
  auto* fairness = bench
                       ->add_flag("--fairness", flags.fairness,
                                  "--sessions (4) that append a row at a steady --rate (100 in "
                                  "all), without and during prefills of --prompt tokens")
                       ->excludes(decode)
                       ->excludes(load.sequences)
                       ->excludes(load.clients);
  auto* idle = bench
                   ->add_flag("--idle", flags.idle,
                              "One client: requests after a second of silence against busy ones")
                   ->excludes(decode)
                   ->excludes(fairness)
                   ->excludes(load.clients)
                   ->excludes(load.rate)
                   ->excludes(load.sequences)
                   ->excludes(load.sessions);
  auto* echo =
      bench
          ->add_option(
              "--echo", flags.echo,
              "Also send every request to this attend-echo server, in turns of half a second "
              "at most")
          ->type_name("ADDRESS")
          ->check([](const std::string& address) {
            return address.empty() ? "got \"\", wanted an address" : "";
          })
          ->excludes(decode)
          ->excludes(fairness)
          ->excludes(idle)
          ->excludes(load.sessions);
  auto* check =
      bench->add_flag("--check", flags.check,
                      "The service's targets, each with a load of its own for --seconds: round "
                      "trip, throughput, silence, mixed lengths, decode loop, fairness at --prompt "
                      "(8192 and 65536); exit code 1 when one is not reached");
  check->needs(echo);
  for (CLI::Option* other : {decode, fairness, idle, load.clients, load.rate, load.sequences,
                             load.sessions, load.requests, layer}) {
    check->excludes(other);
  }
  bench
      ->add_option("--engine_tokens_per_second,--engine-tokens-per-second",
                   flags.engine_tokens_per_second,
                   "--check: what attend-bench reached on the mixed lengths and in the decode loop "
                   "(default: the engine's rate while it computes, from the answers' timing)")
      ->type_name("N[,N]")
      ->delimiter(',')
      ->expected(1, 2)
      ->check(Between(0, 1e12))
      ->needs(check);
}

}  // namespace

void AddBench(CLI::App& app, Globals& globals) {
  CLI::App* bench = app.add_subcommand("bench", "Put load on the server and measure it");
  bench->formatter(std::make_shared<MainNames>());
  bench->footer(kFooter);
  auto flags = std::make_shared<BenchFlags>();
  bench->add_option("--model", flags->model, "Model (default: the only one)")->type_name("NAME");
  CLI::Option* layer =
      bench->add_option("--layer", flags->layer, "Layer (default: the first that fits)")
          ->type_name("NAME");
  bench
      ->add_option_function<std::string>(
          "--tokens",
          [flags](const std::string& text) {
            const std::string wrong = ParseLengthRange(text, &flags->tokens);
            if (!wrong.empty()) throw CLI::ValidationError("--tokens", wrong);
          },
          "Length of each sequence, or a range of equally likely ones, e.g. 16:512")
      ->type_name("N|N:N")
      ->default_str(LengthRangeText(flags->tokens));
  AddScenarioFlags(bench, *flags, layer, AddLoadFlags(bench, *flags));
  bench->add_option("--dtype", flags->dtype, "Type of the tensors (default: f32)")
      ->transform(OneOf(kWireDTypes))
      ->type_name("f32|f16|bf16");
  bench->add_option("--seed", flags->seed, "Of lengths, arrival times and inputs")
      ->type_name("N")
      ->capture_default_str();
  AddNumber(bench, "--attempts", flags->attempts, 1, 100,
            "Calls made for each request at most; 1 = refusals and failures are not retried");
  bench->add_flag("--json", flags->json, "Print JSON, times in ms");
  bench->callback([&globals, flags] { globals.exit_code = RunBench(globals, *flags); });
}

}  // namespace attend::cli
