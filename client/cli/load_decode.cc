// SPDX-License-Identifier: Apache-2.0
//
// The decode loop of a model that is split between two machines: a step of a worker's sessions
// (its micro-batch) is one call for each layer, one after another, each with one new row for every
// session. Workers overlap, so that one computes here while the server computes for the other.
#include <algorithm>

#include "client/cli/load_worker.h"

namespace attend::cli {
namespace {

class DecodeWorker final : public LoadWorker {
 public:
  DecodeWorker(const Bench& bench, int64_t index)
      : LoadWorker(bench, index), count_(ShareOf(bench.flags.sessions, bench.workers, index)) {}

 private:
  client::Result<void> Prepare() override {
    if (auto opened = Open(); !opened.ok()) return opened;
    for (int64_t i = 0; i < bench_.flags.warmup && !bench_.control->stopped(); ++i) {
      if (const auto error = Step()) return *error;
    }
    return {};
  }

  void Measure() override {
    while (bench_.control->Take()) {
      const auto error = Turn();
      server_gone_ = error && OutcomeOf(*error) == Outcome::kFailed && error->retryable;
      if (error) PauseAfter(*error);
    }
  }

  void CleanUp() override { CloseAll(); }

  std::optional<client::Error> Turn() {
    if (batch_.empty()) {
      const auto opened = Open();
      if (opened.ok()) return std::nullopt;
      CountError(opened.error());
      CloseAll();
      return opened.error();
    }
    const auto error = Step();
    if (error && !error->retryable && OutcomeOf(*error) != Outcome::kRefused) CloseAll();
    return error;
  }

  // Opens the sessions, all on one replica, and appends the prompts.
  client::Result<void> Open() {
    sessions_.reserve(static_cast<size_t>(count_));
    v1::OpenSessionRequest request;
    request.set_model(bench_.model);
    for (const v1::Layer& layer : bench_.layers) request.add_layers(layer.name());
    for (int64_t i = 0; i < count_; ++i) {
      // A fork of the empty first one is a new session on the same replica.
      auto session = i == 0 ? client_->OpenSession(request) : sessions_.front().Fork();
      if (!session.ok()) return session.error();
      sessions_.push_back(*std::move(session));
      Count([](LoadStats& stats) { ++stats.sessions_opened; });
    }
    for (client::Session& session : sessions_) {
      if (auto appended = AppendPrompt(session); !appended.ok()) return appended;
      batch_.push_back({.session = &session, .rows = 1});
    }
    steps_ = 0;
    return {};
  }

  client::Result<void> AppendPrompt(client::Session& session) {
    for (const v1::Layer& layer : bench_.layers) {
      for (int64_t done = 0; done < bench_.flags.prompt && !bench_.control->stopped();) {
        const int64_t rows = std::min(kPromptPiece, bench_.flags.prompt - done);
        const auto answer = session.Attend(layer.name(), RowsView(rows));
        if (!answer.ok()) return answer.error();
        done += rows;
      }
    }
    return {};
  }

  std::optional<client::Error> Step() {
    const Clock::time_point start = Clock::now();
    RequestStats step;
    for (const v1::Layer& layer : bench_.layers) {
      const Clock::time_point sent = Clock::now();
      ++bench_.control->in_flight;
      const auto answer = client_->Attend(layer.name(), batch_, RowsView(count_));
      --bench_.control->in_flight;
      if (!answer.ok()) {
        // The error names the sessions that are lost; each of them ends all, as calls succeed or
        // fail as a whole.
        const auto named = static_cast<int64_t>(answer.error().sequences.size());
        CountError(answer.error(), std::max<int64_t>(1, named));
        return answer.error();
      }
      const int64_t round_trip = std::chrono::nanoseconds(Clock::now() - sent).count();
      const Sent call{
          .kind = Kind::kLayerCall, .layer = &layer, .rows = count_, .due = sent, .sent = sent};
      if (!CountAnswer(call, answer->output, answer->timing)) return std::nullopt;
      AddCall(answer->timing, 0, round_trip, &step);
    }
    step.tokens = count_;
    step.latency.Add(std::chrono::nanoseconds(Clock::now() - start).count());
    Count([&](LoadStats& stats) { stats.of(Kind::kStep).Merge(step); });
    if (++steps_ >= bench_.flags.steps) StartOver();
    return std::nullopt;
  }

  // The next step cuts what lies beyond the prompt: histories stay as long as asked for.
  void StartOver() {
    for (client::Session& session : sessions_) session.RewindTo(bench_.flags.prompt);
    steps_ = 0;
  }

  void CloseAll() {
    batch_.clear();
    for (client::Session& session : sessions_) {
      if (server_gone_) session.Detach();  // closing waits for up to a second each time
    }
    sessions_.clear();
  }

  const int64_t count_;
  std::vector<client::Session> sessions_;
  std::vector<client::SessionRows> batch_;  // empty until every session has its prompt
  int64_t steps_ = 0;
  bool server_gone_ = false;  // the last call said so
};

}  // namespace

std::unique_ptr<LoadWorker> MakeDecodeWorker(const Bench& bench, int64_t index) {
  return std::make_unique<DecodeWorker>(bench, index);
}

}  // namespace attend::cli
