// SPDX-License-Identifier: Apache-2.0
//
// Every name of engine/cuda/device.h for g++: the same kernel sources run on the CPU, one fiber per
// thread, and each access and synchronisation is checked (hooks.h). Included by the compiler before
// the kernels' sources (CMakeLists.txt, attend_emulated_sources). Functions take one more argument
// than device.h's, the call site, which reports print.
#pragma once

#include <cuda_runtime_api.h>

#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "engine/util/dtype.h"
#include "tests/simt/hooks.h"
#include "tests/simt/runtime.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define ATTEND_DEVICE inline

namespace attend::device {

using simt::Site;

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct alignas(16) Vector16 {
  uint32_t word[4];
};

// ---- Place ----

inline int ThreadIndex() { return simt::Here().thread; }
inline int BlockThreads() { return simt::Here().threads; }
inline int BlockIndex() { return simt::Here().block; }
inline int GridBlocks() { return simt::Here().blocks; }

// ---- Memory ----

// An index and where it was written: operator[] has no room for another argument.
template <class I>
struct CheckedIndex {
  template <class J>
  requires std::is_convertible_v<J, I> CheckedIndex(J&& index, Site at = Site::current())
      : value(static_cast<I>(std::forward<J>(index))), site(at) {}
  I value;
  Site site;
};

// One element of Memory (Global<T> or Shared<T>). Loads when converted to the element's type,
// stores when assigned to. `auto x = p[i]` can't be used afterwards: name the type, as the load
// would otherwise happen later than on the device.
template <class Memory>
class CheckedElement {
 public:
  using Value = std::remove_const_t<typename Memory::Element>;

  CheckedElement(Memory at, Site site) : at_(at), site_(site) {}
  CheckedElement(const CheckedElement&) = delete;

  operator Value() && { return at_.Load(site_); }
  Value operator=(Value value) && {
    at_.Store(value, site_);
    return value;
  }
  Value operator=(CheckedElement&& other) && {
    return std::move(*this) = static_cast<Value>(std::move(other));
  }
  template <class V>
  Value operator+=(const V& value) && {
    return Update([&](Value old) { return old + value; });
  }
  template <class V>
  Value operator-=(const V& value) && {
    return Update([&](Value old) { return old - value; });
  }
  template <class V>
  Value operator*=(const V& value) && {
    return Update([&](Value old) { return old * value; });
  }
  template <class V>
  Value operator/=(const V& value) && {
    return Update([&](Value old) { return old / value; });
  }
  template <class V>
  Value operator|=(const V& value) && {
    return Update([&](Value old) { return old | value; });
  }
  template <class V>
  Value operator&=(const V& value) && {
    return Update([&](Value old) { return old & value; });
  }
  Value operator++() && {
    return Update([](Value old) { return old + 1; });
  }

 private:
  template <class F>
  Value Update(F&& change) {
    const Value value = static_cast<Value>(change(at_.Load(site_)));
    at_.Store(value, site_);
    return value;
  }

  Memory at_;
  Site site_;
};

template <class T>
class Global {
 public:
  using Element = T;

  explicit Global(T* data) : Global(data, reinterpret_cast<uintptr_t>(data)) {}
  template <class U>
  requires std::is_convertible_v<U*, T*> Global(Global<U> other)
      : Global(other.data(), other.origin()) {}

  CheckedElement<Global> operator[](CheckedIndex<int64_t> index) const {
    return CheckedElement<Global>(*this + index.value, index.site);
  }
  Global operator+(int64_t elements) const {
    return Global(reinterpret_cast<T*>(address() + static_cast<uintptr_t>(elements) * sizeof(T)),
                  origin_);
  }
  T* data() const { return data_; }

  uintptr_t address() const { return reinterpret_cast<uintptr_t>(data_); }
  uintptr_t origin() const { return origin_; }
  std::remove_const_t<T> Load(Site site) const {
    simt::GlobalLoad(address(), sizeof(T), alignof(T), origin_, site);
    std::remove_const_t<T> value;
    std::memcpy(&value, reinterpret_cast<const void*>(data_), sizeof(T));
    return value;
  }
  void Store(const T& value, Site site) const {
    simt::GlobalStore(address(), sizeof(T), alignof(T), origin_, site);
    std::memcpy(reinterpret_cast<void*>(data_), &value, sizeof(T));
  }

