// SPDX-License-Identifier: Apache-2.0
#include "server/metrics.h"

#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <array>
#include <utility>

#include "engine/util/check.h"
#include "server/machine.h"

namespace attend {
namespace {

constexpr SeriesRow kSeries[] = {
    {"attend_requests_started_total", "counter", "method", "Requests received."},
    {"attend_requests_total", "counter", "method,code", "Requests answered."},
    {"attend_request_seconds", "histogram", "method,model",
     "From the first byte received to the answer handed to the network."},
    {"attend_phase_seconds", "histogram", "phase", "Time requests spend in each phase."},
    {"attend_queue_requests", "gauge", "", "Requests admitted and in no batch yet."},
    {"attend_queue_tokens", "gauge", "", "Rows of the requests in the queue."},
    {"attend_running_requests", "gauge", "", "Requests whose computation has begun."},
    {"attend_batches_total", "counter", "", "Batches the engine ran."},
    {"attend_batch_tokens", "histogram", "", "Rows per batch."},
    {"attend_batch_sequences", "histogram", "", "Sequences per batch."},
    {"attend_tokens_total", "counter", "model,kind",
     "Rows of answered requests; decode = sequences of one row with a history."},
    {"attend_padding_tokens_total", "counter", "", "Rows computed minus rows asked for."},
    {"attend_kv_utilization_ratio", "gauge", "", "Share of the KV memory that sessions hold."},
    {"attend_kv_bytes", "gauge", "state",
     "KV memory: free, or held by sessions with (active) and without (idle) a call."},
    {"attend_kv_capacity_tokens", "gauge", "model",
     "Tokens of sessions of this model that fill the KV memory."},
    {"attend_sessions", "gauge", "state", "Open sessions with (active) and without (idle) a call."},
    {"attend_sessions_ended_total", "counter", "reason", "Sessions that ended."},
    {"attend_rejected_total", "counter", "reason",
     "Requests and streams refused or answered with an error, by the reason in ErrorDetail."},
    {"attend_cancelled_total", "counter", "stage",
     "Requests their client gave up, by where they were."},
    {"attend_launched_after_deadline_total", "counter", "",
     "Requests put into a batch after their deadline; must stay 0."},
    {"attend_engine_progress_timestamp_seconds", "gauge", "",
     "When a worker last finished a task, Unix time."},
    {"attend_streams", "gauge", "", "Open AttendStream calls."},
    {"attend_connections", "gauge", "", "Established TCP connections on the gRPC listeners."},
    {"attend_build_info", "gauge", "version,engine,isa,numerics", "Always 1; the labels inform."},
    {"process_cpu_seconds_total", "counter", "", "User and system CPU time."},
    {"process_resident_memory_bytes", "gauge", "", "Resident memory."},
    {"process_virtual_memory_bytes", "gauge", "", "Virtual memory."},
    {"process_open_fds", "gauge", "", "Open file descriptors."},
    {"process_max_fds", "gauge", "", "Most open file descriptors allowed."},
    {"process_start_time_seconds", "gauge", "", "When the process started, Unix time."},
};

const SeriesRow& Row(std::string_view name) {
  const auto* row =
      std::find_if(std::begin(kSeries), std::end(kSeries),
                   [&](const SeriesRow& candidate) { return candidate.name == name; });
  CHECK(row != std::end(kSeries));
  return *row;
}

constexpr std::array kMethodNames = {
    "Attend",          "AttendStream", "OpenSession", "GetSession",    "ForkSession",
    "TruncateSession", "CloseSession", "ListModels",  "GetServerInfo", "other"};
constexpr size_t kMethods = kMethodNames.size();
constexpr std::array kCodeNames = {
    "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED"};
constexpr std::array kPhaseNames = {"receive", "queue", "project", "attend", "output", "send"};
constexpr std::array kStageNames = {"receive", "queue", "run", "send"};
constexpr std::array kKindNames = {"prefill", "decode"};
constexpr std::array kEndNames = {"closed", "expired", "evicted", "lost_in_restart"};
// Null: not a refusal. By the number of Reason.
constexpr std::array<const char*, 22> kReasonNames = {nullptr,
                                                      "INVALID_FIELD",
                                                      "UNKNOWN_MODEL",
                                                      "UNKNOWN_LAYER",
                                                      "SESSION_NOT_FOUND",
                                                      "SESSION_EXPIRED",
                                                      "SESSION_EVICTED",
                                                      "SESSION_CLOSED",
                                                      "SESSION_LOST_IN_RESTART",
                                                      "SESSION_MOVED",
                                                      "POSITION_MISMATCH",
                                                      "QUEUE_FULL",
                                                      "KV_EXHAUSTED",
                                                      "QUOTA",
                                                      "TOO_LARGE",
                                                      "DRAINING",
                                                      "STARTING",
                                                      "DEADLINE",
                                                      nullptr,
                                                      nullptr,
                                                      "UNSUPPORTED",
                                                      "CONTEXT_CONFLICT"};

// Methods about a model or a session of one.
bool HasModel(RpcMethod method) { return method < RpcMethod::kListModels; }

// first, 2 x first, ... up to the first value above `reach`.
std::vector<double> Doubling(double first, double reach) {
  std::vector<double> bounds = {first};
  while (bounds.back() <= reach) bounds.push_back(bounds.back() * 2);
  return bounds;
}

template <typename T>
prometheus::Family<T>& MakeFamily(prometheus::Registry& registry, std::string_view name) {
  const SeriesRow& row = Row(name);
  return prometheus::detail::Builder<T>()
      .Name(std::string(row.name))
      .Help(std::string(row.help))
      .Register(registry);
}

prometheus::Counter& SingleCounter(prometheus::Registry& registry, std::string_view name) {
  return MakeFamily<prometheus::Counter>(registry, name).Add({});
}

// One counter per name; null where the name is null.
template <size_t n>
std::array<prometheus::Counter*, n> CountersBy(prometheus::Registry& registry,
                                               std::string_view name, const std::string& label,
                                               const std::array<const char*, n>& values) {
  auto& family = MakeFamily<prometheus::Counter>(registry, name);
  std::array<prometheus::Counter*, n> counters{};
  for (size_t i = 0; i < n; ++i) {
    if (values[i] != nullptr) counters[i] = &family.Add({{label, values[i]}});
  }
  return counters;
}

// What a page says besides the registry: states, asked for now.
class StateSeries {
 public:
  std::vector<prometheus::MetricFamily> Take() { return std::move(families_); }

