// SPDX-License-Identifier: Apache-2.0
//
// Compares every wrapper of engine/cuda/device.h on a device with the tests' emulation of it. This
// program is built twice: the emulated one writes what it computed to a file, the one for devices
// computes the same from the same seeded words and compares.
//
//   attend-gpu-wrappers write FILE    attend-gpu-wrappers check FILE
//
// Exit code 0: all equal. 1: a wrapper differs. 2: no device, or the file can't be used.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "engine/util/dtype.h"
#include "tests/gpu/wrapper_kernels.h"

namespace attend::gpu {
namespace {

using Words = std::vector<uint32_t>;

// First words of the file.
constexpr uint32_t kMagic = 0x61747764, kSeed = 20240607, kRounds = 64;

bool Complain(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return false;
  std::fprintf(stderr, "%s: %s (%s)\n", what, cudaGetErrorName(error), cudaGetErrorString(error));
  return true;
}

// Every word of the output is poisoned, so that a word not written is seen.
class Device {
 public:
  bool Open() {
    int count = 0;
    if (Complain(cudaGetDeviceCount(&count), "no CUDA device")) return false;
    if (count == 0) return std::fprintf(stderr, "no CUDA device\n"), false;
    return !Complain(cudaSetDevice(0), "device") &&
           !Complain(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream") &&
           !Complain(cudaMalloc(&in_, kTotalWords * 4), "memory") &&
           !Complain(cudaMalloc(&out_, kTotalWords * 4), "memory");
  }

  bool Run(const WrapperKernel& kernel, const Words& in, Words& out) {
    out.assign(kTotalWords, 0xdeadbeef);
    const WrapperParams params{static_cast<const uint32_t*>(in_), static_cast<uint32_t*>(out_)};
    return !Complain(Copy(in_, in.data(), cudaMemcpyHostToDevice), "copy") &&
           !Complain(Copy(out_, out.data(), cudaMemcpyHostToDevice), "copy") &&
           !Complain(kernel.launch(params, stream_), kernel.name) &&
           !Complain(Copy(out.data(), out_, cudaMemcpyDeviceToHost), kernel.name) &&
           !Complain(cudaStreamSynchronize(stream_), kernel.name);
  }

 private:
  cudaError_t Copy(void* to, const void* from, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, kTotalWords * 4, kind, stream_);
  }

  cudaStream_t stream_ = nullptr;
  void* in_ = nullptr;
  void* out_ = nullptr;
};

// ---- Operands ----

uint32_t Half(bool f16, float value) {
  uint16_t bits = 0;
  StoreFloat(f16 ? DType::kF16 : DType::kBF16, value, &bits, 0);
  return bits;
}

// About normal: the sum of four uniform numbers.
float RoughlyNormal(std::mt19937& random) {
  int64_t sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<int32_t>(random());
  return static_cast<float>(sum) * 0x1p-31f;
}

Words MakeOperands(const WrapperKernel& kernel, std::mt19937& random) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float special[] = {0, -0.0f, 1, -1, 24, -24, kInfinity, -kInfinity, std::nanf("")};
  Words words(kTotalWords);
  for (uint32_t& word : words) {
    word = static_cast<uint32_t>(random());
    switch (kernel.operands) {
      case Operands::kBits:
        break;
      case Operands::kFloats: {
        const float plain = static_cast<float>(static_cast<int32_t>(word)) * 24 * 0x1p-31f;
        word = std::bit_cast<uint32_t>(word % 16 < 9 && random() % 4 == 0 ? special[word % 16]
                                                                          : plain);
        break;
      }
      case Operands::kHalves:
        word =
            Half(kernel.f16, RoughlyNormal(random)) << 16 | Half(kernel.f16, RoughlyNormal(random));
        break;
      case Operands::kIntegers:
        word = Half(kernel.f16, static_cast<float>(static_cast<int>(word % 17) - 8)) << 16 |
               Half(kernel.f16, static_cast<float>(static_cast<int>(word / 17 % 17) - 8));
        break;
    }
  }
  return words;
}

// ---- Agreement ----

bool SameFloat(uint32_t a, uint32_t b) {
  return a == b || (std::isnan(std::bit_cast<float>(a)) && std::isnan(std::bit_cast<float>(b)));
}

bool SameHalf(bool f16, uint32_t a, uint32_t b) {
  const uint32_t infinity = f16 ? 0x7c00 : 0x7f80;
  const bool nan_a = (a & 0x7fff) > infinity, nan_b = (b & 0x7fff) > infinity;
  return a == b || (nan_a && nan_b);
}

template <class T>
bool Close(T a, T b, T relative, T absolute) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  if (std::isinf(a) || std::isinf(b)) return a == b;
  return std::fabs(a - b) <= std::fabs(b) * relative + absolute;
}

