// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/head_transform.h"

#include <cmath>

namespace attend {

void ComputeRopeAngles(const RopeSpec& rope, int64_t position, RopeAngles& angles) {
  for (int i = 0; i < rope.dim / 2; ++i) {
    const double angle = static_cast<double>(position) * rope.inverse_frequency[i];
    angles.cosine[i] = static_cast<float>(std::cos(angle) * rope.attention_factor);
    angles.sine[i] = static_cast<float>(std::sin(angle) * rope.attention_factor);
  }
}

void RotateHead(const RopeSpec& rope, const RopeAngles& angles, float* head) {
  const int pairs = rope.dim / 2;
  const bool half = rope.pairing == RopePairing::kHalf;
  const int step = half ? 1 : 2;
  float* first = head;
  float* second = half ? head + pairs : head + 1;
  for (int i = 0; i < pairs; ++i) {
    const float x = first[i * step];
    const float y = second[i * step];
    first[i * step] = x * angles.cosine[i] - y * angles.sine[i];
    second[i * step] = y * angles.cosine[i] + x * angles.sine[i];
  }
}

void NormaliseHead(const float* weight, float eps, int dim, float* head) {
  // Eight partial sums: one would wait for every addition.
  double sums[8] = {};
  for (int i = 0; i < dim; ++i) sums[i % 8] += double{head[i]} * head[i];
  double sum = 0;
  for (double part : sums) sum += part;
  const float factor = static_cast<float>(1.0 / std::sqrt(sum / dim + eps));
  for (int i = 0; i < dim; ++i) head[i] *= factor;
  for (int i = 0; weight != nullptr && i < dim; ++i) head[i] *= weight[i];
}

void Clip(float limit, float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = values[i];
    values[i] = value > limit ? limit : value < -limit ? -limit : value;
  }
}

}  // namespace attend
