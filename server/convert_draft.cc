// SPDX-License-Identifier: Apache-2.0
#include "server/convert_draft.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

constexpr size_t kShownCharacters = 64;
// Tensors begin on cache lines, as vector loads like it.
constexpr int64_t kTensorAlignment = 64;

int64_t Aligned(int64_t bytes) {
  return (bytes + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
}

// Keys the rows of a sequence see at most, this call's included; -1 = only the session knows.
int64_t TotalKeys(const AttendJob& job, const SequenceJob& sequence) {
  if (sequence.session_id.empty()) return sequence.keys;
  if (job.cross) return sequence.has_keys ? sequence.keys : -1;
  if (!sequence.position.has_value()) return -1;
  return *sequence.position > INT64_MAX - sequence.keys ? INT64_MAX
                                                        : *sequence.position + sequence.keys;
}

absl::StatusOr<RequestTensor> CheckBias(const ReceivedAttend& request, const Draft& draft) {
  if (!request.request.has_attention_bias()) return RequestTensor();
  AttendJob& job = *draft.job;
  int64_t rows = 0;
  int64_t keys = 0;
  for (const SequenceJob& sequence : job.sequences) {
    rows = std::max(rows, sequence.rows);
    const int64_t total = TotalKeys(job, sequence);
    keys = total < 0 || keys < 0 ? -1 : std::max(keys, total);
  }
  const auto count = static_cast<int64_t>(job.sequences.size());
  const auto wanted = [&] {
    return absl::StrCat("[1 or ", count, " sequences, 1 or ",
                        draft.q_heads == 0 ? std::string("q_heads") : absl::StrCat(draft.q_heads),
                        " heads, ", rows, " rows (the longest length), ",
                        keys < 0 ? std::string("keys") : absl::StrCat("0 .. ", keys, " keys"), "]");
  };
  ASSIGN_OR_RETURN(RequestTensor bias,
                   CheckTensor({"attention_bias", request.request.has_attention_bias(),
                                request.request.attention_bias(), request.attention_bias},
                               4, 4, wanted));
  if (bias.dtype != DType::kF32) {
    return InvalidField("attention_bias.dtype", DTypeName(bias.dtype), "F32");
  }
  const Shape& shape = bias.shape;
  if ((shape[0] != 1 && shape[0] != count) || (shape[1] != 1 && shape[1] != draft.q_heads) ||
      shape[2] != rows || (keys >= 0 && shape[3] > keys)) {
    return ShapeError("attention_bias.shape", shape, wanted());
  }
  job.bias_sequences = shape[0];
  job.bias_heads = shape[1];
  job.bias_rows = shape[2];
  job.bias_columns = shape[3];
  return bias;
}

absl::Status CheckWeights(const v1::WeightsRequest& request, const Draft& draft) {
  if (request.mode() != v1::WeightsRequest::FULL) return absl::OkStatus();
  WeightsWanted& wanted = draft.job->weights;
  wanted.full = true;
  wanted.heads.assign(request.heads().begin(), request.heads().end());
  std::unordered_set<int32_t> seen;
  for (int32_t head : wanted.heads) {
    if (head < 0 || (draft.q_heads > 0 && head >= draft.q_heads)) {
      return InvalidField(
          "weights.heads", absl::StrCat(head),
          draft.q_heads > 0 ? absl::StrCat("0 .. ", draft.q_heads - 1) : std::string("0 or more"));
    }
    if (!seen.insert(head).second) {
      return InvalidField("weights.heads", absl::StrCat(head, " twice"), "every head once");
    }
  }
  wanted.row_begin = request.row_begin();
  if (wanted.row_begin < 0) {
    return InvalidField("weights.row_begin", absl::StrCat(wanted.row_begin), "0 or more");
  }
  if (request.has_row_end()) {
    wanted.row_end = request.row_end();
    if (*wanted.row_end < wanted.row_begin) {
      return InvalidField("weights.row_end", absl::StrCat(*wanted.row_end),
                          absl::StrCat("row_begin ", wanted.row_begin, " or more"));
    }
  }
  return absl::OkStatus();
}

// The seed carries dtype and shape, so that equal bytes of another type or shape differ.
std::array<uint64_t, 2> HashContext(const InputRows& rows, int64_t count, int64_t row_bytes) {
  const int64_t head[] = {static_cast<int64_t>(rows.dtype), count, row_bytes};
  const XXH128_hash_t hash =
      XXH3_128bits_withSeed(count == 0 ? head : rows.data, static_cast<size_t>(count * row_bytes),
                            XXH3_64bits(head, sizeof(head)));
  return {hash.low64, hash.high64};
}

// Copies the tensors into one buffer and points every sequence at its rows.
void PlaceTensors(const ConvertContext& context, const ReceivedAttend& request,
                  const RequestTensor& bias, Draft& draft) {
  AttendJob& job = *draft.job;
  job.input =
      context.buffers->Get(Aligned(draft.query.data.bytes) + Aligned(draft.keys.data.bytes) +
                           Aligned(draft.values.data.bytes) + Aligned(bias.data.bytes));
  std::byte* next = job.input.data.get();
  const auto gather = [&](const RequestTensor& tensor) -> const std::byte* {
    if (!tensor.present) return nullptr;
    std::byte* begin = next;
    request.Gather(tensor.data, begin);
    next += Aligned(tensor.data.bytes);
    return begin;
  };
  const std::byte* query = gather(draft.query);
  const std::byte* keys = gather(draft.keys);
  const std::byte* values = gather(draft.values);
  job.bias = reinterpret_cast<const float*>(gather(bias));
  const auto rows = [](const RequestTensor& tensor, const std::byte* data, int64_t row) {
    return tensor.present ? InputRows{data + row * tensor.row_bytes, tensor.dtype} : InputRows{};
  };
  for (SequenceJob& sequence : job.sequences) {
    sequence.query = rows(draft.query, query, sequence.output_row);
    if (!sequence.has_keys) continue;
    if (!draft.values.present && !job.cross) {  // self-attention
      sequence.key_source = sequence.query;
      continue;
    }
    sequence.key_source = rows(draft.keys, keys, sequence.key_row);
    sequence.value_source = rows(draft.values, values, sequence.key_row);
    if (job.cross && !sequence.session_id.empty()) {
      sequence.context_hash = HashContext(sequence.key_source, sequence.keys, draft.keys.row_bytes);
    }
  }
}

}  // namespace

