// SPDX-License-Identifier: Apache-2.0
//
// Stacks, the switch between them, and the calls by which sanitizers follow it.
#include "tests/simt/fibers.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace attend::simt {
namespace {

constexpr size_t kGuardBytes = 4096;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kStackBytes = 508 * 1024;  // red zones around every local
#else
constexpr size_t kStackBytes = 124 * 1024;
#endif

}  // namespace

#if defined(__x86_64__)

// Saves the registers that a callee keeps (System V ABI) on the old stack, loads them from the new.
// Ends in a return: most switches lead to where the last one came from, as the processor's stack of
// return addresses then predicts (a jump instead was half as fast).
extern "C" void attend_simt_switch(void** save_stack_pointer, void* load_stack_pointer);
asm(R"(
.text
.p2align 4
.globl attend_simt_switch
.type attend_simt_switch, @function
attend_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size attend_simt_switch, .-attend_simt_switch
)");

#endif

FiberStacks::~FiberStacks() { Release(); }

void FiberStacks::Release() {
  if (memory_ == nullptr) return;
  const size_t bytes = count_ * (kGuardBytes + kStackBytes);
#if defined(__SANITIZE_ADDRESS__)
  // Red zones of locals outlive the mapping, and the addresses may be given out again.
  __asan_unpoison_memory_region(memory_, bytes);
#endif
  munmap(memory_, bytes);
  memory_ = nullptr;
}

void FiberStacks::Reserve(int count) {
  if (count <= count_) return;
  Release();
  void* memory = mmap(nullptr, count * (kGuardBytes + kStackBytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("simt: fiber stacks");
    std::abort();
  }
  memory_ = static_cast<std::byte*>(memory);
  count_ = count;
  for (int i = 0; i < count; ++i) {
    mprotect(memory_ + i * (kGuardBytes + kStackBytes), kGuardBytes, PROT_NONE);
  }
}

void FiberStacks::Prepare(Fiber& fiber, int index, void (*entry)()) {
  fiber.stack = memory_ + index * (kGuardBytes + kStackBytes) + kGuardBytes;
  fiber.stack_bytes = kStackBytes;
  fiber.address_fake_stack = nullptr;
#if defined(__SANITIZE_ADDRESS__)
  // An abandoned fiber leaves its locals' red zones behind.
  __asan_unpoison_memory_region(fiber.stack, fiber.stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
  if (fiber.thread_fiber == nullptr) fiber.thread_fiber = __tsan_create_fiber(0);
#endif
#if defined(__x86_64__)
  // Tops of stacks are staggered: at one distance they would share a few sets of the cache.
  std::byte* top = fiber.stack + kStackBytes - 64 * (index % 32 + 1);
  constexpr int kSavedRegisters = 6;
  void* frame[kSavedRegisters + 2] = {};  // registers, where to go on, no caller
  frame[kSavedRegisters] = reinterpret_cast<void*>(entry);
  std::memcpy(top - sizeof frame, frame, sizeof frame);
  fiber.stack_pointer = top - sizeof frame;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
#endif
}

void SwitchFiber(Fiber& from, Fiber& to, [[maybe_unused]] bool from_ended) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(from_ended ? nullptr : &from.address_fake_stack, to.stack,
                                 to.stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
  if (from.thread_fiber == nullptr) from.thread_fiber = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(to.thread_fiber, 0);
#endif
#if defined(__x86_64__)
  attend_simt_switch(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.address_fake_stack, nullptr, nullptr);
#endif
}

void FiberStarted([[maybe_unused]] Fiber& starter) {
#if defined(__SANITIZE_ADDRESS__)
  const void* stack = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
  if (starter.stack == nullptr) {  // the OS thread's
    starter.stack = static_cast<std::byte*>(const_cast<void*>(stack));
    starter.stack_bytes = bytes;
  }
#endif
}

}  // namespace attend::simt
