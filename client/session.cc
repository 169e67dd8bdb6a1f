// SPDX-License-Identifier: Apache-2.0
//
// Session, and the calls of Client that work on sessions. Decides position, rewind and replica of
// every session sequence, and where a layer stands after an answer, an error or a lost answer.
#include "client/session.h"

#include <algorithm>

namespace attend::client {
namespace {

// The destructor must not hold its thread for long when the server is gone.
constexpr std::chrono::milliseconds kLastCloseDeadline{1000};

Error ClosedError(const SessionState& state) {
  Error error;
  error.code = grpc::FAILED_PRECONDITION;
  error.reason = v1::SESSION_CLOSED;
  error.message = "session " + state.id + ": closed by this client";
  return error;
}

CallPlan PlanFor(const SessionState& state, std::chrono::milliseconds deadline,
                 Repeat repeat = Repeat::kSafe) {
  return {.deadline = deadline, .repeat = repeat, .replica = state.replica};
}

int64_t RowsOf(const TensorView& packed) {
  return packed.shape.size() < 2 ? 0 : packed.shape[packed.shape.size() - 2];
}

void FillSequence(const SessionState& state, const LayerCursor& cursor, bool no_append,
                  v1::Sequence* sequence) {
  sequence->set_session_id(state.id);
  if (cursor.cross) return;
  sequence->set_no_append(no_append);
  sequence->set_position(cursor.position);
  sequence->set_rewind(cursor.rewind);
}

Result<void> CheckSessions(const std::vector<SessionState*>& states) {
  if (states.empty()) return LocalError("sequences", "0 sessions", "at least 1");
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i]->closed) return ClosedError(*states[i]);
    if (states[i]->replica == states[0]->replica) continue;
    return LocalError("sequences[" + std::to_string(i) + "].session_id",
                      "a session of replica " + states[i]->replica,
                      "sessions of one replica, here " + states[0]->replica);
  }
  return {};
}

// Sends `request`, whose sequences have their lengths, for sessions in the order of the sequences.
Result<Answer> AttendSessions(const Connection& connection, std::chrono::milliseconds deadline,
                              const std::vector<SessionState*>& states,
                              const AttendOptions& options, v1::AttendRequest request) {
  if (Result<void> checked = CheckSessions(states); !checked.ok()) return checked.error();
  const int count = static_cast<int>(states.size());
  std::vector<LayerCursor> cursors;
  for (int i = 0; i < count; ++i) {
    LayerCursor cursor = states[i]->layers[request.layer()];
    cursor.cross = cursor.cross || options.context.present() || IsCrossName(request.layer());
    FillSequence(*states[i], cursor, options.no_append, request.mutable_sequences(i));
    cursors.push_back(cursor);
  }
  FillRequest(options, &request);
  const auto ask_again = [&] {  // the lost answer may have been an append
    for (int i = 0; i < count; ++i) {
      if (!cursors[i].cross && !options.no_append) request.mutable_sequences(i)->set_rewind(true);
    }
  };
  Result<v1::AttendResponse> response =
      SendAttend(connection, deadline, Repeat::kSafe, states[0]->replica, request, ask_again);

  const bool answered = response.ok() && response->positions_size() == count;
  for (int i = 0; i < count; ++i) {
    if (options.no_append && !cursors[i].cross) continue;  // nothing moved
    LayerCursor& cursor = cursors[i];
    if (answered) {
      if (!cursor.cross) cursor.position = response->positions(i);
      cursor.rewind = false;
    } else if (!cursor.cross) {
      const bool unknown = response.ok() || response.error().outcome_unknown;
      cursor.rewind = request.sequences(i).rewind() || unknown;
    }
    if (answered || !cursor.cross) states[i]->layers[request.layer()] = cursor;
  }
  if (!response.ok()) return response.error();
  if (!answered) {
    Error error;
    error.code = grpc::INTERNAL;
    error.message = "positions: got " + std::to_string(response->positions_size()) + ", wanted " +
                    std::to_string(count);
    error.outcome_unknown = true;
    return error;
  }
  return TakeAnswer(&*response);
}

}  // namespace

