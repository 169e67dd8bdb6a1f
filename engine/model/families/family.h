// SPDX-License-Identifier: Apache-2.0
//
// What a family adapter says about a checkpoint before any tensor is looked at: every attention
// layer with its mathematics, and which tensor gives which weight. Adapters are tables, one file
// per family shape (families/bert.cc, llama.cc, ...); a family of a known shape is one more row
// there, a new shape one more file and a line in families.cc. The loader (checkpoint.cc) does all
// reading and checking.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/attention_spec.h"
#include "engine/layer_weights.h"
#include "engine/model/config.h"

namespace attend {

// Rows [previous parts, + rows) of the output axis of one stored tensor.
struct TensorPart {
  WeightView LayerWeights::*target = nullptr;
  int64_t rows = 0;
};

// A tensor that must exist with exactly this shape.
struct TensorUse {
  std::string name = {};  // below the checkpoint's prefix
  std::vector<TensorPart> parts = {};
  int64_t columns = 0;       // in features; 0 = a vector
  bool input_major = false;  // stored [in, out] (GPT-2's Conv1D) instead of [out, in]
};

struct LayerDescription {
  std::string name = {};         // what requests say: "3", "0.cross"
  std::string module = {};       // below the prefix
  std::string input_point = {};  // in words
  std::string rope_text = {};    // in words, where spec.rope is set
  AttentionSpec spec = {};
  std::vector<TensorUse> tensors = {};
  // Beginnings of the names of all tensors of this layer: one that is neither used nor ignored
  // means that the file computes something else than the description, and is refused.
  std::vector<std::string> owned = {};
};

struct ModelDescription {
  std::vector<std::string> prefixes = {};  // tried in this order; exactly one may match
  std::vector<LayerDescription> layers = {};
  std::vector<std::string> ignored =
      {};  // ends of owned names that never matter, e.g. mask buffers
  int64_t max_positions = 0;
};

using DescribeFunction = absl::StatusOr<ModelDescription> (*)(const Config& config);

struct Family {
  std::string_view model_type;
  DescribeFunction describe;
};

// All supported families, in the order messages list them.
std::vector<Family> SupportedFamilies();

// One table per family shape.
std::span<const Family> BertFamilies();
std::span<const Family> LlamaFamilies();
std::span<const Family> Gpt2Families();
std::span<const Family> PlainFamilies();

// Adds MODULE.weight [rows, columns] and, with `bias`, MODULE.bias [rows]. Several parts = a fused
// projection whose parts follow each other on the output axis.
struct ProjectionPart {
  WeightView LayerWeights::*weight;
  WeightView LayerWeights::*bias;
  int64_t rows;
};
void AddProjection(LayerDescription& layer, const std::string& module,
                   const std::vector<ProjectionPart>& parts, int64_t columns, bool bias,
                   bool input_major = false);

// 1 / sqrt(head_dim), the scale of most families.
double UsualScale(int head_dim);

}  // namespace attend
