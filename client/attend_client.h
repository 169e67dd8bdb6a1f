// SPDX-License-Identifier: Apache-2.0
//
// The C++ client of attend: Client (one server), Session (one key/value history), tensors and
// errors as values. Decides deadlines, retries, message limits and session positions, so that
// callers don't. Knows the wire messages only, nothing of engines or servers; gRPC stays out of
// this header.
//
//   auto client = attend::client::Client::Connect("127.0.0.1:50051", {.deadline = 5s});
//   if (!client.ok()) return Report(client.error());
//   auto answer = client->Attend("", "0", {rows, {8, 768}});
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "attend/v1/attend.pb.h"

namespace attend::client {

// Why a call failed. The fields after `message` are those of attend.v1.ErrorDetail.
struct Error {
  int code = 0;  // gRPC status code, never 0 in a returned error
  std::string message;
  v1::Reason reason = v1::REASON_UNSPECIFIED;
  std::string field;
  std::string got;
  std::string wanted;
  std::vector<int32_t> sequences;  // every offending sequence of the request
  int64_t cached = 0;              // POSITION_MISMATCH: tokens the layer has
  std::chrono::milliseconds retry_after{0};
  std::string replica;           // SESSION_MOVED: where it lives
  bool retryable = false;        // the same call may succeed later
  bool outcome_unknown = false;  // an answer of the server got lost: the call may have been applied
  int attempts = 0;              // calls made; 0 = refused by this library before sending

  // "FAILED_PRECONDITION POSITION_MISMATCH: ...", one line.
  std::string ToString() const;
};

// "UNAVAILABLE" for 14; "CODE_99" for unknown codes.
std::string CodeName(int code);

// A value or an Error. Reading the side that is not there is a programming error (std::get throws).
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }
  T& operator*() & { return std::get<0>(state_); }
  const T& operator*() const& { return std::get<0>(state_); }
  T&& operator*() && { return std::get<0>(std::move(state_)); }
  T* operator->() { return &std::get<0>(state_); }
  const T* operator->() const { return &std::get<0>(state_); }
  const Error& error() const { return std::get<1>(state_); }

 private:
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}

  bool ok() const { return !error_.has_value(); }
  explicit operator bool() const { return ok(); }
  const Error& error() const { return error_.value(); }

 private:
  std::optional<Error> error_;
};

// Bytes per element; 0 for values that are no tensor element type.
int64_t ElementBytes(v1::DType dtype);

// A tensor somebody else owns: little-endian, row-major, product(shape) x ElementBytes(dtype)
// bytes.
struct TensorView {
  TensorView() = default;  // absent
  TensorView(v1::DType dtype, std::vector<int64_t> shape, std::span<const std::byte> data)
      : dtype(dtype), shape(std::move(shape)), data(data) {}
  TensorView(std::span<const float> values, std::vector<int64_t> shape)
      : dtype(v1::DTYPE_F32), shape(std::move(shape)), data(std::as_bytes(values)) {}

  bool present() const { return dtype != v1::DTYPE_UNSPECIFIED; }

  v1::DType dtype = v1::DTYPE_UNSPECIFIED;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};

// A tensor with its own memory, as it came from the wire or a file.
struct Tensor {
  TensorView view() const { return {dtype, shape, std::as_bytes(std::span(data))}; }
  // Every element as float (F32, F16, BF16; empty for other types).
  std::vector<float> ToFloats() const;

  v1::DType dtype = v1::DTYPE_UNSPECIFIED;
  std::vector<int64_t> shape;
  std::string data;
};

// The contract's names of cross-attention layers: "decoder.0.cross", "0.cross". Calls on them carry
// no position, since what a session caches of them is the context.
bool IsCrossName(std::string_view layer);

// Copies into the wire message.
void CopyToWire(const TensorView& view, v1::Tensor* wire);
// Takes the bytes out of the wire message without copying them.
Tensor TakeFromWire(v1::Tensor* wire);

struct Options {
  // Required: time for one call, all its retries and waits included.
  std::chrono::milliseconds deadline{0};
  // Calls made at most, the first included. Waits between them are random in [0, b), where b starts
  // at first_backoff and doubles up to max_backoff, unless the server says how long to wait.
  int max_attempts = 5;
  std::chrono::milliseconds first_backoff{100};
  std::chrono::milliseconds max_backoff{2000};
  // Called with the error before each further attempt, on the calling thread.
  std::function<void(const Error&)> on_retry = {};
};

// What a call of Attend may ask beyond its rows.
struct AttendOptions {
  v1::DType output_dtype = v1::DTYPE_UNSPECIFIED;  // that of the rows
  v1::Mask mask = v1::MASK_FROM_MODEL;
  bool return_weights = false;  // every head and row
  bool no_append = false;       // sessions: attend as if appended, change nothing
  TensorView context = {};      // cross-attention source
  std::string request_id = {};
};

// Projected rows for raw sessions: q [rows, q_heads, head_dim], k and v [rows, kv_heads, width]. q
// absent = append only; k and v absent = attend only.
struct RawRows {
  TensorView q = {};
  TensorView k = {};
  TensorView v = {};
};

struct Answer {
  Tensor output;                   // the input's shape with the layer's output width
  std::vector<int64_t> positions;  // tokens cached per sequence after the call, 0 if stateless
  std::vector<Tensor> weights;     // per sequence [heads, rows, keys], when asked for
  v1::Timing timing;
};

