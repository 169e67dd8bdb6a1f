// SPDX-License-Identifier: Apache-2.0
//
// Conversations: a worker takes its sessions in turn, one call each time: the prompt first, then
// one-token steps, then a new session. A session that got lost is counted and replaced.
#include "client/cli/bench/worker.h"

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

  std::optional<client::Error> Turn() override {
    Conversation& conversation = conversations_[turn_++ % conversations_.size()];
    if (!conversation.session) {
      if (const auto opened = Open(conversation); !opened.ok()) return opened.error();
    }
    return Advance(conversation);
  }

  void CleanUp() override {
    for (Conversation& conversation : conversations_) {
      if (conversation.session && server_gone()) conversation.session->Detach();
      conversation.session.reset();
    }
  }

  client::Result<void> Open(Conversation& conversation) {
    auto opened = OpenSession();
    if (!opened.ok()) {
      CountError(opened.error());
      return opened.error();
    }
    conversation = {.session = *std::move(opened), .prompted = false, .steps = 0};
    return {};
  }

  void Close(Conversation& conversation) {
    Count([](LoadStats& stats) { ++stats.calls; });
    conversation.session.reset();
  }

  std::optional<client::Error> Advance(Conversation& conversation) {
    const v1::Layer& layer = bench_.layers.front();
    Sent sent{.kind = conversation.prompted ? Kind::kStep : Kind::kPrompt,
              .layer = &layer,
              .rows = conversation.prompted ? 1 : DrawLength(),
              .due = Clock::now(),
              .sent = {}};
    sent.sent = sent.due;
    const auto answer = Make([&] {
      return conversation.session->Attend(layer.name(), RowsView(sent.rows), SessionOptions(layer));
    });
    if (!answer.ok()) {
      const client::Error& error = answer.error();
      const Outcome outcome = CountError(error);
      if (outcome == Outcome::kSessionLost) {
        conversation.session->Detach();
        conversation.session.reset();
      } else if (outcome == Outcome::kFailed && !error.retryable) {
        Close(conversation);  // what can't succeed later is no reason to keep it
      }
      return error;
    }
    CountAnswer(sent, answer->output, answer->timing);
    if (conversation.prompted) ++conversation.steps;
    conversation.prompted = true;
    if (conversation.steps >= bench_.flags.steps) Close(conversation);
    return std::nullopt;
  }

  std::vector<Conversation> conversations_;
  size_t turn_ = 0;
};

}  // namespace

std::unique_ptr<LoadWorker> MakeSessionWorker(const Bench& bench, int64_t index) {
  return std::make_unique<SessionWorker>(bench, index);
}

}  // namespace attend::cli
