// SPDX-License-Identifier: Apache-2.0
#include "server/server.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "engine/util/error.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using std::chrono::system_clock;

// What is SERVING from loaded to draining.
constexpr std::string_view kReadyServices[] = {"", "attend.v1.Attention", "readiness"};

// How often old streams, requests that do not arrive and the engine's health are looked at.
constexpr int64_t kTickMs = 200;
// How often a drain looks whether it may end.
constexpr int64_t kDrainTickMs = 20;
// Time for the last answers to leave when the drain limit is reached.
constexpr std::chrono::seconds kLastAnswers{2};
// Time for answers that were given to gRPC to reach the kernel; usually microseconds.
constexpr milliseconds kLastWrites{100};
// One completion-queue thread for so many threads of the engine; more take cores from it.
constexpr int64_t kCoresPerQueueThread = 4;

int64_t NowUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             steady_clock::now().time_since_epoch())
      .count();
}

constexpr std::string_view kUnixPrefix = "unix:";

// Which file a path names now; none when there is none.
std::optional<std::pair<dev_t, ino_t>> IdentityOf(const std::string& path) {
  struct stat found = {};
  if (lstat(path.c_str(), &found) != 0) return std::nullopt;
  return std::pair(found.st_dev, found.st_ino);
}

}  // namespace

Server::Server(Options options, const Machine& machine, Logger& logger)
    : options_(std::move(options)), machine_(machine), logger_(logger), start_us_(NowUs()) {}

Server::~Server() {
  // Calls end before what they use: first no new ones, then their answers, then the queues.
  if (dispatcher_ != nullptr) dispatcher_->Shutdown(system_clock::now());
  if (batcher_ != nullptr) batcher_->Stop(absl::UnavailableError("the server stops"));
  if (dispatcher_ != nullptr) dispatcher_->Stop();
}

absl::Status Server::LoadCheckpoints() {
  for (const ModelFlag& model : options_.models) {
    absl::StatusOr<Checkpoint> checkpoint = LoadCheckpoint(model.directory);
    if (!checkpoint.ok()) {
      return absl::InvalidArgumentError("--model=" + model.name + "=" + model.directory + ": " +
                                        std::string(checkpoint.status().message()));
    }
    checkpoints_.emplace_back(model.name, *std::move(checkpoint));
  }
  memory_ = PlanMemory(options_, device_, checkpoints_);
  return CheckMemory(memory_, device_, machine_.memory_bytes);
}

absl::Status Server::SettleDevice() {
  ASSIGN_OR_RETURN(device_, ChooseDevice(options_.device));
  SetDeviceDefaults(device_, options_);
  if (options_.compute == "tf32" && device_.device != "cuda") {
    return absl::InvalidArgumentError(
        "--compute: got \"tf32\", wanted auto|fp32|bf16, as the CPU computes" +
        (device_.why.empty() ? "" : ": " + device_.why));
  }
  const bool i8 = options_.kv_dtype == DType::kI8 || options_.weight_dtype == "i8";
  if (i8 && device_.device == "cuda") {
    return absl::InvalidArgumentError(
        options_.weight_dtype == "i8"
            ? "--weight_dtype: got \"i8\", wanted auto, as only the CPU computes with it"
            : "--kv_dtype: got \"i8\", wanted auto|f32|bf16|f16, as only the CPU keeps it");
  }
  return absl::OkStatus();
}

void Server::LogDeviceAndMemory() const {
  if (options_.device == "auto" && device_.device == "cuda") {
    logger_.Write(LogLevel::kInfo, "device",
                  {{"asked", "auto"}, {"using", "cuda"}, {"name", device_.name}});
  } else if (options_.device == "auto") {
    logger_.Write(LogLevel::kInfo, "device",
                  {{"asked", "auto"}, {"using", "cpu"}, {"why", device_.why}});
  }
  if (memory_.cuda) {
    logger_.Write(LogLevel::kInfo, "memory",
                  {{"weights", Mebibytes(memory_.weights)},
                   {"kv", Mebibytes(memory_.kv)},
                   {"scratch", Mebibytes(memory_.scratch)},
                   {"workspace", Mebibytes(memory_.workspace)},
                   {"device_total", Mebibytes(memory_.DeviceBytes())},
                   {"device_free", Mebibytes(device_.free_bytes)},
                   {"queue", Mebibytes(memory_.queue)},
                   {"staging", Mebibytes(memory_.staging)},
                   {"total", Mebibytes(memory_.HostBytes())},
                   {"allowed", Mebibytes(machine_.memory_bytes)}});
    return;
  }
  logger_.Write(LogLevel::kInfo, "memory",
                {{"weights", Mebibytes(memory_.weights)},
                 {"kv", Mebibytes(memory_.kv)},
                 {"scratch", Mebibytes(memory_.scratch)},
                 {"queue", Mebibytes(memory_.queue)},
                 {"staging", Mebibytes(memory_.staging)},
                 {"total", Mebibytes(memory_.HostBytes())},
                 {"allowed", Mebibytes(machine_.memory_bytes)}});
}

