// SPDX-License-Identifier: Apache-2.0
//
// See wrapper_kernels.h. Like the engine's kernels these are compiled twice: for devices, and as
// C++ for the emulation. Each does with its words what needs the wrapper to be exactly right: a
// wrong lane, byte or order changes an output word.
#include "engine/cuda/device.h"
#include "tests/gpu/wrapper_kernels.h"

namespace attend::gpu {
namespace {

using namespace attend::device;

// The words of this thread.
__device__ __forceinline__ int64_t FirstWord() {
  return (int64_t{BlockIndex()} * BlockThreads() + ThreadIndex()) * kWords;
}
__device__ __forceinline__ Global<const uint32_t> In(const WrapperParams& params) {
  return Global<const uint32_t>(params.in) + FirstWord();
}
__device__ __forceinline__ Global<uint32_t> Out(const WrapperParams& params) {
  return Global<uint32_t>(params.out) + FirstWord();
}
__device__ __forceinline__ float InFloat(const WrapperParams& params, int word) {
  return WordAsFloat(In(params)[word]);
}
__device__ __forceinline__ void StoreDouble(Global<uint32_t> to, double value) {
  union {
    double number;
    uint32_t word[2];
  } bits;
  bits.number = value;
  to[0] = bits.word[0];
  to[1] = bits.word[1];
}

// The vectors of another thread, by way of shared memory [kThreads, 8 words].
__global__ void Vectors(const __grid_constant__ WrapperParams params) {
  const auto shared = SharedArray<uint32_t>("vectors", 0, kThreads * kWords);
  const int mine = ThreadIndex() * kWords;
  const int other = (ThreadIndex() + 33) % kThreads * kWords;
  Store16(shared + mine, Load16(In(params)));
  Store16(shared + (mine + 4), Load16(In(params) + 4));
  SyncThreads();
  Store16(Out(params), Load16(shared + (other + 4)));
  Store16(Out(params) + 4, Load16(shared + other));
}

// Two groups of copies; vectors whose first word is odd are left out and must arrive as zeros.
__global__ void AsyncCopies(const __grid_constant__ WrapperParams params) {
  const auto shared = SharedArray<uint32_t>("copies", 0, kThreads * kWords);
  const int mine = ThreadIndex() * kWords;
  const int other = (ThreadIndex() + 33) % kThreads * kWords;
  for (int half = 0; half < 2; ++half) {
    const bool valid = In(params)[half * 4] % 2 == 0;
    CopyAsync16(shared + (mine + half * 4), In(params) + half * 4, valid);
    CommitCopies();
  }
  WaitCopies<1>();
  SyncThreads();
  Store16(Out(params), Load16(shared + other));
  WaitCopies<0>();
  SyncThreads();
  Store16(Out(params) + 4, Load16(shared + (other + 4)));
}

// Each barrier carries a word from a thread that could not have reached it otherwise.
__global__ void Barriers(const __grid_constant__ WrapperParams params) {
  const auto shared = SharedArray<uint32_t>("barriers", 0, kThreads);
  const int thread = ThreadIndex();
  const int warp = thread / 32;
  const auto out = Out(params);
  shared[thread] = In(params)[0];
  SyncThreads();
  out[0] = shared[(thread + 17) % kThreads];
  SyncNamed(1, kThreads);
  shared[thread] = In(params)[1];
  SyncNamed(2 + warp, 32);
  out[1] = shared[warp * 32 + (thread + 5) % 32];
  SyncNamed(2 + warp, 32);
  shared[thread] = In(params)[2];
  SyncWarp();
  out[2] = shared[warp * 32 + (thread + 11) % 32];
  // One thread of the block, none, all.
  out[3] = SyncThreadsOr(thread == static_cast<int>(params.in[0] % kThreads)) ? 1 : 0;
  out[4] = SyncThreadsOr(thread < 0) ? 1 : 0;
  out[5] = SyncThreadsOr(true) ? 1 : 0;
  out[6] = static_cast<uint32_t>(BlockIndex() * 1000 + GridBlocks() * 100 + BlockThreads());
  out[7] = static_cast<uint32_t>(thread);
}

__global__ void Collectives(const __grid_constant__ WrapperParams params) {
  const int lane = ThreadIndex() % 32;
  const auto out = Out(params);
  out[0] = FloatAsWord(ShuffleXor(InFloat(params, 0), 1));
  out[1] = FloatAsWord(ShuffleXor(InFloat(params, 1), 2));
  out[2] = FloatAsWord(ShuffleXor(InFloat(params, 2), 16));
  out[3] = FloatAsWord(ShuffleXor(InFloat(params, 3), 31));
  out[4] = FloatAsWord(Shuffle(InFloat(params, 4), 7));
  out[5] = FloatAsWord(Shuffle(InFloat(params, 5), (lane * 5 + 3) % 32));
  out[6] = Any(In(params)[6] % 64 == 0) ? 1 : 0;
  out[7] = (Any(lane == 31) ? 2 : 0) + (Any(lane > 31) ? 1 : 0);
}

// The shared memory is 128 rows of 16 bytes, two per thread: an even and an odd one, each 4
// matrices of a warp.
template <bool kTransposed>
__device__ void Matrices(const WrapperParams& params) {
  const auto shared = SharedArray<uint32_t>("matrices", 0, kThreads * kWords);
  const int mine = ThreadIndex() * kWords;
  Store16(shared + mine, Load16(In(params)));
  Store16(shared + (mine + 4), Load16(In(params) + 4));
  SyncThreads();
  // The rows of the other warp in another order, so that a row's address matters.
  const int warp = ThreadIndex() / 32, lane = ThreadIndex() % 32;
  const int row = (1 - warp) * 32 + (lane * 13 + 7) % 32;
  for (int half = 0; half < 2; ++half) {
    uint32_t words[4];
    if constexpr (kTransposed) {
      LoadMatrix4Transposed(words, shared + (row * kWords + half * 4));
    } else {
      LoadMatrix4(words, shared + (row * kWords + half * 4));
    }
    for (int i = 0; i < 4; ++i) Out(params)[half * 4 + i] = words[i];
  }
}
__global__ void LoadMatrices(const __grid_constant__ WrapperParams params) {
  Matrices<false>(params);
}
__global__ void LoadMatricesTransposed(const __grid_constant__ WrapperParams params) {
  Matrices<true>(params);
}

// Words 0-3 are a, 4 and 5 are b, 6 and 7 make the start of d. Second, the same with magnitudes.
template <class T>
__device__ void Products(const WrapperParams& params) {
  const auto in = In(params);
  const float start[2] = {ToFloat(T{static_cast<uint16_t>(in[6] & 0xffff)}),
                          ToFloat(T{static_cast<uint16_t>(in[7] & 0xffff)})};
  constexpr uint32_t kMagnitudes = 0x7fff7fff;
  float d[4] = {start[0], start[1], -start[0], 3 * start[1]};
  float bound[4];
  for (int i = 0; i < 4; ++i) bound[i] = Max(d[i], -d[i]);
  const uint32_t a[4] = {in[0], in[1], in[2], in[3]};
  MultiplyAccumulate<T>(d, a, in[4], in[5]);
  const uint32_t magnitudes[4] = {a[0] & kMagnitudes, a[1] & kMagnitudes, a[2] & kMagnitudes,
                                  a[3] & kMagnitudes};
  MultiplyAccumulate<T>(bound, magnitudes, in[4] & kMagnitudes, in[5] & kMagnitudes);
  for (int i = 0; i < 4; ++i) {
    Out(params)[i] = FloatAsWord(d[i]);
    Out(params)[4 + i] = FloatAsWord(bound[i]);
  }
}
__global__ void ProductsBf16(const __grid_constant__ WrapperParams params) {
  Products<Bf16>(params);
}
__global__ void ProductsF16(const __grid_constant__ WrapperParams params) { Products<F16>(params); }

__global__ void Functions(const __grid_constant__ WrapperParams params) {
  const auto out = Out(params);
  out[0] = FloatAsWord(Exp2Fast(InFloat(params, 0)));
  out[1] = FloatAsWord(Exp2Fast(8 * InFloat(params, 1)));
  out[2] = FloatAsWord(Exp2(InFloat(params, 2)));
  out[3] = FloatAsWord(Exp2(8 * InFloat(params, 3)));
  out[4] = FloatAsWord(Tanh(InFloat(params, 4)));
  out[5] = FloatAsWord(Tanh(InFloat(params, 5) / 64));
  out[6] = FloatAsWord(Max(InFloat(params, 6), InFloat(params, 7)));
  out[7] = FloatAsWord(Max(InFloat(params, 7), InFloat(params, 6)));
}

__global__ void Doubles(const __grid_constant__ WrapperParams params) {
  const auto out = Out(params);
  double sine, cosine;
  // Angles as large as RoPE's. No product is followed by a sum anywhere: compilers may fuse those.
  SinCosPi(static_cast<double>(InFloat(params, 0)) * 43690.6, &sine, &cosine);
  StoreDouble(out, sine);
  StoreDouble(out + 2, cosine);
  const double x = InFloat(params, 2);
  StoreDouble(out + 4, SquareRoot(x < 0 ? -x : x));
  StoreDouble(out + 6, static_cast<double>(InFloat(params, 3)) * InFloat(params, 4));
}

template <class T>
__device__ void Conversions(const WrapperParams& params) {
  const auto in = In(params);
  const auto out = Out(params);
  // Any float to T (word 0), two at once (1), floats of everyday size (2), T to float (3, 4), and
  // floats halfway between two numbers of T or one bit beside (5, 6).
  out[0] = FromFloat<T>(InFloat(params, 0)).bits;
  out[1] = Pack2<T>(InFloat(params, 1), InFloat(params, 2));
  const float small = static_cast<float>(static_cast<int32_t>(in[3])) * 0x1p-28f;
  out[2] = Pack2<T>(small, -small * 0x1p-14f);
  out[3] = FloatAsWord(ToFloat(T{static_cast<uint16_t>(in[4] & 0xffff)}));
  out[4] = FloatAsWord(ToFloat(T{static_cast<uint16_t>(in[4] >> 16)}));
  constexpr uint32_t kHalf = sizeof(T) == 2 && std::is_same_v<T, F16> ? 0x1000 : 0x8000;
  const uint32_t tie = (FloatAsWord(small) & ~(2 * kHalf - 1)) | kHalf;
  out[5] = FromFloat<T>(WordAsFloat(tie)).bits;
  out[6] = Pack2<T>(WordAsFloat(tie + 1), WordAsFloat(tie - 1));
  out[7] = FloatAsWord(FromFloat<float>(ToFloat(InFloat(params, 7))));
}
__global__ void ConversionsBf16(const __grid_constant__ WrapperParams params) {
  Conversions<Bf16>(params);
}
__global__ void ConversionsF16(const __grid_constant__ WrapperParams params) {
  Conversions<F16>(params);
}

template <void (*kKernel)(WrapperParams)>
cudaError_t Run(const WrapperParams& params, cudaStream_t stream) {
  return Launch(kKernel, "wrapper", {kBlocks, kThreads, kThreads * kWords * 4}, params, stream);
}

}  // namespace

const WrapperKernel kWrapperKernels[] = {
    {"Vectors", Run<Vectors>, Operands::kBits, false, Agreement::kBits},
    {"AsyncCopies", Run<AsyncCopies>, Operands::kBits, false, Agreement::kBits},
    {"Barriers", Run<Barriers>, Operands::kBits, false, Agreement::kBits},
    {"Collectives", Run<Collectives>, Operands::kBits, false, Agreement::kBits},
    {"LoadMatrices", Run<LoadMatrices>, Operands::kBits, false, Agreement::kBits},
    {"LoadMatricesTransposed", Run<LoadMatricesTransposed>, Operands::kBits, false,
     Agreement::kBits},
    {"ProductsBf16", Run<ProductsBf16>, Operands::kIntegers, false, Agreement::kBits},
    {"ProductsF16", Run<ProductsF16>, Operands::kIntegers, true, Agreement::kBits},
    {"ProductsBf16", Run<ProductsBf16>, Operands::kHalves, false, Agreement::kProduct},
    {"ProductsF16", Run<ProductsF16>, Operands::kHalves, true, Agreement::kProduct},
    {"Functions", Run<Functions>, Operands::kFloats, false, Agreement::kRelative},
    {"Doubles", Run<Doubles>, Operands::kFloats, false, Agreement::kDoubles},
    {"ConversionsBf16", Run<ConversionsBf16>, Operands::kBits, false, Agreement::kBf16Words},
    {"ConversionsF16", Run<ConversionsF16>, Operands::kBits, true, Agreement::kF16Words},
};
const int kWrapperKernelCount = sizeof(kWrapperKernels) / sizeof(kWrapperKernels[0]);

}  // namespace attend::gpu
