// SPDX-License-Identifier: Apache-2.0
//
// Writes a checkpoint folder with random attention weights in the shape of a well-known model, for
// trials and load tests. `attend make-checkpoint` and tests call it. The tensors are those that the
// family's own table asks for, so LoadCheckpoint always reads what this writes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/util/dtype.h"

namespace attend {

struct CheckpointRecipe {
  std::string preset = {};     // one of CheckpointPresets()
  int layers = 0;              // 0 = the preset's
  int heads = 0;               // query heads, 0 = the preset's; the width of the model stays
  uint64_t seed = 0;           // equal recipes give equal bytes
  DType dtype = DType::kF32;   // F32, BF16 or F16
  std::string directory = {};  // created; must not exist or be empty
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress = {};
};

// transformer-base, bert-base, gpt2-medium, llama-7b, llama2-gqa.
std::vector<std::string> CheckpointPresets();

// INVALID_ARGUMENT for a recipe that cannot be (nothing is written), ALREADY_EXISTS when the folder
// is not empty, INTERNAL when the disk refuses. model.safetensors and config.json appear complete
// or not at all, config.json last.
absl::Status MakeCheckpoint(const CheckpointRecipe& recipe);

}  // namespace attend
