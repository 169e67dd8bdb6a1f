// SPDX-License-Identifier: Apache-2.0
#include "server/health_client.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdio>

#include "grpc/health/v1/health.pb.h"
#include "server/rpc/wire.h"

namespace attend {

int AskHealth(const std::string& address) {
  constexpr std::chrono::seconds kLimit{3};
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  grpc::GenericStub stub(
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kLimit);
  grpc::CompletionQueue queue;
  const grpc::ByteBuffer request = EncodeMessage(grpc::health::v1::HealthCheckRequest());
  const auto call =
      stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", request, &queue);
  grpc::ByteBuffer answer;
  grpc::Status status;
  call->StartCall();
  call->Finish(&answer, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  if (!status.ok()) {
    std::fprintf(stderr, "attend-server --health=%s: %s\n", address.c_str(),
                 status.error_message().c_str());
    return 1;
  }
  const auto response = ParseMessage<grpc::health::v1::HealthCheckResponse>(answer);
  const bool serving =
      response.ok() && response->status() == grpc::health::v1::HealthCheckResponse::SERVING;
  std::printf("%s\n", serving ? "SERVING" : "NOT_SERVING");
  return serving ? 0 : 1;
}

}  // namespace attend
