// SPDX-License-Identifier: Apache-2.0
//
// `attend bench`: flags of the load generator, what they mean for a loaded model, and the thread
// that watches. The load itself is in bench/.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "client/cli/bench/report.h"
#include "client/cli/bench/worker.h"

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
    "micro-batches shared batches.\n"
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

// Layers with a selectable mask take a context too, but do without.
bool NeedsContext(const v1::Layer& layer) {
  return layer.cross_attention() && !layer.mask_selectable();
}

bool WantsHistory(const BenchFlags& flags) { return flags.decode_loop || flags.sessions > 0; }

// The layers of the load: the named one, the first that fits, or those of the decode loop.
std::vector<v1::Layer> ChooseLayers(const v1::Model& model, const BenchFlags& flags) {
  std::vector<v1::Layer> layers;
  const size_t most = !flags.decode_loop  ? 1
                      : flags.layers == 0 ? static_cast<size_t>(model.layers_size())
                                          : static_cast<size_t>(flags.layers);
  for (const v1::Layer& layer : model.layers()) {
    if (layers.size() == most) break;
    if (!flags.layer.empty() && layer.name() != flags.layer) continue;
    if (NeedsContext(layer) || (WantsHistory(flags) && !layer.sessions())) continue;
    if (!layers.empty() && layer.d_model() != layers[0].d_model()) continue;
    layers.push_back(layer);
  }
  return layers;
}

// Fills model, layers and limits of `bench`; what is wrong, empty = nothing.
std::string ChooseTarget(const std::vector<v1::Model>& models, Bench* bench) {
  const BenchFlags& flags = bench->flags;
  const v1::Model* model = nullptr;
  std::string names;
  for (const v1::Model& loaded : models) {
    names += (names.empty() ? "" : ", ") + loaded.name();
    if (loaded.name() == flags.model || (flags.model.empty() && models.size() == 1)) {
      model = &loaded;
    }
  }
  if (model == nullptr) {
    return "--model: got " + (flags.model.empty() ? "none" : flags.model) + ", wanted " +
           (names.empty() ? "a server with a loaded model" : "one of " + names);
  }
  bench->model = model->name();
  bench->layers = ChooseLayers(*model, flags);
  const auto found = static_cast<int64_t>(bench->layers.size());
  if (found >= std::max<int64_t>(1, flags.layers)) return "";
  const std::string layers =
      WantsHistory(flags) ? "self-attention layers that keep sessions" : "self-attention layers";
  if (!flags.layer.empty()) {
    return "--layer: got " + flags.layer + ", wanted one of the " + layers + " of model " +
           model->name();
  }
  if (found == 0) {
    return "--model: got " + model->name() + " without " + layers +
           ", wanted a model with at least 1";
  }
  return "--layers: got " + std::to_string(flags.layers) + ", wanted at most " +
         std::to_string(found) + ", the " + layers + " of one width of model " + model->name();
}

// How many workers, and the largest request; what is wrong, empty = nothing.
std::string ChooseSize(Bench* bench) {
  const BenchFlags& flags = bench->flags;
  bench->workers = flags.clients;
  bench->largest_rows = flags.tokens.last * flags.sequences;
  if (flags.decode_loop) {
    bench->workers = std::min(flags.micro_batches, flags.sessions);
    const int64_t batch = (flags.sessions + bench->workers - 1) / bench->workers;
    bench->largest_rows = std::max(batch, std::min<int64_t>(flags.prompt, kPromptPiece));
  } else if (flags.sessions > 0) {
    bench->workers = std::min(flags.clients, flags.sessions);
  }
  const int64_t row_bytes = bench->layers.front().d_model() * client::ElementBytes(flags.dtype);
  // Room for what a message holds besides its rows: about 100 bytes for each sequence.
  const int64_t sequences = std::max(flags.sequences, flags.sessions);
  const int64_t most = std::min(
      bench->limits.request_tokens(),
      std::max<int64_t>(0, bench->limits.message_bytes() - 4096 - 128 * sequences) / row_bytes);
  if (bench->largest_rows <= most) return "";
  return "got requests of up to " + std::to_string(bench->largest_rows) + " rows, wanted at most " +
         std::to_string(most) +
         " (request_tokens = " + std::to_string(bench->limits.request_tokens()) +
         ", message_bytes = " + std::to_string(bench->limits.message_bytes()) + ")";
}

