// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/dispatcher.h"

#include <grpc/compression.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <pthread.h>

#include <algorithm>
#include <limits>
#include <thread>
#include <utility>

#include "engine/util/error.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

// Calls that wait for clients on each queue; each that arrives posts its successor. Enough for a
// burst between two looks at the queue.
constexpr int kPostedCalls = 32;

// Tokens, trace context and our own keys fit easily; gRPC's default is 8 KiB.
constexpr int kMaxMetadataBytes = 16 * 1024;

// A peer that is gone is noticed within their sum, and what it asked for is cancelled.
constexpr int kKeepaliveTimeMs = 60'000;
constexpr int kKeepaliveTimeoutMs = 20'000;
// Clients may ping this often, idle ones too; more often than gRPC's default of 5 minutes is usual
// behind balancers that drop quiet connections.
constexpr int kMinPingIntervalMs = 10'000;
constexpr int kHandshakeTimeoutMs = 10'000;

// A shutdown looks this often whether the calls are over.
constexpr std::chrono::milliseconds kLookEvery{5};

class UnknownMethod : public Method {
 public:
  UnknownMethod() : Method("other", MethodKind::kUnary) {}
  absl::Status Admit(Call& call) override { return Unsupported("method", CleanName(call.path())); }
  // Never called: no call is admitted.
  void OnMessage(std::shared_ptr<Call> call, grpc::ByteBuffer, int64_t item) override {
    call->Answer(item, Unsupported("method", CleanName(call->path())));
  }

 private:
  static std::string CleanName(const std::string& path) { return path.substr(0, 256); }
};

int ClampToInt(int64_t value) {
  return static_cast<int>(std::min<int64_t>(value, std::numeric_limits<int>::max()));
}

int Milliseconds(std::chrono::seconds seconds) {
  return ClampToInt(std::chrono::milliseconds(seconds).count());
}

void Configure(const DispatcherSettings& settings, grpc::ServerBuilder& builder) {
  builder.SetMaxReceiveMessageSize(ClampToInt(settings.max_receive_bytes));
  builder.SetMaxSendMessageSize(-1);  // our own limit refuses before anything is computed
  builder.SetResourceQuota(grpc::ResourceQuota("attend").Resize(settings.resource_quota_bytes));
  // Activations hardly compress; compressed messages could unpack to any size.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  const std::pair<const char*, int> arguments[] = {
      {GRPC_ARG_ALLOW_REUSEPORT, 0},  // a second server on the port fails loudly
      {GRPC_ARG_MAX_CONCURRENT_STREAMS, settings.max_concurrent_streams},
      {GRPC_ARG_MAX_METADATA_SIZE, kMaxMetadataBytes},
      {GRPC_ARG_MAX_CONNECTION_AGE_MS, Milliseconds(settings.connection_age)},
      {GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, Milliseconds(settings.connection_grace)},
      {GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs},
      {GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs},
      {GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1},
      {GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kMinPingIntervalMs},
      {GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeTimeoutMs},
      // gRPC's own deadlines answer beside ours: a stream then ends twice on the wire, and nginx
      // takes the second end for another client's call. The methods heed deadlines.
      {GRPC_ARG_ENABLE_DEADLINE_CHECKS, 0},
  };
  for (const auto& [name, value] : arguments) builder.AddChannelArgument(name, value);
}

bool IsUnix(const std::string& address) { return address.rfind("unix:", 0) == 0; }

}  // namespace

Dispatcher::Dispatcher(MethodTable methods, CallObserver& observer, int64_t items_in_flight)
    : methods_(std::move(methods)),
      observer_(observer),
      items_in_flight_(items_in_flight),
      unknown_method_(std::make_unique<UnknownMethod>()) {}

absl::StatusOr<std::unique_ptr<Dispatcher>> Dispatcher::Start(const DispatcherSettings& settings,
                                                              MethodTable methods,
                                                              CallObserver& observer) {
  std::unique_ptr<Dispatcher> dispatcher(
      new Dispatcher(std::move(methods), observer, settings.stream_items_in_flight));
  RETURN_IF_ERROR(dispatcher->Bind(settings));
  for (const std::shared_ptr<CallQueue>& queue : dispatcher->queues_) {
    for (int i = 0; i < kPostedCalls; ++i) dispatcher->PostCall(queue);
    dispatcher->threads_.emplace_back([raw = dispatcher.get(), &queue] { raw->Serve(*queue); });
    pthread_setname_np(dispatcher->threads_.back().native_handle(), "attend-rpc");
  }
  return dispatcher;
}

