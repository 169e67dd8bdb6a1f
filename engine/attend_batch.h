// SPDX-License-Identifier: Apache-2.0
//
// One batch on its way through AttentionRuntime: StartBatch fills it from the jobs it is offered,
// the engine runs it, FinishBatch ends it. Whoever holds it in between may read launched() and
// `outcome.jobs`. The runtime uses it again for a later batch.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/attend_job.h"
#include "engine/attention_engine.h"
#include "engine/batch_time.h"
#include "engine/session_table.h"
#include "engine/util/emptied.h"

namespace attend {

struct BatchOutcome {
  int64_t tokens = 0;  // rows and context rows computed
  int64_t sequences = 0;
  // It had the engine from started_us on, for compute_us: of two batches in flight the second one
  // has it when the first has ended.
  int64_t started_us = 0;
  int64_t compute_us = 0;
  StageTimes stages;
  absl::Status engine;  // why the engine failed; not OK in one outcome only, the first since then
  int64_t launched_late = 0;  // jobs launched although their deadline had passed: must stay 0
  enum class State : uint8_t {
    kUntouched,  // did not fit into this batch
    kContinues,  // some of it ran; give it again
    kEnded,      // `status` is final
  };
  struct Job {
    State state = State::kUntouched;
    absl::Status status;
    int64_t tokens = 0;  // rows of it in this batch
  };
  std::vector<Job> jobs;
};

struct ResolvedSequence {
  Session* session = nullptr;  // null = stateless
  int place = 0;               // index of the layer in the session
};

// Layer, spec and kv dtype a job runs with, its sessions, and what kind of work it is.
struct ResolvedJob {
  int engine_layer = -1;
  const AttentionSpec* spec = nullptr;
  DType kv_dtype = DType::kF32;
  std::span<ResolvedSequence> sequences;  // borrowed; one for each of the job's
  bool few_rows = false;                  // in every sequence (FewRows): never cut for time

  KvGeometry geometry() const { return GeometryOf(*spec, kv_dtype); }
  bool SameBatch(const ResolvedJob& other) const {
    return engine_layer == other.engine_layer && kv_dtype == other.kv_dtype &&
           (spec == other.spec || *spec == *other.spec);
  }
};

// What an item takes of a batch, or what a batch has left.
struct BatchShare {
  int64_t tokens = 0;
  int64_t workspace_bytes = 0;
  double us = 0;  // predicted

  bool Within(const BatchShare& room) const {
    return tokens <= room.tokens && workspace_bytes <= room.workspace_bytes && us <= room.us;
  }
};

// Every list is as long as some batch needed it at once: items have a token each, of which a batch
// has batch_tokens at most; jobs and their sequences are as many as the queue lets in, and take far
// more there; a block's address takes 8 bytes. So it is no harm that their memory stays.
struct AttendBatch {
  bool in_flight = false;             // between StartBatch and the end of FinishBatch
  std::vector<AttendJob*> jobs;       // as offered; not given again before the batch has ended
  std::vector<ResolvedJob> resolved;  // [jobs]
  std::vector<ResolvedSequence> sequences;  // of all jobs
  std::vector<size_t> members;              // indices of the jobs that are in it

  // Lent to the engine until it has ended.
  BatchPlan plan;
  std::vector<AttendItem> items;
  std::vector<int64_t> blocks;  // of all items, from the launch on

  BatchShare whole;           // what its first job found
  BatchShare room;            // left
  BatchTime* time = nullptr;  // of its kind of layer
  BatchWork work;
  int64_t launched_us = 0;
  std::optional<Ticket> ticket;
  BatchOutcome outcome;  // of jobs that are not members it is final

  // The engine has something to do; else FinishBatch does not wait.
  bool launched() const { return ticket.has_value(); }

  // As new, but for the memory of its lists.
  void Reset() {
    AttendBatch kept = std::exchange(*this, AttendBatch());
    jobs = Emptied(std::move(kept.jobs));
    resolved = Emptied(std::move(kept.resolved));
    sequences = Emptied(std::move(kept.sequences));
    members = Emptied(std::move(kept.members));
    plan = Emptied(std::move(kept.plan));
    items = Emptied(std::move(kept.items));
    blocks = Emptied(std::move(kept.blocks));
    outcome.jobs = Emptied(std::move(kept.outcome.jobs));
  }
};

}  // namespace attend
