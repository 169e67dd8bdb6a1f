// SPDX-License-Identifier: Apache-2.0
#include "engine/util/buffer_pool.h"

#include <algorithm>
#include <bit>
#include <new>

#include "engine/util/recycled.h"

namespace attend {
namespace {

constexpr std::align_val_t kAlignment{64};

// Capacities are powers of two and the steps half way between, so that at most a third is unused.
int64_t Capacity(int64_t bytes) {
  const auto wanted = static_cast<uint64_t>(std::max<int64_t>(bytes, 256));
  const uint64_t power = std::bit_ceil(wanted);
  return static_cast<int64_t>(wanted <= power / 4 * 3 ? power / 4 * 3 : power);
}

}  // namespace

std::shared_ptr<BufferPool> BufferPool::Make(int64_t keep_bytes) {
  return std::shared_ptr<BufferPool>(new BufferPool(keep_bytes));
}

BufferPool::~BufferPool() {
  for (auto& [capacity, buffers] : unused_) {
    for (std::byte* data : buffers) operator delete(data, kAlignment);
  }
}

Buffer BufferPool::Get(int64_t bytes) {
  const int64_t capacity = Capacity(bytes);
  std::byte* data = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::vector<std::byte*>& buffers = unused_[capacity]; !buffers.empty()) {
      data = buffers.back();
      buffers.pop_back();
      unused_bytes_ -= capacity;
    }
  }
  if (data == nullptr) {
    data = static_cast<std::byte*>(operator new(static_cast<size_t>(capacity), kAlignment));
  }
  const auto release = [pool = shared_from_this(), capacity](std::byte* released) {
    pool->Put(released, capacity);
  };
  return {std::shared_ptr<std::byte>(data, release, RecyclingAllocator<std::byte>()), bytes};
}

void BufferPool::Put(std::byte* data, int64_t capacity) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (unused_bytes_ + capacity <= keep_bytes_) {
      unused_[capacity].push_back(data);
      unused_bytes_ += capacity;
      return;
    }
  }
  operator delete(data, kAlignment);
}

int64_t BufferPool::unused_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return unused_bytes_;
}

}  // namespace attend
