// SPDX-License-Identifier: Apache-2.0
//
// Hands out blocks of KV memory by address. The arena is cut into slabs; a run of slabs serves one
// block size at a time and returns to the arena when its last block is free, because layers, raw
// sessions and models differ in geometry. Blocks are reference counted (forks share them). Holds no
// bytes itself.
//
// Thread-compatible. All allocations are all-or-nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <vector>

namespace attend {

class BlockAllocator {
 public:
  // Addresses lie in [base, base + bytes); `base` is a multiple of 64. `on_empty(address, bytes)`
  // is called when a run of slabs has become empty.
  BlockAllocator(int64_t base, int64_t bytes,
                 std::function<void(int64_t address, int64_t bytes)> on_empty = {});

  // Appends `count` addresses of blocks of `block_bytes` (a multiple of 64), each with one
  // reference, to `out`; false and nothing changed when they don't all fit. Lowest addresses first.
  bool Allocate(int64_t block_bytes, int64_t count, std::vector<int64_t>& out);

  void AddReference(int64_t address);
  // Drops one reference; at none the block is free.
  void Release(int64_t address);
  int32_t References(int64_t address) const;

  // Blocks of this size that Allocate could still give, were it asked for them all at once.
  int64_t FreeBlocks(int64_t block_bytes) const;

  int64_t capacity_bytes() const { return slab_bytes_ * static_cast<int64_t>(owner_.size()); }
  int64_t used_bytes() const { return used_bytes_; }  // of blocks handed out, shared ones once

 private:
  struct Run {
    int64_t first_slab = 0;
    int64_t slabs = 0;
    int64_t block_bytes = 0;
    std::vector<int32_t> references;  // [blocks]; 0 = free
    std::set<int32_t> free;           // indices of free blocks, lowest handed out first
  };

  int64_t SlabsPerRun(int64_t block_bytes) const;
  int64_t FindFreeSlabs(int64_t slabs) const;  // first slab, -1 = none
  Run& RunOf(int64_t address, int32_t* block);
  const Run& RunOf(int64_t address, int32_t* block) const;

  int64_t base_;
  int64_t slab_bytes_;
  std::function<void(int64_t, int64_t)> on_empty_;
  std::vector<int64_t> owner_;   // [slabs] first slab of the run it belongs to, -1 = free
  std::map<int64_t, Run> runs_;  // by first slab
  std::map<int64_t, std::set<int64_t>> open_runs_;  // block bytes -> runs with a free block
  int64_t used_bytes_ = 0;
};

}  // namespace attend
