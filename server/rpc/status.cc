// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/status.h"

#include <algorithm>

#include "engine/util/error.h"

namespace attend {
namespace {

// gRPC clients drop a response whose metadata exceed 8 KiB (GRPC_ARG_MAX_METADATA_SIZE, counting 32
// bytes per entry). The message travels twice: percent-encoded in grpc-message, at most 3 bytes for
// one, and in the details, base64 with 4 for 3. 3 x 960 + 4/3 x (960 + 4 x 256 + 3 x 500 + 100) is
// below 7.7 KB.
constexpr size_t kMessageBytes = 960;
constexpr size_t kDetailTextBytes = 256;  // each of field, got, wanted, replica
constexpr int kDetailSequences = 500;     // at most 3 bytes each below 2^21

// Length of the UTF-8 character at the start of `text`; 0 when there is none (Unicode 15, table
// 3-7).
size_t CharacterBytes(std::string_view text) {
  const auto at = [&](size_t i) {
    return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0};
  };
  const auto follows = [&](size_t i) { return (at(i) & 0xc0) == 0x80; };
  const uint8_t first = at(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return follows(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    const bool overlong = first == 0xe0 && at(1) < 0xa0;
    const bool surrogate = first == 0xed && at(1) > 0x9f;
    return follows(1) && follows(2) && !overlong && !surrogate ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    const bool overlong = first == 0xf0 && at(1) < 0x90;
    const bool too_high = first == 0xf4 && at(1) > 0x8f;
    return follows(1) && follows(2) && follows(3) && !overlong && !too_high ? 4 : 0;
  }
  return 0;
}

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

std::string CleanText(std::string_view text, size_t limit) {
  std::string clean;
  while (!text.empty()) {
    const size_t bytes = std::max<size_t>(CharacterBytes(text), 1);
    if (clean.size() + bytes > limit) break;
    if (CharacterBytes(text) == 0) {
      clean.push_back('?');
    } else {
      clean.append(text.substr(0, bytes));
    }
    text.remove_prefix(bytes);
  }
  return clean;
}

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
