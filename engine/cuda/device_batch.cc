// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/device_batch.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "engine/cuda/padding.h"

namespace attend {
namespace {

constexpr int64_t kAlignment = 256;  // what cudaMalloc gives
// Elements of one convert task: a few microseconds of one thread block.
constexpr int64_t kTaskElements = 16384;

int64_t AlignUp(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t RowsHeight(const BatchWork& work) {
  const AttentionSpec& spec = work.spec();
  return work.tensor() ? TensorTileRows(std::max(spec.head_dim, spec.v_head_dim)) : kFloatTileRows;
}

template <class T>
void CopyVector(const std::vector<T>& from, std::byte* host, int64_t offset) {
  if (!from.empty()) std::memcpy(host + offset, from.data(), from.size() * sizeof(T));
}

int64_t Tasks(int64_t elements) { return DivideUp(elements, kTaskElements); }

// Appends the tasks that convert `elements` in a row.
ConvertTask* WriteTasks(const std::byte* from, DType from_dtype, std::byte* to, DType to_dtype,
                        int64_t elements, ConvertTask* task) {
  for (int64_t first = 0; first < elements; first += kTaskElements) {
    *task++ = {from + first * DTypeBytes(from_dtype), to + first * DTypeBytes(to_dtype),
               std::min(kTaskElements, elements - first), from_dtype, to_dtype};
  }
  return task;
}

}  // namespace

DeviceBatch::DeviceBatch(const BatchWork& work) : work_(work) {
  const BatchPlan& plan = *work_.plan;
  counts_.items = plan.items();
  counts_.blocks = static_cast<int64_t>(plan.block_address.size());
  counts_.query_rows = plan.query_rows;
  counts_.key_rows = plan.key_rows;
  counts_.x_rows = plan.input_rows;
  bias_offset_.assign(static_cast<size_t>(plan.items()), -1);
  is_step_ = !work_.raw() && work_.context_width == 0 && plan.items() > 0;
  for (int place = 0; place < plan.items(); ++place) {
    const AttendItem& item = work_.item(place);
    is_step_ = is_step_ && item.rows == 1 && item.new_keys == 1 && item.bias.data == nullptr &&
               item.weights.data == nullptr;
    AddItem(place);
    AddTiles(place);
    AddResult(place);
  }
  // Dear tiles first: the last ones to run are then short.
  const auto dearer = [](const AttentionTile& a, const AttentionTile& b) {
    return a.key_end - a.key_begin > b.key_end - b.key_begin;
  };
  std::stable_sort(prefill_tiles_.begin(), prefill_tiles_.end(), dearer);
  std::stable_sort(decode_tiles_.begin(), decode_tiles_.end(), dearer);
  counts_.prefill_tiles = static_cast<int64_t>(prefill_tiles_.size());
  counts_.decode_tiles = static_cast<int64_t>(decode_tiles_.size());
  counts_.combines = static_cast<int64_t>(combines_.size());
}

void DeviceBatch::AddGiven(const InputRows& rows, int64_t count, int64_t width, int64_t stride,
                           Given::To to, int64_t to_row) {
  if (count == 0) return;
  given_.push_back({&rows, count, width, stride, counts_.given_bytes, to, to_row});
  counts_.given_bytes += AlignUp(count * stride * DTypeBytes(rows.dtype));
  counts_.input_tasks += Tasks(count * stride);
}

void DeviceBatch::AddItem(int place) {
  const BatchPlan& plan = *work_.plan;
  const AttentionSpec& spec = work_.spec();
  const AttendItem& item = work_.item(place);
  const int64_t key_begin = plan.new_key_begin[place];
  if (work_.raw()) {
    const int64_t q = int64_t{spec.q_heads} * spec.head_dim;
    const int64_t k = int64_t{spec.kv_heads} * spec.head_dim;
    const int64_t v = int64_t{spec.kv_heads} * spec.v_head_dim;
    AddGiven(item.query, item.rows, q, PaddedWidth(q), Given::To::kQ, plan.row_begin[place]);
    AddGiven(item.key_source, item.new_keys, k, PaddedWidth(k), Given::To::kK, key_begin);
    AddGiven(item.value_source, item.new_keys, v, PaddedWidth(v), Given::To::kV, key_begin);
  } else {
    AddGiven(item.query, item.rows, spec.d_model, work_.x_width, Given::To::kX,
             plan.row_begin[place]);
    if (spec.cross) {
      AddGiven(item.key_source, item.new_keys, spec.context_width, work_.context_width,
               Given::To::kContext, key_begin);
    } else if (!item.shares_rows()) {
      AddGiven(item.key_source, item.new_keys, spec.d_model, work_.x_width, Given::To::kX,
               plan.key_row_offset + key_begin);
    }
  }
  if (item.bias.data != nullptr && item.rows > 0) {
    const int64_t heads = item.bias.head_stride != 0 ? spec.q_heads : 1;
    bias_offset_[static_cast<size_t>(place)] = counts_.given_bytes;
    counts_.given_bytes += AlignUp(heads * item.rows * item.bias.columns * 4);
  }
}

void DeviceBatch::AddTiles(int place) {
  const AttentionSpec& spec = work_.spec();
  const AttendItem& item = work_.item(place);
  const int64_t group = spec.group_size();
  const int64_t packed = item.rows * group;
  if (packed == 0) return;
  const bool few = item.call_rows() * group <= kDecodeRows;
  const int64_t height = few ? kDecodeRows : RowsHeight(work_);
  std::vector<AttentionTile>& tiles = few && work_.tensor() ? decode_tiles_ : prefill_tiles_;
  for (int64_t row = 0; row < packed; row += height) {
    AttentionTile tile{};
    tile.item = place;
    tile.row_begin = row;
    tile.rows = static_cast<int32_t>(std::min(height, packed - row));
    tile.partial = -1;
    tile.few = few ? 1 : 0;
    const KeyRange keys =
        VisibleToAny(spec, item, row / group, (row + tile.rows - 1) / group + 1 - row / group);
    tile.key_begin = keys.begin / kBlockTokens * kBlockTokens;
    tile.key_end = keys.end;
    const int64_t first_split = keys.begin / kSplitKeys;
    const int64_t splits =
        keys.end > keys.begin ? (keys.end - 1) / kSplitKeys + 1 - first_split : 1;
    for (tile.kv_head = 0; tile.kv_head < spec.kv_heads; ++tile.kv_head) {
      if (!few || splits == 1) {
        tiles.push_back(tile);
        continue;
      }
      combines_.push_back({row, counts_.partial_rows, place, tile.kv_head, tile.rows,
                           static_cast<int32_t>(splits)});
      for (int64_t split = first_split; split < first_split + splits; ++split) {
        AttentionTile part = tile;
        part.key_begin = std::max(tile.key_begin, split * kSplitKeys);
        part.key_end = std::min(tile.key_end, (split + 1) * kSplitKeys);
        part.partial = counts_.partial_rows;
        counts_.partial_rows += tile.rows;
        tiles.push_back(part);
      }
    }
  }
}

void DeviceBatch::AddResult(int place) {
  const AttentionSpec& spec = work_.spec();
  const AttendItem& item = work_.item(place);
  if (item.rows == 0) return;
  Result result{place, counts_.result_bytes, -1};
  const int64_t width = work_.raw() ? spec.output_width : work_.output_width;
  counts_.result_bytes += AlignUp(item.rows * width * DTypeBytes(item.output_dtype));
  counts_.output_tasks += Tasks(item.rows * width);
  const int64_t asked = item.weights.row_end - item.weights.row_begin;
  if (item.weights.data != nullptr && asked > 0 && item.keys() > 0) {
    result.weights_offset = counts_.result_bytes;
    counts_.result_bytes += AlignUp(item.weights.head_count * asked * item.keys() * 4);
    counts_.weights_tasks += item.weights.head_count * DivideUp(asked, kWeightsRows);
  }
  results_.push_back(result);
}

BatchCounts DeviceBatch::RoundedCounts() const {
  BatchCounts room = counts_;
  for (int64_t* count :
       {&room.items, &room.blocks, &room.prefill_tiles, &room.decode_tiles, &room.combines,
        &room.partial_rows, &room.input_tasks, &room.output_tasks, &room.query_rows, &room.key_rows,
        &room.x_rows, &room.given_bytes, &room.result_bytes}) {
    if (*count > 0) *count = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(*count)));
  }
  return room;
}

