// SPDX-License-Identifier: Apache-2.0
#include "client/cli/bench/run.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "client/cli/bench/process_cpu.h"
#include "client/cli/bench/worker.h"

namespace attend::cli {
namespace {

// Layers with a selectable mask take a context too, but do without.
bool NeedsContext(const v1::Layer& layer) {
  return layer.cross_attention() && !layer.mask_selectable();
}

bool WantsHistory(const BenchFlags& flags) {
  return flags.decode_loop || flags.fairness || flags.sessions > 0;
}

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
  const v1::Layer& layer = bench->layers.front();
  const int64_t row_bytes =
      std::max(layer.d_model(), layer.output_width()) * client::ElementBytes(flags.dtype);
  // Room for what a message holds besides its rows: about 100 bytes for each sequence.
  const int64_t sequences = std::max(flags.sequences, flags.sessions);
  const int64_t most = std::min(
      bench->limits.request_tokens(),
      std::max<int64_t>(0, bench->limits.message_bytes() - 4096 - 128 * sequences) / row_bytes);
  bench->workers = flags.clients;
  bench->largest_rows = flags.tokens.last * flags.sequences;
  if (flags.decode_loop) {
    bench->workers = std::min(flags.micro_batches, flags.sessions);
    const int64_t batch = (flags.sessions + bench->workers - 1) / bench->workers;
    bench->link_rows = std::min(kLinkRows, most);
    bench->largest_rows =
        std::max({batch, std::min<int64_t>(flags.prompt, kPromptPiece), bench->link_rows});
  } else if (flags.fairness) {
    bench->workers = flags.sessions + 1;
    bench->largest_rows = std::max(flags.tokens.last, std::min(flags.prompt, most));
  } else if (flags.idle) {
    bench->workers = 1;
    bench->largest_rows = flags.tokens.last;
  } else if (flags.sessions > 0) {
    bench->workers = std::min(flags.clients, flags.sessions);
  }
  if (bench->largest_rows <= most) return "";
  return "got requests of up to " + std::to_string(bench->largest_rows) + " rows, wanted at most " +
         std::to_string(most) +
         " (request_tokens = " + std::to_string(bench->limits.request_tokens()) +
         ", message_bytes = " + std::to_string(bench->limits.message_bytes()) + ")";
}

std::unique_ptr<LoadWorker> MakeWorker(const Bench& bench, int64_t index) {
  if (bench.flags.decode_loop) return MakeDecodeWorker(bench, index);
  if (bench.flags.fairness) return MakeFairnessWorker(bench, index);
  if (bench.flags.idle) return MakeIdleWorker(bench, index);
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

// Where it differs from the measured time: how long requests of each kind could be sent.
std::array<double, kKinds> KindSeconds(const Bench& bench) {
  std::array<double, kKinds> seconds{};
  const auto set = [&seconds](Kind kind, double value) {
    seconds[static_cast<size_t>(kind)] = value;
  };
  if (bench.slices != nullptr) {
    set(Kind::kRequest, bench.slices->sum(Side::kServer).seconds);
    set(Kind::kEcho, bench.slices->sum(Side::kEcho).seconds);
  }
  if (bench.phases != nullptr) {
    using Phase = FairnessPhases::Phase;
    set(Kind::kAppend, bench.phases->seconds(Phase::kAppends));
    set(Kind::kPrefill, bench.phases->seconds(Phase::kPrefill));
    set(Kind::kAppendBusy, bench.phases->seconds(Phase::kBoth));
    set(Kind::kPrefillBusy, bench.phases->seconds(Phase::kBoth));
  }
  return seconds;
}

std::optional<double> Since(std::optional<double> before, std::optional<double> now) {
  if (!before || !now) return std::nullopt;
  return *now - *before;
}

int Measure(const Bench& bench, const std::function<void(const LoadReport&)>& use) {
  std::vector<std::unique_ptr<LoadWorker>> workers;
  for (int64_t i = 0; i < bench.workers; ++i) workers.push_back(MakeWorker(bench, i));
  StopLoadOnSignals();
  std::vector<std::jthread> threads;
  for (const auto& worker : workers) threads.emplace_back([&worker] { worker->Run(); });
  const bool terminal = isatty(STDERR_FILENO) != 0;
  const ServerCpu server(bench.globals.server);
  const ServerCpu echo(bench.flags.echo);
  const bool began = AwaitStart(*bench.control, terminal);
  const auto server_before = server.seconds();
  const auto echo_before = echo.seconds();
  if (began) Watch(bench, workers, terminal);
  const auto server_cpu = Since(server_before, server.seconds());
  const auto echo_cpu = Since(echo_before, echo.seconds());
  if (terminal) std::fprintf(stderr, "\r\033[K");
  if (!began) return EndBeforeStart(*bench.control);
  for (std::jthread& thread : threads) thread.join();
  const LoadStats stats = Sum(workers);
  const LoadReport report{
      .bench = bench,
      .stats = stats,
      .seconds = bench.control->elapsed_seconds(),
      .cpu_seconds = bench.control->cpu_seconds(),
      .signal = StopSignal(),
      .gave_up = bench.control->gave_up(),
      .kind_seconds = KindSeconds(bench),
      .server_cpu_seconds = server_cpu,
      .echo_cpu_seconds = echo_cpu,
      .echo_client_cpu_seconds =
          bench.slices == nullptr ? 0 : bench.slices->sum(Side::kEcho).cpu_seconds};
  use(report);
  return ExitCodeOf(report);
}

}  // namespace

int RunLoad(const Globals& globals, const BenchFlags& flags, const Served& served,
            const std::function<void(const LoadReport&)>& use, std::string* wrong) {
  Bench bench(globals, flags);
  bench.limits = served.limits;
  *wrong = ChooseTarget(served.models, &bench);
  if (wrong->empty()) *wrong = ChooseSize(&bench);
  if (!wrong->empty()) return kUsage;

  const int64_t rows = bench.largest_rows + std::min(bench.workers, kInputShifts);
  bench.input = MakeInput(flags.dtype, rows * bench.layers.front().d_model(), flags.seed);
  const std::chrono::duration<double> patience(globals.timeout_seconds);
  const bool echo = !flags.echo.empty();
  LoadControl control(
      bench.workers,
      {.seconds = flags.seconds,
       .requests = flags.requests * (echo ? 2 : 1),
       .patience = std::chrono::duration_cast<LoadControl::Clock::duration>(patience)});
  bench.control = &control;
  ArrivalSchedule arrivals(flags.rate, flags.seed);
  if (flags.rate > 0 && !flags.fairness) bench.arrivals = &arrivals;
  Slices slices(Slices::BudgetOf(flags.seconds, flags.requests, bench.workers));
  if (echo) bench.slices = &slices;
  LinkMeasurement link;
  if (flags.decode_loop) bench.link = &link;
  FairnessPhases phases;
  if (flags.fairness) bench.phases = &phases;
  return Measure(bench, use);
}

}  // namespace attend::cli
