// SPDX-License-Identifier: Apache-2.0
//
// Fibers: stacks that one OS thread switches between. The scheduler decides who runs; this file
// knows only how to change stacks, by hand on x86-64 and by ucontext elsewhere, and what the
// sanitizers must be told about it.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace attend::simt {

struct Fiber {
  void* stack_pointer = nullptr;  // while it doesn't run
  std::byte* stack = nullptr;     // lowest address; the fiber of the OS thread learns it later
  size_t stack_bytes = 0;
  void* address_fake_stack = nullptr;  // address sanitizer's
  void* thread_fiber = nullptr;        // thread sanitizer's
#if !defined(__x86_64__)
  ucontext_t context;
#endif
};

// `count` stacks, each with an unmapped page below; only touched pages take memory.
class FiberStacks {
 public:
  FiberStacks() = default;
  ~FiberStacks();
  FiberStacks(const FiberStacks&) = delete;
  FiberStacks& operator=(const FiberStacks&) = delete;

  // Makes room for `count` fibers; stacks that exist are kept.
  void Reserve(int count);
  // Sets `fiber` to start in `entry` on stack `index`. `entry` must not return.
  void Prepare(Fiber& fiber, int index, void (*entry)());

 private:
  void Release();

  std::byte* memory_ = nullptr;
  int count_ = 0;
};

// Runs `to` until something switches back to `from`; with `from_ended` nothing will.
void SwitchFiber(Fiber& from, Fiber& to, bool from_ended = false);
// The first thing a started fiber calls: `starter` switched to it.
void FiberStarted(Fiber& starter);

}  // namespace attend::simt
