// SPDX-License-Identifier: Apache-2.0
//
// What a load generator counts: a histogram of latencies, sums of the server's times, refusals,
// failures and lost sessions by reason. Decides what a refusal is. Plain data without clock, thread
// or network; used by the workers and the report of `attend bench`.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "client/attend_client.h"

namespace attend::cli {

// Counts times in buckets of at most 1/128 of their value: percentiles are off by less than 0.4 %,
// merging is exact.
class LatencyHistogram {
 public:
  void Add(int64_t nanoseconds);  // below 0 counts as 0
  void Merge(const LatencyHistogram& other);
  // Takes out an earlier state of this histogram; the maximum becomes as exact as a percentile.
  void Subtract(const LatencyHistogram& earlier);

  int64_t count() const { return count_; }
  int64_t max_ns() const { return max_ns_; }
  double mean_ns() const;  // 0 when empty
  // The smallest time that at least `share` (0..1) of the counted ones do not exceed; 0 when empty.
  int64_t PercentileNs(double share) const;

 private:
  std::vector<int64_t> buckets_;  // as long as the longest time needs
  int64_t count_ = 0;
  int64_t sum_ns_ = 0;
  int64_t max_ns_ = 0;
};

enum class Kind {
  kRequest,
  kPrompt,
  kStep,
  kLayerCall,
  kEcho,         // the same request, sent to the echo server
  kIdle,         // a request after a silence
  kAppend,       // one row, while nobody prefills
  kAppendBusy,   // one row during a long prefill
  kPrefill,      // a long one, while nobody appends
  kPrefillBusy,  // a long one, while others append
};
inline constexpr int kKinds = 10;
const char* KindName(Kind kind);

// Answered requests of one kind. A request is one call of Attend, but a step of the decode loop is
// one for each layer, and the prompts of the decode loop are several.
struct RequestStats {
  void Merge(const RequestStats& other);

  LatencyHistogram latency;   // open loop: from the scheduled arrival
  LatencyHistogram compute;   // of each call, Timing.compute_us
  int64_t tokens = 0;         // rows of the answers
  int64_t calls = 0;          // of Attend
  int64_t wait_ns = 0;        // open loop: from the scheduled arrival until a client was free
  int64_t round_trip_ns = 0;  // from then on until answered
  int64_t queue_us = 0;       // Timing.queue_us
  int64_t compute_us = 0;     // Timing.compute_us
  double engine_us = 0;       // of computation, where a batch is shared by its tokens
  int64_t batch_tokens = 0;   // Timing.batch_tokens
  int64_t batch_sequences = 0;
};

// Adds one answered call to `stats`, without its latency.
void AddCall(const v1::Timing& timing, int64_t tokens, int64_t round_trip_ns, RequestStats* stats);

struct Tally {
  int64_t count = 0;
  std::string first_message;
};
using Tallies = std::map<std::string, Tally, std::less<>>;
int64_t TotalOf(const Tallies& tallies);
// Under the name of the error's reason, or of its code.
void AddTo(Tallies& tallies, const client::Error& error, int64_t count = 1);

enum class Outcome {
  kRefused,      // the server said that it takes no more now: a result of the load
  kSessionLost,  // the session of the call is gone
  kFailed,       // everything else
};
Outcome OutcomeOf(const client::Error& error);

// What one worker saw, and after merging what all of them saw.
struct LoadStats {
  RequestStats& of(Kind kind) { return kinds[static_cast<size_t>(kind)]; }
  const RequestStats& of(Kind kind) const { return kinds[static_cast<size_t>(kind)]; }

  // `sessions` is how many of them the call of a lost one had.
  Outcome AddError(const client::Error& error, int64_t sessions = 1);
  // Counted as failed, "WRONG_ANSWER".
  void AddWrongAnswer(const std::string& fault);
  void Merge(const LoadStats& other);

  std::array<RequestStats, kKinds> kinds;
  Tallies refused, failed, sessions_lost, retried;
  std::map<std::string, int64_t, std::less<>> replicas;  // answered calls by Timing.replica
  int64_t calls = 0;  // of any method, whatever became of them, each attempt counted
  int64_t turns = 0;  // ended ones of those that LoadControl::Take granted
  int64_t sessions_opened = 0;
  int64_t late = 0;    // open loop: arrivals that waited longer than kLateNs for a client
  int64_t unsent = 0;  // open loop: due before the end and never sent
};

// A wake-up takes tens of microseconds; beyond this all clients were busy, or this machine was.
inline constexpr int64_t kLateNs = 1'000'000;

}  // namespace attend::cli
