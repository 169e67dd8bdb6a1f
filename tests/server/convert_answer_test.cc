// SPDX-License-Identifier: Apache-2.0
//
// Sessions to open, and what answers say.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "server/convert.h"
#include "tests/server/convert_fixture.h"

namespace attend {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(ConvertTest, OpensSessionsOfModelsAndLayouts) {
  v1::OpenSessionRequest request;
  request.add_layers("causal");
  request.set_ttl_seconds(5);
  request.set_max_tokens(9);
  absl::StatusOr<OpenSessionArguments> model = ConvertOpenSession(context_, request);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->model, 0);
  EXPECT_THAT(model->layers, ElementsAre("causal"));
  EXPECT_EQ(model->ttl_seconds, 5);
  EXPECT_EQ(model->max_tokens, 9);

  v1::RawLayout& layout = *request.mutable_raw();
  layout.set_layers(3);
  layout.set_q_heads(8);
  layout.set_kv_heads(2);
  layout.set_head_dim(64);
  layout.mutable_options()->set_causal(true);
  absl::StatusOr<OpenSessionArguments> raw = ConvertOpenSession(context_, request);
  ASSERT_TRUE(raw.ok()) << raw.status();
  EXPECT_EQ(raw->model, -1);
  EXPECT_EQ(raw->raw_layers, 3);
  EXPECT_EQ(raw->raw_kv_dtype, DType::kF32);
  EXPECT_EQ(raw->raw_spec.v_head_dim, 64);
  EXPECT_EQ(raw->raw_spec.output_width, 512);
  EXPECT_EQ(raw->raw_spec.scale, 0.125);
  EXPECT_TRUE(raw->raw_spec.causal);
  layout.set_v_head_dim(16);
  layout.set_kv_dtype(v1::DTYPE_BF16);
  raw = ConvertOpenSession(context_, request);
  ASSERT_TRUE(raw.ok()) << raw.status();
  EXPECT_EQ(raw->raw_spec.v_head_dim, 16);
  EXPECT_EQ(raw->raw_kv_dtype, DType::kBF16);
}

TEST_F(ConvertTest, RefusesLayoutsOutOfRange) {
  v1::OpenSessionRequest good;
  v1::RawLayout& layout = *good.mutable_raw();
  layout.set_layers(3);
  layout.set_q_heads(8);
  layout.set_kv_heads(2);
  layout.set_head_dim(64);
  ASSERT_TRUE(ConvertOpenSession(context_, good).ok());
  struct Case {
    std::function<void(v1::OpenSessionRequest&)> edit;
    Code code;
    std::string field, got, wanted;
  };
  const Code invalid = Code::kInvalidArgument;
  const std::vector<Case> table = {
      {[](auto& r) { r.set_model("m"); }, invalid, "model", "\"m\"", "raw is set"},
      {[](auto& r) { r.mutable_raw()->set_layers(0); }, invalid, "raw.layers", "0", "1 .. 4096"},
      {[](auto& r) { r.mutable_raw()->set_layers(INT32_MAX); }, invalid, "raw.layers", "2147483647",
       "1 .. 4096"},
      {[](auto& r) { r.mutable_raw()->set_q_heads(0); }, invalid, "raw.q_heads", "0", "1 .. 65536"},
      {[](auto& r) { r.mutable_raw()->set_kv_heads(-1); }, invalid, "raw.kv_heads", "-1",
       "1 .. 65536"},
      {[](auto& r) { r.mutable_raw()->set_kv_heads(3); }, invalid, "raw.kv_heads", "3 kv_heads",
       "a divisor of 8 q_heads"},
      {[](auto& r) { r.mutable_raw()->set_head_dim(1025); }, invalid, "raw.head_dim", "1025",
       "1 .. 1024"},
      {[](auto& r) { r.mutable_raw()->set_v_head_dim(-1); }, invalid, "raw.v_head_dim", "-1",
       "0 .. 1024"},
      {[](auto& r) { r.mutable_raw()->set_kv_dtype(v1::DTYPE_I32); }, invalid, "raw.kv_dtype",
       "I32", "F32, BF16, F16"},
      {[](auto& r) { r.mutable_raw()->set_kv_dtype(static_cast<v1::DType>(40)); }, invalid,
       "raw.kv_dtype", "40", "F32, BF16, F16, I8"},
      {[](auto& r) { r.mutable_raw()->mutable_options()->set_window(-3); }, invalid,
       "raw.options.window", "-3", "0 (no window)"},
      {[](auto& r) {
         r.clear_raw();
         r.set_model("nope");
       },
       Code::kNotFound, "model", "\"nope\"", "one of m"}};
  for (const Case& bad : table) {
    SCOPED_TRACE(bad.field + " " + bad.got);
    v1::OpenSessionRequest request = good;
    bad.edit(request);
    const absl::Status status = ConvertOpenSession(context_, request).status();
    EXPECT_EQ(status.code(), bad.code) << status;
    EXPECT_EQ(Detail(status).field(), bad.field);
    EXPECT_THAT(Detail(status).got(), HasSubstr(bad.got));
    EXPECT_THAT(Detail(status).wanted(), HasSubstr(bad.wanted));
  }
}

