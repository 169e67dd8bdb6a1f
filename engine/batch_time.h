// SPDX-License-Identifier: Apache-2.0
//
// How long a batch will take, and how long a chunk of long work may take: pure functions over plain
// numbers, and rates learnt from measured batches. AttentionRuntime cuts work by it. It knows no
// jobs and no clock, and it steers sizes only, never results.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/functional/function_ref.h"
#include "engine/attention_engine.h"
#include "engine/attention_plan.h"

namespace attend {

// What a batch, or an item of it, asks of the machine.
struct BatchWork {
  double weights = 0;        // elements of its matrices, read once however many rows there are
  double product_flops = 0;  // multiply-adds x 2
  double kv_bytes = 0;       // keys and values its rows see
  double attend_flops = 0;
  int64_t rows = 0;       // rows of the products
  int64_t most_rows = 0;  // of one item

  void Add(const BatchWork& item);
};
BatchWork WorkOf(const AttentionSpec& spec, DType kv_dtype, const AttendItem& item);

// Time of one stage: what it reads at one rate, what it computes at another one. Few rows take the
// time of the weights or keys that they read, many rows that of their arithmetic.
class StageTime {
 public:
  // Batches of so many rows teach the rate of arithmetic first.
  static constexpr int64_t kManyRows = 32;
  // Few rows that read less (elements of weights, bytes of keys and values) say nothing about
  // reading: the overhead of a batch is their time.
  static constexpr double kLeastUnits = 1 << 16;

  double PredictUs(double units, double flops) const;
  void Observe(double units, double flops, bool many_rows, double us);
  bool flops_known() const { return flops_known_; }

 private:
  // Corrects the rates by one batch.
  void Learn(double units, double flops, bool many_rows, double us);

  double us_per_unit_ = 0;
  double us_per_flop_ = 1e-5;  // until measured: about two CPU cores in fp32
  bool units_known_ = false;
  bool flops_known_ = false;
};

// The stages of one kind of layer.
class BatchTime {
 public:
  double PredictUs(const BatchWork& work) const;
  void Observe(const BatchWork& work, double us, const StageTimes& stages);
  // Many rows of such work were measured before.
  bool Known(const BatchWork& work) const;

 private:
  StageTime products_;
  StageTime attention_;
};

// When work of these kinds began last; unset = never.
struct RecentWork {
  std::optional<int64_t> append_us = {};  // few rows appended to sessions
  std::optional<int64_t> short_us = {};   // anything else that takes no longer than a chunk
  double few_rows_batch_us = 0;           // what the last batch of few rows took
};

// Time that a batch may take: `chunk_us` as long as somebody else is likely to come during it, or
// half of what their own batches take, so that long work always has a third of the engine; else
// enough for work to run at full speed. Whoever decodes comes again in a moment; requests that take
// less than a chunk count when the work that they would wait for is truly long.
int64_t BatchBudgetUs(int64_t chunk_us, double whole_us, int64_t now_us, const RecentWork& recent);

// The most rows up to `most` that fit, where more rows never fit better: whole blocks of rows,
// below one block whole tiles of 16, below one tile any number; 0 when not even one row fits.
int64_t MostRows(int64_t most, absl::FunctionRef<bool(int64_t)> fits);

}  // namespace attend
