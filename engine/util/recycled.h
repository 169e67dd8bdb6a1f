// SPDX-License-Identifier: Apache-2.0
//
// Memory of the small objects that come and go with every request: what one request gave back, the
// next one gets, so that a warm server asks the system for none. Containers and shared objects use
// it by their allocator. Thread-safe; memory may come back on another thread than it was asked on.
// Tensors are BufferPool's.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace attend {

class RecycledMemory {
 public:
  // `bytes` bytes, aligned like those of operator new; Put gives them back, with the same `bytes`.
  static void* Get(size_t bytes);
  static void Put(void* memory, size_t bytes);

  // Larger pieces are not kept. Under sanitizers none is: they would not see what is used too long,
  // or by two threads.
  static constexpr size_t kMostBytes = 65536;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  static constexpr bool kRecycles = false;
#else
  static constexpr bool kRecycles = true;
#endif
};

template <typename T>
struct RecyclingAllocator {
  using value_type = T;
  static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);

  RecyclingAllocator() = default;
  template <typename U>
  RecyclingAllocator(const RecyclingAllocator<U>&) {}  // NOLINT: allocators convert

  T* allocate(size_t count) {
    if (count > static_cast<size_t>(-1) / sizeof(T)) throw std::bad_array_new_length();
    return static_cast<T*>(RecycledMemory::Get(count * sizeof(T)));
  }
  void deallocate(T* memory, size_t count) { RecycledMemory::Put(memory, count * sizeof(T)); }

  template <typename U>
  bool operator==(const RecyclingAllocator<U>&) const {
    return true;
  }
};

template <typename T>
using RecycledVector = std::vector<T, RecyclingAllocator<T>>;
using RecycledString = std::basic_string<char, std::char_traits<char>, RecyclingAllocator<char>>;

template <typename Key, typename Value, typename Hash = std::hash<Key>>
using RecycledMap = std::unordered_map<Key, Value, Hash, std::equal_to<>,
                                       RecyclingAllocator<std::pair<const Key, Value>>>;

// Finds strings in whatever type they come.
struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};

template <typename T, typename... Arguments>
std::shared_ptr<T> MakeRecycled(Arguments&&... arguments) {
  return std::allocate_shared<T>(RecyclingAllocator<T>(), std::forward<Arguments>(arguments)...);
}

}  // namespace attend
