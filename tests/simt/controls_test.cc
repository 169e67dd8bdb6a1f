// SPDX-License-Identifier: Apache-2.0
//
// The emulated device as a checker: small pipelined kernels, right in every order, and the same
// kernels broken in one place, each of which must be caught. A broken kernel that passes here means
// that a fault in the engine's kernels would pass too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "engine/cuda/device.h"
#include "tests/simt/device_array.h"
#include "tests/simt/simt.h"

namespace attend {
namespace {

using namespace device;  // NOLINT: as kernels do
using simt::CaptureReports;
using simt::DeviceArray;
using simt::Violation;

// ---- The pipeline ----

enum class Fault {
  kNone,
  kNoWait,
  kWaitForOneLess,      // one group too many is left unfinished
  kNoCommit,            // of the copies after the first two tiles
  kNoBarrierAfterWait,  // others' copies are read
  kCopyBeforeBarrier,   // into a stage that others still read
  kStaleStage,          // the tile before is read again
  kPredicateOneTooFar,  // a chunk past the input is read
  kZeroFillMissing,     // chunks past the input keep what they held
  kCopyAfterTheLastTile,
  kExitBeforeBarrier,
  kTwoBarriers,      // each warp at its own
  kHalfShuffle,      // by half of the lanes
  kTwoShuffles,      // each half of the lanes in its own
  kReadBeforeWrite,  // of shared memory
  kOverrun,          // of a shared array into the next one
  kBeyondShared,
  kMisaligned,
  kLastOutputMissing,
  kOutputOneTooFar,
  kTwoBlocksOneOutput,
};

struct PipelineParams {
  const float* in;  // [chunks][4]
  float* out;       // [blocks][kThreads]
  int64_t chunks;
  Fault fault;
};
constexpr int kThreads = 64;
constexpr int kBlocks = 2;
constexpr int kStages = 3;
constexpr int kTileFloats = kThreads * 4;
constexpr int kTilesBytes = kStages * kTileFloats * 4;
constexpr int kPipelineSharedBytes = kTilesBytes + kThreads * 4;

// Copies this thread's chunk of a tile into the tile's stage; zeros past the input.
void CopyChunk(const PipelineParams& params, Shared<float> tiles, int64_t tile) {
  const int64_t chunk = tile * kThreads + ThreadIndex();
  const bool valid =
      params.fault == Fault::kPredicateOneTooFar ? chunk <= params.chunks : chunk < params.chunks;
  if (params.fault == Fault::kZeroFillMissing && !valid) return;
  const int stage = static_cast<int>(tile % kStages) * kTileFloats;
  CopyAsync16(tiles + stage + ThreadIndex() * 4, Global(params.in) + (valid ? chunk * 4 : 0),
              valid);
}

// Each thread's sum, over all tiles, of three floats that others copied; added to the neighbour's
// sum (lane ^ 1), times 1 + block.
__global__ void __launch_bounds__(kThreads)
    Pipeline(const __grid_constant__ PipelineParams params) {
  const Fault fault = params.fault;
  const int thread = ThreadIndex();
  const Shared<float> tiles = SharedArray<float>("tiles", 0, kStages * kTileFloats);
  const Shared<float> sums = SharedArray<float>("sums", kTilesBytes, kThreads);
  const int64_t count = (params.chunks + kThreads - 1) / kThreads;
  for (int64_t tile = 0; tile < kStages - 1; ++tile) {
    if (tile < count) CopyChunk(params, tiles, tile);
    CommitCopies();
  }
  float sum = 0;
  for (int64_t tile = 0; tile < count; ++tile) {
    const int64_t next = tile + kStages - 1;
    const bool copies = next < count || fault == Fault::kCopyAfterTheLastTile;
    if (fault == Fault::kCopyBeforeBarrier) {
      if (copies) CopyChunk(params, tiles, next);
      CommitCopies();
    }
    if (fault == Fault::kWaitForOneLess || fault == Fault::kCopyBeforeBarrier) {
      WaitCopies<kStages - 1>();
    } else if (fault != Fault::kNoWait) {
      WaitCopies<kStages - 2>();
    }
    if (fault == Fault::kTwoBarriers && thread < 32) {
      SyncThreads();
    } else if (fault != Fault::kNoBarrierAfterWait) {
      SyncThreads();
    }
    if (fault != Fault::kCopyBeforeBarrier) {
      if (copies) CopyChunk(params, tiles, next);
      if (fault != Fault::kNoCommit) CommitCopies();
    }
    const int64_t read = fault == Fault::kStaleStage && tile > 0 ? tile - 1 : tile;
    const Shared<float> stage = tiles + static_cast<int>(read % kStages) * kTileFloats;
    for (int i = 0; i < 3; ++i) sum += stage[(thread * 4 + 129 + i) % kTileFloats];
  }
  if (fault == Fault::kExitBeforeBarrier && thread == kThreads - 1) return;
  if (fault != Fault::kReadBeforeWrite) sums[thread] = sum;
  if (fault == Fault::kOverrun) tiles[kStages * kTileFloats + thread] = sum;
  if (fault == Fault::kBeyondShared) sums[kThreads + thread] = sum;
  SyncThreads();
  const float own = sums[thread];
  if (fault == Fault::kMisaligned) Load16(sums + 2);
  float other = 0;
  if (fault == Fault::kHalfShuffle) {
    if (thread % 32 < 16) other = ShuffleXor(own, 1);
  } else if (fault == Fault::kTwoShuffles) {
    other = thread % 32 < 16 ? ShuffleXor(own, 1) : ShuffleXor(own, 1);
  } else {
    other = ShuffleXor(own, 1);
  }
  if (fault == Fault::kLastOutputMissing && thread == kThreads - 1) return;
  const int64_t block = fault == Fault::kTwoBlocksOneOutput ? 0 : BlockIndex();
  const int64_t index = block * kThreads + thread + (fault == Fault::kOutputOneTooFar ? 1 : 0);
  Global(params.out)[index] = (own + other) * static_cast<float>(1 + BlockIndex());
}

std::vector<float> PipelineInput(int64_t chunks) {
  std::vector<float> in(chunks * 4);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i * 37 % 251);
  return in;
}

std::vector<float> PipelineOutput(const std::vector<float>& in) {
  std::vector<float> sums(kThreads, 0.0f);
  for (size_t tile = 0; tile < in.size(); tile += kTileFloats) {
    for (int thread = 0; thread < kThreads; ++thread) {
      for (int i = 0; i < 3; ++i) {
        const size_t at = tile + (thread * 4 + 129 + i) % kTileFloats;
        sums[thread] += at < in.size() ? in[at] : 0.0f;
      }
    }
  }
  std::vector<float> out;
  for (int i = 0; i < kBlocks * kThreads; ++i) {
    const int thread = i % kThreads;
    out.push_back((sums[thread] + sums[thread ^ 1]) * static_cast<float>(1 + i / kThreads));
  }
  return out;
}

// What a run showed: reports, and what a test of the kernel would see.
struct Outcome {
  std::vector<simt::Report> reports;
  bool unwritten = false;
  bool wrong = false;

