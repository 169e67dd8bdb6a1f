// SPDX-License-Identifier: Apache-2.0
//
// One batch as the device sees it: where everything lies in the batch's slab of device memory, and
// the filling of the part that the host uploads and the reading of the part that it gets back. Only
// integers and bytes are decided here; batch_stages.cc queues the work.
//
//   slab: [ shape, items, tiles, tasks, addresses, slopes, sinks, rows as given, bias ] uploaded
//         [ x, projected, q, attended, output, statistics, partials ]              device only
//         [ output rows in the items' types | attention weights ]                  downloaded
//
// Host memory mirrors the first and the last part. A layout can be made from counts rounded up to
// powers of two: batches of similar size then share it, and with it a captured graph.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/attention_plan.h"
#include "engine/cuda/kernels.h"

namespace attend {

// What lies `offset` bytes behind `base`, e.g. a part of a slab.
template <class T>
T* At(std::byte* base, int64_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

// A batch of one (layer, spec) and how it is computed.
struct BatchWork {
  const BatchPlan* plan = nullptr;
  std::span<const AttendItem> items;
  DType compute = DType::kF32;  // of x and, for layers, of the attended rows; raw: F32
  DType q_dtype = DType::kF32;  // F32, or the KV dtype: tensor cores
  int64_t x_width = 0;          // columns of x (padded d_model); 0 = raw
  int64_t context_width = 0;    // columns of the context matrix (padded); 0 = keys are rows of x
  int64_t projected_width = 0;  // columns of projected: q (k, v too when of one matrix); raw: q
  int64_t kv_width = 0;         // columns of projected_kv; 0 = in projected
  int64_t attended_width = 0;   // columns of the output product's x, padded
  int64_t output_width = 0;     // columns of output, padded; raw: 0, attended is the output

  const AttentionSpec& spec() const { return *plan->spec; }
  const AttendItem& item(int place) const { return items[plan->order[place]]; }
  bool raw() const { return x_width == 0; }
  bool tensor() const { return q_dtype != DType::kF32; }
};

// How many there are of everything whose number varies.
struct BatchCounts {
  int64_t items = 0;
  int64_t blocks = 0;
  int64_t prefill_tiles = 0;
  int64_t decode_tiles = 0;
  int64_t combines = 0;
  int64_t partial_rows = 0;
  int64_t input_tasks = 0;
  int64_t output_tasks = 0;
  int64_t weights_tasks = 0;
  int64_t query_rows = 0;
  int64_t key_rows = 0;
  int64_t x_rows = 0;        // BatchPlan::input_rows
  int64_t given_bytes = 0;   // rows as given and bias
  int64_t result_bytes = 0;  // output rows and attention weights

  friend auto operator<=>(const BatchCounts&, const BatchCounts&) = default;
};

// Byte offsets in the slab, multiples of 256.
struct BatchLayout {
  BatchCounts counts;  // room
  int64_t shape = 0, items = 0, prefill_tiles = 0, decode_tiles = 0, combines = 0;
  int64_t input_tasks = 0, output_tasks = 0, weights_tasks = 0, blocks = 0;
  int64_t slopes = 0, sinks = 0;  // AttentionSpec's, [q_heads] each
  int64_t given = 0;
  int64_t upload_bytes = 0;  // [0, upload_bytes) comes from the host
  int64_t x = 0, context = 0, projected = 0, projected_kv = 0, raw_k = 0, raw_v = 0;
  int64_t q = 0, attended = 0, attended_padded = 0, output = 0;
  int64_t statistics = 0, partial_output = 0, partial_statistics = 0;
  int64_t results = 0;  // [results, bytes) goes to the host
  int64_t bytes = 0;
};

// Everything of one batch that is uploaded, on the host.
class DeviceBatch {
 public:
  // Cuts the items into tiles and tasks. Borrows `work` until the batch has ended.
  explicit DeviceBatch(const BatchWork& work);

  const BatchWork& work() const { return work_; }
  const BatchCounts& counts() const { return counts_; }
  // A decode step: one row and one new key per item of a layer, nothing unusual.
  bool is_step() const { return is_step_; }

  // Counts rounded up to powers of two: what a step's layout has room for.
  BatchCounts RoundedCounts() const;

  // The layout for these counts, or for `room` >= counts.
  BatchLayout Place(const BatchCounts& room) const;

  // Writes [0, layout.upload_bytes) of the slab to `host`; the slab will lie at `device`.
  void Fill(const BatchLayout& layout, std::byte* host, std::byte* device) const;

  // Copies the results at `host` (a mirror of the slab from layout.results on) to the items.
  void Collect(const std::byte* host) const;

 private:
  // A run of rows of one item that is staged: `rows` rows of `width` elements, at a stride of
  // padded rows.
  struct Given {
    const InputRows* rows;
    int64_t count;
    int64_t width;
    int64_t stride;  // elements, padding zeros
    int64_t offset;  // bytes from layout.given
    enum class To : uint8_t { kX, kContext, kQ, kK, kV } to;
    int64_t to_row;
  };
  struct Result {
    int place;       // of the item
    int64_t offset;  // bytes from layout.results: its output rows
    int64_t weights_offset;
  };

  void AddGiven(const InputRows& rows, int64_t count, int64_t width, int64_t stride, Given::To to,
                int64_t to_row);
  void AddItem(int place);
  void AddTiles(int place);
  void AddResult(int place);
  void FillItems(const BatchLayout& layout, std::byte* host, std::byte* device) const;
  void FillInputTasks(const BatchLayout& layout, std::byte* host, std::byte* device) const;
  void FillOutputTasks(const BatchLayout& layout, std::byte* host, std::byte* device) const;

  const BatchWork work_;
  BatchCounts counts_;
  bool is_step_ = false;
  std::vector<AttentionTile> prefill_tiles_;
  std::vector<AttentionTile> decode_tiles_;
  std::vector<CombineTile> combines_;
  std::vector<Given> given_;
  std::vector<int64_t> bias_offset_;  // [items] bytes from layout.given; -1 = none
  std::vector<Result> results_;
};

}  // namespace attend
