// SPDX-License-Identifier: Apache-2.0
//
// Loaded specifications and weights through the tests' own oracle against the golden outputs: a
// wrong view, scale or rotary table shows here, without any engine.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "engine/model/checkpoint.h"
#include "tests/support/golden.h"
#include "tests/support/reference_attention.h"

namespace attend {
namespace {

class GoldenOutputsTest : public testing::TestWithParam<std::string> {};

// The largest error over the valid rows of one sequence of the case; infinity for a NaN.
double LargestError(const GoldenCase& golden, const ModelLayer& layer, int64_t index) {
  const bool is_cross = golden.role == "cross";
  AttentionSpec spec = layer.spec;
  if (is_cross) spec.cross = true;
  const GoldenTensor& source = is_cross ? golden.context : golden.hidden_states;
  const int64_t width = golden.hidden_states.shape[2];
  const int64_t row_stride = golden.hidden_states.shape[1] * width;
  ReferenceSequence sequence;
  sequence.rows = golden.lengths[index];
  sequence.keys = is_cross ? golden.context_lengths[index] : sequence.rows;
  sequence.query = {golden.hidden_states.values.data() + index * row_stride, DType::kF32};
  sequence.key_source = {source.values.data() + index * source.shape[1] * source.shape[2],
                         DType::kF32};
  sequence.value_source = sequence.key_source;
  sequence.causal = golden.causal;
  const BoundedRows output = ReferenceAttention(spec, layer.weights, {}, sequence).output;
  double largest = 0;
  for (int64_t i = 0; i < sequence.rows * width; ++i) {
    const double error = std::fabs(output.value[i] - golden.output.values[index * row_stride + i]);
    largest = std::isnan(error) ? INFINITY : std::max(largest, error);
  }
  return largest;
}

TEST_P(GoldenOutputsTest, TheOracleReproducesEveryCase) {
  const absl::StatusOr<Checkpoint> checkpoint = LoadCheckpoint(GoldenDirectory(GetParam()));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const absl::StatusOr<GoldenVariant> variant = ReadGolden(GetParam());
  ASSERT_TRUE(variant.ok()) << variant.status();
  for (const GoldenCase& golden : variant->cases) {
    const auto layer =
        std::find_if(checkpoint->layers.begin(), checkpoint->layers.end(),
                     [&](const ModelLayer& candidate) { return candidate.name == golden.layer; });
    ASSERT_NE(layer, checkpoint->layers.end()) << golden.layer;
    for (size_t i = 0; i < golden.lengths.size(); ++i) {
      EXPECT_LE(LargestError(golden, *layer, static_cast<int64_t>(i)), golden.float32_tolerance)
          << golden.id << " sequence " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenOutputsTest, testing::ValuesIn(GoldenVariants()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace attend
