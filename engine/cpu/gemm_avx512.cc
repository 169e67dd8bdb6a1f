// SPDX-License-Identifier: Apache-2.0
//
// Gemm kernels for AVX-512 F, BW, DQ, VL that compute in float32: F32 weights, and BF16 weights
// that stay BF16 in memory. Widening is exact, so it does not matter where it happens: in registers
// for few rows, once per block, by its first tile, for many.
#include <immintrin.h>

#include "engine/cpu/gemm_kernel.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
// GCC 12 warns of its own intrinsics' undefined operands.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include "engine/cpu/gemm_avx512-inl.h"

namespace attend {
namespace {

struct F32Unit : FloatSums512 {
  using Value = float;
  static constexpr int kGroup = 1;

  template <int kRows, int kUsed>
  ATTEND_GEMM_INLINE void Step(const std::byte* weights, const float* const* x, int64_t i,
                               __m512 (&sum)[kRows][kUsed]) {
    __m512 w[kUsed];
#pragma GCC unroll 4
    for (int v = 0; v < kUsed; ++v) w[v] = _mm512_loadu_ps(weights + kLine * v);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m512 value = _mm512_set1_ps(x[r][i]);
#pragma GCC unroll 4
      for (int v = 0; v < kUsed; ++v) sum[r][v] = _mm512_fmadd_ps(value, w[v], sum[r][v]);
    }
  }
};

// A pair of BF16 as a 32-bit lane: the even element is the low half.
ATTEND_GEMM_INLINE __m512 WidenEven(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}
ATTEND_GEMM_INLINE __m512 WidenOdd(__m512i pairs) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, high));
}

template <bool kStore>
struct PairsUnit : FloatSums512 {
  using Value = float;
  static constexpr int kGroup = 2;

  template <int kRows, int kUsed>
  ATTEND_GEMM_INLINE void Step(const std::byte* weights, const float* const* x, int64_t i,
                               __m512 (&sum)[kRows][kUsed],
                               [[maybe_unused]] float* wide = nullptr) {
    __m512 w[kUsed];
#pragma GCC unroll 4
    for (int v = 0; v < kUsed; ++v) w[v] = WidenEven(_mm512_loadu_si512(weights + kLine * v));
    if constexpr (kStore) StoreWide(w, wide);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m512 value = _mm512_set1_ps(x[r][i]);
#pragma GCC unroll 4
      for (int v = 0; v < kUsed; ++v) sum[r][v] = _mm512_fmadd_ps(value, w[v], sum[r][v]);
    }
    // Pairs are loaded again: kept meanwhile, they would push sums out of the registers.
    asm("" : "+r"(weights));
#pragma GCC unroll 4
    for (int v = 0; v < kUsed; ++v) w[v] = WidenOdd(_mm512_loadu_si512(weights + kLine * v));
    if constexpr (kStore) StoreWide(w, wide + kVectors * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m512 value = _mm512_set1_ps(x[r][i + 1]);
#pragma GCC unroll 4
      for (int v = 0; v < kUsed; ++v) sum[r][v] = _mm512_fmadd_ps(value, w[v], sum[r][v]);
    }
  }

  template <int kUsed>
  ATTEND_GEMM_INLINE void StoreWide(const __m512 (&w)[kUsed], float* to) {
#pragma GCC unroll 4
    for (int v = 0; v < kUsed; ++v) _mm512_storeu_ps(to + kLanes * v, w[v]);
  }
};
using BF16Unit = PairsUnit<false>;
// Leaves the widened weights in scratch, for the tiles after it.
struct WideningUnit : PairsUnit<true> {
  static constexpr bool kWidens = true;
};

}  // namespace
}  // namespace attend
#pragma GCC pop_options

namespace attend {

const GemmKernel kGemmAvx512F32{
    .name = "avx512 f32", .strip_columns = 64, .run = RunStrip<F32Unit>};
const GemmKernel kGemmAvx512BF16{.name = "avx512 bf16 widened",
                                 .strip_columns = 64,
                                 .group = 2,
                                 .packed = DType::kBF16,
                                 .run = RunWidened<BF16Unit, WideningUnit, F32Unit>};

}  // namespace attend
