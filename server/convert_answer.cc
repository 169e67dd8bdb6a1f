// SPDX-License-Identifier: Apache-2.0
//
// What the runtime knows -> wire messages.
#include <algorithm>
#include <utility>

#include "server/convert.h"

namespace attend {
namespace {

v1::Layer ToProto(const LoadedLayer& layer) {
  const AttentionSpec& spec = layer.spec;
  const bool takes_context = spec.cross || spec.mask_selectable;
  v1::Layer proto;
  proto.set_name(layer.name);
  proto.set_module(layer.module);
  proto.set_input_point(layer.input_point);
  proto.set_d_model(spec.d_model);
  proto.set_context_width(takes_context ? spec.context_width : 0);
  proto.set_output_width(spec.output_width);
  proto.set_q_heads(spec.q_heads);
  proto.set_kv_heads(spec.kv_heads);
  proto.set_head_dim(spec.head_dim);
  proto.set_v_head_dim(spec.v_head_dim);
  proto.set_causal(spec.causal);
  proto.set_mask_selectable(spec.mask_selectable);
  proto.set_window(spec.window);
  proto.set_positions(PositionRuleName(spec));
  proto.set_sessions(spec.keeps_history());
  proto.set_cross_attention(takes_context);
  proto.set_weight_bytes(layer.weight_bytes);
  proto.set_kv_bytes_per_token(spec.keeps_history() ? layer.geometry.TokenBytes() : 0);
  return proto;
}

}  // namespace

void ToResponse(const ConvertContext& context, const ConvertedAttend& converted, int64_t now_us,
                v1::AttendResponse& response) {
  const AttendJob& job = *converted.job;
  // Cleared as a whole it would free its parts. Nobody sets other fields.
  response.clear_positions();
  response.clear_weights();
  *response.mutable_request_id() = converted.request_id;
  const int64_t total_us = std::max<int64_t>(0, now_us - job.arrival_us);
  v1::Timing& timing = *response.mutable_timing();
  // A job without rows never enters a batch: it only waited.
  timing.set_queue_us(job.first_batch_us == 0
                          ? total_us
                          : std::max<int64_t>(0, job.first_batch_us - job.arrival_us));
  timing.set_compute_us(job.compute_us);
  timing.set_total_us(total_us);
  timing.set_batch_tokens(job.batch_tokens);
  timing.set_batch_sequences(job.batch_sequences);
  timing.set_replica(context.replica);
  for (const SequenceJob& sequence : job.sequences) {
    response.add_positions(sequence.position_after);
    if (!job.weights.full) continue;
    v1::Tensor& weights = *response.add_weights()->mutable_weights();
    weights.set_dtype(v1::DTYPE_F32);
    weights.add_shape(sequence.weight_heads);
    weights.add_shape(sequence.weight_rows);
    weights.add_shape(sequence.weight_keys);
    const int64_t bytes = sequence.weight_heads * sequence.weight_rows * sequence.weight_keys *
                          DTypeBytes(DType::kF32);
    if (bytes > 0) weights.set_data(sequence.weights.data.get(), static_cast<size_t>(bytes));
  }
}

OutputTensor OutputOf(const ConvertedAttend& converted) {
  const AttendJob& job = *converted.job;
  OutputTensor output{.dtype = static_cast<v1::DType>(job.output_dtype),
                      .shape = converted.output_shape,
                      .data = job.output.data,
                      .bytes = job.output_rows * job.output_width * DTypeBytes(job.output_dtype)};
  for (size_t i = 1; i < output.shape.size(); ++i) {  // raw: [rows, q_heads, v_head_dim]
    if (output.shape[i] < 0) output.shape[i] = job.output_width / output.shape[3 - i];
  }
  return output;
}

v1::Session ToProto(const SessionState& state) {
  v1::Session session;
  session.set_id(state.id);
  session.set_model(state.model);
  session.set_replica(state.replica);
  session.set_length(state.length);
  for (const SessionState::Layer& layer : state.layers) {
    v1::LayerState& proto = *session.add_layers();
    proto.set_layer(layer.name);
    proto.set_length(layer.length);
    proto.set_context_length(layer.context_length);
  }
  session.set_kv_bytes(state.kv_bytes);
  session.set_ttl_seconds(state.ttl_seconds);
  session.set_idle_seconds(state.idle_seconds);
  session.set_bit_exact(true);  // histories live in the engine's memory only
  return session;
}

v1::Model ToProto(const LoadedModel& model) {
  v1::Model proto;
  proto.set_name(model.name);
  proto.set_family(model.family);
  proto.set_weight_dtype(static_cast<v1::DType>(model.weight_dtype));
  proto.set_kv_dtype(static_cast<v1::DType>(model.kv_dtype));
  proto.set_compute_dtype(static_cast<v1::DType>(model.compute_dtype));
  for (const LoadedLayer& layer : model.layers) *proto.add_layers() = ToProto(layer);
  proto.set_fingerprint(model.fingerprint);
  proto.set_max_positions(model.max_positions);
  proto.set_numerics_id(model.numerics_id);
  return proto;
}

}  // namespace attend
