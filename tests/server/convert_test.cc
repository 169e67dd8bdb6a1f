// SPDX-License-Identifier: Apache-2.0
//
// Requests to jobs, and results to answers: what is refused and how it is said, and where the rows
// of accepted requests lie.
#include "server/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "engine/util/error.h"

namespace attend {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;
using Edit = std::function<void(v1::AttendRequest&)>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kWidth = 8;
constexpr int64_t kContextWidth = 6;

LoadedLayer Layer(const std::string& name) {
  LoadedLayer layer;
  layer.name = name;
  layer.spec.d_model = layer.spec.context_width = kWidth;
  layer.spec.output_width = 10;
  layer.spec.q_heads = 4;
  layer.spec.kv_heads = 2;
  layer.spec.head_dim = layer.spec.v_head_dim = 3;
  layer.geometry = GeometryOf(layer.spec, DType::kBF16);
  return layer;
}

// Layers: causal, bidirectional, plain (mask_selectable), cross.
LoadedModel Model(const std::string& name) {
  LoadedModel model;
  model.name = name;
  model.layers = {Layer("causal"), Layer("both"), Layer("plain"), Layer("cross")};
  model.layers[0].spec.causal = true;
  model.layers[2].spec.mask_selectable = true;
  model.layers[3].spec.cross = true;
  model.layers[3].spec.context_width = kContextWidth;
  return model;
}

v1::Tensor Tensor(v1::DType dtype, const std::vector<int64_t>& shape) {
  v1::Tensor tensor;
  tensor.set_dtype(dtype);
  int64_t bytes = DTypeBytes(static_cast<DType>(dtype));
  for (int64_t dimension : shape) {
    tensor.add_shape(dimension);
    bytes *= dimension;
  }
  for (int64_t i = 0; i < bytes; ++i) {
    tensor.mutable_data()->push_back(static_cast<char>(i * 31 + i / 256 + dtype));
  }
  return tensor;
}

v1::Tensor F32(const std::vector<int64_t>& shape) { return Tensor(v1::DTYPE_F32, shape); }
v1::Tensor F16(const std::vector<int64_t>& shape) { return Tensor(v1::DTYPE_F16, shape); }
v1::Tensor BF16(const std::vector<int64_t>& shape) { return Tensor(v1::DTYPE_BF16, shape); }

v1::Sequence Stateless(int64_t length) {
  v1::Sequence sequence;
  sequence.set_length(length);
  return sequence;
}
v1::Sequence Stateless(int64_t length, int64_t context_length) {
  v1::Sequence sequence = Stateless(length);
  sequence.set_context_length(context_length);
  return sequence;
}
v1::Sequence InSession(int64_t length, const std::string& id) {
  v1::Sequence sequence = Stateless(length);
  sequence.set_session_id(id);
  return sequence;
}
v1::Sequence InSession(int64_t length, const std::string& id, int64_t position) {
  v1::Sequence sequence = InSession(length, id);
  sequence.set_position(position);
  return sequence;
}

void SetSequences(v1::AttendRequest& request, const std::vector<v1::Sequence>& sequences) {
  request.clear_sequences();
  for (const v1::Sequence& sequence : sequences) *request.add_sequences() = sequence;
}

v1::AttendRequest Request(const std::string& layer, const v1::Tensor& hidden) {
  v1::AttendRequest request;
  request.set_layer(layer);
  *request.mutable_hidden_states() = hidden;
  return request;
}

v1::AttendRequest Raw(const std::vector<int64_t>& q, const std::vector<int64_t>& k,
                      const std::vector<int64_t>& v) {
  v1::AttendRequest request;
  v1::RawInput& raw = *request.mutable_raw();
  if (!q.empty()) *raw.mutable_q() = F16(q);
  if (!k.empty()) *raw.mutable_k() = F32(k);
  if (!v.empty()) *raw.mutable_v() = BF16(v);
  return request;
}

v1::ErrorDetail Detail(const absl::Status& status) {
  v1::ErrorDetail detail;
  EXPECT_TRUE(detail.ParseFromString(EncodedErrorDetail(status))) << status;
  return detail;
}

class ConvertTest : public testing::Test {
 protected:
  ConvertTest() {
    models_.push_back(Model("m"));
    context_.models = &models_;
    context_.buffers = BufferPool::Make(1 << 20);
    context_.request_tokens = 100;
    context_.response_bytes = 4000;
    context_.replica = "r1";
  }

  absl::StatusOr<ConvertedAttend> Convert(const v1::AttendRequest& request,
                                          const Admit& admit = {}) {
    absl::StatusOr<ReceivedAttend> wire = ReceivedAttend::Decode(EncodeMessage(request));
    if (!wire.ok()) return wire.status();
    return ConvertAttend(context_, *wire, admit);
  }

  // The job of a request that must be accepted.
  AttendJob& Accept(const v1::AttendRequest& request) {
    absl::StatusOr<ConvertedAttend> converted = Convert(request);
    EXPECT_TRUE(converted.ok()) << converted.status();
    accepted_ = converted.ok() ? *std::move(converted) : ConvertedAttend{};
    if (accepted_.job == nullptr) accepted_.job = std::make_shared<AttendJob>();
    return *accepted_.job;
  }

