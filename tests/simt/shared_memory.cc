// SPDX-License-Identifier: Apache-2.0
//
// The block's shared memory: exactly the bytes of the launch, NaN at the start of each block, and
// for every access its range, alignment, whether the bytes were written by this block, and whether
// it is ordered after what other threads did there. One byte counts as the two it lies in.
#include <algorithm>
#include <cstdlib>
#include <memory>

#include "tests/simt/state.h"

namespace attend::simt {
namespace {

constexpr size_t kRedZone = 256;
constexpr size_t kBaseAlignment = 1024;

uintptr_t Base() { return reinterpret_cast<uintptr_t>(grid->shared); }

std::string Where(uintptr_t address, const SharedRange* range) {
  const auto offset = static_cast<int64_t>(address - range->begin);
  return "byte " + std::to_string(offset) + " of '" + range->name + "' (" +
         std::to_string(range->end - range->begin) + " bytes)";
}

[[noreturn]] void OutOfRange(uintptr_t address, size_t bytes, const SharedRange* range, Site site) {
  std::string text = std::to_string(bytes) + " bytes at " + Where(address, range);
  for (const SharedRange& other : grid->ranges) {
    if (&other != range && address + bytes > other.begin && address < other.end) {
      text += ", which is " + Where(address, &other);
      break;
    }
  }
  Violate(Violation::kSharedRange, text, site);
}

inline void CheckRange(uintptr_t address, size_t bytes, size_t alignment, const SharedRange* range,
                       Site site) {
  if (address < range->begin || address + bytes > range->end) [[unlikely]] {
    OutOfRange(address, bytes, range, site);
  }
  if ((address & (alignment - 1)) != 0) [[unlikely]] {
    Violate(
        Violation::kAlignment,
        "shared " + Where(address, range) + " is not a multiple of " + std::to_string(alignment),
        site);
  }
}

// ---- Shadow ----

ReadMark* Reads(size_t cell) { return grid->reads.data() + cell * grid->warps; }

std::string CellText(size_t cell) {
  const uintptr_t address = Base() + 2 * cell;
  return "shared " + Where(address, FindSharedRange(address));
}

std::string WriterText(const SharedCell& cell) {
  return "written by " + ThreadText(static_cast<int>(cell.thread)) + " at " + SiteText(cell.site);
}

[[noreturn]] void InFlight(size_t index, const char* access, Site site) {
  const SharedCell& cell = grid->cells[index];
  Violate(Violation::kCopyInFlight,
          std::string(access) + " of " + CellText(index) + ", where an asynchronous copy of " +
              ThreadText(static_cast<int>(cell.thread)) + " from " + SiteText(cell.site) +
              " isn't waited for",
          site);
}

void CheckRead(const Thread& self, size_t index, bool by_warp, Site site) {
  const SharedCell& cell = grid->cells[index];
  if (cell.epoch < grid->block_base) [[unlikely]] {
    Violate(Violation::kSharedUninitialized, "read of " + CellText(index), site);
  }
  if (cell.in_flight) [[unlikely]] {
    InFlight(index, "read", site);
  }
  const bool unordered = by_warp ? cell.epoch > self.warp->clock[cell.thread / kLanes]
                                 : Unordered(self, cell.epoch, cell.thread);
  if (unordered) [[unlikely]] {
    Violate(Violation::kSharedRace,
            "read of " + CellText(index) + " unordered with the value " + WriterText(cell), site);
  }
  ReadMark& mark = Reads(index)[self.warp->index];
  const auto lane = static_cast<uint32_t>(self.lane);
  const bool many = by_warp || (mark.epoch == self.warp->epoch && mark.lane != lane);
  mark = {self.warp->epoch, many ? kManyLanes : lane, CompactSite(site)};
}

void CheckWrite(const Thread& self, size_t index, Site site) {
  const SharedCell& cell = grid->cells[index];
  const Warp& warp = *self.warp;
  if (cell.epoch >= grid->block_base) {
    if (cell.in_flight) [[unlikely]] {
      InFlight(index, "write", site);
    }
    if (Unordered(self, cell.epoch, cell.thread)) [[unlikely]] {
      Violate(Violation::kSharedRace,
              "write of " + CellText(index) + " unordered with the value " + WriterText(cell),
              site);
    }
  }
  const ReadMark* reads = Reads(index);
  for (int v = 0; v < grid->warps; ++v) {
    if (reads[v].epoch <= warp.clock[v]) continue;
    if (v == warp.index && reads[v].lane == static_cast<uint32_t>(self.lane)) continue;
    Violate(Violation::kSharedRace,
            "write of " + CellText(index) + " unordered with a read by " +
                (reads[v].lane == kManyLanes
                     ? "warp " + std::to_string(v)
                     : ThreadText(v * kLanes + static_cast<int>(reads[v].lane))) +
                " at " + SiteText(reads[v].site),
            site);
  }
}

// From now on the two halves of the 4 bytes are told apart.
void Split(size_t even) {
  SharedCell& cell = grid->cells[even];
  cell.split = 1;
  grid->cells[even + 1] = cell;
  std::copy_n(Reads(even), grid->warps, Reads(even + 1));
}

// Calls visit(cell) for the cells of [address, address + bytes); `merge` when visit rewrites them:
// whole words are one cell again.
template <class Visit>
inline void ForCells(uintptr_t address, size_t bytes, bool merge, Visit&& visit) {
  const size_t begin = address - Base();
  const size_t end = begin + bytes;
  for (size_t at = begin & ~size_t{1}; at < end;) {
    const size_t even = at / 4 * 2;
    SharedCell& cell = grid->cells[even];
    if (at % 4 == 0 && at + 4 <= end) {
      if (cell.split) {
        if (merge) {
          visit(even + 1);
          visit(even);
          cell.split = 0;
        } else {
          visit(even);
          visit(even + 1);
        }
      } else {
        visit(even);
      }
      at += 4;
    } else {
      if (!cell.split) Split(even);
      visit(at / 2);
      at += 2;
    }
  }
}

void Written(const Thread& self, size_t index, bool in_flight, Site site) {
  SharedCell& cell = grid->cells[index];
  cell.epoch = self.warp->epoch;
  cell.thread = static_cast<uint32_t>(self.thread);
  cell.in_flight = in_flight;
  cell.site = CompactSite(site);
}

void LogBanks(const Thread& self, uintptr_t address, size_t bytes, Site site) {
  self.warp->bank_log.push_back({CompactSite(site), static_cast<uint32_t>(address - Base()),
                                 static_cast<uint16_t>(bytes), static_cast<uint8_t>(self.lane)});
}

}  // namespace

// ---- Ranges ----

const SharedRange* RegisterSharedRange(const char* name, int offset_bytes, int64_t bytes,
                                       size_t alignment, Site site) {
  Running();
  if (offset_bytes < 0 || bytes < 0 || offset_bytes + bytes > grid->shared_bytes) {
    Violate(Violation::kSharedRange,
            "array '" + std::string(name) + "' [" + std::to_string(offset_bytes) + ", " +
                std::to_string(offset_bytes + bytes) + ") of a block with " +
                std::to_string(grid->shared_bytes) + " bytes of shared memory",
            site);
  }
  if (offset_bytes % static_cast<int>(alignment) != 0) {
    Violate(Violation::kAlignment,
            "array '" + std::string(name) + "' at byte " + std::to_string(offset_bytes), site);
  }
  const uintptr_t begin = Base() + static_cast<uintptr_t>(offset_bytes);
  const SharedRange range = {begin, begin + static_cast<uintptr_t>(bytes), name};
  for (const SharedRange& known : grid->ranges) {
    if (known.begin == range.begin && known.end == range.end &&
        std::strcmp(known.name, name) == 0) {
      return &known;
    }
  }
  grid->ranges.push_back(range);
  return &grid->ranges.back();
}

const SharedRange* FindSharedRange(uintptr_t address) {
  Running();
  for (auto range = grid->ranges.rbegin(); range != grid->ranges.rend(); ++range) {
    if (address >= range->begin && address < range->end) return &*range;
  }
  return &grid->whole;
}

uint32_t SharedOffset(uintptr_t address) {
  Running();
  return static_cast<uint32_t>(address - Base());
}

// ---- Accesses ----

void SharedLoad(uintptr_t address, size_t bytes, size_t alignment, const SharedRange* range,
                Site site) {
  const Thread& self = Running();
  CheckRange(address, bytes, alignment, range, site);
  if (grid->settings.count_banks) LogBanks(self, address, bytes, site);
  if (!grid->settings.checks) return;
  ForCells(address, bytes, false, [&](size_t cell) { CheckRead(self, cell, false, site); });
}

void SharedStore(uintptr_t address, size_t bytes, size_t alignment, const SharedRange* range,
                 Site site) {
  const Thread& self = Running();
  CheckRange(address, bytes, alignment, range, site);
  if (grid->settings.count_banks) LogBanks(self, address, bytes, site);
  if (!grid->settings.checks) return;
  ForCells(address, bytes, true, [&](size_t cell) {
    CheckWrite(self, cell, site);
    Written(self, cell, false, site);
  });
}

void SharedLoadByWarp(uintptr_t address, const SharedRange* range, Site site) {
  const Thread& self = Running();
  CheckRange(address, 16, 16, range, site);
  if (!grid->settings.checks) return;
  ForCells(address, 16, false, [&](size_t cell) { CheckRead(self, cell, true, site); });
}

void SharedCopyStarted(uintptr_t address, const SharedRange* range, Site site) {
  const Thread& self = Running();
  CheckRange(address, 16, 16, range, site);
  if (grid->settings.count_banks) LogBanks(self, address, 16, site);
  if (!grid->settings.checks) return;
  ForCells(address, 16, true, [&](size_t cell) {
    CheckWrite(self, cell, site);
    Written(self, cell, true, site);
  });
}

void SharedCopyArrived(uintptr_t address, Site site) {
  if (!grid->settings.checks) return;
  const Thread& self = Running();
  ForCells(address, 16, true, [&](size_t cell) { Written(self, cell, false, site); });
}

// ---- Preparation ----

void PrepareShared(Grid& g) {
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  static std::unique_ptr<std::byte, Free> memory;
  static size_t capacity = 0;
  const size_t bytes = g.shared_bytes;
  const size_t needed =
      (bytes + 2 * kRedZone + 2 * kBaseAlignment) / kBaseAlignment * kBaseAlignment;
  if (needed > capacity) {
    memory.reset(
        static_cast<std::byte*>(std::aligned_alloc(kBaseAlignment, needed + kBaseAlignment)));
    capacity = needed;
  }
  g.shared = memory.get() + kBaseAlignment;
  const size_t cells = (bytes + 3) / 4 * 2;
  if (g.cells.size() < cells) g.cells.resize(cells);
  // Marks are laid out by the number of warps; stale ones are old under any layout.
  if (g.reads.size() < cells * g.warps) g.reads.resize(cells * g.warps);
  const auto base = reinterpret_cast<uintptr_t>(g.shared);
  g.whole = {base, base + bytes, "shared memory"};
}

void PoisonShared(Grid& g) {
  std::memset(g.shared, 0xff, g.shared_bytes);
  g.ranges.clear();
}

// ---- Banks ----

namespace {

// Wavefronts of lanes that access `bytes` each at `offsets`: 32 banks of 4 bytes; accesses of 8 and
// 16 bytes go in halves and quarters of the warp.
int WavefrontsOf(const std::vector<uint32_t>& offsets, size_t bytes) {
  const size_t group = bytes >= 16 ? 8 : bytes >= 8 ? 16 : 32;
  int wavefronts = 0;
  for (size_t begin = 0; begin < offsets.size(); begin += group) {
    std::vector<uint32_t> words[32];
    size_t most = 1;
    for (size_t i = begin; i < std::min(offsets.size(), begin + group); ++i) {
      if (offsets[i] == UINT32_MAX) continue;
      for (uint32_t word = offsets[i] / 4; word <= (offsets[i] + bytes - 1) / 4; ++word) {
        std::vector<uint32_t>& bank = words[word % 32];
        if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
        most = std::max(most, bank.size());
      }
    }
    wavefronts += static_cast<int>(most);
  }
  return wavefronts;
}

}  // namespace

// The nth access of each lane at a place is one instruction of the warp.
void CountBanks(Warp& warp) {
  std::vector<BankAccess> log;
  log.swap(warp.bank_log);
  std::stable_sort(log.begin(), log.end(), [](const BankAccess& a, const BankAccess& b) {
    return a.site != b.site ? a.site < b.site : a.bytes < b.bytes;
  });
  for (size_t begin = 0; begin < log.size();) {
    size_t end = begin;
    std::vector<std::vector<uint32_t>> instructions;
    size_t done[kLanes] = {};
    while (end < log.size() && log[end].site == log[begin].site &&
           log[end].bytes == log[begin].bytes) {
      const BankAccess& access = log[end++];
      const size_t nth = done[access.lane]++;
      if (nth == instructions.size()) instructions.emplace_back(kLanes, UINT32_MAX);
      instructions[nth][access.lane] = access.offset;
    }
    const size_t bytes = log[begin].bytes;
    const int least = bytes >= 16 ? 4 : bytes >= 8 ? 2 : 1;
    for (const auto& offsets : instructions) {
      const int wavefronts = WavefrontsOf(offsets, bytes);
      counts.shared_wavefronts += wavefronts;
      counts.shared_conflicts += wavefronts - least;
    }
    begin = end;
  }
}

}  // namespace attend::simt
