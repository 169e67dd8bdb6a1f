// SPDX-License-Identifier: Apache-2.0
//
// What a silence costs: bursts of requests, then a second in which nobody sends anything, then one
// request, which is counted apart. One worker, or there would be no silence.
#include <chrono>

#include "client/cli/bench/worker.h"

namespace attend::cli {
namespace {

constexpr std::chrono::seconds kSilence{1};
// Bursts are long enough that the machine is as fast as ever in most of their requests.
constexpr int kMostOfBurst = 200;
constexpr std::chrono::milliseconds kBurst{250};

class IdleWorker final : public LoadWorker {
 public:
  using LoadWorker::LoadWorker;

 private:
  client::Result<void> Prepare() override {
    WarmUp();
    return {};
  }

  std::optional<client::Error> Turn() override {
    const Clock::time_point end = Clock::now() + kBurst;
    for (int i = 0; i == 0 || (i < kMostOfBurst && Clock::now() < end); ++i) {
      if (auto error = Send(Kind::kRequest)) return error;
    }
    if (!bench_.control->SleepUntil(Clock::now() + kSilence)) return std::nullopt;
    return Send(Kind::kIdle);
  }

  std::optional<client::Error> Send(Kind kind) {
    const v1::Layer& layer = bench_.layers.front();
    const int64_t rows = DrawLength();
    const client::TensorView view = RowsView(rows);
    const Clock::time_point now = Clock::now();
    const auto answer = Make([&] { return client_->Attend(bench_.model, layer.name(), view); });
    if (!answer.ok()) {
      CountError(answer.error());
      return answer.error();
    }
    const Sent sent{.kind = kind, .layer = &layer, .rows = rows, .due = now, .sent = now};
    CountAnswer(sent, answer->output, answer->timing);
    return std::nullopt;
  }
};

}  // namespace

std::unique_ptr<LoadWorker> MakeIdleWorker(const Bench& bench, int64_t index) {
  return std::make_unique<IdleWorker>(bench, index);
}

}  // namespace attend::cli
