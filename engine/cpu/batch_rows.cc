// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/batch_rows.h"

#include <algorithm>

#include "engine/cpu/row_convert.h"

namespace attend {
namespace {

// 32 rows of 768 floats take about 5 us to convert: above the cost of handing out a task.
constexpr int64_t kElementsPerTask = 32 * 768;

// The place in plan order of the item that row `row` belongs to.
size_t ItemOfRow(std::span<const int64_t> begins, int64_t row) {
  return static_cast<size_t>(std::upper_bound(begins.begin(), begins.end(), row) - begins.begin()) -
         1;
}

// Calls run(place, row, count) for maximal runs of rows of one item, rows [first, begins.back()) in
// all, cut into tasks.
template <typename Run>
void ForRuns(WorkerPool& pool, std::span<const int64_t> begins, int64_t first, int64_t width,
             const Run& run) {
  const int64_t rows_per_task = std::max<int64_t>(1, kElementsPerTask / width);
  const int64_t rows = begins.back() - first;
  pool.ParallelFor((rows + rows_per_task - 1) / rows_per_task, [&](int64_t task, int) {
    int64_t row = first + task * rows_per_task;
    const int64_t end = std::min(row + rows_per_task, begins.back());
    for (size_t place = ItemOfRow(begins, row); row < end; ++place) {
      const int64_t count = std::min(end, begins[place + 1]) - row;
      if (count > 0) run(place, row, count);
      row += count;
    }
  });
}

}  // namespace

// Rows that have the dtype already are left out unless `also_equal`.
void BatchRows::Read(std::span<const int64_t> begins, int64_t first, InputRows AttendItem::*source,
                     int64_t width, DType dtype, bool also_equal, std::byte* to) const {
  ForRuns(pool_, begins, first, width, [&](size_t place, int64_t row, int64_t count) {
    const InputRows& rows = items_[plan_.order[place]].*source;
    if (rows.dtype == dtype && !also_equal) return;
    const auto* from = static_cast<const std::byte*>(rows.data) +
                       (row - begins[place]) * width * DTypeBytes(rows.dtype);
    ConvertElements(isa_, rows.dtype, from, dtype, to + (row - first) * width * DTypeBytes(dtype),
                    count * width);
  });
}

void BatchRows::PointTo(std::span<const int64_t> begins, int64_t first,
                        InputRows AttendItem::*source, int64_t width, DType dtype,
                        std::byte* converted, const void** rows) const {
  const int64_t row_bytes = width * DTypeBytes(dtype);
  bool convert = false;
  for (size_t place = 0; place + 1 < begins.size(); ++place) {
    const InputRows& from = items_[plan_.order[place]].*source;
    const bool usable = from.dtype == dtype;
    for (int64_t row = std::max(begins[place], first); row < begins[place + 1]; ++row) {
      const auto* there =
          static_cast<const std::byte*>(from.data) + (row - begins[place]) * row_bytes;
      rows[row - first] = usable ? there : converted + (row - first) * row_bytes;
      convert = convert || !usable;
    }
  }
  if (convert) Read(begins, first, source, width, dtype, false, converted);
}

void BatchRows::PointToQueries(InputRows AttendItem::*source, int64_t width, DType dtype,
                               std::byte* converted, const void** rows) const {
  PointTo(plan_.row_begin, 0, source, width, dtype, converted, rows);
}

void BatchRows::PointToKeys(int64_t first, InputRows AttendItem::*source, int64_t width,
                            DType dtype, std::byte* converted, const void** rows) const {
  PointTo(plan_.new_key_begin, first, source, width, dtype, converted, rows);
}

void BatchRows::PointToOutputs(int64_t width, OutputRow* rows) const {
  for (size_t place = 0; place < plan_.order.size(); ++place) {
    const AttendItem& item = items_[plan_.order[place]];
    const int64_t begin = plan_.row_begin[place];
    for (int64_t row = begin; row < plan_.row_begin[place + 1]; ++row) {
      rows[row] = {static_cast<std::byte*>(item.output) +
                       (row - begin) * width * DTypeBytes(item.output_dtype),
                   item.output_dtype};
    }
  }
}

void BatchRows::ReadQueries(InputRows AttendItem::*source, int64_t width, float* to) const {
  Read(plan_.row_begin, 0, source, width, DType::kF32, true, reinterpret_cast<std::byte*>(to));
}

void BatchRows::ReadKeys(InputRows AttendItem::*source, int64_t width, float* to) const {
  Read(plan_.new_key_begin, 0, source, width, DType::kF32, true, reinterpret_cast<std::byte*>(to));
}

int64_t BatchRows::QueryPosition(int64_t row) const {
  const size_t place = ItemOfRow(plan_.row_begin, row);
  return items_[plan_.order[place]].first_row + row - plan_.row_begin[place];
}

int64_t BatchRows::KeyPosition(int64_t key) const {
  const size_t place = ItemOfRow(plan_.new_key_begin, key);
  return items_[plan_.order[place]].cached_keys + key - plan_.new_key_begin[place];
}

}  // namespace attend
