// SPDX-License-Identifier: Apache-2.0
//
// Gemm kernel for AVX512_VNNI: groups of four 8-bit integers, summed exactly in int32. Its
// instruction multiplies unsigned by signed bytes, so inputs come with 128 added, and 128 times the
// sum of a column's weights is taken off at the end (modulo 2^32: an intermediate sum may wrap).
#include <immintrin.h>

#include "engine/cpu/gemm_kernel.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
// GCC 12 warns of its own intrinsics' undefined operands.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include "engine/cpu/gemm_avx512-inl.h"

namespace attend {
namespace {

struct VnniUnit : Strip512 {
  using Sum = __m512i;
  using Value = uint8_t;
  static constexpr int kGroup = 4;

  ATTEND_GEMM_INLINE __m512i Zero() { return _mm512_setzero_si512(); }
  ATTEND_GEMM_INLINE __m512i LoadSum(const float* from) { return _mm512_loadu_si512(from); }
  ATTEND_GEMM_INLINE void StoreSum(__m512i sum, float* to) { _mm512_storeu_si512(to, sum); }
  ATTEND_GEMM_INLINE __m512 Finish(const GemmStrip& strip, int64_t row, int64_t column,
                                   __m512i sum) {
    const __m512i exact = _mm512_sub_epi32(sum, _mm512_loadu_si512(strip.weight_offset + column));
    const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(strip.x_scale[row]),
                                       _mm512_loadu_ps(strip.weight_scale + column));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), scale, _mm512_loadu_ps(strip.bias + column));
  }

  template <int kRows, int kUsed>
  ATTEND_GEMM_INLINE void Step(const std::byte* weights, const uint8_t* const* x, int64_t i,
                               __m512i (&sum)[kRows][kUsed]) {
    __m512i w[kUsed];
#pragma GCC unroll 4
    for (int v = 0; v < kUsed; ++v) w[v] = _mm512_loadu_si512(weights + kLine * v);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      int four;
      __builtin_memcpy(&four, x[r] + i, sizeof(four));
      const __m512i value = _mm512_set1_epi32(four);
#pragma GCC unroll 4
      for (int v = 0; v < kUsed; ++v) sum[r][v] = _mm512_dpbusd_epi32(sum[r][v], value, w[v]);
    }
  }
};

}  // namespace
}  // namespace attend
#pragma GCC pop_options

namespace attend {

const GemmKernel kGemmVnniI8{.name = "avx512_vnni i8",
                             .strip_columns = 64,
                             .group = 4,
                             .packed = DType::kI8,
                             .input = DType::kI8,
                             .input_offset = 128,
                             .run = RunStrip<VnniUnit>};

}  // namespace attend
