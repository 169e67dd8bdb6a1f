// SPDX-License-Identifier: Apache-2.0
//
// Chooses the engine. The only file that names engines.
#include "engine/attention_engine.h"

#include <string>

#include "engine/cpu/cpu_engine.h"
#include "engine/util/error.h"

namespace attend {

absl::StatusOr<std::unique_ptr<AttentionEngine>> MakeEngine(const EngineOptions& options) {
  if (options.device == "cuda") {
    return InvalidField("device", "cuda", "auto or cpu: this attend was built without CUDA");
  }
  if (options.device != "auto" && options.device != "cpu") {
    return InvalidField("device", options.device, "auto, cpu or cuda");
  }
  if (options.threads < 1) {
    return InvalidField("threads", std::to_string(options.threads), "1 or more");
  }
  if (options.kv_bytes < 0 || options.scratch_bytes < 0) {
    return InvalidField("kv_bytes", std::to_string(options.kv_bytes), "0 or more");
  }
  return MakeCpuEngine(options);
}

}  // namespace attend