TEST_F(ConvertTest, FillsTheAnswer) {
  v1::AttendRequest request = Request("causal", F32({2, 3, kWidth}));
  request.set_request_id("id");
  request.mutable_weights()->set_mode(v1::WeightsRequest::FULL);
  AttendJob& job = Accept(request);
  job.arrival_us = 100;
  job.first_batch_us = 130;
  job.compute_us = 40;
  job.batch_tokens = 6;
  job.batch_sequences = 2;
  job.output_width = 10;
  for (SequenceJob& sequence : job.sequences) {
    sequence.weight_heads = 1;
    sequence.weight_rows = 1;
    sequence.weight_keys = 2;
    sequence.weights = context_.buffers->Get(8);
    std::memcpy(sequence.weights.data.get(), "12345678", 8);
  }
  job.sequences[1].position_after = 77;
  const v1::AttendResponse response = Answer(200);
  EXPECT_EQ(response.request_id(), "id");
  EXPECT_THAT(response.positions(), ElementsAre(0, 77));
  EXPECT_EQ(response.timing().queue_us(), 30);
  EXPECT_EQ(response.timing().compute_us(), 40);
  EXPECT_EQ(response.timing().total_us(), 100);
  EXPECT_EQ(response.timing().batch_tokens(), 6);
  EXPECT_EQ(response.timing().batch_sequences(), 2);
  EXPECT_EQ(response.timing().replica(), "r1");
  ASSERT_EQ(response.weights_size(), 2);
  EXPECT_THAT(response.weights(1).weights().shape(), ElementsAre(1, 1, 2));
  EXPECT_EQ(response.weights(1).weights().dtype(), v1::DTYPE_F32);
  EXPECT_EQ(response.weights(1).weights().data(), "12345678");
  EXPECT_EQ(response.output().dtype(), v1::DTYPE_F32);
  EXPECT_THAT(response.output().shape(), ElementsAre(2, 3, 10));
  EXPECT_EQ(response.output().data(), std::string(6 * 10 * 4, 'o'));
  EXPECT_FALSE(response.has_error());
}

TEST_F(ConvertTest, DescribesSessions) {
  SessionState state{"id", "m", "r1", 5, {{"causal", 5, 0}, {"cross", 0, 7}}, 640, 90, 3};
  const v1::Session session = ToProto(state);
  EXPECT_EQ(session.id(), "id");
  EXPECT_EQ(session.model(), "m");
  EXPECT_EQ(session.replica(), "r1");
  EXPECT_EQ(session.length(), 5);
  ASSERT_EQ(session.layers_size(), 2);
  EXPECT_EQ(session.layers(0).length(), 5);
  EXPECT_EQ(session.layers(1).layer(), "cross");
  EXPECT_EQ(session.layers(1).context_length(), 7);
  EXPECT_EQ(session.kv_bytes(), 640);
  EXPECT_EQ(session.ttl_seconds(), 90);
  EXPECT_EQ(session.idle_seconds(), 3);
  EXPECT_EQ(session.durable_length(), 0);
  EXPECT_TRUE(session.bit_exact());
}

TEST_F(ConvertTest, DescribesModels) {
  LoadedModel& loaded = models_[0];
  loaded.family = "bert";
  loaded.weight_dtype = loaded.compute_dtype = DType::kBF16;
  loaded.max_positions = 512;
  loaded.layers[0].spec.window = 40;
  loaded.layers[0].weight_bytes = 99;
  const v1::Model model = ToProto(loaded);
  EXPECT_EQ(model.name(), "m");
  EXPECT_EQ(model.family(), "bert");
  EXPECT_EQ(model.weight_dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(model.kv_dtype(), v1::DTYPE_F32);
  EXPECT_EQ(model.max_positions(), 512);
  ASSERT_EQ(model.layers_size(), 4);
  const v1::Layer& causal = model.layers(0);
  EXPECT_TRUE(causal.causal());
  EXPECT_TRUE(causal.sessions());
  EXPECT_FALSE(causal.cross_attention());
  EXPECT_EQ(causal.context_width(), 0);
  EXPECT_EQ(causal.output_width(), 10);
  EXPECT_EQ(causal.window(), 40);
  EXPECT_EQ(causal.positions(), "none");
  EXPECT_EQ(causal.weight_bytes(), 99);
  EXPECT_EQ(causal.kv_bytes_per_token(), 2 * (3 + 3) * 2);
  EXPECT_FALSE(model.layers(1).sessions());
  EXPECT_EQ(model.layers(1).kv_bytes_per_token(), 0);
  EXPECT_TRUE(model.layers(2).mask_selectable());
  EXPECT_TRUE(model.layers(2).cross_attention());
  EXPECT_TRUE(model.layers(3).cross_attention());
  EXPECT_EQ(model.layers(3).context_width(), kContextWidth);
}

}  // namespace
}  // namespace attend