BatchLayout DeviceBatch::Place(const BatchCounts& room) const {
  const AttentionSpec& spec = work_.spec();
  BatchLayout layout;
  layout.counts = room;
  int64_t end = 0;
  const auto take = [&end](int64_t& offset, int64_t count, int64_t bytes) {
    offset = end;
    end = AlignUp(end + count * bytes);
  };
  take(layout.shape, 1, sizeof(BatchShape));
  take(layout.items, room.items, sizeof(ItemShape));
  take(layout.prefill_tiles, room.prefill_tiles, sizeof(AttentionTile));
  take(layout.decode_tiles, room.decode_tiles, sizeof(AttentionTile));
  take(layout.combines, room.combines, sizeof(CombineTile));
  take(layout.input_tasks, room.input_tasks, sizeof(ConvertTask));
  take(layout.output_tasks, room.output_tasks, sizeof(ConvertTask));
  take(layout.weights_tasks, room.weights_tasks, sizeof(WeightsTask));
  take(layout.blocks, room.blocks, sizeof(int64_t));
  take(layout.slopes, static_cast<int64_t>(spec.alibi_slopes.size()), sizeof(float));
  take(layout.sinks, static_cast<int64_t>(spec.sinks.size()), sizeof(float));
  take(layout.given, 1, room.given_bytes);
  layout.upload_bytes = end;

  // Products of part of the rows may run over into the next rows, so there is one more tile.
  const auto product_rows = [](int64_t rows) {
    return rows == 0 ? 0 : PaddedRows(rows) + kProductRows;
  };
  const int64_t compute_bytes = DTypeBytes(work_.compute);
  const int64_t kv_bytes = DTypeBytes(work_.plan->kv_dtype);
  const KvBlockShape shape{spec.kv_heads, spec.head_dim, spec.v_head_dim,
                           static_cast<int32_t>(kv_bytes)};
  if (work_.raw()) {
    take(layout.projected, room.query_rows, work_.projected_width * 4);
    take(layout.raw_k, room.key_rows, PaddedWidth(int64_t{spec.kv_heads} * spec.head_dim) * 4);
    take(layout.raw_v, room.key_rows, PaddedWidth(int64_t{spec.kv_heads} * spec.v_head_dim) * 4);
  } else {
    take(layout.x, product_rows(room.x_rows), work_.x_width * compute_bytes);
    take(layout.context, work_.context_width > 0 ? product_rows(room.key_rows) : 0,
         work_.context_width * compute_bytes);
    take(layout.projected, product_rows(room.x_rows), work_.projected_width * 4);
    take(layout.projected_kv, work_.kv_width > 0 ? product_rows(room.key_rows) : 0,
         work_.kv_width * 4);
  }
  const int64_t attended = int64_t{spec.q_heads} * spec.v_head_dim;
  take(layout.q, room.query_rows,
       int64_t{spec.q_heads} * shape.KeyRow() * DTypeBytes(work_.q_dtype));
  take(layout.attended, product_rows(room.query_rows), attended * compute_bytes);
  if (!work_.raw() && work_.attended_width != attended) {
    take(layout.attended_padded, product_rows(room.query_rows),
         work_.attended_width * compute_bytes);
  }
  take(layout.output, product_rows(room.query_rows), work_.output_width * 4);
  take(layout.statistics, room.query_rows * spec.q_heads, sizeof(RowStatistics));
  take(layout.partial_output, room.partial_rows, int64_t{spec.v_head_dim} * 4);
  take(layout.partial_statistics, room.partial_rows, sizeof(RowStatistics));
  take(layout.results, 1, room.result_bytes);
  layout.bytes = end;
  return layout;
}

