// SPDX-License-Identifier: Apache-2.0
//
// Of cuda_runtime_api.h: errors, the device, memory and copies; and the launch of an emulated
// kernel. Each call checks its arguments at once and queues what CUDA would queue; streams, events
// and graphs are in stand_in_streams.cc.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/simt/runtime.h"
#include "tests/simt/stand_in_device.h"

namespace attend::simt {
namespace {

constexpr int kCudaVersion = 13000;

std::string Text(const void* address) {
  char text[32];
  std::snprintf(text, sizeof(text), "%p", address);
  return text;
}

// One side of a copy: device memory, pinned or other host memory.
enum class Side { kDevice, kPinned, kPageable, kWrong };

Side SideOf(const DeviceMemory& memory, const void* data, size_t bytes) {
  if (memory.Inside(data, bytes, MemoryKind::kDevice)) return Side::kDevice;
  if (memory.Inside(data, bytes, MemoryKind::kPinned)) return Side::kPinned;
  return memory.Find(data) == nullptr ? Side::kPageable : Side::kWrong;
}

cudaError_t ToDevice(Device& device, void* to, const void* from, size_t bytes) {
  if (!device.memory.Inside(to, bytes, MemoryKind::kDevice)) {
    return device.Violation("copy to device memory that was freed", cudaErrorIllegalAddress);
  }
  std::memcpy(to, from, bytes);
  MarkWritten(to, bytes);
  return cudaSuccess;
}

cudaError_t ToHost(Device& device, void* to, const void* from, size_t bytes) {
  if (!device.memory.Inside(from, bytes, MemoryKind::kDevice)) {
    return device.Violation("copy from device memory that was freed", cudaErrorIllegalAddress);
  }
  const auto unwritten = FirstUnwritten(from, bytes);
  if (unwritten.has_value() && !device.settings.copies_of_unwritten) {
    return device.Violation("copy to the host of " + std::to_string(bytes) + " bytes at " +
                                Text(from) + ": nothing wrote byte " + std::to_string(*unwritten),
                            cudaErrorIllegalAddress);
  }
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

// Rows of device memory; a plain copy is one row.
struct RowsCopy {
  std::byte* to;
  size_t to_pitch;
  const std::byte* from;
  size_t from_pitch;
  size_t width;
  size_t height;

  bool Inside(const DeviceMemory& memory) const {
    return memory.Inside(from, (height - 1) * from_pitch + width, MemoryKind::kDevice) &&
           memory.Inside(to, (height - 1) * to_pitch + width, MemoryKind::kDevice);
  }
};

cudaError_t CopyInDevice(Device& device, EmulatedStream& stream, const RowsCopy& copy) {
  if (copy.height == 1 && ByteRange{copy.to, copy.width}.Overlaps({copy.from, copy.width})) {
    return device.Violation("copy in device of " + std::to_string(copy.width) +
                            " bytes between ranges that overlap");
  }
  if (!copy.Inside(device.memory)) {
    return device.Violation("copy in device of " + std::to_string(copy.height) + " x " +
                            std::to_string(copy.width) + " bytes from " + Text(copy.from) + " to " +
                            Text(copy.to) + ": not in allocations of device memory");
  }
  Operation operation;
  operation.name = "copy in device";
  operation.run = [&device, copy] {
    if (!copy.Inside(device.memory)) {
      return device.Violation("copy of device memory that was freed", cudaErrorIllegalAddress);
    }
    for (size_t row = 0; row < copy.height; ++row) {
      std::byte* to = copy.to + row * copy.to_pitch;
      const std::byte* from = copy.from + row * copy.from_pitch;
      std::memcpy(to, from, copy.width);
      CopyWritten(to, from, copy.width);
    }
    return cudaSuccess;
  };
  return device.Submit(stream, std::move(operation));
}

cudaError_t CopyToDevice(Device& device, EmulatedStream& stream, void* to, const void* from,
                         size_t bytes, Side source) {
  Operation copy;
  copy.name = "copy to device";
  if (source == Side::kPinned) {
    copy.pinned_source = {static_cast<const std::byte*>(from), bytes};
    copy.run = [&device, to, from, bytes] { return ToDevice(device, to, from, bytes); };
    return device.Submit(stream, std::move(copy));
  }
  if (stream.capture != nullptr) {
    stream.capture_broken = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  // The runtime stages pageable memory before it returns.
  const auto* begin = static_cast<const std::byte*>(from);
  auto staged = std::make_shared<std::vector<std::byte>>(begin, begin + bytes);
  copy.run = [&device, to, staged] { return ToDevice(device, to, staged->data(), staged->size()); };
  return device.Submit(stream, std::move(copy));
}

cudaError_t CopyToHost(Device& device, EmulatedStream& stream, void* to, const void* from,
                       size_t bytes, Side target) {
  if (target == Side::kPageable && stream.capture != nullptr) {
    stream.capture_broken = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  Operation copy;
  copy.name = "copy to host";
  if (target == Side::kPinned) copy.pinned_target = {static_cast<const std::byte*>(to), bytes};
  copy.run = [&device, to, from, bytes] { return ToHost(device, to, from, bytes); };
  const cudaError_t error = device.Submit(stream, std::move(copy));
  if (error != cudaSuccess || target == Side::kPinned) return error;
  return device.Finish(stream);
}

cudaError_t Copy(Device& device, EmulatedStream& stream, void* to, const void* from, size_t bytes,
                 cudaMemcpyKind kind) {
  const Side target = SideOf(device.memory, to, bytes);
  const Side source = SideOf(device.memory, from, bytes);
  const bool to_device = kind != cudaMemcpyDeviceToHost;
  const bool from_device = kind != cudaMemcpyHostToDevice;
  if (target == Side::kWrong || source == Side::kWrong || to_device != (target == Side::kDevice) ||
      from_device != (source == Side::kDevice)) {
    return device.Violation("copy of kind " + std::to_string(kind) + ", " + std::to_string(bytes) +
                            " bytes from " + Text(from) + " to " + Text(to) +
                            ": not in memory of that kind");
  }
  if (!from_device) return CopyToDevice(device, stream, to, from, bytes, source);
  if (!to_device) return CopyToHost(device, stream, to, from, bytes, target);
  return CopyInDevice(
      device, stream,
      {static_cast<std::byte*>(to), bytes, static_cast<const std::byte*>(from), bytes, bytes, 1});
}

cudaError_t Allocate(const char* function, void** memory, size_t bytes, MemoryKind kind) {
  return RuntimeCall(function, [&](Device& device) {
    if (memory == nullptr) return cudaErrorInvalidValue;
    if (device.CaptureForbids()) return cudaErrorStreamCaptureUnsupported;
    *memory = nullptr;
    if (bytes == 0) return cudaSuccess;
    if (kind == MemoryKind::kDevice &&
        bytes > device.settings.memory_bytes -
                    std::min(device.memory.device_bytes(), device.settings.memory_bytes)) {
      return cudaErrorMemoryAllocation;
    }
    *memory = device.memory.Allocate(bytes, kind, !device.settings.protect);
    return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
  });
}

cudaError_t Free(const char* function, void* memory, MemoryKind kind) {
  return ReleaseCall(function, [&](Device& device) {
    if (memory == nullptr) return cudaSuccess;
    if (device.CaptureForbids()) return cudaErrorStreamCaptureUnsupported;
    const cudaError_t error = device.FinishAll();  // queued work may use it
    std::string damage;
    if (!device.memory.Free(memory, kind, &damage)) {
      return device.Violation(std::string(function) + " of " + Text(memory) +
                              ": no such allocation");
    }
    if (!damage.empty()) return device.Violation(damage, cudaErrorIllegalAddress);
    return error;
  });
}

}  // namespace

// Replaces the default, which runs at once. The shape has been checked (CheckLaunch).
cudaError_t Enqueue(cudaStream_t stream, const char* name, const device::LaunchShape& shape,
                    std::function<void()> body) {
  return StreamCall("cudaLaunchKernel", stream, [&](Device& device, EmulatedStream& queue) {
    Operation launch;
    launch.kind = Operation::Kind::kKernel;
    launch.name = name;
    launch.run = [name = std::string(name), shape, body = std::move(body)] {
      return RunGrid(name.c_str(), shape, body) ? cudaSuccess : cudaErrorIllegalAddress;
    };
    return device.Submit(queue, std::move(launch));
  });
}

}  // namespace attend::simt

namespace simt = attend::simt;
using simt::Device;
using simt::RuntimeCall;
using simt::StreamCall;

// ---- Errors and the device ----

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInsufficientDriver:
      return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
  }
  return "unrecognized error code";
}

cudaError_t cudaGetLastError() {
  const cudaError_t stays = RuntimeCall("cudaGetLastError", [](Device&) { return cudaSuccess; });
  const cudaError_t last = std::exchange(simt::LastError(), cudaSuccess);
  return stays != cudaSuccess ? stays : last;
}

cudaError_t cudaGetDeviceCount(int* count) {
  return RuntimeCall(__func__, [&](Device&) {
    *count = 1;
    return cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return RuntimeCall(__func__,
                     [&](Device&) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int number) {
  return RuntimeCall(__func__, [&](Device& device) {
    if (number != 0) return cudaErrorInvalidValue;
    *properties = {};
    std::strncpy(properties->name, "Emulated device", sizeof(properties->name) - 1);
    properties->totalGlobalMem = device.settings.memory_bytes;
    properties->major = device.settings.major;
    properties->minor = device.settings.minor;
    properties->multiProcessorCount = device.settings.multiprocessors;
    properties->sharedMemPerBlockOptin = device.settings.shared_bytes;
    return cudaSuccess;
  });
}

// These two answer without a driver too; its version is then 0.
cudaError_t cudaDriverGetVersion(int* version) {
  const cudaError_t error = RuntimeCall(__func__, [](Device&) { return cudaSuccess; });
  *version = error == cudaErrorInsufficientDriver ? 0 : simt::kCudaVersion;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = simt::kCudaVersion;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  return RuntimeCall(__func__, [](Device& device) {
    if (device.CaptureForbids()) return cudaErrorStreamCaptureUnsupported;
    return device.FinishAll();
  });
}

// ---- Memory ----

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return RuntimeCall(__func__, [&](Device& device) {
    *total = device.settings.memory_bytes;
    *free = *total - std::min(*total, device.memory.device_bytes());
    return cudaSuccess;
  });
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return simt::Allocate(__func__, memory, bytes, simt::MemoryKind::kDevice);
}
cudaError_t cudaMallocHost(void** memory, size_t bytes) {
  return simt::Allocate(__func__, memory, bytes, simt::MemoryKind::kPinned);
}
cudaError_t cudaFree(void* memory) {
  return simt::Free(__func__, memory, simt::MemoryKind::kDevice);
}
cudaError_t cudaFreeHost(void* memory) {
  return simt::Free(__func__, memory, simt::MemoryKind::kPinned);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return StreamCall(__func__, stream, [&](Device& device, EmulatedStream& queue) {
    if (bytes == 0) return cudaSuccess;
    return simt::Copy(device, queue, to, from, bytes, kind);
  });
}

// Within the device only: `height` rows of `width` bytes.
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  return StreamCall(__func__, stream, [&](Device& device, EmulatedStream& queue) {
    if (width == 0 || height == 0) return cudaSuccess;
    if (kind != cudaMemcpyDeviceToDevice || width > to_pitch || width > from_pitch) {
      return cudaErrorInvalidValue;
    }
    return simt::CopyInDevice(device, queue,
                              {static_cast<std::byte*>(to), to_pitch,
                               static_cast<const std::byte*>(from), from_pitch, width, height});
  });
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  return StreamCall(__func__, stream, [&](Device& device, EmulatedStream& queue) {
    if (bytes == 0) return cudaSuccess;
    if (!device.memory.Inside(memory, bytes, simt::MemoryKind::kDevice)) {
      return device.Violation("fill of " + std::to_string(bytes) + " bytes at " +
                              simt::Text(memory) + ": not in one allocation of device memory");
    }
    simt::Operation fill;
    fill.name = "fill";
    fill.run = [&device, memory, value, bytes] {
      if (!device.memory.Inside(memory, bytes, simt::MemoryKind::kDevice)) {
        return device.Violation("fill of device memory that was freed", cudaErrorIllegalAddress);
      }
      std::memset(memory, value, bytes);
      simt::MarkWritten(memory, bytes);
      return cudaSuccess;
    };
    return device.Submit(queue, std::move(fill));
  });
}
