// SPDX-License-Identifier: Apache-2.0
//
// Raw requests to jobs: stateless ones and those of sessions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "absl/strings/str_cat.h"
#include "server/convert.h"
#include "tests/server/convert_fixture.h"

namespace attend {
namespace {

using ::testing::ElementsAre;

TEST_F(ConvertTest, RefusesRawTensorsThatDoNotFitEachOther) {
  const auto q = [](std::vector<int64_t> shape) {
    return [=](v1::AttendRequest& r) { *r.mutable_raw()->mutable_q() = F32(shape); };
  };
  const auto k = [](std::vector<int64_t> shape) {
    return [=](v1::AttendRequest& r) { *r.mutable_raw()->mutable_k() = F32(shape); };
  };
  const auto v = [](std::vector<int64_t> shape) {
    return [=](v1::AttendRequest& r) { *r.mutable_raw()->mutable_v() = F32(shape); };
  };
  const auto sequences = [](std::vector<v1::Sequence> list) {
    return [list](v1::AttendRequest& r) { SetSequences(r, list); };
  };
  ExpectRefused(
      Raw({5, 4, 8}, {3, 2, 8}, {3, 2, 6}),
      {Invalid(
           "model", [](auto& r) { r.set_model("m"); }, "model", "\"m\"", "raw is set"),
       Invalid(
           "hidden",
           [](auto& r) {
             *r.mutable_hidden_states() = F32({1, 8});
           },
           "hidden_states", "a tensor", "raw is set"),
       Invalid(
           "context",
           [](auto& r) {
             *r.mutable_context() = F32({1, 8});
           },
           "context", "a tensor", "raw is set"),
       Invalid(
           "mask", [](auto& r) { r.set_mask(v1::MASK_CAUSAL); }, "mask", "MASK_CAUSAL",
           "raw.options.causal"),
       Invalid(
           "q", [](auto& r) { r.mutable_raw()->clear_q(); }, "raw.q", "none", "a tensor"),
       Invalid(
           "k", [](auto& r) { r.mutable_raw()->clear_k(); }, "raw.k", "none", "a tensor"),
       Invalid(
           "v", [](auto& r) { r.mutable_raw()->clear_v(); }, "raw.v", "none", "a tensor"),
       Invalid("rank", q({5, 32}), "raw.q.shape", "[5, 32]", "[rows, q_heads, head_dim]"),
       Invalid("no heads", q({5, 0, 8}), "raw.q.shape", "[5, 0, 8]", "1 .. 65536 heads"),
       Invalid("heads", q({0, 65537, 8}), "raw.q.shape", "[0, 65537, 8]", "1 .. 65536 heads"),
       Invalid("width 0", k({3, 2, 0}), "raw.k.shape", "[3, 2, 0]", "1 .. 1024"),
       Invalid("width 1025", v({3, 2, 1025}), "raw.v.shape", "[3, 2, 1025]", "1 .. 1024"),
       Invalid("head_dim", k({3, 2, 7}), "raw.k.shape", "[3, 2, 7]", "heads of 8"),
       Invalid("groups", q({5, 3, 8}), "raw.k.shape", "2 kv_heads", "a divisor of 3 q_heads"),
       Invalid("key rows", v({4, 2, 6}), "raw.v.shape", "[4, 2, 6]", "[3, 2, v_head_dim]"),
       Invalid("kv heads", v({3, 1, 6}), "raw.v.shape", "[3, 1, 6]", "[3, 2, v_head_dim]"),
       Invalid(
           "bytes", [](auto& r) { r.mutable_raw()->mutable_v()->mutable_data()->pop_back(); },
           "raw.v", "71 bytes", "72 = [3, 2, 6] x 2 bytes (BF16)"),
       Invalid("rows", sequences({Stateless(4, 3)}), "sequences.length", "a sum of 4", "5"),
       Invalid("keys", sequences({Stateless(5, 2)}), "sequences.context_length", "a sum of 2", "3"),
       Invalid("default keys", sequences({Stateless(5)}), "sequences[0].context_length", "5",
               "0 .. 3"),
       Invalid("mixed", sequences({Stateless(3, 3), InSession(2, "s", 0)}),
               "sequences[1].session_id", "", "all in sessions, or all without")});
}

TEST_F(ConvertTest, RefusesRawOptionsOutOfRange) {
  const auto options = [](const std::function<void(v1::RawOptions&)>& edit) {
    return [edit](v1::AttendRequest& r) { edit(*r.mutable_raw()->mutable_options()); };
  };
  ExpectRefused(Raw({5, 4, 8}, {3, 2, 8}, {3, 2, 6}),
                {Invalid("scale", options([](auto& o) { o.set_scale(kNan); }), "raw.options.scale",
                         "nan", "finite"),
                 Invalid("scale", options([](auto& o) { o.set_scale(kInfinity); }),
                         "raw.options.scale", "inf", "finite"),
                 Invalid("window", options([](auto& o) { o.set_window(-1); }), "raw.options.window",
                         "-1", "0 (no window)"),
                 Invalid("softcap", options([](auto& o) { o.set_softcap(-2); }),
                         "raw.options.softcap", "-2", "0 (off)"),
                 Invalid("softcap", options([](auto& o) { o.set_softcap(1e-35f); }),
                         "raw.options.softcap", "1e-35", "at least 1e-30"),
                 Invalid("softcap", options([](auto& o) { o.set_softcap(kNan); }),
                         "raw.options.softcap", "nan", "0 (off)"),
                 Invalid("softcap", options([](auto& o) { o.set_softcap(kInfinity); }),
                         "raw.options.softcap", "inf", "0 (off)"),
                 Invalid("alibi", options([](auto& o) { o.add_alibi_slopes(1); }),
                         "raw.options.alibi_slopes", "1 values", "4: one per query head"),
                 Invalid("sinks", options([](auto& o) {
                           for (int i = 0; i < 5; ++i) o.add_sinks(1);
                         }),
                         "raw.options.sinks", "5 values", "4: one per query head"),
                 Invalid("sinks", options([](auto& o) {
                           for (int i = 0; i < 4; ++i) o.add_sinks(kNan);
                         }),
                         "raw.options.sinks", "nan", "finite")});
}

TEST_F(ConvertTest, TakesRawTensorsWithTheirOptions) {
  v1::AttendRequest request = Raw({5, 4, 8}, {6, 2, 8}, {6, 2, 6});
  SetSequences(request, {Stateless(3, 1), Stateless(0), Stateless(2, 5)});
  v1::RawOptions& options = *request.mutable_raw()->mutable_options();
  options.set_causal(true);
  options.set_window(INT64_MAX);
  options.set_softcap(30);
  for (int i = 0; i < 4; ++i) {
    options.add_alibi_slopes(static_cast<float>(i));
    options.add_sinks(-1);
  }
  const AttendJob& job = Accept(request);
  EXPECT_EQ(job.model, -1);
  EXPECT_FALSE(job.raw_session);
  EXPECT_TRUE(job.causal);
  EXPECT_EQ(job.output_dtype, DType::kF16);
  EXPECT_EQ(job.output_rows, 5);
  EXPECT_EQ(job.tokens(), 8);
  ASSERT_NE(job.raw_spec, nullptr);
  const AttentionSpec& spec = *job.raw_spec;
  EXPECT_TRUE(spec.raw());
  EXPECT_TRUE(spec.causal);
  EXPECT_EQ(spec.q_heads, 4);
  EXPECT_EQ(spec.kv_heads, 2);
  EXPECT_EQ(spec.head_dim, 8);
  EXPECT_EQ(spec.v_head_dim, 6);
  EXPECT_EQ(spec.output_width, 24);
  EXPECT_DOUBLE_EQ(spec.scale, 1 / std::sqrt(8.0));
  EXPECT_EQ(spec.window, INT64_MAX);
  EXPECT_EQ(spec.softcap, 30);
  EXPECT_THAT(spec.alibi_slopes, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(spec.sinks, ElementsAre(-1, -1, -1, -1));
  ASSERT_EQ(job.sequences.size(), 3u);
  const int64_t rows[] = {3, 0, 2};
  const int64_t row[] = {0, 3, 3};
  const int64_t keys[] = {1, 0, 5};
  const int64_t key[] = {0, 1, 1};
  for (size_t i = 0; i < 3; ++i) {
    const SequenceJob& sequence = job.sequences[i];
    EXPECT_TRUE(sequence.has_keys);
    EXPECT_EQ(sequence.rows, rows[i]);
    EXPECT_EQ(sequence.keys, keys[i]);
    EXPECT_EQ(sequence.output_row, row[i]);
    ExpectRows(sequence.query, request.raw().q(), 32, row[i], rows[i]);
    ExpectRows(sequence.key_source, request.raw().k(), 16, key[i], keys[i]);
    ExpectRows(sequence.value_source, request.raw().v(), 12, key[i], keys[i]);
  }
  EXPECT_THAT(accepted_.output_shape, ElementsAre(5, 4, 6));

  request.clear_sequences();
  options.Clear();
  options.set_scale(-0.5F);
  const AttendJob& whole = Accept(request);
  ASSERT_EQ(whole.sequences.size(), 1u);
  EXPECT_EQ(whole.sequences[0].rows, 5);
  EXPECT_EQ(whole.sequences[0].keys, 6);
  EXPECT_EQ(whole.raw_spec->scale, -0.5);
  EXPECT_FALSE(whole.causal);
}

TEST_F(ConvertTest, IgnoresTheLayerOfStatelessRawWork) {
  v1::AttendRequest request = Raw({2, 1, 4}, {2, 1, 4}, {2, 1, 4});
  request.set_layer("7");
  EXPECT_EQ(Accept(request).layer, 0);
  EXPECT_EQ(accepted_.job->layer_name, "raw");
}

TEST_F(ConvertTest, NeedsNoModelForRawWork) {
  models_.clear();
  EXPECT_EQ(Accept(Raw({2, 1, 4}, {2, 1, 4}, {2, 1, 4})).model, -1);
}

TEST_F(ConvertTest, TakesRawSessionsWithAnyOfTheTensorsTheyAllow) {
  // All three; keys default to the rows.
  v1::AttendRequest request = Raw({3, 4, 8}, {3, 2, 8}, {3, 2, 6});
  request.set_layer("12");
  SetSequences(request, {InSession(2, "a", 7), InSession(1, "b", 0)});
  const AttendJob& all = Accept(request);
  EXPECT_TRUE(all.raw_session);
  EXPECT_EQ(all.layer, 12);
  EXPECT_EQ(all.layer_name, "12");
  EXPECT_EQ(all.sequences[1].keys, 1);
  ExpectRows(all.sequences[1].key_source, request.raw().k(), 16, 2, 1);
  EXPECT_THAT(accepted_.output_shape, ElementsAre(3, 4, 6));

  // q only: nothing is appended, the position is optional.
  request = Raw({3, 4, 8}, {}, {});
  request.set_layer("0");
  SetSequences(request, {InSession(2, "a"), InSession(1, "b", 9)});
  const AttendJob& queries = Accept(request);
  EXPECT_FALSE(queries.sequences[0].has_keys);
  EXPECT_EQ(queries.sequences[0].keys, 0);
  EXPECT_EQ(queries.sequences[0].key_source.data, nullptr);
  EXPECT_EQ(queries.raw_spec->q_heads, 4);
  EXPECT_EQ(queries.raw_spec->head_dim, 8);
  EXPECT_EQ(queries.raw_spec->kv_heads, 0);
  EXPECT_EQ(queries.raw_spec->v_head_dim, 0);
  EXPECT_THAT(accepted_.output_shape, ElementsAre(3, 4, -1));
  accepted_.job->output_width = 24;
  EXPECT_THAT(Answer(0).output().shape(), ElementsAre(3, 4, 6));

  // k and v only: append, no output rows.
  request = Raw({}, {3, 2, 8}, {3, 2, 6});
  request.set_layer("0");
  v1::Sequence append = InSession(0, "a", 5);
  append.set_context_length(3);
  SetSequences(request, {append});
  const AttendJob& keys = Accept(request);
  EXPECT_EQ(keys.sequences[0].rows, 0);
  EXPECT_EQ(keys.sequences[0].keys, 3);
  EXPECT_EQ(keys.sequences[0].query.data, nullptr);
  EXPECT_EQ(keys.output_dtype, DType::kF32);
  EXPECT_EQ(keys.raw_spec->q_heads, 0);
  EXPECT_EQ(keys.raw_spec->head_dim, 8);
  EXPECT_THAT(accepted_.output_shape, ElementsAre(0, -1, 6));
  accepted_.job->output_width = 24;
  EXPECT_THAT(Answer(0).output().shape(), ElementsAre(0, 4, 6));
}

TEST_F(ConvertTest, RefusesRawSessionRequestsThatContradictTheirTensors) {
  v1::AttendRequest good = Raw({3, 4, 8}, {3, 2, 8}, {3, 2, 6});
  good.set_layer("0");
  SetSequences(good, {InSession(2, "a", 7), InSession(1, "b", 0)});
  const auto one = [](const std::function<void(v1::Sequence&)>& edit) {
    return [edit](v1::AttendRequest& r) { edit(*r.mutable_sequences(0)); };
  };
  const auto no_kv = [](v1::AttendRequest& r) {
    r.mutable_raw()->clear_k();
    r.mutable_raw()->clear_v();
  };
  std::vector<Bad> table = {
      Invalid(
          "options", [](auto& r) { r.mutable_raw()->mutable_options(); }, "raw.options", "set",
          "RawLayout"),
      Invalid("position", one([](auto& s) { s.clear_position(); }), "sequences[0].position", "none",
              "cached"),
      Invalid(
          "v", [](auto& r) { r.mutable_raw()->clear_v(); }, "raw.v", "none", "neither"),
      Invalid(
          "k", [](auto& r) { r.mutable_raw()->clear_k(); }, "raw.k", "none", "neither"),
      Invalid(
          "nothing", [](auto& r) { r.mutable_raw()->Clear(); }, "raw", "no tensors", "q, or"),
      Invalid(
          "length without q", [](auto& r) { r.mutable_raw()->clear_q(); }, "sequences[0].length",
          "2", "0 .. 0"),
      Invalid(
          "keys without k",
          [=](auto& r) {
            no_kv(r);
            r.mutable_sequences(1)->set_context_length(1);
          },
          "sequences[1].context_length", "1", "0 .. 0"),
      Invalid(
          "rewind without position",
          [=](auto& r) {
            no_kv(r);
            r.mutable_sequences(0)->clear_position();
            r.mutable_sequences(0)->set_rewind(true);
          },
          "sequences[0].position", "none", "cached"),
      Invalid("twice", one([](auto& s) { s.set_session_id("b"); }), "sequences[0].session_id",
              "2 times", "once")};
  for (const char* layer : {"", "x", "-1", "01", "1 ", "99999999999", "+1"}) {
    table.push_back({layer, [=](auto& r) { r.set_layer(layer); }, Code::kNotFound,
                     v1::UNKNOWN_LAYER, "layer", absl::StrCat("\"", layer, "\""), "raw session"});
  }
  ExpectRefused(good, table);
}

}  // namespace
}  // namespace attend
