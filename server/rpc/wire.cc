// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/wire.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "engine/util/check.h"
#include "engine/util/error.h"
#include "engine/util/recycled.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

// Protobuf's wire types; 6 and 7 do not exist.
enum WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,
  kGroup = 3,
  kEndGroup = 4,
  kFixed32 = 5,
};

// Protobuf's own nesting limit: what is deeper is refused there too.
constexpr int kMaxGroupDepth = 100;

// A message that was larger, its tensors not counted, leaves no memory for the next.
constexpr size_t kKeptBytes = 16384;

void AppendVarint(uint64_t value, std::string& out) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

void AppendBytesTag(int field, int64_t length, std::string& out) {
  AppendVarint(static_cast<uint64_t>(field) << 3 | kBytes, out);
  AppendVarint(length, out);
}

absl::Status Malformed(std::string_view what, int64_t offset) {
  return InvalidField("request", std::string(what) + " at byte " + std::to_string(offset),
                      "an attend.v1.AttendRequest");
}

// Reads the received slices as one sequence of bytes. The limits of varints are those of protobuf's
// parser: both must end a field at the same byte, whatever is sent.
class Cursor {
 public:
  explicit Cursor(const std::vector<grpc::Slice>& slices) : slices_(slices) {}

  int64_t offset() const { return offset_; }

  // False at the end of the message or `end`.
  bool ReadByte(int64_t end, uint8_t* byte) {
    if (offset_ >= end || !FindSlice()) return false;
    *byte = slices_[slice_].begin()[in_slice_];
    ++in_slice_;
    ++offset_;
    return true;
  }

  // At most 5 bytes; bits above 32 are dropped, as protobuf does.
  bool ReadTag(int64_t end, uint32_t* tag) {
    *tag = 0;
    for (int shift = 0; shift < 35; shift += 7) {
      uint8_t byte = 0;
      if (!ReadByte(end, &byte)) return false;
      *tag |= static_cast<uint32_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return true;
    }
    return false;
  }

  // At most 5 bytes; the length must fit before `end`, which is below protobuf's 2 GiB.
  bool ReadLength(int64_t end, int64_t* length) {
    *length = 0;
    for (int shift = 0; shift < 35; shift += 7) {
      uint8_t byte = 0;
      if (!ReadByte(end, &byte)) return false;
      *length |= static_cast<int64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return *length <= end - offset_;
    }
    return false;
  }

  bool SkipVarint(int64_t end) {
    for (int i = 0; i < 10; ++i) {
      uint8_t byte = 0;
      if (!ReadByte(end, &byte)) return false;
      if (byte < 0x80) return true;
    }
    return false;
  }

  // Moves forward by `count` bytes; appends them to `copy` unless it is null.
  bool Advance(int64_t count, int64_t end, std::string* copy) {
    if (count > end - offset_) return false;
    while (count > 0) {
      if (!FindSlice()) return false;
      const grpc::Slice& slice = slices_[slice_];
      const int64_t step = std::min(count, static_cast<int64_t>(slice.size() - in_slice_));
      if (copy != nullptr) {
        copy->append(reinterpret_cast<const char*>(slice.begin()) + in_slice_, step);
      }
      in_slice_ += step;
      offset_ += step;
      count -= step;
    }
    return true;
  }

 private:
  // Moves past empty and used-up slices; false when there is no byte left.
  bool FindSlice() {
    while (slice_ < slices_.size() && in_slice_ == slices_[slice_].size()) {
      ++slice_;
      in_slice_ = 0;
    }
    return slice_ < slices_.size();
  }

  const std::vector<grpc::Slice>& slices_;
  size_t slice_ = 0;
  size_t in_slice_ = 0;
  int64_t offset_ = 0;
};

// Pass 1: copies the request without the tensors' data to a skeleton, and notes where the data lie.
class Walk {
 public:
  Walk(const std::vector<grpc::Slice>& slices, ReceivedAttend& received)
      : cursor_(slices), verbatim_(slices), received_(received) {}

  absl::Status Request(int64_t end, std::string& skeleton) {
    return Message(Place::kRequest, nullptr, end, skeleton);
  }

 private:
  enum class Place { kRequest, kRaw, kTensor };

  // A field that is taken apart instead of being copied.
  struct Part {
    Place place;
    DataRange* data;
  };

