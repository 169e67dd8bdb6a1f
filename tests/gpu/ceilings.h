// SPDX-License-Identifier: Apache-2.0
//
// What the first CUDA device can do at best, by the driver's copy and by cuBLASLt: the figures that
// the benchmark's rates are compared with. Knows nothing of the engine.
#pragma once

#include "absl/status/statusor.h"
#include "tests/gpu/bench_report.h"

namespace attend::gpu {

// Copies `copy_bytes` and multiplies two random bfloat16 matrices of `matmul_width`; medians of
// ten.
absl::StatusOr<Ceilings> MeasureCeilings(int64_t copy_bytes, int64_t matmul_width);

}  // namespace attend::gpu
