// SPDX-License-Identifier: Apache-2.0
#include "client/cli/bench/stats.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace attend::cli {
namespace {

// Times below 2^kBits ns have a bucket each; above, every power of two has 2^(kBits - 1) buckets.
constexpr int kBits = 8;
constexpr int64_t kHalf = int64_t{1} << (kBits - 1);

int ShiftOf(int64_t value) {
  return std::max(0, static_cast<int>(std::bit_width(static_cast<uint64_t>(value))) - kBits);
}

size_t BucketOf(int64_t value) {
  const int shift = ShiftOf(value);
  return static_cast<size_t>(shift * kHalf + (value >> shift));
}

// The middle of a bucket.
int64_t ValueOf(size_t bucket) {
  const auto index = static_cast<int64_t>(bucket);
  if (index < 2 * kHalf) return index;
  const int64_t shift = index / kHalf - 1;
  const int64_t low = (index - shift * kHalf) << shift;
  return low + (int64_t{1} << shift) / 2;
}

std::string KeyOf(const client::Error& error) {
  const std::string& reason = v1::Reason_Name(error.reason);
  if (error.reason == v1::REASON_UNSPECIFIED || reason.empty()) return client::CodeName(error.code);
  return reason;
}

void MergeInto(Tallies& tallies, const Tallies& others) {
  for (const auto& [key, other] : others) {
    Tally& tally = tallies[key];
    if (tally.count == 0) tally.first_message = other.first_message;
    tally.count += other.count;
  }
}

}  // namespace

void LatencyHistogram::Add(int64_t nanoseconds) {
  const int64_t value = std::max<int64_t>(0, nanoseconds);
  const size_t bucket = BucketOf(value);
  if (bucket >= buckets_.size()) buckets_.resize(bucket + 1);
  ++buckets_[bucket];
  ++count_;
  sum_ns_ += value;
  max_ns_ = std::max(max_ns_, value);
}

void LatencyHistogram::Merge(const LatencyHistogram& other) {
  if (other.buckets_.size() > buckets_.size()) buckets_.resize(other.buckets_.size());
  for (size_t i = 0; i < other.buckets_.size(); ++i) buckets_[i] += other.buckets_[i];
  count_ += other.count_;
  sum_ns_ += other.sum_ns_;
  max_ns_ = std::max(max_ns_, other.max_ns_);
}

void LatencyHistogram::Subtract(const LatencyHistogram& earlier) {
  for (size_t i = 0; i < earlier.buckets_.size(); ++i) buckets_[i] -= earlier.buckets_[i];
  count_ -= earlier.count_;
  sum_ns_ -= earlier.sum_ns_;
  size_t used = buckets_.size();
  while (used > 0 && buckets_[used - 1] == 0) --used;
  max_ns_ = used == 0 ? 0 : std::min(max_ns_, ValueOf(used - 1));
}

double LatencyHistogram::mean_ns() const {
  return count_ == 0 ? 0 : static_cast<double>(sum_ns_) / static_cast<double>(count_);
}

int64_t LatencyHistogram::PercentileNs(double share) const {
  if (count_ == 0) return 0;
  // Less a little, or the rounding of 0.7 x 10 would ask for one more.
  const double exact = share * static_cast<double>(count_);
  const auto rank = std::max<int64_t>(1, static_cast<int64_t>(std::ceil(exact - 1e-9)));
  if (rank >= count_) return max_ns_;
  int64_t seen = 0;
  size_t bucket = 0;
  while ((seen += buckets_[bucket]) < rank) ++bucket;
  return std::min(ValueOf(bucket), max_ns_);
}

const char* KindName(Kind kind) {
  constexpr std::array<const char*, kKinds> kNames = {
      "request", "prompt", "step",        "layer_call", "echo",
      "idle",    "append", "append_busy", "prefill",    "prefill_busy"};
  return kNames[static_cast<size_t>(kind)];
}

void RequestStats::Merge(const RequestStats& other) {
  latency.Merge(other.latency);
  compute.Merge(other.compute);
  tokens += other.tokens;
  calls += other.calls;
  wait_ns += other.wait_ns;
  round_trip_ns += other.round_trip_ns;
  queue_us += other.queue_us;
  compute_us += other.compute_us;
  engine_us += other.engine_us;
  batch_tokens += other.batch_tokens;
  batch_sequences += other.batch_sequences;
}

void AddCall(const v1::Timing& timing, int64_t tokens, int64_t round_trip_ns, RequestStats* stats) {
  ++stats->calls;
  stats->tokens += tokens;
  stats->round_trip_ns += round_trip_ns;
  stats->queue_us += timing.queue_us();
  stats->compute_us += timing.compute_us();
  stats->compute.Add(timing.compute_us() * 1000);
  const auto batch_tokens = static_cast<double>(std::max(timing.batch_tokens(), tokens));
  if (batch_tokens > 0) {
    stats->engine_us += static_cast<double>(timing.compute_us() * tokens) / batch_tokens;
  }
  stats->batch_tokens += timing.batch_tokens();
  stats->batch_sequences += timing.batch_sequences();
}

void AddTo(Tallies& tallies, const client::Error& error, int64_t count) {
  Tally& tally = tallies[KeyOf(error)];
  if (tally.count == 0) tally.first_message = error.ToString();
  tally.count += count;
}

int64_t TotalOf(const Tallies& tallies) {
  int64_t total = 0;
  for (const auto& [key, tally] : tallies) total += tally.count;
  return total;
}

Outcome OutcomeOf(const client::Error& error) {
  switch (error.reason) {
    case v1::QUEUE_FULL:
    case v1::KV_EXHAUSTED:
    case v1::QUOTA:
    case v1::DRAINING:
    case v1::STARTING:
      return Outcome::kRefused;
    case v1::SESSION_NOT_FOUND:
    case v1::SESSION_EXPIRED:
    case v1::SESSION_EVICTED:
    case v1::SESSION_CLOSED:
    case v1::SESSION_LOST_IN_RESTART:
    case v1::SESSION_MOVED:
      return Outcome::kSessionLost;
    default:
      return Outcome::kFailed;
  }
}

Outcome LoadStats::AddError(const client::Error& error, int64_t sessions) {
  const Outcome outcome = OutcomeOf(error);
  switch (outcome) {
    case Outcome::kRefused:
      AddTo(refused, error);
      break;
    case Outcome::kSessionLost:
      AddTo(sessions_lost, error, sessions);
      break;
    case Outcome::kFailed:
      AddTo(failed, error);
      break;
  }
  return outcome;
}

void LoadStats::AddWrongAnswer(const std::string& fault) {
  Tally& tally = failed["WRONG_ANSWER"];
  if (tally.count++ == 0) tally.first_message = fault;
}

void LoadStats::Merge(const LoadStats& other) {
  for (size_t i = 0; i < kinds.size(); ++i) kinds[i].Merge(other.kinds[i]);
  MergeInto(refused, other.refused);
  MergeInto(failed, other.failed);
  MergeInto(sessions_lost, other.sessions_lost);
  MergeInto(retried, other.retried);
  for (const auto& [replica, calls] : other.replicas) replicas[replica] += calls;
  calls += other.calls;
  turns += other.turns;
  sessions_opened += other.sessions_opened;
  late += other.late;
  unsent += other.unsent;
}

}  // namespace attend::cli
