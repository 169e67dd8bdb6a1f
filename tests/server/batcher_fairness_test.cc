// SPDX-License-Identifier: Apache-2.0
//
// Short work beside long work on the real engine thread, in the order of the batches; the time that
// a batch takes is the engine's word, so much for each row.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <vector>

#include "tests/server/batcher_fixture.h"

namespace attend {
namespace {

class BatcherFairnessTest : public BatcherFixture {
 protected:
  // Chunks of the shortest time, of a row or two as soon as an append has been seen.
  BatcherFairnessTest() : BatcherFixture(1, 0, 1) {}
};

TEST_F(BatcherFairnessTest, AppendsThatComeDuringAChunkRunBeforeTheNextOneOfAnyPrefill) {
  const auto append = [this](const std::string& session, int64_t position) {
    return Submit(Job(1, session, position));
  };
  batcher_->Start();
  const std::string session = Open();
  const std::string other = Open();
  ASSERT_TRUE(append(session, 0).get().ok());
  // A row takes long enough for every prefill to need chunks.
  std::vector<std::future<absl::Status>> appends;
  std::vector<int64_t> rows;  // of the batches
  std::atomic<int64_t> position{1};
  std::atomic<int64_t> positions_of_other{0};
  engine_->times = {50'000, 0, 0};
  engine_->on_start = [&](const BatchPlan& plan, std::span<const AttendItem>) {
    engine_->times.project_us = 50'000 * plan.query_rows;
    rows.push_back(plan.items() > 1 ? -plan.items() : plan.query_rows);
    if (rows.size() % 3 != 0) return;
    appends.push_back(append(session, position++));
    appends.push_back(append(other, positions_of_other++));
  };
  std::vector<std::future<absl::Status>> prefills;
  for (int i = 0; i < 3; ++i) prefills.push_back(Submit(Job(100)));
  for (auto& prefill : prefills) EXPECT_TRUE(prefill.get().ok());
  while (!batcher_->idle()) std::this_thread::yield();
  for (auto& answer : appends) EXPECT_TRUE(answer.get().ok());
  // Two appends came with every third batch: they are the next one, together.
  int64_t computed = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i] == -2, i % 3 == 0 && i > 0) << i;
    if (rows[i] > 0) computed += rows[i];
  }
  EXPECT_EQ(computed, 300);
  // The first chunk measures 32 rows; the others have two, as many as take twice the time of one.
  // A machine that holds this process up may make them a little longer.
  EXPECT_GT(rows.size(), 100u) << ::testing::PrintToString(rows);
}

}  // namespace
}  // namespace attend
