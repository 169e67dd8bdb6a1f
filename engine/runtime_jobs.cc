// SPDX-License-Identifier: Apache-2.0
//
// What a job of AttentionRuntime needs before its first batch: its layer and sessions, the checks
// against their state, memory for its answer and blocks for its keys. All or nothing, and nothing
// is computed here.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "engine/attention_runtime.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

// Adds an offending sequence to the collected error: the first one names code and message, others
// with the same code join its list.
void Collect(size_t index, const absl::Status& status, absl::Status& first,
             std::vector<int32_t>& sequences) {
  if (first.ok()) first = status;
  if (status.code() == first.code()) sequences.push_back(static_cast<int32_t>(index));
}

}  // namespace

absl::StatusOr<ResolvedJob> AttentionRuntime::Resolve(AttendJob& job,
                                                      std::span<ResolvedSequence> sequences) {
  ResolvedJob resolved;
  resolved.sequences = sequences;
  std::fill(sequences.begin(), sequences.end(), ResolvedSequence{});
  if (job.model >= 0) {
    const LoadedModel& model = models_[static_cast<size_t>(job.model)];
    const LoadedLayer& layer = model.layers[static_cast<size_t>(job.layer)];
    resolved.engine_layer = layer.engine.index;
    resolved.spec = job.cross && !layer.spec.cross ? &layer.cross_spec : &layer.spec;
    resolved.kv_dtype = model.kv_dtype;
  } else if (!job.raw_session) {
    resolved.spec = job.raw_spec.get();
  }
  absl::Status error;
  std::vector<int32_t> offending;
  for (size_t i = 0; i < job.sequences.size(); ++i) {
    const SequenceJob& sequence = job.sequences[i];
    if (sequence.session_id.empty()) continue;
    absl::StatusOr<Session*> session = table_.Find(sequence.session_id);
    if (!session.ok()) {
      Collect(i, session.status(), error, offending);
      continue;
    }
    if ((*session)->model != job.model) {
      const std::string field = "sequences[" + std::to_string(i) + "].session_id";
      const auto name = [&](int model) {
        return model < 0 ? std::string("raw") : models_[static_cast<size_t>(model)].name;
      };
      Collect(i,
              InvalidField(field, "a session of " + name((*session)->model),
                           "a session of " + name(job.model)),
              error, offending);
      continue;
    }
    const std::vector<int32_t>& layers = (*session)->model_layers;
    const auto place = std::find(layers.begin(), layers.end(), job.layer);
    if (place == layers.end()) {
      Collect(i,
              MakeError(absl::StatusCode::kNotFound,
                        {.reason = Reason::kUnknownLayer,
                         .field = "layer",
                         .got = std::string(job.layer_name),
                         .wanted = "one of the " + std::to_string(layers.size()) +
                                   " layers of the session"}),
              error, offending);
      continue;
    }
    (*session)->last_used_us = now_us_();
    sequences[i] = {*session, static_cast<int>(place - layers.begin())};
  }
  if (!error.ok()) return WithSequences(error, offending);
  if (job.raw_session) RETURN_IF_ERROR(ResolveRawSession(job, resolved));
  return resolved;
}

absl::Status AttentionRuntime::CheckSequence(const AttendJob& job, const ResolvedJob& resolved,
                                             size_t index) {
  const SequenceJob& sequence = job.sequences[index];
  const auto field = [&](const char* part) {
    return "sequences[" + std::to_string(index) + "]" + part;
  };
  const Session* session = resolved.sequences[index].session;
  if (session == nullptr) {
    if (cache_.FitsScratch(resolved.geometry(), sequence.keys)) return absl::OkStatus();
    return MakeError(
        absl::StatusCode::kInvalidArgument,
        {.reason = Reason::kTooLarge,
         .field = field(""),
         .got = std::to_string(sequence.keys) + " keys of " +
                std::to_string(resolved.geometry().TokenBytes()) + " bytes",
         .wanted = "at most " + std::to_string(cache_.scratch_capacity_bytes() / 8 * 7) +
                   " bytes of stateless keys and values"});
  }
  const auto place = static_cast<size_t>(resolved.sequences[index].place);
  if (resolved.spec->cross) {
    const KvContext& context = session->history.context[place];
    const auto conflict = [&](const char* got, const char* wanted) {
      return MakeError(absl::StatusCode::kFailedPrecondition, {.reason = Reason::kContextConflict,
                                                               .field = field(".context_length"),
                                                               .got = got,
                                                               .wanted = wanted,
                                                               .cached = context.length});
    };
    if (!context.present && !sequence.has_keys) {
      return conflict("no context", "the context with the first call of this session and layer");
    }
    if (context.present && sequence.has_keys && context.hash != sequence.context_hash) {
      return conflict("another context than the cached one", "the same context, or none");
    }
    return absl::OkStatus();
  }
  const int64_t cached = session->history.length[place];
  const int64_t position = sequence.position.value_or(cached);
  if (position > cached || (position < cached && !sequence.rewind)) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition,
        {.reason = Reason::kPositionMismatch,
         .field = field(".position"),
         .got = std::to_string(position),
         .wanted = std::to_string(cached) + ", the tokens layer " + std::string(job.layer_name) +
                   " has cached" + (position < cached ? " (or rewind)" : ""),
         .cached = cached});
  }
  if (session->max_tokens > 0 && !sequence.no_append &&
      position + sequence.keys > session->max_tokens) {
    return MakeError(absl::StatusCode::kResourceExhausted,
                     {.reason = Reason::kQuota,
                      .field = field(".length"),
                      .got = std::to_string(position + sequence.keys) + " tokens",
                      .wanted = "at most max_tokens " + std::to_string(session->max_tokens)});
  }
  return absl::OkStatus();
}

