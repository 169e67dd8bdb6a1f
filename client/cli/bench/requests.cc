// SPDX-License-Identifier: Apache-2.0
//
// Stateless requests, in a closed loop (each worker sends the next one after its answer) or in an
// open loop (requests arrive by a schedule that knows nothing of answers; a worker that is free
// takes the next). With an echo server both get the same requests, in turns. Uses one message per
// worker again and again.
#include <algorithm>

#include "client/cli/bench/worker.h"

namespace attend::cli {
namespace {

class RequestWorker final : public LoadWorker {
 public:
  using LoadWorker::LoadWorker;

 private:
  client::Result<void> Prepare() override {
    request_.set_model(bench_.model);
    request_.set_layer(bench_.layers.front().name());
    request_.mutable_hidden_states()->set_dtype(bench_.flags.dtype);
    WarmUp();
    if (bench_.slices == nullptr) return {};
    Globals globals = bench_.globals;
    globals.server = bench_.flags.echo;
    auto echo = Connect(globals, {.max_attempts = bench_.flags.attempts});
    if (!echo.ok()) return echo.error();
    echo_ = *std::move(echo);
    for (int64_t i = 0; i < bench_.flags.warmup && !bench_.control->stopped(); ++i) {
      Fill();
      if (const auto echoed = echo_->Attend(request_); !echoed.ok()) return echoed.error();
    }
    return {};
  }

  void Measure() override {
    if (bench_.arrivals == nullptr) return LoadWorker::Measure();
    while (const auto arrival = NextArrival()) {
      const Clock::time_point free = Clock::now();
      const int64_t rows = Fill();
      const Clock::time_point filled = Clock::now();
      if (!bench_.control->SleepUntil(arrival->due)) return;
      const Clock::time_point now = Clock::now();
      if (bench_.control->IsAfterEnd(now)) {
        Leave();
        Count([](LoadStats& stats) { ++stats.unsent; });
        continue;
      }
      // Filling the message is no wait for a client, and nor is it when it ended after `due`.
      const Clock::time_point sent = arrival->due > filled ? now : std::max(free, arrival->due);
      const bool late = std::chrono::nanoseconds(sent - arrival->due).count() > kLateNs;
      (void)Send({.side = arrival->side, .due = arrival->due}, sent, rows);
      Count([&](LoadStats& stats) {
        ++stats.turns;
        stats.late += late ? 1 : 0;
      });
    }
  }

  // Nothing when no more may arrive.
  std::optional<Slices::Turn> NextArrival() {
    LoadControl& control = *bench_.control;
    const bool by_number = control.budget().requests > 0;
    if (by_number ? !control.Take() : control.stopped()) return std::nullopt;
    std::optional<Slices::Turn> arrival;
    if (bench_.slices != nullptr) {
      arrival = bench_.slices->Enter(control, bench_.arrivals);
    } else {
      const std::chrono::duration<double> after_start(bench_.arrivals->Next());
      arrival = {.side = Side::kServer,
                 .due = control.start() + std::chrono::duration_cast<Clock::duration>(after_start)};
    }
    if (!arrival || !control.IsAfterEnd(arrival->due)) return arrival;
    Leave();
    return std::nullopt;
  }

  std::optional<client::Error> Turn() override {
    const int64_t rows = Fill();
    if (bench_.slices == nullptr) {
      const Clock::time_point now = Clock::now();
      return Send({.side = Side::kServer, .due = now}, now, rows);
    }
    const auto turn = bench_.slices->Enter(*bench_.control, nullptr);
    return turn ? Send(*turn, turn->due, rows) : std::nullopt;
  }

  // The message as it was filled, with `rows` rows in all; times as in Sent.
  std::optional<client::Error> Send(const Slices::Turn& turn, Clock::time_point sent,
                                    int64_t rows) {
    const bool echoed = turn.side == Side::kEcho;
    const Sent call{.kind = echoed ? Kind::kEcho : Kind::kRequest,
                    .layer = &bench_.layers.front(),
                    .rows = rows,
                    .due = turn.due,
                    .sent = sent};
    auto response = Make([&] { return (echoed ? *echo_ : *client_).Attend(request_); });
    if (response.ok()) {
      CountAnswer(call, client::TakeFromWire(response->mutable_output()), response->timing());
    } else {
      CountError(response.error());
    }
    Leave();
    return response.ok() ? std::nullopt : std::optional(response.error());
  }

  void Leave() {
    if (bench_.slices != nullptr) bench_.slices->Leave();
  }

  // Draws new lengths; returns the rows of all sequences.
  int64_t Fill() {
    int64_t rows = 0;
    request_.clear_sequences();
    for (int64_t i = 0; i < bench_.flags.sequences; ++i) {
      const int64_t length = DrawLength();
      request_.add_sequences()->set_length(length);
      rows += length;
    }
    v1::Tensor* tensor = request_.mutable_hidden_states();
    tensor->clear_shape();
    tensor->add_shape(rows);
    tensor->add_shape(bench_.layers.front().d_model());
    // What the message holds is a beginning of the same bytes: only what is missing is copied.
    const std::string_view data = Rows(rows);
    std::string* held = tensor->mutable_data();
    if (held->size() > data.size()) {
      held->resize(data.size());
    } else {
      held->append(data.substr(held->size()));
    }
    return rows;
  }

  v1::AttendRequest request_;
  std::optional<client::Client> echo_;
};

}  // namespace

std::unique_ptr<LoadWorker> MakeRequestWorker(const Bench& bench, int64_t index) {
  return std::make_unique<RequestWorker>(bench, index);
}

}  // namespace attend::cli
