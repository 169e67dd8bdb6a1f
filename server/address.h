// SPDX-License-Identifier: Apache-2.0
//
// Listener addresses as text: HOST:PORT, [IPV6]:PORT and unix:PATH. Pure functions for the option
// checks; names are not looked up.
#pragma once

#include <string>

namespace attend {

bool IsAddress(const std::string& address, bool unix_allowed);

// Only this machine can connect: 127.x.x.x, ::1, localhost or a unix socket.
bool IsLoopback(const std::string& address);

// Where a client on this machine reaches a listener: an unspecified host becomes the loopback one.
std::string Reachable(const std::string& address);

}  // namespace attend
