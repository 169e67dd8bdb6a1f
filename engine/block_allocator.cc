// SPDX-License-Identifier: Apache-2.0
#include "engine/block_allocator.h"

#include <algorithm>
#include <utility>

#include "engine/util/check.h"

namespace attend {
namespace {

// Slabs are 2 MiB, one huge page, in arenas large enough to have a few hundred; smaller below.
constexpr int64_t kSlabBytes = int64_t{2} << 20;
constexpr int64_t kSlabsAtLeast = 64;
// A run grows until at most this share of it is wasted behind its last block.
constexpr int64_t kWasteDivisor = 8;
constexpr int64_t kRunSlabsTried = 8;

int64_t ChooseSlabBytes(int64_t bytes) {
  int64_t slab = kSlabBytes;
  while (slab > 4096 && bytes / slab < kSlabsAtLeast) slab /= 2;
  return slab;
}

}  // namespace

BlockAllocator::BlockAllocator(int64_t base, int64_t bytes,
                               std::function<void(int64_t, int64_t)> on_empty)
    : base_(base), slab_bytes_(ChooseSlabBytes(bytes)), on_empty_(std::move(on_empty)) {
  const auto slabs = static_cast<size_t>(bytes / slab_bytes_);
  owner_.assign(slabs, -1);
  runs_.resize(slabs);
  open_.reserve(slabs);
}

int64_t BlockAllocator::SlabsPerRun(int64_t block_bytes) const {
  const int64_t least = (block_bytes + slab_bytes_ - 1) / slab_bytes_;
  for (int64_t slabs = least; slabs < least + kRunSlabsTried; ++slabs) {
    const int64_t waste = slabs * slab_bytes_ % block_bytes;
    if (waste * kWasteDivisor <= slabs * slab_bytes_) return slabs;
  }
  return least;
}

int64_t BlockAllocator::FindFreeSlabs(int64_t slabs) const {
  int64_t length = 0;
  for (int64_t slab = 0; slab < static_cast<int64_t>(owner_.size()); ++slab) {
    length = owner_[slab] < 0 ? length + 1 : 0;
    if (length == slabs) return slab - slabs + 1;
  }
  return -1;
}

std::vector<BlockAllocator::OpenRun>::iterator BlockAllocator::FirstOpen(OpenRun from) {
  return std::lower_bound(open_.begin(), open_.end(), from);
}

bool BlockAllocator::OpenNewRun(int64_t block_bytes) {
  int64_t slabs = SlabsPerRun(block_bytes);
  int64_t first = FindFreeSlabs(slabs);
  if (first < 0) {  // the comfortable run does not fit; the smallest may
    slabs = (block_bytes + slab_bytes_ - 1) / slab_bytes_;
    first = FindFreeSlabs(slabs);
  }
  if (first < 0) return false;
  Run& run = runs_[static_cast<size_t>(first)];
  run.slabs = slabs;
  run.block_bytes = block_bytes;
  run.free_blocks = slabs * slab_bytes_ / block_bytes;
  run.references.assign(static_cast<size_t>(run.free_blocks), 0);
  run.lowest_free = 0;
  std::fill_n(owner_.begin() + first, slabs, first);
  const OpenRun open{block_bytes, first};
  open_.insert(FirstOpen(open), open);
  return true;
}

bool BlockAllocator::Allocate(int64_t block_bytes, int64_t count, BlockList& out) {
  CHECK(block_bytes > 0 && block_bytes % 64 == 0);
  const size_t before = out.size();
  const auto open = [&] {
    const auto first = FirstOpen({block_bytes, 0});
    return first != open_.end() && first->block_bytes == block_bytes ? first : open_.end();
  };
  for (int64_t i = 0; i < count; ++i) {
    auto lowest = open();
    if (lowest == open_.end()) {
      if (!OpenNewRun(block_bytes)) {
        while (out.size() > before) {
          Release(out.back());
          out.pop_back();
        }
        return false;
      }
      lowest = open();
    }
    const int64_t first_slab = lowest->first_slab;
    Run& run = runs_[static_cast<size_t>(first_slab)];
    while (run.references[run.lowest_free] > 0) ++run.lowest_free;
    const size_t block = run.lowest_free++;
    run.references[block] = 1;
    if (--run.free_blocks == 0) open_.erase(lowest);
    used_bytes_ += block_bytes;
    out.push_back(base_ + first_slab * slab_bytes_ + static_cast<int64_t>(block) * block_bytes);
  }
  return true;
}

BlockAllocator::Place BlockAllocator::PlaceOf(int64_t address) const {
  const int64_t offset = address - base_;
  CHECK(offset >= 0 && offset < capacity_bytes());
  const int64_t first = owner_[static_cast<size_t>(offset / slab_bytes_)];
  CHECK(first >= 0);
  const int64_t block_bytes = runs_[static_cast<size_t>(first)].block_bytes;
  const int64_t inside = offset - first * slab_bytes_;
  CHECK(inside % block_bytes == 0);
  return {first, static_cast<size_t>(inside / block_bytes)};
}

void BlockAllocator::AddReference(int64_t address) {
  const Place place = PlaceOf(address);
  int32_t& references = runs_[static_cast<size_t>(place.first_slab)].references[place.block];
  CHECK(references > 0);
  ++references;
}

int32_t BlockAllocator::References(int64_t address) const {
  const Place place = PlaceOf(address);
  return runs_[static_cast<size_t>(place.first_slab)].references[place.block];
}

void BlockAllocator::Release(int64_t address) {
  const Place place = PlaceOf(address);
  Run& run = runs_[static_cast<size_t>(place.first_slab)];
  int32_t& references = run.references[place.block];
  CHECK(references > 0);
  if (--references > 0) return;
  used_bytes_ -= run.block_bytes;
  run.lowest_free = std::min(run.lowest_free, place.block);
  const bool was_open = run.free_blocks++ > 0;
  const bool empty = run.free_blocks == static_cast<int64_t>(run.references.size());
  const OpenRun open{run.block_bytes, place.first_slab};
  if (!empty) {
    if (!was_open) open_.insert(FirstOpen(open), open);
    return;
  }
  if (was_open) open_.erase(FirstOpen(open));
  std::fill_n(owner_.begin() + place.first_slab, run.slabs, int64_t{-1});
  if (on_empty_) on_empty_(base_ + place.first_slab * slab_bytes_, run.slabs * slab_bytes_);
}

int64_t BlockAllocator::FreeBlocks(int64_t block_bytes) const {
  int64_t blocks = 0;
  for (const OpenRun& open : open_) {
    if (open.block_bytes == block_bytes) {
      blocks += runs_[static_cast<size_t>(open.first_slab)].free_blocks;
    }
  }
  const int64_t comfortable = SlabsPerRun(block_bytes);
  const int64_t least = (block_bytes + slab_bytes_ - 1) / slab_bytes_;
  int64_t length = 0;
  const auto count_gap = [&] {  // as Allocate would cut a gap: comfortable runs, then smallest ones
    blocks += length / comfortable * (comfortable * slab_bytes_ / block_bytes);
    blocks += length % comfortable / least * (least * slab_bytes_ / block_bytes);
    length = 0;
  };
  for (int64_t owner : owner_) {
    if (owner < 0) {
      ++length;
    } else {
      count_gap();
    }
  }
  count_gap();
  return blocks;
}

}  // namespace attend
