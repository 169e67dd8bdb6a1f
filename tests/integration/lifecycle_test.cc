// SPDX-License-Identifier: Apache-2.0
//
// The life of the server process: start, health, drain, signals, exit codes, streams and the
// command line that talks to it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <filesystem>

#include "client/npy.h"
#include "grpc/health/v1/health.pb.h"
#include "grpc/reflection/v1/reflection.pb.h"
#include "tests/integration/server_process.h"
#include "tests/integration/wire_calls.h"
#include "tests/support/shell.h"

namespace attend {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;
using std::chrono::milliseconds;
using testing::HasSubstr;
using testing::Not;

constexpr int64_t kWidth = 64;  // llama_gqa4
constexpr milliseconds kSoon{kSanitizer ? 10000 : 1000};

v1::AttendRequest Rows(int64_t rows) {
  std::mt19937_64 random(1);
  return RowsRequest("llama", "0", kWidth, RandomValues(random, rows * kWidth));
}

std::vector<std::string> Flags(std::vector<std::string> flags = {}) {
  flags.push_back(GoldenModelFlag("llama_gqa4", "llama"));
  return flags;
}

// Many copies take long enough to load to be seen loading.
std::vector<std::string> ManyModels(int count) {
  std::vector<std::string> flags = {"--reflection=false"};
  for (int i = 0; i < count; ++i)
    flags.push_back(GoldenModelFlag("gpt2", std::string("m").append(std::to_string(i))));
  return flags;
}

using ByteStream = grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;
std::unique_ptr<ByteStream> OpenBytes(const WireClient& wire, const char* path,
                                      grpc::ClientContext& context) {
  const grpc::internal::RpcMethod method(path, grpc::internal::RpcMethod::BIDI_STREAMING);
  return std::unique_ptr<ByteStream>(
      grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(
          wire.channel().get(), method, &context));
}

TEST(LifecycleTest, HealthAndCallsFollowLoadingServingAndDraining) {
  for (int models = 200;; models *= 3) {  // more, if they were loaded before the first look
    ServerProcess server(ManyModels(models));
    ASSERT_TRUE(server.WaitForListening()) << server.log();
    const WireClient wire(server.address());
    grpc::ClientContext context;
    const auto watch = OpenBytes(wire, "/grpc.health.v1.Health/Watch", context);
    HealthCheckRequest request;
    watch->Write(ToBuffer(request.SerializeAsString()));
    watch->WritesDone();
    const auto next = [&] {
      grpc::ByteBuffer message;
      HealthCheckResponse response;
      if (watch->Read(&message)) response.ParseFromString(FromBuffer(message));
      return response.status();
    };
    const auto first = next();
    const auto early = wire.Attend(Rows(1));
    const bool was_loading =
        first == HealthCheckResponse::NOT_SERVING && early.error.code == grpc::UNAVAILABLE;
    if (!was_loading && models < 5000) continue;
    ASSERT_TRUE(was_loading);
    EXPECT_EQ(early.error.reason, v1::STARTING) << early.error.ToString();
    EXPECT_EQ(next(), HealthCheckResponse::SERVING);
    ASSERT_TRUE(server.WaitForServing());
    for (const char* service : {"", "attend.v1.Attention", "readiness", "liveness"}) {
      EXPECT_EQ(wire.Health(service), HealthCheckResponse::SERVING) << service;
    }
    EXPECT_EQ(wire.Health("nope"), -grpc::NOT_FOUND);
    v1::OpenSessionRequest open;
    open.set_model("m0");
    const std::string id = wire.Open(open).value.id();
    server.Signal(SIGTERM);
    EXPECT_EQ(next(), HealthCheckResponse::NOT_SERVING);
    EXPECT_EQ(wire.Health("readiness"), HealthCheckResponse::NOT_SERVING);
    EXPECT_EQ(wire.Health("liveness"), HealthCheckResponse::SERVING);
    EXPECT_EQ(server.Get("/readyz"), "HTTP 503");
    EXPECT_TRUE(wire.Close(id).ok());
    EXPECT_EQ(server.WaitForExit(), 0);
    EXPECT_EQ(watch->Finish().error_code(), grpc::UNAVAILABLE);
    return;
  }
}

TEST(LifecycleTest, ASignalStopsAnIdleServerAtOnceDespiteIdleClientsAndStreams) {
  for (int signal : {SIGTERM, SIGINT}) {
    ServerProcess server(Flags());
    ASSERT_TRUE(server.WaitForServing()) << server.log();
    const WireClient idle(server.address()), streaming(server.address());
    EXPECT_TRUE(idle.Attend(Rows(2)).ok());
    grpc::ClientContext context;
    const auto stream = streaming.stub().AttendStream(&context);
    ASSERT_TRUE(stream->Write(Rows(2)));
    v1::AttendResponse response;
    ASSERT_TRUE(stream->Read(&response));
    server.Signal(signal);
    EXPECT_EQ(server.WaitForExit(kSoon), 0);
    EXPECT_FALSE(stream->Read(&response));
    const Ended ended = EndOf(stream->Finish(), context);
    EXPECT_EQ(ended.error.code, grpc::UNAVAILABLE);
    EXPECT_EQ(ended.error.reason, v1::DRAINING) << ended.error.ToString();
  }
}

TEST(LifecycleTest, ASignalWhileLoadingExitsWithZero) {
  ServerProcess server(ManyModels(500));
  ASSERT_TRUE(server.WaitForListening()) << server.log();
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitForExit(milliseconds(kSanitizer ? 20000 : 2000)), 0);
}

