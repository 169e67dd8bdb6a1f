// SPDX-License-Identifier: Apache-2.0
//
// What a case of a benchmark computes, and what it cannot do without: floating point operations and
// bytes, phase by phase. Pure arithmetic, shared by attend-bench and attend-gpu-bench; knows no
// engine, no clock and no limits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/attention_plan.h"

namespace attend::bench {

struct SequenceShape {
  int64_t rows = 1;
  int64_t keys = 1;  // the rows' own included: keys - rows are cached before
};

// What bounds the case, and so what its time is compared with.
enum class Bound : uint8_t {
  kOperations,  // whole sequences
  kBytes,       // a row or a few over many cached keys
};

struct BenchCase {
  std::string name;
  AttentionSpec spec;         // raw: attention alone
  DType dtype = DType::kF32;  // of the rows in and out, and of the weights as given
  DType kv_dtype = DType::kF32;
  DType weight_dtype = DType::kF32;  // as the engine keeps them: dtype, or I8
  Bound bound = Bound::kOperations;
  std::vector<SequenceShape> sequences;
  // Layers, each with its weights and caches, that take turns: what a step reads was used so many
  // steps ago.
  int sets = 1;
  // What the case should reach, operations or bytes per second of the attention kernels. 0 =
  // nothing is asked.
  double bar = 0;
  double goal = 0;

  int64_t rows() const;  // of all sequences
};

// `count` sequences of the same shape.
std::vector<SequenceShape> Sequences(int64_t count, int64_t rows, int64_t keys);

// Multiply-adds x 2, and the bytes that have to be read or written at least once: weights, keys and
// values, rows in and out. What passes between the phases is not counted.
struct Work {
  double operations = 0;
  double bytes = 0;
};

struct CaseWork {
  Work project, attend, output;
  double operations() const { return project.operations + attend.operations + output.operations; }
  double bytes() const { return project.bytes + attend.bytes + output.bytes; }
};

// Of one step of one set.
CaseWork WorkOf(const BenchCase& bench);

// Scores and values over visible keys only.
double AttentionOperations(const BenchCase& bench);
double ProjectionOperations(const BenchCase& bench);
// Keys and values, each read once.
double KvBytes(const BenchCase& bench);
// The four matrices as kept, with the scales of I8; 0 of raw cases.
double WeightBytes(const BenchCase& bench);
// What a step has to read of what is kept: WeightBytes + KvBytes.
inline double StoredBytes(const BenchCase& bench) { return WeightBytes(bench) + KvBytes(bench); }

}  // namespace attend::bench