  std::optional<Part> FindPart(Place place, int field) const {
    if (place == Place::kRequest) {
      switch (field) {
        case v1::AttendRequest::kAttentionBiasFieldNumber:
          return Part{Place::kTensor, &received_.attention_bias};
        case v1::AttendRequest::kContextFieldNumber:
          return Part{Place::kTensor, &received_.context};
        case v1::AttendRequest::kRawFieldNumber:
          return Part{Place::kRaw, nullptr};
        case v1::AttendRequest::kHiddenStatesFieldNumber:
          return Part{Place::kTensor, &received_.hidden_states};
      }
    } else if (place == Place::kRaw) {
      switch (field) {
        case v1::RawInput::kQFieldNumber:
          return Part{Place::kTensor, &received_.raw_q};
        case v1::RawInput::kKFieldNumber:
          return Part{Place::kTensor, &received_.raw_k};
        case v1::RawInput::kVFieldNumber:
          return Part{Place::kTensor, &received_.raw_v};
      }
    }
    return std::nullopt;
  }

  // Appends the message that ends at `end` to `out`. `data` is set within a tensor.
  absl::Status Message(Place place, DataRange* data, int64_t end, std::string& out) {
    while (cursor_.offset() < end) {
      const int64_t begin = cursor_.offset();
      uint32_t tag = 0;
      if (!cursor_.ReadTag(end, &tag)) return Malformed("a broken tag", begin);
      const int field = static_cast<int>(tag >> 3);
      const bool is_bytes = (tag & 7) == kBytes;
      if (is_bytes && place == Place::kTensor && field == v1::Tensor::kDataFieldNumber) {
        int64_t length = 0;
        if (!cursor_.ReadLength(end, &length)) return Malformed("a wrong length", begin);
        *data = {.offset = cursor_.offset(), .bytes = length};
        if (!cursor_.Advance(length, end, nullptr)) return Malformed("truncated data", begin);
      } else if (const std::optional<Part> part = FindPart(place, field); is_bytes && part) {
        int64_t length = 0;
        if (!cursor_.ReadLength(end, &length)) return Malformed("a wrong length", begin);
        const size_t at = out.size();
        RETURN_IF_ERROR(Message(part->place, part->data, cursor_.offset() + length, out));
        std::string prefix;  // short enough to need no memory
        AppendBytesTag(field, static_cast<int64_t>(out.size() - at), prefix);
        out.insert(at, prefix);
      } else {
        RETURN_IF_ERROR(SkipValue(tag, end));
        if (!verbatim_.Advance(begin - verbatim_.offset(), begin, nullptr) ||
            !verbatim_.Advance(cursor_.offset() - begin, end, &out)) {
          return Malformed("a truncated field", begin);
        }
      }
    }
    return absl::OkStatus();
  }

  // Moves past the value of `tag`; groups are matched by counting, their numbers are protobuf's to
  // check.
  absl::Status SkipValue(uint32_t tag, int64_t end) {
    int depth = 0;
    while (true) {
      const int64_t at = cursor_.offset();
      bool ok = tag >> 3 != 0;
      switch (tag & 7) {
        case kVarint:
          ok = ok && cursor_.SkipVarint(end);
          break;
        case kFixed64:
          ok = ok && cursor_.Advance(8, end, nullptr);
          break;
        case kBytes: {
          int64_t length = 0;
          ok = ok && cursor_.ReadLength(end, &length) && cursor_.Advance(length, end, nullptr);
          break;
        }
        case kGroup:
          ok = ok && ++depth <= kMaxGroupDepth;
          break;
        case kEndGroup:
          ok = ok && --depth >= 0;
          break;
        case kFixed32:
          ok = ok && cursor_.Advance(4, end, nullptr);
          break;
        default:
          ok = false;
      }
      if (!ok) return Malformed("a broken field", at);
      if (depth == 0) return absl::OkStatus();
      if (!cursor_.ReadTag(end, &tag)) return Malformed("an open group", at);
    }
  }

  Cursor cursor_;
  Cursor verbatim_;  // follows cursor_, to copy a field once its end is known
  ReceivedAttend& received_;
};

}  // namespace

absl::Status ReceivedAttend::Decode(const grpc::ByteBuffer& message) {
  Clear();
  absl::Status status = Read(message);
  if (!status.ok()) Clear();
  return status;
}

