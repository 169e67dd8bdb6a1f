// SPDX-License-Identifier: Apache-2.0
//
// One worker of `attend bench`: a thread with a connection of its own and at most one call in
// flight. What is common to the kinds of load; each of them is one file: requests.cc, idle.cc,
// sessions.cc, decode.cc, fairness.cc.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string_view>

#include "client/cli/bench/context.h"
#include "client/cli/bench/stats.h"

namespace attend::cli {

class LoadWorker {
 public:
  using Clock = LoadControl::Clock;

  // `bench` outlives the worker.
  LoadWorker(const Bench& bench, int64_t index);
  virtual ~LoadWorker() = default;

  // Connects, warms up, waits for the others, measures, cleans up; on the worker's thread. What
  // keeps it from starting goes to LoadControl::Abort.
  void Run();
  // A copy; any thread, any time.
  LoadStats stats() const;

 protected:
  virtual client::Result<void> Prepare() = 0;
  // What LoadControl::Take grants once: one request or step. Returns the error that ended it.
  virtual std::optional<client::Error> Turn() = 0;
  // Turns until the load ends.
  virtual void Measure();
  // After the measured time.
  virtual void CleanUp() {}

  // Sends stateless requests that are not counted.
  void WarmUp();
  // `rows` rows of the input.
  std::string_view Rows(int64_t rows) const;
  client::TensorView RowsView(int64_t rows) const;
  int64_t DrawLength();

  // A session of the load's layers, counted when it opens.
  client::Result<client::Session> OpenSession();

  // Every call of the server: returns what `call` returns.
  template <typename Call>
  auto Make(Call call) {
    Count([](LoadStats& stats) { ++stats.calls; });
    ++bench_.control->in_flight;
    auto result = call();
    --bench_.control->in_flight;
    return result;
  }

  // A call of Attend, for CountAnswer.
  struct Sent {
    Kind kind = Kind::kRequest;
    const v1::Layer* layer = nullptr;
    int64_t rows = 0;
    Clock::time_point due;   // scheduled arrival; closed loop: when it was sent
    Clock::time_point sent;  // open loop: when a client was free for it
  };
  // Counts a wrong answer as a failure: then returns false.
  bool CheckAnswer(const v1::Layer& layer, int64_t rows, const client::Tensor& output);
  // Counts an answer, as a failure if it is wrong: then returns false.
  bool CountAnswer(const Sent& sent, const client::Tensor& output, const v1::Timing& timing);
  // Counts a call that was refused or failed; `sessions` is how many a lost session's call had.
  Outcome CountError(const client::Error& error, int64_t sessions = 1);
  template <typename Add>
  void Count(Add add) {
    const std::lock_guard lock(mutex_);
    add(stats_);
  }
  // After an error a closed loop waits as long as the server says, or a moment.
  void PauseAfter(const client::Error& error) const;
  // Nobody answered the last counted call, so that closing a session would
  // wait in vain, for up to a second.
  bool server_gone() const { return server_gone_; }

  const Bench& bench_;
  const int64_t index_;
  std::optional<client::Client> client_;
  std::mt19937_64 random_;

 private:
  bool CheckWidth(int64_t width, int64_t rows, const client::Tensor& output);

  bool server_gone_ = false;
  mutable std::mutex mutex_;
  LoadStats stats_;  // guarded by mutex_
};

std::unique_ptr<LoadWorker> MakeRequestWorker(const Bench& bench, int64_t index);
std::unique_ptr<LoadWorker> MakeSessionWorker(const Bench& bench, int64_t index);
std::unique_ptr<LoadWorker> MakeDecodeWorker(const Bench& bench, int64_t index);
std::unique_ptr<LoadWorker> MakeIdleWorker(const Bench& bench, int64_t index);
// Worker 0 prefills, the others append.
std::unique_ptr<LoadWorker> MakeFairnessWorker(const Bench& bench, int64_t index);

// What opens a session of the load's layers.
v1::OpenSessionRequest SessionRequest(const Bench& bench);
// How a session's calls of `layer` differ from the default.
client::AttendOptions SessionOptions(const v1::Layer& layer);

// Part `index` of `total` things split among `parts`, as evenly as can be.
inline int64_t ShareOf(int64_t total, int64_t parts, int64_t index) {
  return total / parts + (index < total % parts ? 1 : 0);
}

}  // namespace attend::cli