absl::Status Dispatcher::Bind(const DispatcherSettings& settings) {
  grpc::ServerBuilder builder;
  Configure(settings, builder);
  builder.RegisterAsyncGenericService(&service_);
  for (int i = 0; i < settings.queue_threads; ++i) {
    queues_.push_back(std::make_shared<CallQueue>(builder.AddCompletionQueue()));
  }
  std::vector<int> ports(settings.listen.size(), 0);
  for (size_t i = 0; i < ports.size(); ++i) {
    builder.AddListeningPort(settings.listen[i], grpc::InsecureServerCredentials(), &ports[i]);
  }
  server_ = builder.BuildAndStart();
  for (size_t i = 0; i < ports.size(); ++i) {
    std::string address = settings.listen[i];
    if (ports[i] == 0) return InvalidField("--listen", address, "an address that can be bound");
    if (!IsUnix(address)) {
      address = address.substr(0, address.rfind(':') + 1) + std::to_string(ports[i]);
      if (port_ == 0) port_ = ports[i];
    }
    addresses_.push_back(address);
  }
  if (server_ == nullptr) return InvalidField("--listen", "no address", "at least one");
  return absl::OkStatus();
}

Dispatcher::~Dispatcher() {
  Shutdown(std::chrono::system_clock::now());
  Stop();
}

void Dispatcher::Serve(CallQueue& queue) {
  void* tag = nullptr;
  bool ok = false;
  while (queue.grpc_queue().Next(&tag, &ok)) Call::OnOperation(tag, ok);
}

Method& Dispatcher::MethodFor(std::string_view path) {
  const auto found = methods_.find(path);
  return found == methods_.end() ? *unknown_method_ : *found->second;
}

void Dispatcher::PostCall(const std::shared_ptr<CallQueue>& queue) {
  const std::shared_ptr<Call> call(new Call(*this, queue, observer_, items_in_flight_),
                                   std::default_delete<Call>(), RecyclingAllocator<Call>());
  call->Post(service_);
}

absl::Status Dispatcher::ShutdownStatus() {
  return MakeError(absl::StatusCode::kUnavailable, {.reason = Reason::kDraining},
                   "the server is shutting down");
}

std::vector<std::shared_ptr<Call>> Dispatcher::Streams() const {
  std::vector<std::shared_ptr<Call>> streams;
  for (const std::shared_ptr<CallQueue>& queue : queues_) queue->streams.AppendTo(streams);
  return streams;
}

void Dispatcher::EndOverdueRequests(std::chrono::milliseconds longest) {
  std::vector<std::shared_ptr<Call>> calls;
  for (const std::shared_ptr<CallQueue>& queue : queues_) queue->receiving.AppendTo(calls);
  for (const std::shared_ptr<Call>& call : calls) call->EndIfOverdue(longest);
}

void Dispatcher::Refuse(std::chrono::system_clock::time_point deadline) {
  if (!refusing_.exchange(true)) {
    for (const std::shared_ptr<CallQueue>& queue : queues_) queue->streams.Refuse();
    for (const std::shared_ptr<Call>& stream : Streams()) stream->EndStream(ShutdownStatus());
  }
  const auto running = [](const std::shared_ptr<CallQueue>& queue) {
    return queue->running_calls.load() > 0;
  };
  while (std::ranges::any_of(queues_, running) && std::chrono::system_clock::now() < deadline) {
    std::this_thread::sleep_for(kLookEvery);
  }
}

void Dispatcher::Shutdown(std::chrono::system_clock::time_point deadline) {
  Refuse(deadline);
  // gRPC waits for idle connections, which deserve no time: a client that makes no call may never
  // look at its own.
  if (server_ != nullptr && !std::exchange(shut_down_, true)) {
    server_->Shutdown(std::chrono::system_clock::now());
  }
}

void Dispatcher::Stop() {
  if (std::exchange(stopped_, true)) return;
  for (const std::shared_ptr<CallQueue>& queue : queues_) queue->Close();
  for (std::thread& thread : threads_) thread.join();
  if (threads_.empty()) {  // never served: the queues must still be drained
    for (const std::shared_ptr<CallQueue>& queue : queues_) Serve(*queue);
  }
}

int64_t Dispatcher::live_calls() const {
  int64_t count = 0;
  for (const std::shared_ptr<CallQueue>& queue : queues_) count += queue->live_calls.load();
  return count;
}

int64_t Dispatcher::idle_calls() const {
  return static_cast<int64_t>(queues_.size()) * kPostedCalls;
}

}  // namespace attend
