// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/limits.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <thread>

#include "engine/util/status_macros.h"
#include "tests/bench/probe_kernels.h"

namespace attend::bench {
namespace {

using Clock = std::chrono::steady_clock;

void Pin(const std::vector<int>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  sched_setaffinity(0, sizeof(set), &set);  // where it fails the threads run where they like
}

// Runs `work(thread)` `slices` times on one pinned thread a core, all at once; the seconds of each
// slice, from the first that begins to the last that ends.
std::vector<double> RunTogether(const std::vector<int>& cores, int slices,
                                const std::function<void(int)>& work) {
  const auto count = static_cast<int>(cores.size());
  std::atomic<int> arrived{0};
  std::vector<std::vector<Clock::time_point>> begin(cores.size()), end(cores.size());
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < count; ++thread) {
    threads.emplace_back([&, thread] {
      const auto index = static_cast<size_t>(thread);
      Pin({cores[index]});
      for (int slice = 0; slice < slices; ++slice) {
        arrived.fetch_add(1);
        // Spinning: who sleeps begins late. Yielding once in a while, should two share a core.
        for (int spins = 1; arrived.load() < count * (slice + 1); ++spins) {
          if (spins % 4096 == 0) std::this_thread::yield();
        }
        begin[index].push_back(Clock::now());
        work(thread);
        end[index].push_back(Clock::now());
      }
    });
  }
  threads.clear();  // joins
  std::vector<double> seconds;
  for (size_t slice = 0; slice < static_cast<size_t>(slices); ++slice) {
    Clock::time_point first = begin[0][slice], last = end[0][slice];
    for (size_t thread = 1; thread < cores.size(); ++thread) {
      first = std::min(first, begin[thread][slice]);
      last = std::max(last, end[thread][slice]);
    }
    seconds.push_back(std::chrono::duration<double>(last - first).count());
  }
  return seconds;
}

// About 1 ms each; the best of them, since whatever disturbs makes it slower.
constexpr int64_t kRounds = 1 << 18;
constexpr int kSlices = 12;

double MeasureOperations(const std::vector<int>& cores, double (*probe)(int64_t)) {
  const auto seconds = RunTogether(cores, kSlices, [&](int) { probe(kRounds); });
  return probe(1) * static_cast<double>(kRounds * static_cast<int64_t>(cores.size())) /
         *std::min_element(seconds.begin(), seconds.end());
}

int64_t SecondLevelBytes() {
  const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return bytes > 0 ? bytes : int64_t{512} << 10;
}

// A page for each 4 KiB, different bytes: equal pages may be merged, and zero pages are shared.
void Fill(std::byte* data, int64_t bytes) {
  auto* words = reinterpret_cast<uint64_t*>(data);
  for (int64_t i = 0; i < bytes / 8; ++i) words[i] = static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u;
}

}  // namespace

double Limits::Operations(DType dtype) const {
  switch (dtype) {
    case DType::kF32:
      return fma;
    case DType::kBF16:
      return dot;
    case DType::kI8:
      return int8;
    default:
      return 0;
  }
}

Limits Mean(const Limits& before, const Limits& after) {
  const auto mean = [](double a, double b) { return a == 0 || b == 0 ? 0 : (a + b) / 2; };
  return {mean(before.fma, after.fma), mean(before.dot, after.dot), mean(before.int8, after.int8),
          mean(before.read, after.read), mean(before.cache_read, after.cache_read)};
}

double Moved(double before, double after) {
  if (before == 0 || after == 0) return 1;
  return std::max(before, after) / std::min(before, after);
}

LimitProbe::LimitProbe(std::vector<int> cores, bool wide)
    : cores_(std::move(cores)), wide_(wide && DetectProbes().avx512) {}

absl::Status LimitProbe::ReserveRead(int64_t bytes) {
  if (bytes <= reserved_) return absl::OkStatus();
  reserved_ = 0;
  RETURN_IF_ERROR(memory_.Allocate(bytes));
  const auto count = static_cast<int64_t>(cores_.size());
  const int64_t piece = bytes / count / 8 * 8;
  RunTogether(cores_, 1, [&](int thread) { Fill(memory_.data() + thread * piece, piece); });
  reserved_ = bytes;
  return absl::OkStatus();
}

// Each thread reads a piece of its own. The best of all ways to read: which one it is depends on
// the processor, the cache level and the neighbours.
double LimitProbe::MeasureRead(int64_t bytes) {
  constexpr double kLeastBytes = 32 << 20;  // of a slice: about 1 ms from memory
  bytes = std::min(bytes, reserved_);
  const auto count = static_cast<int64_t>(cores_.size());
  const int64_t piece = bytes / count / 4096 * 4096;
  if (piece == 0) return 0;
  const auto times =
      static_cast<int64_t>(std::ceil(kLeastBytes / static_cast<double>(piece * count)));
  const bool avx512 = DetectProbes().avx512;
  // One slice of a large buffer is long enough; the first of a small one brings it into the caches.
  const int slices = times == 1 && bytes > 4 * static_cast<int64_t>(kLeastBytes) ? 1 : 3;
  double best = 0;
  for (const int streams : {1, 2, 4, 8}) {
    for (const int64_t ahead : {0, 1024}) {
      const auto seconds = RunTogether(cores_, slices, [&](int thread) {
        for (int64_t i = 0; i < times; ++i) {
          ReadMemory(avx512, memory_.data() + thread * piece, piece, streams, ahead);
        }
      });
      const double least = *std::min_element(seconds.begin(), seconds.end());
      best = std::max(best, static_cast<double>(piece * count * times) / least);
    }
  }
  return best;
}

Limits LimitProbe::Measure(const LimitsWanted& wanted) {
  const ProbeSet set = DetectProbes();
  Limits limits;
  limits.fma = MeasureOperations(cores_, wide_ ? RunFma512 : RunFma256);
  if (wanted.dot && wide_ && set.bf16_dot) limits.dot = MeasureOperations(cores_, RunBF16Dot);
  if (wanted.int8 && wide_ && set.int8_dot) limits.int8 = MeasureOperations(cores_, RunInt8Dot);
  if (wanted.read_bytes > 0) limits.read = MeasureRead(wanted.read_bytes);
  if (wanted.cache_read) {
    const auto count = static_cast<int64_t>(cores_.size());
    limits.cache_read = MeasureRead(SecondLevelBytes() / 2 * count);
  }
  return limits;
}

double LimitProbe::OperationsPerCycle() {
  const auto probe = wide_ ? RunFma512 : RunFma256;
  constexpr int64_t kChain = 1 << 20;
  const std::vector<int> core = {cores_.front()};
  const auto chain = RunTogether(core, kSlices, [](int) { RunCycles(kChain); });
  const double clock = RunCycles(8) / 8 * kChain / *std::min_element(chain.begin(), chain.end());
  return MeasureOperations(core, probe) / clock;
}

std::vector<int> AllowedCores(int count) {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return {0};
  for (int core = 0; core < CPU_SETSIZE && static_cast<int>(cores.size()) < count; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

void RunOnCores(const std::vector<int>& cores) { Pin(cores); }

}  // namespace attend::bench
