// SPDX-License-Identifier: Apache-2.0
//
// The emulated device keeps CUDA's promises and no more: streams, events, copies, memory, graphs,
// errors. Every negative control (a missing wait, a buffer used too soon) has to give wrong values.
#include "tests/simt/stand_in.h"

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "tests/simt/simt.h"
#include "tests/support/seed.h"

namespace attend::simt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kThreads = 32;
constexpr int kSeeds = 40;

struct AddParams {
  float* data;  // [kThreads]
  float value;
};
void AddKernel(AddParams params) {
  device::Global<float> data(params.data);
  const int i = device::ThreadIndex();
  const float before = data[i];
  data[i] = before + params.value;
}
cudaError_t LaunchAdd(float* data, float value, cudaStream_t stream) {
  return device::Launch(AddKernel, "Add", {1, kThreads, 0}, AddParams{data, value}, stream);
}

class StandInTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Use(StreamOrder::kLazy);
    settings().checks = true;
    ASSERT_EQ(cudaStreamCreateWithFlags(&a_, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&b_, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), cudaSuccess);
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&device_), kBytes), cudaSuccess);
    ASSERT_EQ(cudaMallocHost(reinterpret_cast<void**>(&from_), kBytes), cudaSuccess);
    ASSERT_EQ(cudaMallocHost(reinterpret_cast<void**>(&to_), kBytes), cudaSuccess);
  }

  void TearDown() override {
    EXPECT_THAT(TakeViolations(), ElementsAre());
    Use(StreamOrder::kLazy);
    EXPECT_EQ(cudaFree(device_), cudaSuccess);
    EXPECT_EQ(cudaFreeHost(from_), cudaSuccess);
    EXPECT_EQ(cudaFreeHost(to_), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(event_), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(a_), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(b_), cudaSuccess);
    const DeviceUse use = CurrentUse();
    EXPECT_EQ(use.allocations, 0);
    EXPECT_EQ(use.streams + use.events + use.graphs, 0);
    EXPECT_EQ(use.queued, 0);
  }

  static void Use(StreamOrder order, uint64_t seed = 1) {
    DeviceSettings changed;
    changed.order = order;
    changed.seed = seed;
    ConfigureDevice(changed);
  }

  void Fill(float value) { std::fill_n(from_, kThreads, value); }
  void Upload(cudaStream_t stream) {
    ASSERT_EQ(cudaMemcpyAsync(device_, from_, kBytes, cudaMemcpyHostToDevice, stream), cudaSuccess);
  }
  void Download(cudaStream_t stream) {
    ASSERT_EQ(cudaMemcpyAsync(to_, device_, kBytes, cudaMemcpyDeviceToHost, stream), cudaSuccess);
  }
  void Order(cudaStream_t first, cudaStream_t then) {
    ASSERT_EQ(cudaEventRecord(event_, first), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(then, event_, 0), cudaSuccess);
  }
  void Sync(cudaStream_t stream) { ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess); }

  // Runs `program` under every order and kSeeds seeds; how many gave `expected` in to_[0].
  template <class Program>
  int Right(Program program, float expected) {
    int right = 0;
    const uint64_t first_seed = TestSeed();
    for (int run = 0; run < kSeeds + 2; ++run) {
      Use(run == 0   ? StreamOrder::kLazy
          : run == 1 ? StreamOrder::kEager
                     : StreamOrder::kSeeded,
          first_seed + static_cast<uint64_t>(run));
      Fill(0);
      Upload(a_);
      Sync(a_);
      program();
      right += to_[0] == expected;
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    return right;
  }
  static constexpr int kRuns = kSeeds + 2;

  static constexpr size_t kBytes = kThreads * sizeof(float);
  cudaStream_t a_ = nullptr;
  cudaStream_t b_ = nullptr;
  cudaEvent_t event_ = nullptr;
  float* device_ = nullptr;  // [kThreads], in device memory
  float* from_ = nullptr;    // [kThreads], pinned
  float* to_ = nullptr;      // [kThreads], pinned
};

// ---- What runs when ----