absl::Status ReceivedAttend::Read(const grpc::ByteBuffer& message) {
  if (message.Valid() && !message.Dump(&slices_).ok()) {
    return NotAMessage("attend.v1.AttendRequest", static_cast<int64_t>(message.Length()));
  }
  for (const grpc::Slice& slice : slices_) {
    slice_offsets_.push_back(bytes_);
    bytes_ += static_cast<int64_t>(slice.size());
  }
  RETURN_IF_ERROR(Walk(slices_, *this).Request(bytes_, skeleton_));
  if (!request.ParseFromString(skeleton_)) return NotAMessage("attend.v1.AttendRequest", bytes_);
  return absl::OkStatus();
}

void ReceivedAttend::Clear() {
  if (skeleton_.capacity() > kKeptBytes) {
    *this = {};
    std::string().swap(skeleton_);  // assigned from an empty one it would keep its memory
    return;
  }
  request.Clear();
  for (DataRange* range : {&hidden_states, &context, &attention_bias, &raw_q, &raw_k, &raw_v}) {
    *range = {};
  }
  slices_.clear();
  slice_offsets_.clear();
  skeleton_.clear();
  bytes_ = 0;
}

void ReceivedAttend::Gather(const DataRange& range, std::byte* destination) const {
  CHECK(range.offset >= 0 && range.bytes >= 0 && range.bytes <= bytes_ - range.offset);
  if (range.bytes == 0) return;
  const auto after = std::upper_bound(slice_offsets_.begin(), slice_offsets_.end(), range.offset);
  size_t slice = after - slice_offsets_.begin() - 1;
  int64_t skip = range.offset - slice_offsets_[slice];
  for (int64_t left = range.bytes; left > 0; ++slice) {
    const int64_t step = std::min(left, static_cast<int64_t>(slices_[slice].size()) - skip);
    if (step > 0) std::memcpy(destination, slices_[slice].begin() + skip, step);
    destination += step;
    left -= step;
    skip = 0;
  }
}

absl::Status NotAMessage(const std::string& type, int64_t bytes) {
  return InvalidField("request", std::to_string(bytes) + " bytes that are no such message", type);
}

grpc::ByteBuffer EncodeMessage(const google::protobuf::MessageLite& message) {
  const size_t bytes = message.ByteSizeLong();
  const grpc::Slice slice(bytes);
  // A fresh slice is ours alone, so writing through its begin() is legal.
  CHECK(message.SerializeToArray(const_cast<uint8_t*>(slice.begin()), static_cast<int>(bytes)));
  return grpc::ByteBuffer(&slice, 1);
}

grpc::ByteBuffer EncodeAttendResponse(const v1::AttendResponse& head, const OutputTensor& output) {
  CHECK(!head.has_output());
  thread_local v1::Tensor header;  // keeps its memory
  header.Clear();
  header.set_dtype(output.dtype);
  for (const int64_t extent : output.shape) header.add_shape(extent);

  std::string data_prefix;  // this and the next are short enough to need no memory
  if (output.bytes > 0) {
    AppendBytesTag(v1::Tensor::kDataFieldNumber, output.bytes, data_prefix);
  }
  const size_t head_bytes = head.ByteSizeLong();
  const size_t header_bytes = header.ByteSizeLong();
  std::string output_prefix;
  AppendBytesTag(v1::AttendResponse::kOutputFieldNumber,
                 static_cast<int64_t>(header_bytes + data_prefix.size()) + output.bytes,
                 output_prefix);

  grpc::Slice slices[2] = {
      grpc::Slice(head_bytes + output_prefix.size() + header_bytes + data_prefix.size())};
  auto* next = const_cast<uint8_t*>(slices[0].begin());  // fresh: ours alone
  next = head.SerializeWithCachedSizesToArray(next);
  next = std::copy(output_prefix.begin(), output_prefix.end(), next);
  next = header.SerializeWithCachedSizesToArray(next);
  next = std::copy(data_prefix.begin(), data_prefix.end(), next);
  CHECK(next == slices[0].end());
  if (output.bytes == 0) return grpc::ByteBuffer(slices, 1);

  using Owner = std::shared_ptr<const std::byte>;
  RecyclingAllocator<Owner> memory;
  slices[1] = grpc::Slice(
      const_cast<std::byte*>(output.data.get()), static_cast<size_t>(output.bytes),
      [](void* owner) {
        std::destroy_at(static_cast<Owner*>(owner));
        RecyclingAllocator<Owner>().deallocate(static_cast<Owner*>(owner), 1);
      },
      std::construct_at(memory.allocate(1), output.data));
  return grpc::ByteBuffer(slices, 2);
}

}  // namespace attend
