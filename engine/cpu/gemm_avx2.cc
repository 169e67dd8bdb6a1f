// SPDX-License-Identifier: Apache-2.0
//
// Gemm kernels for AVX2 with FMA and F16C: F32 weights, BF16 weights that are widened
// (RunWidened), and exact sums of 8-bit integers. Strips are two vectors wide.
#include <immintrin.h>

#include "engine/cpu/gemm_kernel.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include "engine/cpu/gemm_tile-inl.h"

namespace attend {
namespace {

struct Strip256 {
  static constexpr int kVectors = 2;
  static constexpr int kLanes = 8;

  ATTEND_GEMM_INLINE __m256 Load(const float* from) { return _mm256_loadu_ps(from); }
  ATTEND_GEMM_INLINE void Store(DType dtype, __m256 value, void* to) {
    if (dtype == DType::kF32) return _mm256_storeu_ps(static_cast<float*>(to), value);
    __m128i half;
    if (dtype == DType::kF16) {
      half = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
    } else {
      const __m256i bits = _mm256_castps_si256(value);
      const __m256i high = _mm256_srli_epi32(bits, 16);
      const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
      const __m256i rounded = _mm256_srli_epi32(
          _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
      const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
      const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
      const __m256i words = _mm256_blendv_epi8(rounded, quiet, nan);  // each below 2^16
      half = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    }
    _mm_storeu_si128(static_cast<__m128i*>(to), half);
  }
};

struct FloatSums256 : Strip256 {
  using Sum = __m256;
  using Value = float;

  ATTEND_GEMM_INLINE __m256 Zero() { return _mm256_setzero_ps(); }
  ATTEND_GEMM_INLINE __m256 LoadSum(const float* from) { return _mm256_loadu_ps(from); }
  ATTEND_GEMM_INLINE void StoreSum(__m256 sum, float* to) { _mm256_storeu_ps(to, sum); }
  ATTEND_GEMM_INLINE __m256 Finish(const GemmStrip& strip, int64_t /*row*/, int64_t column,
                                   __m256 sum) {
    return _mm256_add_ps(sum, _mm256_loadu_ps(strip.bias + column));
  }
  template <int kRows, int kUsed>
  ATTEND_GEMM_INLINE void Add(const __m256 (&w)[kUsed], const float* const* x, int64_t i,
                              __m256 (&sum)[kRows][kUsed]) {
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m256 value = _mm256_broadcast_ss(x[r] + i);
#pragma GCC unroll 2
      for (int v = 0; v < kUsed; ++v) sum[r][v] = _mm256_fmadd_ps(value, w[v], sum[r][v]);
    }
  }
};

ATTEND_GEMM_INLINE __m256i LoadBytes(const std::byte* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

struct F32Unit : FloatSums256 {
  static constexpr int kGroup = 1;

  template <int kRows, int kUsed>
  ATTEND_GEMM_INLINE void Step(const std::byte* weights, const float* const* x, int64_t i,
                               __m256 (&sum)[kRows][kUsed]) {
    __m256 w[kUsed];
#pragma GCC unroll 2
    for (int v = 0; v < kUsed; ++v) w[v] = _mm256_castsi256_ps(LoadBytes(weights + 32 * v));
    Add<kRows, kUsed>(w, x, i, sum);
  }
};

// A pair of BF16 as a 32-bit lane: the even element is the low half.
template <bool kStore>
struct PairsUnit : FloatSums256 {
  static constexpr int kGroup = 2;

  ATTEND_GEMM_INLINE __m256 Even(const std::byte* pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(LoadBytes(pairs), 16));
  }
  ATTEND_GEMM_INLINE __m256 Odd(const std::byte* pairs) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    return _mm256_castsi256_ps(_mm256_and_si256(LoadBytes(pairs), high));
  }
  template <int kUsed>
  ATTEND_GEMM_INLINE void StoreWide(const __m256 (&w)[kUsed], float* to) {
#pragma GCC unroll 2
    for (int v = 0; v < kUsed; ++v) _mm256_storeu_ps(to + kLanes * v, w[v]);
  }
  template <int kRows, int kUsed>
  ATTEND_GEMM_INLINE void Step(const std::byte* weights, const float* const* x, int64_t i,
                               __m256 (&sum)[kRows][kUsed],
                               [[maybe_unused]] float* wide = nullptr) {
    __m256 w[kUsed];
#pragma GCC unroll 2
    for (int v = 0; v < kUsed; ++v) w[v] = Even(weights + 32 * v);
    if constexpr (kStore) StoreWide(w, wide);
    Add<kRows, kUsed>(w, x, i, sum);
    // Pairs are loaded again: kept meanwhile, they would push sums out of the registers.
    asm("" : "+r"(weights));
#pragma GCC unroll 2
    for (int v = 0; v < kUsed; ++v) w[v] = Odd(weights + 32 * v);
    if constexpr (kStore) StoreWide(w, wide + kVectors * kLanes);
    Add<kRows, kUsed>(w, x, i + 1, sum);
  }
};
using BF16Unit = PairsUnit<false>;
// Leaves the widened weights in scratch, for the tiles after it.
struct WideningUnit : PairsUnit<true> {
  static constexpr bool kWidens = true;
};

// Sums of products of signed bytes. The one instruction for bytes takes unsigned ones first, so the
// input gives its magnitude and its sign goes to the weights; two products of at most 127 x 127
// stay below the 2^15 at which it would saturate.
struct I8Unit : Strip256 {
  using Sum = __m256i;
  using Value = int8_t;
  static constexpr int kGroup = 4;

  ATTEND_GEMM_INLINE __m256i Zero() { return _mm256_setzero_si256(); }
  ATTEND_GEMM_INLINE __m256i LoadSum(const float* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  ATTEND_GEMM_INLINE void StoreSum(__m256i sum, float* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), sum);
  }
  ATTEND_GEMM_INLINE __m256 Finish(const GemmStrip& strip, int64_t row, int64_t column,
                                   __m256i sum) {
    const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(strip.x_scale[row]),
                                       _mm256_loadu_ps(strip.weight_scale + column));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, _mm256_loadu_ps(strip.bias + column));
  }
  template <int kRows, int kUsed>
  ATTEND_GEMM_INLINE void Step(const std::byte* weights, const int8_t* const* x, int64_t i,
                               __m256i (&sum)[kRows][kUsed]) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i w[kUsed];
#pragma GCC unroll 2
    for (int v = 0; v < kUsed; ++v) w[v] = LoadBytes(weights + 32 * v);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      int four;
      __builtin_memcpy(&four, x[r] + i, sizeof(four));
      const __m256i value = _mm256_set1_epi32(four);
      const __m256i magnitude = _mm256_abs_epi8(value);
#pragma GCC unroll 2
      for (int v = 0; v < kUsed; ++v) {
        const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(w[v], value));
        sum[r][v] = _mm256_add_epi32(sum[r][v], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
};

}  // namespace
}  // namespace attend
#pragma GCC pop_options

namespace attend {

const GemmKernel kGemmAvx2F32{.name = "avx2 f32", .strip_columns = 16, .run = RunStrip<F32Unit>};
const GemmKernel kGemmAvx2BF16{.name = "avx2 bf16 widened",
                               .strip_columns = 16,
                               .group = 2,
                               .packed = DType::kBF16,
                               .run = RunWidened<BF16Unit, WideningUnit, F32Unit>};
const GemmKernel kGemmAvx2I8{.name = "avx2 i8",
                             .strip_columns = 16,
                             .group = 4,
                             .packed = DType::kI8,
                             .input = DType::kI8,
                             .run = RunStrip<I8Unit>};

}  // namespace attend