void DeviceBatch::Fill(const BatchLayout& layout, std::byte* host, std::byte* device) const {
  const BatchPlan& plan = *work_.plan;
  *At<BatchShape>(host, layout.shape) = {
      static_cast<int32_t>(counts_.items),
      static_cast<int32_t>(counts_.prefill_tiles),
      static_cast<int32_t>(counts_.decode_tiles),
      static_cast<int32_t>(counts_.combines),
      plan.query_rows,
      plan.key_rows,
      work_.raw() || work_.context_width > 0 ? plan.query_rows : plan.key_row_offset};
  CopyVector(prefill_tiles_, host, layout.prefill_tiles);
  CopyVector(decode_tiles_, host, layout.decode_tiles);
  CopyVector(combines_, host, layout.combines);
  CopyVector(plan.block_address, host, layout.blocks);
  CopyVector(work_.spec().alibi_slopes, host, layout.slopes);
  CopyVector(work_.spec().sinks, host, layout.sinks);
  FillItems(layout, host, device);
  FillInputTasks(layout, host, device);
  FillOutputTasks(layout, host, device);
}

void DeviceBatch::FillItems(const BatchLayout& layout, std::byte* host, std::byte* device) const {
  const BatchPlan& plan = *work_.plan;
  auto* shapes = At<ItemShape>(host, layout.items);
  for (int place = 0; place < plan.items(); ++place) {
    const AttendItem& item = work_.item(place);
    ItemShape& shape = shapes[place];
    shape = {};
    shape.rows = item.rows;
    shape.first_row = item.first_row;
    shape.keys = item.keys();
    shape.cached_keys = item.cached_keys;
    shape.row_begin = plan.row_begin[place];
    shape.new_key_begin = plan.new_key_begin[place];
    shape.block_begin = plan.block_begin[place];
    shape.block_tokens = item.block_tokens;
    shape.causal = item.causal ? 1 : 0;
    const int64_t offset = bias_offset_[static_cast<size_t>(place)];
    if (offset < 0) continue;
    const int64_t heads = item.bias.head_stride != 0 ? work_.spec().q_heads : 1;
    shape.bias = At<const float>(device, layout.given + offset);
    shape.bias_columns = item.bias.columns;
    shape.bias_first_key = item.bias.first_key;
    shape.bias_row_stride = item.bias.columns;
    shape.bias_head_stride = heads > 1 ? item.rows * item.bias.columns : 0;
    auto* to = At<float>(host, layout.given + offset);
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t row = 0; row < item.rows; ++row, to += item.bias.columns) {
        std::memcpy(to, item.bias.data + head * item.bias.head_stride + row * item.bias.row_stride,
                    static_cast<size_t>(item.bias.columns * 4));
      }
    }
  }
}