TEST_F(StandInTest, OneStreamRunsInOrder) {
  const auto program = [&] {
    Fill(1);
    Upload(a_);
    ASSERT_EQ(LaunchAdd(device_, 2, a_), cudaSuccess);
    ASSERT_EQ(LaunchAdd(device_, 3, a_), cudaSuccess);
    Download(a_);
    Sync(a_);
  };
  EXPECT_EQ(Right(program, 6), kRuns);
}

TEST_F(StandInTest, MissingWaitBetweenStreamsGivesWrongValues) {
  const auto program = [&](bool wait) {
    Fill(7);
    Upload(b_);
    if (wait) Order(b_, a_);
    ASSERT_EQ(LaunchAdd(device_, 1, a_), cudaSuccess);
    Download(a_);
    Sync(a_);
  };
  EXPECT_EQ(Right([&] { program(true); }, 8), kRuns);
  const int right = Right([&] { program(false); }, 8);
  EXPECT_LT(right, kRuns * 9 / 10);
}

TEST_F(StandInTest, TargetOverwrittenBeforeItsReaderRanGivesWrongValues) {
  const auto program = [&](bool wait) {
    Fill(1);
    Upload(a_);
    Sync(a_);
    ASSERT_EQ(LaunchAdd(device_, 1, a_), cudaSuccess);
    Download(a_);
    if (wait) Order(a_, b_);
    Fill(50);
    Upload(b_);
    Sync(b_);
    Sync(a_);
  };
  EXPECT_EQ(Right([&] { program(true); }, 2), kRuns);
  EXPECT_LT(Right([&] { program(false); }, 2), kRuns * 9 / 10);
}

TEST_F(StandInTest, PinnedSourceReusedBeforeItsCopyRanGivesWrongValues) {
  const auto program = [&](bool wait) {
    Fill(3);
    Upload(a_);
    ASSERT_EQ(cudaEventRecord(event_, a_), cudaSuccess);
    if (wait) {
      ASSERT_EQ(cudaEventSynchronize(event_), cudaSuccess);
    }
    Fill(4);
    Download(a_);
    Sync(a_);
  };
  EXPECT_EQ(Right([&] { program(true); }, 3), kRuns);
  EXPECT_LT(Right([&] { program(false); }, 3), kRuns * 9 / 10);
}

TEST_F(StandInTest, PinnedSourceFilledAfterItsCopyWasQueuedGivesWrongValues) {
  const auto program = [&] {
    Fill(3);
    Upload(a_);
    Fill(4);
    Download(a_);
    Sync(a_);
  };
  EXPECT_LT(Right(program, 4), kRuns);
}

TEST_F(StandInTest, PinnedTargetHoldsNothingUntilItsCopyRan) {
  Fill(5);
  Upload(a_);
  to_[3] = 5;
  Download(a_);
  EXPECT_NE(to_[3], 5);
  Sync(a_);
  EXPECT_EQ(to_[3], 5);
  // A target that queued work still reads as its source keeps its bytes.
  ASSERT_EQ(cudaMemcpyAsync(device_, to_, kBytes, cudaMemcpyHostToDevice, a_), cudaSuccess);
  Download(a_);
  Sync(a_);
  EXPECT_EQ(to_[3], 5);
}

TEST_F(StandInTest, PageableMemoryIsStagedAndWaitedFor) {
  std::vector<float> host(kThreads, 9);
  ASSERT_EQ(cudaMemcpyAsync(device_, host.data(), kBytes, cudaMemcpyHostToDevice, a_), cudaSuccess);
  EXPECT_EQ(CurrentUse().queued, 1);
  std::fill(host.begin(), host.end(), 1.0f);
  ASSERT_EQ(cudaMemcpyAsync(host.data(), device_, kBytes, cudaMemcpyDeviceToHost, a_), cudaSuccess);
  EXPECT_EQ(host[31], 9);
}

TEST_F(StandInTest, WaitMeansTheRecordBeforeIt) {
  Fill(0);
  Upload(a_);
  ASSERT_EQ(LaunchAdd(device_, 1, a_), cudaSuccess);
  Order(a_, b_);
  Download(b_);
  ASSERT_EQ(LaunchAdd(device_, 10, a_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, a_), cudaSuccess);
  Sync(b_);
  EXPECT_EQ(to_[0], 1);  // needed the first record only
  EXPECT_GT(CurrentUse().queued, 0);
  ASSERT_EQ(cudaEventSynchronize(event_), cudaSuccess);
  EXPECT_EQ(CurrentUse().queued, 0);
}

