// SPDX-License-Identifier: Apache-2.0
#include "engine/util/buffer_pool.h"

#include <algorithm>
#include <bit>
#include <new>
#include <utility>

namespace attend {
namespace {

constexpr std::align_val_t kAlignment{64};

// Memory before the data: the control block of the pointer to a used buffer, the link of an unused
// one.
constexpr size_t kHeadBytes = 64;

std::byte*& NextOf(std::byte* data) { return *reinterpret_cast<std::byte**>(data - kHeadBytes); }

void Free(std::byte* data) { operator delete(data - kHeadBytes, kAlignment); }

// Capacities are powers of two and the steps half way between, so that at most a third is unused.
struct Size {
  size_t index;
  int64_t capacity;
};
Size SizeFor(int64_t bytes) {
  const auto wanted = static_cast<uint64_t>(std::max<int64_t>(bytes, 256));
  const uint64_t power = std::bit_ceil(wanted);
  const bool step = wanted <= power / 4 * 3;
  return {2 * static_cast<size_t>(std::countr_zero(power)) + (step ? 0 : 1),
          static_cast<int64_t>(step ? power / 4 * 3 : power)};
}

}  // namespace

// Gives the head of one buffer to the control block of the pointer to it. The last thing that is
// done with a control block is to give its memory back, which ends the use of the buffer.
template <typename T>
struct BufferPool::HeadAllocator {
  using value_type = T;

  HeadAllocator(std::shared_ptr<BufferPool> owner, std::byte* of, int64_t bytes)
      : pool(std::move(owner)), data(of), capacity(bytes) {}
  template <typename Other>
  HeadAllocator(const HeadAllocator<Other>& other)  // NOLINT: allocators convert
      : pool(other.pool), data(other.data), capacity(other.capacity) {}

  T* allocate(size_t) {
    static_assert(sizeof(T) <= kHeadBytes && alignof(T) <= kHeadBytes);
    return reinterpret_cast<T*>(data - kHeadBytes);
  }
  void deallocate(T*, size_t) { pool->Put(data, capacity); }
  template <typename Other>
  friend bool operator==(const HeadAllocator& a, const HeadAllocator<Other>& b) {
    return a.data == b.data;
  }

  std::shared_ptr<BufferPool> pool;
  std::byte* data;
  int64_t capacity;
};

std::shared_ptr<BufferPool> BufferPool::Make(int64_t keep_bytes) {
  return std::shared_ptr<BufferPool>(new BufferPool(keep_bytes));
}

BufferPool::~BufferPool() {
  for (std::byte* data : unused_) {
    while (data != nullptr) Free(std::exchange(data, NextOf(data)));
  }
}

Buffer BufferPool::Get(int64_t bytes) {
  const Size size = SizeFor(bytes);
  std::byte* data = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::byte*& first = unused_[size.index];
    if (first != nullptr) {
      data = std::exchange(first, NextOf(first));
      unused_bytes_ -= size.capacity;
    }
  }
  if (data == nullptr) {
    const size_t memory = kHeadBytes + static_cast<size_t>(size.capacity);
    data = static_cast<std::byte*>(operator new(memory, kAlignment)) + kHeadBytes;
  }
  const auto nothing = [](std::byte*) {};
  return {std::shared_ptr<std::byte>(
              data, nothing, HeadAllocator<std::byte>(shared_from_this(), data, size.capacity)),
          bytes};
}

void BufferPool::Put(std::byte* data, int64_t capacity) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (unused_bytes_ + capacity <= keep_bytes_) {
      NextOf(data) = std::exchange(unused_[SizeFor(capacity).index], data);
      unused_bytes_ += capacity;
      return;
    }
  }
  Free(data);
}

int64_t BufferPool::unused_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return unused_bytes_;
}

}  // namespace attend
