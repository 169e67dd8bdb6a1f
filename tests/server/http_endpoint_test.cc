// SPDX-License-Identifier: Apache-2.0
#include "server/http_endpoint.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

namespace attend {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

int Connect(int port) {
  const int client = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(client, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  return client;
}

// Everything the server sends until it closes; closes `client`.
std::string ReadAll(int client) {
  std::string answer;
  char buffer[4096];
  for (ssize_t bytes = 0; (bytes = recv(client, buffer, sizeof(buffer), 0)) > 0;) {
    answer.append(buffer, static_cast<size_t>(bytes));
  }
  close(client);
  return answer;
}

std::string Exchange(int port, const std::string& request) {
  const int client = Connect(port);
  send(client, request.data(), request.size(), MSG_NOSIGNAL);
  return ReadAll(client);
}

std::string Ask(int port, const std::string& method, const std::string& path) {
  return Exchange(port, method + " " + path + " HTTP/1.1\r\nHost: x\r\n\r\n");
}

class HttpEndpointTest : public testing::Test {
 protected:
  HttpEndpointTest() {
    auto started = HttpEndpoint::Start(
        "127.0.0.1:0", {.metrics = [this]() -> std::string {
                          if (broken_) throw std::runtime_error("broken");
                          return page_;
                        },
                        .healthy = [] { return absl::OkStatus(); },
                        .ready =
                            [this] {
                              return ready_ ? absl::OkStatus()
                                            : absl::UnavailableError("loading model bert");
                            }});
    EXPECT_TRUE(started.ok()) << started.status();
    endpoint_ = *std::move(started);
  }
  int port() const { return endpoint_->port(); }

  std::string page_ = "attend_streams 0\n";
  std::atomic<bool> ready_{false};
  std::atomic<bool> broken_{false};
  std::unique_ptr<HttpEndpoint> endpoint_;
};

TEST_F(HttpEndpointTest, MetricsAreServedAsPrometheusText) {
  const std::string answer = Ask(port(), "GET", "/metrics");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, HasSubstr("Content-Type: text/plain; version=0.0.4"));
  EXPECT_THAT(answer, HasSubstr("Content-Length: 17\r\n"));
  EXPECT_THAT(answer, EndsWith("\r\n\r\nattend_streams 0\n"));
}

TEST_F(HttpEndpointTest, AQueryDoesNotChangeThePage) {
  EXPECT_THAT(Ask(port(), "GET", "/metrics?name=x"), EndsWith("attend_streams 0\n"));
}

TEST_F(HttpEndpointTest, HeadHasTheHeadersAndNoBody) {
  const std::string answer = Ask(port(), "HEAD", "/metrics");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, HasSubstr("Content-Length: 17\r\n"));
  EXPECT_THAT(answer, EndsWith("\r\n\r\n"));
}

TEST_F(HttpEndpointTest, ALargePageArrivesWhole) {
  page_ = std::string(3 << 20, 'x');
  const std::string answer = Ask(port(), "GET", "/metrics");
  EXPECT_EQ(answer.size() - answer.find("\r\n\r\n") - 4, page_.size());
}

