// SPDX-License-Identifier: Apache-2.0
#include "server/attention_service.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <mutex>
#include <optional>

#include "engine/util/error.h"
#include "engine/util/status_macros.h"
#include "server/rpc/status.h"
#include "server/rpc/wire.h"

namespace attend {
namespace {

constexpr char kServicePath[] = "/attend.v1.Attention/";
// Unused input buffers kept for the next requests.
constexpr int64_t kBuffersKeptBytes = int64_t{256} << 20;
// A call slower than this is logged although it succeeded.
constexpr int64_t kSlowUs = 1000000;
constexpr size_t kLoggedBytes = 128;  // of a name that a request brought
double Seconds(int64_t us) { return static_cast<double>(us) * 1e-6; }

// "QUEUE_FULL", as in the contract.
std::string ReasonName(Reason reason) { return v1::Reason_Name(static_cast<v1::Reason>(reason)); }

absl::Status Unavailable(Reason reason, const char* message) {
  return MakeError(absl::StatusCode::kUnavailable, {.reason = reason, .retry_after_ms = 1000},
                   message);
}

absl::Status Starting() {
  return Unavailable(Reason::kStarting, "the server is loading its models");
}

absl::Status Draining() {
  return Unavailable(Reason::kDraining,
                     "the server is draining: it takes no new sessions and no work without one");
}

absl::Status TooLarge(const char* field, int64_t got, int64_t limit) {
  return MakeError(absl::StatusCode::kInvalidArgument,
                   {.reason = Reason::kTooLarge,
                    .field = field,
                    .got = std::to_string(got) + " bytes",
                    .wanted = "at most message_bytes " + std::to_string(limit)});
}

// The metadata attend-bytes: size of the message, or of a stream's largest item.
absl::StatusOr<std::optional<int64_t>> AnnouncedBytes(const Call& call, int64_t limit) {
  const std::optional<std::string_view> given = call.Metadata("attend-bytes");
  if (!given.has_value()) return std::optional<int64_t>();
  const std::string text(*given);
  int64_t bytes = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bytes);
  if (error != std::errc() || end != text.data() + text.size() || bytes < 0) {
    return InvalidField("attend-bytes", text.substr(0, 40), "the size of the message in bytes");
  }
  if (bytes > limit) return TooLarge("attend-bytes", bytes, limit);
  return std::optional<int64_t>(bytes);
}

// What the service keeps with a call from its headers on; freed with the call.
struct AttendCall {
  std::optional<int64_t> announced_bytes;
  std::mutex mutex;
  Admission::Slot slot;                                // a unary call's, taken on its headers
  std::map<int64_t, std::shared_ptr<AttendJob>> jobs;  // running, by item; guarded by mutex
};

// Attend and AttendStream.
class AttendMethod : public Method {
 public:
  AttendMethod(const ServiceParts& parts, std::shared_ptr<BufferPool> buffers, std::string name,
               MethodKind kind)
      : Method(std::move(name), kind), parts_(parts) {
    context_.models = &parts.runtime->models();
    context_.max_head_dim = parts.runtime->info().max_head_dim;
    context_.buffers = std::move(buffers);
    context_.request_tokens = parts.options->limits.request_tokens;
    context_.response_bytes = parts.options->limits.response_bytes;
    context_.replica = parts.options->replica_id;
  }

  absl::Status Admit(Call& call) override {
    if (parts_.state->starting.load()) return Starting();
    auto kept = std::make_shared<AttendCall>();
    ASSIGN_OR_RETURN(kept->announced_bytes,
                     AnnouncedBytes(call, parts_.options->limits.message_bytes));
    if (!streaming() && kept->announced_bytes.has_value()) {
      RETURN_IF_ERROR(parts_.admission->Reserve(1, 0, *kept->announced_bytes, kept->slot));
    }
    call.Attach(std::move(kept));
    return absl::OkStatus();
  }

  void OnMessage(std::shared_ptr<Call> call, grpc::ByteBuffer message, int64_t item) override {
    const int64_t arrival_us = parts_.now_us();
    auto kept = std::static_pointer_cast<AttendCall>(call->attachment());
    auto slot = std::make_shared<Admission::Slot>();
    auto converted = std::make_shared<ConvertedAttend>();
    int model = kModelNone;
    if (absl::Status status =
            Accept(*kept, call->Arrived(item), message, *slot, *converted, &model);
        !status.ok()) {
      parts_.metrics->Rejected(ReasonOf(status));
      Log(*call, *converted, status, parts_.now_us() - arrival_us);
      Send(*call, item, *converted, status, model);
      return;
    }
    AttendJob& job = *converted->job;
    job.arrival_us = arrival_us;
    job.deadline_us = Deadline(*call, *converted, arrival_us);
    {
      std::lock_guard<std::mutex> lock(kept->mutex);
      kept->jobs[item] = converted->job;
    }
    if (call->cancelled()) job.cancelled.store(true);
    parts_.batcher->Submit(converted->job,
                           [this, call, kept, item, converted, slot](absl::Status status) {
                             {
                               std::lock_guard<std::mutex> lock(kept->mutex);
                               kept->jobs.erase(item);
                             }
                             slot->Release();
                             Answer(*call, item, *converted, status);
                           });
  }

