// SPDX-License-Identifier: Apache-2.0
//
// Every series of /metrics. Counters and histograms are counted where things happen, through the
// methods of Metrics; everything that is a state is asked for when a page is made. All label values
// exist from the start, so rates begin at 0 and no request can add a series. It knows no request,
// session or socket.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/util/error.h"

namespace attend {

// Methods of attend.v1.Attention; kOther is every other path.
enum class RpcMethod : uint8_t {
  kAttend,
  kAttendStream,  // one request per stream item
  kOpenSession,
  kGetSession,
  kForkSession,
  kTruncateSession,
  kCloseSession,
  kListModels,
  kGetServerInfo,
  kOther,
};
// By the short name ("Attend").
RpcMethod MethodFromName(std::string_view name);
const char* MethodName(RpcMethod method);

enum class Phase : uint8_t { kReceive, kQueue, kProject, kAttend, kOutput, kSend };
// Where a request was when its client gave it up.
enum class CancelStage : uint8_t { kReceive, kQueue, kRun, kSend };
enum class TokenKind : uint8_t { kPrefill, kDecode };
enum class SessionEnd : uint8_t { kClosed, kExpired, kEvicted, kLostInRestart };

// The label `model` of work: the index of a loaded model, or one of these.
inline constexpr int kModelRaw = -1;
inline constexpr int kModelNone = -2;

// States at one moment, filled in by the server from atomics and published copies: making a page
// must not wait for a lock that is held during a computation.
struct GaugeSnapshot {
  int64_t queue_requests = 0;    // admitted, in no batch yet
  int64_t queue_tokens = 0;      // their rows
  int64_t running_requests = 0;  // in a batch, or between two of their batches
  int64_t streams = 0;           // open AttendStream calls
  int64_t kv_free_bytes = 0;
  int64_t kv_active_bytes = 0;  // held by sessions with a queued or running call
  int64_t kv_idle_bytes = 0;    // held by the others
  std::vector<int64_t>
      kv_capacity_tokens;       // by loaded model: tokens of one session that fill kv_bytes
  int64_t sessions_active = 0;  // with a queued or running call
  int64_t sessions_idle = 0;
  double engine_progress_seconds = 0;  // Unix time of the engine's last finished task
  std::vector<int> listen_ports;       // TCP, as bound: whose connections are counted
};

struct MetricsConfig {
  std::vector<std::string> models;  // loaded, in the order of their index
  int64_t deadline_ms = 60000;      // histograms of time reach above it
  int64_t batch_tokens = 2048;      // histograms of batches reach it
  std::string version;              // labels of build_info
  std::string engine;
  std::string isa;
  std::string numerics;
};

// Thread-safe.
class Metrics {
 public:
  // `snapshot` is called by PageText, on its thread.
  Metrics(const MetricsConfig& config, std::function<GaugeSnapshot()> snapshot);
  ~Metrics();

  // Every RequestStarted is followed by exactly one RequestFinished: the sum over codes is what
  // started minus what is in flight. `model` counts for methods that name a model or a session; of
  // the others it is none.
  void RequestStarted(RpcMethod method);
  void RequestFinished(RpcMethod method, absl::StatusCode code, int model, double seconds);
  void PhaseTook(Phase phase, double seconds);
  // A request or stream refused or answered with an error: counts reasons of refusals, ignores
  // CANCELLED, ENGINE_FAULT and unspecified.
  void Rejected(Reason reason);
  void Cancelled(CancelStage stage);
  void LaunchedAfterDeadline();
  // `rows_computed` above `rows_asked` is padding.
  void BatchRan(int64_t rows_asked, int64_t rows_computed, int64_t sequences);
  // Rows of an answered request.
  void TokensAnswered(int model, TokenKind kind, int64_t rows);
  void SessionEnded(SessionEnd reason, int64_t sessions = 1);

  // The page in Prometheus's text format 0.0.4.
  std::string PageText() const;

 private:
  struct Children;
  const std::unique_ptr<Children> children_;
};

// One series as the README shows it.
struct SeriesRow {
  std::string_view name;
  std::string_view type;    // "counter" | "gauge" | "histogram"
  std::string_view labels;  // names, comma-separated
  std::string_view help;
};
std::vector<SeriesRow> SeriesTable();

}  // namespace attend
