// SPDX-License-Identifier: Apache-2.0
//
// The error table of the contract seen from outside: code, reason, numbers and what is left
// unchanged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <functional>

#include "tests/integration/server_process.h"
#include "tests/integration/wire_calls.h"

namespace attend {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr int64_t kWidth = 64;  // llama_gqa4
constexpr char kAttendPath[] = "/attend.v1.Attention/Attend";

std::vector<float> Values(int64_t rows, int64_t width = kWidth) {
  std::mt19937_64 random(static_cast<uint64_t>(rows));
  return RandomValues(random, rows * width);
}

v1::AttendRequest Rows(int64_t rows) { return RowsRequest("llama", "0", kWidth, Values(rows)); }

// Code, reason and field of an error, and that its message names `got` in numbers or words.
void ExpectError(const Ended& ended, int code, v1::Reason reason, const std::string& field,
                 const std::string& got) {
  EXPECT_EQ(ended.error.code, code) << ended.error.ToString();
  EXPECT_EQ(v1::Reason_Name(ended.error.reason), v1::Reason_Name(reason)) << ended.error.ToString();
  EXPECT_EQ(ended.error.field, field) << ended.error.ToString();
  EXPECT_THAT(ended.error.message + ended.error.got, HasSubstr(got));
  EXPECT_THAT(ended.error.message, Not(IsEmpty()));
}

// A server and a session with 10 tokens of layer 0; whatever a test does, both are as before at its
// end.
class ErrorsTest : public testing::Test {
 protected:
  explicit ErrorsTest(std::vector<std::string> flags = {"--message_bytes=1MiB",
                                                        "--request_tokens=512",
                                                        "--response_bytes=256KiB"}) {
    flags.push_back(GoldenModelFlag("llama_gqa4", "llama"));
    flags.push_back(GoldenModelFlag("bert"));
    flags.push_back(GoldenModelFlag("bert_decoder", "decoder"));
    server_ = std::make_unique<ServerProcess>(flags);
    EXPECT_TRUE(server_->WaitForServing()) << server_->log();
    wire_ = std::make_unique<WireClient>(server_->address());
    session_ = Open("llama");
    EXPECT_TRUE(wire_->Attend(InSession(10, 0)).ok());
    next_output_ = LookAhead();
  }
  void TearDown() override {
    if (server_ == nullptr) return;  // the test ended it
    EXPECT_EQ(wire_->Get(session_).value.length(), 10);
    EXPECT_EQ(LookAhead(), next_output_);
    EXPECT_TRUE(wire_->Close(session_).ok());
    EXPECT_EQ(WhatIsLeft(*server_), "");
    server_->Signal(SIGTERM);
    EXPECT_EQ(server_->WaitForExit(), 0);
  }

