// SPDX-License-Identifier: Apache-2.0
//
// What a load generator counts, plans and shows, without network: percentiles against sorted
// samples, arrivals, lengths, inputs, when a load ends, its table and its line of progress.
#include <gmock/gmock.h>
#include <grpcpp/support/status.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "client/cli/bench/report.h"
#include "tests/support/seed.h"

namespace attend::cli {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::Pair;
using testing::StartsWith;

constexpr double kShares[] = {0.0, 0.25, 0.5, 0.9, 0.99, 0.999, 1.0};

// The definition: the smallest sample that at least `share` of all do not exceed.
int64_t SortedPercentile(std::vector<int64_t> samples, double share) {
  std::sort(samples.begin(), samples.end());
  const double exact = share * static_cast<double>(samples.size());
  const auto rank = std::max<size_t>(1, static_cast<size_t>(std::ceil(exact - 1e-9)));
  return samples[rank - 1];
}

std::vector<int64_t> LogNormal(size_t count, std::mt19937_64& random) {
  std::lognormal_distribution<double> latency(14, 2);  // a median of 1.2 ms, tails of seconds
  std::vector<int64_t> samples(count);
  for (int64_t& sample : samples) sample = static_cast<int64_t>(latency(random));
  return samples;
}

LatencyHistogram HistogramOf(const std::vector<int64_t>& samples) {
  LatencyHistogram histogram;
  for (int64_t sample : samples) histogram.Add(sample);
  return histogram;
}

TEST(LatencyHistogramTest, PercentilesAreThoseOfTheSortedSamplesWithinHalfAPercent) {
  std::mt19937_64 random(TestSeed());
  for (size_t count : {1, 2, 3, 10, 99, 100, 101, 1000, 20000}) {
    const std::vector<int64_t> samples = LogNormal(count, random);
    const LatencyHistogram histogram = HistogramOf(samples);
    EXPECT_EQ(histogram.count(), static_cast<int64_t>(count));
    for (double share : kShares) {
      const auto wanted = static_cast<double>(SortedPercentile(samples, share));
      EXPECT_NEAR(static_cast<double>(histogram.PercentileNs(share)), wanted, 0.005 * wanted)
          << count << " samples, share " << share;
    }
    EXPECT_EQ(histogram.PercentileNs(1), *std::max_element(samples.begin(), samples.end()));
  }
}

TEST(LatencyHistogramTest, ShortTimesAreExactAndNegativeOnesZero) {
  for (int64_t sample = -1; sample < 256; ++sample) {
    const LatencyHistogram histogram = HistogramOf({sample, sample, 1 << 20});
    EXPECT_EQ(histogram.PercentileNs(0.5), std::max<int64_t>(0, sample));
  }
}

TEST(LatencyHistogramTest, EveryMagnitudeIsWithinHalfAPercent) {
  for (int64_t sample = 1; sample < int64_t{1} << 60; sample += sample / 3 + 1) {
    const auto got = static_cast<double>(HistogramOf({sample, sample + sample}).PercentileNs(0.5));
    EXPECT_NEAR(got, static_cast<double>(sample), 0.005 * static_cast<double>(sample));
  }
}

TEST(LatencyHistogramTest, AnEmptyOneIsZero) {
  const LatencyHistogram histogram;
  for (double share : kShares) EXPECT_EQ(histogram.PercentileNs(share), 0);
  EXPECT_EQ(histogram.mean_ns(), 0);
}

TEST(LatencyHistogramTest, MergingIsTheSameAsCountingTogether) {
  std::mt19937_64 random(TestSeed());
  std::vector<int64_t> all;
  LatencyHistogram merged;
  for (size_t count : {500, 0, 3, 2000}) {
    const std::vector<int64_t> samples = LogNormal(count, random);
    merged.Merge(HistogramOf(samples));
    all.insert(all.end(), samples.begin(), samples.end());
  }
  const LatencyHistogram together = HistogramOf(all);
  for (double share : kShares) {
    EXPECT_EQ(merged.PercentileNs(share), together.PercentileNs(share));
  }
  EXPECT_EQ(merged.count(), together.count());
  EXPECT_EQ(merged.mean_ns(), together.mean_ns());
  EXPECT_EQ(merged.max_ns(), together.max_ns());
}

TEST(LatencyHistogramTest, SubtractingLeavesWhatCameSince) {
  LatencyHistogram histogram = HistogramOf({1'000'000'000, 5, 7});
  const LatencyHistogram earlier = histogram;
  histogram.Add(100);
  histogram.Add(200);
  histogram.Subtract(earlier);
  EXPECT_EQ(histogram.count(), 2);
  EXPECT_EQ(histogram.mean_ns(), 150);
  EXPECT_EQ(histogram.PercentileNs(0.5), 100);
  EXPECT_EQ(histogram.PercentileNs(0.99), 200);  // not the second of before
  histogram.Subtract(HistogramOf({100, 200}));
  EXPECT_EQ(histogram.PercentileNs(0.99), 0);
}

client::Error Failure(int code, v1::Reason reason = v1::REASON_UNSPECIFIED) {
  client::Error error;
  error.code = code;
  error.reason = reason;
  error.message = "why";
  return error;
}

TEST(LoadStatsTest, RefusalsAreNoFailuresAndLostSessionsAreNeither) {
  LoadStats stats;
  EXPECT_EQ(stats.AddError(Failure(grpc::RESOURCE_EXHAUSTED, v1::QUEUE_FULL)), Outcome::kRefused);
  EXPECT_EQ(stats.AddError(Failure(grpc::UNAVAILABLE, v1::DRAINING)), Outcome::kRefused);
  EXPECT_EQ(stats.AddError(Failure(grpc::NOT_FOUND, v1::SESSION_LOST_IN_RESTART), 3),
            Outcome::kSessionLost);
  EXPECT_EQ(stats.AddError(Failure(grpc::FAILED_PRECONDITION, v1::SESSION_MOVED)),
            Outcome::kSessionLost);
  EXPECT_EQ(stats.AddError(Failure(grpc::UNAVAILABLE)), Outcome::kFailed);
  EXPECT_EQ(stats.AddError(Failure(grpc::INVALID_ARGUMENT, v1::TOO_LARGE)), Outcome::kFailed);
  stats.AddWrongAnswer("output: row 0 has a NaN");

  EXPECT_EQ(TotalOf(stats.refused), 2);
  EXPECT_EQ(stats.refused.at("QUEUE_FULL").count, 1);
  EXPECT_EQ(TotalOf(stats.sessions_lost), 4);
  EXPECT_EQ(stats.sessions_lost.at("SESSION_LOST_IN_RESTART").count, 3);
  EXPECT_EQ(TotalOf(stats.failed), 3);
  EXPECT_EQ(stats.failed.at("UNAVAILABLE").first_message, "UNAVAILABLE: why");
  EXPECT_EQ(stats.failed.at("WRONG_ANSWER").first_message, "output: row 0 has a NaN");
}

TEST(LoadStatsTest, MergingAddsEverything) {
  v1::Timing timing;
  timing.set_queue_us(2);
  timing.set_compute_us(3);
  timing.set_batch_tokens(40);
  timing.set_batch_sequences(5);
  LoadStats one;
  one.of(Kind::kStep).latency.Add(7000);
  AddCall(timing, 8, 6000, &one.of(Kind::kStep));
  one.replicas["a"] = 1;
  one.calls = 5;
  one.turns = 6;
  one.late = 2;
  one.unsent = 3;
  one.sessions_opened = 4;
  one.AddError(Failure(grpc::UNAVAILABLE));
  AddTo(one.retried, Failure(grpc::UNAVAILABLE));
  LoadStats sum;
  sum.Merge(one);
  sum.Merge(one);
  const RequestStats& steps = sum.of(Kind::kStep);
  EXPECT_EQ(steps.latency.count(), 2);
  EXPECT_EQ(steps.calls, 2);
  EXPECT_EQ(steps.tokens, 16);
  EXPECT_EQ(steps.round_trip_ns, 12000);
  EXPECT_EQ(steps.queue_us, 4);
  EXPECT_EQ(steps.compute_us, 6);
  EXPECT_EQ(steps.batch_tokens, 80);
  EXPECT_EQ(steps.batch_sequences, 10);
  EXPECT_EQ(sum.of(Kind::kRequest).calls, 0);
  EXPECT_THAT(sum.replicas, ElementsAre(Pair("a", 2)));
  EXPECT_EQ(sum.calls, 10);
  EXPECT_EQ(sum.turns, 12);
  EXPECT_EQ(sum.late, 4);
  EXPECT_EQ(sum.unsent, 6);
  EXPECT_EQ(sum.sessions_opened, 8);
  EXPECT_EQ(TotalOf(sum.failed), 2);
  EXPECT_EQ(TotalOf(sum.retried), 2);
  EXPECT_EQ(sum.failed.at("UNAVAILABLE").first_message, "UNAVAILABLE: why");
}

TEST(LengthRangeTest, IsALengthOrTwo) {
  LengthRange range;
  EXPECT_EQ(ParseLengthRange("16:512", &range), "");
  EXPECT_EQ(range.first, 16);
  EXPECT_EQ(range.last, 512);
  EXPECT_EQ(LengthRangeText(range), "16:512");
  EXPECT_EQ(ParseLengthRange("7", &range), "");
  EXPECT_EQ(range.first, 7);
  EXPECT_EQ(range.last, 7);
  EXPECT_EQ(LengthRangeText(range), "7");
  EXPECT_EQ(ParseLengthRange("3:3", &range), "");
  EXPECT_EQ(ParseLengthRange("1:1000000", &range), "");
}

TEST(LengthRangeTest, AnythingElseIsRefusedAndChangesNothing) {
  LengthRange range{.first = 1, .last = 2};
  for (const char* text :
       {"", ":", "0", "-1", "16:", ":16", "512:16", "0:5", "1:2:3", "1.5", "16 :512", "a", "16:b",
        "+1", "0x10", "1000001", "99999999999999999999"}) {
    EXPECT_THAT(ParseLengthRange(text, &range), HasSubstr("wanted a length from 1")) << text;
  }
  EXPECT_EQ(range.first, 1);
  EXPECT_EQ(range.last, 2);
}

TEST(ArrivalScheduleTest, GapsAreExponentialWithTheMeanOfTheRate) {
  ArrivalSchedule arrivals(200, 1);
  constexpr int kCount = 100000;
  double last = 0;
  double squares = 0;
  int short_gaps = 0;
  for (int i = 0; i < kCount; ++i) {
    const double now = arrivals.Next();
    const double gap = (now - last) * 200;  // in mean gaps
    ASSERT_GE(gap, 0);
    squares += gap * gap;
    short_gaps += gap < std::log(2) ? 1 : 0;  // the median
    last = now;
  }
  // Five standard errors each.
  EXPECT_NEAR(last * 200 / kCount, 1, 5 / std::sqrt(kCount));
  EXPECT_NEAR(squares / kCount, 2, 5 * std::sqrt(20.0 / kCount));
  EXPECT_NEAR(static_cast<double>(short_gaps) / kCount, 0.5, 2.5 / std::sqrt(kCount));
}

TEST(ArrivalScheduleTest, TellsEachArrivalToOneThread) {
  ArrivalSchedule arrivals(10, 3);
  ArrivalSchedule same(10, 3);
  std::vector<std::vector<double>> of_thread(4, std::vector<double>(500));
  {
    std::vector<std::jthread> threads;
    for (std::vector<double>& times : of_thread) {
      threads.emplace_back([&] {
        for (double& time : times) time = arrivals.Next();
      });
    }
  }
  std::vector<double> told;
  for (const auto& times : of_thread) told.insert(told.end(), times.begin(), times.end());
  std::sort(told.begin(), told.end());
  for (const double time : told) EXPECT_EQ(time, same.Next());
}

TEST(ArrivalScheduleTest, EqualSeedsGiveEqualTimes) {
  ArrivalSchedule one(10, 3);
  ArrivalSchedule same(10, 3);
  ArrivalSchedule other(10, 4);
  const double first = one.Next();
  EXPECT_EQ(first, same.Next());
  EXPECT_NE(first, other.Next());
}

TEST(MakeInputTest, EqualSeedsGiveEqualNumbersInEveryType) {
  std::vector<std::vector<float>> values;
  for (v1::DType dtype : {v1::DTYPE_F32, v1::DTYPE_F16, v1::DTYPE_BF16}) {
    client::Tensor tensor;
    tensor.dtype = dtype;
    tensor.shape = {1, 1000};
    tensor.data = MakeInput(dtype, 1000, 5);
    EXPECT_FALSE(HasNaN(dtype, tensor.data));
    values.push_back(tensor.ToFloats());
  }
  ASSERT_EQ(values[0].size(), 1000u);
  EXPECT_EQ(values[0], values[1]);
  EXPECT_EQ(values[0], values[2]);
  const auto [least, most] = std::minmax_element(values[0].begin(), values[0].end());
  EXPECT_GE(*least, -2);
  EXPECT_LT(*most, 2);
  EXPECT_GT(*most - *least, 3);
  EXPECT_NE(MakeInput(v1::DTYPE_F32, 1000, 6), MakeInput(v1::DTYPE_F32, 1000, 5));
}

TEST(HasNaNTest, FindsOneInAnyTypeAndNoneInInfinities) {
  const auto bytes = [](std::initializer_list<int> values) {
    return std::string(values.begin(), values.end());
  };
  EXPECT_TRUE(HasNaN(v1::DTYPE_F32, bytes({0, 0, 0, 0, 1, 0, 0x80, 0x7f})));
  EXPECT_TRUE(HasNaN(v1::DTYPE_F32, bytes({0, 0, 0xc0, 0xff})));
  EXPECT_FALSE(HasNaN(v1::DTYPE_F32, bytes({0, 0, 0x80, 0x7f, 0, 0, 0x80, 0xff})));
  EXPECT_TRUE(HasNaN(v1::DTYPE_F16, bytes({0, 0, 1, 0xfc})));
  EXPECT_FALSE(HasNaN(v1::DTYPE_F16, bytes({0, 0x7c, 0, 0xfc})));
  EXPECT_TRUE(HasNaN(v1::DTYPE_BF16, bytes({0xc0, 0x7f})));
  EXPECT_FALSE(HasNaN(v1::DTYPE_BF16, bytes({0x80, 0x7f, 0x80, 0xff})));
}

TEST(LoadControlTest, AllStartTogetherAndTakeNoMoreThanTheRequests) {
  constexpr int kWorkers = 3;
  LoadControl control(kWorkers, {.seconds = 0, .requests = 1000});
  std::atomic<int> taken{0};
  std::vector<std::jthread> threads;
  for (int i = 0; i < kWorkers; ++i) {
    threads.emplace_back([&, last = i == kWorkers - 1] {
      EXPECT_FALSE(last && control.started());
      EXPECT_TRUE(control.ArriveAndWait());
      EXPECT_TRUE(control.started());
      while (control.Take()) ++taken;
      control.Finish();
    });
    EXPECT_FALSE(i < kWorkers - 1 && control.WaitUntilFinished(LoadControl::Clock::now()));
  }
  EXPECT_TRUE(control.WaitUntilFinished(LoadControl::Clock::now() + std::chrono::seconds(60)));
  EXPECT_EQ(taken, 1000);
  EXPECT_FALSE(control.gave_up());
  EXPECT_GT(control.elapsed_seconds(), 0);
}

TEST(LoadControlTest, OneThatCannotStartEndsAllBeforeTheStart) {
  LoadControl control(3, {});
  std::vector<std::jthread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      EXPECT_FALSE(control.ArriveAndWait());
      control.Finish();
    });
  }
  control.Abort(Failure(grpc::INTERNAL));
  control.Abort(Failure(grpc::UNAVAILABLE));
  EXPECT_FALSE(control.ArriveAndWait());
  control.Finish();
  EXPECT_TRUE(control.WaitUntilFinished(LoadControl::Clock::now() + std::chrono::seconds(60)));
  EXPECT_FALSE(control.started());
  EXPECT_FALSE(control.Take());
  EXPECT_EQ(control.error()->code, grpc::INTERNAL);
  EXPECT_EQ(control.elapsed_seconds(), 0);
}

