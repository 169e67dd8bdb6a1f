// SPDX-License-Identifier: Apache-2.0
//
// attend-server --health: asks a running server for its health, for the container's HEALTHCHECK.
#pragma once

#include <string>

namespace attend {

// grpc.health.v1.Health/Check of "" at the address, within 3 seconds. Prints the answer. 0 =
// SERVING, else 1.
int AskHealth(const std::string& address);

}  // namespace attend
