// SPDX-License-Identifier: Apache-2.0
//
// What of a job goes into a batch. A batch has room for so many tokens, for so many bytes of the
// engine's workspace, and for so much predicted time; what exceeds one of them is cut into chunks
// of rows or keys.
#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "engine/attention_runtime.h"

namespace attend {
namespace {

// A chunk may take this many times what one row takes there. Where one row is dear because it reads
// a long history, shorter chunks would do little but read it again.
constexpr double kLeastRowsTime = 2.5;
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// Query rows and new keys are the same rows.
bool OwnKeys(const AttentionSpec& spec) { return !spec.raw() && !spec.cross; }

// A step of a decode loop or a few tokens that it looks ahead: all sequences have few rows, which
// take about the time of one because the weights and keys that they read count. Never cut for time.
// More rows in all are work like any other, in however many sequences they come.
bool FewRows(const AttendJob& job) {
  constexpr int64_t kFewRows = 16;
  constexpr int64_t kFewRowsInAll = 128;
  return job.tokens() <= kFewRowsInAll &&
         std::all_of(job.sequences.begin(), job.sequences.end(), [](const SequenceJob& sequence) {
           return std::max(sequence.rows, sequence.keys) <= kFewRows;
         });
}

bool InSessions(const AttendJob& job) {
  return std::any_of(job.sequences.begin(), job.sequences.end(),
                     [](const SequenceJob& sequence) { return !sequence.session_id.empty(); });
}

// One kind of work takes equally long in equal circumstances: layers of one shape, or anything raw.
std::array<int64_t, 8> KindOf(const AttentionSpec& spec, DType kv_dtype) {
  const auto dtype = static_cast<int64_t>(kv_dtype);
  if (spec.raw()) return {dtype};
  return {dtype,        spec.d_model,  spec.context_width, spec.output_width,
          spec.q_heads, spec.kv_heads, spec.head_dim,      spec.v_head_dim};
}

InputRows Advance(InputRows rows, int64_t count, int64_t width) {
  if (rows.data == nullptr) return rows;
  return {static_cast<const std::byte*>(rows.data) + count * width * DTypeBytes(rows.dtype),
          rows.dtype};
}

// Column c of the bias belongs to key total_keys - columns + c; rows are the sequence's new rows.
void AddBias(const AttendJob& job, size_t index, AttendItem& item) {
  if (job.bias_sequences == 0 || item.rows == 0) return;
  const SequenceJob& sequence = job.sequences[index];
  const int64_t total_keys = sequence.cached_before + sequence.keys;
  const int64_t slice = job.bias_sequences == 1 ? 0 : static_cast<int64_t>(index);
  const int64_t plane = job.bias_rows * job.bias_columns;
  item.bias.data =
      job.bias + slice * job.bias_heads * plane + sequence.rows_done * job.bias_columns;
  item.bias.head_stride = job.bias_heads == 1 ? 0 : plane;
  item.bias.row_stride = job.bias_columns;
  item.bias.first_key = total_keys - job.bias_columns;
  item.bias.columns = std::clamp<int64_t>(item.keys() - item.bias.first_key, 0, job.bias_columns);
}

void AddWeights(const AttendJob& job, size_t index, AttendItem& item) {
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

}  // namespace

BatchTime& AttentionRuntime::TimeOf(const ResolvedJob& resolved) {
  return times_[KindOf(*resolved.spec, resolved.kv_dtype)];
}

// What is left of the job, by its counts alone. It may have been checked against its sessions, or
// not yet.
BatchWork AttentionRuntime::WorkLeft(const AttendJob& job, const ResolvedJob& resolved) const {
  const AttentionSpec& spec = *resolved.spec;
  BatchWork work;
  for (size_t s = 0; s < job.sequences.size(); ++s) {
    const SequenceJob& sequence = job.sequences[s];
    const Session* session = resolved.sequences[s].session;
    int64_t before = sequence.cached_before;
    if (!job.started && session != nullptr) {
      const auto place = static_cast<size_t>(resolved.sequences[s].place);
      before = spec.cross ? session->history.context[place].length : session->history.length[place];
      if (!spec.cross && sequence.position.has_value()) {
        before = std::min(before, *sequence.position);  // more is refused
      }
    }
    AttendItem item;
    item.rows = sequence.rows - sequence.rows_done;
    item.new_keys = sequence.keys - sequence.keys_done;
    item.cached_keys = before + sequence.keys_done;
    item.first_row = before + sequence.keys - item.rows;
    item.causal = job.raw_session ? spec.causal : job.causal;
    work.Add(WorkOf(spec, resolved.kv_dtype, item));
  }
  return work;
}

bool AttentionRuntime::NeedsChunks(AttendJob& job) {
  if (job.tokens() > options_.batch_tokens) return true;
  if (FewRows(job)) return false;
  asked_.resize(job.sequences.size());
  const absl::StatusOr<ResolvedJob> resolved = Resolve(job, asked_);
  if (!resolved.ok()) return false;
  const double us = TimeOf(*resolved).PredictUs(WorkLeft(job, *resolved));
  return us > double(BatchBudgetUs(options_.chunk_us, us, now_us_(), recent_));
}

// The batch's room before its first job, of which `left` is left, is in it. The pass over the
// weights that its next rows need takes a part of its time.
BatchShare AttentionRuntime::WholeBatch(const AttendJob& job, const ResolvedJob& resolved,
                                        const BatchTime& time, const BatchWork& left) const {
  const int64_t bytes = options_.engine.workspace_bytes;
  const auto next = std::find_if(
      job.sequences.begin(), job.sequences.end(),
      [](const SequenceJob& sequence) { return sequence.phase != SequenceJob::Phase::kDone; });
  BatchWork row;
  if (next != job.sequences.end()) {
    const auto index = static_cast<size_t>(next - job.sequences.begin());
    row = WorkOf(*resolved.spec, resolved.kv_dtype, NextItem(job, index, resolved, 1));
  }
  const double budget_us =
      std::max(double(BatchBudgetUs(options_.chunk_us, time.PredictUs(left), now_us_(), recent_)),
               kLeastRowsTime * time.PredictUs(row));
  return {options_.batch_tokens, bytes > 0 ? bytes : kNoLimit,
          std::max(0.0, budget_us - time.PredictUs({.weights = row.weights}))};
}

BatchShare AttentionRuntime::ShareOf(const AttendItem& item, const ResolvedJob& resolved,
                                     const BatchTime& time) const {
  const AttentionSpec& spec = *resolved.spec;
  BatchWork work = WorkOf(spec, resolved.kv_dtype, item);
  work.weights = 0;
  const bool own_keys = OwnKeys(spec);
  return {own_keys ? std::max(item.rows, item.new_keys) : item.rows + item.new_keys,
          WorkspaceBytes(spec, item), time.PredictUs(work)};
}

// Adds what fits of the job to the batch. kEnded with OK: all of it is in.
BatchOutcome::Job AttentionRuntime::AddJob(size_t index, AttendBatch& batch) {
  AttendJob& job = *batch.jobs[index];
  ResolvedJob& resolved = batch.resolved[index];
  const bool few_rows = FewRows(job);
  resolved.few_rows = few_rows;
  BatchOutcome::Job result;
  BatchTime& time = TimeOf(resolved);
  BatchWork left = WorkLeft(job, resolved);
  if (!batch.items.empty() && !few_rows) {
    BatchWork beside = left;
    beside.weights = 0;
    if (time.PredictUs(beside) > batch.room.us) return result;
  }
  if (!job.started) {
    const int64_t tokens = job.tokens();
    if (!batch.items.empty() && tokens > batch.room.tokens && tokens <= options_.batch_tokens) {
      return result;
    }
    if (absl::Status status = Begin(job, resolved); !status.ok()) {
      return {BatchOutcome::State::kEnded, std::move(status), 0};
    }
    if (few_rows && InSessions(job)) {
      recent_.append_us = now_us_();
    } else if (few_rows || time.PredictUs(left) <= double(options_.chunk_us)) {
      recent_.short_us = now_us_();
    }
  }
  if (batch.items.empty()) {
    batch.time = &time;
    batch.whole = batch.room = WholeBatch(job, resolved, time, left);
  }
  const int64_t tokens_before = batch.outcome.tokens;
  bool complete = true;
  for (size_t s = 0; s < job.sequences.size() && complete; ++s) {
    if (job.sequences[s].phase == SequenceJob::Phase::kDone) continue;
    complete = AddChunk(index, s, batch) && job.sequences[s].phase == SequenceJob::Phase::kDone;
  }
  result.tokens = batch.outcome.tokens - tokens_before;
  if (complete) {
    result.state = BatchOutcome::State::kEnded;
  } else if (result.tokens > 0) {
    result.state = BatchOutcome::State::kContinues;
  }
  return result;
}

// The next `most` rows or keys of the sequence, or all that is left; everything of the item but its
// blocks.
AttendItem AttentionRuntime::NextItem(const AttendJob& job, size_t index,
                                      const ResolvedJob& resolved, int64_t most) const {
  const SequenceJob& sequence = job.sequences[index];
  const AttentionSpec& spec = *resolved.spec;
  AttendItem item;
  item.sequence_rows = sequence.rows;
  item.rows = sequence.rows - sequence.rows_done;
  item.new_keys = sequence.keys - sequence.keys_done;
  item.cached_keys = sequence.cached_before + sequence.keys_done;
  item.first_row = sequence.cached_before + sequence.keys - sequence.rows + sequence.rows_done;
  item.causal = job.raw_session ? spec.causal : job.causal;
  if (OwnKeys(spec) && item.causal) {
    item.rows = item.new_keys = std::min(most, item.rows);
  } else if (item.new_keys == 0) {
    item.rows = std::min(most, item.rows);
  } else if (most < kNoLimit || (OwnKeys(spec) && sequence.keys_done > 0)) {  // every key first
    item.new_keys = std::min(most, item.new_keys);
    item.rows = 0;
  }

  const int64_t query_width = spec.raw() ? int64_t{spec.q_heads} * spec.head_dim : spec.d_model;
  const int64_t key_width =
      spec.raw() ? int64_t{spec.kv_heads} * spec.head_dim : spec.context_width;
  item.query = Advance(sequence.query, sequence.rows_done, query_width);
  item.key_source = Advance(sequence.key_source, sequence.keys_done, key_width);
  item.value_source =
      Advance(sequence.value_source, sequence.keys_done, int64_t{spec.kv_heads} * spec.v_head_dim);
  item.output_dtype = job.output_dtype;
  item.output = job.output.data.get() + (sequence.output_row + sequence.rows_done) *
                                            job.output_width * DTypeBytes(job.output_dtype);
  item.block_tokens = sequence.reservation.block_tokens;
  AddBias(job, index, item);
  AddWeights(job, index, item);
  return item;
}

// Rows of the sequence's next chunk: as many as the batch has room for. 0: none in this batch; in
// an empty one at least one row. Before many rows of such work were timed, a chunk has enough of
// them to be a measure.
int64_t AttentionRuntime::ChunkRows(const AttendJob& job, size_t index, const ResolvedJob& resolved,
                                    const AttendBatch& batch) const {
  const AttendItem whole = NextItem(job, index, resolved, kNoLimit);
  const bool known = batch.time->Known(WorkOf(*resolved.spec, resolved.kv_dtype, whole));
  const int64_t rows = MostRows(std::max(whole.rows, whole.new_keys), [&](int64_t most) {
    BatchShare share = ShareOf(NextItem(job, index, resolved, most), resolved, *batch.time);
    if (resolved.few_rows || (!known && most <= StageTime::kManyRows)) share.us = 0;
    return share.Within(batch.room);
  });
  if (batch.items.empty()) return std::max<int64_t>(1, rows);
  return rows >= kBlockTokens ? rows : 0;
}

// Adds what fits of the sequence; false when it has to wait for another batch, or for scratch.
bool AttentionRuntime::AddChunk(size_t index, size_t sequence_index, AttendBatch& batch) {
  AttendJob& job = *batch.jobs[index];
  const ResolvedJob& resolved = batch.resolved[index];
  const AttentionSpec& spec = *resolved.spec;
  const Session* session = resolved.sequences[sequence_index].session;
  SequenceJob& sequence = job.sequences[sequence_index];
  if (sequence.phase == SequenceJob::Phase::kWaiting) {
    if (session == nullptr &&
        cache_.ReserveScratch(resolved.geometry(), sequence.keys, sequence.reservation) !=
            KvCache::Outcome::kOk) {
      return false;
    }
    sequence.phase = SequenceJob::Phase::kRunning;
  }

  AttendItem item = NextItem(job, sequence_index, resolved, kNoLimit);
  if (item.rows == 0 && item.new_keys == 0) {
    sequence.phase = SequenceJob::Phase::kDone;
    return true;
  }
  BatchShare share = ShareOf(item, resolved, *batch.time);
  if (resolved.few_rows) share.us = 0;
  if (!share.Within(batch.room)) {
    if (!batch.items.empty() && share.Within(batch.whole)) return false;
    const int64_t rows = ChunkRows(job, sequence_index, resolved, batch);
    if (rows == 0) return false;
    item = NextItem(job, sequence_index, resolved, rows);
  }
  item.group = static_cast<int32_t>(index);
  item.sequence = static_cast<int32_t>(sequence_index);

  sequence.rows_done += item.rows;
  sequence.keys_done += item.new_keys;
  if (sequence.rows_done == sequence.rows && sequence.keys_done == sequence.keys) {
    sequence.phase = SequenceJob::Phase::kDone;
  }
  share = ShareOf(item, resolved, *batch.time);
  batch.room.tokens = std::max<int64_t>(0, batch.room.tokens - share.tokens);
  batch.room.workspace_bytes =
      std::max<int64_t>(0, batch.room.workspace_bytes - share.workspace_bytes);
  batch.room.us = std::max(0.0, batch.room.us - share.us);
  batch.outcome.tokens += share.tokens;
  batch.work.Add(WorkOf(spec, resolved.kv_dtype, item));
  batch.items.push_back(item);
  return true;
}

}  // namespace attend