std::unique_ptr<LoadWorker> MakeWorker(const Bench& bench, int64_t index) {
  if (bench.flags.decode_loop) return MakeDecodeWorker(bench, index);
  if (bench.flags.sessions > 0) return MakeSessionWorker(bench, index);
  return MakeRequestWorker(bench, index);
}

LoadStats Sum(const std::vector<std::unique_ptr<LoadWorker>>& workers) {
  LoadStats sum;
  for (const auto& worker : workers) sum.Merge(worker->stats());
  return sum;
}

// Until the measured time begins; false when the load was stopped before.
bool AwaitStart(const LoadControl& control, bool terminal) {
  const auto began = LoadControl::Clock::now();
  while (!control.started()) {
    if (control.stopped()) return control.started();  // may have begun since
    const std::chrono::duration<double> waited = LoadControl::Clock::now() - began;
    if (terminal && waited.count() > 1) {
      std::fprintf(stderr, "\rconnecting and warming up, %.0f s\033[K", waited.count());
    }
    std::this_thread::sleep_for(LoadControl::kSlice);
  }
  return true;
}

// Returns when every worker has finished; shows on a terminal how it goes.
void Watch(const Bench& bench, const std::vector<std::unique_ptr<LoadWorker>>& workers,
           bool terminal) {
  auto looked = LoadControl::Clock::now();
  LoadStats earlier;
  while (!bench.control->WaitUntilFinished(looked + std::chrono::seconds(1))) {
    const auto now = LoadControl::Clock::now();
    const std::chrono::duration<double> since = now - looked;
    looked = now;
    if (!terminal) continue;
    LoadStats stats = Sum(workers);
    const std::string line =
        ProgressLine(bench, earlier, stats, since.count(), bench.control->elapsed_seconds(),
                     bench.control->in_flight);
    std::fprintf(stderr, "\r%s\033[K", line.c_str());
    earlier = std::move(stats);
  }
}

// A load that was stopped before its measured time. Workers in a call that nobody answers would
// hold the process for --timeout, as calls can't be cancelled: those that are not done soon are
// left behind, their sessions to the server's ttl.
int EndBeforeStart(LoadControl& control) {
  constexpr std::chrono::milliseconds kTimeToClose{300};
  int code = 128 + StopSignal();
  if (const auto error = control.error()) {
    code = Fail(*error);
  } else {
    std::fprintf(stderr, "attend: ended by signal %d before the load began\n", StopSignal());
  }
  if (control.WaitUntilFinished(LoadControl::Clock::now() + kTimeToClose)) return code;
  std::fflush(nullptr);
  std::_Exit(code);
}

int Measure(const Bench& bench) {
  std::vector<std::unique_ptr<LoadWorker>> workers;
  for (int64_t i = 0; i < bench.workers; ++i) workers.push_back(MakeWorker(bench, i));
  StopLoadOnSignals();
  std::vector<std::jthread> threads;
  for (const auto& worker : workers) threads.emplace_back([&worker] { worker->Run(); });
  const bool terminal = isatty(STDERR_FILENO) != 0;
  const bool began = AwaitStart(*bench.control, terminal);
  if (began) Watch(bench, workers, terminal);
  if (terminal) std::fprintf(stderr, "\r\033[K");
  if (!began) return EndBeforeStart(*bench.control);
  for (std::jthread& thread : threads) thread.join();
  const LoadStats stats = Sum(workers);
  const LoadReport report{.bench = bench,
                          .stats = stats,
                          .seconds = bench.control->elapsed_seconds(),
                          .cpu_seconds = bench.control->cpu_seconds(),
                          .signal = StopSignal(),
                          .gave_up = bench.control->gave_up()};
  const std::string text = bench.flags.json ? ReportJson(report) : ReportText(report);
  std::fputs(text.c_str(), stdout);
  return ExitCodeOf(report);
}

