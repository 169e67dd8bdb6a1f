// SPDX-License-Identifier: Apache-2.0
//
// All that a kernel says to the machine: where it runs, shared and global memory, warp collectives,
// barriers, asynchronous copies, tensor-core products, conversions, and the launch itself. The only
// file with inline assembly; kernels use these names and nothing else. The tests' CPU emulation
// (tests/simt/simt.h, included before this file) provides every name below with checks instead.
//
// Warps have 32 lanes. Every collective is called by all lanes of a warp at the same place.
// PTX ISA 9.0 is the source of instruction semantics and of the lane maps in comments.
#pragma once

#ifndef ATTEND_SIMT

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#ifdef __CUDACC__
#define ATTEND_DEVICE __device__ __forceinline__
#else
#define ATTEND_DEVICE inline
#endif

namespace attend::device {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
// 16 bytes, the widest access; addresses are multiples of 16.
struct alignas(16) Vector16 {
  uint32_t word[4];
};

#ifdef __CUDACC__

// ---- Place ----

ATTEND_DEVICE int ThreadIndex() { return static_cast<int>(threadIdx.x); }  // in the block
ATTEND_DEVICE int BlockThreads() { return static_cast<int>(blockDim.x); }
ATTEND_DEVICE int BlockIndex() { return static_cast<int>(blockIdx.x); }  // in the grid, x only
ATTEND_DEVICE int GridBlocks() { return static_cast<int>(gridDim.x); }

// ---- Memory ----

// A pointer into device memory. Element indices are 64 bits wide.
template <class T>
class Global {
 public:
  ATTEND_DEVICE explicit Global(T* data) : data_(data) {}
  template <class U>
  requires std::is_convertible_v<U*, T*> ATTEND_DEVICE Global(Global<U> other)
      : data_(other.data()) {}
  ATTEND_DEVICE T& operator[](int64_t index) const { return data_[index]; }
  ATTEND_DEVICE Global operator+(int64_t elements) const { return Global(data_ + elements); }
  ATTEND_DEVICE T* data() const { return data_; }

 private:
  T* data_;
};

// A pointer into the block's shared memory.
template <class T>
class Shared {
 public:
  ATTEND_DEVICE explicit Shared(T* data) : data_(data) {}
  template <class U>
  requires std::is_convertible_v<U*, T*> ATTEND_DEVICE Shared(Shared<U> other)
      : data_(other.data()) {}
  ATTEND_DEVICE T& operator[](int index) const { return data_[index]; }
  ATTEND_DEVICE Shared operator+(int elements) const { return Shared(data_ + elements); }
  ATTEND_DEVICE T* data() const { return data_; }
  ATTEND_DEVICE uint32_t address() const {  // in the shared window, for instructions
    return static_cast<uint32_t>(__cvta_generic_to_shared(data_));
  }

 private:
  T* data_;
};

// `count` elements at `offset_bytes` of the block's dynamic shared memory. Called once per array by
// every thread of the block; the emulation reports accesses that leave the named array.
template <class T>
ATTEND_DEVICE Shared<T> SharedArray(const char* /*name*/, int offset_bytes, int /*count*/) {
  extern __shared__ __align__(128) unsigned char attend_shared_memory[];
  return Shared<T>(reinterpret_cast<T*>(attend_shared_memory + offset_bytes));
}

template <class T>
ATTEND_DEVICE Vector16 Load16(Global<T> from) {
  return *reinterpret_cast<const Vector16*>(from.data());
}
template <class T>
ATTEND_DEVICE Vector16 Load16(Shared<T> from) {
  return *reinterpret_cast<const Vector16*>(from.data());
}
template <class T>
ATTEND_DEVICE void Store16(Global<T> to, const Vector16& value) {
  *reinterpret_cast<Vector16*>(to.data()) = value;
}
template <class T>
ATTEND_DEVICE void Store16(Shared<T> to, const Vector16& value) {
  *reinterpret_cast<Vector16*>(to.data()) = value;
}

// ---- Asynchronous copies ----

// Starts copying 16 bytes past the registers; with `valid` false 16 zero bytes are written and
// nothing is read (`from` is then any readable address). Both sides are 16-byte aligned.
template <class T, class U>
ATTEND_DEVICE void CopyAsync16(Shared<T> to, Global<U> from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to.address()),
               "l"(from.data()), "r"(valid ? 16 : 0)
               : "memory");
}
// Closes the group of the copies this thread started since the last commit; may be empty.
ATTEND_DEVICE void CommitCopies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until at most `kPending` of this thread's groups are unfinished. Other threads see the
// bytes only after a barrier that follows.
template <int kPending>
ATTEND_DEVICE void WaitCopies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// ---- Barriers ----