std::string Quoted(const std::string& text) {
  if (text.size() <= kShownCharacters) return absl::StrCat("\"", text, "\"");
  size_t end = kShownCharacters;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return absl::StrCat("\"", text.substr(0, end), "...\" (", text.size(), " bytes)");
}

std::string SequenceField(size_t index, const char* name) {
  return absl::StrCat("sequences[", index, "].", name);
}

std::string DTypeText(int dtype) {
  return v1::DType_IsValid(dtype) ? DTypeName(static_cast<DType>(dtype)) : absl::StrCat(dtype);
}

absl::Status TooLarge(const std::string& field, const std::string& got, const std::string& wanted) {
  return MakeError(absl::StatusCode::kInvalidArgument,
                   {.reason = Reason::kTooLarge, .field = field, .got = got, .wanted = wanted});
}

absl::Status ShapeError(const std::string& field, std::span<const int64_t> shape,
                        const std::string& wanted) {
  return InvalidField(field, ShapeText(shape), wanted);
}

absl::StatusOr<RequestTensor> CheckTensor(const TensorSource& source, size_t min_rank,
                                          size_t max_rank, Text wanted) {
  RequestTensor checked;
  checked.field = source.field;
  if (!source.present) return checked;
  const auto shape_field = [&] { return absl::StrCat(source.field, ".shape"); };
  const int dtype = source.tensor.dtype();
  if (dtype != v1::DTYPE_F32 && dtype != v1::DTYPE_F16 && dtype != v1::DTYPE_BF16) {
    return InvalidField(absl::StrCat(source.field, ".dtype"), DTypeText(dtype), "F32, F16 or BF16");
  }
  checked.dtype = static_cast<DType>(dtype);
  const std::span<const int64_t> shape(source.tensor.shape().data(),
                                       static_cast<size_t>(source.tensor.shape_size()));
  if (shape.size() < min_rank || shape.size() > max_rank) {
    return ShapeError(shape_field(), shape, wanted());
  }
  int64_t bytes = DTypeBytes(checked.dtype);
  for (int64_t dimension : shape) {
    if (dimension < 0) return ShapeError(shape_field(), shape, "dimensions of 0 or more");
    if (__builtin_mul_overflow(bytes, dimension, &bytes)) {
      return ShapeError(shape_field(), shape, "a product below 2^63 bytes");
    }
  }
  if (source.data.bytes != bytes) {
    return InvalidField(
        source.field, absl::StrCat(source.data.bytes, " bytes"),
        absl::StrCat(bytes, " = ", ShapeText(shape), " x ", DTypeBytes(checked.dtype), " bytes (",
                     DTypeName(checked.dtype), ")"));
  }
  checked.present = true;
  checked.shape.assign(shape.begin(), shape.end());
  checked.data = source.data;
  return checked;
}

void SequenceErrors::Add(size_t index, const absl::Status& status) {
  if (status.ok()) return;
  if (first_.ok()) first_ = status;
  if (status.code() == first_.code()) sequences_.push_back(static_cast<int32_t>(index));
}

