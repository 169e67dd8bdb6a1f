// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/probe_kernels.h"

#include "engine/cpu/cpu_info.h"

namespace attend::bench {
namespace {

// Operands that differ from lane to lane and in sign: zeros cost less power, and so a higher clock.
struct alignas(64) Operands {
  float a[16], b[16];
  uint16_t a16[32], b16[32];
  int8_t a8[64], b8[64];
  Operands() {
    for (int i = 0; i < 16; ++i) {
      a[i] = 0.75f + 0.03125f * static_cast<float>(i);
      b[i] = (i % 2 == 0 ? 1e-3f : -1e-3f) * static_cast<float>(16 - i);
    }
    for (int i = 0; i < 32; ++i) {
      a16[i] = BF16FromFloat(a[i % 16]);
      b16[i] = BF16FromFloat(b[(i * 5) % 16]);
    }
    for (int i = 0; i < 64; ++i) {
      a8[i] = static_cast<int8_t>(i * 37);
      b8[i] = static_cast<int8_t>(i * 91);
    }
  }
};
const Operands kOperands;

// clang-format off
#define ATTEND_12(op) op(0) op(1) op(2) op(3) op(4) op(5) op(6) op(7) op(8) op(9) op(10) op(11)
#define ATTEND_24(op) ATTEND_12(op) op(12) op(13) op(14) op(15) op(16) op(17) op(18) op(19) op(20) \
  op(21) op(22) op(23)
// clang-format on
#define ATTEND_CLEAR512(i) "vpxorq %%zmm" #i ", %%zmm" #i ", %%zmm" #i "\n\t"
#define ATTEND_FMA512(i) "vfmadd231ps %%zmm24, %%zmm25, %%zmm" #i "\n\t"
#define ATTEND_DOT512(i) "vdpbf16ps %%zmm24, %%zmm25, %%zmm" #i "\n\t"
#define ATTEND_INT512(i) "vpdpbusd %%zmm24, %%zmm25, %%zmm" #i "\n\t"
#define ATTEND_CLEAR256(i) "vxorps %%ymm" #i ", %%ymm" #i ", %%ymm" #i "\n\t"
#define ATTEND_FMA256(i) "vfmadd231ps %%ymm12, %%ymm13, %%ymm" #i "\n\t"
#define ATTEND_CLOBBER512                                                                        \
  "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
      "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20",  \
      "xmm21", "xmm22", "xmm23", "xmm24", "xmm25"

// A function of 24 accumulators: zeroed, then `rounds` times one instruction on each.
#define ATTEND_PROBE512(name, instruction, a, b, operations)                                     \
  __attribute__((target("avx512f"))) double name(int64_t rounds) {                               \
    int64_t left = rounds;                                                                       \
    __asm__ volatile(ATTEND_24(ATTEND_CLEAR512) "vmovdqu64 (%1), %%zmm24\n\t"                  \
                     "vmovdqu64 (%2), %%zmm25\n\t"                                             \
                     ".p2align 6\n"                                                            \
                     "1:\n\t" ATTEND_24(instruction) "dec %0\n\t"                              \
                     "jnz 1b\n\t"                                                              \
                     "vzeroupper"                                                              \
                     : "+r"(left)                                                              \
                     : "r"(a), "r"(b)                                                          \
                     : "memory", ATTEND_CLOBBER512); \
    return static_cast<double>(rounds) * 24 * (operations);                                      \
  }

}  // namespace

ATTEND_PROBE512(RunFma512, ATTEND_FMA512, kOperands.a, kOperands.b, 2 * 16)
ATTEND_PROBE512(RunBF16Dot, ATTEND_DOT512, kOperands.a16, kOperands.b16, 2 * 32)
ATTEND_PROBE512(RunInt8Dot, ATTEND_INT512, kOperands.a8, kOperands.b8, 2 * 64)

__attribute__((target("avx2"))) double RunFma256(int64_t rounds) {
  int64_t left = rounds;
  __asm__ volatile(ATTEND_12(ATTEND_CLEAR256) "vmovups (%1), %%ymm12\n\t"
                   "vmovups (%2), %%ymm13\n\t"
                   ".p2align 6\n"
                   "1:\n\t" ATTEND_12(ATTEND_FMA256) "dec %0\n\t"
                   "jnz 1b\n\t"
                   "vzeroupper"
                   : "+r"(left)
                   : "r"(kOperands.a), "r"(kOperands.b)
                   : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6",
                     "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13");
  return static_cast<double>(rounds) * 12 * 2 * 8;
}

ProbeSet DetectProbes() {
  const CpuInfo cpu = DetectCpu();
  return {cpu.avx512, cpu.avx512_bf16, cpu.avx512 && __builtin_cpu_supports("avx512vnni") != 0};
}

namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kLines = 4;  // of a piece before the next piece's

// An odd number of steps: pieces a power of two apart would fall into the same sets of the caches
// and rows of the memory (seen: half the bandwidth with 4 and 8 streams).
int64_t PieceBytes(int64_t bytes, int streams) {
  constexpr int64_t kStep = kLine * kLines;
  const int64_t steps = bytes / streams / kStep;
  return (steps - (steps + 1) % 2) * kStep;
}

__attribute__((target("avx512f"), always_inline)) inline void Touch512(const std::byte* line) {
  __asm__ volatile("vmovdqu64 (%0), %%zmm0" : : "r"(line) : "xmm0");
}

__attribute__((target("avx2"), always_inline)) inline void Touch256(const std::byte* line) {
  __asm__ volatile("vmovdqu (%0), %%ymm0\n\tvmovdqu 32(%0), %%ymm1" : : "r"(line) : "xmm0", "xmm1");
}

// The loop of both sets; a macro, since a function for one target can't be inlined into another's.
#define ATTEND_READ(name, set, touch)                                                           \
  template <int streams>                                                                        \
  __attribute__((target(set))) void name(const std::byte* data, int64_t bytes, int64_t ahead) { \
    const int64_t piece = PieceBytes(bytes, streams);                                           \
    for (int64_t at = 0; at < piece; at += kLine * kLines) {                                    \
      for (int stream = 0; stream < streams; ++stream) {                                        \
        const std::byte* const lines = data + stream * piece + at;                              \
        for (int64_t line = 0; line < kLines; ++line) {                                         \
          if (ahead > 0) __builtin_prefetch(lines + line * kLine + ahead, 0, 3);                \
          touch(lines + line * kLine);                                                          \
        }                                                                                       \
      }                                                                                         \
    }                                                                                           \
  }
ATTEND_READ(Read512, "avx512f", Touch512)
ATTEND_READ(Read256, "avx2", Touch256)

using ReadFunction = void (*)(const std::byte*, int64_t, int64_t);

}  // namespace

void ReadMemory(bool avx512, const std::byte* data, int64_t bytes, int streams, int64_t ahead) {
  const ReadFunction read = streams >= 8   ? (avx512 ? Read512<8> : Read256<8>)
                            : streams >= 4 ? (avx512 ? Read512<4> : Read256<4>)
                            : streams >= 2 ? (avx512 ? Read512<2> : Read256<2>)
                                           : (avx512 ? Read512<1> : Read256<1>);
  read(data, bytes, ahead);
}

double RunCycles(int64_t multiplications) {
  int64_t left = multiplications / 8;
  uint64_t value = 3;
  __asm__ volatile(
      ".p2align 6\n"
      "1:\n\t"
      "imul %1, %1\n\timul %1, %1\n\timul %1, %1\n\timul %1, %1\n\t"
      "imul %1, %1\n\timul %1, %1\n\timul %1, %1\n\timul %1, %1\n\t"
      "dec %0\n\t"
      "jnz 1b"
      : "+r"(left), "+r"(value)
      :
      : "cc");
  return 3.0 * static_cast<double>(multiplications / 8 * 8);
}

}  // namespace attend::bench
