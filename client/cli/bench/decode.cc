// SPDX-License-Identifier: Apache-2.0
//
// The decode loop of a model that is split between two machines: a step of a worker's sessions
// (its micro-batch) is one call for each layer, one after another, each with one new row for every
// session. Workers overlap, so that one computes here while the server computes for the other.
#include <algorithm>
#include <vector>

#include "client/cli/bench/worker.h"

namespace attend::cli {
namespace {

class DecodeWorker final : public LoadWorker {
 public:
  DecodeWorker(const Bench& bench, int64_t index)
      : LoadWorker(bench, index), count_(ShareOf(bench.flags.sessions, bench.workers, index)) {}

 private:
  client::Result<void> Prepare() override {
    const Clock::time_point end = Clock::now() + bench_.control->budget().patience;
    auto opened = Open();
    while (!opened.ok() && OutcomeOf(opened.error()) == Outcome::kRefused && Clock::now() < end &&
           !bench_.control->stopped()) {
      CloseAll();
      PauseAfter(opened.error());
      opened = Open();
    }
    if (!opened.ok()) return opened;
    for (int64_t i = 0; i < bench_.flags.warmup && !bench_.control->stopped(); ++i) {
      const auto error = Step();
      if (error && OutcomeOf(*error) != Outcome::kRefused) return *error;
      if (error) PauseAfter(*error);
    }
    return {};
  }

  // A step of new sessions when there are none.
  std::optional<client::Error> Turn() override {
    if (batch_.empty()) {
      const auto opened = Open();
      if (!opened.ok()) {
        CloseAll();
        return opened.error();
      }
      if (bench_.control->stopped()) return std::nullopt;  // perhaps amid a prompt
    }
    const auto error = Step();
    if (error && !error->retryable && OutcomeOf(*error) != Outcome::kRefused) CloseAll();
    return error;
  }

  void CleanUp() override { CloseAll(); }

  // Opens the sessions, all on one replica, and appends the prompts. Counts what goes wrong.
  client::Result<void> Open() {
    sessions_.reserve(static_cast<size_t>(count_));
    for (int64_t i = 0; i < count_; ++i) {
      auto session = Make([&] {
        // A fork of the empty first one is a new session on the same replica.
        return i == 0 ? client_->OpenSession(SessionRequest(bench_)) : sessions_.front().Fork();
      });
      if (!session.ok()) return Counted(session.error());
      sessions_.push_back(*std::move(session));
      Count([](LoadStats& stats) { ++stats.sessions_opened; });
    }
    for (client::Session& session : sessions_) {
      if (auto appended = AppendPrompt(session); !appended.ok()) return appended;
    }
    for (client::Session& session : sessions_) batch_.push_back({.session = &session, .rows = 1});
    steps_ = 0;
    return {};
  }

  client::Error Counted(const client::Error& error) {
    CountError(error);
    return error;
  }

  client::Result<void> AppendPrompt(client::Session& session) {
    for (const v1::Layer& layer : bench_.layers) {
      for (int64_t done = 0; done < bench_.flags.prompt && !bench_.control->stopped();) {
        const int64_t rows = std::min(kPromptPiece, bench_.flags.prompt - done);
        const Clock::time_point now = Clock::now();
        const auto answer = Make(
            [&] { return session.Attend(layer.name(), RowsView(rows), SessionOptions(layer)); });
        if (!answer.ok()) return Counted(answer.error());
        const Sent call{
            .kind = Kind::kPrompt, .layer = &layer, .rows = rows, .due = now, .sent = now};
        CountAnswer(call, answer->output, answer->timing);
        done += rows;
      }
    }
    return {};
  }

  // All layers, or none: after an error or a wrong answer every history is as long as before, with
  // the next call of its layer.
  std::optional<client::Error> Step() {
    const Clock::time_point start = Clock::now();
    RequestStats step;
    for (const v1::Layer& layer : bench_.layers) {
      const Clock::time_point sent = Clock::now();
      const auto answer = Make([&] {
        return client_->Attend(layer.name(), batch_, RowsView(count_), SessionOptions(layer));
      });
      if (!answer.ok()) {
        // The error names the sessions that are lost; each of them ends all, as calls succeed or
        // fail as a whole.
        const auto named = static_cast<int64_t>(answer.error().sequences.size());
        CountError(answer.error(), std::max<int64_t>(1, named));
        RewindTo(bench_.flags.prompt + steps_);
        return answer.error();
      }
      const int64_t round_trip = std::chrono::nanoseconds(Clock::now() - sent).count();
      const Sent call{
          .kind = Kind::kLayerCall, .layer = &layer, .rows = count_, .due = sent, .sent = sent};
      if (!CountAnswer(call, answer->output, answer->timing)) {
        RewindTo(bench_.flags.prompt + steps_);
        return std::nullopt;
      }
      AddCall(answer->timing, 0, round_trip, &step);
    }
    step.tokens = count_;
    step.latency.Add(std::chrono::nanoseconds(Clock::now() - start).count());
    Count([&](LoadStats& stats) { stats.of(Kind::kStep).Merge(step); });
    if (++steps_ >= bench_.flags.steps) {  // histories stay as long as asked for
      RewindTo(bench_.flags.prompt);
      steps_ = 0;
    }
    return std::nullopt;
  }

  void RewindTo(int64_t length) {
    for (client::Session& session : sessions_) session.RewindTo(length);
  }

  void CloseAll() {
    batch_.clear();
    for (client::Session& session : sessions_) {
      if (server_gone()) {
        session.Detach();
      } else {
        Count([](LoadStats& stats) { ++stats.calls; });
      }
    }
    sessions_.clear();
  }

  const int64_t count_;
  std::vector<client::Session> sessions_;
  std::vector<client::SessionRows> batch_;  // empty until every session has its prompt
  int64_t steps_ = 0;                       // done since the histories were as long as the prompt
};

}  // namespace

std::unique_ptr<LoadWorker> MakeDecodeWorker(const Bench& bench, int64_t index) {
  return std::make_unique<DecodeWorker>(bench, index);
}

}  // namespace attend::cli
