// SPDX-License-Identifier: Apache-2.0
//
// The rows of one batch between the caller's tensors and the engine's matrices: which item a row of
// the plan belongs to, its position, where it lies and where its output goes, and conversions on
// the pool where rows cannot be used as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/attention_plan.h"
#include "engine/cpu/attention_kernel.h"
#include "engine/cpu/gemm_kernel.h"
#include "engine/cpu/worker_pool.h"

namespace attend {

// Borrows everything; lives as long as one Start.
class BatchRows {
 public:
  BatchRows(const BatchPlan& plan, std::span<const AttendItem> items, CpuIsa isa, WorkerPool& pool)
      : plan_(plan), items_(items), isa_(isa), pool_(pool) {}

  const BatchPlan& plan() const { return plan_; }
  const AttentionSpec& spec() const { return *plan_.spec; }

  // rows[i] = the i-th query row of all items, in plan order, as [width] of `dtype`: where the
  // caller has it, or converted, in `converted` [query rows, width].
  void PointToQueries(InputRows AttendItem::*source, int64_t width, DType dtype,
                      std::byte* converted, const void** rows) const;

  // The same for new keys [first, key_rows) in plan order.
  void PointToKeys(int64_t first, InputRows AttendItem::*source, int64_t width, DType dtype,
                   std::byte* converted, const void** rows) const;

  // rows[i] = where the i-th query row's output goes, [width] of its item's dtype.
  void PointToOutputs(int64_t width, OutputRow* rows) const;

  // Converts the query rows of all items, in plan order, to `to` [query rows, width] of float.
  void ReadQueries(InputRows AttendItem::*source, int64_t width, float* to) const;

  // The same for all new keys.
  void ReadKeys(InputRows AttendItem::*source, int64_t width, float* to) const;

  // Absolute position of a query row and of a new key, by their places in plan order.
  int64_t QueryPosition(int64_t row) const;
  int64_t KeyPosition(int64_t key) const;

 private:
  void PointTo(std::span<const int64_t> begins, int64_t first, InputRows AttendItem::*source,
               int64_t width, DType dtype, std::byte* converted, const void** rows) const;
  void Read(std::span<const int64_t> begins, int64_t first, InputRows AttendItem::*source,
            int64_t width, DType dtype, bool also_equal, std::byte* to) const;

  const BatchPlan& plan_;
  std::span<const AttendItem> items_;
  CpuIsa isa_;
  WorkerPool& pool_;
};

}  // namespace attend
