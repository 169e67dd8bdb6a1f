// SPDX-License-Identifier: Apache-2.0
#include "server/attend_method.h"

#include <algorithm>
#include <charconv>
#include <list>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "engine/util/error.h"
#include "engine/util/recycled.h"
#include "engine/util/status_macros.h"
#include "server/convert.h"
#include "server/rpc/status.h"
#include "server/rpc/wire.h"

namespace attend {
namespace {

// A call slower than this is logged although it succeeded.
constexpr int64_t kSlowUs = 1000000;
constexpr size_t kLoggedBytes = 128;  // of a name that a request brought
double Seconds(int64_t us) { return static_cast<double>(us) * 1e-6; }

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
  if (bytes > limit) return MessageTooLarge("attend-bytes", bytes, limit);
  return std::optional<int64_t>(bytes);
}

struct AttendCall;

// An item from its submission to its answer. It keeps its call, which keeps it: End, which always
// comes, parts them.
struct RunningItem {
  std::shared_ptr<Call> call;
  AttendCall* kept;
  int64_t item;
  ConvertedAttend converted = {};
  Admission::Slot slot = {};
};
using RunningItems = std::list<RunningItem, RecyclingAllocator<RunningItem>>;

// What the service keeps with a call from its headers on; freed with the call.
struct AttendCall {
  std::optional<int64_t> announced_bytes;
  std::mutex mutex;
  Admission::Slot slot;  // a unary call's, taken on its headers
  RunningItems running;  // guarded by mutex
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
    if (parts_.state->starting.load()) return StartingError();
    auto kept = MakeRecycled<AttendCall>();
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
    auto& kept = *static_cast<AttendCall*>(call->attachment().get());
    thread_local ReceivedAttend received;  // keeps its memory
    const absl::Cleanup clear = [] { received.Clear(); };
    RunningItem begun{.call = std::move(call), .kept = &kept, .item = item};
    int model = kModelNone;
    if (absl::Status status = Accept(message, received, begun, &model); !status.ok()) {
      parts_.metrics->Rejected(ReasonOf(status));
      Log(*begun.call, FactsOf(received.request), status, parts_.now_us() - arrival_us);
      Send(*begun.call, item, received.request.request_id(), status, model);
      return;
    }
    const std::shared_ptr<AttendJob> job = begun.converted.job;
    job->arrival_us = arrival_us;
    job->deadline_us = Deadline(*begun.call, begun.converted, arrival_us);
    RunningItems added;
    RunningItem* running = &added.emplace_back(std::move(begun));
    {
      std::lock_guard<std::mutex> lock(kept.mutex);
      kept.running.splice(kept.running.end(), added);
    }
    if (running->call->cancelled()) job->cancelled.store(true);
    parts_.batcher->Submit(
        job, [this, running](absl::Status status) { End(*running, std::move(status)); });
  }

  void OnCancelled(Call& call) override {
    auto& kept = *static_cast<AttendCall*>(call.attachment().get());
    std::lock_guard<std::mutex> lock(kept.mutex);
    for (RunningItem& running : kept.running) running.converted.job->cancelled.store(true);
    if (!kept.running.empty()) parts_.batcher->Wake();
  }

 private:
  // Size, queue and draining rules, then the contract's (convert). `model` is a refusal's label.
  absl::Status Accept(const grpc::ByteBuffer& message, ReceivedAttend& received, RunningItem& begun,
                      int* model) {
    AttendCall& kept = *begun.kept;
    // Decoding copies no tensor; it comes first so that a refused item can be told by its id.
    const absl::Status decoded = received.Decode(message);
    if (decoded.ok()) *model = ModelLabel(*context_.models, received.request);
    const auto bytes = static_cast<int64_t>(message.Length());
    const int64_t limit = parts_.options->limits.message_bytes;
    if (bytes > limit) return MessageTooLarge("request", bytes, limit);
    RETURN_IF_ERROR(decoded);
    if (kept.announced_bytes.has_value() && bytes > *kept.announced_bytes) {
      return InvalidField("attend-bytes", std::to_string(*kept.announced_bytes),
                          "at least the message's " + std::to_string(bytes) + " bytes");
    }
    begun.slot = std::move(kept.slot);
    if (!begun.slot.held()) RETURN_IF_ERROR(parts_.admission->Reserve(1, 0, bytes, begun.slot));
    if (parts_.state->Refuses(begun.call->Started(begun.item)) && !NamesSession(received.request)) {
      return DrainingError();
    }
    ASSIGN_OR_RETURN(begun.converted, ConvertAttend(context_, received, [&](int64_t tokens) {
                       return parts_.admission->Reserve(0, tokens, 0, begun.slot);
                     }));
    return absl::OkStatus();
  }

