// SPDX-License-Identifier: Apache-2.0
//
// What the cores can do at best at this moment: the figures that the engine's rates are compared
// with. Measured on the same cores and in the same run, all cores at once, before and after every
// case. Knows no engine and no case.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/cpu/mapped_memory.h"
#include "engine/util/dtype.h"

namespace attend::bench {

// Per second, all cores together; 0 = not measured, or this processor has no such unit.
struct Limits {
  double fma = 0;         // fp32 multiply-adds, operations
  double dot = 0;         // bf16 dot products, operations
  double int8 = 0;        // int8 dot products, operations
  double read = 0;        // bytes from memory, or from the cache that holds as many
  double cache_read = 0;  // bytes from each core's second-level cache

  // Operations on operands of a type; 0 for one that has no limit here.
  double Operations(DType dtype) const;
};

// The mean of each; 0 where one is.
Limits Mean(const Limits& before, const Limits& after);
// Larger over smaller; 1 where one is 0.
double Moved(double before, double after);

struct LimitsWanted {
  bool dot = true;
  bool int8 = true;
  bool cache_read = false;
  int64_t read_bytes = 0;  // 0 = no read; fma is always measured
};

class LimitProbe {
 public:
  // `cores` as of sched_setaffinity, one thread on each. `wide` allows AVX-512.
  LimitProbe(std::vector<int> cores, bool wide);

  // Memory for reads of up to `bytes`, all of it resident. RESOURCE_EXHAUSTED where there is none.
  absl::Status ReserveRead(int64_t bytes);

  // In 0.05 to 0.3 seconds. A read of more than what is reserved reads that.
  Limits Measure(const LimitsWanted& wanted);

  // fp32 multiply-adds of a core and cycle: 64 for two 512-bit units, x 2 operations. To judge the
  // probe itself.
  double OperationsPerCycle();

 private:
  double MeasureRead(int64_t bytes);

  const std::vector<int> cores_;
  const bool wide_;
  MappedMemory memory_;
  int64_t reserved_ = 0;
};

// The first `count` cores that this process may run on; all when there are not so many.
std::vector<int> AllowedCores(int count);
// From now on this process and the threads it makes run on these only.
void RunOnCores(const std::vector<int>& cores);

}  // namespace attend::bench
