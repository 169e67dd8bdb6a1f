// SPDX-License-Identifier: Apache-2.0
//
// The host's side of the emulated device: how kernels are run, what is known about device memory,
// and what is reported. Tests and the stand-in of the CUDA runtime (stand_in_cudart.cc) call it;
// kernels see simt.h only. Grids run one at a time, on the thread that calls RunGrid().
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <string>
#include <vector>

namespace attend::device {

struct LaunchShape {
  int64_t blocks = 0;  // grid.x; 0 launches nothing
  int threads = 0;     // of a block, whole warps
  int shared_bytes = 0;
};

}  // namespace attend::device

namespace attend::simt {

// Where in a kernel something was called; reports print it.
using Site = std::source_location;

// ---- Settings ----

// In what order fibers of a block move. They change places only at synchronisation, so an order
// decides which missing synchronisation gives wrong values; races are found in any order.
enum class Order {
  kAscending,             // lane by lane, and on to the next warp after each warp collective
  kDescending,            // the same from the last warp and lane
  kRandom,                // any runnable lane of any warp
  kWarpToBarrier,         // a warp runs up to a block barrier before another moves
  kWarpToBarrierDescend,  // the same from the last warp
};
inline constexpr std::array kAllOrders = {Order::kAscending, Order::kDescending, Order::kRandom,
                                          Order::kWarpToBarrier, Order::kWarpToBarrierDescend};
const char* OrderName(Order order);

// When the bytes of an asynchronous copy arrive.
enum class CopyTime { kAtWait, kAtIssue };
// In which order a tensor-core product adds its 16 terms and the accumulator.
enum class SumOrder { kAscending, kShuffled };

struct Settings {
  uint64_t seed = 1;
  Order order = Order::kAscending;
  bool checks = true;  // false: no races, no initialisation, no copies in flight; ranges always
  CopyTime copies = CopyTime::kAtWait;
  SumOrder sums = SumOrder::kAscending;
  bool count_banks = false;      // Counters::shared_conflicts
  int shared_limit = 99 * 1024;  // of a block, opted in; 99 KiB is the least of sm_80 and later
};
// Read when a grid starts.
Settings& settings();

// Puts the settings back when it ends.
class ScopedSettings {
 public:
  explicit ScopedSettings(const Settings& changed) : before_(settings()) { settings() = changed; }
  ~ScopedSettings() { settings() = before_; }
  ScopedSettings(const ScopedSettings&) = delete;
  ScopedSettings& operator=(const ScopedSettings&) = delete;

 private:
  Settings before_;
};

// ---- Reports ----

enum class Violation {
  kLaunch,               // a launch's shape
  kArgument,             // an argument of a device function
  kGlobalRange,          // outside the allocation that the pointer came from
  kSharedRange,          // outside the named array
  kAlignment,            // of an address
  kGlobalUninitialized,  // read of device memory that nothing has written
  kSharedUninitialized,  // read of shared memory that this block hasn't written
  kGlobalRace,           // two threads of a grid, one writing, unordered
  kSharedRace,           // two threads of a block, one writing, unordered
  kCopyInFlight,         // access to the destination of an unfinished asynchronous copy
  kOutstandingCopies,    // a thread ended before it had waited for its copies
  kDivergence,           // lanes of a warp at different collectives, or a block that can't go on
  kBarrierMismatch,      // threads of a block at different barriers
  kExitedThread,         // a thread has ended, others wait for it
};
const char* ViolationName(Violation kind);

struct Report {
  Violation kind;
  std::string text;  // kernel, block, warp, thread, what, both call sites, order and seed
};

// A violation ends the kernel. Without a capture it is printed and the process aborts; while one
// exists, the innermost collects it, RunGrid returns false, and what the kernel hadn't done stays
// undone.
class CaptureReports {
 public:
  CaptureReports();
  ~CaptureReports();
  CaptureReports(const CaptureReports&) = delete;
  CaptureReports& operator=(const CaptureReports&) = delete;

  std::vector<Report> reports() const;
  bool Has(Violation kind) const;
  std::string Text() const;  // all reports

 private:
  std::vector<Report> reports_;
  std::vector<Report>* outer_;
};

// What has run since the last ResetCounters().
struct Counters {
  int64_t blocks = 0;
  int64_t switches = 0;  // of fibers
  int64_t block_barriers = 0;
  int64_t named_barriers = 0;
  int64_t warp_syncs = 0;
  int64_t shuffles = 0;  // and votes
  int64_t mma = 0;
  int64_t ldmatrix = 0;
  int64_t ldmatrix_conflicts = 0;  // wavefronts beyond the 4 of an instruction
  int64_t async_copies = 0;
  int64_t shared_wavefronts = 0;  // with Settings::count_banks: of loads, stores, copies' writes
  int64_t shared_conflicts = 0;   // wavefronts beyond the fewest for the bytes accessed
};
const Counters& counters();
void ResetCounters();

// ---- Running ----

// Runs the grid now: thread blocks one after another, `thread_body` once per thread. False after a
// captured violation.
bool RunGrid(const char* name, const device::LaunchShape& shape,
             const std::function<void()>& thread_body);

// Called by device::Launch. The default runs at once; the stand-in of the runtime replaces it and
// queues.
cudaError_t Enqueue(cudaStream_t stream, const char* name, const device::LaunchShape& shape,
                    std::function<void()> thread_body);

// Launch's checks of the shape; reports and returns false when a device would refuse it.
bool CheckLaunch(const void* kernel, const char* name, const device::LaunchShape& shape);
cudaError_t AllowSharedBytes(const void* kernel, int bytes);

// ---- Device memory ----

// Kernels may access registered memory only, and only through pointers into the same registered
// range. New ranges are uninitialised. Any thread may call these.
void RegisterGlobal(const void* base, size_t bytes, const std::string& name);
void UnregisterGlobal(const void* base);
// For what the host or a copy writes. REQUIRES: within one registered range.
void MarkInitialized(const void* data, size_t bytes);
void MarkUninitialized(const void* data, size_t bytes);
// After a copy in device memory: bytes are as written at `to` as they were at `from`. REQUIRES:
// both within registered ranges.
void CopyInitialized(const void* to, const void* from, size_t bytes);
// Whether every byte was written; false outside registered memory.
bool IsInitialized(const void* data, size_t bytes);
bool IsRegistered(const void* data, size_t bytes);

// Zero pages that take memory only where they are touched: for offsets beyond 2^31. Registered,
// uninitialised.
class SparseBuffer {
 public:
  SparseBuffer(size_t bytes, const std::string& name);
  ~SparseBuffer();
  SparseBuffer(const SparseBuffer&) = delete;
  SparseBuffer& operator=(const SparseBuffer&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_;
  size_t bytes_;
};

}  // namespace attend::simt
