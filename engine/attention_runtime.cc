// SPDX-License-Identifier: Apache-2.0
//
// Models and batches. What a job needs before it may run is in runtime_jobs.cc, the session calls
// are in runtime_sessions.cc.
#include "engine/attention_runtime.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "engine/util/check.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

// Unused output buffers kept for the next answers.
constexpr int64_t kBuffersKeptBytes = int64_t{256} << 20;
// Chunks are whole blocks of rows; the first one, before anything was timed, has this many.
constexpr int64_t kFirstChunkRows = 512;
// From the last look at the deadlines to the launch; longer means that dead work was launched.
constexpr int64_t kLaunchUs = 1000;

absl::Status Cancelled() {
  return MakeError(absl::StatusCode::kCancelled, {.reason = Reason::kCancelled},
                   "the call was cancelled");
}

absl::Status DeadlinePassed() {
  return MakeError(absl::StatusCode::kDeadlineExceeded, {.reason = Reason::kDeadline},
                   "the deadline passed before the answer was ready");
}

}  // namespace

bool AttentionRuntime::Resolved::SameBatch(const Resolved& other) const {
  return engine_layer == other.engine_layer && kv_dtype == other.kv_dtype &&
         (spec == other.spec || *spec == *other.spec);
}

struct AttentionRuntime::Batch {
  std::vector<AttendItem> items;
  std::deque<std::vector<int64_t>> blocks;  // what the items' spans point to
  int64_t budget = 0;                       // tokens still free
  int64_t tokens = 0;
  double flops = 0;
  int32_t group = 0;  // index of the job being added
};

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
    absl::StatusOr<LayerInfo> added = engine_->AddLayer(source.spec, source.weights);
    if (!added.ok()) {
      return absl::Status(added.status().code(), "model " + name + ", layer " + source.name + ": " +
                                                     std::string(added.status().message()));
    }
    layer.engine = *added;
    model.compute_dtype = added->compute_dtype;
    model.layers.push_back(std::move(layer));
    if (progress) {
      progress(static_cast<int>(model.layers.size()), static_cast<int>(checkpoint.layers.size()));
    }
  }
  model.numerics_id = engine_->info().numerics_id + "-" + DTypeName(model.weight_dtype) + "-" +
                      DTypeName(model.compute_dtype) + "-kv" + DTypeName(model.kv_dtype);
  models_.push_back(std::move(model));
  return absl::OkStatus();
}

int64_t AttentionRuntime::ChunkRows(const AttentionSpec& spec, const AttendItem& whole) const {
  if (flops_per_us_ <= 0) return std::min(kFirstChunkRows, options_.batch_tokens);
  AttendItem chunk = whole;
  chunk.rows = std::min<int64_t>(chunk.rows, kBlockTokens);
  chunk.new_keys = std::min<int64_t>(chunk.new_keys, kBlockTokens);
  const double us = ItemFlops(spec, chunk) / flops_per_us_;
  const double blocks = static_cast<double>(options_.chunk_us) / std::max(us, 1e-3);
  const int64_t most = std::max<int64_t>(1, options_.batch_tokens / kBlockTokens);
  return kBlockTokens * std::clamp<int64_t>(static_cast<int64_t>(blocks), 1, most);
}

