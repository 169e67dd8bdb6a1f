// SPDX-License-Identifier: Apache-2.0
//
// Models, and the way of a batch. What a job needs before it may run is in runtime_jobs.cc, what of
// it goes into a batch in runtime_chunks.cc; the session calls are in runtime_sessions.cc.
#include "engine/attention_runtime.h"

#include <algorithm>
#include <utility>

#include "engine/util/check.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

// Unused output buffers kept for the next answers.
constexpr int64_t kBuffersKeptBytes = int64_t{256} << 20;
// From the last look at the deadlines to the launch; longer means that dead work was launched.
constexpr int64_t kLaunchUs = 1000;

absl::Status EngineFault(const std::string& what) {
  return MakeError(absl::StatusCode::kInternal, {.reason = Reason::kEngineFault}, what);
}

absl::Status Cancelled() {
  return MakeError(absl::StatusCode::kCancelled, {.reason = Reason::kCancelled},
                   "the call was cancelled");
}

absl::Status DeadlinePassed() {
  return MakeError(absl::StatusCode::kDeadlineExceeded, {.reason = Reason::kDeadline},
                   "the deadline passed before the answer was ready");
}

}  // namespace

AttentionRuntime::AttentionRuntime(const RuntimeOptions& options,
                                   std::unique_ptr<AttentionEngine> engine,
                                   std::function<int64_t()> now_us)
    : options_(options),
      now_us_(std::move(now_us)),
      engine_(std::move(engine)),
      cache_(*engine_, options.engine.kv_bytes, options.engine.scratch_bytes),
      table_(options.replica, options.start, options.sessions),
      buffers_(BufferPool::Make(kBuffersKeptBytes)),
      pinned_([](const std::string&) { return false; }) {}

AttentionRuntime::~AttentionRuntime() = default;

absl::Status AttentionRuntime::AddModel(const std::string& name, const Checkpoint& checkpoint,
                                        const std::function<void(int, int)>& progress) {
  LoadedModel model;
  model.name = name;
  model.family = checkpoint.family;
  model.weight_dtype = checkpoint.weight_dtype;
  model.fingerprint = checkpoint.fingerprint;
  model.max_positions = checkpoint.max_positions;
  model.kv_dtype = KvDTypeOf(checkpoint, options_.kv_dtype);
  if (model.kv_dtype == DType::kI8 && !info().keeps_i8) {
    return InvalidField("kv_dtype", "i8", "auto, f32, bf16 or f16 on " + info().engine);
  }
  for (const ModelLayer& source : checkpoint.layers) {
    LoadedLayer layer;
    layer.name = source.name;
    layer.module = source.module;
    layer.input_point = source.input_point;
    layer.spec = source.spec;
    layer.cross_spec = source.spec;
    layer.cross_spec.cross = true;
    layer.cross_spec.causal = false;
    layer.weight_bytes = source.weight_bytes;
    layer.geometry = GeometryOf(source.spec, model.kv_dtype);
    if (const int widest = std::max(source.spec.head_dim, source.spec.v_head_dim);
        widest > info().max_head_dim) {
      return InvalidField("head_dim", std::to_string(widest),
                          "1 .. " + std::to_string(info().max_head_dim) + " on " + info().engine);
    }
    absl::StatusOr<LayerInfo> added = engine_->AddLayer(source.spec, source.weights);
    if (!added.ok()) {
      return absl::Status(added.status().code(), "model " + name + ", layer " + source.name + ": " +
                                                     std::string(added.status().message()));
    }
    layer.engine = *added;
    model.compute_dtype = added->compute_dtype;
    if (added->compute_dtype == DType::kI8) model.weight_dtype = DType::kI8;
    model.layers.push_back(std::move(layer));
    if (progress) {
      progress(static_cast<int>(model.layers.size()), static_cast<int>(checkpoint.layers.size()));
    }
  }
  model.numerics_id = engine_->info().numerics_id + "-" + DTypeName(model.weight_dtype) + "-" +
                      DTypeName(model.compute_dtype) + "-kv" + DTypeName(model.kv_dtype);
  // Else it follows from the others.
  if (model.compute_dtype == DType::kI8) {
    model.numerics_id +=
        std::string("-attend") + DTypeName(model.layers.front().engine.attend_dtype);
  }
  models_.push_back(std::move(model));
  return absl::OkStatus();
}

void AttentionRuntime::Abandon(AttendJob& job) {
  for (SequenceJob& sequence : job.sequences) cache_.RollBack(sequence.reservation);
  job.started = false;
}

