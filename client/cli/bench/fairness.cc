// SPDX-License-Identifier: Apache-2.0
//
// Fairness in time: sessions that append one row at a steady pace while another one runs a long
// prefill of the same layer. Three phases in turn, so that drift of the machine meets each alike:
// appends alone, prefills alone, both. Worker 0 prefills and drives the phases.
#include <algorithm>
#include <thread>

#include "client/cli/bench/worker.h"

namespace attend::cli {
namespace {

using Phase = FairnessPhases::Phase;
using std::chrono::milliseconds;

// How soon an append notices that the phase without appends is over.
constexpr milliseconds kLook{1};
// A run by time has about four rounds of three phases; each phase of prefills holds at least one.
constexpr double kPhasesPerRun = 12;
constexpr double kPhaseSecondsByNumber = 1;

LoadControl::Clock::duration Seconds(double seconds) {
  return std::chrono::duration_cast<LoadControl::Clock::duration>(
      std::chrono::duration<double>(seconds));
}

class PrefillWorker final : public LoadWorker {
 public:
  using LoadWorker::LoadWorker;

 private:
  client::Result<void> Prepare() override {
    auto session = OpenSession();
    if (!session.ok()) return session.error();
    session_ = *std::move(session);
    for (int64_t i = 0; i < bench_.flags.warmup && !bench_.control->stopped(); ++i) {
      if (const auto error = Prefill(Kind::kPrefill, kPromptPiece)) return *error;
    }
    return {};
  }

  std::optional<client::Error> Turn() override { return std::nullopt; }  // Measure does it all

  void Measure() override {
    const auto& budget = bench_.control->budget();
    const auto length =
        Seconds(budget.requests > 0 ? kPhaseSecondsByNumber : budget.seconds / kPhasesPerRun);
    while (bench_.control->Take() && Round(length)) {
      Count([](LoadStats& stats) { ++stats.turns; });
    }
    bench_.phases->Begin(Phase::kOver);
  }

  void CleanUp() override {
    if (session_ && server_gone()) session_->Detach();
    session_.reset();
  }

  // False when the load is to end.
  bool Round(Clock::duration length) {
    bench_.phases->Begin(Phase::kAppends);
    if (!bench_.control->SleepUntil(Clock::now() + length)) return false;
    return Prefills(Phase::kPrefill, Kind::kPrefill, length) &&
           Prefills(Phase::kBoth, Kind::kPrefillBusy, length);
  }

  bool Prefills(Phase phase, Kind kind, Clock::duration length) {
    bench_.phases->Begin(phase);
    const Clock::time_point end = Clock::now() + length;
    do {
      const auto error = Prefill(kind, bench_.flags.prompt);
      if (bench_.control->stopped()) return false;
      if (!error) continue;
      if (OutcomeOf(*error) != Outcome::kRefused) return false;  // would fail again
      PauseAfter(*error);
    } while (Clock::now() < end);
    return true;
  }

  // `tokens` at most, in the largest calls that the server takes.
  std::optional<client::Error> Prefill(Kind kind, int64_t tokens) {
    tokens = std::min(tokens, bench_.flags.prompt);
    const v1::Layer& layer = bench_.layers.front();
    const Clock::time_point start = Clock::now();
    RequestStats prefill;
    for (int64_t done = 0; done < tokens;) {
      if (bench_.control->stopped()) break;
      const int64_t rows = std::min(bench_.largest_rows, tokens - done);
      const Clock::time_point sent = Clock::now();
      const auto answer = Make(
          [&] { return session_->Attend(layer.name(), RowsView(rows), SessionOptions(layer)); });
      if (!answer.ok()) {
        CountError(answer.error());
        session_->RewindTo(0);
        return answer.error();
      }
      const int64_t round_trip = std::chrono::nanoseconds(Clock::now() - sent).count();
      if (!CheckAnswer(layer, rows, answer->output)) break;
      AddCall(answer->timing, rows, round_trip, &prefill);
      done += rows;
    }
    session_->RewindTo(0);
    if (prefill.tokens < tokens) return std::nullopt;  // stopped, or a wrong answer
    prefill.latency.Add(std::chrono::nanoseconds(Clock::now() - start).count());
    Count([&](LoadStats& stats) { stats.of(kind).Merge(prefill); });
    return std::nullopt;
  }

  std::optional<client::Session> session_;
};

class AppendWorker final : public LoadWorker {
 public:
  using LoadWorker::LoadWorker;

 private:
  client::Result<void> Prepare() override {
    auto session = OpenSession();
    if (!session.ok()) return session.error();
    session_ = *std::move(session);
    prompt_ = DrawLength();
    const v1::Layer& layer = bench_.layers.front();
    const auto answer = Make(
        [&] { return session_->Attend(layer.name(), RowsView(prompt_), SessionOptions(layer)); });
    if (!answer.ok()) return answer.error();
    for (int64_t i = 0; i < bench_.flags.warmup && !bench_.control->stopped(); ++i) {
      if (const auto error = Append(Kind::kAppend, Clock::now())) return *error;
    }
    return {};
  }

  std::optional<client::Error> Turn() override { return std::nullopt; }  // Measure does it all

  // One append each interval; a late one delays none of the later ones.
  void Measure() override {
    const auto appenders = static_cast<double>(bench_.workers - 1);
    const Clock::duration interval = Seconds(appenders / bench_.flags.rate);
    const Clock::duration offset =
        Seconds(static_cast<double>(index_ - 1) / bench_.flags.rate);  // not all at once
    const FairnessPhases& phases = *bench_.phases;
    Clock::time_point due = bench_.control->start() + offset;
    while (phases.now() != Phase::kOver && bench_.control->SleepUntil(due)) {
      const Phase phase = phases.now();
      if (phase == Phase::kPrefill) {
        std::this_thread::sleep_for(kLook);
        due = Clock::now() + (phases.now() == Phase::kPrefill ? Clock::duration(0) : offset);
        continue;
      }
      if (phase == Phase::kOver) return;
      const auto error = Append(phase == Phase::kBoth ? Kind::kAppendBusy : Kind::kAppend, due);
      due += interval;
      if (!error) continue;
      if (OutcomeOf(*error) != Outcome::kRefused) return;  // would fail again
      PauseAfter(*error);
    }
  }

  void CleanUp() override {
    if (session_ && server_gone()) session_->Detach();
    session_.reset();
  }

  std::optional<client::Error> Append(Kind kind, Clock::time_point due) {
    const v1::Layer& layer = bench_.layers.front();
    const Sent sent{.kind = kind, .layer = &layer, .rows = 1, .due = due, .sent = Clock::now()};
    const auto answer =
        Make([&] { return session_->Attend(layer.name(), RowsView(1), SessionOptions(layer)); });
    if (!answer.ok()) {
      CountError(answer.error());
      return answer.error();
    }
    CountAnswer(sent, answer->output, answer->timing);
    if (++steps_ >= bench_.flags.steps) {
      session_->RewindTo(prompt_);
      steps_ = 0;
    }
    return std::nullopt;
  }

  std::optional<client::Session> session_;
  int64_t prompt_ = 0;
  int64_t steps_ = 0;  // since the history was as long as the prompt
};

}  // namespace

std::unique_ptr<LoadWorker> MakeFairnessWorker(const Bench& bench, int64_t index) {
  if (index == 0) return std::make_unique<PrefillWorker>(bench, index);
  return std::make_unique<AppendWorker>(bench, index);
}

}  // namespace attend::cli
