// SPDX-License-Identifier: Apache-2.0
//
// /metrics of a running server: every series, and the sums after all kinds of endings.
#include "server/metrics.h"

#include <gtest/gtest.h>
#include <signal.h>

#include "tests/integration/server_process.h"
#include "tests/integration/wire_calls.h"

namespace attend {
namespace {

constexpr int64_t kWidth = 64;  // llama_gqa4

v1::AttendRequest Rows(int64_t rows) {
  std::mt19937_64 random(1);
  return RowsRequest("", "0", kWidth, RandomValues(random, rows * kWidth));
}

// Grows of a series between two pages.
class Growth {
 public:
  explicit Growth(const ServerProcess& server) : server_(server), before_(server.Metrics()) {}
  void Look() { now_ = server_.Metrics(); }
  double operator[](const std::string& series) const {
    const auto was = before_.find(series), is = now_.find(series);
    EXPECT_NE(is, now_.end()) << series;
    return (is == now_.end() ? 0 : is->second) - (was == before_.end() ? 0 : was->second);
  }

 private:
  const ServerProcess& server_;
  const MetricValues before_;
  MetricValues now_;
};

class MetricsPageTest : public testing::Test {
 protected:
  explicit MetricsPageTest(std::vector<std::string> flags = {})
      : server_([&] {
          flags.push_back(GoldenModelFlag("llama_gqa4"));
          return flags;
        }()) {
    EXPECT_TRUE(server_.WaitForServing()) << server_.log();
    wire_ = std::make_unique<WireClient>(server_.address());
  }
  ServerProcess server_;
  std::unique_ptr<WireClient> wire_;
};

TEST_F(MetricsPageTest, HasEverySeriesOfTheTable) {
  const std::string page = server_.Get("/metrics");
  for (const SeriesRow& row : SeriesTable()) {
    EXPECT_NE(page.find("# TYPE " + std::string(row.name) + " " + std::string(row.type) + "\n"),
              std::string::npos)
        << row.name;
  }
  EXPECT_EQ(server_.Get("/healthz").substr(0, 4).find("HTTP"), std::string::npos);
  EXPECT_NE(server_.Get("/readyz").substr(0, 4), "HTTP");
  EXPECT_EQ(server_.Get("/nothing"), "HTTP 404");
}

TEST_F(MetricsPageTest, CountsRequestsSequencesTokensAndBatchesApart) {
  Growth growth(server_);
  for (int i = 0; i < 8; ++i) {
    v1::AttendRequest request = Rows(6);
    request.add_sequences()->set_length(3);
    request.add_sequences()->set_length(3);
    ASSERT_TRUE(wire_->Attend(request).ok());
  }
  const std::string id = wire_->Open().value.id();
  std::mt19937_64 random(1);
  int64_t cached = 0;
  for (int64_t rows : {5, 1, 1, 1, 1}) {
    const auto reply = wire_->Attend(
        SessionRequest("", "0", kWidth, RandomValues(random, rows * kWidth), id, cached));
    ASSERT_TRUE(reply.ok()) << reply.error.ToString();
    cached += rows;
  }
  ASSERT_TRUE(Eventually([&] {
    growth.Look();
    return growth["attend_sessions{state=\"idle\"}"] == 1;
  }));
  EXPECT_EQ(growth["attend_requests_started_total{method=\"Attend\"}"], 13);
  EXPECT_EQ(growth["attend_requests_total{code=\"OK\",method=\"Attend\"}"], 13);
  EXPECT_EQ(growth["attend_tokens_total{kind=\"prefill\",model=\"llama_gqa4\"}"], 48 + 5);
  EXPECT_EQ(growth["attend_tokens_total{kind=\"decode\",model=\"llama_gqa4\"}"], 4);
  EXPECT_EQ(growth["attend_batches_total"], 13);  // one client: nothing to gather
  EXPECT_EQ(growth["attend_batch_sequences_sum"], 16 + 5);
  EXPECT_EQ(growth["attend_batch_tokens_sum"], 48 + 9);
  EXPECT_EQ(growth["attend_request_seconds_count{method=\"Attend\",model=\"llama_gqa4\"}"], 13);
  // 9 tokens hold one block of 64 of both layers: K and V, 2 heads of 8, F32.
  const double block_bytes = 2.0 * 64 * 2 * (8 + 8) * 4;
  EXPECT_EQ(growth["attend_kv_bytes{state=\"idle\"}"], block_bytes);
  EXPECT_EQ(growth["attend_kv_bytes{state=\"free\"}"], -block_bytes);
  ASSERT_TRUE(wire_->Close(id).ok());
  EXPECT_EQ(WhatIsLeft(server_), "");
  growth.Look();
  EXPECT_EQ(growth["attend_kv_bytes{state=\"free\"}"], 0);
  EXPECT_EQ(growth["attend_sessions_ended_total{reason=\"closed\"}"], 1);
}

class SmallQueueMetricsTest : public MetricsPageTest {
 protected:
  SmallQueueMetricsTest() : MetricsPageTest({"--queue_requests=1", "--kv_bytes=256KiB"}) {}
};

TEST_F(SmallQueueMetricsTest, CountsEveryEndingUnderItsOwnCodeOnce) {
  Growth growth(server_);
  const auto count = [&](const std::string& code) {
    return growth["attend_requests_total{code=\"" + code + "\",method=\"Attend\"}"];
  };
  EXPECT_TRUE(wire_->Attend(Rows(3)).ok());

  v1::AttendRequest wrong = Rows(3);
  wrong.mutable_hidden_states()->set_dtype(v1::DTYPE_UNSPECIFIED);
  EXPECT_EQ(wire_->Attend(wrong).error.code, grpc::INVALID_ARGUMENT);

  v1::AttendRequest unknown = Rows(3);
  for (int i = 0; i < 20; ++i) {  // names that were never loaded make no series
    unknown.set_model("nope" + std::to_string(i));
    EXPECT_EQ(wire_->Attend(unknown).error.code, grpc::NOT_FOUND);
  }
  {
    HeldCall held(*wire_, 100);
    // The held call's headers are on another stream of the connection: wait until they are
    // admitted.
    ASSERT_TRUE(Eventually([&] {
      growth.Look();
      return growth["attend_requests_started_total{method=\"Attend\"}"] == 23;
    }));
    EXPECT_EQ(wire_->Attend(Rows(3)).error.reason, v1::QUEUE_FULL);
  }  // gives the held call up: CANCELLED
  ASSERT_TRUE(Eventually([&] {
    growth.Look();
    return count("CANCELLED") == 1;
  }));
  const std::string id = wire_->Open().value.id();
  const auto exhausted = wire_->Attend(
      SessionRequest("", "0", kWidth, std::vector<float>(2048 * kWidth, 0.5f), id, 0));
  EXPECT_EQ(exhausted.error.reason, v1::KV_EXHAUSTED) << exhausted.error.ToString();
  EXPECT_TRUE(wire_->Close(id).ok());
  EXPECT_EQ(
      wire_->SendBytes("/attend.v1.Attention/Attend", {std::string(4200000, 'x')}).error.reason,
      v1::TOO_LARGE);
  EXPECT_EQ(wire_->SendBytes("/attend.v1.Attention/Nope", {""}).error.code, grpc::UNIMPLEMENTED);
  // Refused on its headers, before a message was read.
  EXPECT_EQ(wire_->Attend(Rows(3), {.metadata = {{"attend-bytes", "90000000"}}}).error.reason,
            v1::TOO_LARGE);

  EXPECT_EQ(WhatIsLeft(server_), "");
  growth.Look();
  EXPECT_EQ(count("OK"), 1);
  EXPECT_EQ(count("INVALID_ARGUMENT"), 3);  // both above message_bytes, too
  EXPECT_EQ(count("NOT_FOUND"), 20);
  EXPECT_EQ(count("RESOURCE_EXHAUSTED"), 2);
  EXPECT_EQ(growth["attend_requests_total{code=\"UNIMPLEMENTED\",method=\"other\"}"], 1);
  EXPECT_EQ(growth["attend_rejected_total{reason=\"QUEUE_FULL\"}"], 1);
  EXPECT_EQ(growth["attend_rejected_total{reason=\"KV_EXHAUSTED\"}"], 1);
  EXPECT_EQ(growth["attend_rejected_total{reason=\"UNKNOWN_MODEL\"}"], 20);
  EXPECT_EQ(growth["attend_rejected_total{reason=\"TOO_LARGE\"}"], 2);
  EXPECT_EQ(growth["attend_rejected_total{reason=\"UNSUPPORTED\"}"], 1);
  // The 20 unknown names, and the calls that ended before a message told a model.
  EXPECT_EQ(growth["attend_request_seconds_count{method=\"Attend\",model=\"none\"}"], 22);
  EXPECT_EQ(growth["attend_cancelled_total{stage=\"receive\"}"], 1);
  EXPECT_EQ(server_.Get("/metrics").find("nope"), std::string::npos);
}

TEST_F(MetricsPageTest, NothingIsInFlightAfterCancelsDeadlinesErrorsAndDroppedStreams) {
  const int rounds = kSanitizer ? 5 : 25;
  v1::AttendRequest wrong = Rows(3);
  wrong.mutable_hidden_states()->add_shape(7);
  for (int i = 0; i < rounds; ++i) {
    (void)wire_->Attend(wrong);
    (void)wire_->Attend(Rows(400), {.deadline = std::chrono::milliseconds(1 + i % 3)});
    grpc::ClientContext context;
    WireClient::Prepare({}, context);
    const auto stream = wire_->stub().AttendStream(&context);
    for (int item = 0; item < i % 5; ++item) stream->Write(item % 2 == 0 ? Rows(200) : wrong);
    if (i % 2 == 0) {
      context.TryCancel();
    } else {
      stream->WritesDone();
    }
    for (v1::AttendResponse response; stream->Read(&response);) {
    }
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.ok(), i % 2 == 1);
  }
  EXPECT_EQ(WhatIsLeft(server_), "");
  for (const auto& [series, value] : server_.Metrics()) EXPECT_GE(value, 0) << series;
}

}  // namespace
}  // namespace attend