  bool Reported(std::initializer_list<Violation> kinds) const {
    return std::any_of(reports.begin(), reports.end(), [&](const simt::Report& report) {
      return std::find(kinds.begin(), kinds.end(), report.kind) != kinds.end();
    });
  }
  std::string Text() const {
    std::string text = unwritten ? "unwritten output " : "";
    text += wrong ? "wrong output " : "";
    for (const simt::Report& report : reports) text += "\n" + report.text;
    return text.empty() ? "nothing" : text;
  }
};

Outcome RunPipeline(Fault fault, int64_t chunks) {
  const std::vector<float> in = PipelineInput(chunks);
  const DeviceArray<float> device_in(in, "in");
  const DeviceArray<float> out(kBlocks * kThreads, "out");
  const CaptureReports capture;
  Launch(Pipeline, "Pipeline", {kBlocks, kThreads, kPipelineSharedBytes},
         PipelineParams{device_in.data(), out.data(), chunks, fault}, nullptr);
  return {capture.reports(), !out.Written(), out.values() != PipelineOutput(in)};
}

// Calls f() for every order, both times at which copies arrive, and some seeds.
template <class F>
void InEveryOrder(const F& f) {
  for (const simt::Order order : simt::kAllOrders) {
    for (const simt::CopyTime copies : {simt::CopyTime::kAtWait, simt::CopyTime::kAtIssue}) {
      for (const uint64_t seed : {1, 2, 3}) {
        const simt::ScopedSettings scoped({.seed = seed, .order = order, .copies = copies});
        SCOPED_TRACE(std::string("order ") + simt::OrderName(order) + ", seed " +
                     std::to_string(seed) +
                     (copies == simt::CopyTime::kAtWait ? ", at wait" : ", at issue"));
        f();
      }
    }
  }
}

constexpr int64_t kFourTiles = 4 * kThreads - 30;
constexpr int64_t kThreeTiles = 3 * kThreads - 30;

void ExpectReported(Fault fault, std::initializer_list<Violation> kinds,
                    int64_t chunks = kFourTiles) {
  InEveryOrder([&] {
    const Outcome outcome = RunPipeline(fault, chunks);
    EXPECT_TRUE(outcome.Reported(kinds)) << "seen: " << outcome.Text();
    EXPECT_EQ(outcome.reports.size(), 1u);  // the first one ends the kernel
  });
}

TEST(ControlsTest, TheUnbrokenPipelinePassesInEveryOrder) {
  for (const int64_t chunks :
       {int64_t{1}, int64_t{kThreads}, kThreeTiles, kFourTiles, int64_t{7 * kThreads}}) {
    InEveryOrder([&] {
      const Outcome outcome = RunPipeline(Fault::kNone, chunks);
      EXPECT_EQ(outcome.Text(), "nothing");
    });
  }
}

TEST(ControlsTest, MissingWait) { ExpectReported(Fault::kNoWait, {Violation::kCopyInFlight}); }
TEST(ControlsTest, WrongGroupCount) {
  ExpectReported(Fault::kWaitForOneLess, {Violation::kCopyInFlight});
}
TEST(ControlsTest, MissingCommit) { ExpectReported(Fault::kNoCommit, {Violation::kCopyInFlight}); }
TEST(ControlsTest, MissingBarrierAfterTheWait) {
  ExpectReported(Fault::kNoBarrierAfterWait, {Violation::kSharedRace, Violation::kCopyInFlight,
                                              Violation::kSharedUninitialized});
}
TEST(ControlsTest, StageOverwrittenWhileOthersReadIt) {
  ExpectReported(Fault::kCopyBeforeBarrier, {Violation::kSharedRace, Violation::kCopyInFlight});
}
TEST(ControlsTest, StaleStage) {
  ExpectReported(Fault::kStaleStage, {Violation::kSharedRace, Violation::kCopyInFlight});
  // Where no later tile overwrites it, only values can tell.
  InEveryOrder([] { EXPECT_TRUE(RunPipeline(Fault::kStaleStage, 2 * kThreads).wrong); });
}
TEST(ControlsTest, PredicateOneTooFar) {
  ExpectReported(Fault::kPredicateOneTooFar, {Violation::kGlobalRange});
}
TEST(ControlsTest, MissingZeroFill) {
  ExpectReported(Fault::kZeroFillMissing, {Violation::kSharedUninitialized}, kThreeTiles);
  // A stage that was used before holds an older tile.
  InEveryOrder([] { EXPECT_TRUE(RunPipeline(Fault::kZeroFillMissing, kFourTiles).wrong); });
}
TEST(ControlsTest, CopiesOutstandingAtTheEnd) {
  ExpectReported(Fault::kCopyAfterTheLastTile, {Violation::kOutstandingCopies});
}
TEST(ControlsTest, ThreadEndedBeforeABarrier) {
  ExpectReported(Fault::kExitBeforeBarrier, {Violation::kExitedThread});
}
TEST(ControlsTest, WarpsAtDifferentBarriers) {
  ExpectReported(Fault::kTwoBarriers, {Violation::kBarrierMismatch});
}
TEST(ControlsTest, DivergentCollectives) {
  ExpectReported(Fault::kHalfShuffle, {Violation::kExitedThread});
  ExpectReported(Fault::kTwoShuffles, {Violation::kDivergence});
}
TEST(ControlsTest, UninitialisedSharedMemory) {
  ExpectReported(Fault::kReadBeforeWrite, {Violation::kSharedUninitialized});
}
TEST(ControlsTest, SharedArraysOverrun) {
  ExpectReported(Fault::kOverrun, {Violation::kSharedRange});
  ExpectReported(Fault::kBeyondShared, {Violation::kSharedRange});
  EXPECT_NE(RunPipeline(Fault::kOverrun, kFourTiles)
                .Text()
                .find("byte 3072 of 'tiles' (3072 bytes), which is byte 0 of 'sums' (256 bytes)"),
            std::string::npos);
}
TEST(ControlsTest, MisalignedVector) {
  ExpectReported(Fault::kMisaligned, {Violation::kAlignment});
}
TEST(ControlsTest, Outputs) {
  ExpectReported(Fault::kOutputOneTooFar, {Violation::kGlobalRange});
  ExpectReported(Fault::kTwoBlocksOneOutput, {Violation::kGlobalRace});
  InEveryOrder([] {
    const Outcome outcome = RunPipeline(Fault::kLastOutputMissing, kFourTiles);
    EXPECT_TRUE(outcome.unwritten);
    EXPECT_TRUE(outcome.reports.empty());
  });
}

TEST(ControlsTest, UninitialisedInput) {
  InEveryOrder([] {
    const DeviceArray<float> in(PipelineInput(kFourTiles), "in");
    simt::MarkUninitialized(in.data() + in.size() - 1, 1);  // one byte
    const DeviceArray<float> out(kBlocks * kThreads, "out");
    const CaptureReports capture;
    EXPECT_EQ(Launch(Pipeline, "Pipeline", {kBlocks, kThreads, kPipelineSharedBytes},
                     PipelineParams{in.data(), out.data(), kFourTiles, Fault::kNone}, nullptr),
              cudaErrorLaunchFailure);
    EXPECT_TRUE(capture.Has(Violation::kGlobalUninitialized)) << capture.Text();
  });
}

// ---- Small kernels ----

struct SmallParams {
  float* data;
  int64_t stride;
  int variant;
};

// Runs `kernel` with one block of 64 threads in every order; `kinds` empty: it must pass.
void ExpectSmall(void (*kernel)(SmallParams), const SmallParams& params,
                 std::initializer_list<Violation> kinds) {
  InEveryOrder([&] {
    const CaptureReports capture;
    Launch(kernel, "Small", {1, kThreads, 1024}, params, nullptr);
    const Outcome outcome = {capture.reports()};
    EXPECT_EQ(outcome.Reported(kinds), kinds.size() > 0) << "seen: " << outcome.Text();
    EXPECT_EQ(outcome.reports.empty(), kinds.size() == 0) << "seen: " << outcome.Text();
  });
}

// Lanes exchange values through shared memory; variant 1 without the warp's synchronisation, 2 with
// a shuffle instead, 3 without the second synchronisation.
__global__ void ThroughShared(const __grid_constant__ SmallParams params) {
  const int lane = ThreadIndex() % 32;
  const Shared<float> slots = SharedArray<float>("slots", 0, kThreads) + (ThreadIndex() - lane);
  for (int i = 0; i < 2; ++i) {
    slots[lane] = 1;
    if (params.variant == 2) ShuffleXor(1, 1);
    if (params.variant == 0 || params.variant == 3) SyncWarp();
    const float other = slots[31 - lane];
    static_cast<void>(other);
    if (params.variant == 0) SyncWarp();
  }
}

TEST(ControlsTest, ExchangeWithinAWarpNeedsSyncWarp) {
  ExpectSmall(ThroughShared, {nullptr, 0, 0}, {});
  ExpectSmall(ThroughShared, {nullptr, 0, 1},
              {Violation::kSharedRace, Violation::kSharedUninitialized});
  ExpectSmall(ThroughShared, {nullptr, 0, 2}, {Violation::kSharedRace});
  ExpectSmall(ThroughShared, {nullptr, 0, 3}, {Violation::kSharedRace});
}

// A matrix is stored by the lanes that name its rows; variant 1 without synchronisation, variant 2
// stores again without one.
__global__ void MatrixThroughShared(const __grid_constant__ SmallParams params) {
  const Shared<float> row = SharedArray<float>("rows", 0, kThreads * 4) + ThreadIndex() * 4;
  Store16(row, Vector16{});
  if (params.variant != 1) SyncWarp();
  uint32_t words[4];
  LoadMatrix4(words, row);
  if (params.variant != 2) SyncWarp();
  Store16(row, Vector16{});
}

TEST(ControlsTest, MatricesAreReadByTheWholeWarp) {
  ExpectSmall(MatrixThroughShared, {nullptr, 0, 0}, {});
  ExpectSmall(MatrixThroughShared, {nullptr, 0, 1},
              {Violation::kSharedRace, Violation::kSharedUninitialized});
  ExpectSmall(MatrixThroughShared, {nullptr, 0, 2}, {Violation::kSharedRace});
}

// Two warps by named barriers; variant 1: each waits at another one; 2: different counts; 3: the
// consumer reads without a barrier.
__global__ void Named(const __grid_constant__ SmallParams params) {
  const int warp = ThreadIndex() / 32;
  const Shared<float> slot = SharedArray<float>("slot", 0, 32);
  if (warp == 0) slot[ThreadIndex()] = 1;
  if (params.variant == 3) return;
  SyncNamed(params.variant == 1 ? 1 + warp : 1, params.variant == 2 ? 32 * (1 + warp) : 64);
  if (warp == 1) slot[ThreadIndex() - 32] += 1;
}
__global__ void Unordered(const __grid_constant__ SmallParams params) {
  const Shared<float> slot = SharedArray<float>("slot", 0, 32);
  if (ThreadIndex() < 32) slot[ThreadIndex()] = 1;
  SyncNamed(1 + params.variant * (ThreadIndex() / 32), 64 - 32 * params.variant);
  if (ThreadIndex() >= 32) slot[ThreadIndex() - 32] = 2;
}

TEST(ControlsTest, NamedBarriers) {
  ExpectSmall(Named, {nullptr, 0, 0}, {});
  ExpectSmall(Named, {nullptr, 0, 1}, {Violation::kDivergence});
  ExpectSmall(Unordered, {nullptr, 0, 0}, {});
  ExpectSmall(Unordered, {nullptr, 0, 1}, {Violation::kSharedRace});  // barriers of one warp each
}

// ---- Swizzles ----

struct SwizzleParams {
  uint32_t* words;  // [32][4]
  int store_mask;   // chunk c of row r is stored at c ^ (r & store_mask)
  int load_mask;
};
// 16 rows of 8 chunks of 16 bytes; word w of chunk c of row r holds 64 r + 8 c + w.
__global__ void Swizzle(const __grid_constant__ SwizzleParams params) {
  const int lane = ThreadIndex();
  const Shared<uint32_t> tile = SharedArray<uint32_t>("tile", 0, 16 * 32);
  for (int i = lane; i < 16 * 32; i += 32) {
    const int row = i / 32;
    const int chunk = i % 32 / 4;
    tile[row * 32 + (chunk ^ (row & params.store_mask)) * 4 + i % 4] =
        static_cast<uint32_t>(64 * row + 8 * chunk + i % 4);
  }
  SyncWarp();
  const int row = lane % 16;
  const int chunk = 2 + lane / 16;
  uint32_t words[4];
  LoadMatrix4(words, tile + row * 32 + (chunk ^ (row & params.load_mask)) * 4);
  for (int i = 0; i < 4; ++i) Global(params.words)[lane * 4 + i] = words[i];
}

TEST(ControlsTest, WrongSwizzles) {
  // Conflicts of the load, and whether the words are right.
  const auto run = [](int store_mask, int load_mask) {
    const DeviceArray<uint32_t> words(128, "words");
    simt::ResetCounters();
    Launch(Swizzle, "Swizzle", {1, 32, 2048}, SwizzleParams{words.data(), store_mask, load_mask},
           nullptr);
    bool right = true;
    for (int i = 0; i < 128; ++i) {
      const int row = i / 16 + 8 * (i % 2);
      const int chunk = 2 + i % 4 / 2;
      right &= words[i] == static_cast<uint32_t>(64 * row + 8 * chunk + i / 4 % 4);
    }
    return std::pair(simt::counters().ldmatrix_conflicts, right);
  };
  EXPECT_EQ(run(7, 7), std::pair(int64_t{0}, true));
  EXPECT_EQ(run(0, 0), std::pair(int64_t{4 * 7}, true));
  EXPECT_EQ(run(3, 3), std::pair(int64_t{4}, true));  // two rows to each group of banks
  EXPECT_EQ(run(7, 3).second, false);
}

// Row BlockIndex() + 1 of rows of `stride` elements; variant 1 with an offset of 32 bits.
__global__ void FarRow(const __grid_constant__ SmallParams params) {
  if (ThreadIndex() != 0) return;
  const int64_t row = BlockIndex() + 1;
  const int64_t offset =
      params.variant == 0
          ? row * params.stride
          : static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint64_t>(row * params.stride)));
  Global(params.data)[offset] = 1;
}