TEST(LoadControlTest, ALoadByTimeEndsThenAndNeverGivesUp) {
  LoadControl control(1, {.seconds = 500, .requests = 0, .patience = milliseconds(0)});
  EXPECT_TRUE(control.ArriveAndWait());
  const auto end = control.start() + std::chrono::seconds(500);
  control.NoteFailure(control.start());
  EXPECT_TRUE(control.Take(end - milliseconds(1)));
  EXPECT_FALSE(control.IsAfterEnd(end - milliseconds(1)));
  EXPECT_TRUE(control.IsAfterEnd(end));
  EXPECT_TRUE(control.SleepUntil(control.start()));
  EXPECT_FALSE(control.Take(end));
  EXPECT_FALSE(control.gave_up());
}

TEST(LoadControlTest, ALoadByNumberGivesUpAfterARunOfFailures) {
  LoadControl control(1, {.seconds = 0, .requests = 100, .patience = milliseconds(300)});
  EXPECT_TRUE(control.ArriveAndWait());
  const auto start = control.start();
  const auto hour = std::chrono::hours(1);
  EXPECT_FALSE(control.IsAfterEnd(start + hour));
  EXPECT_TRUE(control.Take(start + hour));  // silence is no failure
  control.NoteFailure(start + hour);
  EXPECT_TRUE(control.Take(start + hour + milliseconds(300)));
  control.NoteAnswer();
  EXPECT_TRUE(control.Take(start + 2 * hour));
  control.NoteFailure(start + 2 * hour);
  control.NoteFailure(start + 2 * hour + milliseconds(299));  // the run began with the first
  EXPECT_TRUE(control.Take(start + 2 * hour + milliseconds(300)));
  EXPECT_FALSE(control.Take(start + 2 * hour + milliseconds(301)));
  EXPECT_TRUE(control.gave_up());
  EXPECT_FALSE(control.SleepUntil(LoadControl::Clock::now() + hour));
}

