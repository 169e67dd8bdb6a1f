// SPDX-License-Identifier: Apache-2.0
//
// Calls of the wire contract as an independent client makes them: generated stubs, no retries,
// every answer with its error's details and its trailers. Used by the integration tests that ask
// for errors.
#pragma once

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "attend/v1/attend.grpc.pb.h"
#include "client/attend_client.h"

namespace attend {

// How a call ended. `error.code` 0 = well.
struct Ended {
  client::Error error;
  std::string pushback;  // trailer grpc-retry-pushback-ms

  bool ok() const { return error.code == 0; }
};

template <typename Response>
struct Reply : Ended {
  Response value;
};

// Of a finished call.
Ended EndOf(const grpc::Status& status, const grpc::ClientContext& context);

struct CallOptions {
  std::chrono::milliseconds deadline{20000};
  std::map<std::string, std::string> metadata = {};
};

class WireClient {
 public:
  explicit WireClient(const std::string& address);

  template <typename Request, typename Response>
  Reply<Response> Call(grpc::Status (v1::Attention::Stub::*method)(grpc::ClientContext*,
                                                                   const Request&, Response*),
                       const Request& request, const CallOptions& options = {}) const {
    Reply<Response> reply;
    grpc::ClientContext context;
    Prepare(options, context);
    const grpc::Status status = (stub_.get()->*method)(&context, request, &reply.value);
    static_cast<Ended&>(reply) = EndOf(status, context);
    return reply;
  }

  Reply<v1::AttendResponse> Attend(const v1::AttendRequest& request,
                                   const CallOptions& options = {}) const;
  Reply<v1::Session> Open(const v1::OpenSessionRequest& request = {}) const;
  Reply<v1::Session> Get(const std::string& id) const;
  Reply<v1::Session> Fork(const std::string& id, std::optional<int64_t> length = {}) const;
  Reply<v1::Session> Truncate(const std::string& id, int64_t length) const;
  Ended Close(const std::string& id) const;

  // A unary call of any bytes, `messages` of them.
  Ended SendBytes(const std::string& path, const std::vector<std::string>& messages,
                  const CallOptions& options = {}, std::string* answer = nullptr) const;
  // grpc.health.v1.Health/Check: the number of its ServingStatus; minus the code of an error.
  int Health(const std::string& service) const;

  v1::Attention::Stub& stub() const { return *stub_; }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  static void Prepare(const CallOptions& options, grpc::ClientContext& context);

 private:
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Attention::Stub> stub_;
};

// A call whose headers were sent and whose body is held back: what `attend-bytes` announces is
// reserved. It ends when this object dies, cancelled if it was not sent.
class HeldCall {
 public:
  HeldCall(const WireClient& client, int64_t announced_bytes);
  ~HeldCall();
  Ended Send(const v1::AttendRequest& request);

 private:
  void Wait();
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  bool finished_ = false;
};

grpc::ByteBuffer ToBuffer(const std::string& bytes);
std::string FromBuffer(const grpc::ByteBuffer& buffer);

void SetTensor(const std::vector<float>& values, std::vector<int64_t> shape, v1::Tensor* tensor);
std::vector<float> RandomValues(std::mt19937_64& random, int64_t count);

// A request of `rows` random rows on a layer, without sequences.
v1::AttendRequest RowsRequest(const std::string& model, const std::string& layer, int64_t width,
                              const std::vector<float>& rows);
// The same in a session.
v1::AttendRequest SessionRequest(const std::string& model, const std::string& layer, int64_t width,
                                 const std::vector<float>& rows, const std::string& session,
                                 int64_t position);

}  // namespace attend
