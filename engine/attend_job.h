// SPDX-License-Identifier: Apache-2.0
//
// One Attend request as the runtime sees it: checked against everything that is known without
// sessions, its tensors gathered in buffers. Made by server/convert, run by AttentionRuntime in one
// or several batches.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "engine/attention_plan.h"
#include "engine/kv_cache.h"
#include "engine/util/buffer_pool.h"
#include "engine/util/recycled.h"

namespace attend {

// Which attention weights a request wants back (attend.v1.WeightsRequest, mode FULL).
struct WeightsWanted {
  bool full = false;
  RecycledVector<int32_t> heads;  // query heads; empty = all
  int64_t row_begin = 0;
  std::optional<int64_t> row_end;  // unset or beyond = the sequence's length
};

struct SequenceJob {
  // What is asked. Pointers go into the job's input buffer.
  int64_t rows = 0;        // query rows
  InputRows query;         // [rows, d_model]; raw: [rows, q_heads, head_dim]
  int64_t output_row = 0;  // row of the query tensor, and of the job's output, where they begin
  bool has_keys = false;   // brings keys: always in self-attention, else a context or raw k and v
  int64_t keys = 0;        // rows of key_source (self-attention: = rows, the same rows)
  int64_t key_row = 0;     // row of the tensor that key_source lies in where they begin
  InputRows key_source;    // [keys, context_width]; raw: [keys, kv_heads, head_dim]
  InputRows value_source;  // raw: [keys, kv_heads, v_head_dim]
  std::array<uint64_t, 2> context_hash{};  // of dtype, shape and bytes of a context
  RecycledString session_id;               // empty = stateless
  std::optional<int64_t> position;
  bool rewind = false;
  bool no_append = false;

  // What came of it.
  int64_t position_after = 0;  // AttendResponse.positions
  Buffer weights;              // F32 [weight_heads, weight_rows, weight_keys]
  int64_t weight_heads = 0;
  int64_t weight_rows = 0;
  int64_t weight_keys = 0;

  // The runtime's progress.
  enum class Phase : uint8_t { kWaiting, kRunning, kDone };
  Phase phase = Phase::kWaiting;
  int64_t keys_done = 0;
  int64_t rows_done = 0;
  int64_t cached_before = 0;  // keys cached before this call
  KvReservation reservation;
};

struct AttendJob {
  // The layer: a loaded model's, or raw when model is -1.
  int model = -1;
  int layer = 0;              // index in the model, or in the raw session
  RecycledString layer_name;  // for messages and the log
  bool cross = false;  // K and V come from a context (a plain module that was given one, too)
  bool causal = false;
  bool raw_session = false;  // raw, in sessions: their layout holds the options
  std::shared_ptr<const AttentionSpec> raw_spec;  // raw: what the tensors and options say

  RecycledVector<SequenceJob> sequences;
  Buffer input;                 // gathered request tensors
  const float* bias = nullptr;  // in `input`: attention_bias
                                // [bias_sequences, bias_heads, bias_rows, bias_columns]
  int64_t bias_sequences = 0;   // 0 = none; 1 or one per sequence
  int64_t bias_heads = 0;       // 1 or q_heads
  int64_t bias_rows = 0;
  int64_t bias_columns = 0;

  int64_t output_rows = 0;  // padding rows included
  DType output_dtype = DType::kF32;
  WeightsWanted weights;
  int64_t response_bytes_limit = 0;  // tensor bytes allowed in the answer

  int64_t arrival_us = 0;   // monotonic
  int64_t deadline_us = 0;  // monotonic
  std::atomic<bool> cancelled{false};

  // What came of it. `output` is [output_rows, output_width] with zeros in padding rows.
  Buffer output;
  int64_t output_width = 0;
  int64_t first_batch_us = 0;  // when its first batch started; 0 = never
  int64_t compute_us = 0;
  int64_t project_us = 0;
  int64_t attend_us = 0;
  int64_t output_us = 0;
  int64_t batch_tokens = 0;  // of its last batch
  int64_t batch_sequences = 0;
  bool started = false;  // checked against its sessions, and what it changes is reserved

  int64_t tokens() const {
    int64_t total = 0;
    for (const SequenceJob& sequence : sequences) {
      total += sequence.rows > sequence.keys ? sequence.rows : sequence.keys;
    }
    return total;
  }
};

}  // namespace attend
