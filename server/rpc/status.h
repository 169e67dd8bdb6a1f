// SPDX-License-Identifier: Apache-2.0
//
// Errors as they go over the wire: attend.v1.Status with one ErrorDetail, for trailers and stream
// items. Decides how much of an error fits into a client's metadata; used by Call and by methods
// that stream.
#pragma once

#include <grpcpp/support/status.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "attend/v1/attend.pb.h"

namespace attend {

// Code, message and the ErrorDetail that engine/util/error.h attached. All strings are valid UTF-8.
// Message and detail are cut so that both fit, twice the message and once the detail, into the 8
// KiB of metadata that clients accept by default; of very long `sequences` the first ones stay.
v1::Status ToWireStatus(const absl::Status& status);

// The same as gRPC status; its details become the trailer grpc-status-details-bin.
grpc::Status ToGrpcStatus(const absl::Status& status);

// ErrorDetail.retry_after_ms; 0 when there is none.
int64_t RetryAfterMs(const absl::Status& status);

}  // namespace attend
