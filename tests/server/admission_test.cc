// SPDX-License-Identifier: Apache-2.0
#include "server/admission.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace attend {
namespace {

TEST(AdmissionTest, EachLimitIsReachedExactlyAndNamedBeyond) {
  Admission admission({2, 100, 1000}, [] { return 50; });
  Admission::Slot a, b, c;
  EXPECT_TRUE(admission.Reserve(1, 60, 500, a).ok());
  EXPECT_TRUE(admission.Reserve(1, 40, 500, b).ok());
  const absl::Status full = admission.Reserve(1, 0, 0, c);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(std::string(full.message()),
            "queue full: queue_requests: got 1 more with 2 in use, wanted at most 2");
  b.Release();
  EXPECT_EQ(std::string(admission.Reserve(1, 41, 0, c).message()),
            "queue full: queue_tokens: got 41 more with 60 in use, wanted at most 100");
  EXPECT_EQ(std::string(admission.Reserve(1, 40, 501, c).message()),
            "queue full: queue_bytes: got 501 more with 500 in use, wanted at most 1000");
  EXPECT_FALSE(c.held());
  EXPECT_TRUE(admission.Reserve(1, 40, 500, c).ok());
}

TEST(AdmissionTest, ASlotCanGrowAndGivesEverythingBack) {
  Admission admission({2, 100, 1000}, [] { return 50; });
  {
    Admission::Slot slot;
    ASSERT_TRUE(admission.Reserve(1, 0, 700, slot).ok());
    ASSERT_TRUE(admission.Reserve(0, 30, 0, slot).ok());
    Admission::Slot moved = std::move(slot);
    EXPECT_EQ(admission.usage().tokens, 30);
    EXPECT_EQ(moved.bytes(), 700);
  }
  EXPECT_EQ(admission.usage().requests, 0);
  EXPECT_EQ(admission.usage().tokens, 0);
  EXPECT_EQ(admission.usage().bytes, 0);
}

TEST(AdmissionTest, ManyThreadsNeverExceedTheLimit) {
  Admission admission({3, 1000, 1000}, [] { return 50; });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5000; ++i) {
        Admission::Slot slot;
        if (admission.Reserve(1, 10, 10, slot).ok()) {
          EXPECT_LE(admission.usage().requests, 3);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(admission.usage().requests, 0);
}

}  // namespace
}  // namespace attend
