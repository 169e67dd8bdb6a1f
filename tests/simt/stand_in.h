// SPDX-License-Identifier: Apache-2.0
//
// Controls of the emulated device: the few calls of the CUDA runtime and of cuBLASLt that
// engine/cuda makes, on host memory (tests/simt/include names them). Work runs as late, as early or
// as mixed as CUDA's rules allow, so that a missing wait or a buffer used too soon gives wrong
// values instead of luck. For tests; the calls themselves never include this file.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace attend::simt {

// When queued work runs.
enum class StreamOrder {
  kSeeded,  // a seeded choice, at every call that queues and at every wait
  kLazy,    // only what a wait needs
  kEager,   // at once, as far as other streams' events allow
};

// The first call of any function takes them from the environment, where it sets them:
// ATTEND_EMULATED_ and DRIVER=none, MEMORY_BYTES, FAIL_LAUNCH, SEED, CHECKS (0 | 1: `protect` and
// simt::settings().checks, 0 where unset).
struct DeviceSettings {
  bool driver = true;  // false: no driver, every call answers cudaErrorInsufficientDriver
  size_t memory_bytes = size_t{4} << 30;
  int major = 8;
  int minor = 0;
  int multiprocessors = 4;
  size_t shared_bytes = size_t{99} << 10;  // opt-in limit per block
  StreamOrder order = StreamOrder::kSeeded;
  uint64_t seed = 1;
  // The n-th kernel launch from now (1 = the next; replayed ones count, captured ones do not) fails
  // when it runs: cudaErrorIllegalAddress, which every later call answers too. 0 = none.
  int64_t fail_launch = 0;
  // Copies to the host may read bytes that nothing wrote (rows of a KV block behind the last one).
  bool copies_of_unwritten = false;
  // Device memory is inaccessible outside queued work: host code that follows a device pointer gets
  // SIGSEGV, as on a device.
  bool protect = true;
};

// Replaces the settings and forgets errors, violations and faults; memory, streams and events stay.
// Unfinished work is dropped.
void ConfigureDevice(const DeviceSettings& settings);

// The `nth` call of `function` from now (1 = the next) answers `error` and does nothing.
void FailCall(const std::string& function, int nth, cudaError_t error);

// Uses that CUDA does not define and that the emulation saw, as text, oldest first; each is also on
// stderr and made its call or its stream fail. Takes them off the list.
std::vector<std::string> TakeViolations();

struct DeviceUse {
  size_t device_bytes = 0;  // cudaMalloc
  size_t pinned_bytes = 0;  // cudaMallocHost
  int allocations = 0;      // of both
  int streams = 0;
  int events = 0;
  int graphs = 0;        // and executables
  int blas_objects = 0;  // handles, descriptors, layouts, preferences
  int64_t launches = 0;  // kernels queued so far, replayed ones included
  int64_t queued = 0;    // operations that have not run
};
DeviceUse CurrentUse();

}  // namespace attend::simt
