// SPDX-License-Identifier: Apache-2.0
//
// The decode loop of a model that is split between two machines: a step of a worker's sessions
// (its micro-batch) is one item for each layer on the worker's stream, each sent after the answer
// to the one before, with one new row for every session. Workers overlap, so that one computes here
// while the server computes for the other.
#include <algorithm>
#include <span>
#include <vector>

#include "client/cli/bench/worker.h"

namespace attend::cli {
namespace {

// What one call costs is measured on so many layers in turn, so that caches are as cold as in a
// model, with a history that takes a server of 2 cores seconds to make, and so often.
constexpr size_t kLinkLayers = 4;
constexpr int64_t kLinkHistory = 2048;
constexpr int kLinkRounds = 17;  // the first is not counted

// `rows` rows of each of `sessions`, which have `position` tokens of `layer` before them. What a
// lost item may have appended beyond that is dropped, so that every item can be sent again.
struct StreamItem {
  const v1::Layer* layer = nullptr;
  std::span<const client::Session> sessions;
  int64_t position = 0;
  int64_t rows = 1;
  bool append = true;
};

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
    if (!ready_) {
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

  void CleanUp() override {
    if (bench_.link != nullptr && index_ == 0) {
      const auto measured = MeasureLink();
      if (!measured.ok()) bench_.link->why_not = measured.error().ToString();
    }
    CloseAll();
  }

  // ---- What one call costs, after the load and alone ----

  // Rest and computation of repeated calls.
  struct Costs {
    LatencyHistogram rest, compute;

    LinkSamples::Call Medians(const Bench& bench, int64_t rows, int64_t cached) const {
      const v1::Layer& layer = bench.layers.front();
      const int64_t row_bytes =
          (layer.d_model() + layer.output_width()) * client::ElementBytes(bench.flags.dtype);
      return {.rows = rows,
              .bytes = static_cast<double>(rows * row_bytes),
              .cached = static_cast<double>(cached),
              .rest_us = static_cast<double>(rest.PercentileNs(0.5)) / 1e3,
              .compute_us = static_cast<double>(compute.PercentileNs(0.5)) / 1e3};
    }
  };

  // `costs` may be null.
  client::Result<void> Time(const StreamItem& item, Costs* costs) {
    const Clock::time_point sent = Clock::now();
    const auto answer = Send(item);
    if (!answer.ok()) return answer.error();
    if (costs == nullptr) return {};
    const int64_t round_trip = std::chrono::nanoseconds(Clock::now() - sent).count();
    const v1::Timing& timing = answer->timing();
    costs->rest.Add(round_trip - 1000 * (timing.queue_us() + timing.compute_us()));
    costs->compute.Add(1000 * timing.compute_us());
    return {};
  }

  // `item` on each of the layers that the link is measured on in turn, again and again.
  client::Result<void> TimeRounds(StreamItem item, Costs* costs) {
    for (int i = 0; i < kLinkRounds; ++i) {
      for (const v1::Layer& layer : LinkLayers()) {
        item.layer = &layer;
        if (auto timed = Time(item, i == 0 ? nullptr : costs); !timed.ok()) return timed;
      }
    }
    return {};
  }

  std::span<const v1::Layer> LinkLayers() const {
    return std::span(bench_.layers).first(std::min(bench_.layers.size(), kLinkLayers));
  }

  client::Result<void> MeasureLink() {
    if (!ready_ || TotalOf(stats().failed) > 0) {
      bench_.link->why_not = "calls failed";
      return {};
    }
    while (!bench_.control->WaitUntilFinished(Clock::now() + LoadControl::kSlice)) {
    }
    if (StopSignal() != 0) {
      bench_.link->why_not = "ended early";
      return {};
    }
    const int64_t prompt = bench_.flags.prompt;
    Costs batch, row, cached, rows;
    auto timed = TimeRounds({.sessions = sessions_, .position = prompt}, &batch);
    if (!timed.ok()) return timed;
    const auto session = client_->OpenSession(SessionRequest(bench_));
    if (!session.ok()) return session.error();
    const std::span<const client::Session> alone(&*session, 1);
    timed = TimeRounds({.sessions = alone, .append = false}, &row);
    if (!timed.ok()) return timed;
    int64_t history = 0;
    for (; history + bench_.link_rows <= kLinkHistory; history += bench_.link_rows) {
      for (const v1::Layer& layer : LinkLayers()) {
        timed = Time(
            {.layer = &layer, .sessions = alone, .position = history, .rows = bench_.link_rows},
            &rows);
        if (!timed.ok()) return timed;
      }
    }
    timed = TimeRounds({.sessions = alone, .position = history, .append = false}, &cached);
    if (!timed.ok()) return timed;
    bench_.link->samples = {.batch = batch.Medians(bench_, count_, count_ * prompt),
                            .row = row.Medians(bench_, 1, 0),
                            .cached = cached.Medians(bench_, 1, history),
                            .rows = rows.Medians(bench_, bench_.link_rows, 0)};
    return {};
  }

  // ---- Sessions ----

  // Opens the sessions, all on one replica, and appends the prompts, which are large, by calls of
  // their own. Counts what goes wrong.
  client::Result<void> Open() {
    stream_ = client_->OpenStream();  // goes to the replica of its first item
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
    ready_ = true;
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

  void CloseAll() {
    ready_ = false;
    for (client::Session& session : sessions_) {
      if (server_gone()) {
        session.Detach();
      } else {
        Count([](LoadStats& stats) { ++stats.calls; });
      }
    }
    sessions_.clear();
  }

  // ---- Steps ----

  // Sends an item and waits for its answer. The stream opens with the first one, and anew with the
  // first one after it ended.
  client::Result<v1::AttendResponse> Send(const StreamItem& item) {
    v1::AttendRequest request;
    request.set_model(bench_.model);
    request.set_layer(item.layer->name());
    request.set_mask(SessionOptions(*item.layer).mask);
    for (const client::Session& session : item.sessions) {
      v1::Sequence* sequence = request.add_sequences();
      sequence->set_session_id(session.id());
      sequence->set_length(item.rows);
      sequence->set_position(item.position);
      sequence->set_rewind(item.append);
      sequence->set_no_append(!item.append);
    }
    const int64_t rows = item.rows * static_cast<int64_t>(item.sessions.size());
    client::CopyToWire(RowsView(rows), request.mutable_hidden_states());
    if (auto sent = stream_->Send(std::move(request)); !sent.ok()) return sent.error();
    return stream_->Receive();
  }

  // All layers, or none: after an error or a wrong answer every history is as long as before, with
  // the next item of its layer.
  std::optional<client::Error> Step() {
    const Clock::time_point start = Clock::now();
    RequestStats step;
    for (const v1::Layer& layer : bench_.layers) {
      const Clock::time_point sent = Clock::now();
      auto answer = Make([&] {
        return Send(
            {.layer = &layer, .sessions = sessions_, .position = bench_.flags.prompt + steps_});
      });
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
      const client::Tensor output = client::TakeFromWire(answer->mutable_output());
      if (!CountAnswer(call, output, answer->timing())) return std::nullopt;
      AddCall(answer->timing(), 0, round_trip, &step);
    }
    step.tokens = count_;
    step.latency.Add(std::chrono::nanoseconds(Clock::now() - start).count());
    Count([&](LoadStats& stats) { stats.of(Kind::kStep).Merge(step); });
    // Histories stay as long as asked for.
    if (++steps_ >= bench_.flags.steps) steps_ = 0;
    return std::nullopt;
  }

  const int64_t count_;
  std::vector<client::Session> sessions_;
  std::optional<client::Stream> stream_;  // of these sessions
  bool ready_ = false;                    // every session has its prompt
  int64_t steps_ = 0;                     // done since the histories were as long as the prompt
};

}  // namespace

std::unique_ptr<LoadWorker> MakeDecodeWorker(const Bench& bench, int64_t index) {
  return std::make_unique<DecodeWorker>(bench, index);
}

}  // namespace attend::cli
