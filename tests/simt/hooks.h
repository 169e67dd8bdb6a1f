// SPDX-License-Identifier: Apache-2.0
//
// What simt.h's device functions call in the emulation: every access and every synchronisation of a
// running kernel, with its call site. Implemented beside it; no other file includes this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tests/simt/runtime.h"

namespace attend::simt {

// Where the running fiber is; null outside kernels.
struct Place {
  int thread;
  int threads;
  int block;
  int blocks;
};
// (initial-exec: the engine's plugin is a shared library, where the default access is a call.)
[[gnu::tls_model("initial-exec")]] extern constinit thread_local const Place* place;
[[noreturn]] void OutsideKernel();  // says so and aborts
inline const Place& Here() {
  if (place == nullptr) OutsideKernel();
  return *place;
}

// A named range of the block's shared memory.
struct SharedRange {
  uintptr_t begin;
  uintptr_t end;
  const char* name;
};

const SharedRange* RegisterSharedRange(const char* name, int offset_bytes, int64_t bytes,
                                       size_t alignment, Site site);
const SharedRange* FindSharedRange(uintptr_t address);
uint32_t SharedOffset(uintptr_t address);

// Each checks one access of the running thread; the caller moves the bytes afterwards. A violation
// doesn't return.
void SharedLoad(uintptr_t address, size_t bytes, size_t alignment, const SharedRange* range,
                Site site);
void SharedStore(uintptr_t address, size_t bytes, size_t alignment, const SharedRange* range,
                 Site site);
// `origin`: the pointer that `address` was computed from.
void GlobalLoad(uintptr_t address, size_t bytes, size_t alignment, uintptr_t origin, Site site);
void GlobalStore(uintptr_t address, size_t bytes, size_t alignment, uintptr_t origin, Site site);

void StartCopy(uintptr_t to, const SharedRange* range, uintptr_t from, uintptr_t origin, bool valid,
               Site site);
void CommitCopyGroup();
void WaitCopyGroups(int pending, Site site);

bool BlockBarrier(bool value, Site site);  // whether any thread's value is true
void NamedBarrier(int id, int threads, Site site);
void WarpBarrier(Site site);

float ShuffleXorLanes(float value, int lane_mask, Site site);
float ShuffleLanes(float value, int lane, Site site);
bool AnyLane(bool value, Site site);
void LoadMatrices(uint32_t* words, uintptr_t row, const SharedRange* range, bool transposed,
                  Site site);
enum class MatrixType { kBf16, kF16 };
void MatrixProduct(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, MatrixType type,
                   Site site);

}  // namespace attend::simt
