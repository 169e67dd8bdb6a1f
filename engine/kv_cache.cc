// SPDX-License-Identifier: Apache-2.0
#include "engine/kv_cache.h"

#include <algorithm>
#include <utility>

#include "engine/util/check.h"

namespace attend {
namespace {

// Scratch that stays in physical memory between batches.
constexpr int64_t kScratchKeptBytes = int64_t{64} << 20;

int64_t BlockCount(int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

// A sequence shorter than a block needs room for its own keys only, in steps of 16, one vector of
// float.
int32_t ScratchBlockTokens(int64_t keys) {
  if (keys >= kBlockTokens) return kBlockTokens;
  return static_cast<int32_t>(std::max<int64_t>(1, (keys + 15) / 16) * 16);
}

}  // namespace

void KvLayout::Place() {
  block_bytes = 0;
  for (Layer& layer : layers) {
    if (!layer.history) continue;
    layer.offset_bytes = block_bytes;
    block_bytes += layer.geometry.BlockBytes();
  }
}

int64_t KvHistory::Longest() const {
  return length.empty() ? 0 : *std::max_element(length.begin(), length.end());
}

KvCache::KvCache(AttentionEngine& engine, int64_t kv_bytes, int64_t scratch_bytes)
    : engine_(engine),
      arena_(0, kv_bytes, [this](int64_t address, int64_t bytes) { Discard(address, bytes); }),
      scratch_(kv_bytes, scratch_bytes),
      scratch_base_(kv_bytes) {}

void KvCache::Copy(std::span<const BlockCopy> copies) {
  if (!copies.empty() && engine_status_.ok()) engine_status_ = engine_.CopyBlocks(copies);
}

void KvCache::Discard(int64_t address, int64_t bytes) {
  if (engine_status_.ok()) engine_.Discard(address, bytes);
}

KvHistory KvCache::Open(std::shared_ptr<const KvLayout> layout) const {
  KvHistory history;
  history.length.assign(layout->layers.size(), 0);
  history.reserved.assign(layout->layers.size(), 0);
  history.context.resize(layout->layers.size());
  history.layout = std::move(layout);
  return history;
}

void KvCache::Close(KvHistory& history) {
  for (int64_t reserved : history.reserved) CHECK(reserved == 0);
  for (int64_t block : history.blocks) arena_.Release(block);
  history.blocks.clear();
  std::fill(history.length.begin(), history.length.end(), 0);
  for (KvContext& context : history.context) {
    for (int64_t block : context.blocks) arena_.Release(block);
    context = {};
  }
}

void KvCache::Trim(KvHistory& history) {
  int64_t tokens = history.Longest();
  for (int64_t reserved : history.reserved) tokens = std::max(tokens, reserved);
  while (static_cast<int64_t>(history.blocks.size()) > BlockCount(tokens)) {
    arena_.Release(history.blocks.back());
    history.blocks.pop_back();
  }
}

bool KvCache::AllocateScratch(int64_t block_bytes, int64_t count, BlockList& out) {
  const size_t before = out.size();
  if (!scratch_.Allocate(block_bytes, count, out)) return false;
  for (size_t i = before; i < out.size(); ++i) {
    scratch_touched_bytes_ = std::max(scratch_touched_bytes_, out[i] + block_bytes - scratch_base_);
  }
  return true;
}

bool KvCache::AllocateTemporary(int64_t block_bytes, int64_t count, BlockList& out) {
  return AllocateScratch(block_bytes, count, out) || arena_.Allocate(block_bytes, count, out);
}

void KvCache::ReleaseTemporary(int64_t address) {
  if (address < scratch_base_) return arena_.Release(address);
  scratch_.Release(address);
  // The next batch uses scratch again: give back only what a large request needed.
  if (scratch_.used_bytes() == 0 && scratch_touched_bytes_ > kScratchKeptBytes) {
    Discard(scratch_base_ + kScratchKeptBytes, scratch_touched_bytes_ - kScratchKeptBytes);
    scratch_touched_bytes_ = kScratchKeptBytes;
  }
}

KvCache::Outcome KvCache::ReserveAppend(KvHistory& history, int layer, int64_t position,
                                        int64_t new_keys, KvReservation& reservation) {
  const KvLayout::Layer& place = history.layout->layers[static_cast<size_t>(layer)];
  const int64_t length = history.length[static_cast<size_t>(layer)];
  CHECK(place.history && position <= length && history.reserved[static_cast<size_t>(layer)] == 0);
  const int64_t end = position + new_keys;
  const int64_t first_block = position / kBlockTokens;
  const int64_t end_block = new_keys == 0 ? first_block : BlockCount(end);
  const auto held = static_cast<int64_t>(history.blocks.size());

  const int64_t end_held = std::min(end_block, held);
  const auto shared = [&](int64_t index) {  // to be copied before writing
    return arena_.References(history.blocks[static_cast<size_t>(index)]) > 1;
  };
  int64_t blocks = std::max<int64_t>(0, end_block - held);
  for (int64_t index = first_block; index < end_held; ++index) blocks += shared(index) ? 1 : 0;
  // Committed rows that will be overwritten: [position, min(length, end)).
  const bool rewinds = new_keys > 0 && position < length;
  const int64_t overwritten = rewinds ? BlockCount(std::min(length, end)) - first_block : 0;

  BlockList fresh;
  if (!arena_.Allocate(history.layout->block_bytes, blocks, fresh)) return Outcome::kKvExhausted;
  KvReservation made;
  if (!AllocateTemporary(place.geometry.BlockBytes(), overwritten, made.own_blocks)) {
    for (int64_t block : fresh) arena_.Release(block);
    return Outcome::kKvExhausted;
  }

  RecycledVector<BlockCopy> copies;
  auto next = fresh.begin();
  for (int64_t index = first_block; index < end_held; ++index) {
    if (!shared(index)) continue;
    int64_t& block = history.blocks[static_cast<size_t>(index)];
    copies.push_back({block, *next, history.layout->block_bytes});
    arena_.Release(block);
    block = *next++;
  }
  history.blocks.insert(history.blocks.end(), next, fresh.end());
  Copy(copies);

  copies.clear();
  for (int64_t i = 0; i < overwritten; ++i) {
    const int64_t from = history.blocks[static_cast<size_t>(first_block + i)] + place.offset_bytes;
    copies.push_back({from, made.own_blocks[static_cast<size_t>(i)], place.geometry.BlockBytes()});
  }
  Copy(copies);

  made.kind = KvReservation::Kind::kAppend;
  made.history = &history;
  made.layer = layer;
  made.position = position;
  made.new_keys = new_keys;
  reservation = std::move(made);
  history.reserved[static_cast<size_t>(layer)] = std::max<int64_t>(end, 1);
  return Outcome::kOk;
}

KvCache::Outcome KvCache::ReserveLookAhead(KvHistory& history, int layer, int64_t position,
                                           int64_t new_keys, KvReservation& reservation) {
  const KvLayout::Layer& place = history.layout->layers[static_cast<size_t>(layer)];
  CHECK(place.history && position <= history.length[static_cast<size_t>(layer)]);
  const int64_t first_block = position / kBlockTokens;
  const int64_t count = new_keys == 0 ? 0 : BlockCount(position + new_keys) - first_block;
  KvReservation made;
  made.kind = KvReservation::Kind::kLookAhead;
  made.history = &history;
  made.layer = layer;
  made.position = position;
  made.new_keys = new_keys;
  if (!AllocateTemporary(place.geometry.BlockBytes(), count, made.own_blocks)) {
    return Outcome::kKvExhausted;
  }
  if (count > 0 && position % kBlockTokens != 0) {
    const BlockCopy copy{history.blocks[static_cast<size_t>(first_block)] + place.offset_bytes,
                         made.own_blocks[0], place.geometry.BlockBytes()};
    Copy({&copy, 1});
  }
  reservation = std::move(made);
  return Outcome::kOk;
}

KvCache::Outcome KvCache::ReserveContext(KvHistory& history, int layer, int64_t length,
                                         std::array<uint64_t, 2> hash, KvReservation& reservation) {
  const KvLayout::Layer& place = history.layout->layers[static_cast<size_t>(layer)];
  CHECK(place.context && !history.context[static_cast<size_t>(layer)].present);
  KvReservation made;
  made.kind = KvReservation::Kind::kContext;
  made.history = &history;
  made.layer = layer;
  made.new_keys = length;
  made.context_hash = hash;
  if (!arena_.Allocate(place.geometry.BlockBytes(), BlockCount(length), made.own_blocks)) {
    return Outcome::kKvExhausted;
  }
  reservation = std::move(made);
  return Outcome::kOk;
}

KvCache::Outcome KvCache::ReserveScratch(const KvGeometry& geometry, int64_t keys,
                                         KvReservation& reservation) {
  KvReservation made;
  made.kind = KvReservation::Kind::kScratch;
  made.new_keys = keys;
  made.block_tokens = ScratchBlockTokens(keys);
  if (!AllocateScratch(geometry.BlockBytes(made.block_tokens), BlockCount(keys), made.own_blocks)) {
    return Outcome::kScratchExhausted;
  }
  reservation = std::move(made);
  return Outcome::kOk;
}

bool KvCache::FitsScratch(const KvGeometry& geometry, int64_t keys) const {
  const int64_t bytes = geometry.BlockBytes(ScratchBlockTokens(keys));
  // Runs of slabs waste at most an eighth (BlockAllocator).
  return BlockCount(keys) * bytes <= scratch_.capacity_bytes() / 8 * 7;
}

void KvCache::Commit(KvReservation& reservation) {
  switch (reservation.kind) {
    case KvReservation::Kind::kNone:
      return;
    case KvReservation::Kind::kAppend: {
      KvHistory& history = *reservation.history;
      const auto layer = static_cast<size_t>(reservation.layer);
      history.length[layer] = reservation.position + reservation.new_keys;
      history.reserved[layer] = 0;
      for (int64_t block : reservation.own_blocks) ReleaseTemporary(block);
      Trim(history);
      break;
    }
    case KvReservation::Kind::kContext: {
      KvContext& context = reservation.history->context[static_cast<size_t>(reservation.layer)];
      context.present = true;
      context.length = reservation.new_keys;
      context.hash = reservation.context_hash;
      context.blocks = std::move(reservation.own_blocks);
      break;
    }
    case KvReservation::Kind::kLookAhead:
    case KvReservation::Kind::kScratch:
      for (int64_t block : reservation.own_blocks) ReleaseTemporary(block);
      break;
  }
  reservation = {};
}

void KvCache::RollBack(KvReservation& reservation) {
  switch (reservation.kind) {
    case KvReservation::Kind::kAppend: {
      KvHistory& history = *reservation.history;
      const KvLayout::Layer& place = history.layout->layers[static_cast<size_t>(reservation.layer)];
      auto block = history.blocks.begin() + reservation.position / kBlockTokens;
      RecycledVector<BlockCopy> copies;
      for (int64_t saved : reservation.own_blocks) {
        copies.push_back({saved, *block++ + place.offset_bytes, place.geometry.BlockBytes()});
      }
      Copy(copies);
      for (int64_t saved : reservation.own_blocks) ReleaseTemporary(saved);
      history.reserved[static_cast<size_t>(reservation.layer)] = 0;
      Trim(history);
      reservation = {};
      return;
    }
    case KvReservation::Kind::kContext:
      for (int64_t block : reservation.own_blocks) arena_.Release(block);
      reservation = {};
      return;
    case KvReservation::Kind::kNone:
    case KvReservation::Kind::kLookAhead:
    case KvReservation::Kind::kScratch:
      Commit(reservation);  // nothing but scratch to give back
      return;
  }
}

void KvCache::ListBlocks(const KvReservation& reservation, int64_t keys,
                         std::vector<int64_t>& out) const {
  const BlockList& own = reservation.own_blocks;
  const int64_t count = BlockCount(keys);
  int64_t own_from = count;  // the first one that is the reservation's own
  switch (reservation.kind) {
    case KvReservation::Kind::kContext:
    case KvReservation::Kind::kScratch:
      out.insert(out.end(), own.begin(), own.begin() + count);
      return;
    case KvReservation::Kind::kLookAhead:
      if (!own.empty()) own_from = std::min(count, reservation.position / kBlockTokens);
      break;
    case KvReservation::Kind::kNone:
    case KvReservation::Kind::kAppend:
      break;
  }
  const KvHistory& history = *reservation.history;
  const int64_t offset =
      history.layout->layers[static_cast<size_t>(reservation.layer)].offset_bytes;
  for (int64_t index = 0; index < own_from; ++index) {
    out.push_back(history.blocks[static_cast<size_t>(index)] + offset);
  }
  out.insert(out.end(), own.begin(), own.begin() + (count - own_from));
}

KvHistory KvCache::Fork(const KvHistory& history) {
  for (int64_t reserved : history.reserved) CHECK(reserved == 0);
  KvHistory fork = history;
  for (int64_t block : fork.blocks) arena_.AddReference(block);
  for (const KvContext& context : fork.context) {
    for (int64_t block : context.blocks) arena_.AddReference(block);
  }
  return fork;
}

void KvCache::Truncate(KvHistory& history, int64_t length) {
  for (int64_t& tokens : history.length) tokens = std::min(tokens, length);
  Trim(history);
}

int64_t KvCache::HeldBytes(const KvHistory& history) const {
  int64_t bytes = static_cast<int64_t>(history.blocks.size()) * history.layout->block_bytes;
  for (size_t layer = 0; layer < history.context.size(); ++layer) {
    bytes += static_cast<int64_t>(history.context[layer].blocks.size()) *
             history.layout->layers[layer].geometry.BlockBytes();
  }
  return bytes;
}

}  // namespace attend
