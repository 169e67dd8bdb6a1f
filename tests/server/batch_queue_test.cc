// SPDX-License-Identifier: Apache-2.0
#include "server/batch_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "tests/support/seed.h"

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

TEST(BatchQueueTest, ATaskThatBecomesLongByRunningLetsThoseGoFirstThatCameMeanwhile) {
  BatchQueue queue;
  queue.Push(1, {7, 500, 0, {}});
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
  queue.Push(2, {8, 1, 0, {}});
  queue.Push(3, {9, 1, 0, {}});
  queue.SetLong(1);
  queue.BackToTail(1);
  for (TaskId id : {2, 3, 1}) EXPECT_THAT(queue.Next(kBudget), ElementsAre(id));
}

TEST(BatchQueueTest, APostponedTaskGoesLast) {
  BatchQueue queue;
  for (TaskId id : {1, 2, 3}) queue.Push(id, {7, kBudget, 0, {}});
  queue.Postpone(1);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(2));
  queue.Push(4, {7, kBudget, 0, {}});
  queue.Postpone(1);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(3));
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(4));
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
}

// The engine thread asks for it before every batch.
TEST(BatchQueueTest, PostponedTasksKeepTheirOrderHoweverOftenTheyArePostponed) {
  BatchQueue queue;
  for (TaskId id : {1, 2, 3, 4}) queue.Push(id, {7, kBudget, 0, {}});
  for (int pass = 0; pass < 3; ++pass) {
    for (TaskId id : {1, 3}) queue.Postpone(id);
  }
  EXPECT_THAT(queue.waiting(), ElementsAre(2, 4, 1, 3));
  queue.Remove(1);
  queue.Postpone(3);
  EXPECT_THAT(queue.waiting(), ElementsAre(2, 4, 3));
}

TEST(BatchQueueTest, APostponedTaskRunsAtOnceWhenNobodyElseMay) {
  BatchQueue queue;
  queue.Push(1, {7, 10, 0, {"s"}});
  queue.Push(2, {8, 10, 0, {"t"}});
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
  queue.Push(3, {9, 10, 0, {"s"}});  // waits for 1
  queue.Postpone(2);
  EXPECT_THAT(queue.waiting(), ElementsAre(3, 2));
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(2));
}

TEST(BatchQueueTest, NoCallOvertakesAPostponedOneOfItsSession) {
  BatchQueue queue;
  queue.Push(1, {7, 10, 0, {"s"}});
  queue.Push(2, {7, 10, 0, {"s"}});
  queue.Push(3, {TaskFacts::kAlone, 0, TaskFacts::kAllLayers, {"s"}});
  queue.Push(4, {8, 10, 1, {"s"}});
  queue.Postpone(1);
  EXPECT_THAT(queue.waiting(), ElementsAre(2, 3, 4, 1));
  for (TaskId id : {1, 2, 3, 4}) {
    EXPECT_THAT(queue.Next(kBudget), ElementsAre(id));
    EXPECT_THAT(queue.Next(kBudget), IsEmpty());
    queue.Remove(id);
  }
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

// ---- Long tasks ----

TEST(BatchQueueTest, AChunkIsABatchOfItsOwnAndNoSecondOneRunsBesideIt) {
  BatchQueue queue;
  for (TaskId id : {1, 2, 3}) queue.Push(id, {7, 10, 0, {}});
  queue.SetLong(1);
  queue.SetLong(2);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(3));
  EXPECT_THAT(queue.Next(kBudget), IsEmpty());
  queue.BackToTail(1);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(2));
  queue.Remove(2);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
}

TEST(BatchQueueTest, WhoCameFirstGoesBeforeTheFirstChunk) {
  BatchQueue queue;
  queue.Push(1, {7, 10, 0, {}});
  queue.Push(2, {8, 500, 0, {}});
  queue.SetLong(2);
  queue.Push(3, {9, 10, 0, {}});
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(2));
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(3));
}

TEST(BatchQueueTest, ShortTasksWaitForOneChunkAtMostHoweverManyLongOnesThereAre) {
  BatchQueue queue;
  for (TaskId id : {1, 2, 3}) {
    queue.Push(id, {7, 500, 0, {}});
    queue.SetLong(id);
  }
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
  queue.Push(4, {8, 1, 1, {}});  // other layers, other models
  queue.Push(5, {9, 1, 2, {}});
  queue.BackToTail(1);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(4));
  queue.Push(6, {8, 1, 1, {}});
  queue.Remove(4);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(5));
  queue.Remove(5);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(2));  // its turn: 6 came after the last chunk
  queue.BackToTail(2);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(6));
}

TEST(BatchQueueTest, APostponedTaskWaitsForOneChunkAtMostToo) {
  BatchQueue queue;
  for (TaskId id : {1, 2}) {
    queue.Push(id, {7, 500, 0, {}});
    queue.SetLong(id);
  }
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
  queue.Push(3, {8, kBudget, 1, {}});
  queue.Push(4, {8, kBudget, 1, {}});
  queue.Postpone(3);
  queue.BackToTail(1);
  queue.Postpone(3);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(4));
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(3));
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(2));
}

// Whatever comes: each short task sees at most one chunk start between its arrival and its batch,
// and each long task gets its chunks.
TEST(BatchQueueTest, NothingStarvesUnderASteadyStream) {
  std::mt19937_64 random(TestSeed());
  BatchQueue queue;
  TaskId next = 1;
  std::map<TaskId, int> chunks_seen;  // of waiting short tasks
  std::map<TaskId, int> chunks_left;  // of long tasks
  const auto arrive = [&] {
    const TaskId id = next++;
    const bool is_long = random() % 8 == 0;
    const int layer = static_cast<int>(random() % 3);
    queue.Push(id, {static_cast<uint64_t>(7 + layer), is_long ? 500 : 1, layer, {}});
    if (is_long) {
      queue.SetLong(id);
      chunks_left[id] = 3;
    } else {
      chunks_seen[id] = 0;
    }
  };
  int chunks = 0;
  for (int step = 0; step < 3000; ++step) {
    // On average as much comes as goes; four long tasks at most.
    if (step < 2500) {
      arrive();
      if (random() % 2 == 0) arrive();
    }
    const RecycledVector<TaskId> batch = queue.Next(kBudget);
    if (batch.empty()) continue;
    if (chunks_left.contains(batch[0])) {
      ASSERT_EQ(batch.size(), 1u);
      ++chunks;
      for (auto& [id, seen] : chunks_seen) {
        ASSERT_LE(++seen, 1) << "task " << id << " waits for a second chunk";
      }
      if (random() % 2 == 0) arrive();
      if (--chunks_left[batch[0]] > 0) {
        queue.BackToTail(batch[0]);
      } else {
        queue.Remove(batch[0]);
        chunks_left.erase(batch[0]);
      }
      continue;
    }
    for (TaskId id : batch) {
      chunks_seen.erase(id);
      queue.Remove(id);
    }
  }
  EXPECT_GT(chunks, 300);
  while (queue.size() > 0) {  // hangs, and is ended by ctest, if something can never run
    for (TaskId id : queue.Next(kBudget)) queue.Remove(id);
  }
}

TEST(BatchQueueTest, AShortTaskThatCannotRunYetLetsAChunkGo) {
  BatchQueue queue;
  queue.Push(1, {7, 500, 0, {}});
  queue.SetLong(1);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
  queue.Push(2, {7, 1, 0, {}});
  queue.BackToTail(1);
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(2));
  queue.BackToTail(2);  // waits for memory that the long one holds
  EXPECT_THAT(queue.Next(kBudget), ElementsAre(1));
}

}  // namespace
}  // namespace attend