 private:
  Global(T* data, uintptr_t origin) : data_(data), origin_(origin) {}

  T* data_;
  uintptr_t origin_;  // the pointer that this one was computed from
};

template <class T>
class Shared {
 public:
  using Element = T;

  explicit Shared(T* data)
      : Shared(data, simt::FindSharedRange(reinterpret_cast<uintptr_t>(data))) {}
  template <class U>
  requires std::is_convertible_v<U*, T*> Shared(Shared<U> other)
      : Shared(other.data(), other.range()) {}
  Shared(T* data, const simt::SharedRange* range) : data_(data), range_(range) {}

  CheckedElement<Shared> operator[](CheckedIndex<int> index) const {
    return CheckedElement<Shared>(*this + index.value, index.site);
  }
  Shared operator+(int elements) const {
    return Shared(
        reinterpret_cast<T*>(place() + static_cast<uintptr_t>(int64_t{elements}) * sizeof(T)),
        range_);
  }
  T* data() const { return data_; }
  uint32_t address() const { return simt::SharedOffset(place()); }

  uintptr_t place() const { return reinterpret_cast<uintptr_t>(data_); }
  const simt::SharedRange* range() const { return range_; }
  std::remove_const_t<T> Load(Site site) const {
    simt::SharedLoad(place(), sizeof(T), alignof(T), range_, site);
    std::remove_const_t<T> value;
    std::memcpy(&value, reinterpret_cast<const void*>(data_), sizeof(T));
    return value;
  }
  void Store(const T& value, Site site) const {
    simt::SharedStore(place(), sizeof(T), alignof(T), range_, site);
    std::memcpy(reinterpret_cast<void*>(data_), &value, sizeof(T));
  }