absl::Status AttentionRuntime::PrepareAnswer(AttendJob& job, const ResolvedJob& resolved) {
  const AttentionSpec& spec = *resolved.spec;
  job.output_width = spec.raw() ? int64_t{spec.q_heads} * spec.v_head_dim : spec.output_width;
  const int64_t output_bytes = job.output_rows * job.output_width * DTypeBytes(job.output_dtype);
  int64_t bytes = output_bytes;
  if (job.weights.full && job.weights.heads.empty()) {
    job.weights.heads.resize(static_cast<size_t>(spec.q_heads));
    std::iota(job.weights.heads.begin(), job.weights.heads.end(), 0);
  }
  int64_t query_rows = 0;
  for (size_t i = 0; i < job.sequences.size(); ++i) {
    SequenceJob& sequence = job.sequences[i];
    query_rows += sequence.rows;
    if (!job.weights.full) continue;
    const int64_t end = std::min(job.weights.row_end.value_or(sequence.rows), sequence.rows);
    sequence.weight_heads = static_cast<int64_t>(job.weights.heads.size());
    sequence.weight_rows = std::max<int64_t>(0, end - job.weights.row_begin);
    sequence.weight_keys = sequence.cached_before + sequence.keys;
    bytes += sequence.weight_heads * sequence.weight_rows * sequence.weight_keys * 4;
  }
  if (bytes > job.response_bytes_limit) {
    return MakeError(absl::StatusCode::kInvalidArgument,
                     {.reason = Reason::kTooLarge,
                      .field = job.weights.full ? "weights" : "output",
                      .got = "an answer of " + std::to_string(bytes) + " bytes",
                      .wanted = "at most " + std::to_string(job.response_bytes_limit)});
  }
  job.output = buffers_->Get(output_bytes);
  if (query_rows < job.output_rows) {
    std::memset(job.output.data.get(), 0, static_cast<size_t>(output_bytes));
  }
  for (SequenceJob& sequence : job.sequences) {
    if (!job.weights.full) break;
    const int64_t count = sequence.weight_heads * sequence.weight_rows * sequence.weight_keys;
    sequence.weights = buffers_->Get(count * 4);
    std::memset(sequence.weights.data.get(), 0, static_cast<size_t>(count * 4));
  }
  return absl::OkStatus();
}

absl::Status AttentionRuntime::ReserveSequence(AttendJob& job, const ResolvedJob& resolved,
                                               size_t index) {
  SequenceJob& sequence = job.sequences[index];
  Session* session = resolved.sequences[index].session;
  if (session == nullptr) return absl::OkStatus();  // scratch is taken when its first chunk runs
  KvHistory& history = session->history;
  const int place = resolved.sequences[index].place;
  const auto reserve = [&] {
    if (resolved.spec->cross) {
      if (!sequence.has_keys) return KvCache::Outcome::kOk;
      return cache_.ReserveContext(history, place, sequence.keys, sequence.context_hash,
                                   sequence.reservation);
    }
    const int64_t position = sequence.cached_before;
    return sequence.no_append ? cache_.ReserveLookAhead(history, place, position, sequence.keys,
                                                        sequence.reservation)
                              : cache_.ReserveAppend(history, place, position, sequence.keys,
                                                     sequence.reservation);
  };
  KvCache::Outcome outcome = reserve();
  if (outcome == KvCache::Outcome::kKvExhausted) {
    ExpireSessions();
    outcome = reserve();
  }
  if (outcome == KvCache::Outcome::kOk) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted,
                   {.reason = Reason::kKvExhausted,
                    .field = "sequences[" + std::to_string(index) + "]",
                    .got = std::to_string(sequence.keys) + " more tokens with " +
                           std::to_string(cache_.arena().used_bytes()) + " of " +
                           std::to_string(cache_.arena().capacity_bytes()) + " cache bytes in use",
                    .wanted = "a block of " + std::to_string(history.layout->block_bytes) +
                              " bytes for every 64 tokens",
                    .sequences = {static_cast<int32_t>(index)},
                    .retry_after_ms = 1000});
}

absl::Status AttentionRuntime::Begin(AttendJob& job, const ResolvedJob& resolved) {
  absl::Status error;
  std::vector<int32_t> offending;
  for (size_t i = 0; i < job.sequences.size(); ++i) {
    if (absl::Status status = CheckSequence(job, resolved, i); !status.ok()) {
      Collect(i, status, error, offending);
    }
  }
  if (!error.ok()) return WithSequences(error, offending);
  for (size_t i = 0; i < job.sequences.size(); ++i) {
    SequenceJob& sequence = job.sequences[i];
    const Session* session = resolved.sequences[i].session;
    sequence.cached_before = 0;
    if (session == nullptr) continue;
    const auto place = static_cast<size_t>(resolved.sequences[i].place);
    if (resolved.spec->cross) {
      const KvContext& context = session->history.context[place];
      if (!context.present) continue;
      sequence.cached_before = context.length;
      sequence.has_keys = false;  // equal to the cached one: not computed again
      sequence.keys = 0;
    } else {
      sequence.cached_before = sequence.position.value_or(session->history.length[place]);
    }
  }
  RETURN_IF_ERROR(PrepareAnswer(job, resolved));
  for (size_t i = 0; i < job.sequences.size(); ++i) {
    absl::Status status = ReserveSequence(job, resolved, i);
    if (!status.ok()) {
      Abandon(job);
      return status;
    }
  }
  job.started = true;
  return absl::OkStatus();
}

}  // namespace attend