// A load of 8 answered requests in 2 s, and what else a report may hold.
class ReportTest : public testing::Test {
 protected:
  ReportTest() {
    v1::Layer layer;
    layer.set_name("0");
    bench_.layers.push_back(layer);
    bench_.model = "tiny";
    bench_.workers = 2;
    bench_.limits.set_batch_tokens(64);
    v1::Timing timing;
    timing.set_queue_us(500);
    timing.set_compute_us(1500);
    timing.set_batch_tokens(16);
    timing.set_batch_sequences(2);
    for (int i = 1; i <= 8; ++i) {
      RequestStats& requests = stats_.of(Kind::kRequest);
      requests.latency.Add(i * 1'000'000);
      requests.wait_ns += 250'000;
      AddCall(timing, 8, 4'000'000, &requests);
    }
    stats_.replicas["a"] = 8;
    stats_.calls = 10;
    stats_.turns = 9;
    stats_.late = 3;
    stats_.unsent = 4;
    stats_.AddError(Failure(grpc::RESOURCE_EXHAUSTED, v1::QUEUE_FULL));
  }
  LoadReport Report() const {
    return {.bench = bench_, .stats = stats_, .seconds = 2, .cpu_seconds = 0.001};
  }

  Globals globals_{.server = "there:1"};
  BenchFlags flags_;
  Bench bench_{globals_, flags_};
  LoadStats stats_;
};