absl::Status Server::Start() {
  RETURN_IF_ERROR(SettleDevice());
  RETURN_IF_ERROR(LoadCheckpoints());
  RuntimeOptions runtime;
  runtime.engine.device = device_.device;
  runtime.engine.isa = options_.isa;
  runtime.engine.compute = options_.compute;
  runtime.engine.weight_dtype = options_.weight_dtype;
  runtime.engine.threads = static_cast<int>(options_.threads);
  runtime.engine.kv_bytes = memory_.kv / 4096 * 4096;
  runtime.engine.scratch_bytes = memory_.scratch / 4096 * 4096;
  runtime.engine.batch_tokens = options_.limits.batch_tokens;
  runtime.engine.workspace_bytes = memory_.batch_workspace;
  runtime.kv_dtype = options_.kv_dtype;
  runtime.replica = options_.replica_id;
  runtime.start = std::to_string(
      std::chrono::duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count());
  runtime.sessions = options_.limits.sessions;
  runtime.session_ttl_seconds = options_.limits.session_ttl_seconds;
  runtime.session_ttl_cap_seconds = options_.session_ttl_cap_seconds;
  runtime.batch_tokens = options_.limits.batch_tokens;
  runtime.chunk_us = options_.chunk_us;
  ASSIGN_OR_RETURN(std::unique_ptr<AttentionEngine> engine, MakeEngine(runtime.engine));
  LogDeviceAndMemory();
  runtime_ = std::make_unique<AttentionRuntime>(runtime, std::move(engine), NowUs);

  MetricsConfig config;
  for (const ModelFlag& model : options_.models) config.models.push_back(model.name);
  config.deadline_ms = options_.limits.deadline_ms;
  config.batch_tokens = options_.limits.batch_tokens;
  config.version = ATTEND_VERSION;
  config.engine = runtime_->info().engine;
  config.isa = runtime_->info().isa;
  config.numerics = runtime_->info().numerics_id;
  metrics_ = std::make_unique<Metrics>(config, [this] { return Gauges(); });
  call_metrics_ = std::make_unique<CallMetrics>(*metrics_, state_);
  batcher_ = std::make_unique<Batcher>(
      *runtime_, options_.limits.batch_tokens, NowUs,
      [this](const BatchOutcome& outcome) { Observe(outcome); },
      [this](const RuntimeStats& stats) {
        metrics_->SessionEnded(SessionEnd::kExpired, stats.sessions_expired - expired_reported_);
        metrics_->SessionEnded(SessionEnd::kClosed, stats.sessions_closed - closed_reported_);
        expired_reported_ = stats.sessions_expired;
        closed_reported_ = stats.sessions_closed;
      });
  admission_ = std::make_unique<Admission>(
      AdmissionLimits{options_.limits.queue_requests, options_.limits.queue_tokens,
                      options_.limits.queue_bytes},
      [this] {
        // Time to compute what is admitted, waiting or running, as far as throughput is known.
        const double tokens_per_ms = batcher_->Stats().tokens_per_ms;
        const double ms =
            tokens_per_ms > 0 ? double(admission_->usage().tokens) / tokens_per_ms : 50;
        return std::clamp<int64_t>(static_cast<int64_t>(ms), 10, 1000);
      });
  service_ = std::make_unique<AttentionService>(
      ServiceParts{&options_, runtime_.get(), batcher_.get(), admission_.get(), metrics_.get(),
                   &logger_, &state_, NowUs});
  RETURN_IF_ERROR(OpenPorts());
  return PackModels();
}

