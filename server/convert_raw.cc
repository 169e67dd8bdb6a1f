// SPDX-License-Identifier: Apache-2.0
//
// Attention over queries, keys and values the caller projected: raw Attend requests, and raw
// sessions to open.
#include <charconv>
#include <cmath>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/util/status_macros.h"
#include "server/convert_draft.h"

namespace attend {
namespace {

// A row of more heads would be above 1 MiB even at head_dim 4; it bounds per-head tables.
constexpr int64_t kMaxHeads = 65536;
// The deepest published models have below 200 layers; it bounds a session's table of layers.
constexpr int64_t kMaxRawLayers = 4096;

absl::Status CheckRange(const std::string& field, int64_t got, int64_t low, int64_t high) {
  if (got >= low && got <= high) return absl::OkStatus();
  return InvalidField(field, absl::StrCat(got), absl::StrCat(low, " .. ", high));
}

absl::Status CheckGroups(const std::string& field, int64_t q_heads, int64_t kv_heads) {
  if (q_heads % kv_heads == 0) return absl::OkStatus();
  return InvalidField(field, absl::StrCat(kv_heads, " kv_heads"),
                      absl::StrCat("a divisor of ", q_heads, " q_heads"));
}

// One finite number per query head, or none.
absl::Status CheckPerHead(const char* field, const google::protobuf::RepeatedField<float>& values,
                          int64_t q_heads) {
  if (!values.empty() && values.size() != q_heads) {
    return InvalidField(field, absl::StrCat(values.size(), " values"),
                        absl::StrCat("none, or ", q_heads, ": one per query head"));
  }
  for (float value : values) {
    if (!std::isfinite(value)) return InvalidField(field, absl::StrCat(value), "finite values");
  }
  return absl::OkStatus();
}

// Moves options into `spec`, whose heads and widths are set.
absl::Status SetOptions(const v1::RawOptions& options, AttentionSpec& spec) {
  if (options.has_scale() && !std::isfinite(options.scale())) {
    return InvalidField("raw.options.scale", absl::StrCat(options.scale()), "a finite value");
  }
  if (options.window() < 0) {
    return InvalidField("raw.options.window", absl::StrCat(options.window()),
                        "0 (no window) or more");
  }
  if (!std::isfinite(options.softcap()) || options.softcap() < 0 ||
      (options.softcap() > 0 && options.softcap() < kMinSoftcap)) {
    return InvalidField("raw.options.softcap", absl::StrCat(options.softcap()),
                        "0 (off), or a finite value of at least 1e-30");
  }
  RETURN_IF_ERROR(CheckPerHead("raw.options.alibi_slopes", options.alibi_slopes(), spec.q_heads));
  RETURN_IF_ERROR(CheckPerHead("raw.options.sinks", options.sinks(), spec.q_heads));
  spec.causal = options.causal();
  spec.scale = options.has_scale() ? double{options.scale()} : 1.0 / std::sqrt(spec.head_dim);
  spec.window = options.window();
  spec.softcap = options.softcap();
  spec.alibi_slopes.assign(options.alibi_slopes().begin(), options.alibi_slopes().end());
  spec.sinks.assign(options.sinks().begin(), options.sinks().end());
  return Validate(spec);
}

struct RawTensors {
  RequestTensor q, k, v;
};

absl::StatusOr<RequestTensor> CheckRawTensor(const ConvertContext& context,
                                             const TensorSource& source, const char* wanted) {
  ASSIGN_OR_RETURN(RequestTensor tensor,
                   CheckTensor(source, 3, 3, [&] { return std::string(wanted); }));
  if (!tensor.present) return tensor;
  const auto field = [&] { return absl::StrCat(source.field, ".shape"); };
  if (tensor.shape[1] < 1 || tensor.shape[1] > kMaxHeads) {
    return ShapeError(field(), tensor.shape, absl::StrCat("1 .. ", kMaxHeads, " heads"));
  }
  if (tensor.shape[2] < 1 || tensor.shape[2] > context.max_head_dim) {
    return ShapeError(field(), tensor.shape, absl::StrCat("heads of 1 .. ", context.max_head_dim));
  }
  tensor.row_bytes = tensor.shape[1] * tensor.shape[2] * DTypeBytes(tensor.dtype);
  return tensor;
}

absl::StatusOr<RawTensors> CheckRawTensors(const ConvertContext& context,
                                           const ReceivedAttend& request, bool in_sessions) {
  RawTensors tensors;
  const v1::RawInput& raw = request.request.raw();
  ASSIGN_OR_RETURN(tensors.q,
                   CheckRawTensor(context, {"raw.q", raw.has_q(), raw.q(), request.raw_q},
                                  "[rows, q_heads, head_dim]"));
  ASSIGN_OR_RETURN(tensors.k,
                   CheckRawTensor(context, {"raw.k", raw.has_k(), raw.k(), request.raw_k},
                                  "[key rows, kv_heads, head_dim]"));
  ASSIGN_OR_RETURN(tensors.v,
                   CheckRawTensor(context, {"raw.v", raw.has_v(), raw.v(), request.raw_v},
                                  "[key rows, kv_heads, v_head_dim]"));
  const auto& [q, k, v] = tensors;
  for (const auto* tensor : {&q, &k, &v}) {
    if (!in_sessions && !tensor->present) {
      return InvalidField(tensor->field, "none", "a tensor (not in a session)");
    }
  }
  if (k.present != v.present) {
    return InvalidField(k.present ? v.field : k.field, "none", "both raw.k and raw.v, or neither");
  }
  if (!q.present && !k.present) {
    return InvalidField("raw", "no tensors", "q, or k and v, or all three");
  }
  if (k.present && (k.shape[0] != v.shape[0] || k.shape[1] != v.shape[1])) {
    return ShapeError("raw.v.shape", v.shape,
                      absl::StrCat("[", k.shape[0], ", ", k.shape[1], ", v_head_dim] as raw.k ",
                                   ShapeText(k.shape)));
  }
  if (q.present && k.present) {
    if (k.shape[2] != q.shape[2]) {
      return ShapeError("raw.k.shape", k.shape,
                        absl::StrCat("heads of ", q.shape[2], " as raw.q ", ShapeText(q.shape)));
    }
    RETURN_IF_ERROR(CheckGroups("raw.k.shape", q.shape[1], k.shape[1]));
  }
  return tensors;
}

// Layers of raw sessions are numbers; whether the session has that many only the runtime knows.
absl::StatusOr<int> ParseRawLayer(const std::string& name) {
  int layer = -1;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data(), end, layer);
  if (error == std::errc() && stop == end && layer >= 0 && name == std::to_string(layer)) {
    return layer;
  }
  return MakeError(absl::StatusCode::kNotFound,
                   {.reason = Reason::kUnknownLayer,
                    .field = "layer",
                    .got = Quoted(name),
                    .wanted = "a layer of a raw session: \"0\", \"1\", ..."});
}

absl::Status CheckRawOnly(const v1::AttendRequest& request, bool in_sessions) {
  if (!request.model().empty()) {
    return InvalidField("model", Quoted(request.model()), "none: raw is set");
  }
  if (request.has_hidden_states()) {
    return InvalidField("hidden_states", "a tensor", "none: raw is set");
  }
  if (request.has_context()) return InvalidField("context", "a tensor", "none: raw is set");
  if (request.mask() != v1::MASK_FROM_MODEL) {
    return InvalidField("mask", v1::Mask_Name(request.mask()),
                        "MASK_FROM_MODEL: raw.options.causal decides");
  }
  SequenceErrors errors;
  for (int i = 0; i < request.sequences_size(); ++i) {
    if (request.sequences(i).session_id().empty() != in_sessions) continue;
    const auto index = static_cast<size_t>(i);
    errors.Add(index, InvalidField(SequenceField(index, "session_id"), "none",
                                   "raw sequences all in sessions, or all without"));
  }
  RETURN_IF_ERROR(errors.Get());
  if (in_sessions && request.raw().has_options()) {
    return InvalidField("raw.options", "set", "unset: the session's RawLayout has them");
  }
  return absl::OkStatus();
}

absl::Status CheckRawSequence(const v1::Sequence& sequence, size_t index, const Draft& draft) {
  const RequestTensor& q = draft.query;
  const RequestTensor& k = draft.keys;
  RETURN_IF_ERROR(
      CheckRows(index, "length", sequence.length(), q.present ? q.shape[0] : 0, "raw.q"));
  RETURN_IF_ERROR(CheckPosition(sequence, index,
                                k.present ? PositionRule::kRequired : PositionRule::kOptional));
  if (!sequence.has_context_length() && !k.present) return absl::OkStatus();
  return CheckRows(index, "context_length",
                   sequence.has_context_length() ? sequence.context_length() : sequence.length(),
                   k.present ? k.shape[0] : 0, "raw.k");
}

absl::Status AddRawSequences(const v1::AttendRequest& request, Draft& draft) {
  const int64_t q_rows = draft.query.present ? draft.query.shape[0] : 0;
  const int64_t k_rows = draft.keys.present ? draft.keys.shape[0] : 0;
  const SequenceList sequences(request, 1, q_rows, k_rows);
  SequenceErrors errors;
  for (size_t i = 0; i < sequences.size(); ++i) {
    errors.Add(i, CheckRawSequence(sequences[i], i, draft));
  }
  RETURN_IF_ERROR(errors.Get());
  RowCursor rows(-1);
  RowCursor keys(-1);
  draft.job->sequences.reserve(sequences.size());
  for (size_t i = 0; i < sequences.size(); ++i) {
    const v1::Sequence& source = sequences[i];
    SequenceJob& sequence = draft.job->sequences.emplace_back();
    BeginSequence(source, sequence);
    sequence.has_keys = draft.keys.present;
    sequence.keys = !draft.keys.present           ? 0
                    : source.has_context_length() ? source.context_length()
                                                  : source.length();
    sequence.output_row = rows.Take(i, sequence.rows);
    sequence.key_row = keys.Take(i, sequence.keys);
  }
  RETURN_IF_ERROR(CheckSum("length", rows.taken(), q_rows, "raw.q"));
  return CheckSum("context_length", keys.taken(), k_rows, "raw.k");
}

absl::Status SetLayout(const ConvertContext& context, const v1::RawLayout& layout,
                       OpenSessionArguments& arguments) {
  RETURN_IF_ERROR(CheckRange("raw.layers", layout.layers(), 1, kMaxRawLayers));
  RETURN_IF_ERROR(CheckRange("raw.q_heads", layout.q_heads(), 1, kMaxHeads));
  RETURN_IF_ERROR(CheckRange("raw.kv_heads", layout.kv_heads(), 1, kMaxHeads));
  RETURN_IF_ERROR(CheckGroups("raw.kv_heads", layout.q_heads(), layout.kv_heads()));
  RETURN_IF_ERROR(CheckRange("raw.head_dim", layout.head_dim(), 1, context.max_head_dim));
  RETURN_IF_ERROR(CheckRange("raw.v_head_dim", layout.v_head_dim(), 0, context.max_head_dim));
  const int dtype = layout.kv_dtype();
  if (dtype != v1::DTYPE_UNSPECIFIED && dtype != v1::DTYPE_I8 &&
      !IsFloat(static_cast<DType>(dtype))) {
    return InvalidField(
        "raw.kv_dtype",
        v1::DType_IsValid(dtype) ? DTypeName(static_cast<DType>(dtype)) : absl::StrCat(dtype),
        "F32, BF16, F16, I8 or unspecified");
  }
  AttentionSpec& spec = arguments.raw_spec;
  spec.q_heads = layout.q_heads();
  spec.kv_heads = layout.kv_heads();
  spec.head_dim = layout.head_dim();
  spec.v_head_dim = layout.v_head_dim() == 0 ? layout.head_dim() : layout.v_head_dim();
  spec.output_width = spec.q_heads * spec.v_head_dim;
  arguments.raw_layers = layout.layers();
  arguments.raw_kv_dtype = dtype == v1::DTYPE_UNSPECIFIED ? DType::kF32 : static_cast<DType>(dtype);
  return SetOptions(layout.options(), spec);
}

}  // namespace

