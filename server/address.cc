// SPDX-License-Identifier: Apache-2.0
#include "server/address.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <string_view>

namespace attend {
namespace {

// Splits HOST:PORT or [IPV6]:PORT; `host` without brackets.
bool SplitAddress(std::string_view address, std::string& host, int& port) {
  const size_t colon = address.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return false;
  host = std::string(address.substr(0, colon));
  if (host.front() == '[') {
    if (host.size() < 3 || host.back() != ']') return false;
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string::npos) {
    return false;
  }
  const bool printable = std::all_of(host.begin(), host.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) ||
           std::string_view(".-_:%").find(c) != std::string_view::npos;
  });
  const std::string_view digits = address.substr(colon + 1);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  return printable && error == std::errc() && end == digits.data() + digits.size() && port >= 0 &&
         port <= 65535;
}

bool IsUnixAddress(std::string_view address) {
  constexpr size_t kPathBytes = 107;  // sockaddr_un.sun_path without its final zero
  return address.starts_with("unix:") && address.size() > 5 && address.size() <= 5 + kPathBytes;
}

// All of a dotted quad, so that a name such as 127.example.org is not taken for one.
bool IsLoopbackHost(const std::string& host) {
  const bool numeric = host.find_first_not_of("0123456789.") == std::string::npos;
  return host == "localhost" || host == "::1" || (numeric && host.starts_with("127."));
}

}  // namespace

bool IsAddress(const std::string& address, bool unix_allowed) {
  std::string host;
  int port = 0;
  return (unix_allowed && IsUnixAddress(address)) || SplitAddress(address, host, port);
}

bool IsLoopback(const std::string& address) {
  std::string host;
  int port = 0;
  return IsUnixAddress(address) || (SplitAddress(address, host, port) && IsLoopbackHost(host));
}

std::string Reachable(const std::string& address) {
  std::string host;
  int port = 0;
  if (IsUnixAddress(address) || !SplitAddress(address, host, port)) return address;
  if (host == "0.0.0.0") return "127.0.0.1:" + std::to_string(port);
  return host == "::" ? "[::1]:" + std::to_string(port) : address;
}

}  // namespace attend
