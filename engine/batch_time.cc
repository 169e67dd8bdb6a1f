// SPDX-License-Identifier: Apache-2.0
#include "engine/batch_time.h"

#include <algorithm>

namespace attend {
namespace {

// Alone, a batch may take this long. A chunk costs a pass over the weights and over the keys it
// sees: in a batch of 100 ms they are a few percent of the widest layers.
constexpr int64_t kAloneUs = 100000;
// Who came within this time is likely to come again.
constexpr int64_t kRecentUs = 500000;
// Share of a deviation that corrects the rates: about the last five batches count.
constexpr double kGain = 0.3;
// A single batch never tells more than this factor.
constexpr double kMostDeviation = 4;
// Whole tiles of CUDA, and of few strips of the CPU; blocks are whole tiles of it.
constexpr int64_t kTileRows = 16;

}  // namespace

void BatchWork::Add(const BatchWork& item) {
  weights = std::max(weights, item.weights);
  product_flops += item.product_flops;
  kv_bytes += item.kv_bytes;
  attend_flops += item.attend_flops;
  rows += item.rows;
  most_rows = std::max(most_rows, item.most_rows);
}

BatchWork WorkOf(const AttentionSpec& spec, DType kv_dtype, const AttendItem& item) {
  BatchWork work;
  const double q_width = double(spec.q_heads) * spec.head_dim;
  const double v_width = double(spec.q_heads) * spec.v_head_dim;
  const double kv_width = double(spec.kv_heads) * (spec.head_dim + spec.v_head_dim);
  work.rows = work.most_rows = std::max(item.rows, item.new_keys);
  if (!spec.raw()) {
    const double query_weights = q_width * spec.d_model + v_width * spec.output_width;
    const double key_weights = kv_width * spec.context_width;
    if (item.rows > 0) work.weights += query_weights;
    if (item.new_keys > 0) work.weights += key_weights;
    work.product_flops =
        2.0 * double(item.rows) * query_weights + 2.0 * double(item.new_keys) * key_weights;
  }
  if (item.rows == 0) return work;
  const auto visible = [&](int64_t row) {
    return VisibleKeys(spec, item.causal, item.first_row + row, item.keys());
  };
  // Visible keys of the middle row stand for the average row.
  const KeyRange middle = visible(item.rows / 2);
  work.attend_flops =
      2.0 * double(item.rows) * double(middle.end - middle.begin) * (q_width + v_width);
  const double seen = double(visible(item.rows - 1).end - visible(0).begin);
  work.kv_bytes = std::max(0.0, seen) * double(GeometryOf(spec, kv_dtype).TokenBytes());
  return work;
}

double StageTime::PredictUs(double units, double flops) const {
  return units * us_per_unit_ + flops * us_per_flop_;
}

void StageTime::Observe(double units, double flops, bool many_rows, double us) {
  if (flops <= 0) return;
  us = std::max(us, 1.0);  // clocks tell whole microseconds
  Learn(units, flops, many_rows, us);
  // Neither part alone takes longer than the whole. After an interrupted batch rates are far too
  // high and chunks too small to be many rows: this is what brings them back.
  us_per_flop_ = std::min(us_per_flop_, us / flops);
  if (units > 0) us_per_unit_ = std::min(us_per_unit_, us / units);
}

void StageTime::Learn(double units, double flops, bool many_rows, double us) {
  if (!many_rows && units < kLeastUnits) return;
  // What the other rate explains is not counted again; a quarter is left to the rate that is
  // measured here, whatever the other one claims.
  if (many_rows && !flops_known_) {
    us_per_flop_ = std::max(us - units * us_per_unit_, us / 4) / flops;
    flops_known_ = true;
    return;
  }
  if (!many_rows && !units_known_) {
    us_per_unit_ = std::max(us - flops * us_per_flop_, us / 4) / units;
    units_known_ = true;
    return;
  }
  // Few rows teach what reading costs; many rows correct each rate in proportion to its part of the
  // prediction. So a long time of decoding spoils nothing that prefills have taught.
  const double predicted = PredictUs(units, flops);
  if (predicted <= 0) return;
  const double deviation =
      kGain * (std::clamp(us / predicted, 1 / kMostDeviation, kMostDeviation) - 1);
  if (!many_rows) {
    us_per_unit_ *= 1 + deviation;
    return;
  }
  us_per_unit_ *= 1 + deviation * units * us_per_unit_ / predicted;
  us_per_flop_ *= 1 + deviation * flops * us_per_flop_ / predicted;
}

double BatchTime::PredictUs(const BatchWork& work) const {
  return products_.PredictUs(work.weights, work.product_flops) +
         attention_.PredictUs(work.kv_bytes, work.attend_flops);
}

void BatchTime::Observe(const BatchWork& work, double us, const StageTimes& stages) {
  // What lies between the stages is shared out to them; an engine that tells no stages leaves the
  // prediction to share.
  // Raw work has no products: what its rows take to convert belongs to attention.
  auto products = work.product_flops > 0 ? double(stages.project_us + stages.output_us) : 0;
  auto attention = work.attend_flops > 0 ? double(stages.attend_us) : 0;
  if (products + attention <= 0) {
    products = products_.PredictUs(work.weights, work.product_flops);
    attention = attention_.PredictUs(work.kv_bytes, work.attend_flops);
  }
  if (products + attention <= 0) return;
  const double scale = us / (products + attention);
  products_.Observe(work.weights, work.product_flops, work.rows >= StageTime::kManyRows,
                    products * scale);
  attention_.Observe(work.kv_bytes, work.attend_flops, work.most_rows >= StageTime::kManyRows,
                     attention * scale);
}

bool BatchTime::Known(const BatchWork& work) const {
  return (work.product_flops <= 0 || products_.flops_known()) &&
         (work.attend_flops <= 0 || attention_.flops_known());
}

int64_t BatchBudgetUs(int64_t chunk_us, double whole_us, int64_t now_us, const RecentWork& recent) {
  const auto lately = [now_us](const std::optional<int64_t>& when) {
    return when.has_value() && now_us - *when < kRecentUs;
  };
  const int64_t alone_us = std::max(chunk_us, kAloneUs);
  const bool expected =
      lately(recent.append_us) || (whole_us > double(alone_us) && lately(recent.short_us));
  if (!expected) return alone_us;
  const double share_us = std::min(double(alone_us), recent.few_rows_batch_us / 2);
  return std::max(chunk_us, static_cast<int64_t>(share_us));
}

int64_t MostRows(int64_t most, absl::FunctionRef<bool(int64_t)> fits) {
  int64_t good = 0;
  while (good < most) {
    const int64_t rows = most - (most - good) / 2;
    if (fits(rows)) {
      good = rows;
    } else {
      most = rows - 1;
    }
  }
  const int64_t unit = good >= kBlockTokens ? kBlockTokens : good >= kTileRows ? kTileRows : 1;
  return good / unit * unit;
}

}  // namespace attend
