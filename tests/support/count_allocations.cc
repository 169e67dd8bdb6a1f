// SPDX-License-Identifier: Apache-2.0
#include "tests/support/count_allocations.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

std::atomic<int64_t> g_allocations{0};
std::atomic<int64_t> g_bytes{0};

[[gnu::noinline]] void* Allocate(size_t bytes, size_t alignment) {
  g_allocations.fetch_add(1);
  g_bytes.fetch_add(static_cast<int64_t>(bytes));
  void* memory =
      alignment <= alignof(std::max_align_t)
          ? std::malloc(bytes)
          : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) std::abort();
  return memory;
}

}  // namespace

void* operator new(size_t bytes) { return Allocate(bytes, 0); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return Allocate(bytes, static_cast<size_t>(alignment));
}
// Neither malloc nor free is inlined: where it sees one of them only, the compiler takes the pair
// of new and free, or malloc and delete, for a mistake.
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { operator delete(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { operator delete(memory); }

namespace attend {

Allocations AllocationsSoFar() { return {g_allocations.load(), g_bytes.load()}; }

}  // namespace attend