double DoubleAt(const uint32_t* words) {
  double value;
  std::memcpy(&value, words, sizeof value);
  return value;
}

// Whether word `index` of a thread's eight is right.
bool Agrees(const WrapperKernel& kernel, const uint32_t* device, const uint32_t* expected,
            int index) {
  const uint32_t a = device[index], b = expected[index];
  switch (kernel.agreement) {
    case Agreement::kBits:
      return a == b;
    case Agreement::kRelative:
      return Close(std::bit_cast<float>(a), std::bit_cast<float>(b), 0x1p-21f, 0x1p-149f);
    case Agreement::kDoubles:
      return Close(DoubleAt(device + index / 2 * 2), DoubleAt(expected + index / 2 * 2), 0x1p-50,
                   0.0);
    case Agreement::kProduct:
      return Close(std::bit_cast<float>(a), std::bit_cast<float>(b), 0.0f,
                   std::bit_cast<float>(expected[4 + index % 4]) * 0x1p-18f);
    case Agreement::kBf16Words:
    case Agreement::kF16Words: {
      if (index == 3 || index == 4 || index == 7) return SameFloat(a, b);
      const bool f16 = kernel.agreement == Agreement::kF16Words;
      return SameHalf(f16, a & 0xffff, b & 0xffff) && SameHalf(f16, a >> 16, b >> 16);
    }
  }
  return false;
}

// Prints the first word that differs.
int CountDifferences(const WrapperKernel& kernel, const Words& in, const Words& device,
                     const uint32_t* expected) {
  int differences = 0;
  for (int i = 0; i < kTotalWords; ++i) {
    const int thread = i / kWords * kWords;
    if (Agrees(kernel, device.data() + thread, expected + thread, i % kWords)) continue;
    if (++differences > 1) continue;
    std::printf("  block %d thread %d word %d: device %08x, expected %08x; its operands:",
                i / kWords / kThreads, i / kWords % kThreads, i % kWords, device[i], expected[i]);
    for (int word = 0; word < kWords; ++word) std::printf(" %08x", in[thread + word]);
    std::printf("\n");
  }
  return differences;
}

// ---- The two modes ----

Words ReadFile(const std::string& path) {
  Words words;
  FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return words;
  uint32_t word;
  while (std::fread(&word, sizeof word, 1, file) == 1) words.push_back(word);
  std::fclose(file);
  return words;
}

bool WriteFile(const std::string& path, const Words& words) {
  FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) return false;
  const bool written = std::fwrite(words.data(), 4, words.size(), file) == words.size();
  return std::fclose(file) == 0 && written;
}

int Main(const std::string& mode, const std::string& path) {
  const size_t expected_words = 3 + size_t{kRounds} * kWrapperKernelCount * kTotalWords;
  Words file{kMagic, kSeed, kRounds};
  const bool check = mode == "check";
  if (check) {
    Words read = ReadFile(path);
    if (read.size() != expected_words || !std::equal(file.begin(), file.end(), read.begin())) {
      std::fprintf(stderr, "%s: not written by this version's attend-gpu-wrappers\n", path.c_str());
      return 2;
    }
    file = std::move(read);
  }
  Device device;
  if (!device.Open()) return 2;
  bool all_agree = true;
  size_t at = 3;
  for (int k = 0; k < kWrapperKernelCount; ++k) {
    const WrapperKernel& kernel = kWrapperKernels[k];
    std::mt19937 random(kSeed + static_cast<uint32_t>(k));
    int differences = 0;
    for (uint32_t round = 0; round < kRounds; ++round) {
      const Words in = MakeOperands(kernel, random);
      Words out;
      if (!device.Run(kernel, in, out)) return 1;
      if (check) {
        if (differences == 0) differences = CountDifferences(kernel, in, out, file.data() + at);
        at += kTotalWords;
      } else {
        file.insert(file.end(), out.begin(), out.end());
      }
    }
    if (check) std::printf("%s %s\n", differences == 0 ? "same     " : "DIFFERENT", kernel.name);
    all_agree = all_agree && differences == 0;
  }
  if (!check && !WriteFile(path, file)) return std::perror(path.c_str()), 2;
  return all_agree ? 0 : 1;
}

}  // namespace
}  // namespace attend::gpu

int main(int count, char** arguments) {
  const std::string mode = count == 3 ? arguments[1] : "";
  if (mode != "write" && mode != "check") {
    std::fprintf(stderr, "attend-gpu-wrappers write FILE | check FILE\n");
    return 2;
  }
  return attend::gpu::Main(mode, arguments[2]);
}
