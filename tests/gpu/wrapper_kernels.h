// SPDX-License-Identifier: Apache-2.0
//
// One kernel per group of wrappers of engine/cuda/device.h, so that each wrapper can be compared on
// a real device with the tests' emulation of it. wrapper_check.cc runs them, machine_code_test.py
// reads what the compiler made of them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace attend::gpu {

// Every kernel: kBlocks blocks of kThreads threads; each thread reads kWords words of `in` and
// writes all its kWords words of `out`, at (block * kThreads + thread) * kWords.
inline constexpr int kBlocks = 2;
inline constexpr int kThreads = 64;
inline constexpr int kWords = 8;
inline constexpr int kTotalWords = kBlocks * kThreads * kWords;

struct WrapperParams {
  const uint32_t* in;
  uint32_t* out;
};

// What random words to give a kernel.
enum class Operands : uint8_t {
  kBits,      // any 32 bits
  kFloats,    // floats in [-24, 24], some of them special values
  kHalves,    // two bfloat16 or float16 numbers of the normal distribution
  kIntegers,  // two small integers as bfloat16 or float16: sums of products are exact
};
// How the output on the device may differ from the emulation's. Any two NaNs are equal except in
// kBits.
enum class Agreement : uint8_t {
  kBits,
  kRelative,   // floats within 2^-21, subnormal ones within the smallest
  kDoubles,    // pairs of words are doubles, within 2^-50
  kProduct,    // words 0-3: sums of 17 terms within 2^-18 of the sums of magnitudes, words 4-7
  kBf16Words,  // words 3, 4 and 7 are floats, the others two bfloat16 each; exact
  kF16Words,   // the same with float16
};

struct WrapperKernel {
  const char* name;
  cudaError_t (*launch)(const WrapperParams& params, cudaStream_t stream);
  Operands operands;
  bool f16;  // halves are float16, not bfloat16
  Agreement agreement;
};

extern const WrapperKernel kWrapperKernels[];
extern const int kWrapperKernelCount;

}  // namespace attend::gpu