absl::Status AttentionRuntime::Finish(AttendJob& job, const ResolvedJob& resolved) {
  const int64_t now = now_us_();
  for (const ResolvedSequence& sequence : resolved.sequences) {
    if (sequence.session != nullptr) sequence.session->last_used_us = now;
  }
  if (job.cancelled.load() || now > job.deadline_us) {
    Abandon(job);
    return job.cancelled.load() ? Cancelled() : DeadlinePassed();
  }
  for (size_t i = 0; i < job.sequences.size(); ++i) {
    SequenceJob& sequence = job.sequences[i];
    cache_.Commit(sequence.reservation);
    const Session* session = resolved.sequences[i].session;
    if (session == nullptr) continue;
    const auto place = static_cast<size_t>(resolved.sequences[i].place);
    sequence.position_after = resolved.spec->cross ? session->history.context[place].length
                                                   : session->history.length[place];
  }
  return absl::OkStatus();
}

absl::Status AttentionRuntime::WhyDead(const AttendJob& job) const {
  if (failed()) return EngineFault("the engine has failed");
  if (job.cancelled.load()) return Cancelled();
  return now_us_() > job.deadline_us ? DeadlinePassed() : absl::OkStatus();
}

// Stateless sequences that are through give their scratch back at once: then every job holds
// scratch for at most one sequence between batches, all that this sequence needs, and can always go
// on. A job that waits for scratch therefore waits for jobs that will end.
void AttentionRuntime::ReleaseFinished(AttendJob& job) {
  for (SequenceJob& sequence : job.sequences) {
    if (sequence.phase == SequenceJob::Phase::kDone &&
        sequence.reservation.kind == KvReservation::Kind::kScratch) {
      cache_.Commit(sequence.reservation);
    }
  }
}

AttendBatch& AttentionRuntime::StartBatch(std::span<AttendJob* const> jobs) {
  const auto unused = std::find_if(batches_.begin(), batches_.end(),
                                   [](const AttendBatch& batch) { return !batch.in_flight; });
  AttendBatch& batch = unused != batches_.end() ? *unused : batches_.emplace_back();
  batch.Reset();
  batch.in_flight = true;
  batch.jobs.assign(jobs.begin(), jobs.end());
  batch.resolved.resize(jobs.size());
  batch.outcome.jobs.resize(jobs.size());
  batch.outcome.started_us = now_us_();
  Gather(batch);
  DropDead(batch);
  Launch(batch);
  return batch;
}

void AttentionRuntime::End(AttendBatch& batch, size_t index, absl::Status status) {
  Abandon(*batch.jobs[index]);
  batch.outcome.jobs[index] = {BatchOutcome::State::kEnded, std::move(status), 0};
}

void AttentionRuntime::Gather(AttendBatch& batch) {
  const ResolvedJob* first = nullptr;
  size_t sequences = 0;
  for (const AttendJob* job : batch.jobs) sequences += job->sequences.size();
  batch.sequences.resize(sequences);
  std::span<ResolvedSequence> left(batch.sequences);
  for (size_t i = 0; i < batch.jobs.size(); ++i) {
    AttendJob& job = *batch.jobs[i];
    if (absl::Status dead = WhyDead(job); !dead.ok()) {
      End(batch, i, std::move(dead));
      continue;
    }
    const absl::StatusOr<ResolvedJob> found = Resolve(job, left.first(job.sequences.size()));
    left = left.subspan(job.sequences.size());
    if (!found.ok()) {
      End(batch, i, found.status());
      continue;
    }
    batch.resolved[i] = *found;
    if (first != nullptr && !first->SameBatch(batch.resolved[i])) continue;
    BatchOutcome::Job added = AddJob(i, batch);
    if (!added.status.ok()) {
      End(batch, i, std::move(added.status));
      continue;
    }
    batch.outcome.jobs[i] = std::move(added);
    if (batch.outcome.jobs[i].state == BatchOutcome::State::kUntouched) continue;
    if (first == nullptr) first = &batch.resolved[i];
    batch.members.push_back(i);
  }
}

// Dead work is never launched: preparing the batch may have taken a job's last milliseconds.
void AttentionRuntime::DropDead(AttendBatch& batch) {
  const size_t dropped = std::erase_if(batch.members, [&](size_t i) {
    absl::Status dead = WhyDead(*batch.jobs[i]);
    if (dead.ok()) return false;
    std::erase_if(batch.items,
                  [&](const AttendItem& item) { return item.group == static_cast<int32_t>(i); });
    batch.outcome.tokens -= batch.outcome.jobs[i].tokens;
    End(batch, i, std::move(dead));
    return true;
  });
  if (dropped == 0 || batch.members.empty()) return;
  const ResolvedJob& first = batch.resolved[batch.members.front()];
  batch.work = {};
  for (const AttendItem& item : batch.items) {
    batch.work.Add(WorkOf(*first.spec, first.kv_dtype, item));
  }
}

