// SPDX-License-Identifier: Apache-2.0
//
// A server of the wire contract without an engine: the output is the input, sessions are lengths.
// Tests script its failures and read what arrived. Used by the tests of the client and its command
// line.
#pragma once

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "attend/v1/attend.grpc.pb.h"

namespace attend::client {

inline grpc::Status StatusWithDetail(grpc::StatusCode code, const std::string& message,
                                     const v1::ErrorDetail& detail) {
  v1::Status status;
  status.set_code(code);
  status.set_message(message);
  status.add_details()->PackFrom(detail);
  return {code, message, status.SerializeAsString()};
}

inline grpc::Status StatusWithReason(grpc::StatusCode code, v1::Reason reason) {
  v1::ErrorDetail detail;
  detail.set_reason(reason);
  return StatusWithDetail(code, v1::Reason_Name(reason), detail);
}

class FakeAttention final : public v1::Attention::Service {
 public:
  // One scripted failure: the next call of any method but GetServerInfo ends in `status`.
  struct Failure {
    grpc::Status status;
    std::string pushback = {};          // trailer grpc-retry-pushback-ms
    bool applied = false;               // do the work first: the answer got lost
    std::function<void()> during = {};  // runs in the handler
  };
  struct Seen {
    std::string method;
    std::string peer;  // the client's end of the connection
    v1::AttendRequest attend;
    std::map<std::string, std::string> metadata;
  };

  FakeAttention() {
    info.set_version("1.2.3");
    info.set_replica("fake.host-1");
    info.mutable_limits()->set_message_bytes(64 << 20);
    info.mutable_limits()->set_response_bytes(64 << 20);
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(-1);
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~FakeAttention() override { Stop(); }

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  void Stop() { server_->Shutdown(std::chrono::system_clock::now()); }

  void FailNext(Failure failure) {
    std::lock_guard lock(mutex_);
    failures_.push_back(std::move(failure));
  }
  std::vector<Seen> seen(const std::string& method) const {
    std::lock_guard lock(mutex_);
    std::vector<Seen> found;
    for (const Seen& seen : seen_) {
      if (seen.method == method) found.push_back(seen);
    }
    return found;
  }
  int64_t length(const std::string& id, const std::string& layer) const {
    std::lock_guard lock(mutex_);
    return sessions_.at(id).at(layer);
  }
  int streams() const { return streams_; }  // calls of AttendStream so far
  size_t open_sessions() const {
    std::lock_guard lock(mutex_);
    return sessions_.size();
  }

  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                             v1::ServerInfo* response) override {
    *response = info;
    return grpc::Status::OK;
  }
  grpc::Status ListModels(grpc::ServerContext* context, const v1::ListModelsRequest*,
                          v1::ListModelsResponse* response) override {
    return Do(context, "ListModels", {}, [&] {
      v1::Model* model = response->add_models();
      model->set_name("tiny");
      model->set_family("llama");
      for (const char* name : {"0", "1"}) {
        v1::Layer* layer = model->add_layers();
        layer->set_name(name);
        layer->set_d_model(2);
        layer->set_output_width(output_width);
        layer->set_sessions(true);
      }
      return grpc::Status::OK;
    });
  }
  grpc::Status Attend(grpc::ServerContext* context, const v1::AttendRequest* request,
                      v1::AttendResponse* response) override {
    return Do(context, "Attend", *request, [&] { return Echo(*request, response); });
  }
  // Every item is a call of method "AttendStream". A scripted failure with an ErrorDetail and
  // `applied` goes into the item's answer; any other ends the stream before the item is answered.
  grpc::Status AttendStream(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::AttendResponse, v1::AttendRequest>* stream) override {
    ++streams_;
    v1::AttendRequest request;
    while (stream->Read(&request)) {
      v1::AttendResponse response;
      bool item_error = false;
      {
        std::lock_guard lock(mutex_);
        item_error = !failures_.empty() && failures_.front().applied &&
                     !failures_.front().status.error_details().empty();
      }
      const grpc::Status status =
          Do(context, "AttendStream", request, [&] { return Echo(request, &response); });
      response.set_request_id(request.request_id());
      if (!status.ok()) {
        if (!item_error) return status;
        response.mutable_error()->ParseFromString(status.error_details());
      }
      stream->Write(response);
    }
    return grpc::Status::OK;
  }
  grpc::Status OpenSession(grpc::ServerContext* context, const v1::OpenSessionRequest* request,
                           v1::Session* response) override {
    return Do(context, "OpenSession", {}, [&] {
      const std::string id = info.replica() + ".7." + std::to_string(++opened_);
      sessions_[id] = {{"0", 0}, {"1", 0}, {"1.cross", 0}};
      return Describe(id, request->has_raw() ? "raw" : "tiny", response);
    });
  }
  grpc::Status GetSession(grpc::ServerContext* context, const v1::GetSessionRequest* request,
                          v1::Session* response) override {
    return Do(context, "GetSession", {},
              [&] { return Describe(request->session_id(), "tiny", response); });
  }
  grpc::Status ForkSession(grpc::ServerContext* context, const v1::ForkSessionRequest* request,
                           v1::Session* response) override {
    return Do(context, "ForkSession", {}, [&] {
      const std::string id = info.replica() + ".7." + std::to_string(++opened_);
      sessions_[id] = sessions_[request->session_id()];
      if (request->has_length()) Cut(id, request->length());
      return Describe(id, "tiny", response);
    });
  }
  grpc::Status TruncateSession(grpc::ServerContext* context,
                               const v1::TruncateSessionRequest* request,
                               v1::Session* response) override {
    return Do(context, "TruncateSession", {}, [&] {
      Cut(request->session_id(), request->length());
      return Describe(request->session_id(), "tiny", response);
    });
  }
  grpc::Status CloseSession(grpc::ServerContext* context, const v1::CloseSessionRequest* request,
                            v1::CloseSessionResponse*) override {
    return Do(context, "CloseSession", {}, [&] {
      return sessions_.erase(request->session_id()) == 1
                 ? grpc::Status::OK
                 : StatusWithReason(grpc::NOT_FOUND, v1::SESSION_CLOSED);
    });
  }

