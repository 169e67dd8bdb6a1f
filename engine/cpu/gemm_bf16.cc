// SPDX-License-Identifier: Apache-2.0
//
// Gemm kernel for AVX512_BF16: products of pairs of BF16, summed in float32.
#include <immintrin.h>

#include "engine/cpu/gemm_kernel.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
// GCC 12 warns of its own intrinsics' undefined operands.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include "engine/cpu/gemm_avx512-inl.h"

namespace attend {
namespace {

struct BF16DotUnit : FloatSums512 {
  using Value = uint16_t;
  static constexpr int kGroup = 2;

  template <int kRows, int kUsed>
  ATTEND_GEMM_INLINE void Step(const std::byte* weights, const uint16_t* const* x, int64_t i,
                               __m512 (&sum)[kRows][kUsed]) {
    __m512bh w[kUsed];
#pragma GCC unroll 4
    for (int v = 0; v < kUsed; ++v) w[v] = (__m512bh)_mm512_loadu_si512(weights + kLine * v);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      int pair;
      __builtin_memcpy(&pair, x[r] + i, sizeof(pair));
      const auto value = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int v = 0; v < kUsed; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], value, w[v]);
    }
  }
};

}  // namespace
}  // namespace attend
#pragma GCC pop_options

namespace attend {

const GemmKernel kGemmBF16Dot{.name = "avx512_bf16 dot",
                              .strip_columns = 64,
                              .group = 2,
                              .packed = DType::kBF16,
                              .input = DType::kBF16,
                              .run = RunStrip<BF16DotUnit>};

}  // namespace attend
