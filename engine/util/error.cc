// SPDX-License-Identifier: Apache-2.0
#include "engine/util/error.h"

#include <utility>

#include "absl/strings/cord.h"
#include "absl/types/optional.h"
#include "engine/util/text.h"

namespace attend {
namespace {

constexpr char kTypeUrl[] = "type.googleapis.com/attend.v1.ErrorDetail";

void AppendVarint(uint64_t value, std::string& out) {
  while (value >= 0x80) {
    out.push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  out.push_back(static_cast<char>(value));
}

void AppendInteger(int field, int64_t value, std::string& out) {
  if (value == 0) return;
  AppendVarint(static_cast<uint64_t>(field) << 3, out);
  AppendVarint(static_cast<uint64_t>(value), out);
}

void AppendBytes(int field, std::string_view value, std::string& out) {
  if (value.empty()) return;
  AppendVarint(static_cast<uint64_t>(field) << 3 | 2, out);
  AppendVarint(value.size(), out);
  out.append(value);
}

// Parsers refuse a string that is not UTF-8 and all that follows it.
void AppendString(int field, std::string_view value, std::string& out) {
  AppendBytes(field, CleanText(value, value.size()), out);
}

std::string Encode(const ErrorDetail& detail) {
  std::string out;
  AppendInteger(1, static_cast<int>(detail.reason), out);
  AppendString(2, detail.field, out);
  AppendString(3, detail.got, out);
  AppendString(4, detail.wanted, out);
  std::string packed;
  for (int32_t index : detail.sequences) AppendVarint(static_cast<uint64_t>(index), packed);
  AppendBytes(5, packed, out);
  AppendInteger(6, detail.cached, out);
  AppendInteger(7, detail.retry_after_ms, out);
  AppendString(8, detail.replica, out);
  return out;
}

}  // namespace

absl::Status MakeError(absl::StatusCode code, const ErrorDetail& detail, std::string message) {
  if (message.empty()) {
    message = detail.field + ": got " + detail.got + ", wanted " + detail.wanted;
  }
  absl::Status status(code, message);
  status.SetPayload(kTypeUrl, absl::Cord(Encode(detail)));
  return status;
}

// Appending to an encoded message merges: repeated fields concatenate (protobuf encoding rules).
absl::Status WithSequences(const absl::Status& status, const std::vector<int32_t>& sequences) {
  std::string encoded = EncodedErrorDetail(status);
  encoded += Encode({.sequences = sequences});
  absl::Status changed = status;
  changed.SetPayload(kTypeUrl, absl::Cord(encoded));
  return changed;
}

absl::Status InvalidField(std::string_view field, std::string_view got, std::string_view wanted) {
  return MakeError(absl::StatusCode::kInvalidArgument, {.reason = Reason::kInvalidField,
                                                        .field = std::string(field),
                                                        .got = std::string(got),
                                                        .wanted = std::string(wanted)});
}

absl::Status Unsupported(std::string_view field, std::string_view what) {
  return MakeError(absl::StatusCode::kUnimplemented,
                   {.reason = Reason::kUnsupported, .field = std::string(field)},
                   std::string(field) + ": " + std::string(what) + " is not supported");
}

std::string EncodedErrorDetail(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kTypeUrl);
  return payload.has_value() ? std::string(*payload) : std::string();
}

Reason ReasonOf(const absl::Status& status) {
  const std::string encoded = EncodedErrorDetail(status);
  // `reason` is field 1, a varint below 128, and always comes first.
  if (encoded.size() < 2 || encoded[0] != 0x08) return Reason::kUnspecified;
  return static_cast<Reason>(encoded[1]);
}

}  // namespace attend
