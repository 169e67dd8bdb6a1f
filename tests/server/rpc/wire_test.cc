// SPDX-License-Identifier: Apache-2.0
//
// The two-pass decoder against protobuf's own parser, on random, reordered, split and broken
// messages.
#include "server/rpc/wire.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tests/support/seed.h"

namespace attend {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using Random = std::mt19937_64;

int64_t Uniform(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}
bool Chance(Random& random, double probability) {
  return std::bernoulli_distribution(probability)(random);
}

std::string RandomBytes(Random& random, int64_t most) {
  std::string bytes(Uniform(random, 0, most), '\0');
  for (char& byte : bytes) byte = static_cast<char>(Uniform(random, 0, 255));
  return bytes;
}

// Sometimes with more bytes than needed, which is legal.
void AppendVarint(Random& random, uint64_t value, std::string& out) {
  int bytes = 1;
  for (; value >= 0x80; value >>= 7, ++bytes) out.push_back(static_cast<char>(value | 0x80));
  if (!Chance(random, 0.03)) {
    out.push_back(static_cast<char>(value));
    return;
  }
  out.push_back(static_cast<char>(value | 0x80));
  for (int64_t more = Uniform(random, 0, 5); more > 0; --more)
    out.push_back(static_cast<char>(0x80));
  out.push_back(static_cast<char>(Chance(random, 0.2) ? Uniform(random, 0, 127) : 0));
}

void AppendTag(Random& random, int field, int wire_type, std::string& out) {
  AppendVarint(random, static_cast<uint64_t>(field) << 3 | wire_type, out);
}

void AppendBytes(Random& random, int field, const std::string& bytes, std::string& out) {
  AppendTag(random, field, 2, out);
  AppendVarint(random, bytes.size(), out);
  out += bytes;
}

void AppendUnknown(Random& random, int field, int depth, std::string& out) {
  const int wire_type = static_cast<int>(Uniform(random, 0, Chance(random, 0.02) ? 7 : 5));
  AppendTag(random, field, wire_type, out);
  switch (wire_type) {
    case 0:
      AppendVarint(random, random(), out);
      break;
    case 1:
      out += std::string(8, 'x');
      break;
    case 2: {
      const std::string bytes = RandomBytes(random, 20);
      AppendVarint(random, bytes.size(), out);
      out += bytes;
      break;
    }
    case 3:
      for (int64_t i = Uniform(random, 0, depth > 4 ? 0 : 3); i > 0; --i) {
        AppendUnknown(random, static_cast<int>(Uniform(random, 1, 30)), depth + 1, out);
      }
      AppendTag(random, Chance(random, 0.95) ? field : field + 1, 4, out);
      break;
    case 5:
      out += std::string(4, 'y');
      break;
    default:
      break;
  }
}

std::string RandomMessage(Random& random, const Descriptor& type);

void AppendScalar(Random& random, const FieldDescriptor& field, std::string& out) {
  if (field.type() == FieldDescriptor::TYPE_FLOAT) {
    out += std::string(4, static_cast<char>(random()));
  } else {
    AppendVarint(random, Chance(random, 0.5) ? Uniform(random, 0, 20) : random(), out);
  }
}

void AppendField(Random& random, const FieldDescriptor& field, std::string& out) {
  switch (field.type()) {
    case FieldDescriptor::TYPE_MESSAGE:
      return AppendBytes(random, field.number(), RandomMessage(random, *field.message_type()), out);
    case FieldDescriptor::TYPE_STRING:
      return AppendBytes(random, field.number(), Chance(random, 0.01) ? "a\xff" : "text\xc3\xa4",
                         out);
    case FieldDescriptor::TYPE_BYTES:
      return AppendBytes(random, field.number(),
                         RandomBytes(random, Chance(random, 0.1) ? 900 : 30), out);
    default:
      break;
  }
  if (field.is_repeated() && Chance(random, 0.5)) {
    std::string packed;
    for (int64_t i = Uniform(random, 0, 5); i > 0; --i) AppendScalar(random, field, packed);
    return AppendBytes(random, field.number(), packed, out);
  }
  AppendTag(random, field.number(), field.type() == FieldDescriptor::TYPE_FLOAT ? 5 : 0, out);
  AppendScalar(random, field, out);
}

// Fields in any order and number, so that they are repeated, split and merged.
std::string RandomMessage(Random& random, const Descriptor& type) {
  std::string out;
  for (int64_t i = Uniform(random, 0, 6); i > 0; --i) {
    if (Chance(random, 0.08)) {
      AppendUnknown(random, static_cast<int>(Uniform(random, 1, 300)), 0, out);
    } else {
      AppendField(random, *type.field(static_cast<int>(Uniform(random, 0, type.field_count() - 1))),
                  out);
    }
  }
  return out;
}

void Break(Random& random, std::string& wire) {
  const int64_t at = Uniform(random, 0, static_cast<int64_t>(wire.size()));
  const auto position = wire.begin() + at;
  switch (Uniform(random, 0, 4)) {
    case 0:
      wire.erase(position, wire.end());
      break;
    case 1:
      wire.insert(position, static_cast<char>(random()));
      break;
    case 2:
      if (position != wire.end()) wire.erase(position);
      break;
    case 3:
      if (position != wire.end()) *position = static_cast<char>(random());
      break;
    default:
      if (position != wire.end()) *position ^= static_cast<char>(1 << Uniform(random, 0, 7));
  }
}

grpc::ByteBuffer Sliced(Random& random, const std::string& wire) {
  std::vector<grpc::Slice> slices;
  const int64_t largest = Chance(random, 0.3) ? 3 : 200;
  for (size_t at = 0; at < wire.size();) {
    const size_t size = std::min<size_t>(Uniform(random, 0, largest), wire.size() - at);
    slices.emplace_back(wire.substr(at, size));
    at += size;
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

grpc::ByteBuffer OneSlice(const std::string& wire) {
  const grpc::Slice slice(wire);
  return grpc::ByteBuffer(&slice, 1);
}

void PutBack(const ReceivedAttend& received, const DataRange& range, v1::Tensor* tensor) {
  std::string data(range.bytes, '\0');
  received.Gather(range, reinterpret_cast<std::byte*>(data.data()));
  tensor->set_data(data);
}

// The whole message again.
v1::AttendRequest Reassemble(const ReceivedAttend& received) {
  v1::AttendRequest whole = received.request;
  if (whole.has_hidden_states()) {
    PutBack(received, received.hidden_states, whole.mutable_hidden_states());
  }
  if (whole.has_context()) PutBack(received, received.context, whole.mutable_context());
  if (whole.has_attention_bias()) {
    PutBack(received, received.attention_bias, whole.mutable_attention_bias());
  }
  if (whole.raw().has_q()) PutBack(received, received.raw_q, whole.mutable_raw()->mutable_q());
  if (whole.raw().has_k()) PutBack(received, received.raw_k, whole.mutable_raw()->mutable_k());
  if (whole.raw().has_v()) PutBack(received, received.raw_v, whole.mutable_raw()->mutable_v());
  return whole;
}

std::string Hex(const std::string& bytes) {
  std::string hex;
  for (const char byte : bytes) {
    char two[3];
    std::snprintf(two, sizeof(two), "%02x", static_cast<unsigned char>(byte));
    hex += two;
  }
  return hex;
}

// Both accept or both refuse; both see the same fields. `received` may have had other messages.
void ExpectSameAsProtobuf(Random& random, const std::string& wire, ReceivedAttend& received,
                          bool* accepted) {
  v1::AttendRequest expected;
  *accepted = expected.ParseFromString(wire);
  const absl::Status status = received.Decode(Sliced(random, wire));
  ASSERT_EQ(status.ok(), *accepted) << status.ToString() << "\n" << Hex(wire);
  if (!*accepted) {
    EXPECT_EQ(received.request.ByteSizeLong() + static_cast<size_t>(received.bytes()), 0u);
    return;
  }
  EXPECT_TRUE(received.request.hidden_states().data().empty());
  EXPECT_TRUE(received.request.raw().q().data().empty());
  ASSERT_EQ(Reassemble(received).SerializeAsString(), expected.SerializeAsString()) << Hex(wire);
}

TEST(WireTest, RandomMessagesDecodeAsProtobufDecodesThem) {
  Random random(TestSeed());
  ReceivedAttend received;
  int count_accepted = 0;
  int count_broken_accepted = 0;
  int count_refused = 0;
  for (int round = 0; round < 60'000; ++round) {
    std::string wire = RandomMessage(random, *v1::AttendRequest::descriptor());
    bool accepted = false;
    ExpectSameAsProtobuf(random, wire, received, &accepted);
    if (HasFatalFailure()) return;
    count_accepted += accepted;
    for (int64_t i = Uniform(random, 1, 3); i > 0; --i) Break(random, wire);
    ExpectSameAsProtobuf(random, wire, received, &accepted);
    if (HasFatalFailure()) return;
    ++(accepted ? count_broken_accepted : count_refused);
  }
  EXPECT_GT(count_accepted, 10'000);
  EXPECT_GT(count_broken_accepted, 1'000);
  EXPECT_GT(count_refused, 10'000);
}

TEST(WireTest, TheLastDataWinsAndALaterTensorWithoutDataKeepsIt) {
  v1::AttendRequest first, second, third;
  first.mutable_hidden_states()->set_data("first");
  second.mutable_hidden_states()->set_data("second");
  third.mutable_hidden_states()->add_shape(7);
  ReceivedAttend received;
  ASSERT_TRUE(received
                  .Decode(OneSlice(first.SerializeAsString() + second.SerializeAsString() +
                                   third.SerializeAsString()))
                  .ok());
  EXPECT_EQ(Reassemble(received).hidden_states().data(), "second");
  EXPECT_EQ(received.request.hidden_states().shape(0), 7);
}

TEST(WireTest, GroupsAreSkippedToProtobufsDepthAndRefusedBeyond) {
  Random random(1);
  for (const int depth : {1, 99, 100, 101, 5000}) {
    std::string wire(depth, static_cast<char>(20 << 3 | 3));
    std::string nested;
    for (const char tag : wire) nested += std::string({static_cast<char>(tag | 0x80), 1});
    for (int i = 0; i < depth; ++i)
      nested += std::string({static_cast<char>(20 << 3 | 4 | 0x80), 1});
    ReceivedAttend received;
    bool accepted = false;
    ExpectSameAsProtobuf(random, nested, received, &accepted);
    EXPECT_EQ(accepted, depth <= 100);
  }
}

TEST(WireTest, ALengthBeyondTheMessageIsNamedWithItsPlace) {
  const std::string wire({'\x0a', '\x01', 'm', '\x7a', '\xff', '\xff', '\xff', '\xff', '\x07'});
  const absl::Status status = ReceivedAttend().Decode(OneSlice(wire));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(status.message()).find("request: got a wrong length at byte 3"),
            std::string::npos)
      << status.ToString();
}

TEST(WireTest, PartsOfATensorAreGatheredFromAnySlices) {
  Random random(TestSeed());
  v1::AttendRequest request;
  std::string data;
  for (int i = 0; i < 5000; ++i) data.push_back(static_cast<char>(random()));
  request.mutable_context()->set_data(data);
  ReceivedAttend received;
  ASSERT_TRUE(received.Decode(Sliced(random, request.SerializeAsString())).ok());
  for (int round = 0; round < 500; ++round) {
    const int64_t begin = Uniform(random, 0, 5000);
    const int64_t bytes = Uniform(random, 0, 5000 - begin);
    std::string part(bytes, '\0');
    received.Gather({.offset = received.context.offset + begin, .bytes = bytes},
                    reinterpret_cast<std::byte*>(part.data()));
    ASSERT_EQ(part, data.substr(begin, bytes));
  }
}

TEST(WireTest, AnEmptyMessageIsAnEmptyRequest) {
  ReceivedAttend received;
  ASSERT_TRUE(received.Decode(OneSlice("")).ok());
  EXPECT_EQ(received.request.ByteSizeLong(), 0u);
}

std::string Joined(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string joined;
  for (const grpc::Slice& slice : slices) {
    joined.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return joined;
}

TEST(WireTest, AResponseIsWhatProtobufWouldWriteAndItsOutputIsNotCopied) {
  Random random(TestSeed());
  for (const int64_t bytes : {0, 1, 5, 127, 128, 70'000}) {
    v1::AttendResponse head;
    head.set_request_id(std::string(Uniform(random, 0, 200), 'i'));
    head.add_positions(random());
    head.mutable_timing()->set_queue_us(5);
    OutputTensor output = {
        .dtype = v1::DTYPE_F32, .shape = {3, 0, int64_t{1} << 40}, .bytes = bytes};
    auto* owned = new std::string(RandomBytes(random, 0) + std::string(bytes, 'o'));
    bool released = false;
    output.data = std::shared_ptr<const std::byte>(
        reinterpret_cast<const std::byte*>(owned->data()), [owned, &released](const std::byte*) {
          delete owned;
          released = true;
        });

    v1::AttendResponse whole = head;
    whole.mutable_output()->set_dtype(output.dtype);
    for (const int64_t extent : output.shape) whole.mutable_output()->add_shape(extent);
    whole.mutable_output()->set_data(*owned);
    {
      const grpc::ByteBuffer encoded = EncodeAttendResponse(head, output);
      const std::byte* memory = output.data.get();
      output.data.reset();
      EXPECT_EQ(Joined(encoded), whole.SerializeAsString());
      if (bytes > 0) {
        EXPECT_FALSE(released);
        std::vector<grpc::Slice> slices;
        ASSERT_TRUE(encoded.Dump(&slices).ok());
        EXPECT_EQ(static_cast<const void*>(slices.back().begin()), memory);
      }
    }
    EXPECT_TRUE(released);
  }
}

TEST(WireTest, SmallMessagesAreParsedOrRefusedByName) {
  v1::GetSessionRequest request;
  request.set_session_id("s");
  const auto parsed = ParseMessage<v1::GetSessionRequest>(EncodeMessage(request));
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->session_id(), "s");
  EXPECT_TRUE(ParseMessage<v1::ListModelsRequest>(EncodeMessage(v1::ListModelsRequest())).ok());
  const absl::Status refused = ParseMessage<v1::GetSessionRequest>(OneSlice("\x0a\x05")).status();
  EXPECT_EQ(refused.message(),
            "request: got 2 bytes that are no such message, wanted attend.v1.GetSessionRequest");
}

}  // namespace
}  // namespace attend