TEST(LifecycleTest, NoAcceptedRequestIsLostWhenTheServerStopsUnderLoad) {
  ServerProcess server(Flags());
  ASSERT_TRUE(server.WaitForServing()) << server.log();
  std::atomic<int> answered{0};
  std::atomic<int> unexplained{0};
  std::vector<std::thread> clients;
  for (int i = 0; i < 8; ++i) {
    clients.emplace_back([&, i] {
      const WireClient wire(server.address());
      for (;;) {
        const auto reply = wire.Attend(Rows(10 + 60 * i));
        if (reply.ok()) {
          ++answered;
          continue;
        }
        // Refused before it ran, or no server any more.
        const bool refused = reply.error.reason == v1::DRAINING;
        const bool gone = reply.error.message.find("onnect") != std::string::npos ||
                          reply.error.message.find("Socket closed") != std::string::npos;
        if (reply.error.code != grpc::UNAVAILABLE || !(refused || gone)) {
          ++unexplained;
          ADD_FAILURE() << reply.error.ToString();
        }
        return;
      }
    });
  }
  EXPECT_TRUE(Eventually([&] { return answered.load() > 40; }));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitForExit(), 0);
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(unexplained.load(), 0);
}

TEST(LifecycleTest, StreamItemsAcceptedBeforeTheDrainAreAnswered) {
  ServerProcess server(Flags());
  ASSERT_TRUE(server.WaitForServing()) << server.log();
  const WireClient wire(server.address());
  grpc::ClientContext context;
  const auto stream = wire.stub().AttendStream(&context);
  constexpr int kItems = 10;
  for (int i = 0; i < kItems; ++i) ASSERT_TRUE(stream->Write(Rows(1000)));
  ASSERT_TRUE(Eventually([&] {
    return server.Metrics()["attend_requests_started_total{method=\"AttendStream\"}"] == kItems;
  }));
  server.Signal(SIGTERM);
  v1::AttendResponse response;
  for (int i = 0; i < kItems; ++i) {
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_EQ(response.error().code(), 0);
    EXPECT_EQ(response.output().shape(0), 1000);
  }
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(EndOf(stream->Finish(), context).error.reason, v1::DRAINING);
  EXPECT_EQ(server.WaitForExit(), 0);
}

