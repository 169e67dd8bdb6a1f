// SPDX-License-Identifier: Apache-2.0
#include "engine/block_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "tests/support/seed.h"

namespace attend {
namespace {

TEST(BlockAllocatorTest, GivesEveryBlockOfTheArenaAndNotOneMore) {
  BlockAllocator allocator(0, 1 << 20);
  const int64_t expected = allocator.FreeBlocks(4096);
  BlockList blocks;
  EXPECT_TRUE(allocator.Allocate(4096, expected, blocks));
  EXPECT_EQ(allocator.used_bytes(), expected * 4096);
  EXPECT_EQ(allocator.FreeBlocks(4096), 0);
  EXPECT_FALSE(allocator.Allocate(4096, 1, blocks));
  EXPECT_EQ(static_cast<int64_t>(blocks.size()), expected);
}

TEST(BlockAllocatorTest, FailedAllocationChangesNothing) {
  BlockAllocator allocator(0, 1 << 20);
  BlockList blocks;
  EXPECT_FALSE(allocator.Allocate(4096, 257, blocks));
  EXPECT_TRUE(blocks.empty());
  EXPECT_EQ(allocator.used_bytes(), 0);
  EXPECT_TRUE(allocator.Allocate(1 << 20, 1, blocks));
}

TEST(BlockAllocatorTest, ASharedBlockIsFreeAfterItsLastRelease) {
  BlockAllocator allocator(0, 1 << 20);
  BlockList blocks;
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
      BlockList blocks;
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
  BlockList all;
  EXPECT_TRUE(allocator.Allocate(kArena, 1, all)) << "a slab did not come back";
}

// The rules of the allocator in their plainest form: every question is answered by looking at all
// slabs and blocks. Its arena has 64 slabs.
class PlainAllocator {
 public:
  explicit PlainAllocator(int64_t bytes) : slab_(bytes / 64), runs_(64) {}

  bool Allocate(int64_t block_bytes, int64_t count, BlockList& out) {
    const PlainAllocator before = *this;
    const size_t held = out.size();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t address = AllocateOne(block_bytes);
      if (address < 0) {
        *this = before;
        out.resize(held);
        return false;
      }
      out.push_back(address);
    }
    return true;
  }

  // The address of the run that became empty; -1 = none.
  int64_t Release(int64_t address) {
    for (size_t first = 0; first < runs_.size(); ++first) {
      Run& run = runs_[first];
      const int64_t inside = address - static_cast<int64_t>(first) * slab_;
      if (inside < 0 || inside >= run.slabs * slab_) continue;
      run.used[static_cast<size_t>(inside / run.block_bytes)] = false;
      if (std::count(run.used.begin(), run.used.end(), true) > 0) return -1;
      run = {};
      return static_cast<int64_t>(first) * slab_;
    }
    return -1;
  }

 private:
  struct Run {
    int64_t slabs = 0;
    int64_t block_bytes = 0;
    std::vector<bool> used;
  };

  int64_t AllocateOne(int64_t block_bytes) {
    for (size_t first = 0; first < runs_.size(); ++first) {
      Run& run = runs_[first];
      const auto free = std::find(run.used.begin(), run.used.end(), false);
      if (run.block_bytes != block_bytes || free == run.used.end()) continue;
      *free = true;
      return static_cast<int64_t>(first) * slab_ + (free - run.used.begin()) * block_bytes;
    }
    const int64_t least = (block_bytes + slab_ - 1) / slab_;
    int64_t slabs = least;  // or more, so that at most an eighth is wasted
    while (slabs < least + 8 && slabs * slab_ % block_bytes * 8 > slabs * slab_) ++slabs;
    if (slabs == least + 8) slabs = least;
    if (!Open(slabs, block_bytes) && !Open(least, block_bytes)) return -1;
    return AllocateOne(block_bytes);
  }

  bool Open(int64_t slabs, int64_t block_bytes) {
    std::vector<bool> taken(runs_.size());
    for (size_t first = 0; first < runs_.size(); ++first) {
      std::fill_n(taken.begin() + static_cast<int64_t>(first), runs_[first].slabs, true);
    }
    const auto gap = std::search_n(taken.begin(), taken.end(), slabs, false);
    if (gap == taken.end()) return false;
    runs_[static_cast<size_t>(gap - taken.begin())] = {
        slabs, block_bytes, std::vector<bool>(static_cast<size_t>(slabs * slab_ / block_bytes))};
    return true;
  }

  int64_t slab_;
  std::vector<Run> runs_;  // [slabs] by first slab
};

TEST(BlockAllocatorTest, RandomUseGivesTheAddressesOfThePlainRules) {
  std::mt19937_64 random(TestSeed());
  constexpr int64_t kArena = 1 << 20;  // 64 slabs of 16 KiB
  int64_t emptied = -1;
  BlockAllocator allocator(0, kArena, [&](int64_t address, int64_t) { emptied = address; });
  PlainAllocator plain(kArena);
  const int64_t sizes[] = {256, 448, 4096, 7040, 12288, 20480, 40000 / 64 * 64};
  std::vector<int64_t> held;
  int refused = 0;
  for (int step = 0; step < 30000; ++step) {
    // Fills up and empties in turn, so that both runs and gaps are of every length.
    if (random() % 100 < (step / 1000 % 2 == 0 ? 55 : 45) || held.empty()) {
      const int64_t bytes = sizes[random() % std::size(sizes)];
      const auto count = static_cast<int64_t>(random() % 6);
      BlockList blocks, expected;
      const bool ok = allocator.Allocate(bytes, count, blocks);
      ASSERT_EQ(ok, plain.Allocate(bytes, count, expected)) << "step " << step;
      ASSERT_EQ(blocks, expected) << "step " << step;
      held.insert(held.end(), blocks.begin(), blocks.end());
      refused += ok ? 0 : 1;
    } else {
      std::swap(held[random() % held.size()], held.back());
      emptied = -1;
      allocator.Release(held.back());
      ASSERT_EQ(emptied, plain.Release(held.back())) << "step " << step;
      held.pop_back();
    }
  }
  EXPECT_GT(refused, 0);
}

}  // namespace
}  // namespace attend
