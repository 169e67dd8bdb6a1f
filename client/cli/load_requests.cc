// SPDX-License-Identifier: Apache-2.0
//
// Stateless requests, in a closed loop (each worker sends the next one after its answer) or in an
// open loop (requests arrive by a schedule that knows nothing of answers; a worker that is free
// takes the next). Uses one message per worker again and again.
#include "client/cli/load_worker.h"

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
    if (bench_.arrivals == nullptr) {
      while (bench_.control->Take()) {
        if (const auto error = Send(std::nullopt)) PauseAfter(*error);
      }
      return;
    }
    while (const auto due = NextArrival()) {
      if (!bench_.control->SleepUntil(*due)) return;
      if (bench_.control->IsAfterEnd(Clock::now())) {
        Count([](LoadStats& stats) { ++stats.unsent; });
      } else {
        (void)Send(due);
      }
    }
  }

  // Nothing when no more may arrive.
  std::optional<Clock::time_point> NextArrival() {
    const std::lock_guard lock(*bench_.arrivals_mutex);
    const auto due =
        bench_.control->start() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(bench_.arrivals->Next()));
    const bool more = bench_.control->budget().requests == 0
                          ? !bench_.control->stopped() && !bench_.control->IsAfterEnd(due)
                          : bench_.control->Take();
    return more ? std::optional(due) : std::nullopt;
  }

  // `due` is the scheduled arrival; without one, latency counts from the sending.
  std::optional<client::Error> Send(std::optional<Clock::time_point> due) {
    Sent sent{.kind = Kind::kRequest,
              .layer = &bench_.layers.front(),
              .rows = Fill(),
              .due = {},
              .sent = Clock::now()};
    sent.due = due.value_or(sent.sent);
    ++bench_.control->in_flight;
    auto response = client_->Attend(request_);
    --bench_.control->in_flight;
    if (!response.ok()) {
      CountError(response.error());
      return response.error();
    }
    CountAnswer(sent, client::TakeFromWire(response->mutable_output()), response->timing());
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
