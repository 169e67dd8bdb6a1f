// SPDX-License-Identifier: Apache-2.0
//
// A Server inside the test's own process, and its end by destruction: attend-server ends without
// it, so nothing else sees whether calls, threads and memory go in the right order.
#include "server/server.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>

#include "attend/v1/attend.grpc.pb.h"

namespace attend {
namespace {

v1::AttendRequest OneRow() {
  v1::AttendRequest request;
  for (v1::Tensor* tensor : {request.mutable_raw()->mutable_q(), request.mutable_raw()->mutable_k(),
                             request.mutable_raw()->mutable_v()}) {
    tensor->set_dtype(v1::DTYPE_F32);
    for (int i = 0; i < 3; ++i) tensor->add_shape(1);
    tensor->set_data(std::string(4, '\0'));
  }
  return request;
}

TEST(ServerTest, DestructionEndsCallsAndThreads) {
  const char* arguments[] = {
      "attend-server",   "--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0",
      "--kv_bytes=1MiB", "--message_bytes=1MiB", "--queue_bytes=4MiB",
      "--threads=2"};
  const Machine machine = ReadMachine();
  const absl::StatusOr<Options> options = ParseOptions(
      static_cast<int>(std::size(arguments)), arguments,
      [](const char*) -> const char* { return nullptr; }, machine);
  ASSERT_TRUE(options.ok()) << options.status();
  Logger logger(options->log_format);
  auto server = std::make_unique<Server>(*options, machine, logger);
  ASSERT_TRUE(server->Start().ok());
  const auto stub = v1::Attention::NewStub(
      grpc::CreateChannel(server->addresses()[0], grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::AttendResponse response;
  EXPECT_TRUE(stub->Attend(&context, OneRow(), &response).ok());
  grpc::ClientContext stream_context;
  const auto stream = stub->AttendStream(&stream_context);
  ASSERT_TRUE(stream->Write(OneRow()));
  ASSERT_TRUE(stream->Read(&response));

  server.reset();
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  grpc::ClientContext late;
  EXPECT_FALSE(stub->Attend(&late, OneRow(), &response).ok());
}

}  // namespace
}  // namespace attend
