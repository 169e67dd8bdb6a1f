// SPDX-License-Identifier: Apache-2.0
//
// How often the server allocates for a request, between what gRPC hands over and what it takes
// back; the engine's part is in engine_allocations_test.
#include <gtest/gtest.h>

#include "server/batch_queue.h"
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
                     BufferPool& pool, int64_t output_bytes, ReceivedAttend& received,
                     v1::AttendResponse& response) {
  const Allocations before = AllocationsSoFar();
  {
    EXPECT_TRUE(received.Decode(message).ok());
    const absl::StatusOr<ConvertedAttend> converted = ConvertAttend(context, received);
    EXPECT_TRUE(converted.ok()) << converted.status();
    received.Clear();
    if (!converted.ok()) return {};
    converted->job->output = pool.Get(output_bytes);
    converted->job->output_width = 10;
    ToResponse(context, *converted, 1, response);
    const grpc::ByteBuffer answer = EncodeAttendResponse(response, OutputOf(*converted));
    EXPECT_GT(answer.Length(), static_cast<size_t>(output_bytes));
  }
  return AllocationsSoFar() - before;
}

class AllocationsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!RecycledMemory::kRecycles) GTEST_SKIP() << "nothing is recycled under a sanitizer";
  }

  AllocationsTest() {
    context_.models = &models_;
    context_.buffers = BufferPool::Make(64 << 20);
    context_.replica = "replica";
  }

  Allocations Warm(const v1::AttendRequest& request, int64_t rows) {
    const grpc::ByteBuffer message = Received(request);
    Allocations counted;
    for (int i = 0; i < 3; ++i) {
      counted = CountOne(context_, message, *context_.buffers, rows * 40, received_, response_);
    }
    return counted;
  }

  const std::vector<LoadedModel> models_ = {Model("m")};
  ConvertContext context_;
  ReceivedAttend received_;
  v1::AttendResponse response_;
};

v1::AttendRequest RequestOf(int64_t rows) {
  v1::AttendRequest request;
  request.set_model("m");
  request.set_layer("both");
  *request.mutable_hidden_states() = F32({rows, kWidth});
  return request;
}

// Protobuf's parser makes a tensor anew, and the list of its dimensions, which grows once. gRPC
// counts the users of the answer's two slices.
constexpr int64_t kNotOurs = 3 + 2;

TEST_F(AllocationsTest, AWarmRequestTakesNothing) {
  const Allocations small = Warm(RequestOf(4), 4);
  EXPECT_EQ(small.count, kNotOurs);
  EXPECT_LE(small.bytes, 512);
  EXPECT_EQ(Warm(RequestOf(20000), 20000).count, kNotOurs);
}

TEST_F(AllocationsTest, NorDoManySequencesInSessionsAndLongNames) {
  v1::AttendRequest request = RequestOf(64);
  request.set_layer("causal");
  request.set_request_id(std::string(100, 'r'));
  for (int i = 0; i < 64; ++i) {
    *request.add_sequences() = InSession(1, std::string(60, 's') + std::to_string(i), 7);
  }
  EXPECT_EQ(Warm(request, 64).count, kNotOurs);
}

TEST_F(AllocationsTest, NorDoesOneAfterALargeOne) {
  v1::AttendRequest large = RequestOf(300);
  large.set_layer("causal");
  for (int i = 0; i < 300; ++i) {
    *large.add_sequences() = InSession(1, std::string(60, 's') + std::to_string(i), 7);
  }
  Warm(large, 300);
  EXPECT_EQ(Warm(RequestOf(4), 4).count, kNotOurs);
}

TEST_F(AllocationsTest, AQueueTakesNothingForTasksLikeThoseBefore) {
  BatchQueue queue;
  int64_t allocations = 0;
  for (TaskId id = 1; id < 300; id += 3) {
    allocations = AllocationsSoFar().count;
    for (TaskId task = id; task < id + 3; ++task) {
      TaskFacts facts{.kind = 7, .tokens = 1, .layer = 0, .session_ids = {}};
      facts.session_ids.emplace_back(60, 's');
      queue.Push(task, std::move(facts));
    }
    for (TaskId task = id; task < id + 3; ++task) {
      EXPECT_EQ(queue.Next(100).size(), 1u);  // of a session's calls, one after another
      queue.Remove(task);
    }
    allocations = AllocationsSoFar().count - allocations;
  }
  EXPECT_EQ(allocations, 0);
}

}  // namespace
}  // namespace attend
