// SPDX-License-Identifier: Apache-2.0
//
// Runs grids: blocks one after another, a fiber per thread, in the order that Settings name. Knows
// when threads can move, not what they wait for.
#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>

#include "tests/simt/state.h"

namespace attend::simt {

constinit thread_local const Place* place = nullptr;
constinit thread_local Grid* grid = nullptr;

namespace {

constexpr int kDefaultSharedLimit = 48 * 1024;
// Where epochs start again; a grid must not use the rest up.
constexpr uint32_t kEpochLimit = 0xc0000000u;

std::mutex run_mutex;     // one grid at a time
uint32_t next_epoch = 1;  // by run_mutex

std::mutex limits_mutex;
std::map<const void*, int>& Limits() {  // opted-in shared memory by kernel; by limits_mutex
  static std::map<const void*, int> limits;
  return limits;
}

// The machine: its stacks, threads and shadows live on between grids. By run_mutex.
struct Machine {
  FiberStacks stacks;
  Grid grid;
};
Machine& TheMachine() {
  static Machine machine;
  return machine;
}

// ---- Who runs next ----

int NthBit(uint32_t bits, uint32_t n) {
  while (n-- > 0) bits &= bits - 1;
  return std::countr_zero(bits);
}
int AnyBit(uint32_t bits) {
  return NthBit(bits, static_cast<uint32_t>(grid->Random() >> 32) %
                          static_cast<uint32_t>(std::popcount(bits)));
}
int FirstBit(uint32_t bits) { return std::countr_zero(bits); }
int LastBit(uint32_t bits) { return 31 - std::countl_zero(bits); }

// The warp whose turn it is; some warp is ready.
Warp* PickWarp() {
  const uint32_t ready = grid->ready;
  const Warp* current = grid->running_warp;
  int index = 0;
  switch (grid->settings.order) {
    case Order::kAscending: {  // round robin
      const uint32_t later = current == nullptr ? ready : ready & ~((2ull << current->index) - 1);
      index = FirstBit(later != 0 ? later : ready);
      break;
    }
    case Order::kDescending: {
      const uint32_t earlier = current == nullptr ? ready : ready & ((1u << current->index) - 1);
      index = LastBit(earlier != 0 ? earlier : ready);
      break;
    }
    case Order::kRandom:
      index = AnyBit(ready);
      break;
    case Order::kWarpToBarrier:
      index = FirstBit(ready);
      break;
    case Order::kWarpToBarrierDescend:
      index = LastBit(ready);
      break;
  }
  return &grid->warp[index];
}

// The thread whose turn it is; null when none can run.
Thread* PickThread() {
  if (grid->ready == 0) return nullptr;
  const Order order = grid->settings.order;
  Warp* warp = grid->running_warp;
  const bool to_barrier = order == Order::kWarpToBarrier || order == Order::kWarpToBarrierDescend;
  if (warp == nullptr || warp->runnable == 0 || (grid->move_on && !to_barrier) ||
      order == Order::kRandom) {
    warp = PickWarp();
    grid->running_warp = warp;
  }
  grid->move_on = false;
  const uint32_t lanes = warp->runnable;
  int lane = 0;
  if (order == Order::kAscending || order == Order::kWarpToBarrier) {
    lane = FirstBit(lanes);
  } else if (order == Order::kRandom) {
    lane = AnyBit(lanes);
  } else {
    lane = LastBit(lanes);
  }
  return &grid->thread[warp->index * kLanes + lane];
}

void SwitchTo(Fiber& from, Thread* thread, bool from_ended) {
  ++counts.switches;
  place = thread;
  SwitchFiber(from, thread != nullptr ? thread->fiber : grid->main, from_ended);
}

// After a violation the thread's frames are unwound up to RunThread().
struct KernelAbandoned {};

void EndThread(Thread& self) {
  CheckCopiesAtExit(self);
  Warp& warp = *self.warp;
  if (warp.arrived != 0) {
    Violate(Violation::kExitedThread,
            "it ends while lanes of its warp wait at a collective at " + SiteText(warp.site),
            Site::current());
  }
  if (grid->barrier[0].arrived != 0) {
    Violate(Violation::kExitedThread,
            "it ends while threads of its block wait at the barrier at " +
                SiteText(grid->barrier[0].site),
            Site::current());
  }
  self.wait = Wait::kExited;
  warp.exited |= 1u << self.lane;
  warp.runnable &= ~(1u << self.lane);
  if (warp.runnable == 0) grid->ready &= ~(1u << warp.index);
  --grid->alive;
}

[[noreturn]] void RunThread() {
  FiberStarted(grid->main);
  Thread& self = Running();
  try {
    (*grid->body)();
    EndThread(self);
  } catch (const KernelAbandoned&) {
  }
  SwitchTo(self.fiber, grid->failed ? nullptr : PickThread(), true);
  std::abort();  // nobody switches to an ended thread
}

// ---- Blocks ----

// Lanes that wait, by where: the report of a block that can't go on.
std::string WaitsText() {
  std::map<std::string, std::map<int, uint32_t>> lanes_of;  // wait -> warp -> lanes
  for (const Thread& thread : grid->thread) {
    std::string wait = "ended";
    if (thread.wait == Wait::kCollective) wait = "at the collective at " + SiteText(thread.site);
    if (thread.wait == Wait::kBarrier) {
      wait = "at barrier " + std::to_string(thread.barrier) + " at " + SiteText(thread.site);
    }
    lanes_of[wait][thread.warp->index] |= 1u << thread.lane;
  }
  std::string text;
  for (const auto& [wait, warps] : lanes_of) {
    text += "\n  " + wait + ":";
    for (const auto& [warp, lanes] : warps) {
      char hex[16];
      std::snprintf(hex, sizeof hex, "%08x", lanes);
      text += " warp " + std::to_string(warp) + " lanes " + hex;
    }
  }
  return text;
}

void StartBlock(FiberStacks& stacks, int block) {
  Grid& g = *grid;
  g.block_base = next_epoch;
  g.ready = 0;
  g.running_warp = nullptr;
  g.move_on = false;
  g.alive = g.threads;
  for (int w = 0; w < g.warps; ++w) {
    Warp& warp = g.warp[w];
    warp.index = w;
    warp.epoch = g.block_base;
    for (int v = 0; v < g.warps; ++v) warp.clock[v] = g.block_base - 1;
    warp.exited = warp.arrived = 0;
    warp.runnable = kAllLanes;
    warp.bank_log.clear();
    g.ready |= 1u << w;
  }
  for (Barrier& barrier : g.barrier) barrier = Barrier();
  for (int t = 0; t < g.threads; ++t) {
    Thread& thread = g.thread[t];
    static_cast<Place&>(thread) = {t, g.threads, block, g.blocks};
    thread.warp = &g.warp[t / kLanes];
    thread.lane = t % kLanes;
    thread.wait = Wait::kNone;
    thread.copies.clear();
    thread.open_group = 0;
    stacks.Prepare(thread.fiber, t, &RunThread);
  }
  PoisonShared(g);
}

// False after a violation.
bool RunBlock(FiberStacks& stacks, int block) {
  StartBlock(stacks, block);
  SwitchTo(grid->main, PickThread(), false);
  ++counts.blocks;
  for (int w = 0; w < grid->warps; ++w) {
    next_epoch = std::max(next_epoch, grid->warp[w].epoch + 1);
    CountBanks(grid->warp[w]);
  }
  if (!grid->failed && grid->alive > 0) {
    grid->failed = true;
    AddReport(Violation::kDivergence, "no thread can go on in kernel " + grid->name + ", block " +
                                          std::to_string(block) + "; order " +
                                          OrderName(grid->settings.order) + ", seed " +
                                          std::to_string(grid->settings.seed) + WaitsText());
  }
  return !grid->failed;
}

// The `i`th block to run of `blocks`: a permutation by the seed that needs no memory.
struct BlockOrder {
  BlockOrder(const Settings& settings, int64_t count) : blocks(count) {
    if (settings.order == Order::kDescending) {
      factor = blocks - 1;
      first = blocks - 1;
    } else if (settings.order != Order::kAscending) {
      first = static_cast<int64_t>(settings.seed * 0x9e3779b97f4a7c15u >> 33) % blocks;
      factor = static_cast<int64_t>(settings.seed * 0xbf58476d1ce4e5b9u >> 33) % blocks;
      while (std::gcd(factor, blocks) != 1) ++factor;
    }
  }
  int Block(int64_t i) const { return static_cast<int>((first + factor * i) % blocks); }
  int64_t blocks;
  int64_t factor = 1;
  int64_t first = 0;
};

}  // namespace

void RunOthers(Thread& self) {
  Thread* next = PickThread();
  if (next == &self) return;
  SwitchTo(self.fiber, next, false);
}

void AbandonKernel() {
  grid->failed = true;
  throw KernelAbandoned();
}

void MakeRunnable(Warp& warp) {
  warp.runnable = kAllLanes & ~warp.exited;
  if (warp.runnable != 0) grid->ready |= 1u << warp.index;
  if (&warp == grid->running_warp) grid->move_on = true;
}

void AdvanceWarp(Warp& warp) {
  warp.clock[warp.index] = warp.epoch;
  ++warp.epoch;
  if (!warp.bank_log.empty()) CountBanks(warp);
}

bool RunGrid(const char* name, const device::LaunchShape& shape,
             const std::function<void()>& thread_body) {
  const std::lock_guard lock(run_mutex);
  Machine& machine = TheMachine();
  Grid& g = machine.grid;
  g.settings = settings();
  g.name = name;
  g.threads = shape.threads;
  g.warps = (shape.threads + kLanes - 1) / kLanes;
  g.blocks = static_cast<int>(shape.blocks);
  g.shared_bytes = shape.shared_bytes;
  g.body = &thread_body;
  g.failed = false;
  g.main = Fiber();
  g.thread.resize(shape.threads);
  g.random = g.settings.seed * 0x9e3779b97f4a7c15u | 1;
  if (next_epoch > kEpochLimit) {
    next_epoch = 1;
    ForgetGlobalEpochs();
    g.cells.clear();
    g.reads.clear();
  }
  g.launch_base = next_epoch;
  machine.stacks.Reserve(shape.threads);
  PrepareShared(g);
  grid = &g;
  const BlockOrder order(g.settings, shape.blocks);
  for (int64_t i = 0; i < shape.blocks && !g.failed; ++i) RunBlock(machine.stacks, order.Block(i));
  grid = nullptr;
  place = nullptr;
  return !g.failed;
}

[[gnu::weak]] cudaError_t Enqueue(cudaStream_t, const char* name, const device::LaunchShape& shape,
                                  std::function<void()> thread_body) {
  return RunGrid(name, shape, thread_body) ? cudaSuccess : cudaErrorLaunchFailure;
}

bool CheckLaunch(const void* kernel, const char* name, const device::LaunchShape& shape) {
  int shared_limit = kDefaultSharedLimit;
  {
    const std::lock_guard lock(limits_mutex);
    const auto found = Limits().find(kernel);
    if (found != Limits().end()) shared_limit = found->second;
  }
  std::string fault;
  if (shape.blocks < 1 || shape.blocks > 0x7fffffff) {
    fault = std::to_string(shape.blocks) + " blocks";
  } else if (shape.threads < 1 || shape.threads > kMaxThreads || shape.threads % kLanes != 0) {
    fault = std::to_string(shape.threads) + " threads a block, not 32 to 1024 in whole warps";
  } else if (shape.shared_bytes < 0 || shape.shared_bytes > shared_limit) {
    fault = std::to_string(shape.shared_bytes) + " bytes of shared memory, allowed are " +
            std::to_string(shared_limit);
  }
  if (fault.empty()) return true;
  AddReport(Violation::kLaunch, "kernel " + std::string(name) + ": " + fault);
  return false;
}

cudaError_t AllowSharedBytes(const void* kernel, int bytes) {
  if (bytes < 0 || bytes > settings().shared_limit) return cudaErrorInvalidValue;
  const std::lock_guard lock(limits_mutex);
  Limits()[kernel] = bytes;
  return cudaSuccess;
}

}  // namespace attend::simt