  void OnCancelled(Call& call) override {
    const auto kept = std::static_pointer_cast<AttendCall>(call.attachment());
    std::lock_guard<std::mutex> lock(kept->mutex);
    for (auto& [item, job] : kept->jobs) job->cancelled.store(true);
    if (!kept->jobs.empty()) parts_.batcher->Wake();
  }

 private:
  // Size, queue and draining rules, then the contract's (convert). `model` is a refusal's label.
  absl::Status Accept(AttendCall& kept, Call::Clock::time_point arrived,
                      const grpc::ByteBuffer& message, Admission::Slot& slot,
                      ConvertedAttend& converted, int* model) {
    // Decoding copies no tensor; it comes first so that a refused item can be told by its id.
    absl::StatusOr<ReceivedAttend> request = ReceivedAttend::Decode(message);
    if (request.ok()) {
      const v1::AttendRequest& asked = request->request;
      converted.request_id = asked.request_id();
      converted.asked_model = asked.has_raw() ? "raw" : asked.model().substr(0, kLoggedBytes);
      converted.asked_layer = asked.layer().substr(0, kLoggedBytes);
      if (asked.sequences_size() > 0) converted.asked_session_id = asked.sequences(0).session_id();
      *model = ModelLabel(*context_.models, asked);
    }
    const auto bytes = static_cast<int64_t>(message.Length());
    const int64_t limit = parts_.options->limits.message_bytes;
    if (bytes > limit) return TooLarge("request", bytes, limit);
    RETURN_IF_ERROR(request.status());
    if (kept.announced_bytes.has_value() && bytes > *kept.announced_bytes) {
      return InvalidField("attend-bytes", std::to_string(*kept.announced_bytes),
                          "at least the message's " + std::to_string(bytes) + " bytes");
    }
    slot = std::move(kept.slot);
    if (!slot.held()) RETURN_IF_ERROR(parts_.admission->Reserve(1, 0, bytes, slot));
    if (parts_.state->Refuses(arrived) && !NamesSession(request->request)) return Draining();
    ASSIGN_OR_RETURN(converted, ConvertAttend(context_, *request, [&](int64_t tokens) {
                       return parts_.admission->Reserve(0, tokens, 0, slot);
                     }));
    return absl::OkStatus();
  }

  static int ModelLabel(const std::vector<LoadedModel>& models, const v1::AttendRequest& request) {
    if (request.has_raw()) return kModelRaw;
    if (request.model().empty() && models.size() == 1) return 0;
    for (size_t i = 0; i < models.size(); ++i) {
      if (models[i].name == request.model()) return static_cast<int>(i);
    }
    return kModelNone;
  }

  static bool NamesSession(const v1::AttendRequest& request) {
    return std::any_of(request.sequences().begin(), request.sequences().end(),
                       [](const v1::Sequence& sequence) { return !sequence.session_id().empty(); });
  }

  int64_t Deadline(const Call& call, const ConvertedAttend& converted, int64_t now_us) const {
    int64_t left_us = parts_.options->limits.deadline_ms * 1000;
    if (converted.timeout_us > 0) left_us = std::min(left_us, converted.timeout_us);
    if (call.deadline().has_value()) {
      const auto left = std::chrono::duration_cast<std::chrono::microseconds>(*call.deadline() -
                                                                              Call::Clock::now());
      left_us = std::min<int64_t>(left_us, left.count());
    }
    return now_us + left_us;
  }