absl::Status Server::OpenPorts() {
  health_.SetServing("liveness", true);
  MethodTable methods;
  for (const auto& [path, method] : service_->methods()) methods[path] = method.get();
  health_.AddTo(methods);
  if (options_.reflection) reflection_.AddTo(methods);

  DispatcherSettings settings;
  settings.listen = options_.listen;
  settings.queue_threads =
      static_cast<int>(std::max<int64_t>(1, options_.threads / kCoresPerQueueThread));
  settings.max_receive_bytes = 2 * options_.limits.message_bytes;
  settings.resource_quota_bytes = memory_.queue + (int64_t{64} << 20);
  settings.connection_age = std::chrono::seconds(options_.connection_age_seconds);
  // Longer than any stream and the last item of it: gRPC must never cut a running item.
  settings.connection_grace =
      std::chrono::seconds(options_.stream_age_seconds + options_.limits.deadline_ms / 1000 + 60);
  settings.stream_items_in_flight = options_.limits.stream_items_in_flight;
  ASSIGN_OR_RETURN(dispatcher_, Dispatcher::Start(settings, std::move(methods), *call_metrics_));

  std::string joined;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const std::string& address : dispatcher_->addresses()) {
      joined += (joined.empty() ? "" : " ") + address;
      if (address.starts_with(kUnixPrefix)) {
        const std::string path = address.substr(kUnixPrefix.size());
        if (const auto identity = IdentityOf(path)) socket_files_.push_back({path, *identity});
      } else if (const size_t colon = address.rfind(':'); colon != std::string::npos) {
        listen_ports_.push_back(std::atoi(address.c_str() + colon + 1));
      }
    }
  }

  HttpHandlers handlers;
  handlers.metrics = [this] { return metrics_->PageText(); };
  handlers.healthy = [] { return absl::OkStatus(); };
  handlers.ready = [this] { return Ready(); };
  ASSIGN_OR_RETURN(http_, HttpEndpoint::Start(options_.metrics_listen, std::move(handlers)));
  const std::string metrics =
      options_.metrics_listen.substr(0, options_.metrics_listen.rfind(':') + 1) +
      std::to_string(http_->port());
  logger_.Write(LogLevel::kInfo, "listening", {{"grpc", joined}, {"http", metrics}});
  return absl::OkStatus();
}

absl::Status Server::PackModels() {
  for (const auto& [name, checkpoint] : checkpoints_) {
    int64_t reported_us = NowUs();
    const auto progress = [&, &name = name](int done, int layers) {
      if (done < layers && NowUs() - reported_us < 1000000) return;
      reported_us = NowUs();
      logger_.Write(LogLevel::kInfo, "loading",
                    {{"model", name}, {"layers", done}, {"of", layers}});
    };
    RETURN_IF_ERROR(runtime_->AddModel(name, checkpoint, progress));
    const LoadedModel& model = runtime_->models().back();
    int64_t block_bytes = 0;
    for (const LoadedLayer& layer : model.layers) {
      if (layer.spec.causal || layer.spec.mask_selectable)
        block_bytes += layer.geometry.BlockBytes();
    }
    kv_capacity_tokens_.push_back(block_bytes == 0 ? 0 : memory_.kv / block_bytes * kBlockTokens);
    logger_.Write(LogLevel::kInfo, "loaded",
                  {{"model", name},
                   {"family", model.family},
                   {"layers", model.layers.size()},
                   {"weights", DTypeName(model.weight_dtype)},
                   {"compute", DTypeName(model.compute_dtype)},
                   {"kv", DTypeName(model.kv_dtype)},
                   {"numerics", model.numerics_id}});
  }
  checkpoints_.clear();  // the engine has packed copies
  batcher_->Start();
  state_.starting.store(false);
  health_.SetServing(kReadyServices, true);
  const EngineInfo& engine = runtime_->info();
  logger_.Write(LogLevel::kInfo, "serving",
                {{"version", ATTEND_VERSION},
                 {"replica", options_.replica_id},
                 {"engine", engine.engine},
                 {"device", engine.device},
                 {"isa", engine.isa},
                 {"threads", engine.threads},
                 {"models", runtime_->models().size()},
                 {"start_ms", (NowUs() - start_us_) / 1000}});
  return absl::OkStatus();
}

void Server::Observe(const BatchOutcome& outcome) {
  if (outcome.sequences > 0) {
    metrics_->BatchRan(outcome.tokens, outcome.tokens, outcome.sequences);
  }
  for (int64_t i = 0; i < outcome.launched_late; ++i) metrics_->LaunchedAfterDeadline();
  if (!outcome.engine.ok()) {
    logger_.Write(LogLevel::kError, "engine_failed",
                  {{"message", std::string(outcome.engine.message()) + "; exiting"}});
  }
}

absl::Status Server::Ready() const {
  if (state_.starting.load()) return absl::UnavailableError("loading models");
  if (state_.draining.load()) return absl::UnavailableError("draining");
  if (batcher_->engine_failed()) return absl::UnavailableError("the engine failed");
  return absl::OkStatus();
}

