// SPDX-License-Identifier: Apache-2.0
//
// The one place where cache, plan and engine meet: loaded models, sessions, and batches of jobs. It
// decides what of each job goes into a batch, runs it, and commits or rolls back.
//
// Threads: after the models are added one thread calls everything but models(), model(), info() and
// progress_ns(), which any thread may call. Times are microseconds of one monotonic clock.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/attend_batch.h"
#include "engine/attend_job.h"
#include "engine/attention_engine.h"
#include "engine/batch_time.h"
#include "engine/kv_cache.h"
#include "engine/model/checkpoint.h"
#include "engine/session_table.h"

namespace attend {

struct RuntimeOptions {
  EngineOptions engine;
  DType kv_dtype = DType::kUnspecified;  // kUnspecified = auto: BF16 for BF16 models, else F32
  std::string replica;
  std::string start;  // distinguishes this process from its predecessors in session ids
  int64_t sessions = 65536;
  int64_t session_ttl_seconds = 900;
  int64_t session_ttl_cap_seconds = 86400;
  int64_t batch_tokens = 2048;
  int64_t chunk_us = 5000;
};

struct LoadedLayer {
  std::string name;
  std::string module;
  std::string input_point;
  AttentionSpec spec;
  AttentionSpec cross_spec;  // mask_selectable layers that are given a context
  LayerInfo engine;
  int64_t weight_bytes = 0;
  KvGeometry geometry;
};

struct LoadedModel {
  std::string name;
  std::string family;
  DType weight_dtype = DType::kF32;
  DType kv_dtype = DType::kF32;
  DType compute_dtype = DType::kF32;
  std::string fingerprint;
  std::string numerics_id;
  int64_t max_positions = 0;
  std::vector<LoadedLayer> layers;
};

struct OpenSessionArguments {
  int model = -1;  // -1 = raw
  AttentionSpec raw_spec;
  int raw_layers = 0;
  DType raw_kv_dtype = DType::kF32;
  std::vector<std::string> layers;  // empty = all that keep a history or context
  int64_t ttl_seconds = 0;          // 0 = default
  int64_t max_tokens = 0;
};

struct SessionState {
  struct Layer {
    std::string name;
    int64_t length = 0;
    int64_t context_length = 0;
  };
  std::string id;
  std::string model;  // "raw" for raw sessions
  std::string replica;
  int64_t length = 0;
  std::vector<Layer> layers;
  int64_t kv_bytes = 0;
  int64_t ttl_seconds = 0;
  int64_t idle_seconds = 0;
};

// For gauges.
struct RuntimeStats {
  int64_t kv_capacity_bytes = 0;
  int64_t kv_used_bytes = 0;
  int64_t kv_idle_bytes =
      0;  // held by sessions without a queued or running call (shared blocks in full)
  int64_t sessions_open = 0;
  int64_t sessions_active = 0;
  int64_t sessions_expired = 0;  // ended so far
  int64_t sessions_closed = 0;
};

class AttentionRuntime {
 public:
  // `engine` was made with options.engine; `now_us` reads the clock all times refer to.
  AttentionRuntime(const RuntimeOptions& options, std::unique_ptr<AttentionEngine> engine,
                   std::function<int64_t()> now_us);
  ~AttentionRuntime();

  // Packs every layer; `progress(done, layers)` after each. Start-up only.
  absl::Status AddModel(const std::string& name, const Checkpoint& checkpoint,
                        const std::function<void(int, int)>& progress);

  const std::vector<LoadedModel>& models() const { return models_; }
  const EngineInfo& info() const { return engine_->info(); }
  int64_t progress_ns() const { return engine_->progress_ns(); }

  // Session calls, also while batches of other sessions are in flight. REQUIRES: no batch holds a
  // part of the session's work (Fork, Truncate, Close).
  absl::StatusOr<SessionState> OpenSession(const OpenSessionArguments& arguments);
  absl::StatusOr<SessionState> GetSession(const std::string& id);
  absl::StatusOr<SessionState> ForkSession(const std::string& id, std::optional<int64_t> length);
  absl::StatusOr<SessionState> TruncateSession(const std::string& id, int64_t length);
  absl::Status CloseSession(const std::string& id);

