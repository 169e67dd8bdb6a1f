// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/cpu_info.h"

#include <cpuid.h>
#include <hwy/targets.h>

#include <cstdint>
#include <cstring>

#include "engine/util/error.h"

namespace attend {
namespace {

struct CpuidLeaf {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidLeaf Cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  CpuidLeaf result;
  if (__get_cpuid_count(leaf, subleaf, &result.eax, &result.ebx, &result.ecx, &result.edx) == 0) {
    return {};
  }
  return result;
}

bool Bit(uint32_t word, int bit) { return (word >> bit & 1) != 0; }

uint32_t EnabledStates() {
  if (!Bit(Cpuid(1).ecx, 27)) return 0;  // OSXSAVE
  uint32_t low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

std::string BrandString() {
  std::string name;
  for (uint32_t leaf = 0x80000002; leaf <= 0x80000004; ++leaf) {
    const CpuidLeaf part = Cpuid(leaf);
    char text[sizeof(part)];
    std::memcpy(text, &part, sizeof(part));
    name.append(text, sizeof(part));
  }
  name.resize(std::strlen(name.c_str()));
  const size_t begin = name.find_first_not_of(' ');
  const size_t end = name.find_last_not_of(' ');
  return begin == std::string::npos ? "unknown x86-64" : name.substr(begin, end - begin + 1);
}

// bf16 dot products run at twice the fp32 rate on Zen 4 and later (family 19h with avx512_bf16,
// 1Ah) and on AMX tiles, but at half of it on Intel cores without AMX (one 512-bit vdpbf16ps
// per 2.2 cycles, measured on Emerald Rapids).
bool BF16IsFast(const CpuInfo& cpu) {
  if (!cpu.avx512_bf16) return false;
  return cpu.amx_bf16 || (cpu.vendor == "AuthenticAMD" && cpu.family >= 0x19);
}

}  // namespace

CpuInfo DetectCpu() {
  CpuInfo cpu;
  cpu.name = BrandString();
  const CpuidLeaf vendor = Cpuid(0);
  const uint32_t letters[3] = {vendor.ebx, vendor.edx, vendor.ecx};
  cpu.vendor.assign(reinterpret_cast<const char*>(letters), sizeof(letters));
  const uint32_t signature = Cpuid(1).eax;
  cpu.family = static_cast<int>(signature >> 8 & 0xf);
  if (cpu.family == 0xf) cpu.family += static_cast<int>(signature >> 20 & 0xff);

  const auto targets = hwy::SupportedTargets();
  cpu.avx2 = (targets & HWY_AVX2) != 0;
  cpu.avx512 = (targets & HWY_AVX3) != 0;
  cpu.avx512_bf16 = cpu.avx512 && Bit(Cpuid(7, 1).eax, 5);
  cpu.avx512_vnni = cpu.avx512 && Bit(Cpuid(7).ecx, 11);
  constexpr uint32_t kTileStates = 3u << 17;  // XTILECFG, XTILEDATA
  const uint32_t features = Cpuid(7).edx;
  cpu.amx_bf16 = cpu.avx512_bf16 && Bit(features, 22) && Bit(features, 24) &&
                 (EnabledStates() & kTileStates) == kTileStates;
  return cpu;
}

absl::StatusOr<CpuIsa> ChooseIsa(const std::string& isa, const CpuInfo& cpu) {
  if (isa != "auto" && isa != "avx2" && isa != "avx512") {
    return InvalidField("isa", isa, "auto, avx2 or avx512");
  }
  if (!cpu.avx2) {
    return InvalidField("isa", isa, "a processor with AVX2, FMA and F16C; this one is " + cpu.name);
  }
  if (isa == "avx512" && !cpu.avx512) {
    return InvalidField("isa", isa,
                        "auto or avx2: " + cpu.name + " has no AVX-512 (F, BW, DQ, VL)");
  }
  return isa != "avx2" && cpu.avx512 ? CpuIsa::kAvx512 : CpuIsa::kAvx2;
}

absl::StatusOr<DType> ChooseCompute(const std::string& compute, CpuIsa isa, const CpuInfo& cpu) {
  if (compute != "auto" && compute != "fp32" && compute != "bf16") {
    return InvalidField("compute", compute, "auto, fp32 or bf16");
  }
  const bool available = isa == CpuIsa::kAvx512 && cpu.avx512_bf16;
  if (compute == "bf16" && !available) {
    return InvalidField(
        "compute", compute,
        std::string("auto or fp32: bf16 products need avx512_bf16, and this engine runs "
                    "with isa ") +
            (isa == CpuIsa::kAvx512 ? "avx512" : "avx2") + " on " + cpu.name);
  }
  const bool bf16 = compute == "bf16" || (compute == "auto" && available && BF16IsFast(cpu));
  return bf16 ? DType::kBF16 : DType::kF32;
}

}  // namespace attend
