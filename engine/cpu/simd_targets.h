// SPDX-License-Identifier: Apache-2.0
//
// The instruction sets our kernels are compiled for. Included by every Highway file before
// <hwy/foreach_target.h>; the functions are then called by the target's namespace, N_AVX2 or
// N_AVX3, so that the instruction set is an argument and not a property of the process.
#pragma once

#include <hwy/detect_targets.h>

#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