bool IsCrossName(std::string_view layer) { return layer.ends_with(".cross"); }

void ReadSession(const v1::Session& session, SessionState* state) {
  state->id = session.id();
  state->model = session.model() == "raw" ? "" : session.model();
  state->replica = session.replica();
  for (const v1::LayerState& layer : session.layers()) {
    state->layers[layer.layer()] = {
        .position = layer.length(),
        .rewind = false,
        .cross = layer.context_length() > 0 || IsCrossName(layer.layer())};
  }
}

Result<Session> Client::OpenSession(std::string_view model) const {
  v1::OpenSessionRequest request;
  request.set_model(std::string(model));
  return OpenSession(request);
}

Result<Session> Client::OpenSession(const v1::OpenSessionRequest& request) const {
  auto opened = Call(*connection_->control, &v1::Attention::Stub::OpenSession, request,
                     {.deadline = deadline_, .repeat = Repeat::kIfRefused}, connection_->options);
  if (!opened.ok()) return opened.error();
  auto state = std::make_unique<SessionState>(*this);
  ReadSession(*opened, state.get());
  return Session(std::move(state));
}

Result<Session> Client::AttachSession(std::string_view id) const {
  v1::GetSessionRequest request;
  request.set_session_id(std::string(id));
  auto found = Call(*connection_->control, &v1::Attention::Stub::GetSession, request,
                    {.deadline = deadline_, .replica = ReplicaOfSession(id)}, connection_->options);
  if (!found.ok()) return found.error();
  auto state = std::make_unique<SessionState>(*this);
  ReadSession(*found, state.get());
  state->owned = false;
  return Session(std::move(state));
}

Result<Answer> Client::Attend(std::string_view layer, std::span<const SessionRows> batch,
                              const TensorView& rows, const AttendOptions& options) const {
  std::vector<SessionState*> states;
  v1::AttendRequest request;
  request.set_layer(std::string(layer));
  for (const SessionRows& share : batch) {
    states.push_back(share.session->state_.get());
    request.add_sequences()->set_length(share.rows);
  }
  if (options.context.present()) {
    return LocalError("context", "a context for a batch of sessions",
                      "the context with each session's own first Attend");
  }
  if (!states.empty()) request.set_model(states[0]->model);
  CopyToWire(rows, request.mutable_hidden_states());
  return AttendSessions(*connection_, deadline_, states, options, std::move(request));
}

Session::Session(std::unique_ptr<SessionState> state) : state_(std::move(state)) {}
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&& other) noexcept {
  Session old(std::move(state_));  // closes what this object held
  state_ = std::move(other.state_);
  return *this;
}

Session::~Session() {
  if (state_ == nullptr || state_->closed || !state_->owned) return;
  try {
    state_->client =
        state_->client.WithDeadline(std::min(state_->client.deadline_, kLastCloseDeadline));
    (void)CloseWithin(1);
  } catch (...) {  // out of memory: the session ends by its ttl
  }
}

const std::string& Session::id() const { return state_->id; }
const std::string& Session::replica() const { return state_->replica; }

int64_t Session::position(std::string_view layer) const {
  const auto found = state_->layers.find(layer);
  return found == state_->layers.end() ? 0 : found->second.position;
}

Result<Answer> Session::Attend(std::string_view layer, const TensorView& rows,
                               const AttendOptions& options) {
  v1::AttendRequest request;
  request.set_model(state_->model);
  request.set_layer(std::string(layer));
  v1::Sequence* sequence = request.add_sequences();
  sequence->set_length(RowsOf(rows));
  if (options.context.present()) sequence->set_context_length(RowsOf(options.context));
  CopyToWire(rows, request.mutable_hidden_states());
  return AttendSessions(*state_->client.connection_, state_->client.deadline_, {state_.get()},
                        options, std::move(request));
}

