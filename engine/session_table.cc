// SPDX-License-Identifier: Apache-2.0
#include "engine/session_table.h"

#include <cstdio>
#include <random>
#include <utility>

#include "engine/util/check.h"

namespace attend {
namespace {

// How many ended sessions keep their reason, and for how long (DESIGN: sessions).
constexpr size_t kEndedKept = 65536;
// An id is at most 128 + 1 + 20 + 1 + 32 bytes; anything longer is somebody's mistake.
constexpr size_t kShownIdBytes = 200;
constexpr size_t kReplicaBytes = 128;
constexpr int64_t kEndedKeptUs = int64_t{3600} * 1000000;

std::string RandomHex128() {
  std::random_device
      device;  // the system's generator: ids are capabilities and must not be guessed
  char text[33];
  std::snprintf(text, sizeof(text), "%08x%08x%08x%08x", device(), device(), device(), device());
  return text;
}

const char* ReasonText(Reason reason) {
  switch (reason) {
    case Reason::kSessionExpired:
      return "expired";
    case Reason::kSessionEvicted:
      return "evicted";
    case Reason::kSessionClosed:
      return "closed";
    case Reason::kSessionLostInRestart:
      return "lost in a restart of the server";
    default:
      return "not found";
  }
}

// The message does not repeat the id: messages are logged, and an id gives access to its session.
absl::Status Gone(std::string_view id, Reason reason) {
  return MakeError(absl::StatusCode::kNotFound,
                   {.reason = reason,
                    .field = "session_id",
                    .got = std::string(id.substr(0, kShownIdBytes)),
                    .wanted = "an open session"},
                   std::string("session_id: the session is ") + ReasonText(reason));
}

}  // namespace

SessionTable::SessionTable(std::string replica, std::string start, int64_t capacity)
    : replica_(std::move(replica)), start_(std::move(start)), capacity_(capacity) {}

absl::StatusOr<Session*> SessionTable::Insert(std::unique_ptr<Session> session, int64_t now_us) {
  if (static_cast<int64_t>(open_.size()) >= capacity_) {
    return MakeError(absl::StatusCode::kResourceExhausted,
                     {.reason = Reason::kQuota,
                      .field = "sessions",
                      .got = std::to_string(open_.size()) + " open sessions",
                      .wanted = "fewer than " + std::to_string(capacity_),
                      .retry_after_ms = 1000});
  }
  session->id = replica_ + "." + start_ + "." + RandomHex128();
  session->last_used_us = now_us;
  Session* inserted = session.get();
  const bool fresh = open_.emplace(inserted->id, std::move(session)).second;
  CHECK(fresh);
  return inserted;
}

absl::StatusOr<Session*> SessionTable::Find(std::string_view id) const {
  if (const auto found = open_.find(id); found != open_.end()) {
    return found->second.get();
  }
  if (const auto found = ended_.find(id); found != ended_.end()) return Gone(id, found->second);

  // Split from the right: host names have dots.
  const size_t random = id.rfind('.');
  const size_t start = random == id.npos || random == 0 ? id.npos : id.rfind('.', random - 1);
  if (start == id.npos || start == 0 || id.size() - random - 1 != 32) {
    return Gone(id, Reason::kSessionNotFound);
  }
  const std::string owner(id.substr(0, start));
  if (owner != replica_ && owner.size() <= kReplicaBytes) {
    return MakeError(absl::StatusCode::kFailedPrecondition, {.reason = Reason::kSessionMoved,
                                                             .field = "session_id",
                                                             .got = "a session of replica " + owner,
                                                             .wanted = "replica " + replica_,
                                                             .replica = owner});
  }
  if (owner != replica_) return Gone(id, Reason::kSessionNotFound);
  if (id.substr(start + 1, random - start - 1) != start_) {
    return Gone(id, Reason::kSessionLostInRestart);
  }
  return Gone(id, Reason::kSessionNotFound);
}

void SessionTable::End(const std::string& id, Reason reason, int64_t now_us) {
  const size_t erased = open_.erase(id);
  CHECK(erased == 1);
  ++ended_count_[static_cast<int>(reason)];
  ended_[id] = reason;
  ended_order_.push_back({id, now_us});
  ForgetOld(now_us);
}

void SessionTable::ForgetOld(int64_t now_us) {
  while (ended_order_.size() > kEndedKept ||
         (!ended_order_.empty() && now_us - ended_order_.front().at_us > kEndedKeptUs)) {
    ended_.erase(ended_order_.front().id);
    ended_order_.pop_front();
  }
}

std::vector<std::string> SessionTable::Expired(
    int64_t now_us, const std::function<bool(const std::string&)>& pinned) const {
  std::vector<std::string> ids;
  for (const auto& [id, session] : open_) {
    if (now_us - session->last_used_us > session->ttl_us && !pinned(id)) ids.push_back(id);
  }
  return ids;
}

int64_t SessionTable::ended(Reason reason) const {
  const auto found = ended_count_.find(static_cast<int>(reason));
  return found == ended_count_.end() ? 0 : found->second;
}

}  // namespace attend