void DeviceBatch::FillInputTasks(const BatchLayout& layout, std::byte* host,
                                 std::byte* device) const {
  auto* task = At<ConvertTask>(host, layout.input_tasks);
  ConvertTask* const end = task + layout.counts.input_tasks;
  for (const Given& given : given_) {
    const int64_t size = DTypeBytes(given.rows->dtype);
    const auto* from = static_cast<const std::byte*>(given.rows->data);
    std::byte* staged = host + layout.given + given.offset;
    if (given.width == given.stride) {
      std::memcpy(staged, from, static_cast<size_t>(given.count * given.width * size));
    } else {
      for (int64_t row = 0; row < given.count; ++row) {
        std::byte* to = staged + row * given.stride * size;
        std::memcpy(to, from + row * given.width * size, static_cast<size_t>(given.width * size));
        std::memset(to + given.width * size, 0,
                    static_cast<size_t>((given.stride - given.width) * size));
      }
    }
    const DType to_dtype = work_.raw() ? DType::kF32 : work_.compute;
    int64_t base = 0;
    switch (given.to) {
      case Given::To::kX:
        base = layout.x;
        break;
      case Given::To::kContext:
        base = layout.context;
        break;
      case Given::To::kQ:
        base = layout.projected;
        break;
      case Given::To::kK:
        base = layout.raw_k;
        break;
      case Given::To::kV:
        base = layout.raw_v;
        break;
    }
    task = WriteTasks(device + layout.given + given.offset, given.rows->dtype,
                      device + base + given.to_row * given.stride * DTypeBytes(to_dtype), to_dtype,
                      given.count * given.stride, task);
  }
  std::fill(task, end, ConvertTask{});
}

