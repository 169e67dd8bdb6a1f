// SPDX-License-Identifier: Apache-2.0
//
// Sessions by id: who they are, how long they may idle, how they ended. Ids are
// `<replica>.<start>.<128 random bits>`: an id tells its owner, and whether it is from before a
// restart. Times are microseconds of a monotonic clock, given by the caller.
//
// Thread-compatible.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/attention_spec.h"
#include "engine/kv_cache.h"
#include "engine/util/error.h"
#include "engine/util/recycled.h"

namespace attend {

struct Session {
  std::string id;
  int model = -1;                     // index of the runtime's model; -1 = raw
  AttentionSpec raw_spec;             // raw: the options all layers share
  std::vector<int32_t> model_layers;  // [layers] index of the model's layer; raw: 0, 1, ...
  KvHistory history;                  // one entry per element of model_layers
  int64_t ttl_us = 0;
  int64_t max_tokens = 0;    // 0 = no limit
  int64_t last_used_us = 0;  // end of the last call
};

class SessionTable {
 public:
  // `replica` and `start` begin every id; at most `capacity` sessions are open at a time.
  SessionTable(std::string replica, std::string start, int64_t capacity);

  // Takes the session under a new id. RESOURCE_EXHAUSTED, QUOTA at capacity.
  absl::StatusOr<Session*> Insert(std::unique_ptr<Session> session, int64_t now_us);

  // The open session, or why there is none: NOT_FOUND with the reason it ended, FAILED_PRECONDITION
  // SESSION_MOVED with its owner.
  absl::StatusOr<Session*> Find(std::string_view id) const;

  // Removes the session and remembers the reason. The caller has freed its history.
  void End(const std::string& id, Reason reason, int64_t now_us);

  // Forgets the reasons that are older than an hour or beyond the last 65,536.
  void ForgetOld(int64_t now_us);

  // Ids idle beyond their ttl for which `pinned` is false.
  std::vector<std::string> Expired(int64_t now_us,
                                   const std::function<bool(const std::string&)>& pinned) const;

  // Counts of ended sessions by reason since the start: expired, evicted, closed.
  int64_t ended(Reason reason) const;
  template <typename Value>
  using ById = std::unordered_map<std::string, Value, StringHash, std::equal_to<>>;
  const ById<std::unique_ptr<Session>>& open() const { return open_; }
  const std::string& replica() const { return replica_; }

 private:
  struct Ended {
    std::string id;
    int64_t at_us = 0;
  };

  std::string replica_;
  std::string start_;
  int64_t capacity_;
  ById<std::unique_ptr<Session>> open_;
  ById<Reason> ended_;
  std::deque<Ended> ended_order_;
  std::unordered_map<int, int64_t> ended_count_;
};

}  // namespace attend
