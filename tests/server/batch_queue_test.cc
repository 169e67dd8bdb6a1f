// SPDX-License-Identifier: Apache-2.0
#include "server/batch_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace attend {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int64_t kBudget = 100;

TEST(BatchQueueTest, TasksOfOneKindShareABatchInArrivalOrder) {
  BatchQueue queue;
  queue.Push(1, {7, 10, 0, {}});
  queue.Push(2, {8, 10, 0, {}});
  queue.Push(3, {7, 10, 0, {}});
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1, 3));
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(2));
  EXPECT_THAT(queue.Next(kBudget), IsEmpty());
}

TEST(BatchQueueTest, TheBudgetEndsABatchButNeverRefusesTheOldest) {
  BatchQueue queue;
  queue.Push(1, {7, 500, 0, {}});
  queue.Push(2, {7, 60, 0, {}});
  queue.Push(3, {7, 60, 0, {}});
  queue.Push(4, {7, 60, 0, {}});
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(2, 3));
}

TEST(BatchQueueTest, CallsOfOneSessionAndLayerRunInArrivalOrder) {
  BatchQueue queue;
  queue.Push(1, {7, 1, 0, {"s"}});
  queue.Push(2, {7, 1, 0, {"s"}});
  queue.Push(3, {7, 1, 0, {"t"}});
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1, 3));
  EXPECT_THAT(queue.Next(kBudget), IsEmpty());
  queue.Remove(1);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(2));
}

TEST(BatchQueueTest, LayersOfOneSessionDoNotWaitForEachOther) {
  BatchQueue queue;
  queue.Push(1, {7, 1, 0, {"s"}});
  queue.Push(2, {8, 1, 1, {"s"}});
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(2));
}

TEST(BatchQueueTest, ASessionCallWaitsForEarlierWorkAndHoldsBackLaterWork) {
  BatchQueue queue;
  queue.Push(1, {7, 1, 0, {"s"}});
  queue.Push(2, {TaskFacts::kAlone, 0, TaskFacts::kAllLayers, {"s"}});
  queue.Push(3, {8, 1, 1, {"s"}});
  queue.Push(4, {TaskFacts::kAlone, 0, TaskFacts::kAllLayers, {"t"}});
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(4));
  queue.Remove(1);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(2));
  EXPECT_THAT(queue.Next(kBudget), IsEmpty());
  queue.Remove(2);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(3));
}

TEST(BatchQueueTest, AContinuedTaskLetsOthersGoFirst) {
  BatchQueue queue;
  queue.Push(1, {7, 500, 0, {}});
  queue.Push(2, {8, 1, 0, {}});
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
  queue.BackToTail(1);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(2));
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
}

TEST(BatchQueueTest, ATaskThatDidNotFitKeepsItsPlace) {
  BatchQueue queue;
  queue.Push(1, {7, 1, 0, {}});
  queue.Push(2, {8, 1, 0, {}});
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
  queue.BackToHead(1);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
}

TEST(BatchQueueTest, SessionsArePinnedAsLongAsTheyHaveWork) {
  BatchQueue queue;
  queue.Push(1, {7, 10, 0, {"s"}});
  EXPECT_TRUE(queue.Pinned("s"));
  EXPECT_EQ(queue.Next(kBudget).size(), 1u);
  EXPECT_TRUE(queue.Pinned("s"));
  queue.Remove(1);
  EXPECT_FALSE(queue.Pinned("s"));
  EXPECT_EQ(queue.size(), 0u);
}

TEST(BatchQueueTest, ACallThatNamesManySessionsWaitsForEachOfThem) {
  BatchQueue queue;
  queue.Push(1, {7, 1, 0, {"a"}});
  queue.Push(2, {7, 2, 0, {"a", "b"}});
  queue.Push(3, {7, 1, 0, {"b"}});
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
  queue.Remove(1);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(2));
  queue.Remove(2);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(3));
}

}  // namespace
}  // namespace attend
