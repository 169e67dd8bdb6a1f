// SPDX-License-Identifier: Apache-2.0
//
// The session calls of AttentionRuntime and what its batches check about sessions.
#include <algorithm>
#include <utility>

#include "engine/attention_runtime.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

constexpr int64_t kSecondUs = 1000000;

absl::Status LengthError(int64_t length, int64_t longest) {
  return InvalidField("length", std::to_string(length),
                      "0 .. " + std::to_string(longest) + ", the session's longest layer");
}

}  // namespace

// A raw request in sessions: all sessions share one layout, and the tensors fit it.
absl::Status AttentionRuntime::ResolveRawSession(const AttendJob& job, ResolvedJob& resolved) {
  const Session& first = *resolved.sequences[0].session;
  const KvGeometry geometry = first.history.layout->layers[0].geometry;
  for (size_t i = 1; i < resolved.sequences.size(); ++i) {
    const Session& other = *resolved.sequences[i].session;
    if (!(other.raw_spec == first.raw_spec) ||
        !(other.history.layout->layers[0].geometry == geometry)) {
      return InvalidField("sequences[" + std::to_string(i) + "].session_id",
                          "a session of another RawLayout", "sessions of equal RawLayout");
    }
  }
  const AttentionSpec& spec = first.raw_spec;
  const AttentionSpec& given = *job.raw_spec;  // what the tensors' shapes say; 0 = tensor absent
  const auto check = [](const char* field, int64_t got, int64_t wanted) {
    if (got == 0 || got == wanted) return absl::OkStatus();
    return InvalidField(field, std::to_string(got),
                        std::to_string(wanted) + " as in the session's RawLayout");
  };
  RETURN_IF_ERROR(check("raw.q heads", given.q_heads, spec.q_heads));
  RETURN_IF_ERROR(check("raw.k heads", given.kv_heads, spec.kv_heads));
  RETURN_IF_ERROR(check("raw head_dim", given.head_dim, spec.head_dim));
  RETURN_IF_ERROR(check("raw.v head_dim", given.v_head_dim, spec.v_head_dim));
  resolved.spec = &spec;
  resolved.kv_dtype = geometry.dtype;
  return absl::OkStatus();
}

std::string AttentionRuntime::LayerName(const Session& session, size_t index) const {
  const int32_t layer = session.model_layers[index];
  return session.model < 0
             ? std::to_string(layer)
             : models_[static_cast<size_t>(session.model)].layers[static_cast<size_t>(layer)].name;
}

SessionState AttentionRuntime::StateOf(const Session& session) const {
  SessionState state;
  state.id = session.id;
  state.model = session.model < 0 ? "raw" : models_[static_cast<size_t>(session.model)].name;
  state.replica = table_.replica();
  state.length = session.history.Longest();
  for (size_t i = 0; i < session.model_layers.size(); ++i) {
    state.layers.push_back(
        {LayerName(session, i), session.history.length[i], session.history.context[i].length});
  }
  state.kv_bytes = cache_.HeldBytes(session.history);
  state.ttl_seconds = session.ttl_us / kSecondUs;
  state.idle_seconds = (now_us_() - session.last_used_us) / kSecondUs;
  return state;
}

