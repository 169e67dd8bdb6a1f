// SPDX-License-Identifier: Apache-2.0
#include "server/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <thread>

namespace attend {
namespace {

using testing::HasSubstr;

// A page, parsed line by line as the text format prescribes.
struct Page {
  std::map<std::string, std::string> types;                  // by family
  std::map<std::string, std::string> helps;                  // by family
  std::map<std::string, double> samples;                     // by name{labels} as written
  std::map<std::string, std::set<std::string>> label_names;  // by family, without `le`

  double operator[](const std::string& sample) const {
    const auto found = samples.find(sample);
    EXPECT_NE(found, samples.end()) << sample;
    return found == samples.end() ? -1 : found->second;
  }
};

// The family of a sample: histograms add a suffix to the name.
std::string FamilyOf(const std::string& name, const std::map<std::string, std::string>& types) {
  for (const std::string suffix : {"_bucket", "_sum", "_count"}) {
    if (!name.ends_with(suffix)) continue;
    const std::string stem = name.substr(0, name.size() - suffix.size());
    if (const auto found = types.find(stem); found != types.end() && found->second == "histogram") {
      return stem;
    }
  }
  return name;
}

Page Parse(const std::string& text) {
  static const std::regex kSample(R"(([a-zA-Z_][a-zA-Z0-9_]*)(\{(.*)\})? (\S+))");
  static const std::regex kLabel(R"re(([a-zA-Z_][a-zA-Z0-9_]*)="([^"]*)",?)re");
  Page page;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string hash, what, name, rest;
    if (line.starts_with("# ")) {
      words >> hash >> what >> name >> std::ws;
      std::getline(words, rest);
      auto& target = what == "TYPE" ? page.types : page.helps;
      EXPECT_TRUE(target.emplace(name, rest).second) << "twice: " << line;
      continue;
    }
    std::smatch match;
    EXPECT_TRUE(std::regex_match(line, match, kSample)) << line;
    if (match.empty()) continue;
    const std::string family = FamilyOf(match[1], page.types);
    EXPECT_TRUE(page.types.contains(family)) << line;
    const std::string labels = match[3];
    std::set<std::string>& names = page.label_names[family];
    for (auto it = std::sregex_iterator(labels.begin(), labels.end(), kLabel);
         it != std::sregex_iterator(); ++it) {
      if ((*it)[1] != "le") names.insert((*it)[1]);
    }
    const std::string key = line.substr(0, line.rfind(' '));
    EXPECT_TRUE(page.samples.emplace(key, std::strtod(match[4].str().c_str(), nullptr)).second)
        << "twice: " << line;
  }
  return page;
}

class MetricsTest : public testing::Test {
 protected:
  MetricsTest()
      : metrics_({.models = {"bert", "llama"},
                  .version = "0.1.0",
                  .engine = "cpu",
                  .isa = "avx512",
                  .numerics = "cpu-avx512-1"},
                 [this] { return snapshot_; }) {}
  Page Read() const { return Parse(metrics_.PageText()); }

  GaugeSnapshot snapshot_;
  Metrics metrics_;
};

// Sum of all samples of a family that have `label` in their label set.
double Sum(const Page& page, const std::string& family, const std::string& label = "") {
  double sum = 0;
  for (const auto& [key, value] : page.samples) {
    if (key.substr(0, key.find('{')) == family && key.find(label) != std::string::npos)
      sum += value;
  }
  return sum;
}

TEST_F(MetricsTest, ThePageHasEverySeriesOfTheTableWithTypeHelpAndLabelsAndNoOther) {
  const Page page = Read();
  std::set<std::string> names;
  for (const SeriesRow& row : SeriesTable()) {
    const std::string name(row.name);
    EXPECT_TRUE(names.insert(name).second) << name;
    ASSERT_TRUE(page.types.contains(name)) << name;
    EXPECT_EQ(page.types.at(name), row.type) << name;
    EXPECT_EQ(page.helps.at(name), row.help) << name;
    std::set<std::string> labels;
    std::istringstream list{std::string(row.labels)};
    for (std::string label; std::getline(list, label, ',');) labels.insert(label);
    ASSERT_TRUE(page.label_names.contains(name)) << name << " has no sample";
    EXPECT_EQ(page.label_names.at(name), labels) << name;
  }
  for (const auto& [name, type] : page.types) EXPECT_TRUE(names.contains(name)) << name;
}

// What `promtool check metrics` asks for.
TEST_F(MetricsTest, NamesFollowPrometheussRules) {
  for (const SeriesRow& row : SeriesTable()) {
    const std::string name(row.name);
    EXPECT_TRUE(std::regex_match(name, std::regex("(attend|process)_[a-z][a-z0-9_]*"))) << name;
    EXPECT_EQ(name.ends_with("_total"), row.type == "counter") << name;
    EXPECT_FALSE(row.help.empty()) << name;
    for (const char* reserved : {"_count", "_sum", "_bucket"}) {
      EXPECT_FALSE(name.ends_with(reserved)) << name;
    }
    for (const char* unit : {"_ms", "_us", "_milliseconds", "_microseconds", "_kib", "_mib"}) {
      EXPECT_EQ(name.find(unit), std::string::npos) << name;
    }
    EXPECT_EQ(std::string(row.labels).find("le,"), std::string::npos) << name;
  }
}

TEST_F(MetricsTest, EveryCounterStartsAtZeroForEveryMethodAndCode) {
  const Page page = Read();
  int combinations = 0;
  for (const auto& [key, value] : page.samples) {
    if (key.starts_with("attend_requests_total{")) ++combinations;
    if (key.starts_with("attend_") && page.types.contains(key.substr(0, key.find('{'))) &&
        page.types.at(key.substr(0, key.find('{'))) == "counter") {
      EXPECT_EQ(value, 0) << key;
    }
  }
  EXPECT_EQ(combinations, 10 * 17);
  EXPECT_EQ(page["attend_requests_total{code=\"INVALID_ARGUMENT\",method=\"AttendStream\"}"], 0);
  EXPECT_EQ(page["attend_rejected_total{reason=\"QUEUE_FULL\"}"], 0);
  EXPECT_EQ(page["attend_tokens_total{kind=\"decode\",model=\"raw\"}"], 0);
}

TEST_F(MetricsTest, TheSumOverCodesIsWhatStartedMinusWhatIsInFlight) {
  using absl::StatusCode;
  const std::pair<StatusCode, int> ends[] = {{StatusCode::kOk, 0},
                                             {StatusCode::kInvalidArgument, kModelNone},
                                             {StatusCode::kCancelled, 1},
                                             {StatusCode::kDeadlineExceeded, 1},
                                             {StatusCode::kResourceExhausted, kModelRaw},
                                             {static_cast<StatusCode>(99), 77}};
  for (const RpcMethod method : {RpcMethod::kAttend, RpcMethod::kAttendStream, RpcMethod::kOther}) {
    for (const auto& [code, model] : ends) {
      metrics_.RequestStarted(method);
      metrics_.RequestFinished(method, code, model, 0.001);
    }
  }
  metrics_.RequestStarted(RpcMethod::kAttend);  // in flight
  const Page page = Read();
  for (const auto& [method, in_flight] :
       std::map<std::string, int>{{"Attend", 1}, {"AttendStream", 0}, {"other", 0}}) {
    const std::string label = "method=\"" + method + "\"";
    const double started = page["attend_requests_started_total{" + label + "}"];
    EXPECT_EQ(started, 6 + in_flight);
    EXPECT_EQ(Sum(page, "attend_requests_total", label), started - in_flight);
    EXPECT_EQ(Sum(page, "attend_request_seconds_count", label), started - in_flight);
    for (const char* code : {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED",
                             "INVALID_ARGUMENT", "UNKNOWN"}) {
      EXPECT_EQ(page[std::string("attend_requests_total{code=\"") + code + "\"," + label + "}"], 1);
    }
  }
  EXPECT_EQ(page["attend_request_seconds_count{method=\"Attend\",model=\"llama\"}"], 2);
  EXPECT_EQ(page["attend_request_seconds_count{method=\"Attend\",model=\"none\"}"], 2);
  EXPECT_EQ(page["attend_request_seconds_count{method=\"other\",model=\"none\"}"], 6);
}

TEST_F(MetricsTest, NoPageOfABusyServerShowsMoreAnswersThanRequests) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> callers;
  for (int i = 0; i < 2; ++i) {
    callers.emplace_back([&] {
      while (!stop) {
        metrics_.RequestStarted(RpcMethod::kAttend);
        metrics_.RequestFinished(RpcMethod::kAttend, absl::StatusCode::kOk, 0, 0.001);
      }
    });
  }
  for (int i = 0; i < 10; ++i) {
    const Page page = Read();
    EXPECT_LE(Sum(page, "attend_requests_total"), Sum(page, "attend_requests_started_total"));
  }
  // The moment in between is short; families stand in the order they were read.
  const std::string text = metrics_.PageText();
  EXPECT_LT(text.find("\nattend_requests_total{"), text.find("\nattend_requests_started_total{"));
  stop = true;
  for (std::thread& caller : callers) caller.join();
  const Page page = Read();
  EXPECT_EQ(Sum(page, "attend_requests_total"), Sum(page, "attend_requests_started_total"));
}

TEST_F(MetricsTest, NoCallAddsASeries) {
  const size_t before = Read().samples.size();
  for (int model = -5; model < 50; ++model) {
    metrics_.RequestStarted(RpcMethod::kAttend);
    metrics_.RequestFinished(RpcMethod::kAttend, absl::StatusCode::kNotFound, model, 1);
    metrics_.TokensAnswered(model, TokenKind::kPrefill, 3);
  }
  for (int reason = -1; reason < 40; ++reason) metrics_.Rejected(static_cast<Reason>(reason));
  EXPECT_EQ(Read().samples.size(), before);
}

TEST_F(MetricsTest, HistogramsOfTimeDoubleFromTenMicrosecondsToAboveTheDeadline) {
  std::vector<double> bounds;
  const std::regex bucket("attend_phase_seconds_bucket\\{phase=\"queue\",le=\"([^\"]+)\"\\}");
  for (const auto& [key, value] : Read().samples) {
    std::smatch match;
    if (std::regex_match(key, match, bucket) && match[1] != "+Inf") {
      bounds.push_back(std::strtod(match[1].str().c_str(), nullptr));
    }
  }
  std::sort(bounds.begin(), bounds.end());
  ASSERT_EQ(bounds.size(), 24u);
  EXPECT_DOUBLE_EQ(bounds.front(), 10e-6);
  EXPECT_GT(bounds.back(), 60);
  for (size_t i = 1; i < bounds.size(); ++i) EXPECT_DOUBLE_EQ(bounds[i], 2 * bounds[i - 1]);
}

TEST_F(MetricsTest, BatchesAndTokensAreCounted) {
  metrics_.BatchRan(48, 48, 16);
  metrics_.BatchRan(3, 5, 2);
  metrics_.TokensAnswered(0, TokenKind::kPrefill, 48);
  metrics_.TokensAnswered(kModelRaw, TokenKind::kDecode, 4);
  metrics_.TokensAnswered(kModelNone, TokenKind::kDecode, 4);  // has no series
  const Page page = Read();
  EXPECT_EQ(page["attend_batches_total"], 2);
  EXPECT_EQ(page["attend_batch_tokens_count"], 2);
  EXPECT_EQ(page["attend_batch_tokens_sum"], 51);
  EXPECT_EQ(page["attend_batch_tokens_bucket{le=\"4\"}"], 1);
  EXPECT_EQ(page["attend_batch_tokens_bucket{le=\"2048\"}"], 2);
  EXPECT_EQ(page["attend_batch_sequences_sum"], 18);
  EXPECT_EQ(page["attend_padding_tokens_total"], 2);
  EXPECT_EQ(page["attend_tokens_total{kind=\"prefill\",model=\"bert\"}"], 48);
  EXPECT_EQ(page["attend_tokens_total{kind=\"decode\",model=\"raw\"}"], 4);
  EXPECT_EQ(Sum(page, "attend_tokens_total"), 52);
}

TEST_F(MetricsTest, PhasesRefusalsCancelsAndSessionEndsAreCounted) {
  metrics_.PhaseTook(Phase::kAttend, 0.25);
  metrics_.Rejected(Reason::kQueueFull);
  metrics_.Rejected(Reason::kContextConflict);
  metrics_.Rejected(Reason::kCancelled);    // the client's own doing
  metrics_.Rejected(Reason::kEngineFault);  // a failure, no refusal
  metrics_.Cancelled(CancelStage::kQueue);
  metrics_.LaunchedAfterDeadline();
  metrics_.SessionEnded(SessionEnd::kClosed);
  metrics_.SessionEnded(SessionEnd::kExpired, 3);
  const Page page = Read();
  EXPECT_EQ(page["attend_phase_seconds_sum{phase=\"attend\"}"], 0.25);
  EXPECT_EQ(page["attend_rejected_total{reason=\"QUEUE_FULL\"}"], 1);
  EXPECT_EQ(page["attend_rejected_total{reason=\"CONTEXT_CONFLICT\"}"], 1);
  EXPECT_EQ(Sum(page, "attend_rejected_total"), 2);
  EXPECT_EQ(page["attend_cancelled_total{stage=\"queue\"}"], 1);
  EXPECT_EQ(page["attend_launched_after_deadline_total"], 1);
  EXPECT_EQ(page["attend_sessions_ended_total{reason=\"closed\"}"], 1);
  EXPECT_EQ(page["attend_sessions_ended_total{reason=\"expired\"}"], 3);
}

TEST_F(MetricsTest, StatesAreThoseOfTheMomentOfThePage) {
  snapshot_ = {.queue_requests = 3,
               .queue_tokens = 300,
               .running_requests = 2,
               .streams = 4,
               .kv_free_bytes = 600,
               .kv_active_bytes = 100,
               .kv_idle_bytes = 300,
               .kv_capacity_tokens = {10, 20},
               .sessions_active = 1,
               .sessions_idle = 5,
               .engine_progress_seconds = 1.7e9,
               .listen_ports = {}};
  Page page = Read();
  EXPECT_EQ(page["attend_queue_requests"], 3);
  EXPECT_EQ(page["attend_queue_tokens"], 300);
  EXPECT_EQ(page["attend_running_requests"], 2);
  EXPECT_EQ(page["attend_streams"], 4);
  EXPECT_EQ(page["attend_kv_utilization_ratio"], 0.4);
  EXPECT_EQ(page["attend_kv_bytes{state=\"free\"}"], 600);
  EXPECT_EQ(page["attend_kv_bytes{state=\"active\"}"], 100);
  EXPECT_EQ(page["attend_kv_bytes{state=\"idle\"}"], 300);
  EXPECT_EQ(page["attend_kv_capacity_tokens{model=\"llama\"}"], 20);
  EXPECT_EQ(page["attend_sessions{state=\"active\"}"], 1);
  EXPECT_EQ(page["attend_sessions{state=\"idle\"}"], 5);
  EXPECT_EQ(page["attend_engine_progress_timestamp_seconds"], 1.7e9);
  EXPECT_EQ(page["attend_connections"], 0);
  snapshot_.queue_requests = 0;
  page = Read();
  EXPECT_EQ(page["attend_queue_requests"], 0);
  EXPECT_GT(page["process_resident_memory_bytes"], 0);
}

TEST_F(MetricsTest, BuildInfoNamesTheBuild) {
  EXPECT_THAT(metrics_.PageText(),
              HasSubstr("attend_build_info{version=\"0.1.0\",engine=\"cpu\",isa=\"avx512\","
                        "numerics=\"cpu-avx512-1\"} 1"));
}

TEST(MethodTest, NamesAndMethodsMatchBothWays) {
  for (int i = 0; i < static_cast<int>(RpcMethod::kOther); ++i) {
    const auto method = static_cast<RpcMethod>(i);
    EXPECT_EQ(MethodFromName(MethodName(method)), method);
  }
  EXPECT_EQ(MethodFromName("Detach"), RpcMethod::kOther);
  EXPECT_EQ(MethodFromName("other"), RpcMethod::kOther);
}

}  // namespace
}  // namespace attend
