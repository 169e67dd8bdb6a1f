// SPDX-License-Identifier: Apache-2.0
#include "engine/util/recycled.h"

#include <gtest/gtest.h>

#include <cstring>
#include <list>
#include <random>
#include <set>
#include <thread>

#include "tests/support/seed.h"

namespace attend {
namespace {

TEST(RecycledTest, WhatWasGivenBackIsGivenOutAgain) {
  if (!RecycledMemory::kRecycles) GTEST_SKIP() << "nothing is recycled under a sanitizer";
  void* first = RecycledMemory::Get(1000);
  RecycledMemory::Put(first, 1000);
  void* second = RecycledMemory::Get(600);  // of the same size, a power of two
  EXPECT_EQ(first, second);
  RecycledMemory::Put(second, 600);
}

TEST(RecycledTest, WhatIsInUseIsGivenOutOnce) {
  std::set<void*> all;
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(all.insert(RecycledMemory::Get(64)).second);
  for (void* memory : all) RecycledMemory::Put(memory, 64);
}

// More than is kept of a size, and pieces larger than any that is kept.
TEST(RecycledTest, TooMuchAndTooLargeGoesBackToTheSystem) {
  std::vector<void*> all;
  for (int i = 0; i < 40; ++i) all.push_back(RecycledMemory::Get(RecycledMemory::kMostBytes));
  for (void* memory : all) RecycledMemory::Put(memory, RecycledMemory::kMostBytes);
  void* large = RecycledMemory::Get(RecycledMemory::kMostBytes + 1);
  std::memset(large, 1, RecycledMemory::kMostBytes + 1);
  RecycledMemory::Put(large, RecycledMemory::kMostBytes + 1);
}

TEST(RecycledTest, NobodyElseWritesToAPiece) {
  const uint64_t seed = TestSeed();
  std::vector<std::jthread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([seed, t] {
      std::mt19937_64 random(seed + static_cast<uint64_t>(t));
      std::list<RecycledString> pieces;
      for (int i = 0; i < 20000; ++i) {
        if (pieces.size() < 50 && random() % 2 == 0) {
          pieces.emplace_back(random() % 5000, static_cast<char>('a' + t));
        } else if (!pieces.empty()) {
          ASSERT_EQ(pieces.front().find_first_not_of(static_cast<char>('a' + t)),
                    RecycledString::npos);
          pieces.pop_front();
        }
      }
    });
  }
}

TEST(RecycledTest, ASharedObjectOutlivesWhoeverMadeIt) {
  std::shared_ptr<RecycledVector<int>> made = MakeRecycled<RecycledVector<int>>(100, 7);
  std::thread([made = std::move(made)] { EXPECT_EQ(made->at(99), 7); }).join();
}

}  // namespace
}  // namespace attend
