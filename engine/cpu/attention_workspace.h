// SPDX-License-Identifier: Apache-2.0
//
// How the attention stage cuts a batch: tiles, tasks, and who does them. One workspace serves one
// batch after another, so that no batch asks the heap for memory. It keeps what the largest one
// needed: a tile or a task for every few rows of a head, less than their queries take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "engine/cpu/attention_tile.h"

namespace attend {

// One block's share of the new keys of one item.
struct AppendTask {
  int plan_index;
  int64_t first_key;  // absolute
  int64_t keys;
};

// Whole tiles (segment -1), or one segment of a split one.
struct TileTask {
  int64_t tile;     // the first
  int64_t tiles;    // how many that are attended in turn
  int64_t segment;  // index from the tile's first one
  int64_t state;    // float offset in the split tiles' memory
};

// 64-byte aligned memory that grows as it is asked for. What it held is gone then. (MappedMemory,
// whose pieces all begin on a huge page, in its place: layers 0.5 to 2.7 points of their limit
// less.)
class ScratchMemory {
 public:
  std::byte* Reserve(int64_t bytes) {
    if (bytes_ < bytes) {
      memory_.reset();
      memory_.reset(static_cast<std::byte*>(::operator new(static_cast<size_t>(bytes), kAlign)));
      bytes_ = bytes;
    }
    return memory_.get();
  }
  std::byte* data() const { return memory_.get(); }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlign); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  int64_t bytes_ = 0;
};

struct AttentionWorkspace {
  std::vector<AttentionTile> tiles;

  // The keys that no tile brings.
  std::vector<bool> brought;  // [plan items] a tile does
  std::vector<AppendTask> appends;
  std::vector<int64_t> append_ends;  // of each worker's (WorkerPool::ParallelFor)

  // Leading tiles that would keep one worker busy longer than its share are split into their
  // segments.
  std::vector<TileTask> tasks;
  std::vector<TileTask> undealt;  // before they are ordered by worker
  std::vector<int64_t> ends;      // of each worker's
  int64_t split_tiles = 0;
  std::vector<int64_t> states;  // [split tiles] offset of the first state
  int64_t state_floats = 0;

  std::vector<ScratchMemory> scratch;  // [workers] for one tile
  ScratchMemory state_memory;
};

}  // namespace attend
