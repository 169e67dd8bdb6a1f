// SPDX-License-Identifier: Apache-2.0
//
// What processor this is and what the engine may use of it: the instruction set behind --isa and
// the arithmetic behind --compute. A fixed table by processor family, never a timing, so that equal
// machines give equal bits.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "engine/cpu/attention_kernel.h"
#include "engine/util/dtype.h"

namespace attend {

struct CpuInfo {
  std::string name;    // brand string, e.g. "AMD EPYC 9555"
  std::string vendor;  // "GenuineIntel", "AuthenticAMD", ...
  int family = 0;
  bool avx2 = false;         // Highway's AVX2 set: AVX2, FMA, F16C, BMI2
  bool avx512 = false;       // Highway's AVX3 set: F, BW, DQ, VL, CD
  bool avx512_bf16 = false;  // bf16 dot products
  bool avx512_vnni = false;  // 8-bit integer dot products
  bool amx_bf16 = false;     // bf16 tiles, enabled by the system
};

CpuInfo DetectCpu();

// --isa: auto | avx2 | avx512. INVALID_ARGUMENT for another word or a set this processor lacks.
absl::StatusOr<CpuIsa> ChooseIsa(const std::string& isa, const CpuInfo& cpu);

// --compute for BF16 weights: auto | fp32 | bf16. F32 and F16 weights always compute in F32.
absl::StatusOr<DType> ChooseCompute(const std::string& compute, CpuIsa isa, const CpuInfo& cpu);

}  // namespace attend