bool AttentionRuntime::AddChunk(AttendJob& job, size_t index, const Resolved& resolved,
                                Batch& batch) {
  SequenceJob& sequence = job.sequences[index];
  const AttentionSpec& spec = *resolved.spec;
  const bool self = !spec.raw() && !spec.cross;  // query rows and new keys are the same rows
  if (sequence.phase == SequenceJob::Phase::kWaiting) {
    if (resolved.sessions[index] == nullptr &&
        cache_.ReserveScratch(resolved.geometry(), sequence.keys, sequence.reservation) !=
            KvCache::Outcome::kOk) {
      return false;
    }
    sequence.phase = SequenceJob::Phase::kRunning;
  }
  const int64_t total_keys = sequence.cached_before + sequence.keys;

  // What is left, as one item.
  AttendItem item;
  item.group = batch.group;
  item.rows = sequence.rows - sequence.rows_done;
  item.new_keys = sequence.keys - sequence.keys_done;
  item.cached_keys = sequence.cached_before + sequence.keys_done;
  item.first_row = total_keys - sequence.rows + sequence.rows_done;
  item.causal = job.raw_session ? spec.causal : job.causal;
  if (item.rows == 0 && item.new_keys == 0) {
    sequence.phase = SequenceJob::Phase::kDone;
    return true;
  }
  const auto cost_of = [self](const AttendItem& part) {
    return self ? std::max(part.rows, part.new_keys) : part.rows + part.new_keys;
  };
  const int64_t cost = cost_of(item);
  if (cost > batch.budget) {
    if (cost <= options_.batch_tokens && !batch.items.empty()) return false;
    const int64_t limit = batch.budget / kBlockTokens * kBlockTokens;
    if (limit == 0 && !batch.items.empty()) return false;
    const int64_t chunk =
        std::max<int64_t>(1, std::min(ChunkRows(spec, item), limit > 0 ? limit : batch.budget));
    if (self && item.causal) {
      item.rows = item.new_keys = std::min(chunk, item.rows);
    } else if (item.new_keys > 0) {  // every key first
      item.new_keys = std::min(chunk, item.new_keys);
      item.rows = 0;
    } else {
      item.rows = std::min(chunk, item.rows);
    }
  }

  const auto advance = [](InputRows rows, int64_t count, int64_t width) {
    if (rows.data == nullptr) return rows;
    return InputRows{
        static_cast<const std::byte*>(rows.data) + count * width * DTypeBytes(rows.dtype),
        rows.dtype};
  };
  const int64_t query_width = spec.raw() ? int64_t{spec.q_heads} * spec.head_dim : spec.d_model;
  const int64_t key_width =
      spec.raw() ? int64_t{spec.kv_heads} * spec.head_dim : spec.context_width;
  item.query = advance(sequence.query, sequence.rows_done, query_width);
  item.key_source = advance(sequence.key_source, sequence.keys_done, key_width);
  item.value_source =
      advance(sequence.value_source, sequence.keys_done, int64_t{spec.kv_heads} * spec.v_head_dim);
  item.output_dtype = job.output_dtype;
  item.output = job.output.data.get() + (sequence.output_row + sequence.rows_done) *
                                            job.output_width * DTypeBytes(job.output_dtype);
  const bool cached_context =
      resolved.spec->cross && resolved.sessions[index] != nullptr && !sequence.has_keys;
  batch.blocks.push_back(cached_context ? cache_.ContextBlocks(resolved.sessions[index]->history,
                                                               resolved.places[index])
                                        : cache_.Blocks(sequence.reservation));
  item.blocks = batch.blocks.back();
  item.block_tokens = sequence.reservation.block_tokens;
  AddBias(job, index, item);
  AddWeights(job, index, item);

  sequence.rows_done += item.rows;
  sequence.keys_done += item.new_keys;
  if (sequence.rows_done == sequence.rows && sequence.keys_done == sequence.keys) {
    sequence.phase = SequenceJob::Phase::kDone;
  }
  const int64_t tokens = cost_of(item);
  batch.budget = std::max<int64_t>(0, batch.budget - tokens);
  batch.tokens += tokens;
  batch.flops += ItemFlops(spec, item);
  batch.items.push_back(item);
  return true;
}

// Column c of the bias belongs to key total_keys - columns + c; rows are the sequence's new rows.
void AttentionRuntime::AddBias(const AttendJob& job, size_t index, AttendItem& item) {
  if (job.bias_sequences == 0 || item.rows == 0) return;
  const SequenceJob& sequence = job.sequences[index];
  const int64_t total_keys = sequence.cached_before + sequence.keys;
  const int64_t slice = job.bias_sequences == 1 ? 0 : static_cast<int64_t>(index);
  const int64_t plane = job.bias_rows * job.bias_columns;
  item.bias.data =
      job.bias.data() + slice * job.bias_heads * plane + sequence.rows_done * job.bias_columns;
  item.bias.head_stride = job.bias_heads == 1 ? 0 : plane;
  item.bias.row_stride = job.bias_columns;
  item.bias.first_key = total_keys - job.bias_columns;
  item.bias.columns = std::clamp<int64_t>(item.keys() - item.bias.first_key, 0, job.bias_columns);
}

