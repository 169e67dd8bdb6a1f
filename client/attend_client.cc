// SPDX-License-Identifier: Apache-2.0
//
// Client: the connection, stateless calls and the opening of sessions. The calls of an open session
// are in session.cc.
#include "client/attend_client.h"

#include <grpc/grpc.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <string_view>

#include "client/call.h"
#include "client/session.h"

namespace attend::client {
namespace {

// gRPC's own default receive limit; the limits below it are never lowered to.
constexpr int64_t kSmallestReceiveBytes = 4 << 20;
// Room for what a response carries around its tensors.
constexpr int64_t kResponseSlackBytes = 64 << 10;

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, int receive_bytes) {
  grpc::ChannelArguments arguments;
  // http_proxy of the environment would take calls inside a cluster out of it.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Channels of equal arguments would share one connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // gRPC's retries stop at 256 KiB requests and know nothing of sessions; call.cc has our own.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // The default of up to 120 s between attempts is too long after a rollout.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);  // below what a call's attempts wait
  arguments.SetMaxSendMessageSize(-1);  // checked against message_bytes before sending
  arguments.SetMaxReceiveMessageSize(receive_bytes);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

// gRPC would take a missing port as 443 or 0 and one above 65535 modulo 65536: another server's.
bool IsAddress(std::string_view address) {
  for (const std::string_view scheme :
       {"dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "xds:"}) {
    if (address.starts_with(scheme)) return address.size() > scheme.size();
  }
  const size_t colon = address.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return false;
  const std::string_view host = address.substr(0, colon);
  const std::string_view port = address.substr(colon + 1);
  int number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  if (error != std::errc() || end != port.data() + port.size()) return false;
  const bool bracketed = host.starts_with('[') && host.ends_with(']');
  return number >= 1 && number <= 65535 &&
         (bracketed || host.find_first_of(":/ []") == std::string_view::npos);
}

int ReceiveBytes(const v1::Limits& limits) {
  if (limits.response_bytes() <= 0) return -1;
  const int64_t bytes = std::max(limits.response_bytes(), kSmallestReceiveBytes);
  if (bytes > std::numeric_limits<int>::max() - kResponseSlackBytes) return -1;
  return static_cast<int>(bytes + kResponseSlackBytes);
}

}  // namespace

Client::Client(std::shared_ptr<const Connection> connection, std::chrono::milliseconds deadline)
    : connection_(std::move(connection)), deadline_(deadline) {}

Result<Client> Client::Connect(const std::string& address, const Options& options) {
  if (options.deadline.count() <= 0) {
    return LocalError("deadline", std::to_string(options.deadline.count()) + " ms",
                      "a positive time for each call");
  }
  if (!IsAddress(address)) {
    return LocalError(
        "address", "\"" + address + "\"",
        "HOST:PORT with a port from 1 to 65535, unix:PATH, or a name of gRPC with its "
        "scheme (dns:///HOST:PORT)");
  }
  auto connection = std::make_shared<Connection>();
  connection->options = options;
  connection->control =
      v1::Attention::NewStub(MakeChannel(address, static_cast<int>(kSmallestReceiveBytes)));
  Result<v1::ServerInfo> server =
      Call(*connection->control, &v1::Attention::Stub::GetServerInfo, v1::GetServerInfoRequest(),
           {.deadline = options.deadline}, options);
  if (!server.ok()) return server.error();
  connection->server = *std::move(server);
  connection->data =
      v1::Attention::NewStub(MakeChannel(address, ReceiveBytes(connection->server.limits())));
  return Client(std::move(connection), options.deadline);
}

Client Client::WithDeadline(std::chrono::milliseconds deadline) const {
  return Client(connection_, deadline);
}

const v1::ServerInfo& Client::server() const { return connection_->server; }

Result<v1::ServerInfo> Client::GetServerInfo() const {
  return Call(*connection_->control, &v1::Attention::Stub::GetServerInfo,
              v1::GetServerInfoRequest(), {.deadline = deadline_}, connection_->options);
}

Result<std::vector<v1::Model>> Client::ListModels() const {
  auto response = Call(*connection_->control, &v1::Attention::Stub::ListModels,
                       v1::ListModelsRequest(), {.deadline = deadline_}, connection_->options);
  if (!response.ok()) return response.error();
  auto* models = response->mutable_models();
  return std::vector<v1::Model>(std::make_move_iterator(models->begin()),
                                std::make_move_iterator(models->end()));
}

bool IsRepeatable(const v1::AttendRequest& request) {
  return std::all_of(
      request.sequences().begin(), request.sequences().end(), [](const v1::Sequence& sequence) {
        return sequence.session_id().empty() || sequence.no_append() || sequence.rewind();
      });
}

std::string ReplicaOf(const v1::AttendRequest& request) {
  for (const v1::Sequence& sequence : request.sequences()) {
    std::string replica = ReplicaOfSession(sequence.session_id());
    if (!replica.empty()) return replica;
  }
  return {};
}

std::optional<Error> CheckSize(const Connection& connection, const v1::AttendRequest& request) {
  const auto bytes = static_cast<int64_t>(request.ByteSizeLong());
  int64_t limit = connection.server.limits().message_bytes();
  // Protobuf itself ends at 2 GiB.
  if (limit <= 0) limit = std::numeric_limits<int32_t>::max();
  if (bytes <= limit) return std::nullopt;
  Error error = LocalError("request", std::to_string(bytes) + " bytes",
                           "at most message_bytes = " + std::to_string(limit) + " bytes");
  error.reason = v1::TOO_LARGE;
  return error;
}

Result<v1::AttendResponse> SendAttend(const Connection& connection,
                                      std::chrono::milliseconds deadline, Repeat repeat,
                                      const std::string& replica, const v1::AttendRequest& request,
                                      const std::function<void()>& after_lost) {
  if (auto error = CheckSize(connection, request)) return *error;
  const auto bytes = static_cast<int64_t>(request.ByteSizeLong());
  return Call(
      *connection.data, &v1::Attention::Stub::Attend, request,
      {.deadline = deadline, .repeat = repeat, .replica = replica, .announced_bytes = bytes},
      connection.options, after_lost);
}

Result<v1::AttendResponse> Client::Attend(const v1::AttendRequest& request) const {
  return SendAttend(*connection_, deadline_,
                    IsRepeatable(request) ? Repeat::kSafe : Repeat::kIfRefused, ReplicaOf(request),
                    request, {});
}

void FillRequest(const AttendOptions& options, v1::AttendRequest* request) {
  request->set_output_dtype(options.output_dtype);
  request->set_mask(options.mask);
  request->set_request_id(options.request_id);
  if (options.return_weights) request->mutable_weights()->set_mode(v1::WeightsRequest::FULL);
  if (options.context.present()) CopyToWire(options.context, request->mutable_context());
}

Answer TakeAnswer(v1::AttendResponse* response) {
  Answer answer;
  answer.output = TakeFromWire(response->mutable_output());
  answer.positions.assign(response->positions().begin(), response->positions().end());
  for (v1::AttentionWeights& weights : *response->mutable_weights()) {
    answer.weights.push_back(TakeFromWire(weights.mutable_weights()));
  }
  answer.timing = std::move(*response->mutable_timing());
  return answer;
}

Result<Answer> Client::Attend(std::string_view model, std::string_view layer,
                              const TensorView& rows, const AttendOptions& options) const {
  v1::AttendRequest request;
  request.set_model(std::string(model));
  request.set_layer(std::string(layer));
  FillRequest(options, &request);
  CopyToWire(rows, request.mutable_hidden_states());
  Result<v1::AttendResponse> response = Attend(request);
  if (!response.ok()) return response.error();
  return TakeAnswer(&*response);
}

}  // namespace attend::client
