// SPDX-License-Identifier: Apache-2.0
//
// How often the server allocates for a request, between what gRPC hands over and what it takes
// back. gRPC's own allocations do not count: they go through malloc.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/server/convert_fixture.h"

namespace {

std::atomic<int64_t> g_allocations{0};
std::atomic<int64_t> g_bytes{0};

[[gnu::noinline]] void* Allocate(size_t bytes, size_t alignment) {
  g_allocations.fetch_add(1);
  g_bytes.fetch_add(static_cast<int64_t>(bytes));
  void* memory =
      alignment <= alignof(std::max_align_t)
          ? std::malloc(bytes)
          : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) std::abort();
  return memory;
}

}  // namespace

void* operator new(size_t bytes) { return Allocate(bytes, 0); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return Allocate(bytes, static_cast<size_t>(alignment));
}
// Neither malloc nor free is inlined: where it sees one of them only, the compiler takes the pair
// of new and free, or malloc and delete, for a mistake.
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { operator delete(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { operator delete(memory); }

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

struct Counted {
  int64_t allocations = 0;
  int64_t bytes = 0;
};

// From the received message to the answer; the engine's part is left out.
Counted CountOne(const ConvertContext& context, const grpc::ByteBuffer& message, BufferPool& pool,
                 int64_t output_bytes) {
  const int64_t allocations = g_allocations.load();
  const int64_t bytes = g_bytes.load();
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
  return {g_allocations.load() - allocations, g_bytes.load() - bytes};
}

class AllocationsTest : public ::testing::Test {
 protected:
  AllocationsTest() {
    context_.models = &models_;
    context_.buffers = BufferPool::Make(64 << 20);
    context_.replica = "replica";
  }

  Counted Warm(const v1::AttendRequest& request, int64_t rows) {
    const grpc::ByteBuffer message = Received(request);
    Counted counted;
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
  const Counted small = Warm(RequestOf(4), 4);
  const Counted large = Warm(RequestOf(20000), 20000);
  RecordProperty("small", static_cast<int>(small.allocations));
  RecordProperty("large", static_cast<int>(large.allocations));
  EXPECT_LE(small.allocations, 38);
  EXPECT_LE(small.bytes, 4096);
  // 79 slices: their list and that of their offsets grow.
  EXPECT_LE(large.allocations, small.allocations + 12);
  EXPECT_LE(large.bytes, 16384);
}

TEST_F(AllocationsTest, EverySequenceOfACallTakesFew) {
  const auto count = [&](int sequences) {
    v1::AttendRequest request = RequestOf(sequences);
    for (int i = 0; i < sequences; ++i) *request.add_sequences() = Stateless(1);
    return Warm(request, sequences).allocations;
  };
  EXPECT_LE(count(64) - count(32), 32 * 3);
}

}  // namespace
}  // namespace attend