  // The way of a batch. StartBatch: the first job sets layer and spec, the others join where they
  // fit; what does not need the engine (dead jobs, wrong ones) has ended then. FinishBatch: waits;
  // jobs that have ended have committed (OK) or rolled back (anything else). Up to
  // info().batches_in_flight launched batches may be between the two; they are finished in the
  // order of their starts, and their jobs and pinned sessions stay untouched until then. A batch is
  // the runtime's: it stays until FinishBatch, what came of it until the next StartBatch.
  AttendBatch& StartBatch(std::span<AttendJob* const> jobs);
  // FinishBatch would not wait.
  bool Finished(const AttendBatch& batch) const;
  const BatchOutcome& FinishBatch(AttendBatch& batch);
  const BatchOutcome& RunBatch(std::span<AttendJob* const> jobs) {
    return FinishBatch(StartBatch(jobs));
  }
  // The job would be cut now: batches hold no other work beside a part of it, and others may go
  // first.
  bool NeedsChunks(AttendJob& job);
  // Rolls back a job that is in no batch and will not be given again (cancelled, expired, shutting
  // down).
  void Abandon(AttendJob& job);

  // Says which sessions have a queued or running call: they neither expire nor count as idle.
  // Called on the runtime's thread.
  void SetPinned(std::function<bool(const std::string& session_id)> pinned);
  // Ends sessions idle beyond their ttl. Nothing else does: until it is called they are served.
  void ExpireSessions();
  RuntimeStats Stats() const;
  int64_t open_sessions() const { return static_cast<int64_t>(table_.open().size()); }

 private:
  // Before a job's first batch (runtime_jobs.cc).
  // `sequences`, one for each of the job's, is where the result keeps its own.
  absl::StatusOr<ResolvedJob> Resolve(AttendJob& job, std::span<ResolvedSequence> sequences);
  absl::Status CheckSequence(const AttendJob& job, const ResolvedJob& resolved, size_t index);
  absl::Status ResolveRawSession(const AttendJob& job, ResolvedJob& resolved);
  absl::Status Begin(AttendJob& job, const ResolvedJob& resolved);
  absl::Status PrepareAnswer(AttendJob& job, const ResolvedJob& resolved);
  absl::Status ReserveSequence(AttendJob& job, const ResolvedJob& resolved, size_t index);

  // What of a job goes into a batch (runtime_chunks.cc).
  BatchOutcome::Job AddJob(size_t index, AttendBatch& batch);
  bool AddChunk(size_t index, size_t sequence_index, AttendBatch& batch);
  AttendItem NextItem(const AttendJob& job, size_t index, const ResolvedJob& resolved,
                      int64_t most) const;
  int64_t ChunkRows(const AttendJob& job, size_t index, const ResolvedJob& resolved,
                    const AttendBatch& batch) const;
  BatchTime& TimeOf(const ResolvedJob& resolved);
  BatchWork WorkLeft(const AttendJob& job, const ResolvedJob& resolved) const;
  BatchShare WholeBatch(const AttendJob& job, const ResolvedJob& resolved, const BatchTime& time,
                        const BatchWork& left) const;
  BatchShare ShareOf(const AttendItem& item, const ResolvedJob& resolved,
                     const BatchTime& time) const;

  // The steps of a batch, in their order.
  void Gather(AttendBatch& batch);
  void DropDead(AttendBatch& batch);
  void ListBlocks(AttendBatch& batch) const;
  void Launch(AttendBatch& batch);
  absl::Status Await(AttendBatch& batch);
  absl::Status Finish(AttendJob& job, const ResolvedJob& resolved);
  void ReleaseFinished(AttendJob& job);
  void End(AttendBatch& batch, size_t index, absl::Status status);
  absl::Status WhyDead(const AttendJob& job) const;
  bool failed() const { return !cache_.engine_status().ok(); }

  SessionState StateOf(const Session& session) const;
  std::string LayerName(const Session& session, size_t index) const;

  RuntimeOptions options_;
  std::function<int64_t()> now_us_;
  std::unique_ptr<AttentionEngine> engine_;
  KvCache cache_;
  SessionTable table_;
  std::shared_ptr<BufferPool> buffers_;
  std::vector<LoadedModel> models_;
  std::function<bool(const std::string&)> pinned_;
  std::deque<AttendBatch> batches_;                    // as many as were in flight at a time
  std::vector<ResolvedSequence> asked_;                // NeedsChunks
  std::map<std::array<int64_t, 8>, BatchTime> times_;  // by kind of layer
  RecentWork recent_;
  int64_t engine_free_us_ = 0;  // when the last batch ended
  bool failure_told_ = false;   // the engine's, in an outcome
};

}  // namespace attend
