// SPDX-License-Identifier: Apache-2.0
//
// Wire messages <-> what the runtime works with. Every rule of the contract that needs no session
// is checked here, with field, got and wanted in the message; what depends on a session's state is
// checked by the runtime when the job runs. Called by the RPC handlers on any thread; knows no
// threads, queues or clocks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attend/v1/attend.pb.h"
#include "engine/attend_job.h"
#include "engine/attention_runtime.h"
#include "engine/util/buffer_pool.h"
#include "engine/util/recycled.h"
#include "server/rpc/wire.h"

namespace attend {

struct ConvertContext {
  const std::vector<LoadedModel>* models = nullptr;  // outlives the context
  std::shared_ptr<BufferPool> buffers;
  int64_t request_tokens = 65536;     // Limits.request_tokens
  int64_t response_bytes = 83886080;  // Limits.response_bytes
  int max_head_dim = kMaxHeadDim;     // EngineInfo.max_head_dim
  std::string replica;
};

// A job, and what its answer needs besides.
struct ConvertedAttend {
  // Complete but for arrival_us and deadline_us.
  std::shared_ptr<AttendJob> job;
  RecycledString request_id;
  int64_t timeout_us = 0;  // 0 = not given
  // At most one dimension is -1: known only to the session, it follows from job->output_width.
  Shape output_shape;
};

// Called with AttendJob::tokens() when every check has passed and before tensor bytes are copied;
// its error is the answer.
using Admit = std::function<absl::Status(int64_t tokens)>;

// Copies every tensor once. INVALID_ARGUMENT (INVALID_FIELD, TOO_LARGE), NOT_FOUND (UNKNOWN_MODEL,
// UNKNOWN_LAYER) or UNIMPLEMENTED (UNSUPPORTED); of several offending sequences the first one names
// the error, and all are listed.
absl::StatusOr<ConvertedAttend> ConvertAttend(const ConvertContext& context,
                                              const ReceivedAttend& request,
                                              const Admit& admit = {});

absl::StatusOr<OpenSessionArguments> ConvertOpenSession(const ConvertContext& context,
                                                        const v1::OpenSessionRequest& request);

// The answer to a finished job, in the two parts EncodeAttendResponse takes: everything but the
// output, and the output, which refers to job->output. `now_us` is on the clock of job->arrival_us.
// A response that is filled again and again keeps its memory.
void ToResponse(const ConvertContext& context, const ConvertedAttend& converted, int64_t now_us,
                v1::AttendResponse& response);
OutputTensor OutputOf(const ConvertedAttend& converted);

v1::Session ToProto(const SessionState& state);
v1::Model ToProto(const LoadedModel& model);

}  // namespace attend
