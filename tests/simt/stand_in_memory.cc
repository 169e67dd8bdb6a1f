// SPDX-License-Identifier: Apache-2.0
//
// Memory of the emulated device. One mapping per allocation: a page without access, a page of red
// zone, the data from a page's begin, the rest of its last page as red zone, a page without access.
#include "tests/simt/stand_in_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "tests/simt/runtime.h"

namespace attend::simt {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kRedZone = 64;  // least bytes behind the data
constexpr int kRedByte = 0xa5;
constexpr int kFreshByte = 0xff;  // NaN in every float type
// Larger allocations are filled by mapping a file of such bytes again and again: only pages that
// are written cost memory.
constexpr size_t kFillBytes = size_t{16} << 20;

size_t PagesFor(size_t bytes) { return (bytes + kRedZone + kPage - 1) / kPage * kPage; }

int FillFile() {
  static const int file = [] {
    const int fresh = memfd_create("fresh device memory", MFD_CLOEXEC);
    if (fresh < 0 || ftruncate(fresh, kFillBytes) != 0) return -1;
    void* bytes = mmap(nullptr, kFillBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fresh, 0);
    if (bytes == MAP_FAILED) return -1;
    std::memset(bytes, kFreshByte, kFillBytes);
    munmap(bytes, kFillBytes);
    return fresh;
  }();
  return file;
}

bool FillFresh(std::byte* data, size_t bytes) {
  size_t begin = 0;
  for (; bytes - begin >= kFillBytes; begin += kFillBytes) {
    if (mmap(data + begin, kFillBytes, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, FillFile(), 0) == MAP_FAILED) {
      return false;
    }
  }
  std::memset(data + begin, kFreshByte, bytes - begin);
  return true;
}

// Offset of the first byte that isn't `value`, or `bytes`.
size_t FirstOther(const std::byte* data, size_t bytes, int value) {
  const auto* other = std::find_if(data, data + bytes, [value](std::byte byte) {
    return byte != static_cast<std::byte>(value);
  });
  return static_cast<size_t>(other - data);
}

std::string Damage(const DeviceMemory::Allocation& allocation) {
  const std::byte* front = allocation.mapping + kPage;
  const size_t before = FirstOther(front, kPage, kRedByte);
  if (before < kPage) {
    return std::to_string(kPage - before) + " bytes before an allocation of " +
           std::to_string(allocation.bytes) + " were overwritten";
  }
  const size_t zone = PagesFor(allocation.bytes) - allocation.bytes;
  const size_t behind = FirstOther(allocation.data + allocation.bytes, zone, kRedByte);
  if (behind < zone) {
    return "byte " + std::to_string(allocation.bytes + behind) + " of an allocation of " +
           std::to_string(allocation.bytes) + " was overwritten";
  }
  return "";
}

}  // namespace

void* DeviceMemory::Allocate(size_t bytes, MemoryKind kind, bool accessible) {
  const size_t body = PagesFor(bytes);
  const size_t mapping_bytes = body + 3 * kPage;
  void* mapping =
      mmap(nullptr, mapping_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(mapping);
  std::byte* data = begin + 2 * kPage;
  if (mprotect(begin + kPage, body + kPage, PROT_READ | PROT_WRITE) != 0 ||
      !FillFresh(data, bytes)) {
    munmap(mapping, mapping_bytes);
    return nullptr;
  }
  std::memset(begin + kPage, kRedByte, kPage);
  std::memset(data + bytes, kRedByte, body - bytes);
  allocations_[reinterpret_cast<uintptr_t>(data)] = {data, bytes, kind, begin, mapping_bytes};
  if (kind == MemoryKind::kDevice) {
    device_bytes_ += bytes;
    RegisterGlobal(data, bytes, "device memory");
    if (!accessible) mprotect(begin + kPage, body + kPage, PROT_NONE);
  } else {
    pinned_bytes_ += bytes;
  }
  return data;
}

bool DeviceMemory::Free(void* data, MemoryKind kind, std::string* damage) {
  const auto found = allocations_.find(reinterpret_cast<uintptr_t>(data));
  if (found == allocations_.end() || found->second.kind != kind) return false;
  const Allocation& allocation = found->second;
  mprotect(allocation.mapping + kPage, allocation.mapping_bytes - 2 * kPage,
           PROT_READ | PROT_WRITE);
  *damage = Damage(allocation);
  if (kind == MemoryKind::kDevice) {
    device_bytes_ -= allocation.bytes;
    UnregisterGlobal(data);
  } else {
    pinned_bytes_ -= allocation.bytes;
  }
  munmap(allocation.mapping, allocation.mapping_bytes);
  allocations_.erase(found);
  return true;
}

const DeviceMemory::Allocation* DeviceMemory::Find(const void* data) const {
  const auto address = reinterpret_cast<uintptr_t>(data);
  auto next = allocations_.upper_bound(address);
  if (next == allocations_.begin()) return nullptr;
  const Allocation& allocation = std::prev(next)->second;
  const size_t offset = address - reinterpret_cast<uintptr_t>(allocation.data);
  // The address behind the last byte counts too: an empty range may be there.
  return offset <= allocation.bytes ? &allocation : nullptr;
}

bool DeviceMemory::Inside(const void* data, size_t bytes, MemoryKind kind) const {
  const Allocation* allocation = Find(data);
  if (allocation == nullptr || allocation->kind != kind) return false;
  const size_t offset = static_cast<size_t>(static_cast<const std::byte*>(data) - allocation->data);
  return bytes <= allocation->bytes - offset;
}

void DeviceMemory::SetAccessible(bool accessible) {
  for (const auto& [address, allocation] : allocations_) {
    if (allocation.kind != MemoryKind::kDevice) continue;
    mprotect(allocation.mapping + kPage, allocation.mapping_bytes - 2 * kPage,
             accessible ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
}

void MarkWritten(const void* data, size_t bytes) {
  if (settings().checks) MarkInitialized(data, bytes);
}

void CopyWritten(const void* to, const void* from, size_t bytes) {
  if (!settings().checks) return;
  const auto* target = static_cast<const std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  if (IsInitialized(source, bytes)) {
    MarkInitialized(target, bytes);
  } else if (bytes == 1) {
    MarkUninitialized(target, bytes);
  } else {
    CopyWritten(target, source, bytes / 2);
    CopyWritten(target + bytes / 2, source + bytes / 2, bytes - bytes / 2);
  }
}

std::optional<size_t> FirstUnwritten(const void* data, size_t bytes) {
  if (!settings().checks || IsInitialized(data, bytes)) return std::nullopt;
  size_t written = 0;  // that many are, one of the next `unsure` isn't
  for (size_t unsure = bytes; unsure > 1;) {
    const auto* next = static_cast<const std::byte*>(data) + written;
    const size_t half = unsure / 2;
    const bool all = IsInitialized(next, half);
    if (all) written += half;
    unsure = all ? unsure - half : half;
  }
  return written;
}

}  // namespace attend::simt
