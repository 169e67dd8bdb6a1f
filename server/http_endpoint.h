// SPDX-License-Identifier: Apache-2.0
//
// The HTTP port for scrapers and probes: GET and HEAD of /metrics, /healthz and /readyz, one
// request per connection, nothing else. One thread serves all connections without ever waiting for
// one of them, and ends at once when told to, which embedded HTTP servers do not. What the pages
// say is decided by the handlers.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace attend {

// Called on the endpoint's thread; must return soon, whatever the engine does.
struct HttpHandlers {
  std::function<std::string()> metrics;   // the page of /metrics
  std::function<absl::Status()> healthy;  // not OK: /healthz answers 503 and the status's message
  std::function<absl::Status()> ready;    // the same for /readyz
};

class HttpEndpoint {
 public:
  // Listens on HOST:PORT or [IPV6]:PORT; port 0 takes a free one. An address that can't be had is
  // UNAVAILABLE, naming it.
  static absl::StatusOr<std::unique_ptr<HttpEndpoint>> Start(const std::string& address,
                                                             HttpHandlers handlers);
  // Closes all connections and waits for a running handler.
  ~HttpEndpoint();
  HttpEndpoint(const HttpEndpoint&) = delete;
  HttpEndpoint& operator=(const HttpEndpoint&) = delete;

  int port() const { return port_; }

 private:
  HttpEndpoint(HttpHandlers handlers, int listener, int port);
  void Serve();

  const HttpHandlers handlers_;
  const int listener_;  // owned file descriptors
  const int wake_;      // readable when Serve has to end
  const int port_;
  std::thread thread_;
};

}  // namespace attend
