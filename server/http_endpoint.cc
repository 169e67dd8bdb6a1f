// SPDX-License-Identifier: Apache-2.0
#include "server/http_endpoint.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <list>
#include <string_view>
#include <utility>
#include <vector>

namespace attend {
namespace {

// Scrapers and probes send a few hundred bytes at once; what is larger or slower is no scraper.
constexpr size_t kRequestBytes = 16384;
constexpr size_t kConnections = 64;
constexpr auto kConnectionTime = std::chrono::seconds(10);

using Clock = std::chrono::steady_clock;

struct Answer {
  const char* status = "200 OK";
  const char* content_type = "text/plain; charset=utf-8";
  std::string body = {};
};

// The body of /healthz and /readyz. A comment of Prometheus's text format: a scraper takes it as a
// page without series, so that `up` of a job that scrapes /readyz is 1 when ready and 0 when not.
constexpr const char* kHealthy = "# ok\n";

Answer HealthAnswer(const absl::Status& status) {
  if (status.ok()) return {.body = kHealthy};
  return {.status = "503 Service Unavailable", .body = std::string(status.message()) + "\n"};
}

Answer AnswerTo(std::string_view method, std::string_view path, const HttpHandlers& handlers) {
  if (method != "GET" && method != "HEAD") {
    return {.status = "405 Method Not Allowed", .body = "GET and HEAD only\n"};
  }
  try {
    if (path == "/metrics") {
      return {.content_type = "text/plain; version=0.0.4; charset=utf-8",
              .body = handlers.metrics()};
    }
    if (path == "/healthz") return HealthAnswer(handlers.healthy());
    if (path == "/readyz") return HealthAnswer(handlers.ready());
  } catch (const std::exception&) {  // of the libraries that write the page
    return {.status = "500 Internal Server Error", .body = "the page could not be made\n"};
  }
  return {.status = "404 Not Found", .body = "/metrics, /healthz and /readyz are served here\n"};
}

// All bytes of the answer to a request, of which the first line is "METHOD TARGET HTTP/1.x".
std::string Respond(std::string_view request, const HttpHandlers& handlers) {
  const std::string_view line = request.substr(0, request.find("\r\n"));
  const size_t first = line.find(' ');
  const size_t last = line.rfind(' ');
  Answer answer{.status = "400 Bad Request", .body = "no HTTP/1.x request\n"};
  std::string_view method;
  if (first < last && line.substr(last + 1).starts_with("HTTP/1.")) {
    method = line.substr(0, first);
    const std::string_view target = line.substr(first + 1, last - first - 1);
    answer = AnswerTo(method, target.substr(0, target.find('?')), handlers);
  }
  std::string text = std::string("HTTP/1.1 ") + answer.status +
                     "\r\nContent-Type: " + answer.content_type +
                     "\r\nContent-Length: " + std::to_string(answer.body.size()) +
                     "\r\nAllow: GET, HEAD\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n";
  if (method != "HEAD") text += answer.body;
  return text;
}

// One request and its answer; owns `fd`.
struct Connection {
  explicit Connection(int descriptor) : fd(descriptor) {}
  ~Connection() { close(fd); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Reads and writes what it can without waiting; false when the connection is done.
  bool Step(const HttpHandlers& handlers);

  bool sending() const { return sent < answer.size(); }

  const int fd;
  const Clock::time_point deadline = Clock::now() + kConnectionTime;
  std::string request;
  std::string answer;  // empty until the request is complete
  size_t sent = 0;
};

bool WouldWait() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

bool Connection::Step(const HttpHandlers& handlers) {
  if (!sending()) {
    char buffer[4096];
    const ssize_t bytes = recv(fd, buffer, sizeof(buffer), 0);
    if (bytes <= 0) return bytes < 0 && WouldWait();
    // What follows the request is dropped; closing with it unread would reset the connection and
    // could take the answer with it.
    if (!answer.empty()) return true;
    request.append(buffer, static_cast<size_t>(bytes));
    if (request.find("\r\n\r\n") == std::string::npos) return request.size() <= kRequestBytes;
    answer = Respond(request, handlers);
  }
  while (sending()) {
    const ssize_t bytes = send(fd, answer.data() + sent, answer.size() - sent, MSG_NOSIGNAL);
    if (bytes < 0) return WouldWait();
    sent += static_cast<size_t>(bytes);
  }
  shutdown(fd, SHUT_WR);  // the client closes when it has read all
  return true;
}

struct Listener {
  int fd = -1;
  int port = 0;
};

absl::Status CannotListen(const std::string& address, std::string_view why) {
  return absl::UnavailableError("--metrics_listen: got \"" + address +
                                "\", which can't be listened on: " + std::string(why));
}

absl::StatusOr<Listener> Listen(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return CannotListen(address, "no port");
  std::string host = address.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found);
  if (error != 0) return CannotListen(address, gai_strerror(error));

