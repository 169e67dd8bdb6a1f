// SPDX-License-Identifier: Apache-2.0
//
// What happens to projected rows before they are appended or attended: clip, normalisation of heads
// and rotary positions, in place. The bits of a row depend on the row, its position and the layer
// only; they are the same for every instruction set.
#pragma once

#include <cstdint>

#include "engine/attention_spec.h"
#include "engine/cpu/attention_kernel.h"

namespace attend {

// Cosines and sines of one position, [rope.dim / 2] used. Angles are taken in double: at position
// 10^6 a float angle is off by 0.06 radian.
struct RopeAngles {
  float cosine[kMaxHeadDim / 2];
  float sine[kMaxHeadDim / 2];
};
void ComputeRopeAngles(CpuIsa isa, const RopeSpec& rope, int64_t position, RopeAngles& angles);

// Rotates the first rope.dim elements of one head.
void RotateHead(CpuIsa isa, const RopeSpec& rope, const RopeAngles& angles, float* head);

// x * weight / sqrt(mean(x^2) + eps) over `dim` elements; a null weight is ones.
void NormaliseHead(CpuIsa isa, const float* weight, float eps, int dim, float* head);

// Clamps to [-limit, limit]; NaN stays.
void Clip(float limit, float* values, int64_t count);

}  // namespace attend