TEST(ControlsTest, OffsetsOf32Bits) {
  constexpr int64_t kStride = (int64_t{1} << 31) + 64;
  const simt::SparseBuffer buffer(3 * kStride * sizeof(float), "rows");
  auto* data = reinterpret_cast<float*>(buffer.data());
  ExpectSmall(FarRow, {data, kStride, 0}, {});
  ExpectSmall(FarRow, {data, kStride, 1}, {Violation::kGlobalRange});
}

// Thread t writes element t and reads another's; variant 1 without the barrier, 2 by 16 bytes that
// aren't aligned.
__global__ void ThroughGlobal(const __grid_constant__ SmallParams params) {
  const int thread = ThreadIndex();
  Global<float> data(params.data);
  data[thread] = 1;
  if (params.variant != 1) SyncThreads();
  data[thread + kThreads] = data[kThreads - 1 - thread] * 2.0f;
  if (params.variant == 2) Load16(data + 2);
}

TEST(ControlsTest, ExchangeThroughGlobalMemory) {
  const DeviceArray<float> data(std::vector<float>(2 * kThreads), "data");
  ExpectSmall(ThroughGlobal, {data.data(), 0, 0}, {});
  ExpectSmall(ThroughGlobal, {data.data(), 0, 1}, {Violation::kGlobalRace});
  ExpectSmall(ThroughGlobal, {data.data(), 0, 2}, {Violation::kAlignment});
}

