// SPDX-License-Identifier: Apache-2.0
//
// Gemm kernels for AVX-512 F, BW, DQ, VL that compute in float32: F32 weights, and BF16 weights
// that stay BF16 in memory. Widening is exact, so it does not matter where it happens: in registers
// for few rows, once per block into scratch for many.
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

// Widening a block costs as much as half a tile; doing it in registers costs a sixth of every tile
// where the shift shares a port with the multiplications.
constexpr int64_t kMaxRowsWidenedInRegisters = 24;

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

struct BF16Unit : FloatSums512 {
  using Value = float;
  static constexpr int kGroup = 2;

  template <int kRows, int kUsed>
  ATTEND_GEMM_INLINE void Step(const std::byte* weights, const float* const* x, int64_t i,
                               __m512 (&sum)[kRows][kUsed]) {
    __m512 w[kUsed];
#pragma GCC unroll 4
    for (int v = 0; v < kUsed; ++v) w[v] = WidenEven(_mm512_loadu_si512(weights + kLine * v));
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
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m512 value = _mm512_set1_ps(x[r][i + 1]);
#pragma GCC unroll 4
      for (int v = 0; v < kUsed; ++v) sum[r][v] = _mm512_fmadd_ps(value, w[v], sum[r][v]);
    }
  }
};

// Packed pairs of `groups` groups to [2 * groups][64] floats.
void Widen(const std::byte* pairs, int64_t groups, float* wide) {
  for (int64_t g = 0; g < groups; ++g) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const __m512i both = _mm512_loadu_si512(pairs + g * kGroupBytes<BF16Unit> + kLine * v);
      _mm512_storeu_ps(wide + g * 128 + 16 * v, WidenEven(both));
      _mm512_storeu_ps(wide + g * 128 + 64 + 16 * v, WidenOdd(both));
    }
  }
}

void RunBF16(const GemmStrip& strip) {
  if (strip.rows <= kMaxRowsWidenedInRegisters) return RunStrip<BF16Unit>(strip);
  ForBlocks<BF16Unit>(strip, [&](Block block) {
    Widen(block.weights, block.groups + (block.tail > 0 ? 1 : 0), strip.wide);
    block.weights = reinterpret_cast<const std::byte*>(strip.wide);
    block.groups = 2 * block.groups + block.tail;
    block.tail = 0;
    block.ahead_lines /= 2;  // twice the groups for the same bytes
    RunBlock<F32Unit>(block);
  });
}

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
                                 .run = RunBF16};

}  // namespace attend