ATTEND_DEVICE void SyncThreads() { __syncthreads(); }
ATTEND_DEVICE bool SyncThreadsOr(bool value) { return __syncthreads_or(value) != 0; }
ATTEND_DEVICE void SyncWarp() { __syncwarp(); }
// Barrier `id` (1..15) of `threads` threads of the block, whole warps.
ATTEND_DEVICE void SyncNamed(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// ---- Warp collectives ----

ATTEND_DEVICE float ShuffleXor(float value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
ATTEND_DEVICE float Shuffle(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
ATTEND_DEVICE bool Any(bool value) { return __any_sync(0xffffffffu, value) != 0; }

// Four 8x8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l / 8 (16
// bytes, aligned); word i of lane l receives elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of
// matrix i. Transposed: elements (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4).
template <class T>
ATTEND_DEVICE void LoadMatrix4(uint32_t (&words)[4], Shared<T> row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row.address())
               : "memory");
}
template <class T>
ATTEND_DEVICE void LoadMatrix4Transposed(uint32_t (&words)[4], Shared<T> row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row.address())
               : "memory");
}

// d += a b, a [16, 16] and b [16, 8] of T (Bf16 or F16), d [16, 8] float. With g = lane / 4 and
// t = lane % 4: a[0] = (row g, columns 2t, 2t + 1), a[1] = (g + 8, same), a[2] = (g, columns + 8),
// a[3] = (g + 8, columns + 8); b0 = (rows 2t, 2t + 1, column g), b1 = (rows + 8, column g);
// d[0], d[1] = (row g, columns 2t, 2t + 1), d[2], d[3] = (row g + 8, same).
template <class T>
ATTEND_DEVICE void MultiplyAccumulate(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                      uint32_t b1);
template <>
ATTEND_DEVICE void MultiplyAccumulate<Bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
ATTEND_DEVICE void MultiplyAccumulate<F16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                           uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Arithmetic ----

// 2^x, relative error 2^-22; results below 2^-126 are 0.
ATTEND_DEVICE float Exp2Fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
ATTEND_DEVICE float Exp2(float x) { return exp2f(x); }  // 2 ulp, subnormal results kept
ATTEND_DEVICE float Tanh(float x) { return tanhf(x); }  // 2 ulp
// The larger one; a number beats a NaN.
ATTEND_DEVICE float Max(float a, float b) { return fmaxf(a, b); }
// sin(pi x) and cos(pi x); no slow path at any x.
ATTEND_DEVICE void SinCosPi(double x, double* sine, double* cosine) { sincospi(x, sine, cosine); }
ATTEND_DEVICE double SquareRoot(double x) { return sqrt(x); }

// ---- Conversions: to nearest even, overflow of F16 gives infinity, NaN stays NaN ----

ATTEND_DEVICE float ToFloat(float value) { return value; }
ATTEND_DEVICE float ToFloat(Bf16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
ATTEND_DEVICE float ToFloat(F16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;\n" : "=f"(result) : "h"(value.bits));
  return result;
}

template <class T>
ATTEND_DEVICE T FromFloat(float value);
template <>
ATTEND_DEVICE float FromFloat<float>(float value) {
  return value;
}
template <>
ATTEND_DEVICE Bf16 FromFloat<Bf16>(float value) {
  Bf16 result;
  asm("cvt.rn.bf16.f32 %0, %1;\n" : "=h"(result.bits) : "f"(value));
  return result;
}
template <>
ATTEND_DEVICE F16 FromFloat<F16>(float value) {
  F16 result;
  asm("cvt.rn.f16.f32 %0, %1;\n" : "=h"(result.bits) : "f"(value));
  return result;
}

// Two values in one word, `low` in the low half.
template <class T>
ATTEND_DEVICE uint32_t Pack2(float low, float high);
template <>
ATTEND_DEVICE uint32_t Pack2<Bf16>(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
template <>
ATTEND_DEVICE uint32_t Pack2<F16>(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
ATTEND_DEVICE float WordAsFloat(uint32_t word) { return __uint_as_float(word); }
ATTEND_DEVICE uint32_t FloatAsWord(float value) { return __float_as_uint(value); }

// `value`, unknown to the compiler: what is derived from it is computed again where it is needed
// and takes no registers in between.
ATTEND_DEVICE int Opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

#endif  // __CUDACC__

// ---- Launch (host) ----

struct LaunchShape {
  int64_t blocks = 0;  // grid.x; 0 launches nothing
  int threads = 0;     // of a block, whole warps
  int shared_bytes = 0;
};

#ifdef __CUDACC__
// Queues `kernel` on `stream`; `name` is for the emulation's reports. cudaErrorInvalidValue when
// the shape is beyond the device.
template <class Params>
cudaError_t Launch(void (*kernel)(Params), const char* /*name*/, const LaunchShape& shape,
                   const Params& params, cudaStream_t stream) {
  static_assert(std::is_trivially_copyable_v<Params>);
  if (shape.blocks == 0) return cudaSuccess;
  if (shape.blocks > 0x7fffffff) return cudaErrorInvalidValue;
  void* arguments[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                          dim3(static_cast<unsigned>(shape.blocks)),
                          dim3(static_cast<unsigned>(shape.threads)), arguments,
                          static_cast<size_t>(shape.shared_bytes), stream);
}
// Allows blocks of `kernel` more dynamic shared memory than 48 KiB. Once, before its first launch.
template <class Params>
cudaError_t AllowSharedMemory(void (*kernel)(Params), int bytes) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
#endif

}  // namespace attend::device

#endif  // ATTEND_SIMT
