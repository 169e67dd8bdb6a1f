// SPDX-License-Identifier: Apache-2.0
//
// What attention_engine.cc finds in the plugin that holds the CUDA engine. Both are built from the
// same sources; there is no promise between versions.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "engine/attention_engine.h"

namespace attend {

struct CudaPlugin {
  // The first device. UNAVAILABLE with the driver's reason when there is none.
  absl::StatusOr<DeviceChoice> (*find_device)();
  // INVALID_ARGUMENT names the option to change.
  absl::StatusOr<std::unique_ptr<AttentionEngine>> (*make_engine)(const EngineOptions& options);
};

using CudaPluginEntry = const CudaPlugin* (*)();
inline constexpr char kCudaPluginEntry[] = "attend_cuda_plugin";

}  // namespace attend
