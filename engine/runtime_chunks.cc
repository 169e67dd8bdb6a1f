// SPDX-License-Identifier: Apache-2.0
//
// What of a job goes into a batch. A batch has room for so many tokens and for so many bytes of the
// engine's workspace; what exceeds either is cut into chunks of rows or keys.
#include <algorithm>
#include <limits>
#include <utility>

#include "engine/attention_runtime.h"

namespace attend {
namespace {

// Chunks are whole blocks of rows; the first one, before anything was timed, has this many.
constexpr int64_t kFirstChunkRows = 512;
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// Query rows and new keys are the same rows.
bool OwnKeys(const AttentionSpec& spec) { return !spec.raw() && !spec.cross; }

BatchShare ShareOf(const AttentionSpec& spec, const AttendItem& item) {
  return {OwnKeys(spec) ? std::max(item.rows, item.new_keys) : item.rows + item.new_keys,
          WorkspaceBytes(spec, item)};
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
      job.bias.data() + slice * job.bias_heads * plane + sequence.rows_done * job.bias_columns;
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

BatchShare AttentionRuntime::WholeBatch() const {
  const int64_t bytes = options_.engine.workspace_bytes;
  return {options_.batch_tokens, bytes > 0 ? bytes : kNoLimit};
}

// Adds what fits of the job to the batch. kEnded with OK: all of it is in.
BatchOutcome::Job AttentionRuntime::AddJob(size_t index, AttendBatch& batch) {
  AttendJob& job = *batch.jobs[index];
  BatchOutcome::Job result;
  if (!job.started) {
    const int64_t tokens = job.tokens();
    if (!batch.items.empty() && tokens > batch.room.tokens && tokens <= options_.batch_tokens) {
      return result;
    }
    if (absl::Status status = Begin(job, batch.resolved[index]); !status.ok()) {
      return {BatchOutcome::State::kEnded, std::move(status), 0};
    }
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

// Rows that take about chunk_us.
int64_t AttentionRuntime::RowsInTime(const AttentionSpec& spec, const AttendItem& whole) const {
  if (flops_per_us_ <= 0) return std::min(kFirstChunkRows, options_.batch_tokens);
  AttendItem chunk = whole;
  chunk.rows = std::min<int64_t>(chunk.rows, kBlockTokens);
  chunk.new_keys = std::min<int64_t>(chunk.new_keys, kBlockTokens);
  const double us = ItemFlops(spec, chunk) / flops_per_us_;
  const double blocks = static_cast<double>(options_.chunk_us) / std::max(us, 1e-3);
  const int64_t most = std::max<int64_t>(1, options_.batch_tokens / kBlockTokens);
  return kBlockTokens * std::clamp<int64_t>(static_cast<int64_t>(blocks), 1, most);
}

// The longest chunk of the sequence that takes no more than chunk_us and has room in the batch:
// whole blocks, or in an empty batch whatever fits, at least one row. 0: none in this batch.
int64_t AttentionRuntime::ChunkRows(const AttendJob& job, size_t index, const ResolvedJob& resolved,
                                    const AttendBatch& batch) const {
  const AttentionSpec& spec = *resolved.spec;
  int64_t fits = 0;
  int64_t most = RowsInTime(spec, NextItem(job, index, resolved, kNoLimit));
  while (fits < most) {
    const int64_t rows = most - (most - fits) / 2;
    if (ShareOf(spec, NextItem(job, index, resolved, rows)).Within(batch.room)) {
      fits = rows;
    } else {
      most = rows - 1;
    }
  }
  if (fits >= kBlockTokens) return fits / kBlockTokens * kBlockTokens;
  return batch.items.empty() ? std::max<int64_t>(1, fits) : 0;
}

// Adds what fits of the sequence; false when it has to wait for another batch, or for scratch.
bool AttentionRuntime::AddChunk(size_t index, size_t sequence_index, AttendBatch& batch) {
  AttendJob& job = *batch.jobs[index];
  const ResolvedJob& resolved = batch.resolved[index];
  const AttentionSpec& spec = *resolved.spec;
  const Session* session = resolved.sessions[sequence_index];
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
  if (const BatchShare whole = ShareOf(spec, item); !whole.Within(batch.room)) {
    if (!batch.items.empty() && whole.Within(WholeBatch())) return false;
    const int64_t rows = ChunkRows(job, sequence_index, resolved, batch);
    if (rows == 0) return false;
    item = NextItem(job, sequence_index, resolved, rows);
  }
  item.group = static_cast<int32_t>(index);
  const bool cached_context = spec.cross && session != nullptr && !sequence.has_keys;
  batch.blocks.push_back(
      cached_context ? cache_.ContextBlocks(session->history, resolved.places[sequence_index])
                     : cache_.Blocks(sequence.reservation));
  item.blocks = batch.blocks.back();

  sequence.rows_done += item.rows;
  sequence.keys_done += item.new_keys;
  if (sequence.rows_done == sequence.rows && sequence.keys_done == sequence.keys) {
    sequence.phase = SequenceJob::Phase::kDone;
  }
  const BatchShare share = ShareOf(spec, item);
  batch.room.tokens = std::max<int64_t>(0, batch.room.tokens - share.tokens);
  batch.room.workspace_bytes =
      std::max<int64_t>(0, batch.room.workspace_bytes - share.workspace_bytes);
  batch.outcome.tokens += share.tokens;
  batch.flops += ItemFlops(spec, item);
  batch.items.push_back(item);
  return true;
}

}  // namespace attend