  std::string Open(const std::string& model, int64_t max_tokens = 0,
                   int64_t ttl_seconds = 0) const {
    v1::OpenSessionRequest request;
    request.set_model(model);
    request.set_max_tokens(max_tokens);
    request.set_ttl_seconds(ttl_seconds);
    const auto opened = wire_->Open(request);
    EXPECT_TRUE(opened.ok()) << opened.error.ToString();
    return opened.value.id();
  }
  v1::AttendRequest InSession(int64_t rows, int64_t position) const {
    return SessionRequest("llama", "0", kWidth, Values(rows), session_, position);
  }
  std::string LookAhead() const {
    v1::AttendRequest request = InSession(3, 10);
    request.mutable_sequences(0)->set_no_append(true);
    const auto reply = wire_->Attend(request);
    EXPECT_TRUE(reply.ok()) << reply.error.ToString();
    return reply.value.output().data();
  }
  // The error of the session's next append after `change`.
  Ended Changed(const std::function<void(v1::AttendRequest&)>& change) const {
    v1::AttendRequest request = InSession(4, 10);
    change(request);
    return wire_->Attend(request);
  }
  void ExpectInvalid(const std::string& field, const std::string& got,
                     const std::function<void(v1::AttendRequest&)>& change) const {
    SCOPED_TRACE(field);
    ExpectError(Changed(change), grpc::INVALID_ARGUMENT, v1::INVALID_FIELD, field, got);
  }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<WireClient> wire_;
  std::string session_;
  std::string next_output_;
};

TEST_F(ErrorsTest, WrongShapesTypesAndSizesNameTheFieldAndItsNumbers) {
  ExpectInvalid("hidden_states.shape", "[4, 63]", [](auto& r) {
    SetTensor(Values(4, 63), {4, 63}, r.mutable_hidden_states());
  });
  ExpectInvalid("hidden_states", "1024 bytes",
                [](auto& r) { r.mutable_hidden_states()->set_shape(0, 5); });
  ExpectInvalid("hidden_states.shape", "[-4, 64]",
                [](auto& r) { r.mutable_hidden_states()->set_shape(0, -4); });
  ExpectInvalid("hidden_states.shape", "4294967296", [](auto& r) {
    SetTensor({}, {int64_t{1} << 32, int64_t{1} << 32, 1}, r.mutable_hidden_states());
  });
  ExpectInvalid("hidden_states.dtype", "",
                [](auto& r) { r.mutable_hidden_states()->set_dtype(v1::DTYPE_UNSPECIFIED); });
  ExpectInvalid("hidden_states.dtype", "I8",
                [](auto& r) { r.mutable_hidden_states()->set_dtype(v1::DTYPE_I8); });
  ExpectInvalid("hidden_states", "none", [](auto& r) { r.clear_hidden_states(); });
  ExpectInvalid("sequences[0].length", "5", [](auto& r) { r.mutable_sequences(0)->set_length(5); });
  ExpectInvalid("sequences.length", "3", [](auto& r) { r.mutable_sequences(0)->set_length(3); });
  ExpectInvalid("sequences[0].position", "none",
                [](auto& r) { r.mutable_sequences(0)->clear_position(); });
  ExpectInvalid("sequences[0].position", "set without session_id",
                [](auto& r) { r.mutable_sequences(0)->clear_session_id(); });
  ExpectInvalid("mask", "MASK_BIDIRECTIONAL", [](auto& r) { r.set_mask(v1::MASK_BIDIRECTIONAL); });
  ExpectInvalid("output_dtype", "I32", [](auto& r) { r.set_output_dtype(v1::DTYPE_I32); });
  ExpectInvalid("attention_bias.shape", "[1, 3, 4, 14]", [](auto& r) {
    SetTensor(std::vector<float>(3 * 4 * 14), {1, 3, 4, 14}, r.mutable_attention_bias());
  });
  ExpectInvalid("weights.heads", "8", [](auto& r) {
    r.mutable_weights()->set_mode(v1::WeightsRequest::FULL);
    r.mutable_weights()->add_heads(8);
  });
  ExpectInvalid("context", "", [](auto& r) {
    SetTensor(Values(2), {2, kWidth}, r.mutable_context());
  });
  ExpectInvalid("sequences[0].session_id", "", [](auto& r) {
    *r.add_sequences() = r.sequences(0);
    r.mutable_sequences(0)->set_length(2);
    r.mutable_sequences(1)->set_length(2);
  });
  ExpectInvalid("sequences[0].session_id", "a session", [](auto& r) {
    const std::string session = r.sequences(0).session_id();
    r = SessionRequest("bert", "0", 36, Values(2, 36), session, 0);
  });
  v1::OpenSessionRequest negative;
  negative.set_model("llama");
  negative.set_ttl_seconds(-1);
  ExpectError(wire_->Open(negative), grpc::INVALID_ARGUMENT, v1::INVALID_FIELD, "ttl_seconds",
              "-1");
  ExpectError(wire_->Truncate(session_, 11), grpc::INVALID_ARGUMENT, v1::INVALID_FIELD, "length",
              "11");
  ExpectError(wire_->Fork(session_, -1), grpc::INVALID_ARGUMENT, v1::INVALID_FIELD, "length", "-1");
}

TEST_F(ErrorsTest, WhatIsTooLargeIsRefusedAnnouncedOrReceivedWithBothNumbers) {
  ExpectError(wire_->Attend(Rows(4), {.metadata = {{"attend-bytes", "1048577"}}}),
              grpc::INVALID_ARGUMENT, v1::TOO_LARGE, "attend-bytes", "1048577");
  const Ended received = wire_->SendBytes(kAttendPath, {std::string(1048577, 'x')});
  ExpectError(received, grpc::INVALID_ARGUMENT, v1::TOO_LARGE, "request", "1048577");
  EXPECT_THAT(received.error.message, HasSubstr("1048576"));
  for (const char* method : {"ListModels", "GetServerInfo", "GetSession", "CloseSession"}) {
    const Ended small = wire_->SendBytes(std::string("/attend.v1.Attention/") + method,
                                         {std::string(1048577, 'x')});
    ExpectError(small, grpc::INVALID_ARGUMENT, v1::TOO_LARGE, "request", "1048577");
  }
  const Ended tokens = wire_->Attend(Rows(513));
  ExpectError(tokens, grpc::INVALID_ARGUMENT, v1::TOO_LARGE, "sequences", "513");
  EXPECT_THAT(tokens.error.message, HasSubstr("512"));
  const Ended answer = Changed([](auto& r) { r.set_max_response_bytes(1000); });
  ExpectError(answer, grpc::INVALID_ARGUMENT, v1::TOO_LARGE, "output", "1024");
  EXPECT_THAT(answer.error.message, HasSubstr("1000"));
  v1::AttendRequest weights = Rows(100);
  weights.mutable_weights()->set_mode(v1::WeightsRequest::FULL);
  ExpectError(wire_->Attend(weights), grpc::INVALID_ARGUMENT, v1::TOO_LARGE, "weights",
              std::to_string(8 * 100 * 100 * 4 + 100 * 64 * 4));
  // Twice message_bytes: gRPC's own refusal.
  EXPECT_EQ(wire_->SendBytes(kAttendPath, {std::string((2 << 20) + 1, 'x')}).error.code,
            grpc::RESOURCE_EXHAUSTED);
}

TEST_F(ErrorsTest, AMessageLongerThanAnnouncedAndBytesThatAreNoMessageAreInvalid) {
  ExpectError(wire_->Attend(Rows(4), {.metadata = {{"attend-bytes", "100"}}}),
              grpc::INVALID_ARGUMENT, v1::INVALID_FIELD, "attend-bytes", "100");
  ExpectError(wire_->Attend(Rows(4), {.metadata = {{"attend-bytes", "-1"}}}),
              grpc::INVALID_ARGUMENT, v1::INVALID_FIELD, "attend-bytes", "-1");
  for (const char* method : {"Attend", "OpenSession", "GetSession", "ForkSession",
                             "TruncateSession", "CloseSession", "ListModels", "GetServerInfo"}) {
    SCOPED_TRACE(method);
    const std::string path = std::string("/attend.v1.Attention/") + method;
    const Ended garbage = wire_->SendBytes(path, {"\xff\xff\xff garbage"});
    EXPECT_EQ(garbage.error.code, grpc::INVALID_ARGUMENT) << garbage.error.ToString();
    EXPECT_EQ(garbage.error.reason, v1::INVALID_FIELD);
    ExpectError(wire_->SendBytes(path, {"", ""}), grpc::INVALID_ARGUMENT, v1::INVALID_FIELD,
                "request", "2 messages");
    ExpectError(wire_->SendBytes(path, {}), grpc::INVALID_ARGUMENT, v1::INVALID_FIELD, "request",
                "0 messages");
  }
}

TEST_F(ErrorsTest, UnknownModelsAndLayersAreNotFoundAndNamed) {
  ExpectError(Changed([](auto& r) { r.set_model("nope"); }), grpc::NOT_FOUND, v1::UNKNOWN_MODEL,
              "model", "nope");
  ExpectError(Changed([](auto& r) { r.set_layer("7"); }), grpc::NOT_FOUND, v1::UNKNOWN_LAYER,
              "layer", "7");
  ExpectError(Changed([](auto& r) { r.clear_model(); }), grpc::INVALID_ARGUMENT, v1::INVALID_FIELD,
              "model", "none");
  v1::OpenSessionRequest open;
  open.set_model("llama");
  open.add_layers("9");
  ExpectError(wire_->Open(open), grpc::NOT_FOUND, v1::UNKNOWN_LAYER, "layers", "9");
  EXPECT_EQ(wire_->SendBytes("/attend.v1.Attention/Nope", {""}).error.code, grpc::UNIMPLEMENTED);
  EXPECT_TRUE(server_->WaitForLog(R"(model=nope)"))
      << server_->log();  // the log names what was asked for
  EXPECT_TRUE(server_->WaitForLog(R"(layer=7)")) << server_->log();
}

TEST_F(ErrorsTest, APositionThatIsNotTheCachedOneIsRefusedWithTheCachedOne) {
  for (int64_t position : {0, 9, 11}) {
    const Ended ended = Changed([&](auto& r) { r.mutable_sequences(0)->set_position(position); });
    ExpectError(ended, grpc::FAILED_PRECONDITION, v1::POSITION_MISMATCH, "sequences[0].position",
                std::to_string(position));
    EXPECT_EQ(ended.error.cached, 10);
    EXPECT_THAT(ended.error.sequences, ElementsAre(0));
  }
}

TEST_F(ErrorsTest, AllOffendingSessionsOfARequestAreListedAndNoneIsAppended) {
  const std::string other = Open("llama");
  const Ended ended = Changed([&](auto& r) {
    r.mutable_sequences(0)->set_length(1);
    for (const std::string& id :
         {other, std::string("nobody.1.00000000000000000000000000000000")}) {
      v1::Sequence& sequence = *r.add_sequences();
      sequence.set_length(1);
      sequence.set_session_id(id);
      sequence.set_position(0);
    }
    SetTensor(Values(3), {3, kWidth}, r.mutable_hidden_states());
  });
  EXPECT_FALSE(ended.ok());
  EXPECT_THAT(ended.error.sequences, ElementsAre(2));
  EXPECT_EQ(wire_->Get(other).value.length(), 0);
  EXPECT_TRUE(wire_->Close(other).ok());
}

TEST_F(ErrorsTest, AnotherContextThanTheCachedOneIsAConflict) {
  constexpr int64_t kDecoder = 32;
  const std::string id = Open("decoder");
  const auto call = [&](int64_t context_rows) {
    v1::AttendRequest request =
        SessionRequest("decoder", "0.cross", kDecoder, Values(2, kDecoder), id, 0);
    request.mutable_sequences(0)->clear_position();
    if (context_rows > 0) {
      request.mutable_sequences(0)->set_context_length(context_rows);
      SetTensor(Values(context_rows, kDecoder), {context_rows, kDecoder},
                request.mutable_context());
    }
    return wire_->Attend(request);
  };
  ExpectError(call(0), grpc::FAILED_PRECONDITION, v1::CONTEXT_CONFLICT,
              "sequences[0].context_length", "no context");
  EXPECT_TRUE(call(5).ok());
  EXPECT_TRUE(call(5).ok());
  EXPECT_TRUE(call(0).ok());
  const Ended other = call(6);
  ExpectError(other, grpc::FAILED_PRECONDITION, v1::CONTEXT_CONFLICT, "sequences[0].context_length",
              "another");
  EXPECT_EQ(other.error.cached, 5);
  EXPECT_TRUE(wire_->Close(id).ok());
}

TEST_F(ErrorsTest, WhatIsNotBuiltIsUnsupportedByName) {
  const auto unsupported = [&](const std::string& field,
                               const std::function<void(v1::AttendRequest&)>& change) {
    ExpectError(Changed(change), grpc::UNIMPLEMENTED, v1::UNSUPPORTED, field, "");
  };
  unsupported("input", [](auto& r) { r.set_input(v1::RESIDUAL); });
  unsupported("return_lse", [](auto& r) { r.set_return_lse(true); });
  unsupported("return_head_outputs", [](auto& r) { r.set_return_head_outputs(true); });
  unsupported("head_scale", [](auto& r) { r.add_head_scale(1); });
  unsupported("rope_positions", [](auto& r) { r.add_rope_positions(1); });
  unsupported("weights.mode",
              [](auto& r) { r.mutable_weights()->set_mode(v1::WeightsRequest::TOP_K); });
}

TEST_F(ErrorsTest, ADeadlineThatPassesLeavesTheSessionAsItWas) {
  grpc::ClientContext context;
  WireClient::Prepare({}, context);
  const auto stream = wire_->stub().AttendStream(&context);
  v1::AttendRequest late = InSession(4, 10);
  late.set_timeout_us(1);
  late.set_request_id("late");
  ASSERT_TRUE(stream->Write(late));
  v1::AttendResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.request_id(), "late");
  EXPECT_EQ(response.error().code(), grpc::DEADLINE_EXCEEDED);
  v1::ErrorDetail detail;
  ASSERT_EQ(response.error().details_size(), 1);
  ASSERT_TRUE(response.error().details(0).UnpackTo(&detail));
  EXPECT_EQ(detail.reason(), v1::DEADLINE);
  stream->WritesDone();
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ErrorsTest, SessionsThatAreGoneSayWhy) {
  const std::string closed = Open("llama");
  EXPECT_TRUE(wire_->Close(closed).ok());
  ExpectError(wire_->Get(closed), grpc::NOT_FOUND, v1::SESSION_CLOSED, "session_id", closed);
  const std::string expired = Open("llama", 0, 1);
  Ended gone;
  ASSERT_TRUE(Eventually([&] {  // looking at a session is no use of it
    gone = wire_->Get(expired);
    return !gone.ok();
  }));
  ExpectError(gone, grpc::NOT_FOUND, v1::SESSION_EXPIRED, "session_id", expired);
  ExpectError(wire_->Get("nonsense"), grpc::NOT_FOUND, v1::SESSION_NOT_FOUND, "session_id",
              "nonsense");
  const Ended moved = wire_->Get("other-2.1.00000000000000000000000000000000");
  ExpectError(moved, grpc::FAILED_PRECONDITION, v1::SESSION_MOVED, "session_id", "other-2");
  EXPECT_EQ(moved.error.replica, "other-2");

  ServerProcess next({GoldenModelFlag("llama_gqa4", "llama")});  // the same replica, started again
  ASSERT_TRUE(next.WaitForServing()) << next.log();
  ExpectError(WireClient(next.address()).Attend(InSession(1, 10)), grpc::NOT_FOUND,
              v1::SESSION_LOST_IN_RESTART, "session_id", session_);
}

