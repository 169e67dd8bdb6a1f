// SPDX-License-Identifier: Apache-2.0
//
// The emulated device's memory and the host memory that it can reach: sizes, limits, red zones,
// protection and which bytes were written. Used by stand_in_device under its mutex; knows no
// streams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace attend::simt {

enum class MemoryKind { kDevice, kPinned };

// Not thread-safe.
class DeviceMemory {
 public:
  struct Allocation {
    std::byte* data;  // 256-byte aligned
    size_t bytes;
    MemoryKind kind;
    std::byte* mapping;  // with a page that nobody can touch on both sides
    size_t mapping_bytes;
  };

  // New memory holds 0xff bytes. Null when the machine has none; device limits are the caller's.
  void* Allocate(size_t bytes, MemoryKind kind, bool accessible);
  // False where no allocation of this kind begins. `damage`: what the red zones say, or empty.
  bool Free(void* data, MemoryKind kind, std::string* damage);

  // The allocation that holds `data`; null = none.
  const Allocation* Find(const void* data) const;
  // Whether [data, data + bytes) lies in one allocation of this kind.
  bool Inside(const void* data, size_t bytes, MemoryKind kind) const;
  // Opens or closes all device memory to this process.
  void SetAccessible(bool accessible);

  size_t device_bytes() const { return device_bytes_; }
  size_t pinned_bytes() const { return pinned_bytes_; }
  int allocations() const { return static_cast<int>(allocations_.size()); }

 private:
  std::map<uintptr_t, Allocation> allocations_;  // by address
  size_t device_bytes_ = 0;
  size_t pinned_bytes_ = 0;
};

// Which bytes of device memory were written, as the kernels' checks see it; nothing is known and
// everything counts as written while simt::settings().checks is false.
void MarkWritten(const void* data, size_t bytes);
void CopyWritten(const void* to, const void* from, size_t bytes);
std::optional<size_t> FirstUnwritten(const void* data, size_t bytes);

}  // namespace attend::simt
