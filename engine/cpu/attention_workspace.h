// SPDX-License-Identifier: Apache-2.0
//
// How the attention stage cuts a batch: tiles, tasks, and who does them. One workspace serves one
// batch after another, so that no batch asks the heap for memory. It keeps what the largest one
// needed: a tile or a task for every few rows of a head, less than their queries take.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/cpu/attention_tile.h"

namespace attend {

// One block's share of the new keys of one item.
struct AppendTask {
  int plan_index;
  int64_t first_key;  // absolute
  int64_t keys;
};

// A whole tile (segment -1), or one segment of a split one.
struct TileTask {
  int64_t tile;
  int64_t segment;  // index from the tile's first one
  int64_t state;    // float offset in the split tiles' memory
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
};

}  // namespace attend
