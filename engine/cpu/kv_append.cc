// SPDX-License-Identifier: Apache-2.0
//
// Whole vectors of tokens and dimensions go through registers; the few elements that remain go one
// by one through the conversions of engine/util/dtype.h, which give the same bits.
#include "engine/cpu/kv_append.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "engine/cpu/prefetch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/cpu/kv_append.cc"
#include "engine/cpu/simd_targets.h"
// clang-format off: the order matters.
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
#include "engine/cpu/vector_kernels-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attend {
namespace HWY_NAMESPACE {
namespace {

constexpr int kDimensions = 4;  // of a transposed piece

// rows[j] = dimension j of kLanes tokens whose rows lie `stride` floats apart.
HWY_INLINE void LoadTransposed(const float* from, int64_t stride, V (&rows)[kDimensions]) {
  const D d;
  V piece[4];  // 128-bit block b of piece k holds token 4 b + k
  for (int k = 0; k < 4; ++k) {
    const float* token = from + k * stride;
#if HWY_TARGET == HWY_AVX3
    __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(token));
    v = _mm512_insertf32x4(v, _mm_loadu_ps(token + 4 * stride), 1);
    v = _mm512_insertf32x4(v, _mm_loadu_ps(token + 8 * stride), 2);
    v = _mm512_insertf32x4(v, _mm_loadu_ps(token + 12 * stride), 3);
#else
    __m256 v = _mm256_castps128_ps256(_mm_loadu_ps(token));
    v = _mm256_insertf128_ps(v, _mm_loadu_ps(token + 4 * stride), 1);
#endif
    piece[k] = V{v};
  }
  const hn::RepartitionToWide<D> wide;  // pairs of floats
  const auto low01 = hn::BitCast(wide, hn::InterleaveLower(d, piece[0], piece[1]));
  const auto low23 = hn::BitCast(wide, hn::InterleaveLower(d, piece[2], piece[3]));
  const auto high01 = hn::BitCast(wide, hn::InterleaveUpper(d, piece[0], piece[1]));
  const auto high23 = hn::BitCast(wide, hn::InterleaveUpper(d, piece[2], piece[3]));
  rows[0] = hn::BitCast(d, hn::InterleaveLower(wide, low01, low23));
  rows[1] = hn::BitCast(d, hn::InterleaveUpper(wide, low01, low23));
  rows[2] = hn::BitCast(d, hn::InterleaveLower(wide, high01, high23));
  rows[3] = hn::BitCast(d, hn::InterleaveUpper(wide, high01, high23));
}

HWY_INLINE void StorePair(V low, V high, std::byte* to) {
  const auto units = hn::Or(hn::ShiftRight<16>(RoundBF16(low)), RoundBF16(high));
  hn::StoreU(units, U(), reinterpret_cast<uint32_t*>(to));
}

HWY_INLINE void StoreI8(V x, V scale, std::byte* to) {
  const D d;
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<int8_t, D> narrow;
  const V quotient = hn::IfThenElseZero(hn::Gt(scale, hn::Zero(d)), hn::Div(x, scale));
  const auto whole =
      hn::Min(hn::Max(hn::NearestInt(quotient), hn::Set(di, -127)), hn::Set(di, 127));
  hn::StoreU(hn::DemoteTo(narrow, whole), narrow, reinterpret_cast<int8_t*>(to));
}
float ScaleOf(const float* row, int64_t count) {
  const hn::Rebind<int32_t, D> di;
  constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
  auto most = hn::Zero(di);  // bits of magnitudes are in order
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const auto bits = hn::BitCast(di, hn::LoadU(D(), row + i));
    most = hn::Max(most, hn::And(bits, hn::Set(di, kMagnitude)));
  }
  int32_t bits = hn::GetLane(hn::MaxOfLanes(di, most));
  for (; i < count; ++i) bits = std::max(bits, std::bit_cast<int32_t>(row[i]) & kMagnitude);
  if (bits >= kInfinity) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(bits) / 127.0f;
}

void StoreElement(DType dtype, float x, float scale, std::byte* to) {
  if (dtype != DType::kI8) return StoreFloat(dtype, x, to, 0);
  const float quotient = scale > 0 ? std::nearbyint(x / scale) : 0.0f;
  *to = static_cast<std::byte>(static_cast<int8_t>(std::clamp(quotient, -127.0f, 127.0f)));
}

constexpr int64_t kTokensAhead = 16;  // fetched

void AppendKeysOfHead(const KvBlockLayout& layout, const HeadRows& rows, const float* scales,
                      std::byte* keys) {
  const D d;
  const DType dtype = layout.geometry.dtype;
  const int64_t depth = layout.geometry.head_dim;
  int64_t token = 0;
  int64_t whole = 0;  // dimensions done of whole vectors of tokens
  for (; token + kLanes <= rows.keys; token += kLanes) {
    const int64_t slot = rows.slot + token;
    for (int64_t i = token + kLanes; i < std::min(token + 2 * kLanes, rows.keys); ++i) {
      FetchRow<false>(rows.k + i * rows.k_stride, depth * int64_t{sizeof(float)});
    }
    for (whole = 0; whole + kDimensions <= depth; whole += kDimensions) {
      V x[kDimensions];
      LoadTransposed(rows.k + token * rows.k_stride + whole, rows.k_stride, x);
      if (dtype == DType::kBF16) {
        StorePair(x[0], x[1], keys + layout.KeyElement(whole, slot));
        StorePair(x[2], x[3], keys + layout.KeyElement(whole + 2, slot));
        continue;
      }
      for (int j = 0; j < kDimensions; ++j) {
        std::byte* to = keys + layout.KeyElement(whole + j, slot);
        if (dtype == DType::kI8) {
          StoreI8(x[j], hn::LoadU(d, scales + token), to);
        } else {
          StoreAs(dtype, x[j], to);
        }
      }
    }
  }
  for (int64_t i = 0; i < rows.keys; ++i) {
    const float* row = rows.k + i * rows.k_stride;
    for (int64_t j = i < token ? whole : 0; j < depth; ++j) {
      StoreElement(dtype, row[j], scales[i], keys + layout.KeyElement(j, rows.slot + i));
    }
    if (layout.paired() && depth % 2 == 1) {
      std::memset(keys + layout.KeyElement(depth, rows.slot + i), 0, 2);
    }
  }
}

