// SPDX-License-Identifier: Apache-2.0
//
// Device memory: which ranges kernels may access, what has been written there, and whether threads
// of one grid disagree about it. Shadows are sparse mappings, so ranges may be far larger than the
// machine's memory. Threads of different blocks are never ordered within a grid; those of a block
// by their clocks (state.h), of which the last read and write of each place are kept.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

#include "tests/simt/state.h"

namespace attend::simt {
namespace {

// Of 4 bytes at an even index; split as SharedCell.
struct GlobalCell {
  uint32_t write_epoch;
  uint32_t read_epoch;
  uint16_t writer;
  uint16_t reader : 11;  // or kLanesOf + warp: several lanes of it
  uint16_t split : 1;
  uint32_t site;  // of the write
};
static_assert(sizeof(GlobalCell) == 16);
constexpr uint32_t kLanesOf = kMaxThreads;

std::byte* MapSparse(size_t bytes) {
  void* memory = mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("simt: mmap");
    std::abort();
  }
  return static_cast<std::byte*>(memory);
}

struct Range {
  Range(uintptr_t base, size_t bytes, std::string range_name)
      : begin(base), end(base + bytes), name(std::move(range_name)) {
    written_bytes = bytes / 8 + 16;
    cells_bytes = (bytes / 4 + 1) * 2 * sizeof(GlobalCell);
    written = reinterpret_cast<uint8_t*>(MapSparse(written_bytes));
    cells = reinterpret_cast<GlobalCell*>(MapSparse(cells_bytes));
  }
  ~Range() {
    munmap(written, written_bytes);
    munmap(cells, cells_bytes);
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  // No sum that could wrap: addresses may be anything.
  bool Holds(uintptr_t address, size_t bytes) const {
    return address >= begin && address <= end && bytes <= end - address;
  }

  uintptr_t begin;
  uintptr_t end;
  std::string name;
  uint8_t* written;  // one bit per byte
  GlobalCell* cells;
  size_t written_bytes;
  size_t cells_bytes;
};

std::mutex registry_mutex;
std::atomic<uint64_t> registry_changes = 1;                // lookups of before are void
std::map<uintptr_t, std::shared_ptr<Range>>& Registry() {  // by registry_mutex, by begin
  static std::map<uintptr_t, std::shared_ptr<Range>> ranges;
  return ranges;
}

std::shared_ptr<Range> Find(uintptr_t address, size_t bytes) {
  const std::lock_guard lock(registry_mutex);
  auto next = Registry().upper_bound(address);
  if (next == Registry().begin()) return nullptr;
  const std::shared_ptr<Range>& range = std::prev(next)->second;
  return range->Holds(address, bytes) ? range : nullptr;
}

// ---- Lookups of kernels ----

struct Lookups {
  static constexpr size_t kSlots = 64;
  uint64_t change = 0;
  std::shared_ptr<Range> slots[kSlots];
};
Lookups lookups;  // one grid runs at a time

std::string OutOfRangeText(uintptr_t address, size_t bytes, uintptr_t origin) {
  char hex[32];
  std::snprintf(hex, sizeof hex, "0x%zx", static_cast<size_t>(address));
  std::string text = std::to_string(bytes) + " bytes at " + hex;
  const std::lock_guard lock(registry_mutex);
  bool known = false;
  for (const auto& [begin, range] : Registry()) {
    const std::string size = "' (" + std::to_string(range->end - range->begin) + " bytes)";
    if (origin >= range->begin && origin <= range->end) {
      text += ", byte " + std::to_string(static_cast<int64_t>(address - range->begin)) +
              " from the start of '" + range->name + size;
      known = true;
    }
  }
  if (!known) text += ", from a pointer to no registered memory";
  for (const auto& [begin, range] : Registry()) {
    if (address >= range->begin && address < range->end) {
      text +=
          "; that is byte " + std::to_string(address - range->begin) + " of '" + range->name + "'";
    }
  }
  return text;
}

[[noreturn]] void OutOfRange(uintptr_t address, size_t bytes, uintptr_t origin, Site site) {
  Violate(Violation::kGlobalRange, OutOfRangeText(address, bytes, origin), site);
}

inline Range& RangeOf(uintptr_t address, size_t bytes, uintptr_t origin, Site site) {
  Lookups& cache = lookups;
  const uint64_t change = registry_changes.load(std::memory_order_acquire);
  if (cache.change != change) [[unlikely]] {
    for (auto& slot : cache.slots) slot.reset();
    cache.change = change;
  }
  std::shared_ptr<Range>& slot = cache.slots[(address >> 12) % Lookups::kSlots];
  if (slot == nullptr || !slot->Holds(address, bytes)) [[unlikely]] {
    slot = Find(address, bytes);
    if (slot == nullptr) OutOfRange(address, bytes, origin, site);
  }
  Range& range = *slot;
  if (origin < range.begin || origin > range.end) [[unlikely]] {
    OutOfRange(address, bytes, origin, site);
  }
  return range;
}

std::string Where(const Range& range, uintptr_t address) {
  return "byte " + std::to_string(address - range.begin) + " of '" + range.name + "' (" +
         std::to_string(range.end - range.begin) + " bytes)";
}

void CheckAlignment(const Range& range, uintptr_t address, size_t alignment, Site site) {
  if ((address & (alignment - 1)) == 0) [[likely]] {
    return;
  }
  Violate(Violation::kAlignment,
          "global " + Where(range, address) + " is not a multiple of " + std::to_string(alignment),
          site);
}

// ---- What was written ----

// Calls visit(byte of the map, bits) for bytes [offset, offset + bytes); stops at false.
template <class Visit>
inline bool ForBits(size_t offset, size_t bytes, Visit&& visit) {
  const size_t end = offset + bytes;
  while (offset < end) {
    const size_t count = std::min(8 - offset % 8, end - offset);
    const auto bits = static_cast<uint8_t>(((1u << count) - 1) << offset % 8);
    if (!visit(offset / 8, bits)) return false;
    offset += count;
  }
  return true;
}

bool AllWritten(const Range& range, size_t offset, size_t bytes) {
  return ForBits(offset, bytes,
                 [&](size_t at, uint8_t bits) { return (range.written[at] & bits) == bits; });
}

void SetWritten(Range& range, size_t offset, size_t bytes, bool value) {
  // Whole bytes of the map at once: ranges may be large.
  const size_t whole_begin = (offset + 7) / 8;
  const size_t whole_end = (offset + bytes) / 8;
  if (whole_end > whole_begin + 8) {
    SetWritten(range, offset, whole_begin * 8 - offset, value);
    std::memset(range.written + whole_begin, value ? 0xff : 0, whole_end - whole_begin);
    SetWritten(range, whole_end * 8, offset + bytes - whole_end * 8, value);
    return;
  }
  ForBits(offset, bytes, [&](size_t at, uint8_t bits) {
    range.written[at] =
        static_cast<uint8_t>(value ? range.written[at] | bits : range.written[at] & ~bits);
    return true;
  });
}

// ---- Races ----

template <class Visit>
inline void ForCells(Range& range, size_t offset, size_t bytes, bool merge, Visit&& visit) {
  const size_t end = offset + bytes;
  for (size_t at = offset & ~size_t{1}; at < end;) {
    const size_t even = at / 4 * 2;
    GlobalCell& cell = range.cells[even];
    if (at % 4 == 0 && at + 4 <= end) {
      if (cell.split) visit(even + 1);
      visit(even);
      if (merge) cell.split = 0;
      at += 4;
    } else {
      if (!cell.split) {
        cell.split = 1;
        range.cells[even + 1] = cell;
      }
      visit(at / 2);
      at += 2;
    }
  }
}

[[noreturn]] void Race(const Range& range, size_t index, const char* access, const char* before,
                       uint32_t epoch, uint32_t thread, uint32_t site_before, Site site) {
  std::string text = std::string(access) + " of " + Where(range, range.begin + 2 * index) +
                     " unordered with a " + before;
  if (epoch < grid->block_base) {
    text += " by another block";
  } else if (thread < kLanesOf) {
    text += " by " + ThreadText(static_cast<int>(thread));
  } else {
    text += " by warp " + std::to_string(thread - kLanesOf);
  }
  if (site_before != 0) text += " at " + SiteText(site_before);
  Violate(Violation::kGlobalRace, text, site);
}

// Whether an access stamped so, of this launch, is unordered with the running thread's.
inline bool Conflicts(const Thread& self, uint32_t epoch, uint32_t thread) {
  if (epoch < grid->launch_base) return false;
  if (epoch < grid->block_base) return true;
  if (thread >= kLanesOf) return epoch > self.warp->clock[thread - kLanesOf];
  return Unordered(self, epoch, thread);
}

void CheckWriter(const Thread& self, const Range& range, size_t index, const char* access,
                 Site site) {
  const GlobalCell& cell = range.cells[index];
  if (Conflicts(self, cell.write_epoch, cell.writer)) [[unlikely]] {
    Race(range, index, access, "write", cell.write_epoch, cell.writer, cell.site, site);
  }
}

void Read(const Thread& self, Range& range, size_t index, Site site) {
  CheckWriter(self, range, index, "read", site);
  GlobalCell& cell = range.cells[index];
  // A read by another block of this launch is kept: it conflicts with any later write.
  if (cell.read_epoch >= grid->launch_base && cell.read_epoch < grid->block_base) return;
  const auto thread = static_cast<uint32_t>(self.thread);
  const uint32_t lanes = kLanesOf + thread / kLanes;
  const uint32_t reader = cell.reader;
  const bool many = cell.read_epoch == self.warp->epoch && reader != thread &&
                    (reader == lanes || reader / kLanes == thread / kLanes);
  cell.read_epoch = self.warp->epoch;
  cell.reader = static_cast<uint16_t>((many ? lanes : thread) & 0x7ff);
}

void Write(const Thread& self, Range& range, size_t index, Site site) {
  CheckWriter(self, range, index, "write", site);
  GlobalCell& cell = range.cells[index];
  if (Conflicts(self, cell.read_epoch, cell.reader)) [[unlikely]] {
    Race(range, index, "write", "read", cell.read_epoch, cell.reader, 0, site);
  }
  cell.write_epoch = self.warp->epoch;
  cell.writer = static_cast<uint16_t>(self.thread);
  cell.site = CompactSite(site);
}

}  // namespace

// ---- Accesses of kernels ----

void GlobalLoad(uintptr_t address, size_t bytes, size_t alignment, uintptr_t origin, Site site) {
  const Thread& self = Running();
  Range& range = RangeOf(address, bytes, origin, site);
  CheckAlignment(range, address, alignment, site);
  if (!grid->settings.checks) return;
  const size_t offset = address - range.begin;
  if (!AllWritten(range, offset, bytes)) [[unlikely]] {
    Violate(Violation::kGlobalUninitialized, "read of " + Where(range, address), site);
  }
  ForCells(range, offset, bytes, false, [&](size_t cell) { Read(self, range, cell, site); });
}

void GlobalStore(uintptr_t address, size_t bytes, size_t alignment, uintptr_t origin, Site site) {
  const Thread& self = Running();
  Range& range = RangeOf(address, bytes, origin, site);
  CheckAlignment(range, address, alignment, site);
  const size_t offset = address - range.begin;
  SetWritten(range, offset, bytes, true);
  if (!grid->settings.checks) return;
  ForCells(range, offset, bytes, true, [&](size_t cell) { Write(self, range, cell, site); });
}

void GlobalLoadByCopy(uintptr_t address, uintptr_t origin, bool valid, Site site) {
  if (valid) {
    GlobalLoad(address, 16, 16, origin, site);
    return;
  }
  CheckAlignment(RangeOf(address, 16, origin, site), address, 16, site);
}

void ForgetGlobalEpochs() {
  const std::lock_guard lock(registry_mutex);
  for (auto& [begin, range] : Registry()) {
    madvise(range->cells, range->cells_bytes, MADV_DONTNEED);
  }
}

// ---- The registry ----

void RegisterGlobal(const void* base, size_t bytes, const std::string& name) {
  const auto begin = reinterpret_cast<uintptr_t>(base);
  auto range = std::make_shared<Range>(begin, bytes, name);
  const std::lock_guard lock(registry_mutex);
  Registry()[begin] = std::move(range);
  ++registry_changes;
}

void UnregisterGlobal(const void* base) {
  const std::lock_guard lock(registry_mutex);
  Registry().erase(reinterpret_cast<uintptr_t>(base));
  ++registry_changes;
}

void MarkInitialized(const void* data, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (const auto range = Find(address, bytes)) {
    SetWritten(*range, address - range->begin, bytes, true);
  }
}

void MarkUninitialized(const void* data, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (const auto range = Find(address, bytes)) {
    SetWritten(*range, address - range->begin, bytes, false);
  }
}

void CopyInitialized(const void* to, const void* from, size_t bytes) {
  const auto target = reinterpret_cast<uintptr_t>(to);
  const auto source = reinterpret_cast<uintptr_t>(from);
  const auto target_range = Find(target, bytes);
  const auto source_range = Find(source, bytes);
  if (target_range == nullptr || source_range == nullptr) return;
  size_t to_offset = target - target_range->begin;
  size_t from_offset = source - source_range->begin;
  const auto copy_byte = [&] {
    SetWritten(*target_range, to_offset, 1, AllWritten(*source_range, from_offset, 1));
    ++to_offset, ++from_offset, --bytes;
  };
  if (to_offset % 8 == from_offset % 8) {  // whole bytes of the maps at once
    while (bytes > 0 && to_offset % 8 != 0) copy_byte();
    std::memcpy(target_range->written + to_offset / 8, source_range->written + from_offset / 8,
                bytes / 8);
    to_offset += bytes / 8 * 8;
    from_offset += bytes / 8 * 8;
    bytes %= 8;
  }
  while (bytes > 0) copy_byte();
}

bool IsInitialized(const void* data, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const auto range = Find(address, bytes);
  return range != nullptr && AllWritten(*range, address - range->begin, bytes);
}

bool IsRegistered(const void* data, size_t bytes) {
  return Find(reinterpret_cast<uintptr_t>(data), bytes) != nullptr;
}

SparseBuffer::SparseBuffer(size_t bytes, const std::string& name)
    : data_(MapSparse(bytes)), bytes_(bytes) {
  RegisterGlobal(data_, bytes_, name);
}

SparseBuffer::~SparseBuffer() {
  UnregisterGlobal(data_);
  munmap(data_, std::max<size_t>(bytes_, 1));
}

}  // namespace attend::simt
