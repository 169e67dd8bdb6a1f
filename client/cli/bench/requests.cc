// SPDX-License-Identifier: Apache-2.0
//
// Stateless requests, in a closed loop (each worker sends the next one after its answer) or in an
// open loop (requests arrive by a schedule that knows nothing of answers; a worker that is free
// takes the next). Uses one message per worker again and again.
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
    return {};
  }

  void Measure() override {
    if (bench_.arrivals == nullptr) return LoadWorker::Measure();
    while (const auto due = NextArrival()) {
      const Clock::time_point free = Clock::now();
      const int64_t rows = Fill();
      const Clock::time_point filled = Clock::now();
      if (!bench_.control->SleepUntil(*due)) return;
      const Clock::time_point now = Clock::now();
      if (bench_.control->IsAfterEnd(now)) {
        Count([](LoadStats& stats) { ++stats.unsent; });
        continue;
      }
      // Filling the message is no wait for a client, and nor is it when it ended after `due`.
      const Clock::time_point sent = *due > filled ? now : std::max(free, *due);
      const bool late = std::chrono::nanoseconds(sent - *due).count() > kLateNs;
      (void)Send(*due, sent, rows);
      Count([&](LoadStats& stats) {
        ++stats.turns;
        stats.late += late ? 1 : 0;
      });
    }
  }

  // Nothing when no more may arrive.
  std::optional<Clock::time_point> NextArrival() {
    LoadControl& control = *bench_.control;
    const bool by_number = control.budget().requests > 0;
    if (by_number ? !control.Take() : control.stopped()) return std::nullopt;
    const std::chrono::duration<double> after_start(bench_.arrivals->Next());
    const auto due = control.start() + std::chrono::duration_cast<Clock::duration>(after_start);
    return control.IsAfterEnd(due) ? std::nullopt : std::optional(due);
  }

  std::optional<client::Error> Turn() override {
    const int64_t rows = Fill();
    const Clock::time_point now = Clock::now();
    return Send(now, now, rows);
  }

  // The message as it was filled, with `rows` rows in all; times as in Sent.
  std::optional<client::Error> Send(Clock::time_point due, Clock::time_point sent, int64_t rows) {
    const Sent call{.kind = Kind::kRequest,
                    .layer = &bench_.layers.front(),
                    .rows = rows,
                    .due = due,
                    .sent = sent};
    auto response = Make([&] { return client_->Attend(request_); });
    if (!response.ok()) {
      CountError(response.error());
      return response.error();
    }
    CountAnswer(call, client::TakeFromWire(response->mutable_output()), response->timing());
    return std::nullopt;
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
};

}  // namespace

std::unique_ptr<LoadWorker> MakeRequestWorker(const Bench& bench, int64_t index) {
  return std::make_unique<RequestWorker>(bench, index);
}

}  // namespace attend::cli
