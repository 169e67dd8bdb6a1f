// SPDX-License-Identifier: Apache-2.0
//
// grpc.health.v1 as balancers and probes use it, over real sockets.
#include "server/health.h"

#include <gtest/gtest.h>

#include <string>

#include "grpc/health/v1/health.pb.h"
#include "tests/server/rpc/test_server.h"

namespace attend {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

class HealthTest : public testing::Test {
 protected:
  HealthTest() {
    MethodTable methods;
    health_.AddTo(methods);
    auto started = Dispatcher::Start({.listen = {"127.0.0.1:0"}}, methods, observer_);
    EXPECT_TRUE(started.ok());
    dispatcher_ = std::move(*started);
    channel_ = grpc::CreateChannel(dispatcher_->addresses()[0], grpc::InsecureChannelCredentials());
  }

  using Stream = grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;

  std::unique_ptr<Stream> Open(const char* path, const std::string& service,
                               grpc::ClientContext& context) {
    auto stream = OpenGeneric(*channel_, path, context);
    HealthCheckRequest request;
    request.set_service(service);
    stream->Write(EncodeMessage(request));
    stream->WritesDone();
    return stream;
  }
  std::unique_ptr<Stream> Watch(const std::string& service, grpc::ClientContext& context) {
    return Open("/grpc.health.v1.Health/Watch", service, context);
  }
  static HealthCheckResponse::ServingStatus Next(Stream& stream) {
    grpc::ByteBuffer message;
    EXPECT_TRUE(stream.Read(&message));
    const auto response = ParseMessage<HealthCheckResponse>(message);
    EXPECT_TRUE(response.ok());
    return response->status();
  }
  // The status of a Check, or the call's error.
  grpc::Status Check(const std::string& service, HealthCheckResponse::ServingStatus* serving) {
    grpc::ClientContext context;
    auto stream = Open("/grpc.health.v1.Health/Check", service, context);
    grpc::ByteBuffer message;
    if (stream->Read(&message)) *serving = ParseMessage<HealthCheckResponse>(message)->status();
    return stream->Finish();
  }

  CountingObserver observer_;
  Health health_;
  std::unique_ptr<Dispatcher> dispatcher_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(HealthTest, CheckTellsWhatWasSet) {
  HealthCheckResponse::ServingStatus serving = HealthCheckResponse::UNKNOWN;
  for (const char* service : {"", "attend.v1.Attention", "readiness", "liveness"}) {
    EXPECT_TRUE(Check(service, &serving).ok());
    EXPECT_EQ(serving, HealthCheckResponse::NOT_SERVING);
    health_.SetServing(service, true);
    EXPECT_TRUE(Check(service, &serving).ok());
    EXPECT_EQ(serving, HealthCheckResponse::SERVING);
  }
}

TEST_F(HealthTest, CheckOfAnUnknownServiceIsNotFound) {
  HealthCheckResponse::ServingStatus serving = HealthCheckResponse::UNKNOWN;
  EXPECT_EQ(Check("nope", &serving).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(HealthTest, WatchTellsTheStateAndThenEachChangeOnce) {
  grpc::ClientContext context;
  auto watch = Watch("readiness", context);
  EXPECT_EQ(Next(*watch), HealthCheckResponse::NOT_SERVING);
  health_.SetServing("readiness", false);
  health_.SetServing("liveness", true);
  health_.SetServing("readiness", true);
  health_.SetServing("readiness", true);
  health_.SetServing("readiness", false);
  EXPECT_EQ(Next(*watch), HealthCheckResponse::SERVING);
  EXPECT_EQ(Next(*watch), HealthCheckResponse::NOT_SERVING);
  context.TryCancel();
  EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(HealthTest, WatchOfAnUnknownServiceStaysOpenUntilItIsKnown) {
  grpc::ClientContext context;
  auto watch = Watch("later", context);
  EXPECT_EQ(Next(*watch), HealthCheckResponse::SERVICE_UNKNOWN);
  health_.SetServing("later", true);
  EXPECT_EQ(Next(*watch), HealthCheckResponse::SERVING);
  context.TryCancel();
  (void)watch->Finish();
}

TEST_F(HealthTest, WatchesEndWithTheServerAndAreNoRequests) {
  grpc::ClientContext context;
  auto watch = Watch("", context);
  EXPECT_EQ(Next(*watch), HealthCheckResponse::NOT_SERVING);
  grpc::ClientContext dropped_context;
  auto dropped = Watch("", dropped_context);
  EXPECT_EQ(Next(*dropped), HealthCheckResponse::NOT_SERVING);
  dropped_context.TryCancel();
  (void)dropped->Finish();

  dispatcher_->Shutdown(std::chrono::system_clock::now() + std::chrono::minutes(5));
  grpc::ByteBuffer message;
  EXPECT_FALSE(watch->Read(&message));
  EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  health_.SetServing("", true);  // nobody listens any more
  dispatcher_->Stop();
  EXPECT_EQ(dispatcher_->live_calls(), 0);
  EXPECT_EQ(observer_.started(), 0);
  EXPECT_EQ(observer_.streams(), 0);
}

TEST_F(HealthTest, ARequestThatIsNoMessageIsInvalid) {
  for (const char* path : {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}) {
    grpc::ClientContext context;
    auto stream = OpenGeneric(*channel_, path, context);
    const grpc::Slice garbage(std::string("\x0a\x7f"));
    stream->Write(grpc::ByteBuffer(&garbage, 1));
    stream->WritesDone();
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
}

}  // namespace
}  // namespace attend