absl::Status CheckRows(size_t index, const char* name, int64_t value, int64_t limit,
                       const char* tensor) {
  if (value >= 0 && value <= limit) return absl::OkStatus();
  return InvalidField(SequenceField(index, name), absl::StrCat(value),
                      absl::StrCat("0 .. ", limit, ", the rows of ", tensor));
}

absl::Status CheckPosition(const v1::Sequence& sequence, size_t index, PositionRule in_session) {
  const char* set = sequence.has_position() ? "position"
                    : sequence.rewind()     ? "rewind"
                    : sequence.no_append()  ? "no_append"
                                            : nullptr;
  if (sequence.session_id().empty()) {
    if (set == nullptr) return absl::OkStatus();
    return InvalidField(SequenceField(index, set), "set without session_id", "unset");
  }
  if (in_session == PositionRule::kRefused) {
    if (set == nullptr) return absl::OkStatus();
    return InvalidField(SequenceField(index, set), "set for cross-attention", "unset");
  }
  if (!sequence.has_position()) {
    if (in_session == PositionRule::kOptional && !sequence.rewind()) return absl::OkStatus();
    return InvalidField(SequenceField(index, "position"), "none",
                        "the number of tokens this layer has cached for the session");
  }
  if (sequence.position() < 0) {
    return InvalidField(SequenceField(index, "position"), absl::StrCat(sequence.position()),
                        "0 or more");
  }
  return absl::OkStatus();
}

SequenceList::SequenceList(const v1::AttendRequest& request, int64_t count, int64_t length,
                           std::optional<int64_t> context_length)
    : listed_(request.sequences()),
      count_(listed_.empty() ? static_cast<size_t>(count) : static_cast<size_t>(listed_.size())) {
  whole_.set_length(length);
  if (context_length.has_value()) whole_.set_context_length(*context_length);
}

void BeginSequence(const v1::Sequence& sequence, SequenceJob& begun) {
  begun.rows = sequence.length();
  begun.session_id = sequence.session_id();
  if (sequence.has_position()) begun.position = sequence.position();
  begun.rewind = sequence.rewind();
  begun.no_append = sequence.no_append();
}

absl::Status CheckSessionsDiffer(std::span<const SequenceJob> sequences) {
  if (sequences.size() < 2) return absl::OkStatus();
  if (std::none_of(sequences.begin(), sequences.end(),
                   [](const SequenceJob& sequence) { return !sequence.session_id.empty(); })) {
    return absl::OkStatus();
  }
  RecycledMap<std::string_view, int> count;
  for (const SequenceJob& sequence : sequences) ++count[sequence.session_id];
  SequenceErrors errors;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const int times = count[sequences[i].session_id];
    if (sequences[i].session_id.empty() || times == 1) continue;
    errors.Add(i, InvalidField(SequenceField(i, "session_id"),
                               absl::StrCat("a session named ", times, " times"),
                               "every session once per request"));
  }
  return errors.Get();
}

absl::Status CheckSum(const char* lengths, int64_t sum, int64_t rows, const char* tensor) {
  if (sum == rows) return absl::OkStatus();
  return InvalidField(absl::StrCat("sequences.", lengths), absl::StrCat("a sum of ", sum),
                      absl::StrCat(rows, ", the rows of ", tensor));
}

absl::StatusOr<ConvertedAttend> CompleteDraft(const ConvertContext& context,
                                              const ReceivedAttend& request, Draft draft,
                                              const Admit& admit) {
  const v1::AttendRequest& head = request.request;
  AttendJob& job = *draft.job;
  RETURN_IF_ERROR(CheckSessionsDiffer(job.sequences));
  ASSIGN_OR_RETURN(const RequestTensor bias, CheckBias(request, draft));
  RETURN_IF_ERROR(CheckWeights(head.weights(), draft));
  job.output_dtype = head.output_dtype() != v1::DTYPE_UNSPECIFIED
                         ? static_cast<DType>(head.output_dtype())
                     : draft.query.present ? draft.query.dtype
                                           : draft.keys.dtype;
  job.response_bytes_limit = head.max_response_bytes() > 0
                                 ? std::min(head.max_response_bytes(), context.response_bytes)
                                 : context.response_bytes;
  const int64_t tokens = job.tokens();
  if (tokens > context.request_tokens) {
    return TooLarge("sequences", absl::StrCat(tokens, " tokens"),
                    absl::StrCat("at most request_tokens ", context.request_tokens));
  }
  if (admit) RETURN_IF_ERROR(admit(tokens));
  PlaceTensors(context, request, bias, draft);
  return ConvertedAttend{.job = std::move(draft.job),
                         .request_id = RecycledString(head.request_id()),
                         .timeout_us = head.timeout_us(),
                         .output_shape = std::move(draft.output_shape)};
}

}  // namespace attend
