// SPDX-License-Identifier: Apache-2.0
//
// How two servers take turns in one run of `attend bench`: by number and by time, in a closed and
// in an open loop, and never both at once.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "client/cli/bench/slices.h"

namespace attend::cli {
namespace {

using std::chrono::duration;

class SlicesTest : public testing::Test {
 protected:
  LoadControl control_{1, {}};
};

// The sides of `count` turns, one after another: S is the server, E the echo.
std::string Sides(Slices& slices, const LoadControl& control, ArrivalSchedule* arrivals,
                  int count) {
  std::string sides;
  for (int i = 0; i < count; ++i) {
    const auto turn = slices.Enter(control, arrivals);
    if (!turn) return sides + "?";
    sides += turn->side == Side::kServer ? "S" : "E";
    slices.Leave();
  }
  return sides;
}

TEST_F(SlicesTest, ByNumberBothSidesGetTheSame) {
  Slices slices({.requests = 3, .requests_each = 7});
  EXPECT_EQ(Sides(slices, control_, nullptr, 14), "SSSEEESSSEEESE");
  EXPECT_GT(slices.sum(Side::kServer).seconds, 0);
  EXPECT_GT(slices.sum(Side::kEcho).seconds, 0);
}

TEST_F(SlicesTest, ByNumberAnOpenLoopAlternatesAtTheSamePlaces) {
  ArrivalSchedule arrivals(1e6, 1);
  Slices slices({.requests = 3, .requests_each = 7});
  EXPECT_EQ(Sides(slices, control_, &arrivals, 14), "SSSEEESSSEEESE");
}

TEST_F(SlicesTest, ArrivalsOfASliceAreAsFarApartAsScheduled) {
  ArrivalSchedule arrivals(50, 7);
  ArrivalSchedule same(50, 7);
  Slices slices({.requests = 10, .requests_each = 50});
  double last = 0;
  Slices::Clock::time_point last_due;
  for (int i = 0; i < 100; ++i) {
    const auto turn = slices.Enter(control_, &arrivals);
    ASSERT_TRUE(turn);
    const double scheduled = same.Next();
    const double gap = scheduled - last;
    if (i % 10 == 0) {  // the slice began before now
      EXPECT_LE(duration<double>(turn->due - Slices::Clock::now()).count(), gap);
    } else {
      EXPECT_NEAR(duration<double>(turn->due - last_due).count(), gap, 1e-6);
    }
    last = scheduled;
    last_due = turn->due;
    slices.Leave();
  }
}

TEST_F(SlicesTest, ByTimeASliceLastsAndTheNextBeginsWithoutTheOther) {
  Slices slices({.seconds = 3600});
  EXPECT_EQ(Sides(slices, control_, nullptr, 1000), std::string(1000, 'S'));
  EXPECT_EQ(slices.sum(Side::kEcho).seconds, 0);
  Slices shortest({.seconds = 1e-9});
  EXPECT_EQ(Sides(shortest, control_, nullptr, 6), "SESESE");
}

TEST_F(SlicesTest, BothAreNeverInFlightTogether) {
  for (const bool open_loop : {false, true}) {
    Slices slices({.requests = 5, .requests_each = 1000});
    ArrivalSchedule arrivals(1e6, 2);
    std::array<std::atomic<int>, 2> in_flight{};
    std::array<std::atomic<int>, 2> turns{};
    std::atomic<int> left{2000};
    {
      std::vector<std::jthread> threads;
      for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&] {
          while (left.fetch_sub(1) > 0) {
            const auto turn = slices.Enter(control_, open_loop ? &arrivals : nullptr);
            ASSERT_TRUE(turn);
            const auto side = static_cast<size_t>(turn->side);
            ++in_flight[side];
            ++turns[side];
            EXPECT_EQ(in_flight[1 - side], 0);
            std::this_thread::yield();
            --in_flight[side];
            slices.Leave();
          }
        });
      }
    }
    EXPECT_EQ(turns[0], 1000);
    EXPECT_EQ(turns[1], 1000);
  }
}

TEST_F(SlicesTest, AStoppedLoadHasNoMoreTurns) {
  Slices slices({.requests = 1, .requests_each = 10});
  EXPECT_TRUE(slices.Enter(control_, nullptr));  // and stays in flight
  std::jthread stopper([this] { control_.Abort({}); });
  EXPECT_FALSE(slices.Enter(control_, nullptr));
}

TEST(SlicesBudgetTest, HasAboutTenSlicesOfEachSide) {
  EXPECT_EQ(Slices::BudgetOf(4, 0, 16).seconds, 0.2);
  EXPECT_EQ(Slices::BudgetOf(0.1, 0, 16).seconds, 0.02);
  EXPECT_EQ(Slices::BudgetOf(1000, 0, 16).seconds, 0.5);
  EXPECT_EQ(Slices::BudgetOf(4, 0, 16).requests, 0);
  EXPECT_EQ(Slices::BudgetOf(10, 1001, 1).requests, 101);
  EXPECT_EQ(Slices::BudgetOf(10, 1001, 1).requests_each, 1001);
  EXPECT_EQ(Slices::BudgetOf(10, 100, 64).requests, 64);  // every client has one
  EXPECT_EQ(Slices::BudgetOf(10, 5, 64).requests, 5);
}

}  // namespace
}  // namespace attend::cli
