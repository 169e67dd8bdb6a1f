// SPDX-License-Identifier: Apache-2.0
//
// The embedded engine: projections, attention and KV memory on the processor's own cores.
// Implements the seam engine/attention_engine.h; only MakeEngine includes this.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "engine/attention_engine.h"

namespace attend {

// INVALID_ARGUMENT when the processor can't do what options.isa or options.compute ask for.
// RESOURCE_EXHAUSTED when the system refuses the address space for KV memory.
absl::StatusOr<std::unique_ptr<AttentionEngine>> MakeCpuEngine(const EngineOptions& options);

}  // namespace attend
