// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/status.h"

#include "engine/util/error.h"
#include "engine/util/text.h"

namespace attend {
namespace {

// gRPC clients drop a response whose metadata exceed 8 KiB (GRPC_ARG_MAX_METADATA_SIZE, counting 32
// bytes per entry). The message travels twice: percent-encoded in grpc-message, at most 3 bytes for
// one, and in the details, base64 with 4 for 3. 3 x 960 + 4/3 x (960 + 4 x 256 + 3 x 500 + 100) is
// below 7.7 KB.
constexpr size_t kMessageBytes = 960;
constexpr size_t kDetailTextBytes = 256;  // each of field, got, wanted, replica
constexpr int kDetailSequences = 500;     // at most 3 bytes each below 2^21

v1::ErrorDetail WireDetail(const std::string& encoded) {
  v1::ErrorDetail detail;
  // Text that is not UTF-8 stops the parser at that field; what it read until then is kept.
  (void)detail.ParsePartialFromString(encoded);
  for (std::string* text : {detail.mutable_field(), detail.mutable_got(), detail.mutable_wanted(),
                            detail.mutable_replica()}) {
    *text = CleanText(*text, kDetailTextBytes);
  }
  if (detail.sequences_size() > kDetailSequences) {
    detail.mutable_sequences()->Truncate(kDetailSequences);
  }
  return detail;
}

}  // namespace

v1::Status ToWireStatus(const absl::Status& status) {
  v1::Status wire;
  wire.set_code(static_cast<int>(status.code()));
  wire.set_message(CleanText({status.message().data(), status.message().size()}, kMessageBytes));
  const std::string encoded = EncodedErrorDetail(status);
  if (!encoded.empty()) wire.add_details()->PackFrom(WireDetail(encoded));
  return wire;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const v1::Status wire = ToWireStatus(status);
  return grpc::Status(static_cast<grpc::StatusCode>(wire.code()), wire.message(),
                      wire.SerializeAsString());
}

int64_t RetryAfterMs(const absl::Status& status) {
  return WireDetail(EncodedErrorDetail(status)).retry_after_ms();
}

}  // namespace attend
