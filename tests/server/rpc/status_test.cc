// SPDX-License-Identifier: Apache-2.0
//
// How errors are cut and cleaned for the wire.
#include "server/rpc/status.h"

#include <gtest/gtest.h>

#include <string>

#include "engine/util/error.h"
#include "engine/util/text.h"

namespace attend {
namespace {

v1::ErrorDetail DetailOf(const v1::Status& status) {
  v1::ErrorDetail detail;
  EXPECT_EQ(status.details_size(), 1);
  EXPECT_EQ(status.details(0).type_url(), "type.googleapis.com/attend.v1.ErrorDetail");
  EXPECT_TRUE(status.details(0).UnpackTo(&detail));
  return detail;
}

TEST(StatusTest, AnErrorKeepsCodeMessageAndDetail) {
  const v1::Status wire = ToWireStatus(InvalidField("layer", "9", "0..5"));
  EXPECT_EQ(wire.code(), 3);
  EXPECT_EQ(wire.message(), "layer: got 9, wanted 0..5");
  EXPECT_EQ(DetailOf(wire).reason(), v1::INVALID_FIELD);
  EXPECT_EQ(DetailOf(wire).wanted(), "0..5");
}

TEST(StatusTest, AForeignErrorHasNoDetail) {
  EXPECT_EQ(ToWireStatus(absl::InternalError("oops")).details_size(), 0);
}

TEST(StatusTest, TheLongestErrorFitsIntoAClientsMetadata) {
  ErrorDetail detail = {.reason = Reason::kInvalidField, .retry_after_ms = 1 << 30};
  detail.field = detail.got = detail.wanted = detail.replica = std::string(100'000, '\x01');
  for (int i = 0; i < 60'000; ++i) detail.sequences.push_back(1'000'000 + i);
  const grpc::Status status = ToGrpcStatus(MakeError(absl::StatusCode::kResourceExhausted, detail));
  const size_t percent_encoded = 3 * status.error_message().size();
  const size_t base64 = (status.error_details().size() + 2) / 3 * 4;
  EXPECT_LT(percent_encoded + base64 + 5 * 64, 8192u);
  v1::Status wire;
  ASSERT_TRUE(wire.ParseFromString(status.error_details()));
  EXPECT_GE(DetailOf(wire).sequences_size(), 500);
  EXPECT_EQ(DetailOf(wire).retry_after_ms(), 1 << 30);
}

TEST(StatusTest, TextIsAlwaysUtf8AndCutBetweenCharacters) {
  EXPECT_EQ(CleanText("a\xff z\xc3\xa4", 100), "a? z\xc3\xa4");
  EXPECT_EQ(CleanText("\xc3\xa4\xc3\xa4", 3), "\xc3\xa4");
  EXPECT_EQ(CleanText("\xe2\x82", 100), "??");
  EXPECT_EQ(CleanText("\xed\xa0\x80", 100), "???");
  EXPECT_EQ(CleanText("\xf0\x9f\x98\x80", 4), "\xf0\x9f\x98\x80");
  const v1::Status wire = ToWireStatus(InvalidField("model", "\xff\xfe", "a name"));
  EXPECT_EQ(wire.message(), "model: got ??, wanted a name");
  EXPECT_EQ(DetailOf(wire).got(), "??");
  EXPECT_EQ(DetailOf(wire).reason(), v1::INVALID_FIELD);
}

}  // namespace
}  // namespace attend
