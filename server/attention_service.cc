// SPDX-License-Identifier: Apache-2.0
#include "server/attention_service.h"

#include <functional>
#include <optional>

#include "engine/util/error.h"
#include "server/attend_method.h"
#include "server/convert.h"
#include "server/rpc/wire.h"

namespace attend {
namespace {

constexpr char kServicePath[] = "/attend.v1.Attention/";
// Unused input buffers kept for the next requests.
constexpr int64_t kBuffersKeptBytes = int64_t{256} << 20;
// From when on and until when a method is served.
enum class Served : uint8_t {
  kAlways,
  kOnceLoaded,
  kUntilDraining,  // and once loaded
};

// A method whose answer needs one look at the runtime on the engine thread, or none at all.
template <typename Request>
class SmallMethod : public Method {
 public:
  // Sends the answer itself, now or later: done(message or error, model label).
  using Done = std::function<void(absl::StatusOr<grpc::ByteBuffer>, int model)>;
  using Run = std::function<void(const Request&, Done)>;

  SmallMethod(const ServiceParts& parts, std::string name, Served served, Run run)
      : Method(std::move(name), MethodKind::kUnary),
        parts_(parts),
        served_(served),
        run_(std::move(run)) {}

  absl::Status Admit(Call&) override {
    return parts_.state->starting.load() && served_ != Served::kAlways ? StartingError()
                                                                       : absl::OkStatus();
  }

  void OnMessage(std::shared_ptr<Call> call, grpc::ByteBuffer message, int64_t item) override {
    const auto bytes = static_cast<int64_t>(message.Length());
    const int64_t limit = parts_.options->limits.message_bytes;
    const absl::StatusOr<Request> request =
        bytes > limit ? MessageTooLarge("request", bytes, limit) : ParseMessage<Request>(message);
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
    if (!request.ok()) return done(request.status(), kModelNone);
    if (served_ == Served::kUntilDraining && parts_.state->Refuses(call->Started(item))) {
      return done(DrainingError(), kModelNone);
    }
    run_(*request, done);
  }

 private:
  const ServiceParts& parts_;
  const Served served_;
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
  add(MakeAttendMethod(parts, buffers, "Attend", MethodKind::kUnary));
  add(MakeAttendMethod(parts, buffers, "AttendStream", MethodKind::kBidiStream));

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
      parts, "OpenSession", Served::kUntilDraining,
      [&parts, on_session](const auto& request, auto done) {
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
      parts, "GetSession", Served::kOnceLoaded, [on_session](const auto& request, auto done) {
        on_session("", done, [id = request.session_id()](AttentionRuntime& runtime) {
          return runtime.GetSession(id);
        });
      }));
  add(std::make_unique<SmallMethod<v1::ForkSessionRequest>>(
      parts, "ForkSession", Served::kUntilDraining,
      [&parts, on_session](const auto& request, auto done) {
        std::optional<int64_t> length;
        if (request.has_length()) length = request.length();
        on_session(request.session_id(), done,
                   [id = request.session_id(), length](AttentionRuntime& runtime) {
                     return runtime.ForkSession(id, length);
                   });
      }));
  add(std::make_unique<SmallMethod<v1::TruncateSessionRequest>>(
      parts, "TruncateSession", Served::kOnceLoaded, [on_session](const auto& request, auto done) {
        on_session(request.session_id(), done, [request](AttentionRuntime& runtime) {
          return runtime.TruncateSession(request.session_id(), request.length());
        });
      }));
  add(std::make_unique<SmallMethod<v1::CloseSessionRequest>>(
      parts, "CloseSession", Served::kOnceLoaded, [&parts](const auto& request, auto done) {
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
      parts, "ListModels", Served::kOnceLoaded, [&parts](const auto&, auto done) {
        v1::ListModelsResponse response;
        for (const LoadedModel& model : parts.runtime->models()) {
          *response.add_models() = ToProto(model);
        }
        done(EncodeMessage(response), kModelNone);
      }));
  add(std::make_unique<SmallMethod<v1::GetServerInfoRequest>>(
      parts, "GetServerInfo", Served::kAlways,
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
