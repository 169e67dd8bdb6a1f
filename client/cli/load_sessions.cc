// SPDX-License-Identifier: Apache-2.0
//
// Conversations: a worker takes its sessions in turn, one call each time: the prompt first, then
// one-token steps, then a new session. A session that got lost is counted and replaced.
#include "client/cli/load_worker.h"

namespace attend::cli {
namespace {

struct Conversation {
  std::optional<client::Session> session;
  bool prompted = false;
  int64_t steps = 0;
};

class SessionWorker final : public LoadWorker {
 public:
  SessionWorker(const Bench& bench, int64_t index)
      : LoadWorker(bench, index),
        conversations_(static_cast<size_t>(ShareOf(bench.flags.sessions, bench.workers, index))) {}

 private:
  client::Result<void> Prepare() override {
    WarmUp();
    return {};
  }

  void Measure() override {
    for (size_t turn = 0; bench_.control->Take(); ++turn) {
      Conversation& conversation = conversations_[turn % conversations_.size()];
      const auto error =
          conversation.session || Open(conversation) ? Advance(conversation) : open_error_;
      server_gone_ = error && OutcomeOf(*error) == Outcome::kFailed && error->retryable;
      if (error) PauseAfter(*error);
    }
  }

  void CleanUp() override {
    for (Conversation& conversation : conversations_) {
      // Closing waits for up to a second each time.
      if (conversation.session && server_gone_) conversation.session->Detach();
      conversation.session.reset();
    }
  }

  bool Open(Conversation& conversation) {
    v1::OpenSessionRequest request;
    request.set_model(bench_.model);
    request.add_layers(bench_.layers.front().name());
    auto opened = client_->OpenSession(request);
    if (!opened.ok()) {
      open_error_ = opened.error();
      CountError(*open_error_);
      return false;
    }
    Count([](LoadStats& stats) { ++stats.sessions_opened; });
    conversation = {.session = *std::move(opened), .prompted = false, .steps = 0};
    return true;
  }

  std::optional<client::Error> Advance(Conversation& conversation) {
    const v1::Layer& layer = bench_.layers.front();
    Sent sent{.kind = conversation.prompted ? Kind::kStep : Kind::kPrompt,
              .layer = &layer,
              .rows = conversation.prompted ? 1 : DrawLength(),
              .due = Clock::now(),
              .sent = {}};
    sent.sent = sent.due;
    ++bench_.control->in_flight;
    const auto answer = conversation.session->Attend(layer.name(), RowsView(sent.rows));
    --bench_.control->in_flight;
    if (!answer.ok()) {
      const client::Error& error = answer.error();
      const Outcome outcome = CountError(error);
      if (outcome == Outcome::kSessionLost) conversation.session->Detach();
      // What can't succeed later is no reason to keep the session.
      if (!error.retryable && outcome != Outcome::kRefused) conversation.session.reset();
      return error;
    }
    CountAnswer(sent, answer->output, answer->timing);
    if (conversation.prompted) ++conversation.steps;
    conversation.prompted = true;
    if (conversation.steps >= bench_.flags.steps) conversation.session.reset();
    return std::nullopt;
  }

  std::vector<Conversation> conversations_;
  std::optional<client::Error> open_error_;
  bool server_gone_ = false;  // the last call said so
};

}  // namespace

std::unique_ptr<LoadWorker> MakeSessionWorker(const Bench& bench, int64_t index) {
  return std::make_unique<SessionWorker>(bench, index);
}

}  // namespace attend::cli
