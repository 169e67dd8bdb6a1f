// SPDX-License-Identifier: Apache-2.0
//
// Resident memory of this process, now and at its peak, from /proc/self. Knows no case.
#pragma once

#include <cstdint>

namespace attend::bench {

// 0 where the system doesn't tell.
int64_t ResidentBytes();
// Since the last ForgetPeak.
int64_t PeakResidentBytes();
void ForgetPeak();
// What freed objects left in the allocator goes back to the system, and large ones will at once:
// else the next case would find it there, and its peak would not grow.
void ReturnFreedMemory();

}  // namespace attend::bench