class SmallServerErrorsTest : public ErrorsTest {
 protected:
  SmallServerErrorsTest()
      : ErrorsTest({"--queue_requests=1", "--kv_bytes=128KiB", "--sessions=2"}) {}

  static void ExpectPushback(const Ended& ended) {
    EXPECT_GT(ended.error.retry_after.count(), 0);
    EXPECT_EQ(ended.pushback, std::to_string(ended.error.retry_after.count()));
  }
};

TEST_F(SmallServerErrorsTest, AFullQueueIsRefusedWithATimeToWait) {
  HeldCall held(*wire_, 10000);
  Ended refused;
  ASSERT_TRUE(Eventually([&] {
    refused = wire_->Attend(Rows(1));
    return !refused.ok();
  }));
  ExpectError(refused, grpc::RESOURCE_EXHAUSTED, v1::QUEUE_FULL, "queue_requests", "1 in use");
  ExpectPushback(refused);
  EXPECT_TRUE(held.Send(Rows(2)).ok());
  EXPECT_TRUE(wire_->Attend(Rows(1)).ok());
}

TEST_F(SmallServerErrorsTest, AnAppendTheCacheCannotTakeChangesNothing) {
  const Ended ended = wire_->Attend(InSession(1000, 10));
  ExpectError(ended, grpc::RESOURCE_EXHAUSTED, v1::KV_EXHAUSTED, "sequences[0]", "1000");
  ExpectPushback(ended);
  EXPECT_THAT(ended.error.message, HasSubstr("131072"));
}