class Session;
class Stream;
struct Connection;    // call.h
struct SessionState;  // session.h
struct StreamCall;    // stream.cc

// One session's share of a batch: its next `rows` rows.
struct SessionRows {
  Session* session = nullptr;
  int64_t rows = 1;
};

// A connection to one server. Cheap to copy (copies share the connection), safe to use from any
// thread. Calls block. Safe calls are retried after UNAVAILABLE, after a CANCELLED that came from
// elsewhere and after RESOURCE_EXHAUSTED where the server says when; never beyond the deadline.
class Client {
 public:
  // `address` as gRPC takes it, e.g. "127.0.0.1:50051" or "dns:///attend:50051". Asks the server
  // for its limits, which hold for the lifetime of the connection.
  static Result<Client> Connect(const std::string& address, const Options& options);

  // The same connection with another deadline per call.
  Client WithDeadline(std::chrono::milliseconds deadline) const;

  // The server as it was at Connect, and as it is now.
  const v1::ServerInfo& server() const;
  Result<v1::ServerInfo> GetServerInfo() const;
  Result<std::vector<v1::Model>> ListModels() const;

  // Stateless: rows [tokens, d_model] are one sequence, [batch, tokens, d_model] are `batch`.
  // `model` empty = the only one.
  Result<Answer> Attend(std::string_view model, std::string_view layer, const TensorView& rows,
                        const AttendOptions& options = {}) const;
  // One step of several sessions of one replica: `rows` is packed [sum of batch rows, d_model].
  // Succeeds or fails as a whole. A session may appear once.
  Result<Answer> Attend(std::string_view layer, std::span<const SessionRows> batch,
                        const TensorView& rows, const AttendOptions& options = {}) const;
  // Any request, unchanged. Retried after a lost answer only if running it twice can't differ from
  // once: every session sequence has `no_append` or `rewind`.
  Result<v1::AttendResponse> Attend(const v1::AttendRequest& request) const;

  // The session is closed when the returned object dies.
  Result<Session> OpenSession(std::string_view model = {}) const;
  Result<Session> OpenSession(const v1::OpenSessionRequest& request) const;
  // A session that exists already; the returned object does not close it.
  Result<Session> AttachSession(std::string_view id) const;

  // Connects with the first Send.
  Stream OpenStream() const;

 private:
  friend class Session;
  friend class Stream;
  Client(std::shared_ptr<const Connection> connection, std::chrono::milliseconds deadline);

  std::shared_ptr<const Connection> connection_;
  std::chrono::milliseconds deadline_;
};

// A key/value history on the server, one per layer. Move-only; one thread at a time. Keeps each
// layer's position, so that callers only send rows: an answer that got lost is asked for again with
// `rewind`, by this library within the deadline, else by the next Attend on that layer. A
// moved-from object may only be destroyed or assigned to.
class Session {
 public:
  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;
  // Closes an owned session: one try of at most a second, errors ignored.
  ~Session();

  const std::string& id() const;
  const std::string& replica() const;
  // Tokens of `layer` the next Attend continues from.
  int64_t position(std::string_view layer) const;

  // Appends rows [tokens, d_model] to `layer` and attends. Cross-attention layers take the context
  // with the first call (AttendOptions::context) and none later.
  Result<Answer> Attend(std::string_view layer, const TensorView& rows,
                        const AttendOptions& options = {});
  // The same in a session opened with a RawLayout.
  Result<Answer> Attend(std::string_view layer, const RawRows& rows,
                        const AttendOptions& options = {});

  // Drops what lies beyond `length` with the next Attend of each layer: no call of its own
  // (speculative decoding). Truncate does it now.
  void RewindTo(int64_t length);
  Result<void> Truncate(int64_t length);
  // A second session with the same history (cut to `length`), owned by the returned object.
  Result<Session> Fork(std::optional<int64_t> length = std::nullopt);
  Result<v1::Session> Info() const;
  // Ends the session; a closed object refuses further calls.
  Result<void> Close();
  // Leaves the session open when this object dies.
  void Detach();

 private:
  friend class Client;
  explicit Session(std::unique_ptr<SessionState> state);
  Result<void> CloseWithin(int max_attempts);

  std::unique_ptr<SessionState> state_;  // null after a move
};

// Many Attend calls on one connection, answered in the order they were sent. Move-only; one thread
// at a time. When the server ends the stream (its age, a drain, a lost connection), the unanswered
// items are sent again on a new one, where running them twice can't differ from once
// (Client::Attend(request)) or where the server says that they never ran.
class Stream {
 public:
  Stream(Stream&&) noexcept;
  Stream& operator=(Stream&&) noexcept;
  // Cancels what is unanswered.
  ~Stream();

  // Sends one item, with the client's deadline unless it has a timeout_us. Refused while
  // Limits.stream_items_in_flight items are unanswered: Receive first.
  Result<void> Send(v1::AttendRequest request);
  // Waits for the oldest unanswered item, at most the client's deadline. An error of this item
  // alone leaves the stream usable; when the stream itself fails, every unanswered item is dropped.
  Result<v1::AttendResponse> Receive();
  int64_t unanswered() const;

 private:
  friend class Client;
  explicit Stream(Client client);
  // A new call with every unanswered item; a failure shows in Receive.
  void Reopen(std::chrono::steady_clock::time_point end);

  Client client_;
  std::deque<v1::AttendRequest> unanswered_;
  std::unique_ptr<StreamCall> call_;  // null while not connected
};

}  // namespace attend::client