 private:
  T* data_;
  const simt::SharedRange* range_;  // the named array
};

template <class T>
Shared<T> SharedArray(const char* name, int offset_bytes, int count, Site site = Site::current()) {
  const simt::SharedRange* range = simt::RegisterSharedRange(
      name, offset_bytes, static_cast<int64_t>(sizeof(T)) * count, alignof(T), site);
  return Shared<T>(reinterpret_cast<T*>(range->begin), range);
}

template <class T>
Vector16 Load16(Global<T> from, Site site = Site::current()) {
  simt::GlobalLoad(from.address(), 16, 16, from.origin(), site);
  Vector16 value;
  std::memcpy(&value, reinterpret_cast<const void*>(from.address()), 16);
  return value;
}
template <class T>
Vector16 Load16(Shared<T> from, Site site = Site::current()) {
  simt::SharedLoad(from.place(), 16, 16, from.range(), site);
  Vector16 value;
  std::memcpy(&value, reinterpret_cast<const void*>(from.place()), 16);
  return value;
}
template <class T>
void Store16(Global<T> to, const Vector16& value, Site site = Site::current()) {
  static_assert(!std::is_const_v<T>);
  simt::GlobalStore(to.address(), 16, 16, to.origin(), site);
  std::memcpy(reinterpret_cast<void*>(to.address()), &value, 16);
}
template <class T>
void Store16(Shared<T> to, const Vector16& value, Site site = Site::current()) {
  static_assert(!std::is_const_v<T>);
  simt::SharedStore(to.place(), 16, 16, to.range(), site);
  std::memcpy(reinterpret_cast<void*>(to.place()), &value, 16);
}

// ---- Asynchronous copies ----

template <class T, class U>
void CopyAsync16(Shared<T> to, Global<U> from, bool valid, Site site = Site::current()) {
  static_assert(!std::is_const_v<T>);
  simt::StartCopy(to.place(), to.range(), from.address(), from.origin(), valid, site);
}
inline void CommitCopies() { simt::CommitCopyGroup(); }
template <int kPending>
void WaitCopies(Site site = Site::current()) {
  simt::WaitCopyGroups(kPending, site);
}

// ---- Barriers ----

inline void SyncThreads(Site site = Site::current()) { simt::BlockBarrier(false, site); }
inline bool SyncThreadsOr(bool value, Site site = Site::current()) {
  return simt::BlockBarrier(value, site);
}
inline void SyncWarp(Site site = Site::current()) { simt::WarpBarrier(site); }
inline void SyncNamed(int id, int threads, Site site = Site::current()) {
  simt::NamedBarrier(id, threads, site);
}

// ---- Warp collectives ----

inline float ShuffleXor(float value, int lane_mask, Site site = Site::current()) {
  return simt::ShuffleXorLanes(value, lane_mask, site);
}
inline float Shuffle(float value, int lane, Site site = Site::current()) {
  return simt::ShuffleLanes(value, lane, site);
}
inline bool Any(bool value, Site site = Site::current()) { return simt::AnyLane(value, site); }

template <class T>
void LoadMatrix4(uint32_t (&words)[4], Shared<T> row, Site site = Site::current()) {
  simt::LoadMatrices(words, row.place(), row.range(), false, site);
}
template <class T>
void LoadMatrix4Transposed(uint32_t (&words)[4], Shared<T> row, Site site = Site::current()) {
  simt::LoadMatrices(words, row.place(), row.range(), true, site);
}

template <class T>
void MultiplyAccumulate(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                        Site site = Site::current()) {
  static_assert(std::is_same_v<T, Bf16> || std::is_same_v<T, F16>);
  simt::MatrixProduct(d, a, b0, b1,
                      std::is_same_v<T, Bf16> ? simt::MatrixType::kBf16 : simt::MatrixType::kF16,
                      site);
}

// ---- Arithmetic ----

inline float Exp2Fast(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}
inline float Exp2(float x) { return std::exp2(x); }
inline float Tanh(float x) { return std::tanh(x); }
inline float Max(float a, float b) { return std::fmax(a, b); }
inline void SinCosPi(double x, double* sine, double* cosine) {
  // Exact reduction to a quarter turn, so that large x lose nothing.
  const double half_turns = std::remainder(x, 2.0);        // [-1, 1]
  const double quarter = std::nearbyint(2 * half_turns);   // [-2, 2]
  const double angle = (half_turns - quarter / 2) * M_PI;  // [-pi / 4, pi / 4]
  const double s = std::sin(angle);
  const double c = std::cos(angle);
  const int turn = static_cast<int>(quarter) & 3;
  *sine = turn == 0 ? s : turn == 1 ? c : turn == 2 ? -s : -c;
  *cosine = turn == 0 ? c : turn == 1 ? -s : turn == 2 ? -c : s;
}
inline double SquareRoot(double x) { return std::sqrt(x); }

// ---- Conversions ----

inline float ToFloat(float value) { return value; }
inline float ToFloat(Bf16 value) { return FloatFromBF16(value.bits); }
inline float ToFloat(F16 value) { return FloatFromF16(value.bits); }

template <class T>
T FromFloat(float value);
template <>
inline float FromFloat<float>(float value) {
  return value;
}
template <>
inline Bf16 FromFloat<Bf16>(float value) {
  return Bf16{BF16FromFloat(value)};
}
template <>
inline F16 FromFloat<F16>(float value) {
  return F16{F16FromFloat(value)};
}

template <class T>
uint32_t Pack2(float low, float high) {
  return FromFloat<T>(low).bits | static_cast<uint32_t>(FromFloat<T>(high).bits) << 16;
}
inline float WordAsFloat(uint32_t word) { return std::bit_cast<float>(word); }
inline uint32_t FloatAsWord(float value) { return std::bit_cast<uint32_t>(value); }
inline int Opaque(int value) { return value; }

// ---- Launch ----

template <class Params>
cudaError_t Launch(void (*kernel)(Params), const char* name, const LaunchShape& shape,
                   const Params& params, cudaStream_t stream) {
  static_assert(std::is_trivially_copyable_v<Params>);
  if (shape.blocks == 0) return cudaSuccess;
  if (!simt::CheckLaunch(reinterpret_cast<const void*>(kernel), name, shape)) {
    return cudaErrorInvalidValue;
  }
  return simt::Enqueue(stream, name, shape, [kernel, params] { kernel(params); });
}
template <class Params>
cudaError_t AllowSharedMemory(void (*kernel)(Params), int bytes) {
  return simt::AllowSharedBytes(reinterpret_cast<const void*>(kernel), bytes);
}

}  // namespace attend::device
