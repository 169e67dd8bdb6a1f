// SPDX-License-Identifier: Apache-2.0
//
// Barriers of the block and of some of its warps: who has arrived, what that orders, and what is
// wrong with how they were called.
#include <algorithm>

#include "tests/simt/state.h"

namespace attend::simt {
namespace {

void CheckWholeWarps(const Barrier& barrier, Site site) {
  for (int w = 0; w < grid->warps; ++w) {
    if (barrier.lanes[w] != 0 && barrier.lanes[w] != kAllLanes) {
      Violate(Violation::kBarrierMismatch,
              "the barrier is complete with a part of warp " + std::to_string(w), site);
    }
  }
}

// Every access of the barrier's warps before it comes before every one after it.
void OrderWarps(const Barrier& barrier) {
  uint32_t joined[kMaxWarps];
  const int warps = grid->warps;
  for (int v = 0; v < warps; ++v) {
    joined[v] = 0;
    for (int w = 0; w < warps; ++w) {
      if (barrier.lanes[w] != 0) joined[v] = std::max(joined[v], grid->warp[w].clock[v]);
    }
    if (barrier.lanes[v] != 0) joined[v] = grid->warp[v].epoch;
  }
  for (int w = 0; w < warps; ++w) {
    if (barrier.lanes[w] == 0) continue;
    Warp& warp = grid->warp[w];
    AdvanceWarp(warp);
    std::copy(joined, joined + warps, warp.clock);
  }
}

// The running thread arrives and waits; `barrier.expected` is set.
void Arrive(Thread& self, int id, bool value, Site site) {
  Barrier& barrier = grid->barrier[id];
  Warp& warp = *self.warp;
  barrier.value |= value;
  barrier.lanes[warp.index] |= 1u << self.lane;
  ++barrier.arrived;
  self.wait = Wait::kBarrier;
  self.barrier = id;
  self.site = site;
  warp.runnable &= ~(1u << self.lane);
  if (warp.runnable == 0) grid->ready &= ~(1u << warp.index);
  if (barrier.arrived == barrier.expected) {
    CheckWholeWarps(barrier, site);
    OrderWarps(barrier);
    for (int w = 0; w < grid->warps; ++w) {
      if (barrier.lanes[w] != 0) MakeRunnable(grid->warp[w]);
      barrier.lanes[w] = 0;
    }
    barrier.result = barrier.value;
    barrier.value = false;
    barrier.arrived = 0;
  }
  RunOthers(self);
  self.wait = Wait::kNone;
}

}  // namespace

bool BlockBarrier(bool value, Site site) {
  Thread& self = Running();
  Barrier& barrier = grid->barrier[0];
  if (grid->alive != grid->threads) {
    Violate(Violation::kExitedThread,
            "it waits at a barrier of the block, but " +
                std::to_string(grid->threads - grid->alive) + " threads have ended",
            site);
  }
  if (barrier.arrived == 0) {
    barrier.site = site;
    barrier.expected = grid->threads;
    ++counts.block_barriers;
  } else if (!SameSite(barrier.site, site)) {
    Violate(Violation::kBarrierMismatch,
            "other threads of the block wait at the barrier at " + SiteText(barrier.site), site);
  }
  Arrive(self, 0, value, site);
  return barrier.result;
}

void NamedBarrier(int id, int threads, Site site) {
  Thread& self = Running();
  if (id < 1 || id >= kBarriers) {
    Violate(Violation::kArgument, "barrier " + std::to_string(id) + " is not 1..15", site);
  }
  if (threads < kLanes || threads % kLanes != 0 || threads > grid->threads) {
    Violate(Violation::kArgument, std::to_string(threads) + " threads at a barrier", site);
  }
  Barrier& barrier = grid->barrier[id];
  if (barrier.arrived == 0) {
    barrier.site = site;
    barrier.expected = threads;
    ++counts.named_barriers;
  } else if (barrier.expected != threads) {
    Violate(Violation::kBarrierMismatch,
            "barrier " + std::to_string(id) + " of " + std::to_string(threads) +
                " threads has been called with " + std::to_string(barrier.expected) + " at " +
                SiteText(barrier.site),
            site);
  }
  Arrive(self, id, false, site);
}

}  // namespace attend::simt
