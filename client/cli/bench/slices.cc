// SPDX-License-Identifier: Apache-2.0
#include "client/cli/bench/slices.h"

#include <algorithm>
#include <cmath>

#include "client/cli/bench/process_cpu.h"

namespace attend::cli {
namespace {

using std::chrono::duration;

// A run has about ten slices of each side, none longer than what drifts slowly.
constexpr double kSlicesPerRun = 20;
constexpr double kShortestSeconds = 0.02;
constexpr double kLongestSeconds = 0.5;

size_t SideOf(int64_t slice) { return static_cast<size_t>(slice % 2); }

}  // namespace

Slices::Budget Slices::BudgetOf(double seconds, int64_t requests, int64_t workers) {
  Budget budget;
  budget.seconds = std::clamp(seconds / kSlicesPerRun, kShortestSeconds, kLongestSeconds);
  if (requests == 0) return budget;
  budget.requests_each = requests;
  const auto tenth =
      static_cast<int64_t>(std::ceil(static_cast<double>(requests) * 2 / kSlicesPerRun));
  budget.requests = std::max(tenth, std::min(workers, requests));
  return budget;
}

bool Slices::IsOver(Clock::time_point now) const {
  if (slice_ < 0) return true;
  if (budget_.requests == 0) return now - began_ >= duration<double>(budget_.seconds);
  return granted_ >= budget_.requests || granted_each_[SideOf(slice_)] >= budget_.requests_each;
}

Slices::Sum Slices::CurrentUntil(Clock::time_point until) const {
  if (slice_ < 0 || until <= began_) return {};
  return {.seconds = duration<double>(until - began_).count(),
          .cpu_seconds = CpuSeconds() - cpu_began_};
}

void Slices::BeginNext(Clock::time_point now) {
  if (slice_ >= 0) {
    const Sum ended = CurrentUntil(now);
    Sum& sum = sums_[SideOf(slice_)];
    sum.seconds += ended.seconds;
    sum.cpu_seconds += ended.cpu_seconds;
    open_.erase(slice_);
  }
  ++slice_;
  granted_ = 0;
  began_ = now;
  cpu_began_ = CpuSeconds();
  changed_.notify_all();
}

Slices::Place Slices::NextArrival(ArrivalSchedule& arrivals) {
  const double arrival = arrivals.Next();
  if (budget_.requests == 0) {
    const double slice = std::floor(arrival / budget_.seconds);
    return {.slice = static_cast<int64_t>(slice), .after_begin = arrival - slice * budget_.seconds};
  }
  if (arrivals_in_slice_ >= budget_.requests ||
      arrivals_each_[SideOf(arrival_slice_)] >= budget_.requests_each) {
    ++arrival_slice_;
    arrivals_in_slice_ = 0;
    base_ = last_arrival_;
  }
  ++arrivals_in_slice_;
  ++arrivals_each_[SideOf(arrival_slice_)];
  last_arrival_ = arrival;
  return {.slice = arrival_slice_, .after_begin = arrival - base_};
}

std::optional<Slices::Turn> Slices::Enter(const LoadControl& control, ArrivalSchedule* arrivals) {
  std::unique_lock lock(mutex_);
  std::optional<Place> place;
  if (arrivals != nullptr) {
    place = NextArrival(*arrivals);
    ++open_[place->slice];
  }
  for (;;) {
    if (control.stopped()) return std::nullopt;
    const Clock::time_point now = Clock::now();
    // An arrival's slice takes it however late it is; in a closed loop each slice has a turn.
    const bool fresh = slice_ >= 0 && granted_ == 0;
    const bool mine = place ? place->slice == slice_ : fresh || !IsOver(now);
    if (mine) break;
    // Arrivals are taken in order: whoever waits for a later slice knows that none is still to
    // come.
    const auto open = open_.find(slice_);
    const bool answered = open == open_.end() || open->second == 0;
    const bool over = IsOver(now) || (place && budget_.requests > 0);
    if (answered && over) {
      BeginNext(now);
      continue;
    }
    // The last Leave wakes everyone; before, nothing changes but the time.
    Clock::time_point until = now + LoadControl::kSlice;
    const auto end =
        began_ + std::chrono::duration_cast<Clock::duration>(duration<double>(budget_.seconds));
    if (budget_.requests == 0 && end > now) until = std::min(until, end);
    changed_.wait_until(lock, until);
  }
  const Side side = SideOf(slice_) == 0 ? Side::kServer : Side::kEcho;
  ++granted_;
  ++granted_each_[SideOf(slice_)];
  if (!place) {
    ++open_[slice_];
    return Turn{.side = side, .due = Clock::now()};
  }
  const duration<double> after_begin(place->after_begin);
  return Turn{.side = side,
              .due = began_ + std::chrono::duration_cast<Clock::duration>(after_begin)};
}

void Slices::Leave() {
  const std::lock_guard lock(mutex_);
  left_ = Clock::now();
  if (--open_[slice_] == 0) changed_.notify_all();
}

Slices::Sum Slices::sum(Side side) const {
  const std::lock_guard lock(mutex_);
  Sum sum = sums_[static_cast<size_t>(side)];
  if (slice_ < 0 || SideOf(slice_) != static_cast<size_t>(side)) return sum;
  const Sum current = CurrentUntil(left_);
  return {.seconds = sum.seconds + current.seconds,
          .cpu_seconds = sum.cpu_seconds + current.cpu_seconds};
}

}  // namespace attend::cli