TEST(ControlsTest, PointersStayInTheirAllocation) {
  const DeviceArray<float> first(4, "first");
  const DeviceArray<float> second(4, "second");
  // In range of `second`, but computed from `first`.
  ExpectSmall(FarRow, {first.data(), second.data() - first.data(), 0}, {Violation::kGlobalRange});
  ExpectSmall(FarRow, {first.data(), 3, 0}, {});
  ExpectSmall(FarRow, {first.data(), 4, 0}, {Violation::kGlobalRange});
  ExpectSmall(FarRow, {first.data(), -1, 0}, {Violation::kGlobalRange});
  ExpectSmall(FarRow, {nullptr, 0, 0}, {Violation::kGlobalRange});
}

TEST(ControlsTest, LaunchesADeviceWouldRefuse) {
  const auto launch = [](const LaunchShape& shape) {
    const CaptureReports capture;
    const cudaError_t error = Launch(FarRow, "FarRow", shape, SmallParams{}, nullptr);
    EXPECT_EQ(error == cudaErrorInvalidValue, capture.Has(Violation::kLaunch)) << capture.Text();
    return error;
  };
  EXPECT_EQ(launch({0, 64, 0}), cudaSuccess);  // nothing to do
  EXPECT_EQ(launch({int64_t{1} << 31, 64, 0}), cudaErrorInvalidValue);
  EXPECT_EQ(launch({-1, 64, 0}), cudaErrorInvalidValue);
  EXPECT_EQ(launch({1, 48, 0}), cudaErrorInvalidValue);
  EXPECT_EQ(launch({1, 1056, 0}), cudaErrorInvalidValue);
  EXPECT_EQ(launch({1, 64, 48 * 1024 + 1}), cudaErrorInvalidValue);
  EXPECT_EQ(AllowSharedMemory(FarRow, 99 * 1024 + 1), cudaErrorInvalidValue);
  EXPECT_EQ(AllowSharedMemory(FarRow, 64 * 1024), cudaSuccess);
  EXPECT_EQ(launch({1, 64, 64 * 1024 + 1}), cudaErrorInvalidValue);
  EXPECT_NE(launch({1, 64, 64 * 1024}), cudaErrorInvalidValue);
}