TEST_F(SmallServerErrorsTest, QuotasOfTokensAndSessionsAreRefusedWithTheirNumbers) {
  const std::string second = Open("llama", 5);
  const Ended tokens = wire_->Attend(SessionRequest("llama", "0", kWidth, Values(6), second, 0));
  ExpectError(tokens, grpc::RESOURCE_EXHAUSTED, v1::QUOTA, "sequences[0].length", "6");
  EXPECT_THAT(tokens.error.message, HasSubstr("5"));
  EXPECT_TRUE(wire_->Attend(SessionRequest("llama", "0", kWidth, Values(5), second, 0)).ok());
  v1::OpenSessionRequest third;
  third.set_model("llama");
  const Ended sessions = wire_->Open(third);
  ExpectError(sessions, grpc::RESOURCE_EXHAUSTED, v1::QUOTA, "sessions", "2");
  ExpectPushback(sessions);
  ExpectError(wire_->Fork(session_), grpc::RESOURCE_EXHAUSTED, v1::QUOTA, "sessions", "2");
  EXPECT_TRUE(wire_->Close(second).ok());
}

TEST_F(SmallServerErrorsTest, ADrainingServerTakesNoNewWorkAndServesItsSessions) {
  server_->Signal(SIGTERM);
  ASSERT_TRUE(server_->WaitForLog(" draining "));
  Ended refused;
  ASSERT_TRUE(Eventually([&] {
    refused = wire_->Attend(Rows(1));
    return !refused.ok();
  }));
  ExpectError(refused, grpc::UNAVAILABLE, v1::DRAINING, "", "draining");
  v1::OpenSessionRequest open;
  open.set_model("llama");
  ExpectError(wire_->Open(open), grpc::UNAVAILABLE, v1::DRAINING, "", "draining");
  ExpectError(wire_->Fork(session_), grpc::UNAVAILABLE, v1::DRAINING, "", "draining");
  const auto info = wire_->Call(&v1::Attention::Stub::GetServerInfo, v1::GetServerInfoRequest());
  EXPECT_TRUE(info.value.draining());
  EXPECT_EQ(LookAhead(), next_output_);
  EXPECT_TRUE(wire_->Close(session_).ok());
  EXPECT_EQ(server_->WaitForExit(), 0);
  server_ = nullptr;
}

}  // namespace
}  // namespace attend
