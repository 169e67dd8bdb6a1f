// SPDX-License-Identifier: Apache-2.0
//
// Requests on hidden states to jobs: what is refused and how it is said, and where the rows of
// accepted requests lie.
#include "server/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tests/server/convert_fixture.h"

namespace attend {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(ConvertTest, NamesWhatExistsWhenModelOrLayerIsUnknown) {
  const v1::AttendRequest good = Request("causal", F32({2, kWidth}));
  ExpectRefused(good,
                {{"model", [](auto& r) { r.set_model("nope"); }, Code::kNotFound, v1::UNKNOWN_MODEL,
                  "model", "\"nope\"", "one of m"},
                 {"layer", [](auto& r) { r.set_layer("9"); }, Code::kNotFound, v1::UNKNOWN_LAYER,
                  "layer", "\"9\"", "m: causal, both, plain, cross"},
                 {"no layer", [](auto& r) { r.clear_layer(); }, Code::kNotFound, v1::UNKNOWN_LAYER,
                  "layer", "\"\"", "causal"},
                 {"a name of a megabyte", [](auto& r) { r.set_model(std::string(1 << 20, 'x')); },
                  Code::kNotFound, v1::UNKNOWN_MODEL, "model", "(1048576 bytes)", "m"}});
  models_.push_back(Model("n"));
  absl::Status several = Convert(good).status();
  EXPECT_EQ(several.code(), Code::kInvalidArgument);
  EXPECT_EQ(Detail(several).wanted(), "one of m, n");
  v1::AttendRequest named = good;
  named.set_model("n");
  EXPECT_EQ(Accept(named).model, 1);
  models_.clear();
  EXPECT_EQ(Detail(Convert(good).status()).reason(), v1::UNKNOWN_MODEL);
}

TEST_F(ConvertTest, CutsLongNamesAtACharactersBoundary) {
  v1::AttendRequest request = Request("causal", F32({2, kWidth}));
  std::string name = "x";
  for (int i = 0; i < 100; ++i) name += "\xe2\x82\xac";  // three bytes each
  request.set_model(name);
  EXPECT_THAT(Detail(Convert(request).status()).got(), HasSubstr("\xe2\x82\xac...\" (301 bytes)"));
}

TEST_F(ConvertTest, AnswersUnsupportedForWhatIsNotBuiltYet) {
  const std::vector<std::pair<const char*, Edit>> table = {
      {"input", [](auto& r) { r.set_input(v1::RESIDUAL); }},
      {"weights.mode", [](auto& r) { r.mutable_weights()->set_mode(v1::WeightsRequest::TOP_K); }},
      {"weights.mode", [](auto& r) { r.mutable_weights()->set_mode(v1::WeightsRequest::STATS); }},
      {"return_lse", [](auto& r) { r.set_return_lse(true); }},
      {"return_head_outputs", [](auto& r) { r.set_return_head_outputs(true); }},
      {"head_scale", [](auto& r) { r.add_head_scale(1); }},
      {"rope_positions", [](auto& r) { r.add_rope_positions(0); }}};
  for (const auto& [field, edit] : table) {
    v1::AttendRequest request = Request("causal", F32({2, kWidth}));
    edit(request);
    const absl::Status status = Convert(request).status();
    EXPECT_EQ(status.code(), Code::kUnimplemented) << field;
    EXPECT_EQ(Detail(status).reason(), v1::UNSUPPORTED);
    EXPECT_EQ(Detail(status).field(), field);
  }
}

TEST_F(ConvertTest, RefusesOptionsOutOfRange) {
  ExpectRefused(
      Request("causal", F32({2, kWidth})),
      {Invalid(
           "mask", [](auto& r) { r.set_mask(static_cast<v1::Mask>(7)); }, "mask", "7",
           "MASK_CAUSAL"),
       Invalid(
           "input", [](auto& r) { r.set_input(static_cast<v1::InputPoint>(5)); }, "input", "5",
           "MODULE_INPUT"),
       Invalid(
           "mode",
           [](auto& r) { r.mutable_weights()->set_mode(static_cast<v1::WeightsRequest::Mode>(9)); },
           "weights.mode", "9", "FULL"),
       Invalid(
           "dtype", [](auto& r) { r.set_output_dtype(static_cast<v1::DType>(77)); }, "output_dtype",
           "77", "F32, F16, BF16"),
       Invalid(
           "I32", [](auto& r) { r.set_output_dtype(v1::DTYPE_I32); }, "output_dtype", "I32",
           "F32, F16, BF16"),
       Invalid(
           "response", [](auto& r) { r.set_max_response_bytes(-1); }, "max_response_bytes", "-1",
           "0 or more"),
       Invalid(
           "timeout", [](auto& r) { r.set_timeout_us(-5); }, "timeout_us", "-5", "0 or more"),
       Invalid(
           "id", [](auto& r) { r.set_request_id(std::string(1025, 'a')); }, "request_id",
           "1025 bytes", "1024")});
}

TEST_F(ConvertTest, RefusesTensorsThatContradictThemselves) {
  const auto hidden = [](v1::DType dtype, const std::vector<int64_t>& shape, int64_t bytes) {
    return [=](v1::AttendRequest& r) {
      v1::Tensor& tensor = *r.mutable_hidden_states();
      tensor.set_dtype(dtype);
      tensor.mutable_shape()->Assign(shape.begin(), shape.end());
      tensor.set_data(std::string(static_cast<size_t>(bytes), '\0'));
    };
  };
  const int64_t big = int64_t{1} << 32;
  const auto f32 = v1::DTYPE_F32;
  const std::string bytes = "hidden_states";
  const std::string shape = "hidden_states.shape";
  ExpectRefused(
      Request("causal", F32({2, 4, kWidth})),
      {Invalid(
           "missing", [](auto& r) { r.clear_hidden_states(); }, bytes, "none",
           "[tokens, 8] or [batch, tokens, 8]"),
       Invalid("no dtype", hidden(v1::DTYPE_UNSPECIFIED, {2, 8}, 64), "hidden_states.dtype",
               "unspecified", "F32, F16 or BF16"),
       Invalid("I32", hidden(v1::DTYPE_I32, {2, 8}, 64), "hidden_states.dtype", "I32", "F32"),
       Invalid("unknown dtype", hidden(static_cast<v1::DType>(17), {2, 8}, 64),
               "hidden_states.dtype", "17", "F32"),
       Invalid("half", hidden(f32, {2, 4, 8}, 128), bytes, "128 bytes",
               "256 = [2, 4, 8] x 4 bytes (F32)"),
       Invalid("a byte too many", hidden(v1::DTYPE_BF16, {2, 8}, 33), bytes, "33 bytes",
               "32 = [2, 8] x 2 bytes (BF16)"),
       Invalid("width", hidden(f32, {4, 7}, 112), shape, "[4, 7]", "[tokens, 8]"),
       Invalid("rank 1", hidden(f32, {8}, 32), shape, "[8]", "[tokens, 8]"),
       Invalid("rank 0", hidden(f32, {}, 4), shape, "[]", "[tokens, 8]"),
       Invalid("rank 10000", hidden(f32, std::vector<int64_t>(10000, 1), 4), shape,
               "(10000 dimensions)", "[tokens, 8]"),
       Invalid("negative", hidden(f32, {-1, 4, 8}, 0), shape, "[-1, 4, 8]", "0 or more"),
       Invalid("negative twice", hidden(f32, {-2, -4, 8}, 256), shape, "[-2, -4, 8]", "0 or more"),
       Invalid("wraps 32 bits", hidden(f32, {65537, 65536}, 262144), bytes, "262144 bytes",
               "17180131328 = [65537, 65536] x 4 bytes (F32)"),
       Invalid("wraps 64 bits", hidden(f32, {big, big, 1}, 0), shape, "[4294967296, 4294967296, 1]",
               "2^63"),
       {"many empty slots", hidden(f32, {big, 0, 8}, 0), Code::kInvalidArgument, v1::TOO_LARGE,
        shape, "4294967296 sequences", "request_tokens 100"}});
}

TEST_F(ConvertTest, RefusesSequencesThatDoNotFitTheRows) {
  const auto sequences = [](std::vector<v1::Sequence> list) {
    return [list](v1::AttendRequest& r) { SetSequences(r, list); };
  };
  ExpectRefused(Request("causal", F32({8, kWidth})),
                {Invalid("short", sequences({Stateless(3), Stateless(4)}), "sequences.length",
                         "a sum of 7", "8, the rows of hidden_states"),
                 Invalid("long", sequences({Stateless(5), Stateless(4)}), "sequences.length",
                         "a sum of 9", "8"),
                 Invalid("beyond", sequences({Stateless(9)}), "sequences[0].length", "9", "0 .. 8"),
                 Invalid("negative", sequences({Stateless(9), Stateless(-1)}),
                         "sequences[0].length", "9", "0 .. 8"),
                 Invalid("context", sequences({Stateless(8, 0)}), "sequences[0].context_length",
                         "0", "takes no context"),
                 {"many", sequences(std::vector<v1::Sequence>(101)), Code::kInvalidArgument,
                  v1::TOO_LARGE, "sequences", "101 sequences", "100"}});
  ExpectRefused(Request("causal", F32({2, 4, kWidth})),
                {Invalid("slots", sequences({Stateless(3)}), "sequences", "1 sequences",
                         "2, the slots of hidden_states [2, 4, 8]"),
                 Invalid("slot", sequences({Stateless(4), Stateless(5)}), "sequences[1].length",
                         "5", "0 .. 4")});
  const absl::Status both = Convert([&] {
                              v1::AttendRequest request = Request("causal", F32({8, kWidth}));
                              SetSequences(request, {Stateless(-2), Stateless(8), Stateless(-1)});
                              return request;
                            }())
                                .status();
  EXPECT_THAT(Detail(both).sequences(), ElementsAre(0, 2));
}

TEST_F(ConvertTest, RefusesPositionsThatSessionsOrTheirAbsenceForbid) {
  const auto one = [](const std::function<void(v1::Sequence&)>& edit) {
    return [edit](v1::AttendRequest& r) { edit(*r.mutable_sequences(0)); };
  };
  v1::AttendRequest good = Request("causal", F32({2, kWidth}));
  SetSequences(good, {InSession(1, "a", 5), InSession(1, "b", 0)});
  const std::string position = "sequences[0].position";
  ExpectRefused(
      good,
      {Invalid("none", one([](auto& s) { s.clear_position(); }), position, "none", "cached"),
       Invalid("none, no_append", one([](auto& s) {
                 s.clear_position();
                 s.set_no_append(true);
               }),
               position, "none", "cached"),
       Invalid("negative", one([](auto& s) { s.set_position(-1); }), position, "-1", "0 or more"),
       Invalid("no session", one([](auto& s) { s.clear_session_id(); }), position,
               "without session_id", "unset"),
       Invalid("rewind", one([](auto& s) {
                 s.Clear();
                 s.set_length(1);
                 s.set_rewind(true);
               }),
               "sequences[0].rewind", "without session_id", "unset"),
       Invalid("no_append", one([](auto& s) {
                 s.Clear();
                 s.set_length(1);
                 s.set_no_append(true);
               }),
               "sequences[0].no_append", "without session_id", "unset"),
       Invalid("twice", one([](auto& s) { s.set_session_id("b"); }), "sequences[0].session_id",
               "2 times", "once"),
       Invalid(
           "bidirectional layer", [](auto& r) { r.set_layer("both"); }, "sequences[0].session_id",
           "a session", "bidirectional"),
       Invalid(
           "plain without MASK_CAUSAL", [](auto& r) { r.set_layer("plain"); },
           "sequences[0].session_id", "without MASK_CAUSAL", "MASK_CAUSAL")});
}

TEST_F(ConvertTest, ListsEverySequenceThatSharesASession) {
  v1::AttendRequest request = Request("causal", F32({4, kWidth}));
  SetSequences(request,
               {InSession(1, "a", 0), InSession(1, "b", 0), InSession(1, "a", 0), Stateless(1)});
  EXPECT_THAT(Detail(Convert(request).status()).sequences(), ElementsAre(0, 2));
}

TEST_F(ConvertTest, RefusesMasksTheLayerFixes) {
  const auto mask = [](const char* layer, v1::Mask value) {
    return [=](v1::AttendRequest& r) {
      r.set_layer(layer);
      r.set_mask(value);
    };
  };
  ExpectRefused(Request("causal", F32({2, kWidth})),
                {Invalid("causal", mask("causal", v1::MASK_BIDIRECTIONAL), "mask",
                         "MASK_BIDIRECTIONAL", "layer causal is causal"),
                 Invalid("both", mask("both", v1::MASK_CAUSAL), "mask", "MASK_CAUSAL",
                         "layer both is bidirectional"),
                 Invalid("cross", mask("cross", v1::MASK_CAUSAL), "mask", "MASK_CAUSAL",
                         "attends to a context")});
  const auto causal = [&](const char* layer, v1::Mask value) {
    v1::AttendRequest request = Request(layer, F32({2, kWidth}));
    request.set_mask(value);
    return Accept(request).causal;
  };
  EXPECT_TRUE(causal("causal", v1::MASK_FROM_MODEL));
  EXPECT_TRUE(causal("causal", v1::MASK_CAUSAL));
  EXPECT_FALSE(causal("both", v1::MASK_FROM_MODEL));
  EXPECT_FALSE(causal("both", v1::MASK_BIDIRECTIONAL));
  EXPECT_FALSE(causal("plain", v1::MASK_FROM_MODEL));
  EXPECT_FALSE(causal("plain", v1::MASK_BIDIRECTIONAL));
  EXPECT_TRUE(causal("plain", v1::MASK_CAUSAL));
}

TEST_F(ConvertTest, RefusesContextsThatDoNotFit) {
  v1::AttendRequest good = Request("cross", F32({4, kWidth}));
  *good.mutable_context() = F32({5, kContextWidth});
  SetSequences(good, {Stateless(2, 2), Stateless(2, 3)});
  const auto context = [](std::vector<int64_t> shape) {
    return [=](v1::AttendRequest& r) { *r.mutable_context() = F32(shape); };
  };
  const auto sequences = [](std::vector<v1::Sequence> list) {
    return [list](v1::AttendRequest& r) { SetSequences(r, list); };
  };
  v1::Sequence rewinding = InSession(2, "s");
  rewinding.set_rewind(true);
  v1::Sequence looking = InSession(2, "s");
  looking.set_no_append(true);
  ExpectRefused(
      good,
      {Invalid("width", context({5, 8}), "context.shape", "[5, 8]", "[rows, 6] or [2, rows, 6]"),
       Invalid("slots", context({3, 5, 6}), "context.shape", "[3, 5, 6]", "[2, rows, 6]"),
       Invalid("sum", context({6, 6}), "sequences.context_length", "a sum of 5", "6"),
       Invalid(
           "gone", [](auto& r) { r.clear_context(); }, "sequences[0].context_length", "2",
           "0 .. 0"),
       Invalid(
           "dtype", [](auto& r) { r.mutable_context()->set_dtype(v1::DTYPE_F16); }, "context",
           "120 bytes", "60 = [5, 6] x 2 bytes (F16)"),
       Invalid("unset", sequences({Stateless(2, 5), Stateless(2)}), "sequences[1].context_length",
               "none", "0 = empty"),
       Invalid("negative", sequences({Stateless(2, -1), Stateless(2, 5)}),
               "sequences[0].context_length", "-1", "0 .. 5"),
       Invalid("position", sequences({Stateless(2, 5), InSession(2, "s", 0)}),
               "sequences[1].position", "cross-attention", "unset"),
       Invalid("rewind", sequences({Stateless(2, 5), rewinding}), "sequences[1].rewind",
               "cross-attention", "unset"),
       Invalid("no_append", sequences({Stateless(2, 5), looking}), "sequences[1].no_append",
               "cross-attention", "unset"),
       Invalid(
           "self layer", [](auto& r) { r.set_layer("causal"); }, "context", "a context",
           "neither cross-attention nor mask_selectable"),
       Invalid(
           "no sequences, no context",
           [](auto& r) {
             r.clear_sequences();
             r.clear_context();
           },
           "context", "none", "[rows, 6] or [1, rows, 6]"),
       Invalid(
           "padded without sequences, packed context",
           [](auto& r) {
             r.clear_sequences();
             *r.mutable_hidden_states() = F32({2, 2, kWidth});
           },
           "context.shape", "[5, 6]", "[2, rows, 6]")});
  v1::AttendRequest plain = Request("plain", F32({2, kWidth}));
  *plain.mutable_context() = F32({3, kWidth});
  ExpectRefused(plain, {Invalid(
                           "causal over a context", [](auto& r) { r.set_mask(v1::MASK_CAUSAL); },
                           "mask", "MASK_CAUSAL", "attends to a context")});
}

TEST_F(ConvertTest, RefusesBiasesOfOtherShapes) {
  v1::AttendRequest good = Request("causal", F32({6, kWidth}));
  SetSequences(good, {Stateless(2), InSession(4, "s", 3)});  // 2 and 7 keys
  *good.mutable_attention_bias() = F32({2, 4, 4, 7});
  const auto bias = [](const v1::Tensor& tensor) {
    return [=](v1::AttendRequest& r) { *r.mutable_attention_bias() = tensor; };
  };
  const std::string wanted =
      "[1 or 2 sequences, 1 or 4 heads, 4 rows (the longest length), 0 .. 7 keys]";
  const std::string shape = "attention_bias.shape";
  ExpectRefused(good,
                {Invalid("sequences", bias(F32({3, 4, 4, 7})), shape, "[3, 4, 4, 7]", wanted),
                 Invalid("heads", bias(F32({2, 2, 4, 7})), shape, "[2, 2, 4, 7]", wanted),
                 Invalid("rows", bias(F32({2, 4, 3, 7})), shape, "[2, 4, 3, 7]", wanted),
                 Invalid("keys", bias(F32({2, 4, 4, 8})), shape, "[2, 4, 4, 8]", wanted),
                 Invalid("rank", bias(F32({4, 7})), shape, "[4, 7]", wanted),
                 Invalid("dtype", bias(F16({1, 1, 4, 7})), "attention_bias.dtype", "F16", "F32")});
}

TEST_F(ConvertTest, RefusesWeightsThatDoNotExist) {
  v1::AttendRequest good = Request("causal", F32({6, kWidth}));
  good.mutable_weights()->set_mode(v1::WeightsRequest::FULL);
  ExpectRefused(good, {Invalid(
                           "head", [](auto& r) { r.mutable_weights()->add_heads(4); },
                           "weights.heads", "4", "0 .. 3"),
                       Invalid(
                           "negative head", [](auto& r) { r.mutable_weights()->add_heads(-1); },
                           "weights.heads", "-1", "0 .. 3"),
                       Invalid(
                           "twice",
                           [](auto& r) {
                             r.mutable_weights()->add_heads(1);
                             r.mutable_weights()->add_heads(1);
                           },
                           "weights.heads", "1 twice", "once"),
                       Invalid(
                           "begin", [](auto& r) { r.mutable_weights()->set_row_begin(-1); },
                           "weights.row_begin", "-1", "0 or more"),
                       Invalid(
                           "end",
                           [](auto& r) {
                             r.mutable_weights()->set_row_begin(3);
                             r.mutable_weights()->set_row_end(2);
                           },
                           "weights.row_end", "2", "row_begin 3")});
}

TEST_F(ConvertTest, RefusesMoreTokensThanTheLimitWithBothNumbers) {
  const absl::Status status = Convert(Request("both", F32({101, kWidth}))).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(Detail(status).reason(), v1::TOO_LARGE);
  EXPECT_EQ(Detail(status).got(), "101 tokens");
  EXPECT_THAT(Detail(status).wanted(), HasSubstr("100"));
  EXPECT_EQ(Accept(Request("both", F32({100, kWidth}))).tokens(), 100);
  // Padding is not counted.
  v1::AttendRequest padded = Request("both", F32({2, 100, kWidth}));
  SetSequences(padded, {Stateless(60), Stateless(40)});
  EXPECT_EQ(Accept(padded).tokens(), 100);
}

TEST_F(ConvertTest, AsksForAdmissionAfterTheChecksAndBeforeTheCopy) {
  int64_t asked = 0;
  const Admit refuse = [&](int64_t tokens) {
    asked = tokens;
    EXPECT_EQ(context_.buffers->unused_bytes(), 0);
    return absl::ResourceExhaustedError("full");
  };
  EXPECT_EQ(Convert(Request("both", F32({7, kWidth})), refuse).status().code(),
            Code::kResourceExhausted);
  EXPECT_EQ(asked, 7);
  EXPECT_EQ(context_.buffers->unused_bytes(), 0);
  asked = 0;
  EXPECT_FALSE(Convert(Request("both", F32({7, kWidth + 1})), refuse).ok());
  EXPECT_EQ(asked, 0);
}

TEST_F(ConvertTest, TakesPackedSequencesOneAfterAnother) {
  v1::AttendRequest request = Request("causal", BF16({9, kWidth}));
  v1::Sequence rewinding = InSession(4, "s", 70);
  rewinding.set_rewind(true);
  rewinding.set_no_append(true);
  SetSequences(request, {Stateless(2), Stateless(0), rewinding, Stateless(3)});
  request.set_request_id("id");
  request.set_timeout_us(250);
  request.set_max_response_bytes(1000);
  const AttendJob& job = Accept(request);
  EXPECT_EQ(job.model, 0);
  EXPECT_EQ(job.layer, 0);
  EXPECT_EQ(job.layer_name, "causal");
  EXPECT_TRUE(job.causal);
  EXPECT_FALSE(job.cross);
  EXPECT_EQ(job.output_rows, 9);
  EXPECT_EQ(job.output_dtype, DType::kBF16);
  EXPECT_EQ(job.response_bytes_limit, 1000);
  EXPECT_FALSE(job.weights.full);
  EXPECT_EQ(job.bias_sequences, 0);
  ASSERT_EQ(job.sequences.size(), 4u);
  const int64_t begin[] = {0, 2, 2, 6};
  const int64_t rows[] = {2, 0, 4, 3};
  for (size_t i = 0; i < 4; ++i) {
    const SequenceJob& sequence = job.sequences[i];
    EXPECT_EQ(sequence.rows, rows[i]);
    EXPECT_EQ(sequence.keys, rows[i]);
    EXPECT_TRUE(sequence.has_keys);
    EXPECT_EQ(sequence.output_row, begin[i]);
    ExpectRows(sequence.query, request.hidden_states(), kWidth, begin[i], rows[i]);
    EXPECT_EQ(sequence.key_source.data, sequence.query.data);
    EXPECT_EQ(sequence.key_source.dtype, DType::kBF16);
    EXPECT_EQ(sequence.value_source.data, nullptr);
  }
  EXPECT_EQ(job.sequences[2].session_id, "s");
  EXPECT_EQ(job.sequences[2].position, 70);
  EXPECT_TRUE(job.sequences[2].rewind);
  EXPECT_TRUE(job.sequences[2].no_append);
  EXPECT_FALSE(job.sequences[3].position.has_value());
  EXPECT_EQ(accepted_.request_id, "id");
  EXPECT_EQ(accepted_.timeout_us, 250);
  EXPECT_THAT(accepted_.output_shape, ElementsAre(9, 10));
}

TEST_F(ConvertTest, TakesPaddedSequencesFromTheirSlots) {
  v1::AttendRequest request = Request("both", F32({3, 5, kWidth}));
  SetSequences(request, {Stateless(2), Stateless(5), Stateless(0)});
  request.set_output_dtype(v1::DTYPE_F16);
  request.set_max_response_bytes(1 << 30);
  const AttendJob& job = Accept(request);
  EXPECT_EQ(job.output_rows, 15);
  EXPECT_EQ(job.output_dtype, DType::kF16);
  EXPECT_EQ(job.response_bytes_limit, 4000);
  ASSERT_EQ(job.sequences.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(job.sequences[i].rows, request.sequences(static_cast<int>(i)).length());
    EXPECT_EQ(job.sequences[i].output_row, static_cast<int64_t>(i) * 5);
    ExpectRows(job.sequences[i].query, request.hidden_states(), kWidth, static_cast<int64_t>(i) * 5,
               job.sequences[i].rows);
  }
  EXPECT_THAT(accepted_.output_shape, ElementsAre(3, 5, 10));
}

TEST_F(ConvertTest, TakesFullLengthSequencesWhenNoneAreListed) {
  EXPECT_EQ(Accept(Request("both", F32({6, kWidth}))).sequences.size(), 1u);
  EXPECT_EQ(accepted_.job->sequences[0].rows, 6);
  const v1::AttendRequest padded = Request("both", F32({2, 3, kWidth}));
  const AttendJob& job = Accept(padded);
  ASSERT_EQ(job.sequences.size(), 2u);
  EXPECT_EQ(job.sequences[1].rows, 3);
  ExpectRows(job.sequences[1].query, padded.hidden_states(), kWidth, 3, 3);
}

TEST_F(ConvertTest, TakesEmptyTensors) {
  EXPECT_EQ(Accept(Request("both", F32({0, kWidth}))).sequences.size(), 1u);
  EXPECT_EQ(accepted_.job->tokens(), 0);
  EXPECT_EQ(Accept(Request("both", F32({0, 4, kWidth}))).sequences.size(), 0u);
  EXPECT_THAT(accepted_.output_shape, ElementsAre(0, 4, 10));
  EXPECT_EQ(Accept(Request("cross", F32({0, 4, kWidth}))).sequences.size(), 0u);
  EXPECT_EQ(Accept(Request("both", F32({4, 0, kWidth}))).sequences.size(), 4u);
  EXPECT_EQ(accepted_.job->output_rows, 0);
  v1::AttendRequest request = Request("causal", F32({0, kWidth}));
  SetSequences(request, {Stateless(0), InSession(0, "s", 0)});
  *request.mutable_attention_bias() = F32({1, 1, 0, 0});
  EXPECT_EQ(Accept(request).sequences.size(), 2u);
}

TEST_F(ConvertTest, GivesPackedContextRowsToThoseThatSetALength) {
  v1::AttendRequest request = Request("cross", F32({6, kWidth}));
  *request.mutable_context() = F16({7, kContextWidth});
  v1::Sequence first = InSession(2, "a");
  first.set_context_length(4);
  SetSequences(request, {first, InSession(2, "b"), Stateless(1, 3), Stateless(1, 0)});
  const AttendJob& job = Accept(request);
  EXPECT_TRUE(job.cross);
  EXPECT_FALSE(job.causal);
  EXPECT_EQ(job.output_dtype, DType::kF32);
  ASSERT_EQ(job.sequences.size(), 4u);
  EXPECT_TRUE(job.sequences[0].has_keys);
  EXPECT_EQ(job.sequences[0].keys, 4);
  ExpectRows(job.sequences[0].key_source, request.context(), kContextWidth, 0, 4);
  EXPECT_FALSE(job.sequences[1].has_keys);
  EXPECT_EQ(job.sequences[1].keys, 0);
  EXPECT_EQ(job.sequences[1].key_source.data, nullptr);
  EXPECT_EQ(job.sequences[2].keys, 3);
  ExpectRows(job.sequences[2].key_source, request.context(), kContextWidth, 4, 3);
  EXPECT_TRUE(job.sequences[3].has_keys);
  EXPECT_EQ(job.sequences[3].keys, 0);
  ExpectRows(job.sequences[3].query, request.hidden_states(), kWidth, 5, 1);
}

TEST_F(ConvertTest, GivesPaddedContextSlotsToTheirSequences) {
  v1::AttendRequest request = Request("cross", F32({2, 3, kWidth}));
  *request.mutable_context() = F32({2, 5, kContextWidth});
  SetSequences(request, {InSession(3, "a"), Stateless(1, 4)});
  const AttendJob& job = Accept(request);
  EXPECT_FALSE(job.sequences[0].has_keys);
  EXPECT_EQ(job.sequences[1].keys, 4);
  ExpectRows(job.sequences[1].key_source, request.context(), kContextWidth, 5, 4);

  request.clear_sequences();
  const AttendJob& full = Accept(request);
  ASSERT_EQ(full.sequences.size(), 2u);
  EXPECT_EQ(full.sequences[1].rows, 3);
  EXPECT_EQ(full.sequences[1].keys, 5);
  ExpectRows(full.sequences[1].key_source, request.context(), kContextWidth, 5, 5);

  v1::AttendRequest single = Request("cross", F32({3, kWidth}));
  *single.mutable_context() = F32({5, kContextWidth});
  EXPECT_EQ(Accept(single).sequences[0].keys, 5);
  *single.mutable_context() = F32({1, 4, kContextWidth});
  EXPECT_EQ(Accept(single).sequences[0].keys, 4);
}

TEST_F(ConvertTest, HashesDtypeShapeAndBytesOfASessionsContext) {
  const auto hash = [&](const v1::Tensor& context, int64_t length) {
    v1::AttendRequest request = Request("cross", F32({1, kWidth}));
    *request.mutable_context() = context;
    v1::Sequence sequence = InSession(1, "s");
    sequence.set_context_length(length);
    SetSequences(request, {sequence});
    return Accept(request).sequences[0].context_hash;
  };
  const v1::Tensor context = F32({4, kContextWidth});
  const auto packed = hash(context, 4);
  EXPECT_EQ(packed, hash(context, 4));
  v1::Tensor padded = F32({1, 5, kContextWidth});
  padded.mutable_data()->replace(0, context.data().size(), context.data());
  EXPECT_EQ(packed, hash(padded, 4));
  EXPECT_NE(packed, hash(padded, 5));
  v1::Tensor flipped = context;  // 0.0 and -0.0 differ
  (*flipped.mutable_data())[95] ^= '\x80';
  EXPECT_NE(packed, hash(flipped, 4));
  v1::Tensor half = F16({4, kContextWidth});
  v1::Tensor brain = half;
  brain.set_dtype(v1::DTYPE_BF16);
  EXPECT_NE(hash(half, 4), hash(brain, 4));
  EXPECT_NE(hash(F32({0, kContextWidth}), 0), packed);
}

TEST_F(ConvertTest, TakesAPlainLayerAsCrossWhenAContextIsGivenOrKept) {
  v1::AttendRequest given = Request("plain", F32({2, kWidth}));
  *given.mutable_context() = F32({3, kWidth});
  EXPECT_TRUE(Accept(given).cross);
  EXPECT_EQ(accepted_.job->sequences[0].keys, 3);

  v1::AttendRequest empty = Request("plain", F32({2, kWidth}));
  SetSequences(empty, {Stateless(2, 0)});
  EXPECT_TRUE(Accept(empty).cross);
  EXPECT_EQ(accepted_.job->sequences[0].keys, 0);

  v1::AttendRequest kept = Request("plain", F32({2, kWidth}));
  SetSequences(kept, {InSession(2, "s")});
  EXPECT_TRUE(Accept(kept).cross);
  EXPECT_FALSE(accepted_.job->sequences[0].has_keys);

  v1::AttendRequest causal = Request("plain", F32({2, kWidth}));
  SetSequences(causal, {InSession(2, "s", 4)});
  causal.set_mask(v1::MASK_CAUSAL);
  EXPECT_FALSE(Accept(causal).cross);
  EXPECT_TRUE(accepted_.job->causal);
}

TEST_F(ConvertTest, CopiesBiasAndWeightsWanted) {
  v1::AttendRequest request = Request("causal", F32({6, kWidth}));
  SetSequences(request, {Stateless(2), InSession(4, "s", 3)});
  *request.mutable_attention_bias() = F32({2, 1, 4, 4});
  v1::WeightsRequest& weights = *request.mutable_weights();
  weights.set_mode(v1::WeightsRequest::FULL);
  weights.add_heads(3);
  weights.add_heads(0);
  weights.set_row_begin(1);
  weights.set_row_end(900);
  const AttendJob& job = Accept(request);
  EXPECT_EQ(job.bias_sequences, 2);
  EXPECT_EQ(job.bias_heads, 1);
  EXPECT_EQ(job.bias_rows, 4);
  EXPECT_EQ(job.bias_columns, 4);
  ASSERT_NE(job.bias, nullptr);
  EXPECT_EQ(std::memcmp(job.bias, request.attention_bias().data().data(), 128), 0);
  EXPECT_TRUE(job.weights.full);
  EXPECT_THAT(job.weights.heads, ElementsAre(3, 0));
  EXPECT_EQ(job.weights.row_begin, 1);
  EXPECT_EQ(job.weights.row_end, 900);
}

}  // namespace
}  // namespace attend