TEST(ControlsTest, ReportsNameBothPlaces) {
  const CaptureReports capture;
  Launch(ThroughShared, "ThroughShared", {1, 32, 1024}, SmallParams{nullptr, 0, 3}, nullptr);
  // Lane 15 has stored again when lane 16 reads what it stored before.
  const std::string text = capture.Text();
  EXPECT_NE(text.find("race in shared memory: read of shared byte 60 of 'slots' (256 bytes) "
                      "unordered with the value written by thread 15 (warp 0, lane 15) at "
                      "controls_test.cc:"),
            std::string::npos)
      << text;
  const size_t first = text.find("controls_test.cc:");
  ASSERT_NE(first, std::string::npos);
  EXPECT_NE(text.find("controls_test.cc:", first + 1), std::string::npos);
  EXPECT_NE(text.find("kernel ThroughShared, block 0, thread 16 (warp 0, lane 16)"),
            std::string::npos);
  EXPECT_NE(text.find("order ascending, seed 1"), std::string::npos);
}

// Without checks only ranges are watched: the fast mode finds no races.
TEST(ControlsTest, FastModeChecksRangesOnly) {
  const simt::ScopedSettings scoped({.checks = false});
  EXPECT_TRUE(RunPipeline(Fault::kNoBarrierAfterWait, kFourTiles).reports.empty());
  EXPECT_TRUE(RunPipeline(Fault::kOutputOneTooFar, kFourTiles).Reported({Violation::kGlobalRange}));
  EXPECT_TRUE(RunPipeline(Fault::kOverrun, kFourTiles).Reported({Violation::kSharedRange}));
  EXPECT_EQ(RunPipeline(Fault::kNone, kFourTiles).Text(), "nothing");
}

__global__ void ReadShared(const __grid_constant__ SmallParams params) {
  const Shared<float> slots = SharedArray<float>("slots", 0, kThreads);
  Global(params.data)[ThreadIndex()] = slots[ThreadIndex()];
  slots[ThreadIndex()] = 1;
}

// What isn't checked is at least NaN, in every block.
TEST(ControlsTest, FastModeReadsNaNWhereNothingWasWritten) {
  const simt::ScopedSettings scoped({.checks = false});
  const DeviceArray<float> data(kThreads, "data");
  Launch(ReadShared, "ReadShared", {2, kThreads, 256}, SmallParams{data.data(), 0, 0}, nullptr);
  for (int i = 0; i < kThreads; ++i) EXPECT_TRUE(std::isnan(data[i]));
}

TEST(ControlsDeathTest, WithoutACaptureAReportEndsTheProcess) {
  EXPECT_DEATH(
      Launch(ThroughShared, "ThroughShared", {1, 32, 1024}, SmallParams{nullptr, 0, 3}, nullptr),
      "simt: race in shared memory");
}

}  // namespace
}  // namespace attend
