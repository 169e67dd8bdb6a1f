// SPDX-License-Identifier: Apache-2.0
//
// One worker of `attend bench`: a thread with a connection of its own and at most one call in
// flight. What is common to the kinds of load; each of them is one file: load_requests.cc,
// load_sessions.cc, load_decode.cc.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/load_control.h"
#include "client/cli/load_plan.h"
#include "client/cli/load_stats.h"

namespace attend::cli {

// The flags of `attend bench`.
struct BenchFlags {
  std::string model, layer;
  LengthRange tokens;
  int64_t clients = 16;
  double seconds = 10;
  int64_t requests = 0;
  int64_t warmup = 2;
  double rate = 0;
  int64_t sequences = 1;
  int64_t sessions = 0;
  int64_t steps = 128;
  bool decode_loop = false;
  int64_t layers = 0;
  int64_t micro_batches = 2;
  int64_t prompt = 0;
  v1::DType dtype = v1::DTYPE_F32;
  uint64_t seed = 1;
  int attempts = 1;
  bool json = false;
};

// What every worker reads.
struct Bench {
  Bench(const Globals& globals, const BenchFlags& flags) : globals(globals), flags(flags) {}

  const Globals& globals;
  const BenchFlags& flags;
  std::string model;
  std::vector<v1::Layer> layers;  // one, but several in the decode loop
  v1::Limits limits;
  int64_t workers = 1;
  int64_t largest_rows = 0;  // of one request
  std::string input;         // at least largest_rows + kInputShifts rows of layers[0].d_model
  LoadControl* control = nullptr;
  ArrivalSchedule* arrivals = nullptr;  // open loop; guarded by arrivals_mutex
  std::mutex* arrivals_mutex = nullptr;
};

// Workers start at different rows of the input, so that they don't all send the same.
inline constexpr int64_t kInputShifts = 64;
// Prompts of the decode loop are sent in pieces of at most so many rows: messages of common size.
inline constexpr int64_t kPromptPiece = 512;

class LoadWorker {
 public:
  using Clock = LoadControl::Clock;

  LoadWorker(const Bench& bench, int64_t index);
  virtual ~LoadWorker() = default;

  // Connects, warms up, waits for the others, measures, cleans up.
  void Run();
  // The error that kept it from starting.
  const std::optional<client::Error>& error() const { return error_; }
  // A copy; any thread, any time.
  LoadStats stats() const;

 protected:
  virtual client::Result<void> Prepare() = 0;
  virtual void Measure() = 0;
  // After the measured time.
  virtual void CleanUp() {}

  // Sends stateless requests that are not counted.
  void WarmUp();
  // `rows` rows of the input.
  std::string_view Rows(int64_t rows) const;
  client::TensorView RowsView(int64_t rows) const;
  int64_t DrawLength();

  // An answer came, or an error. Both are counted.
  struct Sent {
    Kind kind = Kind::kRequest;
    const v1::Layer* layer = nullptr;
    int64_t rows = 0;
    Clock::time_point due;  // scheduled arrival; closed loop: when it was sent
    Clock::time_point sent;
  };
  // False if the answer is wrong.
  bool CountAnswer(const Sent& sent, const client::Tensor& output, const v1::Timing& timing);
  Outcome CountError(const client::Error& error, int64_t sessions = 1);
  template <typename Add>
  void Count(Add add) {
    const std::lock_guard lock(mutex_);
    add(stats_);
  }
  // After an error a closed loop waits as long as the server says, or a moment.
  void PauseAfter(const client::Error& error) const;

  const Bench& bench_;
  const int64_t index_;
  std::optional<client::Client> client_;
  std::mt19937_64 random_;

 private:
  std::optional<client::Error> error_;
  mutable std::mutex mutex_;
  LoadStats stats_;  // guarded by mutex_
};

std::unique_ptr<LoadWorker> MakeRequestWorker(const Bench& bench, int64_t index);
std::unique_ptr<LoadWorker> MakeSessionWorker(const Bench& bench, int64_t index);
std::unique_ptr<LoadWorker> MakeDecodeWorker(const Bench& bench, int64_t index);

// Part `index` of `total` things split among `parts`, as evenly as can be.
inline int64_t ShareOf(int64_t total, int64_t parts, int64_t index) {
  return total / parts + (index < total % parts ? 1 : 0);
}

}  // namespace attend::cli
