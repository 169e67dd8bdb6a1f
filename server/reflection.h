// SPDX-License-Identifier: Apache-2.0
//
// Server reflection, grpc.reflection.v1 and v1alpha: tells grpcurl and its like what the services
// are, from the descriptors compiled into the binary. Holds no state.
#pragma once

#include <memory>

#include "server/rpc/dispatcher.h"
#include "server/rpc/method.h"

namespace attend {

// Outlives the dispatcher that serves it.
class Reflection {
 public:
  Reflection();
  ~Reflection();

  // Adds ServerReflectionInfo of both versions.
  void AddTo(MethodTable& methods);

 private:
  const std::unique_ptr<Method> info_;
};

}  // namespace attend
