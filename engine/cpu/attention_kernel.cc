// SPDX-License-Identifier: Apache-2.0
//
// Cuts a batch into tiles and hands them to the workers; the arithmetic is in attention_tile.cc.
// How a batch is cut changes no bit of the result.
#include "engine/cpu/attention_kernel.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "engine/cpu/attention_tile.h"
#include "engine/cpu/attention_workspace.h"
#include "engine/cpu/kv_append.h"
#include "engine/cpu/kv_blocks.h"

namespace attend {
namespace {

// Rows of a tile, 22 register tiles: enough to read a block's keys and values (from L2) at the
// speed of the arithmetic, few enough for queries and outputs of 128 elements to stay in L2 beside
// them, and sequences of 128 rows are one tile (96 rows: 2 to 5 % slower at 128 to 1024 keys).
constexpr int64_t kMaxTileRows = 132;
// Below two register tiles of rows, more tiles cost as much time as they save.
constexpr int64_t kMinTileRows = 12;
// Tiles per worker that even out their different costs.
constexpr int64_t kTilesPerWorker = 2;
// Blocks to append to per worker, and tokens per block, from which heads are not worth dividing.
constexpr int64_t kAppendsPerWorker = 4;
// Few rows read keys and values as fast as memory gives them, and it gives most in long pieces (in
// any order: of 16 KiB 60 % of what one long run gives, of 32 KiB 85 %, of 64 KiB 90 %). So they
// take heads, which lie side by side in a block, in turn: BF16 decoding by 6 to 10 % faster, over
// I8 keys 20 %.
constexpr int64_t kRowsOfReading = 12;
constexpr int64_t kPieceBytes = 128 * 1024;
// States of all segments of a split tile are in memory together: only for low tiles.
constexpr int64_t kMaxSplitRows = 32;

const AttendItem& ItemAt(const AttentionBatch& batch, int plan_index) {
  return batch.items[batch.plan->order[plan_index]];
}

KvBlockLayout LayoutOf(const AttentionBatch& batch, const AttendItem& item) {
  return {GeometryOf(*batch.plan->spec, batch.plan->kv_dtype), item.block_tokens};
}

// Calls run(task) for every block that the item appends to.
template <class Run>
void ForAppends(const AttentionBatch& batch, int plan_index, const Run& run) {
  const AttendItem& item = ItemAt(batch, plan_index);
  for (int64_t key = item.cached_keys; key < item.keys();) {
    const int64_t end = std::min(item.keys(), (key / kBlockTokens + 1) * kBlockTokens);
    run(AppendTask{plan_index, key, end - key});
    key = end;
  }
}

void AppendToBlock(CpuIsa isa, const AttentionBatch& batch, const AppendTask& task, int head_begin,
                   int head_end) {
  const AttendItem& item = ItemAt(batch, task.plan_index);
  const KvBlockLayout layout = LayoutOf(batch, item);
  const int64_t block = batch.plan->block_begin[task.plan_index] + task.first_key / kBlockTokens;
  const int64_t row =
      batch.plan->new_key_begin[task.plan_index] + task.first_key - item.cached_keys;
  HeadRows rows{.slot = task.first_key % kBlockTokens,
                .keys = task.keys,
                .k_stride = int64_t{layout.geometry.kv_heads} * layout.geometry.head_dim,
                .v_stride = int64_t{layout.geometry.kv_heads} * layout.geometry.v_head_dim};
  for (rows.kv_head = head_begin; rows.kv_head < head_end; ++rows.kv_head) {
    rows.k = batch.k + row * rows.k_stride + rows.kv_head * layout.geometry.head_dim;
    rows.v = batch.v + row * rows.v_stride + rows.kv_head * layout.geometry.v_head_dim;
    AppendHead(isa, layout, rows, batch.kv_memory + batch.plan->block_address[block]);
  }
}

// Multiply-adds per head element, the measure for dividing work.
int64_t Cost(const AttentionTile& tile) { return tile.rows() * (tile.keys.end - tile.keys.begin); }

// Query rows of a tile of an item: near the wanted height, of equal heights, whole register tiles.
int64_t TileQueryRows(int64_t query_rows, int64_t group, int64_t wanted_rows) {
  const int64_t limit = std::max<int64_t>(1, wanted_rows / group);
  const int64_t tiles = (query_rows + limit - 1) / limit;
  const int64_t even = (query_rows + tiles - 1) / tiles;
  const int64_t step = 6 / std::gcd<int64_t>(6, group);  // register tiles have 6 rows
  const int64_t whole = (even + step - 1) / step * step;
  return whole <= limit ? whole : even;
}

// Products of bf16 pairs: by the layer's choice, where the blocks hold what is bf16 exactly.
bool UsesDot(CpuIsa isa, const AttentionBatch& batch) {
  const DType kv_dtype = batch.plan->kv_dtype;
  return batch.compute == DType::kBF16 && isa == CpuIsa::kAvx512 &&
         (kv_dtype == DType::kBF16 || kv_dtype == DType::kI8);
}

// Whether the only tile of a head appends the item's keys: all are new, few enough for one segment
// and for one task beside those of the rows.
bool BringsKeys(const AttendItem& item, int64_t tile_rows) {
  return tile_rows >= item.rows && item.cached_keys == 0 && item.keys() <= kSegmentKeys &&
         item.keys() <= 2 * item.rows;
}

void CutIntoTiles(const AttentionBatch& batch, bool dot, int workers,
                  std::vector<AttentionTile>& tiles) {
  const BatchPlan& plan = *batch.plan;
  const AttentionSpec& spec = *plan.spec;
  const int64_t wanted_rows = std::clamp(
      plan.query_rows * spec.q_heads / (kTilesPerWorker * workers), kMinTileRows, kMaxTileRows);
  tiles.clear();
  for (int p = 0; p < plan.items(); ++p) {
    const AttendItem& item = ItemAt(batch, p);
    if (item.rows == 0) continue;
    AttentionTile tile;
    tile.spec = &spec;
    tile.item = &item;
    tile.plan_index = p;
    tile.layout = LayoutOf(batch, item);
    tile.kv_memory = batch.kv_memory;
    tile.dot = dot;
    tile.blocks = plan.block_address.data() + plan.block_begin[p];
    tile.q = batch.q + plan.row_begin[p] * spec.q_heads * spec.head_dim;
    tile.output = batch.output + plan.row_begin[p];
    const int64_t step = TileQueryRows(item.rows, spec.group_size(), wanted_rows);
    tile.brings_keys = BringsKeys(item, step);
    for (tile.row_begin = 0; tile.row_begin < item.rows; tile.row_begin += step) {
      tile.query_rows = std::min(step, item.rows - tile.row_begin);
      tile.keys = VisibleToAny(spec, item, tile.row_begin, tile.query_rows);
      for (tile.kv_head = 0; tile.kv_head < spec.kv_heads; ++tile.kv_head) tiles.push_back(tile);
    }
  }
  // Dear tiles first: the workers then finish together. Equally dear ones stay as they were cut.
  const auto before = [](const AttentionTile& a, const AttentionTile& b) {
    return std::tuple(-Cost(a), a.plan_index, a.row_begin, a.kv_head) <
           std::tuple(-Cost(b), b.plan_index, b.row_begin, b.kv_head);
  };
  if (!std::is_sorted(tiles.begin(), tiles.end(), before)) {
    std::sort(tiles.begin(), tiles.end(), before);
  }
}

// The worker that projected a head's columns (Projector::CutTasks).
int64_t WorkerOf(int kv_head, int kv_heads, int workers) {
  return int64_t{kv_head} * workers / kv_heads;
}

// Orders whole tiles by the workers they are for.
void DealOut(int workers, AttentionWorkspace& workspace) {
  const auto worker_of = [&](const TileTask& task) {
    const AttentionTile& tile = workspace.tiles[task.tile];
    return WorkerOf(tile.kv_head, tile.spec->kv_heads, workers);
  };
  workspace.undealt.swap(workspace.tasks);
  workspace.tasks.resize(workspace.undealt.size());
  // ends[w] is where the next task of worker w goes: in the end, after its last one.
  workspace.ends.assign(static_cast<size_t>(workers), 0);
  for (const TileTask& task : workspace.undealt) {
    if (const int64_t next = worker_of(task) + 1; next < workers) ++workspace.ends[next];
  }
  std::partial_sum(workspace.ends.begin(), workspace.ends.end(), workspace.ends.begin());
  for (const TileTask& task : workspace.undealt)
    workspace.tasks[workspace.ends[worker_of(task)]++] = task;
}

// How many tiles from `first` on, which differ in their key heads, are attended in turn.
int64_t TilesInTurn(int workers, const AttentionWorkspace& workspace, int64_t first) {
  const AttentionTile& tile = workspace.tiles[first];
  if (tile.rows() > kRowsOfReading || tile.brings_keys) return 1;
  const int heads = tile.spec->kv_heads;
  const int64_t head_bytes = tile.layout.KeyBytes() + tile.layout.ValueBytes();
  int64_t most = std::min<int64_t>(kMostHeadsInTurn, (kPieceBytes + head_bytes - 1) / head_bytes);
  const auto tiles = static_cast<int64_t>(workspace.tiles.size());
  most = std::min(most, tiles / (kTilesPerWorker * workers));
  int64_t count = 1;
  for (; count < most && first + count < tiles; ++count) {
    const AttentionTile& next = workspace.tiles[first + count];
    if (next.item != tile.item || next.row_begin != tile.row_begin ||
        next.kv_head != tile.kv_head + count ||
        WorkerOf(next.kv_head, heads, workers) != WorkerOf(tile.kv_head, heads, workers)) {
      break;
    }
  }
  return count;
}

void MakeTasks(int workers, AttentionWorkspace& workspace) {
  int64_t total = 0;
  for (const AttentionTile& tile : workspace.tiles) total += Cost(tile);
  workspace.tasks.clear();
  workspace.states.clear();
  workspace.split_tiles = workspace.state_floats = 0;
  for (int64_t t = 0, count = 1; t < static_cast<int64_t>(workspace.tiles.size()); t += count) {
    const AttentionTile& tile = workspace.tiles[t];
    count = 1;
    const bool split = workers > 1 && t == workspace.split_tiles && tile.segments() > 1 &&
                       tile.rows() <= kMaxSplitRows &&
                       Cost(tile) * kTilesPerWorker * workers > total;
    if (!split) {
      count = TilesInTurn(workers, workspace, t);
      workspace.tasks.push_back({t, count, -1, 0});
      continue;
    }
    ++workspace.split_tiles;
    workspace.states.push_back(workspace.state_floats);
    for (int64_t s = 0; s < tile.segments(); ++s) {
      workspace.tasks.push_back({t, 1, s, workspace.state_floats});
      workspace.state_floats += SoftmaxStateFloats(tile);
    }
  }
  if (workspace.split_tiles == 0) {
    DealOut(workers, workspace);
  } else {
    workspace.ends.assign(1, static_cast<int64_t>(workspace.tasks.size()));
  }
}

// Appends the keys that no tile brings.
void AppendKeys(CpuIsa isa, const AttentionBatch& batch, WorkerPool& pool,
                AttentionWorkspace& workspace) {
  workspace.brought.assign(static_cast<size_t>(batch.plan->items()), false);
  for (const AttentionTile& tile : workspace.tiles)
    workspace.brought[tile.plan_index] = tile.brings_keys;
  std::vector<AppendTask>& tasks = workspace.appends;
  tasks.clear();
  int64_t keys = 0;
  for (int p = 0; p < batch.plan->items(); ++p) {
    if (workspace.brought[p]) continue;
    ForAppends(batch, p, [&](const AppendTask& task) { tasks.push_back(task); });
    keys += ItemAt(batch, p).new_keys;
  }
  // Heads apart where blocks alone would not keep all workers busy to the end.
  const int heads = batch.plan->spec->kv_heads;
  const auto blocks = static_cast<int64_t>(tasks.size());
  const bool apart =
      blocks < kAppendsPerWorker * pool.workers() && keys > blocks * kAppendsPerWorker;
  if (!apart) {
    pool.ParallelFor(blocks,
                     [&](int64_t task, int) { AppendToBlock(isa, batch, tasks[task], 0, heads); });
    return;
  }
  std::vector<int64_t>& ends = workspace.append_ends;
  ends.assign(static_cast<size_t>(pool.workers()), 0);
  for (int head = 0; head < heads; ++head) ends[WorkerOf(head, heads, pool.workers())] += blocks;
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  pool.ParallelFor(ends, [&](int64_t task, int) {
    const int head = static_cast<int>(task / blocks);
    AppendToBlock(isa, batch, tasks[task % blocks], head, head + 1);
  });
}

// For the highest tiles on every worker, whoever will have them.
void ReserveScratch(int workers, AttentionWorkspace& workspace) {
  if (workspace.tiles.empty()) return;
  const AttentionTile& highest = *std::max_element(
      workspace.tiles.begin(), workspace.tiles.end(),
      [](const AttentionTile& a, const AttentionTile& b) { return a.rows() < b.rows(); });
  workspace.scratch.resize(static_cast<size_t>(workers));
  int64_t most = 1;
  for (const TileTask& task : workspace.tasks) most = std::max(most, task.tiles);
  for (ScratchMemory& scratch : workspace.scratch)
    scratch.Reserve(most * TileScratchBytes(highest));
  workspace.state_memory.Reserve(workspace.state_floats * int64_t{sizeof(float)});
}

}  // namespace

void AppendAndAttend(CpuIsa isa, const AttentionBatch& batch, WorkerPool& pool,
                     AttentionWorkspace& workspace) {
  const TileFunctions& functions = TileFunctionsFor(isa);
  CutIntoTiles(batch, UsesDot(isa, batch), pool.workers(), workspace.tiles);
  AppendKeys(isa, batch, pool, workspace);
  MakeTasks(pool.workers(), workspace);
  ReserveScratch(pool.workers(), workspace);
  auto* states = reinterpret_cast<float*>(workspace.state_memory.data());
  pool.ParallelFor(workspace.ends, [&](int64_t index, int worker) {
    std::byte* scratch = workspace.scratch[worker].data();
    const TileTask& task = workspace.tasks[index];
    const AttentionTile& tile = workspace.tiles[task.tile];
    if (tile.brings_keys) {
      ForAppends(batch, tile.plan_index, [&](const AppendTask& keys) {
        AppendToBlock(isa, batch, keys, tile.kv_head, tile.kv_head + 1);
      });
    }
    if (task.segment < 0) {
      functions.attend(std::span(&tile, static_cast<size_t>(task.tiles)), scratch);
    } else {
      functions.attend_segment(tile, scratch, tile.first_segment() + task.segment,
                               SoftmaxStateAt(tile, states + task.state));
    }
  });
  pool.ParallelFor(workspace.split_tiles, [&](int64_t index, int worker) {
    functions.finish(workspace.tiles[index], workspace.scratch[worker].data(),
                     states + workspace.states[index]);
  });
}

}  // namespace attend
