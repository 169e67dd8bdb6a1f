// SPDX-License-Identifier: Apache-2.0
//
// Collectives of a warp: all 32 lanes meet, the last one computes for all. Lane maps are those that
// engine/cuda/device.h describes (PTX ISA: mma.m16n8k16, ldmatrix).
#include <algorithm>
#include <cstring>

#include "engine/util/dtype.h"
#include "tests/simt/state.h"

namespace attend::simt {
namespace {

const char* CollectiveName(Collective kind) {
  switch (kind) {
    case Collective::kSync:
      return "SyncWarp";
    case Collective::kShuffleXor:
      return "ShuffleXor";
    case Collective::kShuffle:
      return "Shuffle";
    case Collective::kAny:
      return "Any";
    case Collective::kLoadMatrix:
      return "LoadMatrix4";
    case Collective::kProduct:
      return "MultiplyAccumulate";
  }
  return "?";
}

// The running lane's operand of a collective: fill it, then Meet().
Operand& Own() {
  const Thread& self = Running();
  return self.warp->operands[self.lane];
}

// Waits until all lanes have come here; results are in the operands then.
void Meet(Collective kind, Site site) {
  Thread& self = Running();
  Warp& warp = *self.warp;
  if (warp.exited != 0) {
    Violate(Violation::kExitedThread,
            std::string("it calls ") + CollectiveName(kind) + ", but lane " +
                std::to_string(std::countr_zero(warp.exited)) + " of its warp has ended",
            site);
  }
  if (warp.arrived == 0) {
    warp.collective = kind;
    warp.site = site;
  } else if (warp.collective != kind || !SameSite(warp.site, site)) {
    Violate(Violation::kDivergence,
            std::string("it calls ") + CollectiveName(kind) + ", but lane " +
                std::to_string(std::countr_zero(warp.arrived)) + " of its warp waits in " +
                CollectiveName(warp.collective) + " at " + SiteText(warp.site),
            site);
  }
  const uint32_t lane = 1u << self.lane;
  warp.arrived |= lane;
  warp.runnable &= ~lane;
  if (warp.runnable == 0) grid->ready &= ~(1u << warp.index);
  self.wait = Wait::kCollective;
  self.site = site;
  if (warp.arrived == kAllLanes) {
    ComputeCollective(warp);
    warp.arrived = 0;
    MakeRunnable(warp);
  }
  RunOthers(self);
  self.wait = Wait::kNone;
}

// ---- Shuffles and votes ----

void ComputeShuffle(Warp& warp, bool exclusive_or) {
  ++counts.shuffles;
  float values[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = warp.operands[lane].value;
  for (int lane = 0; lane < kLanes; ++lane) {
    Operand& operand = warp.operands[lane];
    operand.value = values[exclusive_or ? lane ^ operand.argument : operand.argument];
  }
}

void ComputeAny(Warp& warp) {
  ++counts.shuffles;
  int any = 0;
  for (const Operand& operand : warp.operands) any |= operand.argument;
  for (Operand& operand : warp.operands) operand.argument = any;
}

// ---- ldmatrix ----

// Eight rows of 16 bytes are read in one go when they lie in different groups of four banks.
int Wavefronts(const uint32_t* offsets) {
  int most = 1;
  for (int group = 0; group < 8; ++group) {
    int rows = 0;
    for (int i = 0; i < 8; ++i) {
      if ((offsets[i] / 16) % 8 != static_cast<uint32_t>(group)) continue;
      rows += std::find(offsets, offsets + i, offsets[i]) == offsets + i;  // same row: broadcast
    }
    most = std::max(most, rows);
  }
  return most;
}

void ComputeLoadMatrix(Warp& warp) {
  ++counts.ldmatrix;
  uint16_t matrix[4][8][8];
  uint32_t offsets[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    const Operand& operand = warp.operands[lane];
    offsets[lane] = SharedOffset(operand.row);
    std::memcpy(matrix[lane / 8][lane % 8], reinterpret_cast<const void*>(operand.row), 16);
  }
  for (int i = 0; i < 4; ++i) counts.ldmatrix_conflicts += Wavefronts(offsets + 8 * i) - 1;
  for (int lane = 0; lane < kLanes; ++lane) {
    const Operand& operand = warp.operands[lane];
    const int row = lane / 4;
    const int column = 2 * (lane % 4);
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = operand.argument ? matrix[i][column][row] : matrix[i][row][column];
      const uint32_t high =
          operand.argument ? matrix[i][column + 1][row] : matrix[i][row][column + 1];
      operand.words[i] = low | high << 16;
    }
  }
}

// ---- mma ----

// FloatFromF16 without branches: half's exponent is rebased by a multiplication.
float HalfToFloat(uint32_t half) {
  const uint32_t magnitude = (half & 0x7fff) << 13;
  uint32_t bits = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  if ((half & 0x7c00) == 0x7c00) bits = magnitude | 0x7f800000;
  return std::bit_cast<float>(bits | (half & 0x8000) << 16);
}

struct Floats {
  float low;
  float high;
};
Floats Unpack(uint32_t word, MatrixType type) {
  if (type == MatrixType::kBf16) {
    return {std::bit_cast<float>(word << 16), std::bit_cast<float>(word & 0xffff0000u)};
  }
  return {HalfToFloat(word & 0xffff), HalfToFloat(word >> 16)};
}

// The 16 terms of a sum, in the order in which they are added; the accumulator comes `first` or
// last.
struct Summation {
  int order[16];
  bool first;
};
Summation NextSummation() {
  Summation sum = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, true};
  if (grid->settings.sums == SumOrder::kShuffled) {
    for (int i = 15; i > 0; --i) std::swap(sum.order[i], sum.order[grid->Random() % (i + 1)]);
    sum.first = grid->Random() % 2 == 0;
  }
  return sum;
}

using Row = float __attribute__((vector_size(32)));  // of 8 columns

// d = d + a b in the order of `sum`. Products of 16-bit numbers are exact in float; sums are
// rounded to float.
void AddProducts(Row (&d)[16], const float (&a)[16][16], const Row (&b)[16], const Summation& sum) {
  for (int row = 0; row < 16; ++row) {
    Row result = sum.first ? d[row] : Row{};
    for (const int k : sum.order) result += a[row][k] * b[k];
    d[row] = sum.first ? result : d[row] + result;
  }
}

void ComputeProduct(Warp& warp) {
  ++counts.mma;
  const auto type = static_cast<MatrixType>(warp.operands[0].argument);
  float a[16][16];  // [row][k]
  Row b[16];        // [k][column]
  Row d[16];        // [row][column]
  for (int lane = 0; lane < kLanes; ++lane) {
    const Operand& operand = warp.operands[lane];
    const int g = lane / 4;
    const int t = 2 * (lane % 4);
    for (int i = 0; i < 4; ++i) {
      const Floats pair = Unpack(operand.a[i], type);
      a[g + 8 * (i % 2)][t + 8 * (i / 2)] = pair.low;
      a[g + 8 * (i % 2)][t + 8 * (i / 2) + 1] = pair.high;
      d[g + 8 * (i / 2)][t + i % 2] = operand.d[i];
    }
    const Floats upper = Unpack(operand.b0, type);
    const Floats lower = Unpack(operand.b1, type);
    b[t][g] = upper.low;
    b[t + 1][g] = upper.high;
    b[t + 8][g] = lower.low;
    b[t + 9][g] = lower.high;
  }
  AddProducts(d, a, b, NextSummation());
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      warp.operands[lane].d[i] = d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
    }
  }
}

}  // namespace

