// SPDX-License-Identifier: Apache-2.0
//
// Runs a case of a benchmark through the engine's seam, as the runtime would: layers with random
// weights, caches filled, one batch a step. Some rows of raw cases are computed again in double
// precision, so that a fast wrong answer is not a result. Knows no limits and prints nothing.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "engine/attention_engine.h"
#include "tests/bench/bench_case.h"

namespace attend::bench {

// Adds the layers of the case's sets, all with the same weights. Raw: nothing to add, index -1.
absl::StatusOr<std::vector<LayerInfo>> AddLayers(AttentionEngine& engine, const BenchCase& bench,
                                                 uint64_t seed);

// KV memory of all sets.
int64_t KvMemory(const BenchCase& bench);

struct StepTimes {
  StageTimes stages;
  double wall_us = 0;  // Start to Wait
};

class CaseRun {
 public:
  // `layers` of AddLayers. The rows of each sequence are its own, the cached keys the same for all;
  // blocks lie in shuffled order in the engine's KV memory from address 0.
  CaseRun(AttentionEngine& engine, const BenchCase& bench, const std::vector<LayerInfo>& layers,
          uint64_t seed);

  // Keys and values that are there before the batch.
  absl::Status FillCaches();
  // One batch of a set, repeatable: the batch's own keys take the same places again. The output is
  // full of NaN before.
  absl::StatusOr<StepTimes> Step(int set);
  // The last step wrote every output, and no NaN or infinity.
  bool OutputIsFinite() const;
  // Of the last step: norm of the difference to double precision over the norm, sampled rows and
  // heads. Raw cases of a float KV dtype only.
  double SampledError() const;

 private:
  struct Sequence {
    SequenceShape shape;
    int64_t first_row = 0;                     // in the tensors of all rows
    std::vector<std::vector<int64_t>> blocks;  // [sets]
    int64_t cached() const { return shape.keys - shape.rows; }
  };

  void PlaceBlocks(uint64_t seed);
  std::vector<AttendItem> Items(int set);
  double Key(const Sequence& sequence, int64_t key, int kv_head, int i) const;
  double Value(const Sequence& sequence, int64_t key, int kv_head, int i) const;
  std::vector<double> Expected(const Sequence& sequence, int64_t row, int head) const;

  AttentionEngine& engine_;
  const BenchCase& bench_;
  std::vector<int> layers_;  // [sets]
  std::vector<Sequence> sequences_;
  std::vector<std::byte> query_;        // [rows, d_model]; raw: [rows, q_heads, head_dim]
  std::vector<std::byte> key_, value_;  // raw: [rows, kv_heads, head_dim | v_head_dim]
  std::vector<std::byte> cached_;       // canonical, of the sequence with most cached keys
  int64_t most_cached_ = 0;
  std::vector<std::byte> output_;  // [rows, output_width]
};

struct Quantiles {
  double median = 0;
  double min = 0;
  double max = 0;
  double lower = 0;  // quarter
  double upper = 0;
};
// All 0 of none; the median of an even number is the lower one.
Quantiles QuantilesOf(std::vector<double> values);

struct CaseTimes {
  int samples = 0;
  Quantiles wall_us;
  double project_us = 0, attend_us = 0, output_us = 0;  // medians
};

struct Effort {
  int warm_ups = 3;  // of every set
  int repeats = 11;  // of every set, at least one
  // Warm-ups and repeats end early when they took longer, after so many repeats at least.
  double most_seconds = 1e9;
  int least_repeats = 1;
};

absl::StatusOr<CaseTimes> Measure(CaseRun& run, int sets, const Effort& effort);

}  // namespace attend::bench
