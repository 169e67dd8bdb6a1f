// SPDX-License-Identifier: Apache-2.0
//
// Server reflection as grpcurl uses it, both versions, over real sockets.
#include "server/reflection.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.pb.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "grpc/reflection/v1/reflection.pb.h"
#include "grpc/reflection/v1alpha/reflection.pb.h"
#include "tests/server/rpc/test_server.h"

namespace attend {
namespace {

using testing::Contains;
using testing::ElementsAre;

template <typename Version>
class ReflectionTest : public testing::Test {
 protected:
  using Request = typename Version::Request;
  using Response = typename Version::Response;

  ReflectionTest() {
    MethodTable methods;
    reflection_.AddTo(methods);
    auto started = Dispatcher::Start({.listen = {"127.0.0.1:0"}}, methods, observer_);
    EXPECT_TRUE(started.ok());
    dispatcher_ = std::move(*started);
    channel_ = grpc::CreateChannel(dispatcher_->addresses()[0], grpc::InsecureChannelCredentials());
    stream_ = OpenGeneric(*channel_, Version::kPath, context_);
  }
  ~ReflectionTest() override {
    stream_->WritesDone();
    EXPECT_TRUE(stream_->Finish().ok());
  }

  Response Ask(const Request& request) {
    stream_->Write(EncodeMessage(request));
    grpc::ByteBuffer message;
    EXPECT_TRUE(stream_->Read(&message));
    const auto response = ParseMessage<Response>(message);
    EXPECT_TRUE(response.ok());
    EXPECT_EQ(response->original_request().SerializeAsString(), request.SerializeAsString());
    return *response;
  }
  // Names of the returned files.
  static std::vector<std::string> Files(const Response& response) {
    std::vector<std::string> names;
    for (const std::string& encoded : response.file_descriptor_response().file_descriptor_proto()) {
      google::protobuf::FileDescriptorProto file;
      EXPECT_TRUE(file.ParseFromString(encoded));
      names.push_back(file.name());
    }
    return names;
  }

  CountingObserver observer_;
  Reflection reflection_;
  std::unique_ptr<Dispatcher> dispatcher_;
  std::shared_ptr<grpc::Channel> channel_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>> stream_;
};

struct V1 {
  using Request = grpc::reflection::v1::ServerReflectionRequest;
  using Response = grpc::reflection::v1::ServerReflectionResponse;
  static constexpr char kPath[] = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
};
struct V1Alpha {
  using Request = grpc::reflection::v1alpha::ServerReflectionRequest;
  using Response = grpc::reflection::v1alpha::ServerReflectionResponse;
  static constexpr char kPath[] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
};
using Versions = testing::Types<V1, V1Alpha>;
TYPED_TEST_SUITE(ReflectionTest, Versions);

TYPED_TEST(ReflectionTest, ListsEveryServiceOfThePort) {
  typename TestFixture::Request request;
  request.set_host("here");
  request.set_list_services("*");
  const auto response = this->Ask(request);
  EXPECT_EQ(response.valid_host(), "here");
  std::vector<std::string> names;
  for (const auto& service : response.list_services_response().service()) {
    names.push_back(service.name());
  }
  EXPECT_THAT(names, ElementsAre("attend.v1.Attention", "grpc.health.v1.Health",
                                 "grpc.reflection.v1.ServerReflection",
                                 "grpc.reflection.v1alpha.ServerReflection"));
}

TYPED_TEST(ReflectionTest, GivesAFileWithAllItImports) {
  typename TestFixture::Request request;
  request.set_file_by_filename("attend/v1/attend.proto");
  EXPECT_THAT(this->Files(this->Ask(request)),
              ElementsAre("attend/v1/attend.proto", "google/protobuf/any.proto"));
}

TYPED_TEST(ReflectionTest, FindsTheFileOfServicesMethodsAndMessages) {
  for (const char* symbol : {"attend.v1.Attention", "attend.v1.Attention.Attend",
                             "attend.v1.ErrorDetail", "attend.v1.Reason"}) {
    typename TestFixture::Request request;
    request.set_file_containing_symbol(symbol);
    EXPECT_THAT(this->Files(this->Ask(request)), Contains("attend/v1/attend.proto")) << symbol;
  }
  typename TestFixture::Request request;
  request.set_file_containing_symbol("grpc.health.v1.Health");
  EXPECT_THAT(this->Files(this->Ask(request)), Contains("grpc/health/v1/health.proto"));
}

TYPED_TEST(ReflectionTest, WhatIsNotThereIsNotFoundAndTheStreamGoesOn) {
  typename TestFixture::Request file, symbol, extension, extensions, nothing;
  file.set_file_by_filename("nope.proto");
  symbol.set_file_containing_symbol("attend.v1.Nope");
  extension.mutable_file_containing_extension()->set_containing_type("attend.v1.Tensor");
  extensions.set_all_extension_numbers_of_type("attend.v1.Tensor");
  for (const auto& request : {file, symbol, extension, extensions}) {
    EXPECT_EQ(this->Ask(request).error_response().error_code(), grpc::StatusCode::NOT_FOUND);
  }
  EXPECT_EQ(this->Ask(nothing).error_response().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

}  // namespace
}  // namespace attend