TEST_F(HttpEndpointTest, HealthAndReadinessAreSeparate) {
  EXPECT_THAT(Ask(port(), "GET", "/healthz"), StartsWith("HTTP/1.1 200 OK\r\n"));
  const std::string unready = Ask(port(), "GET", "/readyz");
  EXPECT_THAT(unready, StartsWith("HTTP/1.1 503 "));
  EXPECT_THAT(unready, EndsWith("loading model bert\n"));
  ready_ = true;
  EXPECT_THAT(Ask(port(), "GET", "/readyz"), StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(HttpEndpointTest, ReadinessCanBeScrapedAsAPageWithoutSeries) {
  ready_ = true;
  const std::string answer = Ask(port(), "GET", "/readyz");
  EXPECT_THAT(answer, HasSubstr("Content-Type: text/plain"));
  EXPECT_THAT(answer, EndsWith("\r\n\r\n# ok\n"));
}

TEST_F(HttpEndpointTest, OtherPathsAndMethodsAreRefused) {
  for (const char* path : {"/", "/metrics/", "/metricsx", "/../etc/passwd", "/healthz/x"}) {
    EXPECT_THAT(Ask(port(), "GET", path), StartsWith("HTTP/1.1 404 ")) << path;
  }
  for (const char* method : {"POST", "PUT", "DELETE"}) {
    EXPECT_THAT(Ask(port(), method, "/metrics"), StartsWith("HTTP/1.1 405 ")) << method;
  }
}

TEST_F(HttpEndpointTest, AHandlersExceptionIsAnErrorAndTheNextCallWorks) {
  broken_ = true;
  EXPECT_THAT(Ask(port(), "GET", "/metrics"), StartsWith("HTTP/1.1 500 "));
  broken_ = false;
  EXPECT_THAT(Ask(port(), "GET", "/metrics"), StartsWith("HTTP/1.1 200 "));
}

TEST_F(HttpEndpointTest, AClientThatSendsNothingDoesNotKeepOthersWaiting) {
  const int silent = Connect(port());
  EXPECT_THAT(Ask(port(), "GET", "/healthz"), StartsWith("HTTP/1.1 200 "));
  close(silent);
}

TEST_F(HttpEndpointTest, MoreIdleClientsThanThereIsRoomForDoNotKeepAProbeOut) {
  std::vector<int> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(Connect(port()));
  const auto start = std::chrono::steady_clock::now();
  EXPECT_NE(Ask(port(), "GET", "/healthz").find("200 OK"), std::string::npos);
  // Idle clients are dropped after 10 s; the probe must not have waited for that.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(8));
  for (int client : silent) close(client);
}

TEST_F(HttpEndpointTest, AGarbledRequestIsRefusedAndTheNextCallWorks) {
  for (const char* garbage :
       {"\x16\x03\x01 no http\r\n\r\n", "GET\r\n\r\n", " \r\n\r\n", "\r\n\r\n"}) {
    EXPECT_THAT(Exchange(port(), garbage), StartsWith("HTTP/1.1 400 ")) << garbage;
  }
  EXPECT_EQ(Exchange(port(), std::string(20000, 'x')), "");
  EXPECT_THAT(Ask(port(), "GET", "/healthz"), StartsWith("HTTP/1.1 200 "));
}

TEST_F(HttpEndpointTest, ARequestMayComeInPieces) {
  const int client = Connect(port());
  for (const std::string piece : {"GET /hea", "lthz HTTP/1.1\r", "\n\r", "\n"}) {
    send(client, piece.data(), piece.size(), 0);
  }
  EXPECT_THAT(ReadAll(client), StartsWith("HTTP/1.1 200 "));
}

TEST_F(HttpEndpointTest, TheEndDoesNotWaitForIdleClients) {
  const int silent = Connect(port());
  EXPECT_THAT(Ask(port(), "GET", "/healthz"), StartsWith("HTTP/1.1 200 "));  // both are accepted
  const auto begin = std::chrono::steady_clock::now();
  endpoint_.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
  EXPECT_EQ(ReadAll(silent), "");
}

TEST_F(HttpEndpointTest, ATakenPortIsAnErrorThatNamesTheAddress) {
  const std::string address = "127.0.0.1:" + std::to_string(port());
  const auto second = HttpEndpoint::Start(address, {});
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("\"" + address + "\""));
  EXPECT_THAT(Ask(port(), "GET", "/healthz"), StartsWith("HTTP/1.1 200 "));
}

TEST_F(HttpEndpointTest, ThePortIsFreeAgainAfterTheEnd) {
  const std::string address = "127.0.0.1:" + std::to_string(port());
  endpoint_.reset();
  EXPECT_TRUE(HttpEndpoint::Start(address, {}).ok());
}

}  // namespace
}  // namespace attend
