// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/cases.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

namespace attend::bench {
namespace {

struct Types {
  const char* name;
  DType rows, weights, kv;
  bool i8() const { return weights == DType::kI8 || kv == DType::kI8; }
};
constexpr Types kF32{"f32", DType::kF32, DType::kF32, DType::kF32};
constexpr Types kBF16{"bf16", DType::kBF16, DType::kBF16, DType::kBF16};
constexpr Types kI8{"i8", DType::kBF16, DType::kI8, DType::kI8};
constexpr Types kKv8{"kv8", DType::kBF16, DType::kBF16, DType::kI8};

AttentionSpec Layer(int q_heads, int kv_heads, int head_dim, bool causal, bool rope = false) {
  AttentionSpec spec;
  spec.d_model = spec.context_width = spec.output_width = q_heads * head_dim;
  spec.q_heads = q_heads;
  spec.kv_heads = kv_heads;
  spec.head_dim = spec.v_head_dim = head_dim;
  spec.scale = 1 / std::sqrt(static_cast<double>(head_dim));
  spec.causal = causal;
  if (rope) {
    spec.rope.dim = head_dim;
    for (int i = 0; i < head_dim / 2; ++i) {
      spec.rope.inverse_frequency.push_back(std::pow(1e4, -2.0 * i / head_dim));
    }
  }
  return spec;
}

struct Named {
  const char* name;
  AttentionSpec spec;
};
const Named kTransformer{"transformer-base", Layer(8, 8, 64, false)};
const Named kBert{"bert-base", Layer(12, 12, 64, false)};
// The same layer with one head of its width.
const Named kOneHead{"bert-1-head", Layer(1, 1, 768, false)};
const Named kGpt2{"gpt2-medium", Layer(16, 16, 64, true)};
const Named kLlama{"llama-7b", Layer(32, 32, 128, true, true)};
const Named kGqa{"gqa-32-8", Layer(32, 8, 128, true, true)};

class CaseList {
 public:
  explicit CaseList(const CaseOptions& options) : options_(options) {}

  void Prefill(const char* group, const Named& model, int64_t sequences, int64_t rows,
               std::initializer_list<Types> types) {
    const std::string shape =
        (sequences > 1 ? std::to_string(sequences) + "x" : "") + std::to_string(rows);
    for (const Types& type : types) {
      Add(group, model, shape, type, Bound::kOperations, Sequences(sequences, rows, rows));
    }
  }

  void Decode(const char* group, const Named& model, int64_t sequences, int64_t cached,
              std::initializer_list<Types> types) {
    const std::string shape = std::to_string(sequences) + "x" + std::to_string(cached);
    for (const Types& type : types) {
      BenchCase* bench =
          Add(group, model, shape, type, Bound::kBytes, Sequences(sequences, 1, cached + 1));
      if (bench == nullptr) continue;
      const double sets = static_cast<double>(options_.cold_bytes) / StoredBytes(*bench);
      bench->sets = std::max(1, static_cast<int>(std::ceil(sets)));
    }
  }

  // Lengths 16 .. 512, about 2048 rows.
  void Mixed(const Named& model, std::initializer_list<Types> types) {
    std::vector<SequenceShape> shapes;
    std::mt19937 random(4);  // its numbers are the same everywhere; distributions' are not
    int64_t rows = 0;
    while (rows < 2048) {
      const int64_t length = std::min<int64_t>(16 + random() % 497, 2048 - rows);
      shapes.push_back({length, length});
      rows += length;
    }
    for (const Types& type : types) {
      Add("mixed", model, std::to_string(rows), type, Bound::kOperations, shapes);
    }
  }

  std::vector<BenchCase> Take() { return std::move(cases_); }

 private:
  // Null when the engine does not have these types.
  BenchCase* Add(const std::string& group, const Named& model, const std::string& shape,
                 const Types& types, Bound bound, std::vector<SequenceShape> sequences) {
    if (types.i8() && !options_.i8) return nullptr;
    BenchCase bench;
    bench.name = group + "/" + model.name + "/" + shape + "/" + types.name;
    bench.spec = model.spec;
    bench.dtype = types.rows;
    bench.kv_dtype = types.kv;
    bench.weight_dtype = types.weights;
    bench.bound = bound;
    bench.sequences = std::move(sequences);
    cases_.push_back(std::move(bench));
    return &cases_.back();
  }

  const CaseOptions options_;
  std::vector<BenchCase> cases_;
};

}  // namespace

std::vector<BenchCase> AllCases(const CaseOptions& options) {
  CaseList list(options);
  list.Prefill("layer", kTransformer, 1, 512, {kF32, kBF16, kI8});
  list.Prefill("layer", kBert, 1, 128, {kF32, kBF16, kI8});
  list.Prefill("layer", kBert, 8, 128, {kF32, kBF16, kI8});
  list.Prefill("layer", kOneHead, 8, 128, {kF32, kBF16});
  list.Prefill("layer", kGpt2, 1, 1024, {kF32, kBF16, kI8});
  list.Prefill("layer", kLlama, 1, 512, {kF32, kBF16, kI8});
  list.Prefill("layer", kGqa, 1, 512, {kF32, kBF16, kI8});

  list.Decode("decode", kGqa, 1, 4096, {kF32, kBF16, kI8});
  list.Decode("decode", kGqa, 8, 4096, {kF32, kBF16, kKv8, kI8});
  list.Decode("decode", kGqa, 32, 4096, {kF32, kBF16, kI8});
  list.Decode("decode", kGpt2, 8, 1024, {kF32, kBF16, kI8});

  // One of two micro-batches of 32 sessions, at one layer.
  list.Decode("decode_loop", kGqa, 16, 512, {kBF16});
  list.Decode("decode_loop", kGqa, 16, 4096, {kBF16});

  list.Mixed(kBert, {kF32, kBF16});
  list.Mixed(kGqa, {kF32, kBF16});

  for (const int64_t rows : {512, 1024, 2048, 4096, 8192, 16384, 32768}) {
    list.Prefill("long", kTransformer, 1, rows, {kF32, kBF16});
  }

  // Each beside a reference layer that differs in one thing (targets.cc compares).
  list.Prefill("odd", {"8-heads-of-40", Layer(8, 8, 40, false)}, 1, 512, {kF32, kBF16});
  list.Prefill("odd", {"8-heads-of-80", Layer(8, 8, 80, false)}, 1, 512, {kF32, kBF16});
  list.Prefill("odd", kBert, 8, 127, {kF32, kBF16});
  list.Prefill("odd", kBert, 8, 129, {kF32, kBF16});
  list.Prefill("odd", kGpt2, 1, 1000, {kF32, kBF16});
  list.Prefill("odd", {"gqa-24-4", Layer(24, 4, 128, true, true)}, 1, 512, {kF32, kBF16});
  list.Prefill("odd", {"20-heads-of-64", Layer(20, 20, 64, true)}, 1, 1024, {kF32, kBF16});
  list.Decode("decode", {"gqa-24-4", Layer(24, 4, 128, true, true)}, 8, 4096, {kF32, kBF16});
  return list.Take();
}

}  // namespace attend::bench
