// SPDX-License-Identifier: Apache-2.0
//
// The state of the KV cache as integers: which blocks hold which history, how long each layer is,
// and the transactions that change it. Holds no tensor bytes: changes that need bytes moved are
// returned as BlockCopy lists for the engine. The runtime is the only caller.
//
// Thread-compatible.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "engine/attention_engine.h"
#include "engine/block_allocator.h"
#include "engine/kv_geometry.h"

namespace attend {

// Where the layers of one kind of session lie. A block of the history holds 64 tokens of all layers
// that keep one; a cross-attention context has blocks of its own, one layer each.
struct KvLayout {
  struct Layer {
    KvGeometry geometry;
    bool history = false;      // keeps a self-attention history
    bool context = false;      // may cache a cross-attention context
    int64_t offset_bytes = 0;  // of its part inside a history block
  };
  std::vector<Layer> layers;
  int64_t block_bytes = 0;  // of a history block

  // Fills the offsets and block_bytes.
  void Place();
};

// The cached source of a cross-attention layer.
struct KvContext {
  bool present = false;
  int64_t length = 0;
  std::array<uint64_t, 2> hash{};  // of dtype, shape and bytes
  BlockList blocks;
};

// What one session has cached.
struct KvHistory {
  std::shared_ptr<const KvLayout> layout;
  BlockList blocks;                // history blocks, shared by the layers
  std::vector<int64_t> length;     // [layers] committed tokens
  std::vector<int64_t> reserved;   // [layers] tokens a running append will have; 0 = none
  std::vector<KvContext> context;  // [layers]

  int64_t Longest() const;
};

// A running change of one layer: made by Reserve, ended by Commit or RollBack.
struct KvReservation {
  enum class Kind : uint8_t {
    kNone,       // holds nothing
    kAppend,     // new keys go to the history
    kLookAhead,  // attends as if appended; the history stays (no_append)
    kContext,    // new keys become the cached context
    kScratch,    // stateless: keys live in scratch only
  };
  Kind kind = Kind::kNone;
  KvHistory* history = nullptr;
  int layer = 0;
  int64_t position = 0;  // keys cached before
  int64_t new_keys = 0;
  int32_t block_tokens = kBlockTokens;
  std::array<uint64_t, 2> context_hash{};
  // Scratch of kLookAhead and kScratch, blocks of kContext. kAppend over committed rows (rewind):
  // copies of this layer's parts of the blocks from `position` on, put back by RollBack.
  BlockList own_blocks;
};

class KvCache {
 public:
  // Session blocks come from [0, kv_bytes), scratch from [kv_bytes, kv_bytes + scratch_bytes).
  // `engine` moves bytes and outlives the cache.
  KvCache(AttentionEngine& engine, int64_t kv_bytes, int64_t scratch_bytes);

  // Why the engine failed: a copy found out, or the caller did. It is not called again; the books
  // go on as if every byte were where it belongs, so that all that is reserved can be given back.
  const absl::Status& engine_status() const { return engine_status_; }
  void EngineFailed(const absl::Status& status) { engine_status_.Update(status); }

  KvHistory Open(std::shared_ptr<const KvLayout> layout) const;
  // Frees everything the history holds. REQUIRES: no running reservation.
  void Close(KvHistory& history);

  enum class Outcome : uint8_t { kOk, kKvExhausted, kScratchExhausted };

  // Each either succeeds whole or changes nothing. REQUIRES: at most one running reservation per
  // (history, layer).

  // `position` <= the layer's length: rows beyond are overwritten (rewind), saved for RollBack.
  Outcome ReserveAppend(KvHistory& history, int layer, int64_t position, int64_t new_keys,
                        KvReservation& reservation);
  Outcome ReserveLookAhead(KvHistory& history, int layer, int64_t position, int64_t new_keys,
                           KvReservation& reservation);
  Outcome ReserveContext(KvHistory& history, int layer, int64_t length,
                         std::array<uint64_t, 2> hash, KvReservation& reservation);
  Outcome ReserveScratch(const KvGeometry& geometry, int64_t keys, KvReservation& reservation);

  void Commit(KvReservation& reservation);
  void RollBack(KvReservation& reservation);

  // Appends the addresses of the layer's part of blocks 0 .. ceil(keys / 64) - 1 under the
  // reservation, which has so many keys or more, to `out`. Ask again for every batch: a block may
  // have moved (copy-on-write by another layer).
  void ListBlocks(const KvReservation& reservation, int64_t keys, std::vector<int64_t>& out) const;
  // Likewise for a cached context.
  const BlockList& ContextBlocks(const KvHistory& history, int layer) const {
    return history.context[static_cast<size_t>(layer)].blocks;
  }

  // A second history with the same content, sharing all blocks. REQUIRES: no running reservation.
  KvHistory Fork(const KvHistory& history);
  // Every layer becomes min(its length, length). REQUIRES: no running reservation.
  void Truncate(KvHistory& history, int64_t length);

  int64_t HeldBytes(const KvHistory& history) const;  // shared blocks counted in full
  bool FitsScratch(const KvGeometry& geometry, int64_t keys) const;
  int64_t scratch_capacity_bytes() const { return scratch_.capacity_bytes(); }
  int64_t scratch_used_bytes() const { return scratch_.used_bytes(); }
  const BlockAllocator& arena() const { return arena_; }

 private:
  void Copy(std::span<const BlockCopy> copies);
  void Discard(int64_t address, int64_t bytes);
  void Trim(KvHistory& history);
  bool AllocateScratch(int64_t block_bytes, int64_t count, BlockList& out);
  // For undo copies and look-ahead: scratch, or the arena when scratch is full, so that a step of
  // many sessions never depends on what stateless work holds.
  bool AllocateTemporary(int64_t block_bytes, int64_t count, BlockList& out);
  void ReleaseTemporary(int64_t address);  // from either

  AttentionEngine& engine_;
  BlockAllocator arena_;
  BlockAllocator scratch_;
  int64_t scratch_base_;
  absl::Status engine_status_;
  int64_t scratch_touched_bytes_ =
      0;  // [scratch_base_, + this) has been written since the last Discard
};

}  // namespace attend