void DeviceBatch::FillOutputTasks(const BatchLayout& layout, std::byte* host,
                                  std::byte* device) const {
  const BatchPlan& plan = *work_.plan;
  auto* task = At<ConvertTask>(host, layout.output_tasks);
  ConvertTask* const end = task + layout.counts.output_tasks;
  auto* weights = At<WeightsTask>(host, layout.weights_tasks);
  const int64_t width = work_.raw() ? work_.spec().output_width : work_.output_width;
  const int64_t from = work_.raw() ? layout.attended : layout.output;
  for (const Result& result : results_) {
    const AttendItem& item = work_.item(result.place);
    task = WriteTasks(device + from + plan.row_begin[result.place] * width * 4, DType::kF32,
                      device + layout.results + result.offset, item.output_dtype, item.rows * width,
                      task);
    if (result.weights_offset < 0) continue;
    const WeightsView& view = item.weights;
    const int64_t asked = view.row_end - view.row_begin;
    auto* out = At<float>(device, layout.results + result.weights_offset);
    for (int32_t head = 0; head < view.head_count; ++head) {
      for (int64_t row = 0; row < asked; row += kWeightsRows) {
        *weights++ = {out + (head * asked + row) * item.keys(),
                      view.row_begin + row,
                      item.keys(),
                      static_cast<int32_t>(std::min<int64_t>(kWeightsRows, asked - row)),
                      result.place,
                      view.heads[head],
                      0};
      }
    }
  }
  std::fill(task, end, ConvertTask{});
}

void DeviceBatch::Collect(const std::byte* host) const {
  for (const Result& result : results_) {
    const AttendItem& item = work_.item(result.place);
    const int64_t size = DTypeBytes(item.output_dtype);
    const int64_t width = work_.spec().output_width;
    const int64_t stride = work_.raw() ? width : work_.output_width;
    auto* to = static_cast<std::byte*>(item.output);
    const std::byte* from = host + result.offset;
    if (width == stride) {
      std::memcpy(to, from, static_cast<size_t>(item.rows * width * size));
    } else {
      for (int64_t row = 0; row < item.rows; ++row) {
        std::memcpy(to + row * width * size, from + row * stride * size,
                    static_cast<size_t>(width * size));
      }
    }
    if (result.weights_offset < 0) continue;
    const WeightsView& view = item.weights;
    const auto* rows = reinterpret_cast<const float*>(host + result.weights_offset);
    for (int32_t head = 0; head < view.head_count; ++head) {
      for (int64_t row = 0; row < view.row_end - view.row_begin; ++row, rows += item.keys()) {
        std::memcpy(view.data + head * view.head_stride + row * view.row_stride, rows,
                    static_cast<size_t>(item.keys() * 4));
      }
    }
  }
}

}  // namespace attend
