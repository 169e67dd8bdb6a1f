// SPDX-License-Identifier: Apache-2.0
//
// A loaded checkpoint: every attention layer of a Hugging Face style folder (config.json and
// safetensors) as a specification and views of its weights. Knows families; knows no engine, no
// requests.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/attention_spec.h"
#include "engine/layer_weights.h"

namespace attend {

class MappedFile;

// A stored tensor and what a layer takes from it, in the order it is stored.
struct UsedTensor {
  std::string name;
  std::vector<std::string> holds;  // "q", "k bias", "q norm", ...
};

struct ModelLayer {
  std::string name;         // "3", "0.self", "decoder.0.cross": what requests name
  std::string module;       // module in the checkpoint, e.g. "model.layers.5.self_attn"
  std::string input_point;  // in words: which tensor of the model the hidden states must be
  std::string rope_text;    // in words: what spec.rope comes from, with its numbers; or empty
  AttentionSpec spec;
  LayerWeights weights;  // views into `files`
  DType weight_dtype = DType::kUnspecified;
  int64_t weight_bytes = 0;  // as stored
  std::vector<UsedTensor> tensors;
};

struct Checkpoint {
  std::string family;  // model_type of config.json
  std::vector<ModelLayer> layers;
  DType weight_dtype = DType::kUnspecified;  // of layer 0's query projection
  int64_t max_positions = 0;                 // 0 = the configuration does not say
  std::string fingerprint;                   // hash of config.json and of all attention weights
  std::vector<std::shared_ptr<MappedFile>> files;  // keeps the views valid
};

// What keys and values are kept in: `asked`, or what suits the weights when that is unspecified.
DType KvDTypeOf(const Checkpoint& checkpoint, DType asked = DType::kUnspecified);

// Reads `directory`. Errors are one line: what, where, and what is supported or expected.
absl::StatusOr<Checkpoint> LoadCheckpoint(const std::string& directory);

}  // namespace attend