absl::StatusOr<SessionState> AttentionRuntime::OpenSession(const OpenSessionArguments& arguments) {
  if (arguments.ttl_seconds < 0) {
    return InvalidField("ttl_seconds", std::to_string(arguments.ttl_seconds), "0 or more");
  }
  if (arguments.max_tokens < 0) {
    return InvalidField("max_tokens", std::to_string(arguments.max_tokens), "0 or more");
  }
  if (arguments.model < 0 && arguments.raw_kv_dtype == DType::kI8 && !info().keeps_i8) {
    return MakeError(absl::StatusCode::kUnimplemented,
                     {.reason = Reason::kUnsupported,
                      .field = "raw.kv_dtype",
                      .got = "I8",
                      .wanted = "F32, BF16, F16 or unspecified on " + info().engine});
  }
  auto session = std::make_unique<Session>();
  session->model = arguments.model;
  session->max_tokens = arguments.max_tokens;
  const int64_t ttl =
      arguments.ttl_seconds == 0 ? options_.session_ttl_seconds : arguments.ttl_seconds;
  session->ttl_us = std::min(ttl, options_.session_ttl_cap_seconds) * kSecondUs;

  // The candidates: every layer that keeps something.
  std::vector<std::pair<std::string, int32_t>> candidates;
  auto layout = std::make_shared<KvLayout>();
  if (arguments.model < 0) {
    session->raw_spec = arguments.raw_spec;
    for (int32_t i = 0; i < arguments.raw_layers; ++i)
      candidates.emplace_back(std::to_string(i), i);
  } else {
    const LoadedModel& model = models_[static_cast<size_t>(arguments.model)];
    for (size_t i = 0; i < model.layers.size(); ++i) {
      if (model.layers[i].spec.keeps_history()) {
        candidates.emplace_back(model.layers[i].name, static_cast<int32_t>(i));
      }
    }
    if (candidates.empty()) {
      return InvalidField("model", model.name + ", whose layers are all bidirectional",
                          "a model with causal or cross-attention layers");
    }
  }
  for (const std::string& name : arguments.layers) {
    const auto found = std::find_if(candidates.begin(), candidates.end(),
                                    [&](const auto& candidate) { return candidate.first == name; });
    if (found == candidates.end()) {
      return MakeError(absl::StatusCode::kNotFound,
                       {.reason = Reason::kUnknownLayer,
                        .field = "layers",
                        .got = name,
                        .wanted = "one of " + candidates.front().first + " .. " +
                                  candidates.back().first + " (layers that keep a history)"});
    }
    if (std::find(session->model_layers.begin(), session->model_layers.end(), found->second) !=
        session->model_layers.end()) {
      return InvalidField("layers", name + " twice", "every layer once");
    }
    session->model_layers.push_back(found->second);
  }
  if (arguments.layers.empty()) {
    for (const auto& candidate : candidates) session->model_layers.push_back(candidate.second);
  }
  for (int32_t index : session->model_layers) {
    KvLayout::Layer layer;
    if (arguments.model < 0) {
      layer.geometry = GeometryOf(arguments.raw_spec, arguments.raw_kv_dtype);
      layer.history = true;
    } else {
      const LoadedLayer& loaded =
          models_[static_cast<size_t>(arguments.model)].layers[static_cast<size_t>(index)];
      layer.geometry = loaded.geometry;
      layer.history = !loaded.spec.cross;
      layer.context = loaded.spec.cross || loaded.spec.mask_selectable;
    }
    layout->layers.push_back(layer);
  }
  layout->Place();
  session->history = cache_.Open(std::move(layout));
  absl::StatusOr<Session*> inserted = table_.Insert(std::move(session), now_us_());
  if (!inserted.ok()) return inserted.status();
  return StateOf(**inserted);
}

absl::StatusOr<SessionState> AttentionRuntime::GetSession(const std::string& id) {
  ASSIGN_OR_RETURN(Session * session, table_.Find(id));
  return StateOf(*session);
}

absl::StatusOr<SessionState> AttentionRuntime::ForkSession(const std::string& id,
                                                           std::optional<int64_t> length) {
  ASSIGN_OR_RETURN(Session * session, table_.Find(id));
  const int64_t longest = session->history.Longest();
  if (length.has_value() && (*length < 0 || *length > longest))
    return LengthError(*length, longest);
  auto fork = std::make_unique<Session>();
  fork->model = session->model;
  fork->raw_spec = session->raw_spec;
  fork->model_layers = session->model_layers;
  fork->ttl_us = session->ttl_us;
  fork->max_tokens = session->max_tokens;
  session->last_used_us = now_us_();
  absl::StatusOr<Session*> inserted = table_.Insert(std::move(fork), now_us_());
  if (!inserted.ok()) return inserted.status();
  (*inserted)->history = cache_.Fork(session->history);
  if (length.has_value()) cache_.Truncate((*inserted)->history, *length);
  return StateOf(**inserted);
}

absl::StatusOr<SessionState> AttentionRuntime::TruncateSession(const std::string& id,
                                                               int64_t length) {
  ASSIGN_OR_RETURN(Session * session, table_.Find(id));
  const int64_t longest = session->history.Longest();
  if (length < 0 || length > longest) return LengthError(length, longest);
  cache_.Truncate(session->history, length);
  session->last_used_us = now_us_();
  return StateOf(*session);
}

absl::Status AttentionRuntime::CloseSession(const std::string& id) {
  ASSIGN_OR_RETURN(Session * session, table_.Find(id));
  cache_.Close(session->history);
  table_.End(id, Reason::kSessionClosed, now_us_());
  return absl::OkStatus();
}

void AttentionRuntime::SetPinned(std::function<bool(const std::string&)> pinned) {
  pinned_ = std::move(pinned);
}

void AttentionRuntime::ExpireSessions() {
  const int64_t now = now_us_();
  table_.ForgetOld(now);
  for (const std::string& id : table_.Expired(now, pinned_)) {
    cache_.Close(table_.open().at(id)->history);
    table_.End(id, Reason::kSessionExpired, now);
  }
}

RuntimeStats AttentionRuntime::Stats() const {
  RuntimeStats stats;
  stats.kv_capacity_bytes = cache_.arena().capacity_bytes();
  stats.kv_used_bytes = cache_.arena().used_bytes();
  for (const auto& [id, session] : table_.open()) {
    if (pinned_(id)) {
      ++stats.sessions_active;
    } else {
      stats.kv_idle_bytes += cache_.HeldBytes(session->history);
    }
  }
  stats.kv_idle_bytes = std::min(stats.kv_idle_bytes, stats.kv_used_bytes);
  stats.sessions_open = static_cast<int64_t>(table_.open().size());
  stats.sessions_expired = table_.ended(Reason::kSessionExpired);
  stats.sessions_closed = table_.ended(Reason::kSessionClosed);
  return stats;
}

}  // namespace attend