TEST(LifecycleTest, ACallThatBeganBeforeTheDrainIsServedHoweverLateItsRequestComes) {
  ServerProcess server(Flags());
  ASSERT_TRUE(server.WaitForServing()) << server.log();
  const WireClient wire(server.address());
  HeldCall held(wire, 100000);
  ASSERT_TRUE(Eventually(
      [&] { return server.Metrics()["attend_requests_started_total{method=\"Attend\"}"] == 1; }));
  server.Signal(SIGTERM);
  ASSERT_TRUE(Eventually([&] { return wire.Attend(Rows(1)).error.reason == v1::DRAINING; }));
  const Ended ended = held.Send(Rows(2));
  EXPECT_TRUE(ended.ok()) << ended.error.ToString();
  EXPECT_EQ(server.WaitForExit(), 0);
}

TEST(LifecycleTest, AnOpenSessionHoldsTheDrainUntilItsLimitAndASecondSignalEndsIt) {
  v1::OpenSessionRequest open;
  {
    ServerProcess server(Flags({"--drain_limit=1"}));
    ASSERT_TRUE(server.WaitForServing()) << server.log();
    ASSERT_TRUE(WireClient(server.address()).Open(open).ok());
    const auto asked = std::chrono::steady_clock::now();
    server.Signal(SIGTERM);
    EXPECT_EQ(server.WaitForExit(), 0);
    EXPECT_GE(std::chrono::steady_clock::now() - asked, milliseconds(1000));
    EXPECT_THAT(server.log(), HasSubstr("sessions_lost=1"));
  }
  ServerProcess server(Flags());
  ASSERT_TRUE(server.WaitForServing()) << server.log();
  ASSERT_TRUE(WireClient(server.address()).Open(open).ok());
  server.Signal(SIGTERM);
  ASSERT_TRUE(server.WaitForLog(" draining "));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitForExit(kSoon), 1);
}

// CANCELLED is what callers see who gave up; gRPC's own shutdown answers it to calls that cross
// with it.
TEST(LifecycleTest, TheEndOfADrainIsUnavailableToThoseWhoStillCall) {
  for (int round = 0; round < 3; ++round) {
    ServerProcess server(Flags({"--drain_limit=1"}));
    ASSERT_TRUE(server.WaitForServing()) << server.log();
    const std::string session = WireClient(server.address()).Open({}).value.id();
    std::vector<std::thread> callers;
    for (int c = 0; c < 8; ++c) {
      callers.emplace_back([&, wire = WireClient(server.address())] {
        const auto last = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        int refused = 0;
        while (refused < 3 && std::chrono::steady_clock::now() < last) {
          const Reply<v1::Session> reply = wire.Get(session);
          if (reply.ok()) continue;
          ++refused;
          EXPECT_EQ(reply.error.code, grpc::UNAVAILABLE) << reply.error.ToString();
        }
        EXPECT_EQ(refused, 3);
      });
    }
    server.Signal(SIGTERM);
    EXPECT_EQ(server.WaitForExit(), 0);
    for (std::thread& caller : callers) caller.join();
  }
}

TEST(LifecycleTest, AWrongFlagCheckpointOrPortIsOneLineAndExitTwo) {
  ServerProcess taken(Flags());
  ASSERT_TRUE(taken.WaitForServing()) << taken.log();
  struct Case {
    std::vector<std::string> flags;
    std::string named;
  };
  const Case cases[] = {
      {{"--nonsense=1"}, "nonsense"},
      {{"--threads=0"}, "--threads"},
      {{"--message_bytes=-1"}, "--message_bytes"},
      {{"--listen=0.0.0.0:0"}, "--allow_insecure"},
      {{"--model=a=/nonexistent"}, "--model=a=/nonexistent"},
      {{"--model=raw=/nonexistent"}, "--model"},
      {{"--drain_limit=1", "--drain_delay=2"}, "--drain_limit"},
      {{"--kv_bytes=60000GiB"}, "--kv_bytes"},
      {{"--listen=" + taken.address()}, taken.address()},
      {{"--metrics_listen=" + taken.http_address()}, taken.http_address()},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.named);
    ServerProcess server(one.flags);
    EXPECT_EQ(server.WaitForExit(), 2);
    ASSERT_TRUE(server.WaitForLog("attend-server: ")) << server.log();
    std::string log = server.log();
    EXPECT_THAT(log, HasSubstr(one.named));
    EXPECT_THAT(log, Not(HasSubstr(" listening ")));
    const std::string error = log.substr(log.find("attend-server: "));
    EXPECT_EQ(std::count(error.begin(), error.end(), '\n'), 1) << log;
    EXPECT_EQ(log.find("\nE"), std::string::npos) << log;  // a line of gRPC's
  }
}

