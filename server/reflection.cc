// SPDX-License-Identifier: Apache-2.0
#include "server/reflection.h"

#include <google/protobuf/descriptor.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "attend/v1/attend.pb.h"
#include "engine/util/text.h"
#include "grpc/health/v1/health.pb.h"
#include "grpc/reflection/v1/reflection.pb.h"
#include "grpc/reflection/v1alpha/reflection.pb.h"
#include "server/rpc/call.h"
#include "server/rpc/status.h"
#include "server/rpc/wire.h"

namespace attend {
namespace {

using google::protobuf::DescriptorPool;
using google::protobuf::FileDescriptor;
using grpc::reflection::v1::FileDescriptorResponse;
using grpc::reflection::v1::ListServiceResponse;
using grpc::reflection::v1::ServerReflectionRequest;
using grpc::reflection::v1::ServerReflectionResponse;

// The files whose services this server answers. Naming a message of each also links its
// descriptors.
std::vector<const FileDescriptor*> ServedFiles() {
  return {v1::AttendRequest::descriptor()->file(),
          grpc::health::v1::HealthCheckRequest::descriptor()->file(),
          grpc::reflection::v1::ServerReflectionRequest::descriptor()->file(),
          grpc::reflection::v1alpha::ServerReflectionRequest::descriptor()->file()};
}

void ListServices(ListServiceResponse& response) {
  for (const FileDescriptor* file : ServedFiles()) {
    for (int i = 0; i < file->service_count(); ++i) {
      response.add_service()->set_name(file->service(i)->full_name());
    }
  }
}

// A file and everything it imports, each once, the asked one first.
void AddFile(const FileDescriptor* file, std::set<const FileDescriptor*>& added,
             FileDescriptorResponse& response) {
  if (!added.insert(file).second) return;
  google::protobuf::FileDescriptorProto proto;
  file->CopyTo(&proto);
  response.add_file_descriptor_proto(proto.SerializeAsString());
  for (int i = 0; i < file->dependency_count(); ++i) AddFile(file->dependency(i), added, response);
}

void AnswerFile(const FileDescriptor* file, const std::string& what,
                ServerReflectionResponse& response) {
  if (file != nullptr) {
    std::set<const FileDescriptor*> added;
    AddFile(file, added, *response.mutable_file_descriptor_response());
    return;
  }
  response.mutable_error_response()->set_error_code(static_cast<int>(absl::StatusCode::kNotFound));
  response.mutable_error_response()->set_error_message(CleanText("not found: " + what, 512));
}

void AnswerRequest(const ServerReflectionRequest& request, ServerReflectionResponse& response) {
  const DescriptorPool& pool = *DescriptorPool::generated_pool();
  switch (request.message_request_case()) {
    case ServerReflectionRequest::kListServices:
      return ListServices(*response.mutable_list_services_response());
    case ServerReflectionRequest::kFileByFilename:
      return AnswerFile(pool.FindFileByName(request.file_by_filename()), request.file_by_filename(),
                        response);
    case ServerReflectionRequest::kFileContainingSymbol:
      return AnswerFile(pool.FindFileContainingSymbol(request.file_containing_symbol()),
                        request.file_containing_symbol(), response);
    case ServerReflectionRequest::kFileContainingExtension:  // proto3: there are none
      return AnswerFile(nullptr, request.file_containing_extension().containing_type(), response);
    case ServerReflectionRequest::kAllExtensionNumbersOfType:
      return AnswerFile(nullptr, request.all_extension_numbers_of_type(), response);
    case ServerReflectionRequest::MESSAGE_REQUEST_NOT_SET:
      break;
  }
  response.mutable_error_response()->set_error_code(
      static_cast<int>(absl::StatusCode::kInvalidArgument));
  response.mutable_error_response()->set_error_message("message_request: got none, wanted one");
}

// v1 and v1alpha differ in the package name only, so one set of messages serves both.
class ServerReflectionInfo : public Method {
 public:
  ServerReflectionInfo() : Method("ServerReflectionInfo", MethodKind::kBidiStream) {}

  void OnMessage(std::shared_ptr<Call> call, grpc::ByteBuffer message, int64_t item) override {
    const absl::StatusOr<ServerReflectionRequest> request =
        ParseMessage<ServerReflectionRequest>(message);
    if (!request.ok()) return call->Answer(item, request.status());
    ServerReflectionResponse response;
    response.set_valid_host(request->host());
    *response.mutable_original_request() = *request;
    AnswerRequest(*request, response);
    call->Answer(item, EncodeMessage(response));
  }
};

}  // namespace

Reflection::Reflection() : info_(std::make_unique<ServerReflectionInfo>()) {}

Reflection::~Reflection() = default;

void Reflection::AddTo(MethodTable& methods) {
  methods["/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"] = info_.get();
  methods["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"] = info_.get();
}

}  // namespace attend
