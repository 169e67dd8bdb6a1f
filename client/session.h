// SPDX-License-Identifier: Apache-2.0
//
// What Client, Session and Stream share below the public header: the state of a session, one place
// that sends Attend, and the two translations between the typed calls and the wire.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "client/attend_client.h"
#include "client/call.h"

namespace attend::client {

// Where one layer of a session stands.
struct LayerCursor {
  int64_t position = 0;
  // The server may have more than `position`: the next call cuts it.
  bool rewind = false;
  // A cross-attention layer: its calls carry no position.
  bool cross = false;
};

struct SessionState {
  explicit SessionState(Client client) : client(std::move(client)) {}

  Client client;
  std::string id;
  std::string model;  // as AttendRequest.model takes it; empty for raw sessions
  std::string replica;
  bool owned = true;
  bool closed = false;
  std::map<std::string, LayerCursor, std::less<>> layers;
};

// Takes id, model, replica and the length of every layer from what the server says.
void ReadSession(const v1::Session& session, SessionState* state);

// Twice is the same as once: no sequence changes a history that it did not itself cut first.
bool IsRepeatable(const v1::AttendRequest& request);
// The replica of the first session sequence; empty without one.
std::string ReplicaOf(const v1::AttendRequest& request);
// The error of a request above message_bytes.
std::optional<Error> CheckSize(const Connection& connection, const v1::AttendRequest& request);

// Sends one Attend, checking the message limit first.
Result<v1::AttendResponse> SendAttend(const Connection& connection,
                                      std::chrono::milliseconds deadline, Repeat repeat,
                                      const std::string& replica, const v1::AttendRequest& request,
                                      const std::function<void()>& after_lost);

// Everything of a request but model, layer, sequences and rows.
void FillRequest(const AttendOptions& options, v1::AttendRequest* request);
Answer TakeAnswer(v1::AttendResponse* response);

}  // namespace attend::client
