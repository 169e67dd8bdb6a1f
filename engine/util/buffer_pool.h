// SPDX-License-Identifier: Apache-2.0
//
// Large byte buffers that are used again: fresh memory costs more in page faults than the copy into
// it. Thread-safe. Buffers are 64-byte aligned and keep the pool alive. One that is used again
// takes nothing else from the heap: what counts its owners lies before its data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace attend {

// Owns `bytes` bytes at `data`; the content is not initialised.
struct Buffer {
  std::shared_ptr<std::byte> data;
  int64_t bytes = 0;
};

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  // Keeps at most `keep_bytes` of unused buffers.
  static std::shared_ptr<BufferPool> Make(int64_t keep_bytes);
  ~BufferPool();

  Buffer Get(int64_t bytes);
  int64_t unused_bytes() const;

 private:
  // Capacities there are: two for every power of two.
  static constexpr size_t kSizes = 128;
  template <typename T>
  struct HeadAllocator;

  explicit BufferPool(int64_t keep_bytes) : keep_bytes_(keep_bytes) {}
  void Put(std::byte* data, int64_t capacity);

  const int64_t keep_bytes_;
  mutable std::mutex mutex_;
  std::array<std::byte*, kSizes> unused_{};  // first one of each capacity; linked in their heads
  int64_t unused_bytes_ = 0;
};

}  // namespace attend