absl::StatusOr<Draft> DraftRawRequest(const ConvertContext& context,
                                      const ReceivedAttend& request) {
  const v1::AttendRequest& head = request.request;
  const bool in_sessions = head.sequences_size() > 0 && !head.sequences(0).session_id().empty();
  RETURN_IF_ERROR(CheckRawOnly(head, in_sessions));
  ASSIGN_OR_RETURN(RawTensors tensors, CheckRawTensors(context, request, in_sessions));
  Draft draft;
  draft.query = std::move(tensors.q);
  draft.keys = std::move(tensors.k);
  draft.values = std::move(tensors.v);

  // Dimensions of absent tensors are 0: only the session knows them.
  AttentionSpec spec;
  spec.q_heads = draft.query.present ? static_cast<int>(draft.query.shape[1]) : 0;
  spec.kv_heads = draft.keys.present ? static_cast<int>(draft.keys.shape[1]) : 0;
  const RequestTensor& keyed = draft.query.present ? draft.query : draft.keys;
  spec.head_dim = static_cast<int>(keyed.shape[2]);
  spec.v_head_dim = draft.values.present ? static_cast<int>(draft.values.shape[2]) : 0;
  spec.output_width = spec.q_heads * spec.v_head_dim;
  if (!in_sessions) RETURN_IF_ERROR(SetOptions(head.raw().options(), spec));

  draft.q_heads = spec.q_heads;
  draft.job = MakeRecycled<AttendJob>();
  draft.job->raw_session = in_sessions;
  draft.job->layer_name = in_sessions ? std::string_view(head.layer()) : "raw";
  if (in_sessions) {
    ASSIGN_OR_RETURN(draft.job->layer, ParseRawLayer(head.layer()));
  }
  draft.job->causal = spec.causal;
  draft.job->output_rows = draft.query.present ? draft.query.shape[0] : 0;
  draft.output_shape = {draft.job->output_rows, spec.q_heads > 0 ? spec.q_heads : -1,
                        spec.v_head_dim > 0 ? spec.v_head_dim : -1};
  draft.job->raw_spec = MakeRecycled<AttentionSpec>(std::move(spec));
  RETURN_IF_ERROR(AddRawSequences(head, draft));
  return draft;
}

absl::StatusOr<OpenSessionArguments> ConvertOpenSession(const ConvertContext& context,
                                                        const v1::OpenSessionRequest& request) {
  OpenSessionArguments arguments;
  if (request.has_raw()) {
    if (!request.model().empty()) {
      return InvalidField("model", Quoted(request.model()), "none: raw is set");
    }
    RETURN_IF_ERROR(SetLayout(context, request.raw(), arguments));
  } else {
    ASSIGN_OR_RETURN(arguments.model, FindModel(*context.models, request.model()));
  }
  arguments.layers.assign(request.layers().begin(), request.layers().end());
  arguments.ttl_seconds = request.ttl_seconds();
  arguments.max_tokens = request.max_tokens();
  return arguments;
}

}  // namespace attend
