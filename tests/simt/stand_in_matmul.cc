// SPDX-License-Identifier: Apache-2.0
//
// Matrix products for the emulated cuBLASLt: panels of 16 rows of op(A) and columns of op(B) as
// float, in registers 16 x 4 at a time. An element's order of additions is the same in every
// position of every shape.
#include "tests/simt/stand_in_matmul.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "engine/util/dtype.h"

namespace attend::simt {
namespace {

constexpr int64_t kPanelRows = 16;
constexpr int64_t kTileColumns = 4;

// Not wider than the machine's: the compiler would keep wider ones in memory.
constexpr int64_t kLanes = 8;
constexpr int64_t kVectors = kPanelRows / kLanes;
using Vector = float __attribute__((vector_size(kLanes * sizeof(float))));
struct PanelRows {
  Vector part[kVectors];
};

float RoundToTf32(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7f800000) == 0x7f800000) return value;  // infinity, NaN
  return std::bit_cast<float>((bits + 0x0fff + ((bits >> 13) & 1)) & ~uint32_t{0x1fff});
}

template <class T, class Convert>
void Gather(const MatmulOperand& operand, int64_t first, int64_t step, int64_t count, float* out,
            int64_t out_step, Convert convert) {
  const T* from = static_cast<const T*>(operand.data) + first;
  for (int64_t i = 0; i < count; ++i) out[i * out_step] = convert(from[i * step]);
}

// `count` elements from `first`, `step` apart, as float.
void Gather(const MatmulOperand& operand, int64_t first, int64_t step, int64_t count, bool tf32,
            float* out, int64_t out_step) {
  if (operand.type == CUDA_R_16BF) {
    Gather<uint16_t>(operand, first, step, count, out, out_step, attend::FloatFromBF16);
  } else if (operand.type == CUDA_R_16F) {
    Gather<uint16_t>(operand, first, step, count, out, out_step, attend::FloatFromF16);
  } else if (tf32) {
    Gather<float>(operand, first, step, count, out, out_step, RoundToTf32);
  } else {
    Gather<float>(operand, first, step, count, out, out_step, [](float value) { return value; });
  }
}

// Row `row` of op(A), or column `row` of op(B): k elements.
void GatherAlongK(const MatmulOperand& operand, bool k_contiguous, int64_t row, int64_t k,
                  bool tf32, float* out, int64_t out_step) {
  const int64_t first = k_contiguous ? row * operand.leading : row;
  Gather(operand, first, k_contiguous ? 1 : operand.leading, k, tf32, out, out_step);
}

// sums[column] += panel [k][16] times columns [kColumns][b_step], k in [begin, end).
template <int kColumns, int kChains>
void MultiplyTile(const PanelRows* panel, const float* columns, int64_t b_step, int64_t begin,
                  int64_t end, PanelRows* sums) {
  Vector chain[kChains][kColumns][kVectors] = {};
  const auto add = [&](int c, int64_t k) {
    for (int column = 0; column < kColumns; ++column) {
      const float b = columns[column * b_step + k];
      for (int v = 0; v < kVectors; ++v) chain[c][column][v] += panel[k].part[v] * b;
    }
  };
  int64_t k = begin;
  for (; k + kChains <= end; k += kChains) {
    for (int c = 0; c < kChains; ++c) add(c, k + c);
  }
  if (k < end) add(0, k);  // kChains is 2 at most
  for (int column = 0; column < kColumns; ++column) {
    for (int v = 0; v < kVectors; ++v) {
      Vector sum = chain[0][column][v];
      for (int c = 1; c < kChains; ++c) sum += chain[c][column][v];
      sums[column].part[v] += sum;
    }
  }
}

template <int kChains>
void MultiplyColumns(const MatmulTask& task, const PanelRows* panel, const float* columns,
                     int64_t count, PanelRows* sums) {
  const int64_t range = (task.k + task.splits - 1) / task.splits;
  for (int i = 0; i < task.splits; ++i) {
    const int64_t begin = std::min(task.k, (task.n + task.n / 64 + i) % task.splits * range);
    const int64_t end = std::min(task.k, begin + range);
    switch (count) {
      case 1:
        MultiplyTile<1, kChains>(panel, columns, task.k, begin, end, sums);
        break;
      case 2:
        MultiplyTile<2, kChains>(panel, columns, task.k, begin, end, sums);
        break;
      case 3:
        MultiplyTile<3, kChains>(panel, columns, task.k, begin, end, sums);
        break;
      default:
        MultiplyTile<kTileColumns, kChains>(panel, columns, task.k, begin, end, sums);
    }
  }
}

}  // namespace

void Multiply(const MatmulTask& task) {
  std::vector<float> columns(static_cast<size_t>(task.n * task.k));  // [n][k]
  for (int64_t column = 0; column < task.n; ++column) {
    GatherAlongK(task.b, !task.b.transposed, column, task.k, task.tf32, &columns[column * task.k],
                 1);
  }
  std::vector<PanelRows> panel(static_cast<size_t>(task.k));  // [k][16]
  auto* panel_floats = reinterpret_cast<float*>(panel.data());
  for (int64_t row = 0; row < task.m; row += kPanelRows) {
    const int64_t rows = std::min(kPanelRows, task.m - row);
    for (int64_t r = 0; r < rows; ++r) {
      GatherAlongK(task.a, task.a.transposed, row + r, task.k, task.tf32, panel_floats + r,
                   kPanelRows);
    }
    for (int64_t column = 0; column < task.n; column += kTileColumns) {
      const int64_t count = std::min(kTileColumns, task.n - column);
      PanelRows sums[kTileColumns] = {};
      if (task.chains == 1) {
        MultiplyColumns<1>(task, panel.data(), &columns[column * task.k], count, sums);
      } else {
        MultiplyColumns<2>(task, panel.data(), &columns[column * task.k], count, sums);
      }
      for (int64_t c = 0; c < count; ++c) {
        float* out = task.d + (column + c) * task.d_leading + row;
        for (int64_t r = 0; r < rows; ++r) {
          out[r] = task.alpha * sums[c].part[r / kLanes][r % kLanes] +
                   (task.bias == nullptr ? 0.0f : task.bias[row + r]);
        }
      }
    }
  }
}

}  // namespace attend::simt
