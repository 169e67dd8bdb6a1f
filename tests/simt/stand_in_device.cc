// SPDX-License-Identifier: Apache-2.0
//
// What runs next on the emulated device. Two operations of one stream run in order; across streams
// only events order them, and the choice among the rest is made to hurt: nothing before it is
// needed, everything as soon as it may, or a seeded mix.
#include "tests/simt/stand_in_device.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "tests/simt/runtime.h"

namespace attend::simt {
namespace {

// kSeeded: one call in this many runs something, up to kSomeOperations.
constexpr uint64_t kCallsPerRun = 8;
constexpr uint64_t kSomeOperations = 16;

bool Blocked(const Operation& operation) {
  return operation.kind == Operation::Kind::kWait && !operation.marker->done;
}

std::optional<std::string> Environment(const char* name) {
  const char* value = std::getenv((std::string("ATTEND_EMULATED_") + name).c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

uint64_t Number(const std::string& text) { return std::strtoull(text.c_str(), nullptr, 10); }

// Opens device memory while queued work runs.
class Access {
 public:
  Access(DeviceMemory& memory, bool protect) : memory_(memory), protect_(protect) {
    if (protect_) memory_.SetAccessible(true);
  }
  ~Access() {
    if (protect_) memory_.SetAccessible(false);
  }

 private:
  DeviceMemory& memory_;
  const bool protect_;
};

}  // namespace

cudaError_t& LastError() {
  static thread_local cudaError_t error = cudaSuccess;
  return error;
}

Device& Device::Get() {
  static Device* device = new Device;  // outlives every static object that frees memory
  return *device;
}

void Device::ReadEnvironment() {
  if (environment_read_) return;
  environment_read_ = true;
  DeviceSettings given;
  if (const auto driver = Environment("DRIVER")) given.driver = *driver != "none";
  if (const auto bytes = Environment("MEMORY_BYTES")) given.memory_bytes = Number(*bytes);
  if (const auto seed = Environment("SEED")) given.seed = Number(*seed);
  if (const auto launch = Environment("FAIL_LAUNCH")) {
    given.fail_launch = static_cast<int64_t>(Number(*launch));
  }
  // Opening and closing device memory around every piece of work costs more than most pieces.
  given.protect = simt::settings().checks = Environment("CHECKS") == "1";
  Configure(given);
}

void Device::Configure(const DeviceSettings& new_settings) {
  environment_read_ = true;
  DropAll();
  memory.SetAccessible(!new_settings.protect);
  settings = new_settings;
  simt::settings().shared_limit = static_cast<int>(settings.shared_bytes);
  random_.seed(settings.seed);
  error_ = cudaSuccess;
  LastError() = cudaSuccess;
  failing_launch_ = settings.fail_launch == 0 ? 0 : launches + settings.fail_launch;
  faults_.clear();
  violations_.clear();
}

cudaError_t Device::Enter(const char* function) {
  ReadEnvironment();
  if (!settings.driver) return cudaErrorInsufficientDriver;
  if (const auto fault = faults_.find(function); fault != faults_.end()) {
    if (--fault->second.first == 0) {
      const cudaError_t error = fault->second.second;
      faults_.erase(fault);
      return error;
    }
  }
  return error_;
}

void Device::FailCall(const std::string& function, int nth, cudaError_t error) {
  faults_[function] = {nth, error};
}

cudaError_t Device::Violation(const std::string& text, cudaError_t error) {
  std::fprintf(stderr, "emulated device: %s\n", text.c_str());
  violations_.push_back(text);
  return error;
}

EmulatedStream* Device::Queue(cudaStream_t stream) {
  if (stream == nullptr) return &default_stream_;
  return std::find(streams.begin(), streams.end(), stream) != streams.end() ? stream : nullptr;
}

int64_t Device::Queued() const {
  size_t operations = default_stream_.queue.size();
  for (const EmulatedStream* stream : streams) operations += stream->queue.size();
  return static_cast<int64_t>(operations);
}

bool Device::CaptureForbids() {
  bool forbids = false;
  for (EmulatedStream* stream : streams) {
    if (stream->capture == nullptr) continue;
    if (stream->capture_mode == cudaStreamCaptureModeGlobal ||
        stream->capture_thread == std::this_thread::get_id()) {
      stream->capture_broken = true;
      forbids = true;
    }
  }
  return forbids;
}

// ---- Queueing ----

// A pinned target holds 0xff bytes until the copy has run, unless queued work still reads it.
void Device::PoisonTarget(const ByteRange& target) {
  for (const EmulatedStream* stream : AllStreams()) {
    for (const Operation& operation : stream->queue) {
      if (operation.pinned_source.Overlaps(target)) return;
    }
  }
  std::memset(const_cast<std::byte*>(target.data), 0xff, target.bytes);
}

cudaError_t Device::Submit(EmulatedStream& stream, Operation operation) {
  using Kind = Operation::Kind;
  if (stream.capture != nullptr) {
    if (operation.kind == Kind::kWait || (operation.kind == Kind::kRecord && !operation.external)) {
      stream.capture_broken = true;
      return cudaErrorStreamCaptureUnsupported;
    }
    stream.capture->nodes.push_back(std::move(operation));
    return cudaSuccess;
  }
  if (error_ != cudaSuccess) return error_;  // in the middle of a graph
  if (operation.kind == Kind::kKernel) operation.fails = ++launches == failing_launch_;
  if (operation.kind == Kind::kRecord) {
    operation.marker = std::make_shared<Marker>();
    operation.marker->stream = &stream;
    operation.event->marker = operation.marker;
  }
  if (operation.pinned_target.bytes > 0) PoisonTarget(operation.pinned_target);
  stream.queue.push_back(std::move(operation));
  if (settings.order == StreamOrder::kEager) RunSome(SIZE_MAX);
  if (settings.order == StreamOrder::kSeeded && random_() % kCallsPerRun == 0) {
    RunSome(1 + random_() % kSomeOperations);
  }
  return cudaSuccess;
}

// ---- Running ----

std::vector<EmulatedStream*> Device::AllStreams() {
  std::vector<EmulatedStream*> all = streams;
  all.push_back(&default_stream_);
  return all;
}

std::vector<EmulatedStream*> Device::RunnableStreams() {
  std::vector<EmulatedStream*> all = AllStreams();
  std::erase_if(all, [](const EmulatedStream* stream) {
    return stream->queue.empty() || Blocked(stream->queue.front());
  });
  return all;
}

void Device::RunFront(EmulatedStream& stream) {
  Operation operation = std::move(stream.queue.front());
  stream.queue.pop_front();
  switch (operation.kind) {
    case Operation::Kind::kWait:
      return;
    case Operation::Kind::kRecord:
      operation.marker->time = std::chrono::steady_clock::now();
      operation.marker->done = true;
      return;
    case Operation::Kind::kWork:
    case Operation::Kind::kKernel:
      break;
  }
  const cudaError_t error = operation.fails ? cudaErrorIllegalAddress : operation.run();
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "emulated device: %s failed: %s\n", operation.name.c_str(),
               cudaGetErrorName(error));
  error_ = error;
  DropAll();
}

void Device::RunNeeded(EmulatedStream& stream) {
  EmulatedStream* needed = &stream;
  // A record is queued before its waits, so this chain ends.
  while (Blocked(needed->queue.front())) needed = needed->queue.front().marker->stream;
  RunFront(*needed);
}

void Device::RunSome(size_t operations) {
  const Access access(memory, settings.protect);
  for (size_t ran = 0; ran < operations; ++ran) {
    const std::vector<EmulatedStream*> runnable = RunnableStreams();
    if (runnable.empty()) return;
    RunFront(*runnable[random_() % runnable.size()]);
  }
}

void Device::RunOne(EmulatedStream& target, Choice choice) {
  std::vector<EmulatedStream*> others = RunnableStreams();
  if (choice == Choice::kOthersFirst) std::erase(others, &target);
  if (choice == Choice::kNeeded || others.empty()) {
    RunNeeded(target);
  } else {
    RunFront(*others[random_() % others.size()]);
  }
}

Device::Choice Device::Choose() {
  if (settings.order != StreamOrder::kSeeded) return Choice::kNeeded;
  return static_cast<Choice>(random_() % 3);
}

cudaError_t Device::Finish(EmulatedStream& stream) {
  if (stream.queue.empty()) return error_;
  const Access access(memory, settings.protect);
  const Choice choice = Choose();
  while (!stream.queue.empty()) RunOne(stream, choice);
  return error_;
}

cudaError_t Device::Finish(const Marker& marker) {
  if (marker.done) return error_;
  const Access access(memory, settings.protect);
  const Choice choice = Choose();
  while (!marker.done) RunOne(*marker.stream, choice);
  return error_;
}

cudaError_t Device::FinishAll() {
  RunSome(SIZE_MAX);
  return error_;
}

cudaError_t Device::Poll(const Marker& marker) {
  if (marker.done) return error_;
  const Access access(memory, settings.protect);
  const Choice choice = Choose();
  uint64_t steps = 1;
  if (settings.order == StreamOrder::kSeeded) steps = random_() % kSomeOperations;
  for (; steps > 0 && !marker.done; --steps) RunOne(*marker.stream, choice);
  return error_;
}

void Device::DropAll() {
  for (EmulatedStream* stream : AllStreams()) {
    for (const Operation& operation : stream->queue) {
      if (operation.marker != nullptr) operation.marker->done = true;
    }
    stream->queue.clear();
  }
}

// ---- Controls ----

void ConfigureDevice(const DeviceSettings& settings) {
  Device& device = Device::Get();
  const std::lock_guard lock(device.mutex);
  device.Configure(settings);
}

void FailCall(const std::string& function, int nth, cudaError_t error) {
  Device& device = Device::Get();
  const std::lock_guard lock(device.mutex);
  device.FailCall(function, nth, error);
}

std::vector<std::string> TakeViolations() {
  Device& device = Device::Get();
  const std::lock_guard lock(device.mutex);
  return device.TakeViolations();
}

DeviceUse CurrentUse() {
  Device& device = Device::Get();
  const std::lock_guard lock(device.mutex);
  DeviceUse use;
  use.device_bytes = device.memory.device_bytes();
  use.pinned_bytes = device.memory.pinned_bytes();
  use.allocations = device.memory.allocations();
  use.streams = static_cast<int>(device.streams.size());
  use.events = static_cast<int>(device.events.size());
  use.graphs = static_cast<int>(device.graphs.size() + device.executables.size());
  use.blas_objects = device.blas_objects;
  use.launches = device.launches;
  use.queued = device.Queued();
  return use;
}

}  // namespace attend::simt