void AttentionRuntime::AddWeights(const AttendJob& job, size_t index, AttendItem& item) {
  const SequenceJob& sequence = job.sequences[index];
  const int64_t begin = std::max(job.weights.row_begin, sequence.rows_done);
  const int64_t end =
      std::min(job.weights.row_begin + sequence.weight_rows, sequence.rows_done + item.rows);
  if (!job.weights.full || begin >= end) return;
  item.weights.data = reinterpret_cast<float*>(sequence.weights.data.get()) +
                      (begin - job.weights.row_begin) * sequence.weight_keys;
  item.weights.heads = job.weights.heads.data();
  item.weights.head_count = static_cast<int32_t>(job.weights.heads.size());
  item.weights.row_begin = begin - sequence.rows_done;
  item.weights.row_end = end - sequence.rows_done;
  item.weights.head_stride = sequence.weight_rows * sequence.weight_keys;
  item.weights.row_stride = sequence.weight_keys;
}

void AttentionRuntime::Abandon(AttendJob& job) {
  for (SequenceJob& sequence : job.sequences) cache_.RollBack(sequence.reservation);
  job.started = false;
}

absl::Status AttentionRuntime::Finish(AttendJob& job, const Resolved& resolved) {
  const int64_t now = now_us_();
  for (Session* session : resolved.sessions) {
    if (session != nullptr) session->last_used_us = now;
  }
  if (job.cancelled.load() || now > job.deadline_us) {
    Abandon(job);
    return job.cancelled.load() ? Cancelled() : DeadlinePassed();
  }
  for (size_t i = 0; i < job.sequences.size(); ++i) {
    SequenceJob& sequence = job.sequences[i];
    cache_.Commit(sequence.reservation);
    const Session* session = resolved.sessions[i];
    if (session == nullptr) continue;
    const auto place = static_cast<size_t>(resolved.places[i]);
    sequence.position_after = resolved.spec->cross ? session->history.context[place].length
                                                   : session->history.length[place];
  }
  return absl::OkStatus();
}

absl::Status AttentionRuntime::WhyDead(const AttendJob& job) const {
  if (failed_) return EngineFault("the engine has failed");
  if (job.cancelled.load()) return Cancelled();
  return now_us_() > job.deadline_us ? DeadlinePassed() : absl::OkStatus();
}