TEST_F(StandInTest, EventThatWasNeverRecordedIsComplete) {
  ASSERT_EQ(cudaStreamWaitEvent(a_, event_, 0), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(event_), cudaSuccess);
  EXPECT_EQ(CurrentUse().queued, 0);
}

TEST_F(StandInTest, PollingEnds) {
  for (const StreamOrder order : {StreamOrder::kLazy, StreamOrder::kSeeded}) {
    Use(order);
    Fill(0);
    Upload(a_);
    for (int i = 0; i < 50; ++i) ASSERT_EQ(LaunchAdd(device_, 1, a_), cudaSuccess);
    Order(a_, b_);
    ASSERT_EQ(cudaEventRecord(event_, b_), cudaSuccess);
    int unfinished = 0;
    cudaError_t error = cudaEventQuery(event_);
    for (; error == cudaErrorNotReady; error = cudaEventQuery(event_)) ++unfinished;
    EXPECT_EQ(error, cudaSuccess);
    EXPECT_GT(unfinished, 0);
    EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
    Sync(a_);
  }
}

TEST_F(StandInTest, ElapsedTimeWantsFinishedTimedEvents) {
  cudaEvent_t begin;
  cudaEvent_t end;
  ASSERT_EQ(cudaEventCreateWithFlags(&begin, 0), cudaSuccess);
  ASSERT_EQ(cudaEventCreateWithFlags(&end, 0), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(begin, a_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(end, a_), cudaSuccess);
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorNotReady);
  Sync(a_);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaSuccess);
  EXPECT_GE(milliseconds, 0);
  ASSERT_EQ(cudaEventRecord(event_, a_), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, event_), cudaErrorInvalidValue);
  Sync(a_);
  ASSERT_EQ(cudaEventDestroy(begin), cudaSuccess);
  ASSERT_EQ(cudaEventDestroy(end), cudaSuccess);
}

TEST_F(StandInTest, DestroyedStreamFinishesFirst) {
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  Fill(6);
  Upload(stream);
  Download(stream);
  ASSERT_EQ(cudaEventRecord(event_, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(to_[0], 6);
  EXPECT_EQ(cudaEventSynchronize(event_), cudaSuccess);
}

TEST_F(StandInTest, ThreadsUseTheirStreamsAtOnce) {
  Use(StreamOrder::kSeeded, TestSeed());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      cudaStream_t stream;
      float* data;
      std::vector<float> host(kThreads, static_cast<float>(t));
      ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
      ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&data), kBytes), cudaSuccess);
      ASSERT_EQ(cudaMemcpyAsync(data, host.data(), kBytes, cudaMemcpyHostToDevice, stream),
                cudaSuccess);
      for (int i = 0; i < 20; ++i) ASSERT_EQ(LaunchAdd(data, 1, stream), cudaSuccess);
      ASSERT_EQ(cudaMemcpyAsync(host.data(), data, kBytes, cudaMemcpyDeviceToHost, stream),
                cudaSuccess);
      EXPECT_EQ(host[kThreads - 1], static_cast<float>(t + 20));
      ASSERT_EQ(cudaFree(data), cudaSuccess);
      ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// ---- Graphs ----