  void End(RunningItem& running, const absl::Status& status) {
    RunningItems ended;
    {
      RunningItems& all = running.kept->running;
      std::lock_guard<std::mutex> lock(running.kept->mutex);
      ended.splice(ended.end(), all,
                   std::ranges::find(all, &running, [](const RunningItem& each) { return &each; }));
    }
    running.slot.Release();
    Answer(*running.call, running.item, running.converted, status);
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

  void Answer(Call& call, int64_t item, const ConvertedAttend& converted,
              const absl::Status& status) {
    const AttendJob& job = *converted.job;
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
      Log(call, FactsOf(converted), status, now_us - job.arrival_us);
      Send(call, item, std::string(converted.request_id), status, model);
      return;
    }
    CountTokens(job, model);
    if (now_us - job.arrival_us > kSlowUs) {
      Log(call, FactsOf(converted), status, now_us - job.arrival_us);
    }
    thread_local v1::AttendResponse response;  // keeps its memory
    ToResponse(context_, converted, now_us, response);
    call.Answer(item, EncodeAttendResponse(response, OutputOf(converted)), absl::StatusCode::kOk,
                model);
    if (job.weights.full) response = {};  // weights are large, and the next answer may be far
  }

  // Stream items carry their error inside a response that names the request.
  void Send(Call& call, int64_t item, const std::string& request_id, const absl::Status& status,
            int model) {
    if (!streaming()) return call.Answer(item, status, model);
    v1::AttendResponse response;
    response.set_request_id(request_id);
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

  // What the log tells of an item.
  struct Facts {
    std::string request_id;
    std::string session_id;  // of its first sequence
    std::string model;
    std::string layer;
    int64_t tokens = 0;
    int64_t queue_us = 0;
    int64_t compute_us = 0;
  };

  // Of a refused request: what it named.
  static Facts FactsOf(const v1::AttendRequest& asked) {
    return {.request_id = asked.request_id(),
            .session_id = asked.sequences_size() > 0 ? asked.sequences(0).session_id() : "",
            .model = asked.has_raw() ? "raw" : asked.model().substr(0, kLoggedBytes),
            .layer = asked.layer().substr(0, kLoggedBytes)};
  }

  Facts FactsOf(const ConvertedAttend& converted) const {
    const AttendJob& job = *converted.job;
    return {.request_id = std::string(converted.request_id),
            .session_id = std::string(job.sequences.empty() ? "" : job.sequences[0].session_id),
            .model = job.model < 0 ? "raw" : parts_.runtime->models()[job.model].name,
            .layer = std::string(job.layer_name),
            .tokens = job.tokens(),
            .queue_us = job.first_batch_us == 0 ? 0 : job.first_batch_us - job.arrival_us,
            .compute_us = job.compute_us};
  }

  void Log(const Call& call, const Facts& facts, const absl::Status& status, int64_t total_us) {
    parts_.logger->Write(status.ok() ? LogLevel::kInfo : LogLevel::kWarning,
                         status.ok() ? "slow_call" : "call_failed",
                         {{"method", name()},
                          {"request_id", facts.request_id},
                          {"trace", call.traceparent()},
                          {"session", facts.session_id.empty() ? "" : HashedId(facts.session_id)},
                          {"model", facts.model},
                          {"layer", facts.layer},
                          {"tokens", facts.tokens},
                          {"queue_us", facts.queue_us},
                          {"compute_us", facts.compute_us},
                          {"total_us", total_us},
                          {"code", absl::StatusCodeToString(status.code())},
                          {"reason", ReasonName(ReasonOf(status))},
                          {"message", std::string(status.message())}});
  }

  const ServiceParts& parts_;
  ConvertContext context_;
};

}  // namespace

std::unique_ptr<Method> MakeAttendMethod(const ServiceParts& parts,
                                         std::shared_ptr<BufferPool> buffers, std::string name,
                                         MethodKind kind) {
  return std::make_unique<AttendMethod>(parts, std::move(buffers), std::move(name), kind);
}

}  // namespace attend