  Listener listener;
  listener.fd = socket(found->ai_family, found->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int yes = 1;
  setsockopt(listener.fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  const bool listens = listener.fd >= 0 &&
                       bind(listener.fd, found->ai_addr, found->ai_addrlen) == 0 &&
                       listen(listener.fd, SOMAXCONN) == 0;
  const int listen_errno = errno;
  freeaddrinfo(found);
  if (!listens) {
    if (listener.fd >= 0) close(listener.fd);
    return CannotListen(address, std::strerror(listen_errno));
  }
  sockaddr_in6 bound{};  // holds an IPv4 address as well; the port is at the same place
  socklen_t bytes = sizeof(bound);
  getsockname(listener.fd, reinterpret_cast<sockaddr*>(&bound), &bytes);
  listener.port = ntohs(bound.sin6_port);
  return listener;
}

// `wake` ends the wait for a free file descriptor, without which a waiting client would make poll
// return at once, again and again.
void AcceptAll(int listener, int wake, std::list<Connection>& connections) {
  for (size_t accepted = 0; accepted < kConnections; ++accepted) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      pollfd woken{wake, POLLIN, 0};
      if (errno == EMFILE || errno == ENFILE) poll(&woken, 1, /*timeout ms=*/100);
      return;
    }
    // In a full house the oldest connection leaves: idle ones must not keep probes out.
    if (connections.size() >= kConnections) connections.pop_front();
    connections.emplace_back(fd);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpEndpoint>> HttpEndpoint::Start(const std::string& address,
                                                                  HttpHandlers handlers) {
  const absl::StatusOr<Listener> listener = Listen(address);
  if (!listener.ok()) return listener.status();
  return std::unique_ptr<HttpEndpoint>(
      new HttpEndpoint(std::move(handlers), listener->fd, listener->port));
}

HttpEndpoint::HttpEndpoint(HttpHandlers handlers, int listener, int port)
    : handlers_(std::move(handlers)),
      listener_(listener),
      wake_(eventfd(0, EFD_CLOEXEC)),
      port_(port),
      thread_([this] { Serve(); }) {}

HttpEndpoint::~HttpEndpoint() {
  eventfd_write(wake_, 1);
  thread_.join();
  close(wake_);
  close(listener_);
}

void HttpEndpoint::Serve() {
  std::list<Connection> connections;
  while (true) {
    std::vector<pollfd> polled = {{wake_, POLLIN, 0}};
    auto deadline = Clock::now() + kConnectionTime;
    for (const Connection& connection : connections) {
      polled.push_back(
          {connection.fd, static_cast<short>(connection.sending() ? POLLOUT : POLLIN), 0});
      deadline = std::min(deadline, connection.deadline);
    }
    polled.push_back({listener_, POLLIN, 0});
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    poll(polled.data(), polled.size(), static_cast<int>(std::max<int64_t>(wait.count(), 0)));
    if (polled[0].revents != 0) return;

    const auto now = Clock::now();
    size_t next = 1;
    for (auto it = connections.begin(); it != connections.end(); ++next) {
      const bool alive = (polled[next].revents == 0 || it->Step(handlers_)) && now < it->deadline;
      it = alive ? std::next(it) : connections.erase(it);
    }
    AcceptAll(listener_, wake_, connections);
  }
}

}  // namespace attend
