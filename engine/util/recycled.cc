// SPDX-License-Identifier: Apache-2.0
#include "engine/util/recycled.h"

#include <array>
#include <bit>
#include <cstdint>
#include <mutex>

namespace attend {
namespace {

constexpr size_t kLeastBytes = 64;
// Kept of each size: that of a few hundred requests in flight.
constexpr size_t kKeptBytes = size_t{1} << 20;
constexpr size_t kSizes = std::bit_width(RecycledMemory::kMostBytes / kLeastBytes);

size_t RoundUp(size_t bytes) { return std::bit_ceil(bytes < kLeastBytes ? kLeastBytes : bytes); }

// Pieces of one size, in a list through their own first bytes.
struct alignas(64) Pieces {
  struct Piece {
    Piece* next;
  };
  std::mutex mutex;
  Piece* first = nullptr;  // guarded by mutex
  size_t kept_bytes = 0;   // guarded by mutex
};

// Never destroyed: what is given back during the exit of the process still finds it.
Pieces& PiecesOf(size_t rounded) {
  static auto* sizes = new std::array<Pieces, kSizes>;
  return (*sizes)[std::bit_width(rounded / kLeastBytes) - 1];
}

}  // namespace

void* RecycledMemory::Get(size_t bytes) {
  if (!kRecycles || bytes > kMostBytes) return operator new(bytes);
  const size_t rounded = RoundUp(bytes);
  Pieces& pieces = PiecesOf(rounded);
  {
    const std::lock_guard lock(pieces.mutex);
    if (Pieces::Piece* piece = pieces.first; piece != nullptr) {
      pieces.first = piece->next;
      pieces.kept_bytes -= rounded;
      return piece;
    }
  }
  return operator new(rounded);
}

void RecycledMemory::Put(void* memory, size_t bytes) {
  if (!kRecycles || bytes > kMostBytes) return operator delete(memory);
  const size_t rounded = RoundUp(bytes);
  Pieces& pieces = PiecesOf(rounded);
  {
    const std::lock_guard lock(pieces.mutex);
    if (pieces.kept_bytes + rounded <= kKeptBytes) {
      pieces.first = new (memory) Pieces::Piece{pieces.first};
      pieces.kept_bytes += rounded;
      return;
    }
  }
  operator delete(memory);
}

}  // namespace attend
