// SPDX-License-Identifier: Apache-2.0
#include "server/health.h"

#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "engine/util/error.h"
#include "grpc/health/v1/health.pb.h"
#include "server/rpc/wire.h"

namespace attend {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// Each watcher holds a stream and a little memory; a balancer opens one for each of its
// connections.
constexpr size_t kMaxWatchers = 4096;

grpc::ByteBuffer Encode(std::optional<bool> serving) {
  HealthCheckResponse response;
  if (!serving.has_value()) {
    response.set_status(HealthCheckResponse::SERVICE_UNKNOWN);
  } else {
    response.set_status(*serving ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING);
  }
  return EncodeMessage(response);
}

template <typename Map>
std::optional<bool> Find(const Map& serving, const std::string& service) {
  const auto found = serving.find(service);
  return found == serving.end() ? std::nullopt : std::optional<bool>(found->second);
}

}  // namespace

class Health::Check : public Method {
 public:
  explicit Check(Health& health) : Method("Check", MethodKind::kUnary), health_(health) {}

  void OnMessage(std::shared_ptr<Call> call, grpc::ByteBuffer message, int64_t item) override {
    const absl::StatusOr<HealthCheckRequest> request = ParseMessage<HealthCheckRequest>(message);
    if (!request.ok()) return call->Answer(item, request.status());
    std::unique_lock lock(health_.mutex_);
    const std::optional<bool> serving = Find(health_.serving_, request->service());
    lock.unlock();
    if (serving.has_value()) return call->Answer(item, Encode(serving));
    call->Answer(item, absl::NotFoundError("service: unknown to this server"));
  }

 private:
  Health& health_;
};

class Health::Watch : public Method {
 public:
  explicit Watch(Health& health) : Method("Watch", MethodKind::kServerStream), health_(health) {}

  void OnMessage(std::shared_ptr<Call> call, grpc::ByteBuffer message, int64_t) override {
    const absl::StatusOr<HealthCheckRequest> request = ParseMessage<HealthCheckRequest>(message);
    if (!request.ok()) return call->EndStream(request.status());
    // The lock is held while sending, so that states are sent in their order.
    const std::lock_guard lock(health_.mutex_);
    std::erase_if(health_.watchers_, [](const Watcher& watcher) { return watcher.call.expired(); });
    if (health_.watchers_.size() >= kMaxWatchers) {
      return call->EndStream(MakeError(absl::StatusCode::kResourceExhausted,
                                       {.reason = Reason::kQuota,
                                        .field = "Watch",
                                        .got = std::to_string(kMaxWatchers) + " open streams",
                                        .wanted = "fewer"}));
    }
    health_.watchers_.push_back({.call = call, .service = request->service()});
    call->Send(Encode(Find(health_.serving_, request->service())));
  }

 private:
  Health& health_;
};

Health::Health()
    : check_(std::make_unique<Check>(*this)),
      watch_(std::make_unique<Watch>(*this)),
      serving_{
          {"", false}, {"attend.v1.Attention", false}, {"readiness", false}, {"liveness", false}} {}

Health::~Health() = default;

void Health::SetServing(std::span<const std::string_view> services, bool serving) {
  const std::lock_guard lock(mutex_);
  for (const std::string_view service : services) {
    const auto [entry, added] = serving_.try_emplace(std::string(service), serving);
    if (!added && std::exchange(entry->second, serving) == serving) continue;
    for (const Watcher& watcher : watchers_) {
      if (watcher.service != service) continue;
      if (const std::shared_ptr<Call> call = watcher.call.lock()) call->Send(Encode(serving));
    }
  }
}

void Health::AddTo(MethodTable& methods) {
  methods["/grpc.health.v1.Health/Check"] = check_.get();
  methods["/grpc.health.v1.Health/Watch"] = watch_.get();
}

}  // namespace attend