// Rows of values of tokens in slots 2 i and 2 i + 1, interleaved. A token that is still to come is
// zero: the pair is read as a whole.
void AppendPairs(const KvBlockLayout& layout, const HeadRows& rows, std::byte* values) {
  const int64_t width = layout.geometry.v_head_dim;
  for (int64_t i = 0; i < rows.keys;) {
    const float* row = rows.v + i * rows.v_stride;
    const int64_t slot = rows.slot + i;
    const bool both = slot % 2 == 0 && i + 1 < rows.keys;
    for (int64_t next = i + kTokensAhead; next < std::min(i + kTokensAhead + 2, rows.keys);
         ++next) {
      FetchRow<false>(rows.v + next * rows.v_stride, width * int64_t{sizeof(float)});
    }
    int64_t c = 0;
    for (; both && c + kLanes <= width; c += kLanes) {
      StorePair(hn::LoadU(D(), row + c), hn::LoadU(D(), row + rows.v_stride + c),
                values + layout.ValueElement(slot, c));
    }
    if (both && c < width) {
      HWY_ALIGN std::byte units[kLanes * sizeof(float)];
      StorePair(LoadFirst(row + c, width - c), LoadFirst(row + rows.v_stride + c, width - c),
                units);
      std::memcpy(values + layout.ValueElement(slot, c), units, (width - c) * sizeof(float));
      c = width;
    }
    for (; c < width; ++c) {
      std::byte* to = values + layout.ValueElement(slot, c);
      StoreFloat(DType::kBF16, row[c], to, 0);
      if (slot % 2 == 0) StoreFloat(DType::kBF16, both ? row[rows.v_stride + c] : 0.0f, to, 1);
    }
    i += both ? 2 : 1;
  }
}

void AppendValuesOfHead(const KvBlockLayout& layout, const HeadRows& rows, const float* scales,
                        std::byte* values) {
  const D d;
  const int64_t width = layout.geometry.v_head_dim;
  const DType dtype = layout.geometry.dtype;
  if (layout.paired()) return AppendPairs(layout, rows, values);
  for (int64_t i = 0; i < rows.keys; ++i) {
    const float* row = rows.v + i * rows.v_stride;
    std::byte* to = values + layout.ValueElement(rows.slot + i, 0);
    if (i + kTokensAhead < rows.keys)
      FetchRow<false>(row + kTokensAhead * rows.v_stride, width * int64_t{sizeof(float)});
    const auto store = [&](V x, std::byte* at) {
      if (dtype == DType::kI8) return StoreI8(x, hn::Set(d, scales[i]), at);
      StoreAs(dtype, x, at);
    };
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) {
      store(hn::LoadU(d, row + c), to + c * DTypeBytes(dtype));
    }
    if (c < width) {
      HWY_ALIGN std::byte last[kLanes * sizeof(float)];
      store(LoadFirst(row + c, width - c), last);
      std::memcpy(to + c * DTypeBytes(dtype), last, (width - c) * DTypeBytes(dtype));
    }
  }
}

}  // namespace

void AppendHeadRows(const KvBlockLayout& layout, const HeadRows& rows, std::byte* block) {
  HWY_ALIGN float k_scales[kBlockTokens] = {};
  HWY_ALIGN float v_scales[kBlockTokens] = {};
  if (layout.geometry.dtype == DType::kI8) {
    for (int64_t i = 0; i < rows.keys; ++i) {
      k_scales[i] = ScaleOf(rows.k + i * rows.k_stride, layout.geometry.head_dim);
      v_scales[i] = ScaleOf(rows.v + i * rows.v_stride, layout.geometry.v_head_dim);
    }
    const size_t bytes = static_cast<size_t>(rows.keys) * sizeof(float);
    const int64_t offset = rows.slot * int64_t{sizeof(float)};
    std::memcpy(block + layout.KeyScaleOffset(rows.kv_head) + offset, k_scales, bytes);
    std::memcpy(block + layout.ValueScaleOffset(rows.kv_head) + offset, v_scales, bytes);
  }
  AppendKeysOfHead(layout, rows, k_scales, block + layout.KeyOffset(rows.kv_head));
  AppendValuesOfHead(layout, rows, v_scales, block + layout.ValueOffset(rows.kv_head));
}

}  // namespace HWY_NAMESPACE
}  // namespace attend
HWY_AFTER_NAMESPACE();
#endif  // AVX2 or AVX-512

#if HWY_ONCE
namespace attend {

void AppendHead(CpuIsa isa, const KvBlockLayout& layout, const HeadRows& rows, std::byte* block) {
  if (isa == CpuIsa::kAvx512) return N_AVX3::AppendHeadRows(layout, rows, block);
  N_AVX2::AppendHeadRows(layout, rows, block);
}

}  // namespace attend
#endif  // HWY_ONCE
