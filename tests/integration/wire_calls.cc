// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/wire_calls.h"

#include <utility>

#include "client/call.h"
#include "grpc/health/v1/health.pb.h"

namespace attend {

Ended EndOf(const grpc::Status& status, const grpc::ClientContext& context) {
  Ended ended;
  if (!status.ok()) ended.error = client::ErrorFromStatus(status);
  const auto& trailers = context.GetServerTrailingMetadata();
  if (const auto found = trailers.find("grpc-retry-pushback-ms"); found != trailers.end()) {
    ended.pushback.assign(found->second.data(), found->second.size());
  }
  return ended;
}

WireClient::WireClient(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
  arguments.SetMaxReceiveMessageSize(-1);
  channel_ = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  stub_ = v1::Attention::NewStub(channel_);
}

void WireClient::Prepare(const CallOptions& options, grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + options.deadline);
  for (const auto& [key, value] : options.metadata) context.AddMetadata(key, value);
}

Reply<v1::AttendResponse> WireClient::Attend(const v1::AttendRequest& request,
                                             const CallOptions& options) const {
  return Call(&v1::Attention::Stub::Attend, request, options);
}

Reply<v1::Session> WireClient::Open(const v1::OpenSessionRequest& request) const {
  return Call(&v1::Attention::Stub::OpenSession, request);
}

Reply<v1::Session> WireClient::Get(const std::string& id) const {
  v1::GetSessionRequest request;
  request.set_session_id(id);
  return Call(&v1::Attention::Stub::GetSession, request);
}

Reply<v1::Session> WireClient::Fork(const std::string& id, std::optional<int64_t> length) const {
  v1::ForkSessionRequest request;
  request.set_session_id(id);
  if (length) request.set_length(*length);
  return Call(&v1::Attention::Stub::ForkSession, request);
}

Reply<v1::Session> WireClient::Truncate(const std::string& id, int64_t length) const {
  v1::TruncateSessionRequest request;
  request.set_session_id(id);
  request.set_length(length);
  return Call(&v1::Attention::Stub::TruncateSession, request);
}

Ended WireClient::Close(const std::string& id) const {
  v1::CloseSessionRequest request;
  request.set_session_id(id);
  return Call(&v1::Attention::Stub::CloseSession, request);
}

Ended WireClient::SendBytes(const std::string& path, const std::vector<std::string>& messages,
                            const CallOptions& options, std::string* answer) const {
  grpc::ClientContext context;
  Prepare(options, context);
  const grpc::internal::RpcMethod method(path.c_str(), grpc::internal::RpcMethod::BIDI_STREAMING);
  using Stream = grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;
  const std::unique_ptr<Stream> stream(
      grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(
          channel_.get(), method, &context));
  for (const std::string& message : messages) stream->Write(ToBuffer(message));
  stream->WritesDone();
  grpc::ByteBuffer buffer;
  if (stream->Read(&buffer) && answer != nullptr) *answer = FromBuffer(buffer);
  return EndOf(stream->Finish(), context);
}

int WireClient::Health(const std::string& service) const {
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  std::string answer;
  const Ended ended =
      SendBytes("/grpc.health.v1.Health/Check", {request.SerializeAsString()}, {}, &answer);
  if (!ended.ok()) return -ended.error.code;
  grpc::health::v1::HealthCheckResponse response;
  response.ParseFromString(answer);
  return response.status();
}

HeldCall::HeldCall(const WireClient& client, int64_t announced_bytes) {
  WireClient::Prepare({.metadata = {{"attend-bytes", std::to_string(announced_bytes)}}}, context_);
  grpc::GenericStub stub(client.channel());
  call_ = stub.PrepareCall(&context_, "/attend.v1.Attention/Attend", &queue_);
  call_->StartCall(nullptr);
  Wait();
}

void HeldCall::Wait() {
  void* tag = nullptr;
  bool ok = false;
  queue_.Next(&tag, &ok);
}

Ended HeldCall::Send(const v1::AttendRequest& request) {
  call_->WriteLast(ToBuffer(request.SerializeAsString()), grpc::WriteOptions(), nullptr);
  Wait();
  grpc::ByteBuffer answer;
  call_->Read(&answer, nullptr);
  Wait();
  grpc::Status status;
  call_->Finish(&status, nullptr);
  Wait();
  finished_ = true;
  return EndOf(status, context_);
}

HeldCall::~HeldCall() {
  if (finished_) return;
  context_.TryCancel();
  grpc::Status status;
  call_->Finish(&status, nullptr);
  Wait();
}

grpc::ByteBuffer ToBuffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

std::string FromBuffer(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  (void)buffer.Dump(&slices);
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

void SetTensor(const std::vector<float>& values, std::vector<int64_t> shape, v1::Tensor* tensor) {
  client::CopyToWire({values, std::move(shape)}, tensor);
}

std::vector<float> RandomValues(std::mt19937_64& random, int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

v1::AttendRequest RowsRequest(const std::string& model, const std::string& layer, int64_t width,
                              const std::vector<float>& rows) {
  v1::AttendRequest request;
  request.set_model(model);
  request.set_layer(layer);
  SetTensor(rows, {static_cast<int64_t>(rows.size()) / width, width},
            request.mutable_hidden_states());
  return request;
}

v1::AttendRequest SessionRequest(const std::string& model, const std::string& layer, int64_t width,
                                 const std::vector<float>& rows, const std::string& session,
                                 int64_t position) {
  v1::AttendRequest request = RowsRequest(model, layer, width, rows);
  v1::Sequence& sequence = *request.add_sequences();
  sequence.set_length(static_cast<int64_t>(rows.size()) / width);
  sequence.set_session_id(session);
  sequence.set_position(position);
  return request;
}

}  // namespace attend