  using Labels = std::vector<prometheus::ClientMetric::Label>;
  void Add(std::string_view name, double value, Labels labels = {}) {
    const SeriesRow& row = Row(name);
    const bool counter = row.type == "counter";
    if (families_.empty() || families_.back().name != name) {
      families_.push_back(
          {std::string(row.name),
           std::string(row.help),
           counter ? prometheus::MetricType::Counter : prometheus::MetricType::Gauge,
           {}});
    }
    prometheus::ClientMetric metric;
    metric.label = std::move(labels);
    (counter ? metric.counter.value : metric.gauge.value) = value;
    families_.back().metric.push_back(std::move(metric));
  }

 private:
  std::vector<prometheus::MetricFamily> families_;
};

void AddProcess(StateSeries& series) {
  const ProcessUsage usage = ReadProcessUsage();
  series.Add("process_cpu_seconds_total", usage.cpu_seconds);
  series.Add("process_resident_memory_bytes", static_cast<double>(usage.resident_bytes));
  series.Add("process_virtual_memory_bytes", static_cast<double>(usage.virtual_bytes));
  series.Add("process_open_fds", static_cast<double>(usage.open_fds));
  series.Add("process_max_fds", static_cast<double>(usage.max_fds));
  series.Add("process_start_time_seconds", usage.start_seconds);
}

void AddStates(const GaugeSnapshot& now, const MetricsConfig& config, StateSeries& series) {
  const auto add = [&](std::string_view name, int64_t value, StateSeries::Labels labels = {}) {
    series.Add(name, static_cast<double>(value), std::move(labels));
  };
  add("attend_queue_requests", now.queue_requests);
  add("attend_queue_tokens", now.queue_tokens);
  add("attend_running_requests", now.running_requests);
  const int64_t held_bytes = now.kv_active_bytes + now.kv_idle_bytes;
  const int64_t kv_bytes = held_bytes + now.kv_free_bytes;
  series.Add("attend_kv_utilization_ratio",
             kv_bytes > 0 ? static_cast<double>(held_bytes) / static_cast<double>(kv_bytes) : 0);
  add("attend_kv_bytes", now.kv_free_bytes, {{"state", "free"}});
  add("attend_kv_bytes", now.kv_active_bytes, {{"state", "active"}});
  add("attend_kv_bytes", now.kv_idle_bytes, {{"state", "idle"}});
  for (size_t i = 0; i < config.models.size(); ++i) {
    add("attend_kv_capacity_tokens",
        i < now.kv_capacity_tokens.size() ? now.kv_capacity_tokens[i] : 0,
        {{"model", config.models[i]}});
  }
  add("attend_sessions", now.sessions_active, {{"state", "active"}});
  add("attend_sessions", now.sessions_idle, {{"state", "idle"}});
  series.Add("attend_engine_progress_timestamp_seconds", now.engine_progress_seconds);
  add("attend_streams", now.streams);
  add("attend_connections", CountConnections(now.listen_ports));
  series.Add("attend_build_info", 1,
             {{"version", config.version},
              {"engine", config.engine},
              {"isa", config.isa},
              {"numerics", config.numerics}});
}

}  // namespace

// Built once; afterwards the registry is only read.
struct Metrics::Children {
  Children(const MetricsConfig& config, std::function<GaugeSnapshot()> snapshot);