int RunBench(const Globals& globals, const BenchFlags& flags) {
  auto client = Connect(globals, {.max_attempts = flags.attempts});
  if (!client.ok()) return Fail(client.error());
  const auto models = client->ListModels();
  if (!models.ok()) return Fail(models.error());
  Bench bench(globals, flags);
  bench.limits = client->server().limits();
  std::string wrong = ChooseTarget(*models, &bench);
  if (wrong.empty()) wrong = ChooseSize(&bench);
  if (!wrong.empty()) return FailUsage(wrong);

  const int64_t rows = bench.largest_rows + std::min(bench.workers, kInputShifts);
  bench.input = MakeInput(flags.dtype, rows * bench.layers.front().d_model(), flags.seed);
  const std::chrono::duration<double> patience(globals.timeout_seconds);
  LoadControl control(
      bench.workers,
      {.seconds = flags.seconds,
       .requests = flags.requests,
       .patience = std::chrono::duration_cast<LoadControl::Clock::duration>(patience)});
  bench.control = &control;
  ArrivalSchedule arrivals(flags.rate, flags.seed);
  if (flags.rate > 0) bench.arrivals = &arrivals;
  return Measure(bench);
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

// Returns the flag of the decode loop.
CLI::Option* AddLoadFlags(CLI::App* bench, BenchFlags& flags) {
  auto* clients = AddNumber(bench, "--clients", flags.clients, 1, 4096, "Calls in flight at most");
  auto* seconds = AddNumber(bench, "--seconds", flags.seconds, 0.001, 1e6, "Measure for this long");
  AddNumber(bench, "--requests", flags.requests, 1, 1e15,
            "Measure so many requests instead (steps in the decode loop), answered or not; gives "
            "up when a run of nothing but failures lasts longer than --timeout")
      ->excludes(seconds)
      ->default_str("");
  AddNumber(bench, "--warmup", flags.warmup, 0, 1e6, "Requests of each client not counted");
  auto* rate = AddNumber(bench, "--rate", flags.rate, 0.001, 1e7,
                         "Open loop: requests per second, at random times; latencies count from "
                         "the scheduled time, with at most --clients in flight")
                   ->default_str("");
  auto* sequences =
      AddNumber(bench, "--sequences", flags.sequences, 1, 65536, "Sequences of each request");
  AddNumber(bench, "--sessions", flags.sessions, 1, 1e6,
            "Conversations: a prompt of --tokens, then one-token steps in a session; split "
            "among the clients")
      ->default_str("")
      ->excludes(rate)
      ->excludes(sequences);
  AddNumber(bench, "--steps", flags.steps, 0, 1e9,
            "Steps before a session is replaced (decode loop: is cut to its prompt)");

  auto* decode = bench
                     ->add_flag("--decode_loop,--decode-loop", flags.decode_loop,
                                "Steps of --sessions (32): one call for each layer in turn, "
                                "micro-batches overlapping")
                     ->excludes(rate)
                     ->excludes(sequences)
                     ->excludes(clients);
  AddNumber(bench, "--layers", flags.layers, 1, 1e6, "Layers of the decode loop (default: all)")
      ->needs(decode)
      ->default_str("");
  AddNumber(bench, "--micro_batches,--micro-batches", flags.micro_batches, 1, 4096,
            "Parts of the sessions that overlap")
      ->needs(decode);
  AddNumber(bench, "--prompt", flags.prompt, 0, 1e6, "Tokens cached before the first step")
      ->needs(decode);
  return decode;
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
  AddLoadFlags(bench, *flags)->excludes(layer);
  bench->add_option("--dtype", flags->dtype, "Type of the tensors (default: f32)")
      ->transform(OneOf(kWireDTypes))
      ->type_name("f32|f16|bf16");
  bench->add_option("--seed", flags->seed, "Of lengths, arrival times and inputs")
      ->type_name("N")
      ->capture_default_str();
  AddNumber(bench, "--attempts", flags->attempts, 1, 100,
            "Calls made for each request at most; 1 = refusals and failures are not retried");
  bench->add_flag("--json", flags->json, "Print JSON, times in ms");
  bench->callback([&globals, flags] {
    if (flags->decode_loop && flags->sessions == 0) flags->sessions = 32;
    globals.exit_code = RunBench(globals, *flags);
  });
}

}  // namespace attend::cli
