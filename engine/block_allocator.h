// SPDX-License-Identifier: Apache-2.0
//
// Hands out blocks of KV memory by address. The arena is cut into slabs; a run of slabs serves one
// block size at a time and returns to the arena when its last block is free, because layers, raw
// sessions and models differ in geometry. Blocks are reference counted (forks share them). Holds no
// bytes itself.
//
// Thread-compatible. All allocations are all-or-nothing.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "engine/util/recycled.h"

namespace attend {

using BlockList = RecycledVector<int64_t>;  // addresses

class BlockAllocator {
 public:
  // Addresses lie in [base, base + bytes); `base` is a multiple of 64. `on_empty(address, bytes)`
  // is called when a run of slabs has become empty.
  BlockAllocator(int64_t base, int64_t bytes,
                 std::function<void(int64_t address, int64_t bytes)> on_empty = {});

  // Appends `count` addresses of blocks of `block_bytes` (a multiple of 64), each with one
  // reference, to `out`; false and nothing changed when they don't all fit. Lowest addresses first.
  bool Allocate(int64_t block_bytes, int64_t count, BlockList& out);

  void AddReference(int64_t address);
  // Drops one reference; at none the block is free.
  void Release(int64_t address);
  int32_t References(int64_t address) const;

  // Blocks of this size that Allocate could still give, were it asked for them all at once.
  int64_t FreeBlocks(int64_t block_bytes) const;

  int64_t capacity_bytes() const { return slab_bytes_ * static_cast<int64_t>(owner_.size()); }
  int64_t used_bytes() const { return used_bytes_; }  // of blocks handed out, shared ones once

 private:
  // Slabs that serve one block size. Unused ones keep their memory, 4 bytes for every block that
  // they were cut into: allocating and releasing asks the heap for nothing.
  struct Run {
    int64_t slabs = 0;
    int64_t block_bytes = 0;
    std::vector<int32_t> references;  // [blocks]; 0 = free
    int64_t free_blocks = 0;
    size_t lowest_free = 0;  // no block before it is free
  };
  // A run with a free block. Ordered by block size, then by address.
  struct OpenRun {
    int64_t block_bytes = 0;
    int64_t first_slab = 0;
    friend auto operator<=>(const OpenRun&, const OpenRun&) = default;
  };
  struct Place {
    int64_t first_slab = 0;  // of the run
    size_t block = 0;
  };

  int64_t SlabsPerRun(int64_t block_bytes) const;
  int64_t FindFreeSlabs(int64_t slabs) const;  // first slab, -1 = none
  bool OpenNewRun(int64_t block_bytes);
  std::vector<OpenRun>::iterator FirstOpen(OpenRun from);
  Place PlaceOf(int64_t address) const;

  int64_t base_;
  int64_t slab_bytes_;
  std::function<void(int64_t, int64_t)> on_empty_;
  std::vector<int64_t> owner_;  // [slabs] first slab of the run it belongs to, -1 = free
  std::vector<Run> runs_;       // [slabs] by first slab
  std::vector<OpenRun> open_;   // sorted
  int64_t used_bytes_ = 0;
};

}  // namespace attend