  void Answer(Call& call, int64_t item, ConvertedAttend& converted, const absl::Status& status) {
    AttendJob& job = *converted.job;
    const int64_t now_us = parts_.now_us();
    const int model = job.model < 0 ? kModelRaw : job.model;
    if (job.first_batch_us > 0) {
      parts_.metrics->PhaseTook(Phase::kQueue, Seconds(job.first_batch_us - job.arrival_us));
      parts_.metrics->PhaseTook(Phase::kProject, Seconds(job.project_us));
      parts_.metrics->PhaseTook(Phase::kAttend, Seconds(job.attend_us));
      parts_.metrics->PhaseTook(Phase::kOutput, Seconds(job.output_us));
    }
    if (!status.ok()) {
      if (absl::IsCancelled(status)) {
        parts_.metrics->Cancelled(job.first_batch_us > 0 ? CancelStage::kRun : CancelStage::kQueue);
      }
      parts_.metrics->Rejected(ReasonOf(status));
      Log(call, converted, status, now_us - job.arrival_us);
      Send(call, item, converted, status, model);
      return;
    }
    CountTokens(job, model);
    if (now_us - job.arrival_us > kSlowUs) Log(call, converted, status, now_us - job.arrival_us);
    call.Answer(item,
                EncodeAttendResponse(ToResponse(context_, converted, now_us), OutputOf(converted)),
                absl::StatusCode::kOk, model);
  }

  // Stream items carry their error inside a response that names the request.
  void Send(Call& call, int64_t item, const ConvertedAttend& converted, const absl::Status& status,
            int model) {
    if (!streaming()) return call.Answer(item, status, model);
    v1::AttendResponse response;
    response.set_request_id(converted.request_id);
    *response.mutable_error() = ToWireStatus(status);
    call.Answer(item, EncodeMessage(response), status.code(), model);
  }

  void CountTokens(const AttendJob& job, int model) {
    int64_t decode = 0;
    int64_t prefill = 0;
    for (const SequenceJob& sequence : job.sequences) {
      const bool history = sequence.cached_before > 0 && !sequence.session_id.empty();
      (sequence.rows == 1 && history ? decode : prefill) += sequence.rows;
    }
    if (decode > 0) parts_.metrics->TokensAnswered(model, TokenKind::kDecode, decode);
    if (prefill > 0) parts_.metrics->TokensAnswered(model, TokenKind::kPrefill, prefill);
  }

  void Log(const Call& call, const ConvertedAttend& converted, const absl::Status& status,
           int64_t total_us) {
    const AttendJob* job = converted.job.get();
    const std::string session_id = job == nullptr           ? converted.asked_session_id
                                   : job->sequences.empty() ? ""
                                                            : job->sequences[0].session_id;
    const std::string session = session_id.empty() ? "" : HashedId(session_id);
    const std::vector<LoadedModel>& models = parts_.runtime->models();
    const std::string model = job == nullptr   ? converted.asked_model
                              : job->model < 0 ? "raw"
                                               : models[static_cast<size_t>(job->model)].name;
    const int64_t queue_us =
        job == nullptr || job->first_batch_us == 0 ? 0 : job->first_batch_us - job->arrival_us;
    parts_.logger->Write(status.ok() ? LogLevel::kInfo : LogLevel::kWarning,
                         status.ok() ? "slow_call" : "call_failed",
                         {{"method", name()},
                          {"request_id", converted.request_id},
                          {"trace", call.traceparent()},
                          {"session", session},
                          {"model", model},
                          {"layer", job == nullptr ? converted.asked_layer : job->layer_name},
                          {"tokens", job == nullptr ? int64_t{0} : job->tokens()},
                          {"queue_us", queue_us},
                          {"compute_us", job == nullptr ? int64_t{0} : job->compute_us},
                          {"total_us", total_us},
                          {"code", absl::StatusCodeToString(status.code())},
                          {"reason", ReasonName(ReasonOf(status))},
                          {"message", std::string(status.message())}});
  }

  const ServiceParts& parts_;
  ConvertContext context_;
};

// A method whose answer needs one look at the runtime on the engine thread, or none at all.
template <typename Request>
class SmallMethod : public Method {
 public:
  // Sends the answer itself, now or later: done(message or error, model label).
  using Done = std::function<void(absl::StatusOr<grpc::ByteBuffer>, int model)>;
  using Run = std::function<void(const Request&, Done)>;

  SmallMethod(const ServiceParts& parts, std::string name, bool works_while_starting, Run run)
      : Method(std::move(name), MethodKind::kUnary),
        parts_(parts),
        works_while_starting_(works_while_starting),
        run_(std::move(run)) {}

  absl::Status Admit(Call&) override {
    return parts_.state->starting.load() && !works_while_starting_ ? Starting() : absl::OkStatus();
  }