  // Position of a model among the per-model children: loaded models, then raw, then none.
  size_t ModelIndex(int model) const {
    const size_t loaded = config.models.size();
    if (model >= 0 && static_cast<size_t>(model) < loaded) return static_cast<size_t>(model);
    return model == kModelRaw ? loaded : loaded + 1;
  }

  const MetricsConfig config;
  const std::function<GaugeSnapshot()> snapshot;
  prometheus::Registry registry;
  std::array<std::array<prometheus::Counter*, kCodeNames.size()>, kMethods> finished{};
  std::array<prometheus::Counter*, kMethods> started{};
  std::array<std::vector<prometheus::Histogram*>, kMethods> seconds;  // by ModelIndex
  std::array<prometheus::Histogram*, kPhaseNames.size()> phases{};
  std::vector<std::array<prometheus::Counter*, kKindNames.size()>> tokens;  // by ModelIndex
  std::array<prometheus::Counter*, kReasonNames.size()> rejected{};
  std::array<prometheus::Counter*, kStageNames.size()> cancelled{};
  std::array<prometheus::Counter*, kEndNames.size()> sessions_ended{};
  prometheus::Counter* batches = nullptr;
  prometheus::Counter* padding_tokens = nullptr;
  prometheus::Counter* launched_after_deadline = nullptr;
  prometheus::Histogram* batch_tokens = nullptr;
  prometheus::Histogram* batch_sequences = nullptr;
};

Metrics::Children::Children(const MetricsConfig& metrics_config,
                            std::function<GaugeSnapshot()> take_snapshot)
    : config(metrics_config), snapshot(std::move(take_snapshot)) {
  std::vector<std::string> models = config.models;
  models.insert(models.end(), {"raw", "none"});
  const std::vector<double> time_bounds =
      Doubling(10e-6, static_cast<double>(config.deadline_ms) * 1e-3);

  // A page reads families in the order they were made: finished before started, so that no page
  // shows more answers than requests.
  auto& finished_family = MakeFamily<prometheus::Counter>(registry, "attend_requests_total");
  auto& seconds_family = MakeFamily<prometheus::Histogram>(registry, "attend_request_seconds");
  for (size_t method = 0; method < kMethods; ++method) {
    for (size_t code = 0; code < kCodeNames.size(); ++code) {
      finished[method][code] =
          &finished_family.Add({{"method", kMethodNames[method]}, {"code", kCodeNames[code]}});
    }
    for (size_t model = 0; model < models.size(); ++model) {
      const bool exists = HasModel(static_cast<RpcMethod>(method)) || models[model] == "none";
      seconds[method].push_back(
          exists ? &seconds_family.Add({{"method", kMethodNames[method]}, {"model", models[model]}},
                                       time_bounds)
                 : nullptr);
    }
  }
  started = CountersBy(registry, "attend_requests_started_total", "method", kMethodNames);
  auto& phase_family = MakeFamily<prometheus::Histogram>(registry, "attend_phase_seconds");
  for (size_t phase = 0; phase < kPhaseNames.size(); ++phase) {
    phases[phase] = &phase_family.Add({{"phase", kPhaseNames[phase]}}, time_bounds);
  }
  auto& token_family = MakeFamily<prometheus::Counter>(registry, "attend_tokens_total");
  for (const std::string& model : models) {
    if (model == "none") continue;  // answered work has a model
    auto& kinds = tokens.emplace_back();
    for (size_t kind = 0; kind < kKindNames.size(); ++kind) {
      kinds[kind] = &token_family.Add({{"model", model}, {"kind", kKindNames[kind]}});
    }
  }
  rejected = CountersBy(registry, "attend_rejected_total", "reason", kReasonNames);
  cancelled = CountersBy(registry, "attend_cancelled_total", "stage", kStageNames);
  sessions_ended = CountersBy(registry, "attend_sessions_ended_total", "reason", kEndNames);
  batches = &SingleCounter(registry, "attend_batches_total");
  padding_tokens = &SingleCounter(registry, "attend_padding_tokens_total");
  launched_after_deadline = &SingleCounter(registry, "attend_launched_after_deadline_total");
  const std::vector<double> batch_bounds =
      Doubling(1, static_cast<double>(config.batch_tokens) - 1);
  batch_tokens =
      &MakeFamily<prometheus::Histogram>(registry, "attend_batch_tokens").Add({}, batch_bounds);
  batch_sequences =
      &MakeFamily<prometheus::Histogram>(registry, "attend_batch_sequences").Add({}, batch_bounds);
}

Metrics::Metrics(const MetricsConfig& config, std::function<GaugeSnapshot()> snapshot)
    : children_(std::make_unique<Children>(config, std::move(snapshot))) {}

Metrics::~Metrics() = default;

void Metrics::RequestStarted(RpcMethod method) {
  children_->started[static_cast<size_t>(method)]->Increment();
}

void Metrics::RequestFinished(RpcMethod method, absl::StatusCode code, int model, double seconds) {
  const auto method_index = static_cast<size_t>(method);
  auto code_index = static_cast<size_t>(code);
  if (code_index >= kCodeNames.size()) code_index = static_cast<size_t>(absl::StatusCode::kUnknown);
  const size_t model_index = children_->ModelIndex(HasModel(method) ? model : kModelNone);
  children_->seconds[method_index][model_index]->Observe(seconds);
  children_->finished[method_index][code_index]->Increment();
}

void Metrics::PhaseTook(Phase phase, double seconds) {
  children_->phases[static_cast<size_t>(phase)]->Observe(seconds);
}

void Metrics::Rejected(Reason reason) {
  const auto index = static_cast<size_t>(reason);
  if (index >= kReasonNames.size() || children_->rejected[index] == nullptr) return;
  children_->rejected[index]->Increment();
}

void Metrics::Cancelled(CancelStage stage) {
  children_->cancelled[static_cast<size_t>(stage)]->Increment();
}

void Metrics::LaunchedAfterDeadline() { children_->launched_after_deadline->Increment(); }

void Metrics::BatchRan(int64_t rows_asked, int64_t rows_computed, int64_t sequences) {
  children_->batches->Increment();
  children_->batch_tokens->Observe(static_cast<double>(rows_asked));
  children_->batch_sequences->Observe(static_cast<double>(sequences));
  children_->padding_tokens->Increment(static_cast<double>(rows_computed - rows_asked));
}

void Metrics::TokensAnswered(int model, TokenKind kind, int64_t rows) {
  const size_t index = children_->ModelIndex(model);
  if (index >= children_->tokens.size()) return;
  children_->tokens[index][static_cast<size_t>(kind)]->Increment(static_cast<double>(rows));
}

void Metrics::SessionEnded(SessionEnd reason, int64_t sessions) {
  children_->sessions_ended[static_cast<size_t>(reason)]->Increment(static_cast<double>(sessions));
}

std::string Metrics::PageText() const {
  std::vector<prometheus::MetricFamily> families = children_->registry.Collect();
  StateSeries states;
  AddStates(children_->snapshot(), children_->config, states);
  AddProcess(states);
  for (prometheus::MetricFamily& family : states.Take()) families.push_back(std::move(family));
  return prometheus::TextSerializer().Serialize(families);
}

RpcMethod MethodFromName(std::string_view name) {
  for (size_t i = 0; i + 1 < kMethods; ++i) {
    if (name == kMethodNames[i]) return static_cast<RpcMethod>(i);
  }
  return RpcMethod::kOther;
}

const char* MethodName(RpcMethod method) { return kMethodNames[static_cast<size_t>(method)]; }

std::vector<SeriesRow> SeriesTable() { return {std::begin(kSeries), std::end(kSeries)}; }

}  // namespace attend
