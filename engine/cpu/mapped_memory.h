// SPDX-License-Identifier: Apache-2.0
//
// Large zero-filled memory straight from the system: KV memory, packed weights, workspaces.
// Physical pages appear on first touch, huge ones where the system offers them (weights and KV are
// streamed, and 4 KiB pages cost a TLB miss every 64 lines).
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"

namespace attend {

// Owns one mapping. Move-only; empty by default.
class MappedMemory {
 public:
  static constexpr int64_t kHugePage = int64_t{2} << 20;

  MappedMemory() = default;
  MappedMemory(MappedMemory&& other) noexcept { swap(other); }
  MappedMemory& operator=(MappedMemory&& other) noexcept {
    MappedMemory(std::move(other)).swap(*this);
    return *this;
  }
  ~MappedMemory() {
    if (mapping_ != nullptr) munmap(mapping_, static_cast<size_t>(mapped_bytes_));
  }

  // Replaces the content by at least `bytes` zero bytes, starting on a huge page.
  // RESOURCE_EXHAUSTED when the system refuses the address space; the old content is gone then too.
  absl::Status Allocate(int64_t bytes) {
    *this = MappedMemory();
    const int64_t mapped_bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
    void* mapping = mmap(nullptr, static_cast<size_t>(mapped_bytes), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) {
      return absl::ResourceExhaustedError("the system refused " + std::to_string(mapped_bytes) +
                                          " bytes of address space");
    }
    mapping_ = mapping;
    mapped_bytes_ = mapped_bytes;
    const uintptr_t start = reinterpret_cast<uintptr_t>(mapping);
    data_ = reinterpret_cast<std::byte*>((start + kHugePage - 1) / kHugePage * kHugePage);
    bytes_ = bytes;
    // Advice only: without transparent huge pages everything works, slower.
    if (bytes >= kHugePage)
      madvise(data_, static_cast<size_t>(mapped_bytes - kHugePage), MADV_HUGEPAGE);
    return absl::OkStatus();
  }

  // Like Allocate, unless there is room already: then the content stays.
  absl::Status Reserve(int64_t bytes) {
    return bytes <= bytes_ ? absl::OkStatus() : Allocate(bytes + bytes / 2);
  }

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void swap(MappedMemory& other) noexcept {
    std::swap(mapping_, other.mapping_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  void* mapping_ = nullptr;
  int64_t mapped_bytes_ = 0;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace attend