  v1::AttendResponse Answer(int64_t now_us) {
    accepted_.job->output = context_.buffers->Get(1000);
    std::memset(accepted_.job->output.data.get(), 'o', 1000);
    auto response = ParseMessage<v1::AttendResponse>(
        EncodeAttendResponse(ToResponse(context_, accepted_, now_us), OutputOf(accepted_)));
    EXPECT_TRUE(response.ok()) << response.status();
    return response.ok() ? *response : v1::AttendResponse();
  }

  struct Bad {
    const char* what;
    Edit edit;
    Code code;
    v1::Reason reason;
    std::string field;
    std::string got;  // substrings
    std::string wanted;
  };
  void ExpectRefused(const v1::AttendRequest& good, const std::vector<Bad>& table) {
    EXPECT_TRUE(Convert(good).ok()) << Convert(good).status();
    context_.buffers = BufferPool::Make(1 << 20);
    for (const Bad& bad : table) {
      SCOPED_TRACE(bad.what);
      v1::AttendRequest request = good;
      bad.edit(request);
      const absl::StatusOr<ConvertedAttend> converted = Convert(request);
      if (converted.ok()) {
        ADD_FAILURE() << "accepted";
        continue;
      }
      EXPECT_EQ(converted.status().code(), bad.code) << converted.status();
      const v1::ErrorDetail detail = Detail(converted.status());
      EXPECT_EQ(detail.reason(), bad.reason);
      EXPECT_EQ(detail.field(), bad.field);
      EXPECT_THAT(detail.got(), HasSubstr(bad.got));
      EXPECT_THAT(detail.wanted(), HasSubstr(bad.wanted));
    }
    // A buffer taken for the copy would have come back to the pool.
    EXPECT_EQ(context_.buffers->unused_bytes(), 0) << "copied before every check had passed";
  }

  static Bad Invalid(const char* what, Edit edit, std::string field, std::string got,
                     std::string wanted) {
    return {what,
            std::move(edit),
            Code::kInvalidArgument,
            v1::INVALID_FIELD,
            std::move(field),
            std::move(got),
            std::move(wanted)};
  }

  std::vector<LoadedModel> models_;
  ConvertContext context_;
  ConvertedAttend accepted_;
};

// Rows [begin, begin + count) of a tensor are where `rows` points to.
void ExpectRows(const InputRows& rows, const v1::Tensor& tensor, int64_t row_elements,
                int64_t begin, int64_t count) {
  ASSERT_NE(rows.data, nullptr);
  EXPECT_EQ(static_cast<int>(rows.dtype), static_cast<int>(tensor.dtype()));
  const int64_t row_bytes = row_elements * DTypeBytes(rows.dtype);
  EXPECT_EQ(std::memcmp(rows.data, tensor.data().data() + begin * row_bytes,
                        static_cast<size_t>(count * row_bytes)),
            0);
  EXPECT_EQ((reinterpret_cast<uintptr_t>(rows.data) - static_cast<size_t>(begin * row_bytes)) % 64,
            0u);
}

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
  ASSERT_EQ(job.bias.size(), 32u);
  EXPECT_EQ(std::memcmp(job.bias.data(), request.attention_bias().data().data(), 128), 0);
  EXPECT_TRUE(job.weights.full);
  EXPECT_THAT(job.weights.heads, ElementsAre(3, 0));
  EXPECT_EQ(job.weights.row_begin, 1);
  EXPECT_EQ(job.weights.row_end, 900);
}

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
       Invalid("width 0", k({3, 2, 0}), "raw.k.shape", "[3, 2, 0]", "1 .. 256"),
       Invalid("width 257", v({3, 2, 257}), "raw.v.shape", "[3, 2, 257]", "1 .. 256"),
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
      {[](auto& r) { r.mutable_raw()->set_head_dim(257); }, invalid, "raw.head_dim", "257",
       "1 .. 256"},
      {[](auto& r) { r.mutable_raw()->set_v_head_dim(-1); }, invalid, "raw.v_head_dim", "-1",
       "0 .. 256"},
      {[](auto& r) { r.mutable_raw()->set_kv_dtype(v1::DTYPE_I32); }, invalid, "raw.kv_dtype",
       "I32", "F32, BF16, F16"},
      {[](auto& r) { r.mutable_raw()->set_kv_dtype(static_cast<v1::DType>(40)); }, invalid,
       "raw.kv_dtype", "40", "F32, BF16, F16"},
      {[](auto& r) { r.mutable_raw()->set_kv_dtype(v1::DTYPE_I8); }, Code::kUnimplemented,
       "raw.kv_dtype", "", ""},
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

TEST_F(ConvertTest, LabelsOnlyLoadedModels) {
  EXPECT_EQ(ModelLabel(models_, "m", false), "m");
  EXPECT_EQ(ModelLabel(models_, "", false), "m");
  EXPECT_EQ(ModelLabel(models_, "x", false), "none");
  EXPECT_EQ(ModelLabel(models_, "", true), "raw");
  models_.push_back(Model("n"));
  EXPECT_EQ(ModelLabel(models_, "", false), "none");
}

}  // namespace
}  // namespace attend
