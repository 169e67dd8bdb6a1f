// SPDX-License-Identifier: Apache-2.0
//
// The emulated device: streams as queues, events, captures, errors that stay, and the choice of
// what runs next. The functions of cuda_runtime_api.h and cublasLt.h are thin layers over it. It
// does not know what the queued work computes.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/simt/stand_in.h"
#include "tests/simt/stand_in_memory.h"

namespace attend::simt {

// One record of an event: waits refer to it, not to the event.
struct Marker {
  EmulatedStream* stream = nullptr;  // where it is queued
  bool done = false;
  std::chrono::steady_clock::time_point time;
};

struct ByteRange {
  const std::byte* data = nullptr;
  size_t bytes = 0;
  bool Overlaps(const ByteRange& other) const {
    return data < other.data + other.bytes && other.data < data + bytes;
  }
};

// One entry of a queue or one node of a graph.
struct Operation {
  enum class Kind { kWork, kKernel, kRecord, kWait };
  Kind kind = Kind::kWork;
  std::string name;
  std::function<cudaError_t()> run;  // kWork, kKernel; an error stays with the device
  std::shared_ptr<Marker> marker;    // kRecord (made when it is queued), kWait
  cudaEvent_t event = nullptr;       // kRecord
  bool external = false;             // kRecord: legal in a graph, each replay records the event
  ByteRange pinned_source;           // read when it runs
  ByteRange pinned_target;           // written when it runs
  bool fails = false;                // injected
};

}  // namespace attend::simt

struct EmulatedGraph {
  std::vector<attend::simt::Operation> nodes;  // in order
};
struct EmulatedGraphExec {
  std::vector<attend::simt::Operation> nodes;
};
struct EmulatedStream {
  std::deque<attend::simt::Operation> queue;
  std::unique_ptr<EmulatedGraph> capture;  // null = not capturing
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
  std::thread::id capture_thread;
  bool capture_broken = false;
};
struct EmulatedEvent {
  bool timing = true;
  std::shared_ptr<attend::simt::Marker> marker;  // the last record; null = none yet
};

namespace attend::simt {

// Everything below `mutex` is used with it held.
class Device {
 public:
  static Device& Get();

  std::mutex mutex;
  DeviceSettings settings;
  DeviceMemory memory;
  // Live handles, to tell them from pointers that never were or are no more.
  std::vector<cudaStream_t> streams;  // by age
  std::set<cudaEvent_t> events;
  std::set<cudaGraph_t> graphs;
  std::set<cudaGraphExec_t> executables;
  int blas_objects = 0;
  int64_t launches = 0;

  void Configure(const DeviceSettings& new_settings);
  // What a call named `function` has to answer before it does anything.
  cudaError_t Enter(const char* function);
  void FailCall(const std::string& function, int nth, cudaError_t error);

  // The queue behind a handle (null = the default stream); null = no such stream.
  EmulatedStream* Queue(cudaStream_t stream);
  // Queues one operation or, while the stream captures, makes it a node.
  cudaError_t Submit(EmulatedStream& stream, Operation operation);
  // Whether a capture forbids allocations and device-wide waits by this thread; breaks it if so.
  bool CaptureForbids();

  // Run what is needed, and what else the order chooses, until ...
  cudaError_t Finish(EmulatedStream& stream);  // ... the stream is empty
  cudaError_t Finish(const Marker& marker);    // ... the record has happened
  cudaError_t FinishAll();
  // Time passes for a caller that polls: some work runs, the record's among it sooner or later.
  cudaError_t Poll(const Marker& marker);

  // Writes down a use that CUDA does not define; returns `error`.
  cudaError_t Violation(const std::string& text, cudaError_t error = cudaErrorInvalidValue);
  std::vector<std::string> TakeViolations() { return std::exchange(violations_, {}); }
  int64_t Queued() const;

 private:
  // What a wait runs besides the operations that it needs.
  enum class Choice { kNeeded, kOthersFirst, kMixed };

  Device() = default;
  void ReadEnvironment();
  std::vector<EmulatedStream*> AllStreams();
  std::vector<EmulatedStream*> RunnableStreams();
  void RunFront(EmulatedStream& stream);
  // Runs one operation towards the end of `stream`, and no other.
  void RunNeeded(EmulatedStream& stream);
  Choice Choose();
  // Runs one operation, so that `target`, which isn't empty, comes to its end in finite time.
  void RunOne(EmulatedStream& target, Choice choice);
  void RunSome(size_t operations);
  void DropAll();
  void PoisonTarget(const ByteRange& target);

  EmulatedStream default_stream_;
  std::mt19937_64 random_{1};
  bool environment_read_ = false;
  cudaError_t error_ = cudaSuccess;  // stays
  int64_t failing_launch_ = 0;       // of `launches`
  std::map<std::string, std::pair<int, cudaError_t>> faults_;
  std::vector<std::string> violations_;
};

// The calling thread's last error (cudaGetLastError).
cudaError_t& LastError();

// Frames a call of the runtime: lock, checks, then `body(device)`; the answer is remembered.
template <class Body>
cudaError_t RuntimeCall(const char* function, Body body) {
  Device& device = Device::Get();
  const std::lock_guard lock(device.mutex);
  cudaError_t error = device.Enter(function);
  if (error == cudaSuccess) error = body(device);
  if (error != cudaSuccess) LastError() = error;
  return error;
}

// The same with the stream's queue: `body(device, queue)`.
template <class Body>
cudaError_t StreamCall(const char* function, cudaStream_t handle, Body body) {
  return RuntimeCall(function, [&](Device& device) {
    EmulatedStream* stream = device.Queue(handle);
    if (stream != nullptr) return body(device, *stream);
    return device.Violation(std::string(function) + " on a stream that does not exist");
  });
}

// For calls that give something back: it goes back even after an error that stays; the error is
// the answer all the same, as in CUDA.
template <class Body>
cudaError_t ReleaseCall(const char* function, Body body) {
  Device& device = Device::Get();
  const std::lock_guard lock(device.mutex);
  cudaError_t error = device.Enter(function);
  if (error == cudaErrorInsufficientDriver) return LastError() = error;
  const cudaError_t released = body(device);
  if (error == cudaSuccess) error = released;
  if (error != cudaSuccess) LastError() = error;
  return error;
}

}  // namespace attend::simt