void ComputeCollective(Warp& warp) {
  switch (warp.collective) {
    case Collective::kSync:
      ++counts.warp_syncs;
      AdvanceWarp(warp);
      break;
    case Collective::kShuffleXor:
      ComputeShuffle(warp, true);
      break;
    case Collective::kShuffle:
      ComputeShuffle(warp, false);
      break;
    case Collective::kAny:
      ComputeAny(warp);
      break;
    case Collective::kLoadMatrix:
      ComputeLoadMatrix(warp);
      break;
    case Collective::kProduct:
      ComputeProduct(warp);
      break;
  }
}

void WarpBarrier(Site site) { Meet(Collective::kSync, site); }

float ShuffleXorLanes(float value, int lane_mask, Site site) {
  if (lane_mask < 0 || lane_mask >= kLanes) {
    Violate(Violation::kArgument, "lane mask " + std::to_string(lane_mask), site);
  }
  Operand& own = Own();
  own.value = value;
  own.argument = lane_mask;
  Meet(Collective::kShuffleXor, site);
  return own.value;
}

float ShuffleLanes(float value, int lane, Site site) {
  if (lane < 0 || lane >= kLanes) {
    Violate(Violation::kArgument, "lane " + std::to_string(lane), site);
  }
  Operand& own = Own();
  own.value = value;
  own.argument = lane;
  Meet(Collective::kShuffle, site);
  return own.value;
}

bool AnyLane(bool value, Site site) {
  Operand& own = Own();
  own.argument = value;
  Meet(Collective::kAny, site);
  return own.argument != 0;
}

void LoadMatrices(uint32_t* words, uintptr_t row, const SharedRange* range, bool transposed,
                  Site site) {
  SharedLoadByWarp(row, range, site);
  Operand& own = Own();
  own.words = words;
  own.row = row;
  own.argument = transposed;
  Meet(Collective::kLoadMatrix, site);
}

void MatrixProduct(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, MatrixType type,
                   Site site) {
  Operand& own = Own();
  own.d = d;
  own.a = a;
  own.b0 = b0;
  own.b1 = b1;
  own.argument = static_cast<int>(type);
  Meet(Collective::kProduct, site);
}

}  // namespace attend::simt
