// SPDX-License-Identifier: Apache-2.0
#include "engine/block_allocator.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "tests/support/seed.h"

namespace attend {
namespace {

TEST(BlockAllocatorTest, GivesEveryBlockOfTheArenaAndNotOneMore) {
  BlockAllocator allocator(0, 1 << 20);
  const int64_t expected = allocator.FreeBlocks(4096);
  std::vector<int64_t> blocks;
  EXPECT_TRUE(allocator.Allocate(4096, expected, blocks));
  EXPECT_EQ(allocator.used_bytes(), expected * 4096);
  EXPECT_EQ(allocator.FreeBlocks(4096), 0);
  EXPECT_FALSE(allocator.Allocate(4096, 1, blocks));
  EXPECT_EQ(static_cast<int64_t>(blocks.size()), expected);
}

TEST(BlockAllocatorTest, FailedAllocationChangesNothing) {
  BlockAllocator allocator(0, 1 << 20);
  std::vector<int64_t> blocks;
  EXPECT_FALSE(allocator.Allocate(4096, 257, blocks));
  EXPECT_TRUE(blocks.empty());
  EXPECT_EQ(allocator.used_bytes(), 0);
  EXPECT_TRUE(allocator.Allocate(1 << 20, 1, blocks));
}

TEST(BlockAllocatorTest, ASharedBlockIsFreeAfterItsLastRelease) {
  BlockAllocator allocator(0, 1 << 20);
  std::vector<int64_t> blocks;
  ASSERT_TRUE(allocator.Allocate(64, 1, blocks));
  allocator.AddReference(blocks[0]);
  EXPECT_EQ(allocator.References(blocks[0]), 2);
  allocator.Release(blocks[0]);
  EXPECT_EQ(allocator.used_bytes(), 64);
  allocator.Release(blocks[0]);
  EXPECT_EQ(allocator.used_bytes(), 0);
}

TEST(BlockAllocatorTest, RandomUseNeverOverlapsAndReturnsEverySlab) {
  std::mt19937_64 random(TestSeed());
  constexpr int64_t kBase = 1 << 30;
  constexpr int64_t kArena = 8 << 20;
  int64_t emptied = 0;
  BlockAllocator allocator(kBase, kArena, [&](int64_t, int64_t bytes) { emptied += bytes; });
  struct Held {
    int64_t bytes;
    int references;
  };
  std::map<int64_t, Held> held;  // by address
  const int64_t sizes[] = {64, 192, 4096, 100 * 64, 70000 / 64 * 64, 300 << 10};
  int64_t used = 0;
  for (int step = 0; step < 200000; ++step) {
    if (random() % 2 == 0) {
      const int64_t bytes = sizes[random() % std::size(sizes)];
      const auto count = static_cast<int64_t>(random() % 5);
      std::vector<int64_t> blocks;
      const int64_t room = allocator.FreeBlocks(bytes);
      const bool ok = allocator.Allocate(bytes, count, blocks);
      EXPECT_TRUE(ok || room < count) << "refused with room for " << room;
      for (int64_t address : blocks) {
        ASSERT_GE(address, kBase);
        ASSERT_LE(address + bytes, kBase + kArena);
        const auto next = held.lower_bound(address);
        ASSERT_TRUE(next == held.end() || next->first >= address + bytes);
        ASSERT_TRUE(next == held.begin() ||
                    std::prev(next)->first + std::prev(next)->second.bytes <= address);
        held[address] = {bytes, 1};
        used += bytes;
      }
    } else if (!held.empty()) {
      auto at = held.lower_bound(kBase + static_cast<int64_t>(random() % kArena));
      if (at == held.end()) at = held.begin();
      if (random() % 4 == 0) {
        allocator.AddReference(at->first);
        ++at->second.references;
      } else {
        allocator.Release(at->first);
        if (--at->second.references == 0) {
          used -= at->second.bytes;
          held.erase(at);
        }
      }
    }
    ASSERT_EQ(allocator.used_bytes(), used);
  }
  for (auto& [address, block] : held) {
    while (block.references-- > 0) allocator.Release(address);
  }
  EXPECT_EQ(allocator.used_bytes(), 0);
  EXPECT_GT(emptied, 0);
  std::vector<int64_t> all;
  EXPECT_TRUE(allocator.Allocate(kArena, 1, all)) << "a slab did not come back";
}

}  // namespace
}  // namespace attend