TEST(LifecycleTest, TheFileOfAUnixSocketGoesWithItsServerAndAStaleOneIsReplaced) {
  const std::string path = testing::TempDir() + "lifecycle_test." + std::to_string(getpid());
  const std::string listen = "--listen=unix:" + path;
  {
    ServerProcess killed(Flags({listen}));
    ASSERT_TRUE(killed.WaitForServing()) << killed.log();
    EXPECT_TRUE(WireClient(killed.address()).Attend(Rows(2)).ok());
    killed.Signal(SIGKILL);
    killed.WaitForExit();
    EXPECT_TRUE(std::filesystem::is_socket(path));
  }
  ServerProcess first(Flags({listen}));
  ASSERT_TRUE(first.WaitForServing()) << first.log();
  EXPECT_TRUE(WireClient(first.address()).Attend(Rows(2)).ok());
  {
    ServerProcess second(Flags({listen}));  // as in a restart that overlaps
    ASSERT_TRUE(second.WaitForServing()) << second.log();
    first.Signal(SIGTERM);
    EXPECT_EQ(first.WaitForExit(), 0);
    EXPECT_TRUE(std::filesystem::is_socket(path));  // of the second one
    EXPECT_TRUE(WireClient(second.address()).Attend(Rows(2)).ok());
    second.Signal(SIGTERM);
    EXPECT_EQ(second.WaitForExit(), 0);
    EXPECT_FALSE(std::filesystem::exists(path));
  }
  ServerProcess other(Flags());
  ASSERT_TRUE(other.WaitForServing()) << other.log();
  for (const std::string& wrong :
       {"--metrics_listen=" + other.http_address(), "--listen=" + other.address()}) {
    ServerProcess failed(Flags({listen, wrong}));
    EXPECT_EQ(failed.WaitForExit(), 2);
    EXPECT_FALSE(std::filesystem::exists(path)) << wrong;
  }
  std::vector<std::string> many = ManyModels(500);
  many.push_back(listen);
  ServerProcess loading(many);
  ASSERT_TRUE(loading.WaitForListening()) << loading.log();
  loading.Signal(SIGTERM);
  EXPECT_EQ(loading.WaitForExit(), 0);
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(LifecycleTest, TheHealthClientTellsAServingServerByItsExitCode) {
  ServerProcess server(Flags());
  ASSERT_TRUE(server.WaitForServing()) << server.log();
  const std::string ask = ATTEND_BINARY_DIR "/bin/attend-server --health=" + server.address();
  const Outcome serving = RunShell(ask);
  EXPECT_EQ(serving.code, 0) << serving.text;
  EXPECT_THAT(serving.text, HasSubstr("SERVING"));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitForExit(), 0);
  EXPECT_EQ(RunShell(ask).code, 1);
}

TEST(LifecycleTest, ReflectionListsTheServices) {
  ServerProcess server(Flags());
  ASSERT_TRUE(server.WaitForServing()) << server.log();
  const WireClient wire(server.address());
  grpc::reflection::v1::ServerReflectionRequest request;
  request.set_list_services("*");
  for (const std::string version : {"v1", "v1alpha"}) {
    std::string answer;
    const Ended ended =
        wire.SendBytes("/grpc.reflection." + version + ".ServerReflection/ServerReflectionInfo",
                       {request.SerializeAsString()}, {}, &answer);
    EXPECT_TRUE(ended.ok()) << ended.error.ToString();
    grpc::reflection::v1::ServerReflectionResponse response;
    ASSERT_TRUE(response.ParseFromString(answer));
    EXPECT_THAT(response.ShortDebugString(), HasSubstr("\"attend.v1.Attention\""));
    EXPECT_THAT(response.ShortDebugString(), HasSubstr("\"grpc.health.v1.Health\""));
  }
}

