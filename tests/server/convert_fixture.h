// SPDX-License-Identifier: Apache-2.0
//
// A model of four layers and requests to them, for the tests of convert: what must be accepted, and
// tables of edits that must be refused with field, got and wanted. Knows no engine and no server.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/util/error.h"
#include "server/convert.h"

namespace attend {

using Code = absl::StatusCode;
using Edit = std::function<void(v1::AttendRequest&)>;

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr int64_t kWidth = 8;
inline constexpr int64_t kContextWidth = 6;

inline LoadedLayer Layer(const std::string& name) {
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
inline LoadedModel Model(const std::string& name) {
  LoadedModel model;
  model.name = name;
  model.layers = {Layer("causal"), Layer("both"), Layer("plain"), Layer("cross")};
  model.layers[0].spec.causal = true;
  model.layers[2].spec.mask_selectable = true;
  model.layers[3].spec.cross = true;
  model.layers[3].spec.context_width = kContextWidth;
  return model;
}

inline v1::Tensor Tensor(v1::DType dtype, const std::vector<int64_t>& shape) {
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

inline v1::Tensor F32(const std::vector<int64_t>& shape) { return Tensor(v1::DTYPE_F32, shape); }
inline v1::Tensor F16(const std::vector<int64_t>& shape) { return Tensor(v1::DTYPE_F16, shape); }
inline v1::Tensor BF16(const std::vector<int64_t>& shape) { return Tensor(v1::DTYPE_BF16, shape); }

inline v1::Sequence Stateless(int64_t length) {
  v1::Sequence sequence;
  sequence.set_length(length);
  return sequence;
}
inline v1::Sequence Stateless(int64_t length, int64_t context_length) {
  v1::Sequence sequence = Stateless(length);
  sequence.set_context_length(context_length);
  return sequence;
}
inline v1::Sequence InSession(int64_t length, const std::string& id) {
  v1::Sequence sequence = Stateless(length);
  sequence.set_session_id(id);
  return sequence;
}
inline v1::Sequence InSession(int64_t length, const std::string& id, int64_t position) {
  v1::Sequence sequence = InSession(length, id);
  sequence.set_position(position);
  return sequence;
}

inline void SetSequences(v1::AttendRequest& request, const std::vector<v1::Sequence>& sequences) {
  request.clear_sequences();
  for (const v1::Sequence& sequence : sequences) *request.add_sequences() = sequence;
}

inline v1::AttendRequest Request(const std::string& layer, const v1::Tensor& hidden) {
  v1::AttendRequest request;
  request.set_layer(layer);
  *request.mutable_hidden_states() = hidden;
  return request;
}

inline v1::AttendRequest Raw(const std::vector<int64_t>& q, const std::vector<int64_t>& k,
                             const std::vector<int64_t>& v) {
  v1::AttendRequest request;
  v1::RawInput& raw = *request.mutable_raw();
  if (!q.empty()) *raw.mutable_q() = F16(q);
  if (!k.empty()) *raw.mutable_k() = F32(k);
  if (!v.empty()) *raw.mutable_v() = BF16(v);
  return request;
}

inline v1::ErrorDetail Detail(const absl::Status& status) {
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
    ReceivedAttend wire;
    if (absl::Status status = wire.Decode(EncodeMessage(request)); !status.ok()) return status;
    return ConvertAttend(context_, wire, admit);
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
    ToResponse(context_, accepted_, now_us, head_);
    auto response =
        ParseMessage<v1::AttendResponse>(EncodeAttendResponse(head_, OutputOf(accepted_)));
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
      EXPECT_THAT(detail.got(), testing::HasSubstr(bad.got));
      EXPECT_THAT(detail.wanted(), testing::HasSubstr(bad.wanted));
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
  v1::AttendResponse head_;
};

// Rows [begin, begin + count) of a tensor are where `rows` points to.
inline void ExpectRows(const InputRows& rows, const v1::Tensor& tensor, int64_t row_elements,
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

}  // namespace attend
