// SPDX-License-Identifier: Apache-2.0
#include "engine/util/buffer_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace attend {
namespace {

TEST(BufferPoolTest, ReleasedBuffersAreUsedAgainByTheirCapacity) {
  const auto pool = BufferPool::Make(1 << 20);
  Buffer small = pool->Get(1000);
  Buffer large = pool->Get(5000);
  const std::byte* const first = small.data.get();
  const std::byte* const second = large.data.get();
  EXPECT_NE(first, second);
  small = large = {};
  EXPECT_EQ(pool->unused_bytes(), 1024 + 6144);
  large = pool->Get(6144);
  EXPECT_EQ(large.data.get(), second);
  small = pool->Get(769);
  EXPECT_EQ(small.data.get(), first);
  EXPECT_EQ(small.bytes, 769);
  EXPECT_EQ(pool->unused_bytes(), 0);
}

TEST(BufferPoolTest, KeepsNoMoreThanItMay) {
  const auto pool = BufferPool::Make(3000);
  std::vector<Buffer> buffers;
  for (int i = 0; i < 4; ++i) buffers.push_back(pool->Get(1024));
  buffers.clear();
  EXPECT_EQ(pool->unused_bytes(), 2048);
  pool->Get(4096);
  EXPECT_EQ(pool->unused_bytes(), 2048);
}

TEST(BufferPoolTest, EveryByteIsTheOwnersAndAligned) {
  const auto pool = BufferPool::Make(1 << 20);
  for (int round = 0; round < 2; ++round) {
    std::vector<Buffer> buffers;
    for (int64_t bytes : {0, 1, 64, 255, 256, 257, 384, 385, 512, 768, 769, 100000}) {
      buffers.push_back(pool->Get(bytes));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffers.back().data.get()) % 64, 0U) << bytes;
    }
    for (size_t i = 0; i < buffers.size(); ++i) {
      std::memset(buffers[i].data.get(), static_cast<int>(i),
                  static_cast<size_t>(buffers[i].bytes));
    }
    for (size_t i = 0; i < buffers.size(); ++i) {
      for (int64_t b = 0; b < buffers[i].bytes; ++b) {
        ASSERT_EQ(buffers[i].data.get()[b], static_cast<std::byte>(i));
      }
    }
  }
}

TEST(BufferPoolTest, ABufferKeepsThePoolAndIsOneHoweverManyHoldIt) {
  auto pool = BufferPool::Make(1 << 20);
  const std::weak_ptr<BufferPool> watched = pool;
  Buffer buffer = pool->Get(100);
  std::shared_ptr<std::byte> part(buffer.data, buffer.data.get() + 50);
  std::weak_ptr<std::byte> weak = part;
  buffer = {};
  EXPECT_EQ(pool->unused_bytes(), 0) << "given back although a part is held";
  pool.reset();
  ASSERT_FALSE(watched.expired());
  *part = std::byte{7};
  part.reset();
  EXPECT_TRUE(weak.expired());
  ASSERT_FALSE(watched.expired()) << "what counts the owners is there while somebody may ask";
  weak.reset();
  EXPECT_TRUE(watched.expired());
}

// Buffers are filled by one thread and read and released by others, like answers that gRPC sends.
TEST(BufferPoolTest, BuffersGoFromThreadToThread) {
  auto pool = BufferPool::Make(100'000);
  std::mutex mutex;
  std::deque<Buffer> sent;
  std::atomic<int> wrong{0};
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < 3000; ++i) {
      Buffer buffer = pool->Get(random() % 20000);
      const auto value = static_cast<std::byte>(random());
      std::memset(buffer.data.get(), static_cast<int>(value), static_cast<size_t>(buffer.bytes));
      Buffer received;
      {
        const std::lock_guard lock(mutex);
        sent.push_back(std::move(buffer));
        if (sent.size() > 10) {
          received = std::move(sent.front());
          sent.pop_front();
        }
      }
      for (int64_t b = 1; b < received.bytes; ++b) {
        wrong += received.data.get()[b] != received.data.get()[0] ? 1 : 0;
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  pool.reset();
  sent.clear();  // the last owners of the pool
}

}  // namespace
}  // namespace attend