TEST_F(StandInTest, GraphRepeatsWhatWasCaptured) {
  const auto program = [&] {
    ASSERT_EQ(cudaStreamBeginCapture(a_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    Upload(a_);
    ASSERT_EQ(LaunchAdd(device_, 1, a_), cudaSuccess);
    ASSERT_EQ(LaunchAdd(device_, 1, a_), cudaSuccess);
    Download(a_);
    ASSERT_EQ(cudaEventRecordWithFlags(event_, a_, cudaEventRecordExternal), cudaSuccess);
    cudaGraph_t graph;
    ASSERT_EQ(cudaStreamEndCapture(a_, &graph), cudaSuccess);
    EXPECT_EQ(cudaEventQuery(event_), cudaSuccess);  // nothing has run or been recorded
    cudaGraphExec_t executable;
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    const int64_t launches = CurrentUse().launches;
    for (const float value : {5.0f, 6.0f}) {
      Fill(value);
      ASSERT_EQ(cudaGraphLaunch(executable, a_), cudaSuccess);
      ASSERT_EQ(cudaEventSynchronize(event_), cudaSuccess);
      EXPECT_EQ(to_[0], value + 2);
    }
    EXPECT_EQ(CurrentUse().launches, launches + 4);
    ASSERT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  };
  EXPECT_EQ(Right(program, 8), kRuns);
}

TEST_F(StandInTest, WhatCapturesForbidBreaksThem) {
  std::vector<float> pageable(kThreads, 0);
  void* memory = nullptr;
  const std::vector<std::function<cudaError_t()>> forbidden = {
      [&] { return cudaMalloc(&memory, 16); },
      [&] { return cudaMallocHost(&memory, 16); },
      [&] { return cudaFree(device_); },
      [&] { return cudaStreamSynchronize(a_); },
      [&] { return cudaDeviceSynchronize(); },
      [&] { return cudaEventSynchronize(event_); },
      [&] { return cudaEventQuery(event_); },
      [&] { return cudaEventRecord(event_, a_); },
      [&] { return cudaStreamWaitEvent(a_, event_, 0); },
      [&] { return cudaMemcpyAsync(device_, pageable.data(), kBytes, cudaMemcpyHostToDevice, a_); },
      [&] { return cudaMemcpyAsync(pageable.data(), device_, kBytes, cudaMemcpyDeviceToHost, a_); },
  };
  for (size_t i = 0; i < forbidden.size(); ++i) {
    ASSERT_EQ(cudaStreamBeginCapture(a_, cudaStreamCaptureModeGlobal), cudaSuccess);
    EXPECT_EQ(forbidden[i](), cudaErrorStreamCaptureUnsupported) << i;
    cudaGraph_t graph;
    EXPECT_EQ(cudaStreamEndCapture(a_, &graph), cudaErrorStreamCaptureUnsupported) << i;
    EXPECT_EQ(graph, nullptr);
  }
  // Another thread's capture forbids nothing here unless it is global.
  for (const auto mode : {cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeGlobal}) {
    std::thread([&] { EXPECT_EQ(cudaStreamBeginCapture(a_, mode), cudaSuccess); }).join();
    EXPECT_EQ(cudaStreamSynchronize(b_), mode == cudaStreamCaptureModeGlobal
                                             ? cudaErrorStreamCaptureUnsupported
                                             : cudaSuccess);
    cudaGraph_t graph;
    EXPECT_EQ(cudaStreamEndCapture(a_, &graph), cudaErrorStreamCaptureUnsupported);
  }
}

// ---- Memory ----

TEST_F(StandInTest, MemoryIsLimited) {
  DeviceSettings changed;
  changed.memory_bytes = 1 << 20;
  ConfigureDevice(changed);
  size_t free = 0;
  size_t total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_EQ(total, size_t{1} << 20);
  EXPECT_EQ(free, total - kBytes);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, free + 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&memory, free), cudaSuccess);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  cudaDeviceProp properties;
  ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  EXPECT_EQ(properties.totalGlobalMem, total);
  EXPECT_STREQ(properties.name, "Emulated device");
}

TEST_F(StandInTest, LargeMemoryIsFullOfNanAndCostsLittle) {
  float* large;
  const size_t bytes = (size_t{3} << 30) + 12;
  ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&large), bytes), cudaSuccess);
  settings().checks = false;
  for (const size_t offset : {size_t{0}, bytes / 8 * 4, bytes - kBytes}) {
    ASSERT_EQ(cudaMemcpyAsync(to_, large + offset / 4, kBytes, cudaMemcpyDeviceToHost, a_),
              cudaSuccess);
    Sync(a_);
    EXPECT_TRUE(std::isnan(to_[0]) && std::isnan(to_[kThreads - 1]));
  }
  EXPECT_EQ(cudaFree(large), cudaSuccess);
}

