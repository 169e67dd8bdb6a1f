// SPDX-License-Identifier: Apache-2.0
//
// One run of `attend bench`: its flags, what they mean for the server it found, and what its
// workers share. Filled by bench.cc before the workers start; the report reads it too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/cli/bench/control.h"
#include "client/cli/bench/link.h"
#include "client/cli/bench/phases.h"
#include "client/cli/bench/plan.h"
#include "client/cli/bench/slices.h"
#include "client/cli/command.h"

namespace attend::cli {

// What scenarios take where the user says nothing.
inline constexpr int64_t kDecodeSessions = 32;
inline constexpr int64_t kDecodePrompt = 512;  // --check's: as in attend-bench's decode loop
inline constexpr int64_t kAppenders = 4;       // sessions of --fairness
inline constexpr double kAppendRate = 100;
inline constexpr int64_t kPrefillTokens = 8192;

// The flags of `attend bench`.
struct BenchFlags {
  std::string model, layer;
  LengthRange tokens;
  int64_t clients = 16;
  double seconds = 10;
  int64_t requests = 0;
  int64_t warmup = 2;
  double rate = 0;
  int64_t sequences = 1;
  int64_t sessions = 0;
  int64_t steps = 128;
  bool decode_loop = false;
  int64_t layers = 0;
  int64_t micro_batches = 2;
  int64_t prompt = 0;
  std::string echo;  // address
  bool idle = false;
  bool fairness = false;
  bool check = false;
  double gbit = 25;
  std::vector<double> engine_tokens_per_second;  // of attend-bench: mixed lengths, decode loop
  v1::DType dtype = v1::DTYPE_F32;
  uint64_t seed = 1;
  int attempts = 1;
  bool json = false;
};

// Owns the plain values, which don't change once workers run, so that any thread reads them without
// a lock. What it points to belongs to RunBench, outlives the workers and is thread-safe itself.
struct Bench {
  Bench(const Globals& globals, const BenchFlags& flags) : globals(globals), flags(flags) {}

  const Globals& globals;
  const BenchFlags& flags;
  std::string model;
  std::vector<v1::Layer> layers;  // of the load, all of one d_model; one, but in the decode loop
  v1::Limits limits;              // of the server
  int64_t workers = 1;
  int64_t largest_rows = 0;             // of one request
  int64_t link_rows = 0;                // decode loop: of the large calls that measure the link
  std::string input;                    // at least largest_rows + kInputShifts rows of d_model
  LoadControl* control = nullptr;       // never null while workers run
  ArrivalSchedule* arrivals = nullptr;  // of the open loop, else null
  LinkMeasurement* link = nullptr;      // of the decode loop, else null
  Slices* slices = nullptr;             // with an echo server, else null
  FairnessPhases* phases = nullptr;     // of --fairness, else null
};

// Workers start at different rows of the input, so that they don't all send the same.
inline constexpr int64_t kInputShifts = 64;
// Prompts of the decode loop are sent in pieces of at most so many rows: messages of common size.
inline constexpr int64_t kPromptPiece = 512;
// Rows of the large calls that tell what a byte costs: far from one row, near to a micro-batch.
inline constexpr int64_t kLinkRows = 64;

}  // namespace attend::cli
