// SPDX-License-Identifier: Apache-2.0
//
// How often the server allocates for a request, between what gRPC hands over and what it takes
// back. gRPC's own allocations do not count: they go through malloc.
#include <gtest/gtest.h>

#include "tests/server/convert_fixture.h"
#include "tests/support/count_allocations.h"

namespace attend {
namespace {

// A request as it arrives: slices of 8 KiB.
grpc::ByteBuffer Received(const v1::AttendRequest& request) {
  constexpr size_t kSliceBytes = 8192;
  const std::string text = request.SerializeAsString();
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < text.size(); at += kSliceBytes) {
    slices.emplace_back(text.data() + at, std::min(kSliceBytes, text.size() - at));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// From the received message to the answer; the engine's part is left out.
Allocations CountOne(const ConvertContext& context, const grpc::ByteBuffer& message,
                     BufferPool& pool, int64_t output_bytes) {
  const Allocations before = AllocationsSoFar();
  {
    const absl::StatusOr<ReceivedAttend> request = ReceivedAttend::Decode(message);
    EXPECT_TRUE(request.ok());
    const absl::StatusOr<ConvertedAttend> converted = ConvertAttend(context, *request);
    EXPECT_TRUE(converted.ok()) << converted.status();
    if (!converted.ok()) return {};
    converted->job->output = pool.Get(output_bytes);
    converted->job->output_width = 10;
    const grpc::ByteBuffer answer =
        EncodeAttendResponse(ToResponse(context, *converted, 1), OutputOf(*converted));
    EXPECT_GT(answer.Length(), static_cast<size_t>(output_bytes));
  }
  return AllocationsSoFar() - before;
}

class AllocationsTest : public ::testing::Test {
 protected:
  AllocationsTest() {
    context_.models = &models_;
    context_.buffers = BufferPool::Make(64 << 20);
    context_.replica = "replica";
  }

  Allocations Warm(const v1::AttendRequest& request, int64_t rows) {
    const grpc::ByteBuffer message = Received(request);
    Allocations counted;
    for (int i = 0; i < 3; ++i) counted = CountOne(context_, message, *context_.buffers, rows * 40);
    return counted;
  }

  const std::vector<LoadedModel> models_ = {Model("m")};
  ConvertContext context_;
};

v1::AttendRequest RequestOf(int64_t rows) {
  v1::AttendRequest request;
  request.set_model("m");
  request.set_layer("both");
  *request.mutable_hidden_states() = F32({rows, kWidth});
  return request;
}

// The bounds are what was counted plus a little for other libraries.
TEST_F(AllocationsTest, AWarmRequestTakesFewSmallBlocksWhateverItsSize) {
  const Allocations small = Warm(RequestOf(4), 4);
  const Allocations large = Warm(RequestOf(20000), 20000);
  RecordProperty("small", static_cast<int>(small.count));
  RecordProperty("large", static_cast<int>(large.count));
  EXPECT_LE(small.count, 38);
  EXPECT_LE(small.bytes, 4096);
  // 79 slices: their list and that of their offsets grow.
  EXPECT_LE(large.count, small.count + 12);
  EXPECT_LE(large.bytes, 16384);
}

TEST_F(AllocationsTest, EverySequenceOfACallTakesFew) {
  const auto count = [&](int sequences) {
    v1::AttendRequest request = RequestOf(sequences);
    for (int i = 0; i < sequences; ++i) *request.add_sequences() = Stateless(1);
    return Warm(request, sequences).count;
  };
  EXPECT_LE(count(64) - count(32), 32 * 3);
}

}  // namespace
}  // namespace attend