TEST_F(StandInTest, WrittenStateIsFollowedAndReadsOfUnwrittenBytesFail) {
  float* copy;
  ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&copy), kBytes), cudaSuccess);
  const auto read_back = [&] {
    EXPECT_EQ(cudaMemcpyAsync(copy, device_, kBytes, cudaMemcpyDeviceToDevice, a_), cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(to_, copy, kBytes, cudaMemcpyDeviceToHost, a_), cudaSuccess);
    return cudaStreamSynchronize(a_);
  };
  ASSERT_EQ(cudaMemsetAsync(device_, 0, kBytes - 1, a_), cudaSuccess);
  EXPECT_EQ(read_back(), cudaErrorIllegalAddress);
  EXPECT_THAT(TakeViolations(), ElementsAre(HasSubstr("nothing wrote byte 127")));
  DeviceSettings allowed;
  allowed.copies_of_unwritten = true;
  ConfigureDevice(allowed);
  EXPECT_EQ(read_back(), cudaSuccess);
  Use(StreamOrder::kLazy);
  ASSERT_EQ(cudaMemsetAsync(device_, 0, kBytes, a_), cudaSuccess);
  EXPECT_EQ(read_back(), cudaSuccess);
  EXPECT_EQ(cudaFree(copy), cudaSuccess);
}

TEST_F(StandInTest, RowsAreCopiedByTheirPitches) {
  Fill(0);
  for (int i = 0; i < kThreads; ++i) from_[i] = static_cast<float>(i);
  float* rows;  // 3 rows of 2 out of rows of 5
  ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&rows), 3 * 8), cudaSuccess);
  Upload(a_);
  ASSERT_EQ(cudaMemcpy2DAsync(rows, 8, device_ + 1, 20, 8, 3, cudaMemcpyDeviceToDevice, a_),
            cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(to_, rows, 3 * 8, cudaMemcpyDeviceToHost, a_), cudaSuccess);
  Sync(a_);
  EXPECT_THAT(std::vector<float>(to_, to_ + 6), ElementsAre(1, 2, 6, 7, 11, 12));
  EXPECT_EQ(cudaMemcpy2DAsync(rows, 8, device_ + 1, 20, 8, 4, cudaMemcpyDeviceToDevice, a_),
            cudaErrorInvalidValue);
  EXPECT_EQ(TakeViolations().size(), 1u);
  EXPECT_EQ(cudaFree(rows), cudaSuccess);
}

TEST_F(StandInTest, WrongUsesAreReported) {
  std::vector<float> pageable(kThreads + 1);
  const auto wrong = [](cudaError_t error) {
    EXPECT_EQ(error, cudaErrorInvalidValue);
    EXPECT_EQ(TakeViolations().size(), 1u);
  };
  wrong(cudaMemcpyAsync(device_, from_, kBytes + 1, cudaMemcpyHostToDevice, a_));
  wrong(cudaMemcpyAsync(device_ + 1, pageable.data(), kBytes, cudaMemcpyHostToDevice, a_));
  wrong(cudaMemcpyAsync(device_, from_, kBytes, cudaMemcpyDeviceToHost, a_));
  wrong(cudaMemcpyAsync(to_, from_, kBytes, cudaMemcpyDeviceToDevice, a_));
  wrong(cudaMemcpyAsync(device_, device_ + 1, 8, cudaMemcpyDeviceToDevice, a_));
  wrong(cudaMemsetAsync(device_, 0, kBytes + 1, a_));
  wrong(cudaFree(device_ + 1));
  wrong(cudaFree(from_));
  wrong(cudaFreeHost(device_));
  wrong(cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(device_)));
  wrong(cudaEventRecord(reinterpret_cast<cudaEvent_t>(device_), a_));
}

TEST_F(StandInTest, BytesWrittenBesideAnAllocationAreReportedWhenItIsFreed) {
  for (const int64_t offset : {int64_t{-1}, int64_t{13}}) {
    std::byte* memory;
    ASSERT_EQ(cudaMallocHost(reinterpret_cast<void**>(&memory), 13), cudaSuccess);
    memory[offset] = std::byte{1};
    EXPECT_EQ(cudaFreeHost(memory), cudaErrorIllegalAddress);
    EXPECT_THAT(TakeViolations(), ElementsAre(HasSubstr("an allocation of 13")));
  }
}

