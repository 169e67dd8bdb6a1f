// SPDX-License-Identifier: Apache-2.0
//
// Arrays in the emulated device's memory for tests of single kernels: exactly as long as asked for,
// known to the checker, and able to say whether everything was written. And runs of a test under
// all scheduling orders.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/simt/runtime.h"

namespace attend::simt {

// `count` elements that start `shift` elements after a multiple of 256 bytes.
template <class T>
class DeviceArray {
 public:
  // Uninitialised: bytes of 0xff.
  DeviceArray(size_t count, const std::string& name, size_t shift = 0)
      : count_(count),
        memory_(new (std::align_val_t{256}) std::byte[(count + shift) * sizeof(T) + 1]) {
    data_ = reinterpret_cast<T*>(memory_.get()) + shift;
    std::memset(memory_.get(), 0xff, (count + shift) * sizeof(T) + 1);
    RegisterGlobal(data_, bytes() + (count == 0 ? 1 : 0), name);
  }
  DeviceArray(const std::vector<T>& values, const std::string& name, size_t shift = 0)
      : DeviceArray(values.size(), name, shift) {
    Set(values);
  }
  ~DeviceArray() { UnregisterGlobal(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  void Set(const std::vector<T>& values) {
    if (values.empty()) return;
    std::memcpy(reinterpret_cast<void*>(data_), values.data(), bytes());
    MarkInitialized(data_, bytes());
  }
  T* data() const { return data_; }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }
  bool Written() const { return count_ == 0 || IsInitialized(data_, bytes()); }
  std::vector<T> values() const { return std::vector<T>(data_, data_ + count_); }
  const T& operator[](size_t index) const { return data_[index]; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { operator delete[](memory, std::align_val_t{256}); }
  };
  size_t count_;
  std::unique_ptr<std::byte[], Free> memory_;
  T* data_;
};

// Calls f() under each scheduling order, with seeds that follow `seed`.
template <class F>
void UnderAllOrders(uint64_t seed, const F& f) {
  for (const Order order : kAllOrders) {
    Settings changed = settings();
    changed.order = order;
    changed.seed = seed++;
    changed.copies = seed % 2 == 0 ? CopyTime::kAtWait : CopyTime::kAtIssue;
    SCOPED_TRACE(std::string("order ") + OrderName(order) + " seed " +
                 std::to_string(changed.seed));
    const ScopedSettings scoped(changed);
    f();
  }
}

}  // namespace attend::simt
