// SPDX-License-Identifier: Apache-2.0
//
// What the conversions of model requests (convert.cc) and raw requests (convert_raw.cc) share:
// checked tensors, rules of one sequence, error lists, and the last step from a draft to a job.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "engine/util/error.h"
#include "engine/util/text.h"
#include "server/convert.h"

namespace attend {

// A request tensor whose dtype, shape and bytes agree.
struct RequestTensor {
  bool present = false;
  const char* field = "";
  DataRange data;
  DType dtype = DType::kUnspecified;
  Shape shape;
  int64_t row_bytes = 0;  // set once the widths are checked
};

// A request on its way: the job with everything but pointers, and where the pointers will point to.
struct Draft {
  std::shared_ptr<AttendJob> job;
  RequestTensor query;   // hidden states, or raw q
  RequestTensor keys;    // context, or raw k; absent in self-attention
  RequestTensor values;  // raw v
  int64_t q_heads = 0;   // 0 = only the session knows
  Shape output_shape;
};

absl::StatusOr<Draft> DraftModelRequest(const ConvertContext& context,
                                        const ReceivedAttend& request);
absl::StatusOr<Draft> DraftRawRequest(const ConvertContext& context, const ReceivedAttend& request);

// Index of the named model; an empty name is the only loaded one.
absl::StatusOr<int> FindModel(const std::vector<LoadedModel>& models, const std::string& name);

// A tensor as received.
struct TensorSource {
  const char* field;  // "hidden_states", "raw.k", ...
  bool present;
  const v1::Tensor& tensor;
  DataRange data;
};

// Text for an error, made when there is one.
using Text = absl::FunctionRef<std::string()>;

// Checks dtype, ranks, dimensions and bytes; `wanted` describes the shapes allowed. An absent
// tensor is not an error.
absl::StatusOr<RequestTensor> CheckTensor(const TensorSource& source, size_t min_rank,
                                          size_t max_rank, Text wanted);
// INVALID_ARGUMENT for a tensor of the wrong shape.
absl::Status ShapeError(const std::string& field, std::span<const int64_t> shape,
                        const std::string& wanted);

// The text in quotes, long ones cut (at a character's boundary: details are UTF-8).
std::string Quoted(const std::string& text);
// "F32"; the number of an unknown one.
std::string DTypeText(int dtype);
// "sequences[2].position"
std::string SequenceField(size_t index, const char* name);
absl::Status TooLarge(const std::string& field, const std::string& got, const std::string& wanted);

// Collects the errors of a request's sequences: the first one names the error, those with the same
// code join its list.
class SequenceErrors {
 public:
  void Add(size_t index, const absl::Status& status);
  absl::Status Get() const { return first_.ok() ? first_ : WithSequences(first_, sequences_); }

 private:
  absl::Status first_;
  std::vector<int32_t> sequences_;
};

// 0 <= value <= limit.
absl::Status CheckRows(size_t index, const char* name, int64_t value, int64_t limit,
                       const char* tensor);

// position, rewind and no_append of one sequence.
enum class PositionRule : uint8_t { kRequired, kOptional, kRefused };
absl::Status CheckPosition(const v1::Sequence& sequence, size_t index, PositionRule in_session);

// The sequences a request lists, or `count` times the whole one.
class SequenceList {
 public:
  SequenceList(const v1::AttendRequest& request, int64_t count, int64_t length,
               std::optional<int64_t> context_length);
  size_t size() const { return count_; }
  const v1::Sequence& operator[](size_t index) const {
    return listed_.empty() ? whole_ : listed_[static_cast<int>(index)];
  }

 private:
  const google::protobuf::RepeatedPtrField<v1::Sequence>& listed_;
  size_t count_;
  v1::Sequence whole_;
};

// Rows, session and position as the (checked) wire sequence has them; keys and places are the
// caller's.
void BeginSequence(const v1::Sequence& sequence, SequenceJob& begun);

// No session may be named twice.
absl::Status CheckSessionsDiffer(std::span<const SequenceJob> sequences);

// The rows of a packed tensor are used up exactly. `lengths` names the field that was added up.
absl::Status CheckSum(const char* lengths, int64_t sum, int64_t rows, const char* tensor);

// Rows of a tensor for one sequence after another.
class RowCursor {
 public:
  // slot_rows < 0: packed.
  explicit RowCursor(int64_t slot_rows) : slot_rows_(slot_rows) {}
  int64_t Take(size_t index, int64_t rows) {
    if (slot_rows_ >= 0) return static_cast<int64_t>(index) * slot_rows_;
    next_ += rows;
    return next_ - rows;
  }
  int64_t taken() const { return next_; }

 private:
  int64_t slot_rows_;
  int64_t next_ = 0;
};

// Bias, weights, limits; then one copy of the tensors, and the pointers into it.
absl::StatusOr<ConvertedAttend> CompleteDraft(const ConvertContext& context,
                                              const ReceivedAttend& request, Draft draft,
                                              const Admit& admit);

}  // namespace attend