TEST_F(StandInTest, HostCodeCannotReadDeviceMemory) {
  const auto read = [](const float* data) {
    [[maybe_unused]] const volatile float value = *data;
    std::exit(0);
  };
  // By SIGSEGV, or with a sanitizer's report of it.
  const auto died = [](int status) { return status != 0; };
  float* fresh;
  ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&fresh), kBytes), cudaSuccess);
  EXPECT_EXIT(read(fresh), died, "");
  Fill(1);
  Upload(a_);
  Sync(a_);
  EXPECT_EXIT(read(device_), died, "");
  DeviceSettings open;
  open.protect = false;
  ConfigureDevice(open);
  EXPECT_EXIT(read(device_), ::testing::ExitedWithCode(0), "");
  Use(StreamOrder::kLazy);
  EXPECT_EXIT(read(device_), died, "");
  EXPECT_EQ(cudaFree(fresh), cudaSuccess);
}

// ---- Errors ----

TEST_F(StandInTest, FailedLaunchShowsAtTheWaitAndStays) {
  DeviceSettings failing;
  failing.order = StreamOrder::kLazy;
  failing.fail_launch = 2;
  ConfigureDevice(failing);
  Fill(0);
  Upload(a_);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(LaunchAdd(device_, 1, a_), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(a_), cudaErrorIllegalAddress);
  EXPECT_EQ(LaunchAdd(device_, 1, b_), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 16), cudaErrorIllegalAddress);
  // Memory goes back all the same.
  EXPECT_EQ(cudaFree(device_), cudaErrorIllegalAddress);
  EXPECT_EQ(CurrentUse().device_bytes, 0u);
  Use(StreamOrder::kLazy);
  ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&device_), kBytes), cudaSuccess);
}

TEST_F(StandInTest, CallsFailOnRequest) {
  FailCall("cudaMallocHost", 2, cudaErrorMemoryAllocation);
  void* first = nullptr;
  void* second = nullptr;
  EXPECT_EQ(cudaMallocHost(&first, 8), cudaSuccess);
  EXPECT_EQ(cudaMallocHost(&second, 8), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaMallocHost(&second, 8), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(first), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(second), cudaSuccess);
}

TEST_F(StandInTest, WithoutDriverNothingAnswers) {
  DeviceSettings none;
  none.driver = false;
  ConfigureDevice(none);
  int count = 77;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorInsufficientDriver);
  EXPECT_EQ(count, 77);
  EXPECT_EQ(cudaSetDevice(0), cudaErrorInsufficientDriver);
  EXPECT_EQ(cudaStreamSynchronize(a_), cudaErrorInsufficientDriver);
  int version = -1;
  EXPECT_EQ(cudaDriverGetVersion(&version), cudaSuccess);
  EXPECT_EQ(version, 0);
  EXPECT_STREQ(cudaGetErrorName(cudaErrorInsufficientDriver), "cudaErrorInsufficientDriver");
}

// The environment is read by the first call of a process.
TEST(StandInEnvironmentTest, SetsWhatItNames) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto exits_with = [](int code) { return ::testing::ExitedWithCode(code); };
  EXPECT_EXIT(
      {
        setenv("ATTEND_EMULATED_DRIVER", "none", 1);
        int count = 0;
        std::exit(cudaGetDeviceCount(&count));
      },
      exits_with(cudaErrorInsufficientDriver), "");
  EXPECT_EXIT(
      {
        setenv("ATTEND_EMULATED_MEMORY_BYTES", "123", 1);
        setenv("ATTEND_EMULATED_CHECKS", "1", 1);
        size_t free = 0;
        size_t total = 0;
        cudaMemGetInfo(&free, &total);
        std::exit(settings().checks ? static_cast<int>(total) : 0);
      },
      exits_with(123), "");
  EXPECT_EXIT(
      {
        setenv("ATTEND_EMULATED_FAIL_LAUNCH", "1", 1);
        void* data = nullptr;
        cudaMalloc(&data, 4 * kThreads);
        cudaMemsetAsync(data, 0, 4 * kThreads, nullptr);
        LaunchAdd(static_cast<float*>(data), 1, nullptr);
        std::exit(!settings().checks && cudaDeviceSynchronize() == cudaErrorIllegalAddress ? 5 : 0);
      },
      exits_with(5), "cudaErrorIllegalAddress");
}

}  // namespace
}  // namespace attend::simt
