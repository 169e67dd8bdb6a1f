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
  owner_.assign(static_cast<size_t>(bytes / slab_bytes_), -1);
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

bool BlockAllocator::Allocate(int64_t block_bytes, int64_t count, std::vector<int64_t>& out) {
  CHECK(block_bytes > 0 && block_bytes % 64 == 0);
  const size_t before = out.size();
  std::set<int64_t>& open = open_runs_[block_bytes];
  for (int64_t i = 0; i < count; ++i) {
    if (open.empty()) {
      int64_t slabs = SlabsPerRun(block_bytes);
      int64_t first = FindFreeSlabs(slabs);
      if (first < 0) {  // the comfortable run does not fit; the smallest may
        slabs = (block_bytes + slab_bytes_ - 1) / slab_bytes_;
        first = FindFreeSlabs(slabs);
      }
      if (first < 0) {
        while (out.size() > before) {
          Release(out.back());
          out.pop_back();
        }
        return false;
      }
      Run& run = runs_[first];
      run.first_slab = first;
      run.slabs = slabs;
      run.block_bytes = block_bytes;
      const auto blocks = static_cast<int32_t>(slabs * slab_bytes_ / block_bytes);
      run.references.assign(static_cast<size_t>(blocks), 0);
      for (int32_t block = 0; block < blocks; ++block) run.free.insert(run.free.end(), block);
      std::fill_n(owner_.begin() + first, slabs, first);
      open.insert(first);
    }
    Run& run = runs_.at(*open.begin());
    const int32_t block = *run.free.begin();
    run.free.erase(run.free.begin());
    if (run.free.empty()) open.erase(run.first_slab);
    run.references[static_cast<size_t>(block)] = 1;
    used_bytes_ += block_bytes;
    out.push_back(base_ + run.first_slab * slab_bytes_ + block * block_bytes);
  }
  return true;
}

BlockAllocator::Run& BlockAllocator::RunOf(int64_t address, int32_t* block) {
  const BlockAllocator* self = this;
  return const_cast<Run&>(self->RunOf(address, block));
}

const BlockAllocator::Run& BlockAllocator::RunOf(int64_t address, int32_t* block) const {
  const int64_t offset = address - base_;
  CHECK(offset >= 0 && offset < capacity_bytes());
  const int64_t first = owner_[static_cast<size_t>(offset / slab_bytes_)];
  CHECK(first >= 0);
  const Run& run = runs_.at(first);
  const int64_t inside = offset - first * slab_bytes_;
  CHECK(inside % run.block_bytes == 0);
  *block = static_cast<int32_t>(inside / run.block_bytes);
  return run;
}

void BlockAllocator::AddReference(int64_t address) {
  int32_t block = 0;
  Run& run = RunOf(address, &block);
  CHECK(run.references[static_cast<size_t>(block)] > 0);
  ++run.references[static_cast<size_t>(block)];
}

int32_t BlockAllocator::References(int64_t address) const {
  int32_t block = 0;
  return RunOf(address, &block).references[static_cast<size_t>(block)];
}

void BlockAllocator::Release(int64_t address) {
  int32_t block = 0;
  Run& run = RunOf(address, &block);
  int32_t& references = run.references[static_cast<size_t>(block)];
  CHECK(references > 0);
  if (--references > 0) return;
  run.free.insert(block);
  used_bytes_ -= run.block_bytes;
  std::set<int64_t>& open = open_runs_[run.block_bytes];
  if (run.free.size() < run.references.size()) {
    open.insert(run.first_slab);
    return;
  }
  open.erase(run.first_slab);
  std::fill_n(owner_.begin() + run.first_slab, run.slabs, int64_t{-1});
  const int64_t first = run.first_slab;
  const int64_t slabs = run.slabs;
  runs_.erase(first);
  if (on_empty_) on_empty_(base_ + first * slab_bytes_, slabs * slab_bytes_);
}

int64_t BlockAllocator::FreeBlocks(int64_t block_bytes) const {
  int64_t blocks = 0;
  if (const auto open = open_runs_.find(block_bytes); open != open_runs_.end()) {
    for (int64_t first : open->second) {
      blocks += static_cast<int64_t>(runs_.at(first).free.size());
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