  void OnMessage(std::shared_ptr<Call> call, grpc::ByteBuffer message, int64_t item) override {
    const auto bytes = static_cast<int64_t>(message.Length());
    const int64_t limit = parts_.options->limits.message_bytes;
    const absl::StatusOr<Request> request =
        bytes > limit ? TooLarge("request", bytes, limit) : ParseMessage<Request>(message);
    std::string session;
    if constexpr (requires { request->session_id(); }) {
      if (request.ok()) session = HashedId(request->session_id());
    }
    const Done done = [this, call, item, session](absl::StatusOr<grpc::ByteBuffer> answer,
                                                  int model) {
      if (answer.ok()) {
        call->Answer(item, *std::move(answer), absl::StatusCode::kOk, model);
        return;
      }
      const Reason reason = ReasonOf(answer.status());
      parts_.metrics->Rejected(reason);
      parts_.logger->Write(LogLevel::kWarning, "call_failed",
                           {{"method", name()},
                            {"trace", call->traceparent()},
                            {"session", session},
                            {"code", absl::StatusCodeToString(answer.status().code())},
                            {"reason", ReasonName(reason)},
                            {"message", std::string(answer.status().message())}});
      call->Answer(item, answer.status(), model);
    };
    if (!request.ok()) {
      done(request.status(), kModelNone);
    } else {
      run_(*request, done);
    }
  }

 private:
  const ServiceParts& parts_;
  const bool works_while_starting_;
  const Run run_;
};

v1::ServerInfo ServerInfoOf(const ServiceParts& parts) {
  const Options& options = *parts.options;
  const EngineInfo& engine = parts.runtime->info();
  v1::ServerInfo info;
  info.set_version(ATTEND_VERSION);
  info.set_replica(options.replica_id);
  info.set_engine(engine.engine);
  info.set_device(engine.device);
  info.set_isa(engine.isa);
  info.set_numerics_id(engine.numerics_id);
  info.set_threads(engine.threads);
  info.set_draining(parts.state->draining.load());
  v1::Limits& limits = *info.mutable_limits();
  limits.set_message_bytes(options.limits.message_bytes);
  limits.set_response_bytes(options.limits.response_bytes);
  limits.set_request_tokens(options.limits.request_tokens);
  limits.set_batch_tokens(options.limits.batch_tokens);
  limits.set_queue_requests(options.limits.queue_requests);
  limits.set_queue_tokens(options.limits.queue_tokens);
  limits.set_queue_bytes(options.limits.queue_bytes);
  limits.set_kv_bytes(options.limits.kv_bytes);
  limits.set_sessions(options.limits.sessions);
  limits.set_deadline_ms(options.limits.deadline_ms);
  limits.set_session_ttl_seconds(options.limits.session_ttl_seconds);
  limits.set_stream_items_in_flight(options.limits.stream_items_in_flight);
  return info;
}

int ModelOf(const AttentionRuntime& runtime, const SessionState& state) {
  for (size_t i = 0; i < runtime.models().size(); ++i) {
    if (runtime.models()[i].name == state.model) return static_cast<int>(i);
  }
  return kModelRaw;
}

}  // namespace