TEST_F(ReportTest, TheTableIsThatOfTheNumbers) {
  EXPECT_EQ(ReportText(Report()),
            R"(closed loop: 2 clients, 128 tokens, f32
model tiny (layer 0) at there:1
measured 2.00 s after 2 warm-up requests each

ms               count     per s  tokens/s      p50      p90      p99    p99.9      max |    queue  compute     rest
request              8       4.0        32    4.006    8.000    8.000    8.000    8.000 |    0.500    1.500    2.000

batch fill     16.0 tokens, 2.0 sequences; 25.0 % of batch_tokens = 64
refused        1: QUEUE_FULL 1
failed         0
replicas       a 8
cpu here       100 us for each of 10 calls
)");
  EXPECT_EQ(ExitCodeOf(Report()), 0);
}

TEST_F(ReportTest, AnOpenLoopTellsOfWaitingAndOfEarlyEnds) {
  flags_.rate = 5;
  stats_.AddError(Failure(grpc::INTERNAL));
  LoadReport report = Report();
  report.signal = 2;
  EXPECT_THAT(ReportText(report),
              AllOf(HasSubstr("open loop: 5 requests/s, at most 2 in flight, 128 tokens"),
                    HasSubstr("\nended early by signal 2\n"), HasSubstr("|    0.250    0.500"),
                    HasSubstr("\nfailed         1: INTERNAL 1\n  first INTERNAL: INTERNAL: why\n"),
                    HasSubstr("\narrivals       3 more than 1 ms late, 4 never sent\n")));
  EXPECT_EQ(ExitCodeOf(report), 130);
  EXPECT_EQ(ExitCodeOf(Report()), 1);
}