TEST(LifecycleTest, AStreamOfAgeEndsAfterItsAnswersAndSaysWhy) {
  ServerProcess server(Flags({"--stream_age=1"}));
  ASSERT_TRUE(server.WaitForServing()) << server.log();
  const WireClient wire(server.address());
  grpc::ClientContext context;
  const auto stream = wire.stub().AttendStream(&context);
  ASSERT_TRUE(stream->Write(Rows(3)));
  v1::AttendResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_FALSE(stream->Read(&response));
  const Ended ended = EndOf(stream->Finish(), context);
  EXPECT_EQ(ended.error.code, grpc::UNAVAILABLE);
  EXPECT_EQ(ended.error.reason, v1::DRAINING);
  EXPECT_EQ(ended.error.field, "stream_age");
  EXPECT_TRUE(wire.Attend(Rows(1)).ok());
}

TEST(LifecycleTest, AStreamIsNotReadBeyondItsItemsInFlightAndItemErrorsDoNotEndIt) {
  ServerProcess server(Flags({"--stream_items_in_flight=2"}));
  ASSERT_TRUE(server.WaitForServing()) << server.log();
  const WireClient wire(server.address());
  grpc::ClientContext context;
  const auto stream = wire.stub().AttendStream(&context);
  constexpr int kItems = 60;
  std::thread writer([&] {
    for (int i = 0; i < kItems; ++i) {
      v1::AttendRequest request = Rows(1000);  // 256 KB and as much back
      request.set_request_id(std::to_string(i));
      if (i % 3 == 1) request.set_layer("nope");
      stream->Write(request);
    }
    stream->WritesDone();
  });
  // Nobody reads answers: what the server starts stays far below what is sent.
  const auto started = [&] {
    return server.Metrics()["attend_requests_started_total{method=\"AttendStream\"}"];
  };
  ASSERT_TRUE(Eventually([&] { return started() >= 2; }));
  v1::AttendResponse response;
  for (int i = 0; i < kItems; ++i) {
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_EQ(response.request_id(), std::to_string(i));
    EXPECT_EQ(response.error().code(), i % 3 == 1 ? grpc::NOT_FOUND : grpc::OK);
    const MetricValues metrics = server.Metrics();
    EXPECT_LE(metrics.at("attend_queue_requests") + metrics.at("attend_running_requests"), 2);
  }
  writer.join();
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(started(), kItems);
  EXPECT_EQ(WhatIsLeft(server), "");
}

TEST(LifecycleTest, TheCommandLineOpensUsesForksCutsAndClosesSessions) {
  ServerProcess server(Flags());
  ASSERT_TRUE(server.WaitForServing()) << server.log();
  const std::string directory = testing::TempDir() + "lifecycle_test." + std::to_string(getpid());
  std::filesystem::create_directories(directory);
  std::mt19937_64 random(1);
  ASSERT_TRUE(
      client::WriteNpy(directory + "/x.npy", {RandomValues(random, 5 * kWidth), {5, kWidth}}).ok());
  const auto run = [&](const std::string& arguments) {
    Outcome outcome = RunShell("cd " + directory + " && " ATTEND_BINARY_DIR "/bin/attend " +
                               arguments + " --server " + server.address());
    EXPECT_EQ(outcome.code, 0) << arguments << ": " << outcome.text;
    while (outcome.text.ends_with("\n")) outcome.text.pop_back();
    return outcome.text;
  };
  EXPECT_THAT(run("info"), HasSubstr("test-1"));
  EXPECT_THAT(run("models"), HasSubstr("llama"));
  const std::string id = run("session open --model llama");
  run("run --layer 0 --input x.npy --output y.npy --session " + id);
  EXPECT_TRUE(std::filesystem::exists(directory + "/y.npy"));
  const std::string fork = run("session fork " + id);
  run("session truncate " + fork + " --length 2");
  const WireClient wire(server.address());
  EXPECT_EQ(wire.Get(id).value.length(), 5);
  EXPECT_EQ(wire.Get(fork).value.length(), 2);
  run("session close " + id);
  run("session close " + fork);
  EXPECT_EQ(wire.Get(fork).error.reason, v1::SESSION_CLOSED);
  EXPECT_EQ(WhatIsLeft(server), "");
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace attend