// Late, as reserving for one job may move blocks of another one (copy-on-write).
void AttentionRuntime::ListBlocks(AttendBatch& batch) const {
  for (const AttendItem& item : batch.items) {
    const auto job = static_cast<size_t>(item.group);
    const auto index = static_cast<size_t>(item.sequence);
    const SequenceJob& sequence = batch.jobs[job]->sequences[index];
    const ResolvedSequence& found = batch.resolved[job].sequences[index];
    const bool cached_context =
        batch.resolved[job].spec->cross && found.session != nullptr && !sequence.has_keys;
    if (cached_context) {
      const BlockList& context = cache_.ContextBlocks(found.session->history, found.place);
      batch.blocks.insert(batch.blocks.end(), context.begin(),
                          context.begin() + item.block_count());
    } else {
      cache_.ListBlocks(sequence.reservation, item.keys(), batch.blocks);
    }
  }
  std::span<const int64_t> left(batch.blocks);
  for (AttendItem& item : batch.items) {
    item.blocks = left.first(static_cast<size_t>(item.block_count()));
    left = left.subspan(item.blocks.size());
  }
}

void AttentionRuntime::Launch(AttendBatch& batch) {
  BatchOutcome& outcome = batch.outcome;
  outcome.sequences = static_cast<int64_t>(batch.items.size());
  batch.launched_us = now_us_();
  for (size_t i : batch.members) {
    outcome.launched_late += batch.launched_us - kLaunchUs > batch.jobs[i]->deadline_us;
  }
  if (batch.items.empty()) return;
  const ResolvedJob& first = batch.resolved[batch.members.front()];
  const auto start = [&]() -> absl::StatusOr<Ticket> {
    ListBlocks(batch);
    ASSIGN_OR_RETURN(batch.plan, BuildPlan(first.engine_layer, *first.spec, first.kv_dtype,
                                           batch.items, std::move(batch.plan)));
    return engine_->Start(batch.plan, batch.items);
  };
  const absl::StatusOr<Ticket> ticket = start();
  if (ticket.ok()) {
    batch.ticket = *ticket;
  } else {
    cache_.EngineFailed(ticket.status());
  }
}

bool AttentionRuntime::Finished(const AttendBatch& batch) const {
  return !batch.launched() || failed() || engine_->Finished(*batch.ticket);
}

// The engine's part: its status, and how long it took. An engine that fails takes every batch in
// flight with it.
absl::Status AttentionRuntime::Await(AttendBatch& batch) {
  BatchOutcome& outcome = batch.outcome;
  if (batch.launched() && !failed()) {
    absl::StatusOr<StageTimes> stages = engine_->Wait(*batch.ticket);
    if (stages.ok()) outcome.stages = *stages;
    cache_.EngineFailed(stages.status());
  }
  const int64_t now = now_us_();
  const StageTimes& stages = outcome.stages;
  // The engine's own times count when this thread came late to see the batch before end.
  const auto took = [&](int64_t since) {
    return std::max(now - std::max(since, engine_free_us_),
                    stages.project_us + stages.attend_us + stages.output_us);
  };
  outcome.compute_us = took(outcome.started_us);
  outcome.started_us = now - outcome.compute_us;
  if (failed()) {
    if (!std::exchange(failure_told_, true)) outcome.engine = cache_.engine_status();
    return EngineFault("engine fault: " + std::string(cache_.engine_status().message()));
  }
  if (!batch.launched()) return absl::OkStatus();
  if (std::all_of(batch.members.begin(), batch.members.end(),
                  [&](size_t i) { return batch.resolved[i].few_rows; })) {
    recent_.few_rows_batch_us = double(took(batch.launched_us));
  }
  batch.time->Observe(batch.work, double(std::max<int64_t>(1, took(batch.launched_us))), stages);
  engine_free_us_ = now;
  return absl::OkStatus();
}

const BatchOutcome& AttentionRuntime::FinishBatch(AttendBatch& batch) {
  const absl::Status ran = Await(batch);
  BatchOutcome& outcome = batch.outcome;
  for (size_t i : batch.members) {
    AttendJob& job = *batch.jobs[i];
    if (job.first_batch_us == 0) job.first_batch_us = outcome.started_us;
    job.compute_us += outcome.compute_us;
    job.project_us += outcome.stages.project_us;
    job.attend_us += outcome.stages.attend_us;
    job.output_us += outcome.stages.output_us;
    job.batch_tokens = outcome.tokens;
    job.batch_sequences = outcome.sequences;
    if (!ran.ok()) {
      End(batch, i, ran);
    } else if (outcome.jobs[i].state == BatchOutcome::State::kEnded) {
      outcome.jobs[i].status = Finish(job, batch.resolved[i]);
    } else {
      ReleaseFinished(job);
    }
  }
  batch.in_flight = false;
  return outcome;
}

}  // namespace attend