TEST_F(ReportTest, WithAnEchoBothAreComparedInTheirOwnTurns) {
  flags_.echo = "echo:2";
  RequestStats& echoes = stats_.of(Kind::kEcho);
  for (int i = 0; i < 4; ++i) {
    echoes.latency.Add(1'000'000);
    AddCall({}, 8, 1'000'000, &echoes);
  }
  LoadReport report = Report();
  report.kind_seconds[static_cast<size_t>(Kind::kRequest)] = 1;
  report.kind_seconds[static_cast<size_t>(Kind::kEcho)] = 0.5;
  EXPECT_THAT(ReportText(report),
              AllOf(HasSubstr(" at there:1, echo at echo:2\n"),
                    HasSubstr("\nrequest              8       8.0        64 "),
                    HasSubstr("\necho                 4       8.0        64 "),
                    HasSubstr("\nrest / echo    2.00: 2.000 ms of a request, 1.000 ms of an echo "),
                    Not(HasSubstr("cpu servers"))));
  report.server_cpu_seconds = 0.008;
  report.echo_cpu_seconds = 0.0004;
  EXPECT_THAT(ReportText(report),
              HasSubstr("\ncpu servers    1000 us for a request, 100 us for an echo\n"));
}

TEST_F(ReportTest, AFairnessRunTellsWhatEachCostsTheOther) {
  flags_.fairness = true;
  flags_.sessions = 3;
  flags_.rate = 50;
  flags_.prompt = 8192;
  stats_ = {};
  for (const auto& [kind, ms] :
       {std::pair(Kind::kAppend, 2), std::pair(Kind::kAppendBusy, 3),
        std::pair(Kind::kPrefill, 100), std::pair(Kind::kPrefillBusy, 110)}) {
    stats_.of(kind).latency.Add(ms * 1'000'000);
  }
  EXPECT_THAT(
      ReportText(Report()),
      AllOf(StartsWith("fairness: 3 sessions of 128 tokens append 50 rows/s, prefills of "),
            HasSubstr("p99 of appends x 1.50 during prefills: 3.000 ms, 2.000 ms without\n"),
            HasSubstr("prefill x 1.10 during appends: 110.0 ms, 100.0 ms without"),
            Not(HasSubstr("arrivals"))));
}

TEST_F(ReportTest, ProgressCountsWhatEndedAndRatesWhatCameSinceTheLastLook) {
  LoadStats earlier = stats_;
  stats_.of(Kind::kRequest).latency.Add(100'000);
  stats_.of(Kind::kRequest).latency.Add(100'000);
  stats_.of(Kind::kRequest).tokens += 30;
  stats_.turns = 12;
  EXPECT_EQ(ProgressLine(bench_, earlier, stats_, 0.5, 3.2, 2),
            "3/10 s  4 requests/s  60 tokens/s  p50 0.10 p99 0.10 ms  in flight 2  refused 1  "
            "failed 0");
  flags_.requests = 12;  // refused and failed ones are among them
  EXPECT_THAT(ProgressLine(bench_, earlier, stats_, 0.5, 3.2, 0), StartsWith("12/12  4 requests"));
}

}  // namespace
}  // namespace attend::cli