AttentionService::AttentionService(ServiceParts given) : parts_(std::move(given)) {
  const ServiceParts& parts = parts_;
  const auto add = [&](std::unique_ptr<Method> method) {
    const std::string path = kServicePath + method->name();
    methods_.emplace_back(path, std::move(method));
  };
  const std::shared_ptr<BufferPool> buffers = BufferPool::Make(kBuffersKeptBytes);
  add(std::make_unique<AttendMethod>(parts, buffers, "Attend", MethodKind::kUnary));
  add(std::make_unique<AttendMethod>(parts, buffers, "AttendStream", MethodKind::kBidiStream));

  // A session call runs on the engine thread after the session's earlier work.
  const auto on_session = [&parts](const std::string& session_id, const auto& done, auto call) {
    parts.batcher->SubmitControl(
        session_id,
        [done, call](AttentionRuntime& runtime) {
          const absl::StatusOr<SessionState> state = call(runtime);
          if (!state.ok()) return done(state.status(), kModelNone);
          done(EncodeMessage(ToProto(*state)), ModelOf(runtime, *state));
        },
        [done](absl::Status stopped) { done(std::move(stopped), kModelNone); });
  };
  add(std::make_unique<SmallMethod<v1::OpenSessionRequest>>(
      parts, "OpenSession", false, [&parts, on_session](const auto& request, auto done) {
        if (parts.state->Refuses(Call::Clock::now())) return done(Draining(), kModelNone);
        ConvertContext context;
        context.models = &parts.runtime->models();
        context.max_head_dim = parts.runtime->info().max_head_dim;
        absl::StatusOr<OpenSessionArguments> arguments = ConvertOpenSession(context, request);
        if (!arguments.ok()) return done(arguments.status(), kModelNone);
        on_session("", done, [arguments = *arguments](AttentionRuntime& runtime) {
          return runtime.OpenSession(arguments);
        });
      }));
  add(std::make_unique<SmallMethod<v1::GetSessionRequest>>(
      parts, "GetSession", false, [on_session](const auto& request, auto done) {
        on_session("", done, [id = request.session_id()](AttentionRuntime& runtime) {
          return runtime.GetSession(id);
        });
      }));
  add(std::make_unique<SmallMethod<v1::ForkSessionRequest>>(
      parts, "ForkSession", false, [&parts, on_session](const auto& request, auto done) {
        if (parts.state->Refuses(Call::Clock::now())) return done(Draining(), kModelNone);
        std::optional<int64_t> length;
        if (request.has_length()) length = request.length();
        on_session(request.session_id(), done,
                   [id = request.session_id(), length](AttentionRuntime& runtime) {
                     return runtime.ForkSession(id, length);
                   });
      }));
  add(std::make_unique<SmallMethod<v1::TruncateSessionRequest>>(
      parts, "TruncateSession", false, [on_session](const auto& request, auto done) {
        on_session(request.session_id(), done, [request](AttentionRuntime& runtime) {
          return runtime.TruncateSession(request.session_id(), request.length());
        });
      }));
  add(std::make_unique<SmallMethod<v1::CloseSessionRequest>>(
      parts, "CloseSession", false, [&parts](const auto& request, auto done) {
        parts.batcher->SubmitControl(
            request.session_id(),
            [done, id = request.session_id()](AttentionRuntime& runtime) {
              const absl::StatusOr<SessionState> state = runtime.GetSession(id);
              const int model = state.ok() ? ModelOf(runtime, *state) : kModelNone;
              const absl::Status status = runtime.CloseSession(id);
              if (!status.ok()) return done(status, model);
              done(EncodeMessage(v1::CloseSessionResponse()), model);
            },
            [done](absl::Status stopped) { done(std::move(stopped), kModelNone); });
      }));
  add(std::make_unique<SmallMethod<v1::ListModelsRequest>>(
      parts, "ListModels", false, [&parts](const auto&, auto done) {
        v1::ListModelsResponse response;
        for (const LoadedModel& model : parts.runtime->models()) {
          *response.add_models() = ToProto(model);
        }
        done(EncodeMessage(response), kModelNone);
      }));
  add(std::make_unique<SmallMethod<v1::GetServerInfoRequest>>(
      parts, "GetServerInfo", true,
      [&parts](const auto&, auto done) { done(EncodeMessage(ServerInfoOf(parts)), kModelNone); }));
}

AttentionService::~AttentionService() = default;

namespace {

// Health and reflection are not requests of this service.
bool Counts(const Method& method) {
  return MethodFromName(method.name()) != RpcMethod::kOther || method.name() == "other";
}

}  // namespace

void CallMetrics::RequestStarted(const Method& method) {
  if (!Counts(method)) return;
  state_.in_flight.fetch_add(1);
  metrics_.RequestStarted(MethodFromName(method.name()));
}

void CallMetrics::RequestFinished(const Method& method, const RequestEnd& end) {
  if (!Counts(method)) return;
  if (end.code == absl::StatusCode::kCancelled) {
    if (!end.reached_method) metrics_.Cancelled(CancelStage::kReceive);
    if (end.answered == absl::StatusCode::kOk) metrics_.Cancelled(CancelStage::kSend);
  }
  if (end.reached_method && end.receive.count() > 0) {
    metrics_.PhaseTook(Phase::kReceive, static_cast<double>(end.receive.count()) * 1e-6);
  }
  metrics_.RequestFinished(MethodFromName(method.name()), end.code, end.label,
                           static_cast<double>(end.total.count()) * 1e-6);
  state_.in_flight.fetch_sub(1);
}

void CallMetrics::Refused(const Method& method, const absl::Status& status) {
  if (Counts(method)) metrics_.Rejected(ReasonOf(status));
}

void CallMetrics::RequestSent(const Method& method, std::chrono::microseconds send) {
  if (!Counts(method)) return;
  metrics_.PhaseTook(Phase::kSend, static_cast<double>(send.count()) * 1e-6);
}

void CallMetrics::StreamOpened(const Method& method) {
  if (Counts(method)) state_.streams.fetch_add(1);
}

void CallMetrics::StreamClosed(const Method& method) {
  if (Counts(method)) state_.streams.fetch_sub(1);
}

}  // namespace attend