Result<Answer> Session::Attend(std::string_view layer, const RawRows& rows,
                               const AttendOptions& options) {
  v1::AttendRequest request;
  request.set_layer(std::string(layer));
  v1::Sequence* sequence = request.add_sequences();
  if (rows.q.present()) {
    CopyToWire(rows.q, request.mutable_raw()->mutable_q());
    sequence->set_length(rows.q.shape.empty() ? 0 : rows.q.shape[0]);
  }
  if (rows.k.present()) {
    CopyToWire(rows.k, request.mutable_raw()->mutable_k());
    sequence->set_context_length(rows.k.shape.empty() ? 0 : rows.k.shape[0]);
  }
  if (rows.v.present()) CopyToWire(rows.v, request.mutable_raw()->mutable_v());
  request.mutable_raw();  // present even without rows, so that the server names what is missing
  return AttendSessions(*state_->client.connection_, state_->client.deadline_, {state_.get()},
                        options, std::move(request));
}

void Session::RewindTo(int64_t length) {
  for (auto& [name, cursor] : state_->layers) {
    if (cursor.cross || cursor.position <= length) continue;
    cursor.position = length;
    cursor.rewind = true;
  }
}

Result<void> Session::Truncate(int64_t length) {
  if (state_->closed) return ClosedError(*state_);
  v1::TruncateSessionRequest request;
  request.set_session_id(state_->id);
  request.set_length(length);
  const Connection& connection = *state_->client.connection_;
  auto truncated = Call(*connection.control, &v1::Attention::Stub::TruncateSession, request,
                        PlanFor(*state_, state_->client.deadline_), connection.options);
  if (!truncated.ok()) return truncated.error();
  ReadSession(*truncated, state_.get());
  return {};
}

Result<Session> Session::Fork(std::optional<int64_t> length) {
  if (state_->closed) return ClosedError(*state_);
  v1::ForkSessionRequest request;
  request.set_session_id(state_->id);
  if (length) request.set_length(*length);
  const Connection& connection = *state_->client.connection_;
  auto forked =
      Call(*connection.control, &v1::Attention::Stub::ForkSession, request,
           PlanFor(*state_, state_->client.deadline_, Repeat::kIfRefused), connection.options);
  if (!forked.ok()) return forked.error();
  auto state = std::make_unique<SessionState>(state_->client);
  ReadSession(*forked, state.get());
  return Session(std::move(state));
}

Result<v1::Session> Session::Info() const {
  if (state_->closed) return ClosedError(*state_);
  v1::GetSessionRequest request;
  request.set_session_id(state_->id);
  const Connection& connection = *state_->client.connection_;
  return Call(*connection.control, &v1::Attention::Stub::GetSession, request,
              PlanFor(*state_, state_->client.deadline_), connection.options);
}

Result<void> Session::Close() {
  return CloseWithin(state_->client.connection_->options.max_attempts);
}

Result<void> Session::CloseWithin(int max_attempts) {
  if (state_->closed) return ClosedError(*state_);
  v1::CloseSessionRequest request;
  request.set_session_id(state_->id);
  const Connection& connection = *state_->client.connection_;
  Options options = connection.options;
  options.max_attempts = max_attempts;
  auto closed = Call(*connection.control, &v1::Attention::Stub::CloseSession, request,
                     PlanFor(*state_, state_->client.deadline_), options);
  // After a lost answer, "closed" is what the first attempt did.
  const bool closed_before =
      !closed.ok() && closed.error().attempts > 1 && closed.error().reason == v1::SESSION_CLOSED;
  if (!closed.ok() && !closed_before) return closed.error();
  state_->closed = true;
  return {};
}

void Session::Detach() { state_->owned = false; }

}  // namespace attend::client
