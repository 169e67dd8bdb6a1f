// SPDX-License-Identifier: Apache-2.0
//
// What the AVX-512 gemm kernels share: strips of four vectors, and a vector of results stored as
// F32, F16 or BF16 with the bits of engine/util/dtype.h. Included after <immintrin.h> and the
// target pragma.
#include "engine/cpu/gemm_tile-inl.h"

namespace attend {
namespace {

struct Strip512 {
  static constexpr int kVectors = 4;
  static constexpr int kLanes = 16;

  ATTEND_GEMM_INLINE __m512 Load(const float* from) { return _mm512_loadu_ps(from); }
  ATTEND_GEMM_INLINE void Store(DType dtype, __m512 value, void* to) {
    if (dtype == DType::kF32) return _mm512_storeu_ps(to, value);
    __m256i half;
    if (dtype == DType::kF16) {
      half = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
    } else {
      const __m512i bits = _mm512_castps_si512(value);
      const __m512i high = _mm512_srli_epi32(bits, 16);
      const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
      const __m512i rounded = _mm512_srli_epi32(
          _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
      const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
      const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
      half = _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet));
    }
    _mm256_storeu_si256(static_cast<__m256i*>(to), half);
  }
};

struct FloatSums512 : Strip512 {
  using Sum = __m512;

  ATTEND_GEMM_INLINE __m512 Zero() { return _mm512_setzero_ps(); }
  ATTEND_GEMM_INLINE __m512 LoadSum(const float* from) { return _mm512_loadu_ps(from); }
  ATTEND_GEMM_INLINE void StoreSum(__m512 sum, float* to) { _mm512_storeu_ps(to, sum); }
  ATTEND_GEMM_INLINE __m512 Finish(const GemmStrip& strip, int64_t /*row*/, int64_t column,
                                   __m512 sum) {
    return _mm512_add_ps(sum, _mm512_loadu_ps(strip.bias + column));
  }
};

}  // namespace
}  // namespace attend
