// SPDX-License-Identifier: Apache-2.0
//
// attend-echo: a gRPC server that returns the bytes of each request unchanged, whatever the method;
// nothing is decoded. Same library, completion queues and settings as attend-server, so it is the
// floor for a service in C++ on this machine. `attend bench --echo` measures against it: as
// AttendRequest.hidden_states and AttendResponse.output share a number, what comes back is an
// answer whose output is the input (its `timing` is a misread `sequences`).
#include <grpc/compression.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace attend {
namespace {

// As the server's dispatcher: calls that wait for clients on each queue.
constexpr int kPostedCalls = 32;

// One call: its headers, one message, that message back with the final status. Owns itself. Methods
// whose name ends in "Stream" return every message until the client half-closes.
class EchoCall {
 public:
  static void Post(grpc::AsyncGenericService& service, grpc::ServerCompletionQueue& queue) {
    auto* call = new EchoCall(service, queue);
    service.RequestCall(&call->context_, &call->stream_, &queue, &queue, call);
  }

  // What the queue returned for this call.
  void Proceed(bool ok) {
    switch (state_) {
      case State::kWaiting:
        if (!ok) return delete this;  // the server ends
        Post(service_, queue_);
        streaming_ = context_.method().ends_with("Stream");
        return Read();
      case State::kReading:
        if (ok && !streaming_) return WriteAndFinish();
        if (ok) return Write();
        return Finish();
      case State::kWriting:
        if (ok) return Read();
        return Finish();
      case State::kEnding:
        return delete this;
    }
  }

 private:
  enum class State { kWaiting, kReading, kWriting, kEnding };

  EchoCall(grpc::AsyncGenericService& service, grpc::ServerCompletionQueue& queue)
      : service_(service), queue_(queue) {}

  void Read() {
    state_ = State::kReading;
    stream_.Read(&message_, this);
  }
  void Write() {
    state_ = State::kWriting;
    stream_.Write(message_, this);
  }
  void WriteAndFinish() {
    state_ = State::kEnding;
    stream_.WriteAndFinish(message_, {}, grpc::Status::OK, this);
  }
  // After a half-close of a stream, or because the client is gone.
  void Finish() {
    state_ = State::kEnding;
    stream_.Finish(grpc::Status::OK, this);
  }

  grpc::AsyncGenericService& service_;
  grpc::ServerCompletionQueue& queue_;
  grpc::GenericServerContext context_;
  grpc::GenericServerAsyncReaderWriter stream_{&context_};
  grpc::ByteBuffer message_;
  State state_ = State::kWaiting;
  bool streaming_ = false;
};

void Serve(grpc::ServerCompletionQueue& queue) {
  void* tag = nullptr;
  bool ok = false;
  while (queue.Next(&tag, &ok)) static_cast<EchoCall*>(tag)->Proceed(ok);
}

// Until SIGINT or SIGTERM; 2 when the address can't be bound.
int Run(const std::string& listen, int threads) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // before any thread starts

  grpc::AsyncGenericService service;
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(-1);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_DEADLINE_CHECKS, 0);
  builder.RegisterAsyncGenericService(&service);
  std::vector<std::unique_ptr<grpc::ServerCompletionQueue>> queues;
  for (int i = 0; i < threads; ++i) queues.push_back(builder.AddCompletionQueue());
  int port = 0;
  builder.AddListeningPort(listen, grpc::InsecureServerCredentials(), &port);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || port == 0) {
    std::fprintf(stderr, "attend-echo: --listen: got %s, wanted an address that can be bound\n",
                 listen.c_str());
    return 2;
  }
  for (const auto& queue : queues) {
    for (int i = 0; i < kPostedCalls; ++i) EchoCall::Post(service, *queue);
    std::thread([&queue] { Serve(*queue); }).detach();
  }
  const bool is_unix = listen.starts_with("unix:");
  const std::string address =
      is_unix ? listen : listen.substr(0, listen.rfind(':') + 1) + std::to_string(port);
  std::printf("listening %s pid %d\n", address.c_str(), getpid());
  std::fflush(stdout);

  int received = 0;
  sigwait(&signals, &received);
  std::_Exit(0);  // nothing to save, and queues can't be closed under calls that still use them
}

}  // namespace
}  // namespace attend

int main(int argc, char** argv) {
  std::string listen = "127.0.0.1:50052";
  int threads = 2;
  CLI::App app(
      "Returns the bytes of every gRPC request unchanged. Prints its address and process id when\n"
      "it listens; ends after SIGINT or SIGTERM.");
  app.name("attend-echo");
  app.add_option("--listen", listen, "HOST:PORT (port 0: any free one) or unix:PATH")
      ->capture_default_str();
  app.add_option("--threads", threads, "Completion queues, one thread each")
      ->check(CLI::Range(1, 1024))
      ->type_name("N")
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return attend::Run(listen, threads);
}