// Adds what fits of the job to the batch. kEnded with OK: all of it is in.
BatchOutcome::Job AttentionRuntime::AddJob(AttendJob& job, const Resolved& resolved, Batch& batch) {
  BatchOutcome::Job result;
  if (!job.started) {
    const int64_t tokens = job.tokens();
    if (!batch.items.empty() && tokens > batch.budget && tokens <= options_.batch_tokens) {
      return result;
    }
    if (absl::Status status = Begin(job, resolved); !status.ok()) {
      return {BatchOutcome::State::kEnded, std::move(status), 0};
    }
  }
  const int64_t tokens_before = batch.tokens;
  bool complete = true;
  for (size_t s = 0; s < job.sequences.size() && complete; ++s) {
    if (job.sequences[s].phase == SequenceJob::Phase::kDone) continue;
    complete =
        AddChunk(job, s, resolved, batch) && job.sequences[s].phase == SequenceJob::Phase::kDone;
  }
  result.tokens = batch.tokens - tokens_before;
  if (complete) {
    result.state = BatchOutcome::State::kEnded;
  } else if (result.tokens > 0) {
    result.state = BatchOutcome::State::kContinues;
  }
  return result;
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

BatchOutcome AttentionRuntime::RunBatch(std::span<AttendJob* const> jobs) {
  BatchOutcome outcome;
  outcome.jobs.resize(jobs.size());
  outcome.started_us = now_us_();
  Batch batch;
  batch.budget = options_.batch_tokens;
  std::vector<Resolved> resolved(jobs.size());
  const Resolved* first = nullptr;
  std::vector<size_t> members;
  const auto end = [&](size_t i, absl::Status status) {
    Abandon(*jobs[i]);
    outcome.jobs[i] = {BatchOutcome::State::kEnded, std::move(status), 0};
  };

  for (size_t i = 0; i < jobs.size(); ++i) {
    if (absl::Status dead = WhyDead(*jobs[i]); !dead.ok()) {
      end(i, std::move(dead));
      continue;
    }
    absl::StatusOr<Resolved> found = Resolve(*jobs[i]);
    if (!found.ok()) {
      end(i, found.status());
      continue;
    }
    resolved[i] = *std::move(found);
    if (first != nullptr && !first->SameBatch(resolved[i])) continue;
    batch.group = static_cast<int32_t>(i);
    outcome.jobs[i] = AddJob(*jobs[i], resolved[i], batch);
    if (!outcome.jobs[i].status.ok()) {
      end(i, outcome.jobs[i].status);
    } else if (outcome.jobs[i].state != BatchOutcome::State::kUntouched) {
      if (first == nullptr) first = &resolved[i];
      members.push_back(i);
    }
  }
  // Dead work is never launched: preparing the batch may have taken a job's last milliseconds.
  std::erase_if(members, [&](size_t i) {
    absl::Status dead = WhyDead(*jobs[i]);
    if (dead.ok()) return false;
    std::erase_if(batch.items,
                  [&](const AttendItem& item) { return item.group == static_cast<int32_t>(i); });
    batch.tokens -= outcome.jobs[i].tokens;
    end(i, std::move(dead));
    return true;
  });

  outcome.tokens = batch.tokens;
  outcome.sequences = static_cast<int64_t>(batch.items.size());
  const int64_t launch_us = now_us_();
  for (size_t i : members) outcome.launched_late += launch_us - kLaunchUs > jobs[i]->deadline_us;
  const absl::Status ran = batch.items.empty() ? absl::OkStatus() : Run(batch, *first, outcome);
  outcome.compute_us = now_us_() - outcome.started_us;
  for (size_t i : members) {
    AttendJob& job = *jobs[i];
    if (job.first_batch_us == 0) job.first_batch_us = outcome.started_us;
    job.compute_us += outcome.compute_us;
    job.project_us += outcome.stages.project_us;
    job.attend_us += outcome.stages.attend_us;
    job.output_us += outcome.stages.output_us;
    job.batch_tokens = outcome.tokens;
    job.batch_sequences = outcome.sequences;
    if (!ran.ok()) {
      end(i, ran);
    } else if (outcome.jobs[i].state == BatchOutcome::State::kEnded) {
      outcome.jobs[i].status = Finish(job, resolved[i]);
    } else {
      ReleaseFinished(job);
    }
  }
  return outcome;
}

absl::Status AttentionRuntime::EngineFault(const std::string& what) {
  return MakeError(absl::StatusCode::kInternal, {.reason = Reason::kEngineFault}, what);
}

absl::Status AttentionRuntime::Run(const Batch& batch, const Resolved& resolved,
                                   BatchOutcome& outcome) {
  const auto run = [&]() -> absl::StatusOr<StageTimes> {
    ASSIGN_OR_RETURN(const BatchPlan plan, BuildPlan(resolved.engine_layer, *resolved.spec,
                                                     resolved.kv_dtype, batch.items));
    ASSIGN_OR_RETURN(const Ticket ticket, engine_->Start(plan, batch.items));
    return engine_->Wait(ticket);
  };
  const int64_t begin = now_us_();
  absl::StatusOr<StageTimes> stages = run();
  if (!stages.ok()) {
    failed_ = true;
    outcome.engine_failed = true;
    return EngineFault("engine fault: " + std::string(stages.status().message()));
  }
  outcome.stages = *stages;
  const auto elapsed = static_cast<double>(std::max<int64_t>(1, now_us_() - begin));
  const double rate = batch.flops / elapsed;
  // A moving average over about five batches; it steers chunk sizes only, never results.
  flops_per_us_ = flops_per_us_ <= 0 ? rate : 0.8 * flops_per_us_ + 0.2 * rate;
  return absl::OkStatus();
}

}  // namespace attend
