// SPDX-License-Identifier: Apache-2.0
//
// Attend and AttendStream: a message becomes a job for the batcher, and the job's outcome an
// answer. Decides admission and draining; what a request may say is decided in convert, what a
// session allows in the runtime.
#pragma once

#include <memory>
#include <string>

#include "engine/util/buffer_pool.h"
#include "server/rpc/method.h"
#include "server/service_parts.h"

namespace attend {

// `parts` and what it names outlive the method. `buffers` are for request tensors.
std::unique_ptr<Method> MakeAttendMethod(const ServiceParts& parts,
                                         std::shared_ptr<BufferPool> buffers, std::string name,
                                         MethodKind kind);

}  // namespace attend
