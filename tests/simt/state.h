// SPDX-License-Identifier: Apache-2.0
//
// The state of the grid that runs: its block, warps and threads, their clocks, and the shadow of
// shared memory. Private to tests/simt; one Grid exists while RunGrid() runs.
//
// Order of accesses. Each warp has an epoch, advanced by every synchronisation of its 32 lanes, and
// a vector clock: clock[v] is the last epoch of warp v that is known to be over. An access stamped
// (warp v, epoch e, thread t) happened before the running thread's if e <= clock[v], or if t is the
// running thread. Epochs grow over all blocks and grids of the process, so that stamps of earlier
// blocks need no erasing. Shuffles, votes, ldmatrix and mma order nothing, as in the PTX memory
// model; barriers of the block, named barriers and SyncWarp do.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "tests/simt/fibers.h"
#include "tests/simt/hooks.h"
#include "tests/simt/runtime.h"

namespace attend::simt {

inline constexpr int kLanes = 32;
inline constexpr int kMaxThreads = 1024;
inline constexpr int kMaxWarps = kMaxThreads / kLanes;
inline constexpr int kBarriers = 16;  // 0 is SyncThreads'
inline constexpr uint32_t kAllLanes = 0xffffffffu;

// ---- Sites in four bytes ----

// Distance from `place` of the compiler's record of a site, both in this program's image; 0
// unknown.
uint32_t CompactSite(Site site);
std::string SiteText(Site site);
std::string SiteText(uint32_t compact);
bool SameSite(Site a, Site b);

// ---- Threads and warps ----

enum class Wait : uint8_t { kNone, kCollective, kBarrier, kExited };

struct PendingCopy {
  uint32_t group;
  bool valid;
  uintptr_t to;
  uintptr_t from;
  Site site;
};

struct Warp;

struct Thread : Place {
  Fiber fiber;
  Warp* warp = nullptr;
  int lane = 0;
  Wait wait = Wait::kNone;
  int barrier = 0;  // with kBarrier
  Site site;        // of the wait
  std::vector<PendingCopy> copies;
  uint32_t open_group = 0;  // copies started now belong to it
};

enum class Collective : uint8_t { kSync, kShuffleXor, kShuffle, kAny, kLoadMatrix, kProduct };

// What a lane brings to a collective and where its result goes.
struct Operand {
  float value = 0;
  int argument = 0;  // lane or mask; the vote; 1 = transposed; MatrixType
  uint32_t b0 = 0;
  uint32_t b1 = 0;
  uint32_t* words = nullptr;    // ldmatrix: out
  const uint32_t* a = nullptr;  // product
  float* d = nullptr;           // product: in and out
  uintptr_t row = 0;            // ldmatrix
  const SharedRange* range = nullptr;
};

// An access to shared memory whose banks are to be counted.
struct BankAccess {
  uint32_t site;
  uint32_t offset;
  uint16_t bytes;
  uint8_t lane;
};

struct Warp {
  int index = 0;
  uint32_t epoch = 0;
  uint32_t clock[kMaxWarps] = {};
  uint32_t runnable = 0;  // lanes
  uint32_t exited = 0;
  uint32_t arrived = 0;  // at the collective below
  Collective collective = Collective::kSync;
  Site site;
  Operand operands[kLanes];
  std::vector<BankAccess> bank_log;  // since the last synchronisation
};

struct Barrier {
  int arrived = 0;
  int expected = 0;
  bool value = false;   // of the threads that have arrived
  bool result = false;  // of the last time
  Site site;
  uint32_t lanes[kMaxWarps] = {};  // that have arrived, by warp
};

// ---- Shadow of shared memory ----

// Of 4 bytes at an even index; of 2 bytes, and of the 2 that follow at the odd index, once `split`.
struct SharedCell {
  uint32_t epoch;  // of the last write
  uint32_t thread : 10;
  uint32_t in_flight : 1;  // destination of an asynchronous copy of `thread`
  uint32_t split : 1;
  uint32_t site;
};
inline constexpr uint32_t kManyLanes = kLanes;
// The last read of a cell by one warp.
struct ReadMark {
  uint32_t epoch;
  uint32_t lane;  // or kManyLanes
  uint32_t site;
};

// ---- The grid ----

struct Grid {
  Settings settings;
  std::string name;
  int threads = 0;
  int warps = 0;
  int blocks = 0;
  int shared_bytes = 0;
  const std::function<void()>* body = nullptr;
  uint32_t launch_base = 0;  // epochs of this launch are >= this one
  uint32_t block_base = 0;   // of this block
  bool failed = false;

  Fiber main;
  std::vector<Thread> thread;
  Warp warp[kMaxWarps];
  Barrier barrier[kBarriers];
  Warp* running_warp = nullptr;
  uint32_t ready = 0;    // warps with runnable lanes
  bool move_on = false;  // the running warp's turn is over
  int alive = 0;         // threads
  uint64_t random = 1;

  std::byte* shared = nullptr;     // the block's, between red zones
  std::deque<SharedRange> ranges;  // named arrays of the block; addresses are kept
  SharedRange whole = {};          // all of shared memory
  std::vector<SharedCell> cells;
  std::vector<ReadMark> reads;  // [cell][warp]

  uint64_t Random() {  // xorshift
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return random;
  }
};
// Of this OS thread; null while no grid runs.
[[gnu::tls_model("initial-exec")]] extern constinit thread_local Grid* grid;

inline Thread& Running() {
  if (place == nullptr) OutsideKernel();
  return static_cast<Thread&>(const_cast<Place&>(*place));
}

extern Counters counts;

// ---- Calls between the parts ----

// Reports and ends the kernel; from fibers of the grid.
[[noreturn]] void Violate(Violation kind, const std::string& text, Site site);
// Reports; from outside of fibers. `text` is complete.
void AddReport(Violation kind, const std::string& text);
// "thread 37 (warp 1, lane 5)"
std::string ThreadText(int thread);

// The running thread waits: runs others until it is runnable again. Its state is set already.
void RunOthers(Thread& self);
[[noreturn]] void AbandonKernel();
void MakeRunnable(Warp& warp);
// All 32 lanes are ordered: later accesses come after earlier ones.
void AdvanceWarp(Warp& warp);

// Whether a write or read stamped so is unordered with the running thread's accesses.
inline bool Unordered(const Thread& self, uint32_t epoch, uint32_t thread) {
  return epoch > self.warp->clock[thread / kLanes] && thread != static_cast<uint32_t>(self.thread);
}

// Shared memory: prepared for a grid, poisoned for a block.
void PrepareShared(Grid& grid);
void PoisonShared(Grid& grid);
// 16 bytes read by all lanes of the warp at once.
void SharedLoadByWarp(uintptr_t address, const SharedRange* range, Site site);
// The destination of an asynchronous copy: from its start, and when its bytes are there.
void SharedCopyStarted(uintptr_t address, const SharedRange* range, Site site);
void SharedCopyArrived(uintptr_t address, Site site);
void CountBanks(Warp& warp);  // of the log, which ends empty

// Global memory: shadows that count epochs start again.
void ForgetGlobalEpochs();
// Reads of copies: `valid` false only needs the address to be readable.
void GlobalLoadByCopy(uintptr_t address, uintptr_t origin, bool valid, Site site);
// Copies that the ending thread hasn't waited for.
void CheckCopiesAtExit(Thread& self);

void ComputeCollective(Warp& warp);

}  // namespace attend::simt
