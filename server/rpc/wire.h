// SPDX-License-Identifier: Apache-2.0
//
// Between grpc::ByteBuffer and the messages of the contract. An AttendRequest is decoded in two
// passes, so that tensor bytes are copied once, to where they are used; a response refers to the
// output's memory without a copy. Called by the methods (convert, health, reflection); it knows no
// shape, limit or call.
#pragma once

#include <google/protobuf/io/zero_copy_stream.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attend/v1/attend.pb.h"
#include "engine/util/recycled.h"

namespace attend {

using Shape = RecycledVector<int64_t>;  // of a tensor

// Where a tensor's `data` lies in a received message. bytes is 0 when there is none.
struct DataRange {
  int64_t offset = 0;
  int64_t bytes = 0;
};

// An AttendRequest as received. Everything but the tensors' bytes is in `request`, parsed by
// protobuf's own parser (so merging, unknown fields and UTF-8 checks are protobuf's); its
// Tensor.data are empty. Movable; shares the received slices and keeps them alive. Reading from
// several threads is safe. One that is used for message after message soon allocates nothing.
class ReceivedAttend {
 public:
  // Takes the message in place of what it had. INVALID_ARGUMENT, field `request`, with the byte
  // offset where the walk stopped if it did; it has nothing then.
  absl::Status Decode(const grpc::ByteBuffer& message);
  // Lets go of the message.
  void Clear();

  v1::AttendRequest request;
  DataRange hidden_states;
  DataRange context;
  DataRange attention_bias;
  DataRange raw_q;
  DataRange raw_k;
  DataRange raw_v;

  // Copies range.bytes bytes to `destination`. `range` is one of the above or lies within one.
  void Gather(const DataRange& range, std::byte* destination) const;

  // Size of the whole received message.
  int64_t bytes() const { return bytes_; }

 private:
  absl::Status Read(const grpc::ByteBuffer& message);

  std::vector<grpc::Slice> slices_;
  std::vector<int64_t> slice_offsets_;  // of each slice's first byte
  std::string skeleton_;                // the message without tensor bytes
  int64_t bytes_ = 0;
};

// INVALID_ARGUMENT, field `request`: `got` is what arrived instead of a `type` message.
absl::Status NotAMessage(const std::string& type, int64_t bytes);

// Parses a small message. `T` is a generated message class.
template <typename T>
absl::StatusOr<T> ParseMessage(const grpc::ByteBuffer& message) {
  T parsed;
  grpc::ByteBuffer shared(message);  // the reader wants a non-const buffer; shares the bytes
  if (!shared.Valid()) return NotAMessage(parsed.GetTypeName(), 0);
  grpc::ProtoBufferReader reader(&shared);
  if (!reader.status().ok() || !parsed.ParseFromZeroCopyStream(&reader)) {
    return NotAMessage(parsed.GetTypeName(), static_cast<int64_t>(shared.Length()));
  }
  return parsed;
}

// One slice with the serialised message.
grpc::ByteBuffer EncodeMessage(const google::protobuf::MessageLite& message);

// Output rows whose bytes are sent in place. `data` lives until gRPC has sent them.
struct OutputTensor {
  v1::DType dtype = v1::DTYPE_UNSPECIFIED;
  Shape shape = {};
  std::shared_ptr<const std::byte> data = nullptr;
  int64_t bytes = 0;
};

// The message `head` with `output` set, byte for byte what protobuf would serialise; head.output is
// unset. The last slice refers to output.data. Used for unary answers and stream items alike.
grpc::ByteBuffer EncodeAttendResponse(const v1::AttendResponse& head, const OutputTensor& output);

}  // namespace attend
