// SPDX-License-Identifier: Apache-2.0
//
// The files of `attend run --maps`: token labels in, heat maps of attention weights out. run.cc
// asks the server; nothing here does.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client/attend_client.h"

namespace attend::cli {

struct MapFlags {
  std::string directory;       // empty = no maps
  std::string tokens;          // a label for every row of the input, or empty
  std::string context_tokens;  // a label for every row of the context, or empty
};

struct MapLabels {
  std::vector<std::string> rows;
  std::vector<std::string> context;
};

struct MapInput {
  int64_t rows = 0;                     // of all sequences
  std::optional<int64_t> context_rows;  // of all sequences; absent when the call brings none
  bool cross = false;                   // keys come from a context
};

// Reads the labels and makes the directory: all that can be wrong before anything is sent.
client::Result<MapLabels> PrepareMaps(const MapFlags& flags, const MapInput& input);

struct MapSource {
  std::string model;
  std::string layer;
  std::vector<int> heads;                 // asked for; empty = all
  bool cross = false;                     // keys come from a context
  std::vector<client::Tensor> sequences;  // F32 [heads, rows, keys], one for each sequence
};

// Writes layer-L.png with all heads and layer-L-head-H.png with each; several sequences have
// -sequence-S behind the layer. Returns how many files.
client::Result<int> WriteMaps(const std::string& directory, const MapLabels& labels,
                              const MapSource& source);

}  // namespace attend::cli