  // An F32 tensor.
  static v1::Tensor Floats(const std::vector<int64_t>& shape, const std::vector<float>& values) {
    v1::Tensor tensor;
    tensor.set_dtype(v1::DTYPE_F32);
    tensor.mutable_shape()->Assign(shape.begin(), shape.end());
    tensor.set_data(values.data(), values.size() * sizeof(float));
    return tensor;
  }

  v1::ServerInfo info;   // set before a client connects
  int output_width = 0;  // what ListModels says of each layer; answers are 2 wide
  // What is answered to those who ask for weights: one tensor for each sequence.
  std::vector<v1::Tensor> weights = {Floats({1, 1, 1}, {1})};

 private:
  template <typename Work>
  grpc::Status Do(grpc::ServerContext* context, const std::string& method,
                  const v1::AttendRequest& attend, Work work) {
    std::unique_lock lock(mutex_);
    Seen seen{.method = method, .peer = context->peer(), .attend = attend, .metadata = {}};
    for (const auto& [key, value] : context->client_metadata()) {
      seen.metadata[{key.data(), key.size()}] = {value.data(), value.size()};
    }
    seen_.push_back(std::move(seen));
    if (failures_.empty()) return work();
    Failure failure = std::move(failures_.front());
    failures_.pop_front();
    if (failure.applied) (void)work();
    if (!failure.pushback.empty()) {
      context->AddTrailingMetadata("grpc-retry-pushback-ms", failure.pushback);
    }
    lock.unlock();
    if (failure.during) failure.during();
    return failure.status;
  }

  grpc::Status Echo(const v1::AttendRequest& request, v1::AttendResponse* response) {
    for (const v1::Sequence& sequence : request.sequences()) {
      const auto session = sessions_.find(sequence.session_id());
      if (sequence.session_id().empty() || !sequence.has_position()) {
        response->add_positions(sequence.context_length());
        continue;
      }
      if (session == sessions_.end()) {
        return StatusWithReason(grpc::NOT_FOUND, v1::SESSION_NOT_FOUND);
      }
      int64_t& length = session->second[request.layer()];
      if (length < sequence.position() || (length > sequence.position() && !sequence.rewind())) {
        v1::ErrorDetail detail;
        detail.set_reason(v1::POSITION_MISMATCH);
        detail.set_cached(length);
        return StatusWithDetail(grpc::FAILED_PRECONDITION, "position", detail);
      }
      if (!sequence.no_append()) length = sequence.position() + sequence.length();
      response->add_positions(length);
    }
    *response->mutable_output() = request.hidden_states();
    if (request.has_raw()) *response->mutable_output() = request.raw().q();
    if (request.weights().mode() == v1::WeightsRequest::FULL) {
      for (const v1::Tensor& one : weights) *response->add_weights()->mutable_weights() = one;
    }
    return grpc::Status::OK;
  }

  grpc::Status Describe(const std::string& id, const std::string& model, v1::Session* response) {
    const auto session = sessions_.find(id);
    if (session == sessions_.end()) {
      return StatusWithReason(grpc::NOT_FOUND, v1::SESSION_NOT_FOUND);
    }
    response->set_id(id);
    response->set_model(model);
    response->set_replica(info.replica());
    for (const auto& [name, length] : session->second) {
      v1::LayerState* layer = response->add_layers();
      layer->set_layer(name);
      layer->set_length(length);
    }
    return grpc::Status::OK;
  }

  void Cut(const std::string& id, int64_t length) {
    for (auto& layer : sessions_[id]) layer.second = std::min(layer.second, length);
  }

  mutable std::mutex mutex_;
  std::deque<Failure> failures_;
  std::vector<Seen> seen_;
  std::map<std::string, std::map<std::string, int64_t>> sessions_;
  int opened_ = 0;
  std::atomic<int> streams_ = 0;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace attend::client
