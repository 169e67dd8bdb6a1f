// SPDX-License-Identifier: Apache-2.0
//
// Attend requests on layers of loaded models, and what all Attend requests have in common.
#include "server/convert.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/util/status_macros.h"
#include "server/convert_draft.h"

namespace attend {
namespace {

// The id is echoed and logged: this is far above any trace or UUID, and keeps answers small.
constexpr size_t kMaxRequestIdBytes = 1024;
constexpr size_t kShownNames = 8;

// "a, b, c" with the first few of many names.
template <typename Items>
std::string NameList(const Items& items) {
  std::string text;
  for (size_t i = 0; i < std::min(items.size(), kShownNames); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", items[i].name);
  }
  if (items.size() > kShownNames) {
    absl::StrAppend(&text, ", ... ", items.back().name, " (", items.size(), ")");
  }
  return text;
}

absl::StatusOr<int> FindLayer(const LoadedModel& model, const std::string& name) {
  for (size_t i = 0; i < model.layers.size(); ++i) {
    if (model.layers[i].name == name) return static_cast<int>(i);
  }
  return MakeError(absl::StatusCode::kNotFound,
                   {.reason = Reason::kUnknownLayer,
                    .field = "layer",
                    .got = Quoted(name),
                    .wanted = "a layer of " + model.name + ": " + NameList(model.layers)});
}

// Enum values this server does not know are refused rather than taken for their default.
absl::Status CheckEnums(const v1::AttendRequest& request) {
  const auto unknown = [](const char* field, int value, const char* wanted) {
    return InvalidField(field, absl::StrCat(value), wanted);
  };
  if (!v1::Mask_IsValid(request.mask())) {
    return unknown("mask", request.mask(), "MASK_FROM_MODEL, MASK_CAUSAL or MASK_BIDIRECTIONAL");
  }
  if (!v1::InputPoint_IsValid(request.input())) {
    return unknown("input", request.input(), "MODULE_INPUT or RESIDUAL");
  }
  if (!v1::WeightsRequest_Mode_IsValid(request.weights().mode())) {
    return unknown("weights.mode", request.weights().mode(), "NONE, FULL, TOP_K or STATS");
  }
  const int dtype = request.output_dtype();
  if (dtype != v1::DTYPE_UNSPECIFIED && !IsFloat(static_cast<DType>(dtype))) {
    return InvalidField("output_dtype", DTypeText(dtype), "F32, F16, BF16 or unspecified");
  }
  return absl::OkStatus();
}

absl::Status CheckSupported(const v1::AttendRequest& request) {
  if (request.input() == v1::RESIDUAL) return Unsupported("input", "RESIDUAL");
  if (request.weights().mode() == v1::WeightsRequest::TOP_K) {
    return Unsupported("weights.mode", "TOP_K");
  }
  if (request.weights().mode() == v1::WeightsRequest::STATS) {
    return Unsupported("weights.mode", "STATS");
  }
  if (request.return_lse()) return Unsupported("return_lse", "returning lse");
  if (request.return_head_outputs()) {
    return Unsupported("return_head_outputs", "returning the heads' outputs");
  }
  if (request.head_scale_size() > 0) return Unsupported("head_scale", "scaling heads");
  if (request.rope_positions_size() > 0) {
    return Unsupported("rope_positions", "giving positions of rows");
  }
  return absl::OkStatus();
}

absl::Status CheckNumbers(const ConvertContext& context, const v1::AttendRequest& request) {
  const auto negative = [](const char* field, int64_t value) {
    return value >= 0 ? absl::OkStatus() : InvalidField(field, absl::StrCat(value), "0 or more");
  };
  RETURN_IF_ERROR(negative("max_response_bytes", request.max_response_bytes()));
  RETURN_IF_ERROR(negative("timeout_us", request.timeout_us()));
  if (request.request_id().size() > kMaxRequestIdBytes) {
    return InvalidField("request_id", absl::StrCat(request.request_id().size(), " bytes"),
                        absl::StrCat("at most ", kMaxRequestIdBytes));
  }
  // Sequences of no rows cost memory, too.
  if (request.sequences_size() > context.request_tokens) {
    return TooLarge("sequences", absl::StrCat(request.sequences_size(), " sequences"),
                    absl::StrCat("at most request_tokens ", context.request_tokens));
  }
  return absl::OkStatus();
}

// The layer a request runs, and how.
struct Target {
  const LoadedModel* model = nullptr;
  const LoadedLayer* layer = nullptr;
  int model_index = 0;
  int layer_index = 0;
  bool cross = false;
  bool causal = false;
};

// A plain module given a context is cross-attention. So is one in sessions that asks neither for
// MASK_CAUSAL nor for a position: it uses the context the session has.
bool IsCross(const v1::AttendRequest& request, const AttentionSpec& spec) {
  if (spec.cross) return true;
  if (!spec.mask_selectable) return false;
  bool session = false;
  bool positioned = false;
  for (const v1::Sequence& sequence : request.sequences()) {
    if (sequence.has_context_length()) return true;
    session |= !sequence.session_id().empty();
    positioned |= sequence.has_position() || sequence.rewind() || sequence.no_append();
  }
  return request.has_context() || (session && !positioned && request.mask() != v1::MASK_CAUSAL);
}

absl::StatusOr<Target> FindTarget(const ConvertContext& context, const v1::AttendRequest& request) {
  Target target;
  ASSIGN_OR_RETURN(target.model_index, FindModel(*context.models, request.model()));
  target.model = &(*context.models)[static_cast<size_t>(target.model_index)];
  ASSIGN_OR_RETURN(target.layer_index, FindLayer(*target.model, request.layer()));
  target.layer = &target.model->layers[static_cast<size_t>(target.layer_index)];
  const AttentionSpec& spec = target.layer->spec;
  target.cross = IsCross(request, spec);
  target.causal = spec.causal && !target.cross;
  const auto refused = [&](const char* got, const char* what) {
    return InvalidField("mask", got,
                        absl::StrCat("MASK_FROM_MODEL: layer ", target.layer->name, " ", what));
  };
  if (request.mask() == v1::MASK_CAUSAL && !target.causal) {
    if (target.cross) return refused("MASK_CAUSAL", "attends to a context");
    if (!spec.mask_selectable) return refused("MASK_CAUSAL", "is bidirectional");
    target.causal = true;
  }
  if (request.mask() == v1::MASK_BIDIRECTIONAL && target.causal) {
    if (!spec.mask_selectable) return refused("MASK_BIDIRECTIONAL", "is causal");
    target.causal = false;
  }
  if (!target.cross && request.has_context()) {
    return InvalidField("context", "a context",
                        absl::StrCat("none: layer ", target.layer->name,
                                     " is neither cross-attention nor mask_selectable"));
  }
  return target;
}

absl::StatusOr<RequestTensor> CheckHiddenStates(const ReceivedAttend& request,
                                                const AttentionSpec& spec) {
  const auto wanted = [&] {
    return absl::StrCat("[tokens, ", spec.d_model, "] or [batch, tokens, ", spec.d_model, "]");
  };
  ASSIGN_OR_RETURN(RequestTensor hidden,
                   CheckTensor({"hidden_states", request.request.has_hidden_states(),
                                request.request.hidden_states(), request.hidden_states},
                               2, 3, wanted));
  if (!hidden.present) return InvalidField("hidden_states", "none", wanted());
  if (hidden.shape.back() != spec.d_model) {
    return ShapeError("hidden_states.shape", hidden.shape, wanted());
  }
  hidden.row_bytes = spec.d_model * DTypeBytes(hidden.dtype);
  return hidden;
}

// `sequences`: how many there are; the context is padded to one slot each, or packed.
absl::StatusOr<RequestTensor> CheckContext(const ReceivedAttend& request, const AttentionSpec& spec,
                                           int64_t sequences) {
  const bool listed = request.request.sequences_size() > 0;
  const bool packed = listed || sequences == 1;
  const auto wanted = [&] {
    return absl::StrCat(
        packed ? absl::StrCat("[rows, ", spec.context_width, "] or ") : std::string(), "[",
        sequences, ", rows, ", spec.context_width, "]");
  };
  ASSIGN_OR_RETURN(RequestTensor context, CheckTensor({"context", request.request.has_context(),
                                                       request.request.context(), request.context},
                                                      2, 3, wanted));
  if (!context.present) {
    if (listed || sequences == 0) return context;
    return InvalidField("context", "none", wanted());
  }
  if (context.shape.back() != spec.context_width ||
      (context.shape.size() == 2 ? !packed : context.shape[0] != sequences)) {
    return ShapeError("context.shape", context.shape, wanted());
  }
  context.row_bytes = spec.context_width * DTypeBytes(context.dtype);
  return context;
}

absl::Status CheckModelSequence(const v1::Sequence& sequence, size_t index, const Target& target,
                                int64_t rows, int64_t context_rows) {
  RETURN_IF_ERROR(CheckRows(index, "length", sequence.length(), rows, "hidden_states"));
  const bool session = !sequence.session_id().empty();
  if (session && !target.cross && !target.causal) {
    const std::string field = SequenceField(index, "session_id");
    if (target.layer->spec.mask_selectable) {
      return InvalidField(field, "a session without MASK_CAUSAL",
                          "MASK_CAUSAL, or a context without position, rewind and no_append");
    }
    return InvalidField(
        field, "a session",
        absl::StrCat("none: layer ", target.layer->name, " is bidirectional and keeps no history"));
  }
  RETURN_IF_ERROR(CheckPosition(sequence, index,
                                target.cross ? PositionRule::kRefused : PositionRule::kRequired));
  const auto field = [&] { return SequenceField(index, "context_length"); };
  if (!target.cross) {
    if (!sequence.has_context_length()) return absl::OkStatus();
    return InvalidField(field(), absl::StrCat(sequence.context_length()),
                        absl::StrCat("unset: layer ", target.layer->name, " takes no context"));
  }
  if (!sequence.has_context_length()) {
    if (session) return absl::OkStatus();
    return InvalidField(field(), "none",
                        "the context rows of a sequence without session (0 = empty)");
  }
  return CheckRows(index, "context_length", sequence.context_length(), context_rows, "context");
}

absl::Status AddSequences(const Target& target, const SequenceList& sequences, Draft& draft) {
  const auto rows_of = [](const RequestTensor& tensor) {  // of the whole, or of a slot
    return tensor.present ? tensor.shape[tensor.shape.size() - 2] : 0;
  };
  const auto packed = [](const RequestTensor& tensor) { return tensor.shape.size() != 3; };
  SequenceErrors errors;
  for (size_t i = 0; i < sequences.size(); ++i) {
    errors.Add(
        i, CheckModelSequence(sequences[i], i, target, rows_of(draft.query), rows_of(draft.keys)));
  }
  RETURN_IF_ERROR(errors.Get());
  RowCursor rows(packed(draft.query) ? -1 : rows_of(draft.query));
  RowCursor keys(packed(draft.keys) ? -1 : rows_of(draft.keys));
  draft.job->sequences.reserve(sequences.size());
  for (size_t i = 0; i < sequences.size(); ++i) {
    const v1::Sequence& source = sequences[i];
    SequenceJob& sequence = draft.job->sequences.emplace_back();
    BeginSequence(source, sequence);
    sequence.has_keys = !target.cross || source.has_context_length();
    sequence.keys = target.cross ? source.context_length() : source.length();
    sequence.output_row = rows.Take(i, sequence.rows);
    sequence.key_row = target.cross ? keys.Take(i, sequence.keys) : sequence.output_row;
  }
  if (packed(draft.query)) {
    RETURN_IF_ERROR(CheckSum("length", rows.taken(), rows_of(draft.query), "hidden_states"));
  }
  if (packed(draft.keys)) {
    RETURN_IF_ERROR(CheckSum("context_length", keys.taken(), rows_of(draft.keys), "context"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<int> FindModel(const std::vector<LoadedModel>& models, const std::string& name) {
  if (name.empty() && models.size() == 1) return 0;
  for (size_t i = 0; i < models.size(); ++i) {
    if (models[i].name == name) return static_cast<int>(i);
  }
  if (name.empty() && !models.empty()) {
    return InvalidField("model", "none", "one of " + NameList(models));
  }
  return MakeError(
      absl::StatusCode::kNotFound,
      {.reason = Reason::kUnknownModel,
       .field = "model",
       .got = Quoted(name),
       .wanted = models.empty() ? "raw: no model is loaded" : "one of " + NameList(models)});
}

absl::StatusOr<Draft> DraftModelRequest(const ConvertContext& context,
                                        const ReceivedAttend& request) {
  const v1::AttendRequest& head = request.request;
  ASSIGN_OR_RETURN(const Target target, FindTarget(context, head));
  const AttentionSpec& spec = target.layer->spec;
  Draft draft;
  draft.q_heads = spec.q_heads;
  draft.job = MakeRecycled<AttendJob>();
  draft.job->model = target.model_index;
  draft.job->layer = target.layer_index;
  draft.job->layer_name = target.layer->name;
  draft.job->cross = target.cross;
  draft.job->causal = target.causal;

  ASSIGN_OR_RETURN(draft.query, CheckHiddenStates(request, spec));
  const Shape& shape = draft.query.shape;
  const bool padded = shape.size() == 3;
  const int64_t slots = padded ? shape[0] : 1;
  const int64_t count = head.sequences_size() > 0 ? head.sequences_size() : slots;
  if (count > context.request_tokens) {
    return TooLarge("hidden_states.shape", absl::StrCat(count, " sequences"),
                    absl::StrCat("at most request_tokens ", context.request_tokens));
  }
  if (padded && count != slots) {
    return InvalidField("sequences", absl::StrCat(count, " sequences"),
                        absl::StrCat(slots, ", the slots of hidden_states ", ShapeText(shape)));
  }
  if (target.cross) {
    ASSIGN_OR_RETURN(draft.keys, CheckContext(request, spec, count));
  }
  draft.job->output_rows = padded ? shape[0] * shape[1] : shape[0];
  draft.output_shape = shape;
  draft.output_shape.back() = spec.output_width;
  const int64_t rows = padded ? shape[1] : shape[0];
  std::optional<int64_t> context_rows;
  if (draft.keys.present) context_rows = draft.keys.shape[draft.keys.shape.size() - 2];
  RETURN_IF_ERROR(AddSequences(target, {head, count, rows, context_rows}, draft));
  return draft;
}

absl::StatusOr<ConvertedAttend> ConvertAttend(const ConvertContext& context,
                                              const ReceivedAttend& request, const Admit& admit) {
  const v1::AttendRequest& head = request.request;
  RETURN_IF_ERROR(CheckEnums(head));
  RETURN_IF_ERROR(CheckSupported(head));
  RETURN_IF_ERROR(CheckNumbers(context, head));
  ASSIGN_OR_RETURN(Draft draft, head.has_raw() ? DraftRawRequest(context, request)
                                               : DraftModelRequest(context, request));
  return CompleteDraft(context, request, std::move(draft), admit);
}

}  // namespace attend
