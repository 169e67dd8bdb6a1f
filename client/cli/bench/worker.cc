// SPDX-License-Identifier: Apache-2.0
#include "client/cli/bench/worker.h"

#include <sys/prctl.h>

#include <algorithm>
#include <string>
#include <vector>

namespace attend::cli {
namespace {

using std::chrono::milliseconds;

// Without a hint of the server: a refusal may be over soon, a failure rarely is.
constexpr milliseconds kPauseAfterRefusal{1};
constexpr milliseconds kPauseAfterFailure{100};
constexpr milliseconds kLongestPause{1000};

// What is wrong with an answer; empty = nothing.
std::string FaultOf(const client::Tensor& output, v1::DType dtype, int64_t rows, int64_t width,
                    uint64_t draw) {
  const std::vector<int64_t> shape = {rows, width};
  const int64_t row_bytes = width * client::ElementBytes(dtype);
  if (output.dtype != dtype || output.shape != shape ||
      static_cast<int64_t>(output.data.size()) != rows * row_bytes) {
    return "output: got " + DTypeText(output.dtype) + " " + ShapeText(output.shape) + " in " +
           std::to_string(output.data.size()) + " bytes, wanted " + DTypeText(dtype) + " " +
           ShapeText(shape);
  }
  if (rows == 0) return "";
  const auto row = static_cast<int64_t>(draw % static_cast<uint64_t>(rows));
  const std::string_view data(output.data);
  if (HasNaN(dtype,
             data.substr(static_cast<size_t>(row * row_bytes), static_cast<size_t>(row_bytes)))) {
    return "output: row " + std::to_string(row) + " of " + std::to_string(rows) + " has a NaN";
  }
  return "";
}

}  // namespace

LoadWorker::LoadWorker(const Bench& bench, int64_t index)
    : bench_(bench), index_(index), random_(bench.flags.seed * 1'000'003 + index) {}

void LoadWorker::Run() {
  // The default lets timers come 50 us late, which an open loop would measure as latency.
  prctl(PR_SET_TIMERSLACK, 1);
  client::Options options;
  options.max_attempts = bench_.flags.attempts;
  options.on_retry = [this](const client::Error& error) {
    Count([&](LoadStats& stats) {
      ++stats.calls;
      AddTo(stats.retried, error);
    });
  };
  auto client = Connect(bench_.globals, options);
  if (client.ok()) client_ = *std::move(client);
  const client::Result<void> prepared = client_ ? Prepare() : client.error();
  Count([](LoadStats& stats) {  // sessions opened so far serve what is measured
    const int64_t opened = stats.sessions_opened;
    stats = {};
    stats.sessions_opened = opened;
  });
  if (!prepared.ok()) bench_.control->Abort(prepared.error());
  if (bench_.control->ArriveAndWait()) Measure();
  bench_.control->Finish();
  const LoadStats measured = stats();
  CleanUp();
  Count([&](LoadStats& stats) { stats = measured; });  // closing sessions is no part of it
}

void LoadWorker::Measure() {
  while (bench_.control->Take()) {
    const auto error = Turn();
    Count([](LoadStats& stats) { ++stats.turns; });
    if (error) PauseAfter(*error);
  }
}

LoadStats LoadWorker::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void LoadWorker::WarmUp() {
  for (int64_t i = 0; i < bench_.flags.warmup && !bench_.control->stopped(); ++i) {
    const auto& layer = bench_.layers.front();
    const auto answer = client_->Attend(bench_.model, layer.name(), RowsView(DrawLength()));
    if (!answer.ok()) PauseAfter(answer.error());
  }
}

std::string_view LoadWorker::Rows(int64_t rows) const {
  const int64_t row_bytes =
      bench_.layers.front().d_model() * client::ElementBytes(bench_.flags.dtype);
  return std::string_view(bench_.input)
      .substr(static_cast<size_t>(index_ % kInputShifts * row_bytes),
              static_cast<size_t>(rows * row_bytes));
}

client::TensorView LoadWorker::RowsView(int64_t rows) const {
  return {bench_.flags.dtype,
          {rows, bench_.layers.front().d_model()},
          std::as_bytes(std::span(Rows(rows)))};
}

int64_t LoadWorker::DrawLength() {
  const LengthRange& range = bench_.flags.tokens;
  return std::uniform_int_distribution<int64_t>(range.first, range.last)(random_);
}

bool LoadWorker::CheckAnswer(const v1::Layer& layer, int64_t rows, const client::Tensor& output) {
  return CheckWidth(layer.output_width(), rows, output);
}

bool LoadWorker::CheckWidth(int64_t width, int64_t rows, const client::Tensor& output) {
  const std::string fault = FaultOf(output, bench_.flags.dtype, rows, width, random_());
  server_gone_ = false;
  if (fault.empty()) {
    bench_.control->NoteAnswer();
    return true;
  }
  Count([&](LoadStats& stats) { stats.AddWrongAnswer(fault); });
  bench_.control->NoteFailure();
  return false;
}

bool LoadWorker::CountAnswer(const Sent& sent, const client::Tensor& output,
                             const v1::Timing& timing) {
  const Clock::time_point now = Clock::now();
  const bool echoed = sent.kind == Kind::kEcho;
  const int64_t width = echoed ? sent.layer->d_model() : sent.layer->output_width();
  if (!CheckWidth(width, sent.rows, output)) return false;
  Count([&](LoadStats& stats) {
    RequestStats& kind = stats.of(sent.kind);
    kind.latency.Add(std::chrono::nanoseconds(now - sent.due).count());
    kind.wait_ns += std::chrono::nanoseconds(sent.sent - sent.due).count();
    const int64_t round_trip = std::chrono::nanoseconds(now - sent.sent).count();
    // What an echo holds at the place of the server's times are lengths.
    AddCall(echoed ? v1::Timing() : timing, sent.rows, round_trip, &kind);
    if (!echoed) ++stats.replicas[timing.replica()];
  });
  return true;
}

Outcome LoadWorker::CountError(const client::Error& error, int64_t sessions) {
  Outcome outcome = Outcome::kFailed;
  Count([&](LoadStats& stats) { outcome = stats.AddError(error, sessions); });
  server_gone_ = outcome == Outcome::kFailed && error.retryable;
  if (outcome == Outcome::kFailed) {
    bench_.control->NoteFailure();
  } else {
    bench_.control->NoteAnswer();
  }
  return outcome;
}

void LoadWorker::PauseAfter(const client::Error& error) const {
  const Outcome outcome = OutcomeOf(error);
  if (outcome == Outcome::kSessionLost) return;
  milliseconds pause = outcome == Outcome::kRefused ? kPauseAfterRefusal : kPauseAfterFailure;
  if (error.retry_after.count() > 0) pause = std::min(error.retry_after, kLongestPause);
  bench_.control->SleepUntil(Clock::now() + pause);
}

client::Result<client::Session> LoadWorker::OpenSession() {
  auto session = Make([&] { return client_->OpenSession(SessionRequest(bench_)); });
  if (session.ok()) Count([](LoadStats& stats) { ++stats.sessions_opened; });
  return session;
}

v1::OpenSessionRequest SessionRequest(const Bench& bench) {
  v1::OpenSessionRequest request;
  request.set_model(bench.model);
  for (const v1::Layer& layer : bench.layers) request.add_layers(layer.name());
  return request;
}

client::AttendOptions SessionOptions(const v1::Layer& layer) {
  client::AttendOptions options;
  // Such a layer is bidirectional unless asked, and a history is causal.
  if (layer.mask_selectable()) options.mask = v1::MASK_CAUSAL;
  return options;
}

}  // namespace attend::cli