GaugeSnapshot Server::Gauges() const {
  GaugeSnapshot gauges;
  gauges.streams = state_.streams.load();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    gauges.listen_ports = listen_ports_;
  }
  if (state_.starting.load()) return gauges;
  const BatcherStats stats = batcher_->Stats();
  gauges.queue_requests = stats.queue_requests;
  gauges.queue_tokens = stats.queue_tokens;
  gauges.running_requests = stats.running_requests;
  const RuntimeStats& runtime = stats.runtime;
  gauges.kv_free_bytes = runtime.kv_capacity_bytes - runtime.kv_used_bytes;
  gauges.kv_idle_bytes = runtime.kv_idle_bytes;
  gauges.kv_active_bytes = runtime.kv_used_bytes - runtime.kv_idle_bytes;
  gauges.kv_capacity_tokens = kv_capacity_tokens_;
  gauges.sessions_active = runtime.sessions_active;
  gauges.sessions_idle = runtime.sessions_open - runtime.sessions_active;
  if (const int64_t progress_ns = runtime_->progress_ns(); progress_ns > 0) {
    const double ago =
        static_cast<double>(NowUs()) * 1e-6 - static_cast<double>(progress_ns) * 1e-9;
    const double now =
        std::chrono::duration<double>(system_clock::now().time_since_epoch()).count();
    gauges.engine_progress_seconds = now - std::max(0.0, ago);
  }
  return gauges;
}

void Server::RequestStop() {
  std::lock_guard<std::mutex> lock(mutex_);
  stop_ = true;
  stop_changed_.notify_all();
}

void Server::RemoveSocketFiles() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const SocketFile& file : socket_files_) {
    if (IdentityOf(file.path) == file.identity) unlink(file.path.c_str());
  }
  socket_files_.clear();
}

bool Server::WaitForStop(int64_t wait_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  return stop_changed_.wait_for(lock, milliseconds(wait_ms), [this] { return stop_; });
}

// A stream that reached its age answers what it has accepted; its client opens a new one, perhaps
// elsewhere.
void Server::EndOldStreams() {
  const auto oldest = steady_clock::now() - std::chrono::seconds(options_.stream_age_seconds);
  for (const std::shared_ptr<Call>& stream : dispatcher_->Streams()) {
    if (stream->method().name() != "AttendStream" || stream->received() > oldest) continue;
    stream->EndStream(MakeError(
        absl::StatusCode::kUnavailable,
        {.reason = Reason::kDraining,
         .field = "stream_age",
         .got = "an older stream",
         .wanted = "streams of at most " + std::to_string(options_.stream_age_seconds) + " s"}));
  }
}

absl::Status Server::Run() {
  while (!batcher_->engine_failed() && !WaitForStop(kTickMs)) {
    EndOldStreams();
    dispatcher_->EndOverdueRequests(milliseconds(options_.limits.deadline_ms));
  }
  if (!batcher_->engine_failed()) Drain();
  if (!batcher_->engine_failed()) return absl::OkStatus();
  // The batcher answers all that it has with ENGINE_FAULT.
  const absl::Status fault =
      MakeError(absl::StatusCode::kInternal, {.reason = Reason::kEngineFault}, "the engine failed");
  StopServing();
  EndCalls(fault);
  return fault;
}

void Server::StopServing() { health_.SetServing(kReadyServices, false); }

// Calls that are running get their answers, all others `reason` or UNAVAILABLE.
void Server::EndCalls(const absl::Status& reason) {
  dispatcher_->Refuse(system_clock::now() + kLastAnswers);
  batcher_->Stop(reason);
  // No gRPC shutdown: to calls that cross with it, it answers CANCELLED, as if their callers had
  // given up. Until the process ends they are refused, then the kernel closes the connections,
  // which clients and balancers take as UNAVAILABLE.
  std::this_thread::sleep_for(kLastWrites);
}

bool Server::Quiet() const {
  return batcher_->idle() && batcher_->Stats().runtime.sessions_open == 0 &&
         state_.in_flight.load() == 0;
}

void Server::Drain() {
  const auto asked = steady_clock::now();
  const auto limit = asked + std::chrono::seconds(options_.drain_limit_seconds);
  state_.draining.store(true);
  StopServing();
  logger_.Write(LogLevel::kInfo, "draining",
                {{"delay_seconds", options_.drain_delay_seconds},
                 {"limit_seconds", options_.drain_limit_seconds}});
  std::this_thread::sleep_until(
      std::min(limit, asked + std::chrono::seconds(options_.drain_delay_seconds)));
  state_.refusing_from.store(steady_clock::now());
  do {  // the first look comes later, too: what has just begun may not be counted yet
    if (batcher_->engine_failed()) return;
    std::this_thread::sleep_for(milliseconds(kDrainTickMs));
  } while (!Quiet() && steady_clock::now() < limit);
  const int64_t lost = batcher_->Stats().runtime.sessions_open;
  const absl::Status reason =
      MakeError(absl::StatusCode::kUnavailable, {.reason = Reason::kDraining}, "the server stops");
  EndCalls(reason);
  logger_.Write(LogLevel::kInfo, "stopped", {{"sessions_lost", lost}});
}

}  // namespace attend
