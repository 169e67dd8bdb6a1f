// SPDX-License-Identifier: Apache-2.0
//
// What the loader makes of a checkpoint folder, for people: accepted or why not, and what every
// stored tensor is for. `attend inspect` prints it (client/cli/inspect.cc makes the text for
// people); nothing that serves calls it. JSON is written here because only engine/model includes
// the library.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/checkpoint.h"

namespace attend {

struct InspectedTensor {
  std::string name;
  std::string dtype;  // as the file names it
  std::vector<int64_t> shape;
  int64_t bytes = 0;
  std::string file;
  std::vector<std::string> holds;  // of accepted folders; empty = ignored
  std::string ignored_because;
};

struct Inspection {
  std::string directory;
  std::optional<Checkpoint> checkpoint;  // absent = refused
  std::string refused_because;           // the loader's message
  std::string model_type;                // of config.json, also of a refused folder; or empty
  std::vector<InspectedTensor> tensors;  // by name; of a refused folder too, if its files are sound
  std::string tensors_unreadable;        // why not, or empty
};

// An error only where there is no folder to look at: NOT_FOUND or PERMISSION_DENIED.
absl::StatusOr<Inspection> InspectCheckpoint(const std::string& directory);

// One object; layers have the field names of attend.v1.Layer, and what a Layer does not tell.
std::string InspectionJson(const Inspection& inspection);

}  // namespace attend
