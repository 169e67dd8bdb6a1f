// SPDX-License-Identifier: Apache-2.0
//
// Settings, counters, and what happens to a violation.
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "tests/simt/state.h"

namespace attend::simt {
namespace {

std::mutex reports_mutex;
std::vector<Report>* captured = nullptr;  // the innermost capture's; by reports_mutex

// Compact sites are distances from here.
const char anchor = 0;

std::string FileName(const char* path) {
  const std::string text = path;
  const size_t slash = text.rfind('/');
  return slash == std::string::npos ? text : text.substr(slash + 1);
}

}  // namespace

Counters counts;

Settings& settings() {
  static Settings current;
  return current;
}

const Counters& counters() { return counts; }
void ResetCounters() { counts = Counters(); }

const char* OrderName(Order order) {
  switch (order) {
    case Order::kAscending:
      return "ascending";
    case Order::kDescending:
      return "descending";
    case Order::kRandom:
      return "random";
    case Order::kWarpToBarrier:
      return "warp to barrier";
    case Order::kWarpToBarrierDescend:
      return "warp to barrier, descending";
  }
  return "?";
}

const char* ViolationName(Violation kind) {
  switch (kind) {
    case Violation::kLaunch:
      return "launch refused";
    case Violation::kArgument:
      return "wrong argument";
    case Violation::kGlobalRange:
      return "global memory out of range";
    case Violation::kSharedRange:
      return "shared memory out of range";
    case Violation::kAlignment:
      return "misaligned address";
    case Violation::kGlobalUninitialized:
      return "read of uninitialised global memory";
    case Violation::kSharedUninitialized:
      return "read of uninitialised shared memory";
    case Violation::kGlobalRace:
      return "race in global memory";
    case Violation::kSharedRace:
      return "race in shared memory";
    case Violation::kCopyInFlight:
      return "access to a copy in flight";
    case Violation::kOutstandingCopies:
      return "thread ended with copies outstanding";
    case Violation::kDivergence:
      return "divergence";
    case Violation::kBarrierMismatch:
      return "barrier mismatch";
    case Violation::kExitedThread:
      return "thread has ended";
  }
  return "?";
}

// ---- Sites ----

uint32_t CompactSite(Site site) {
  static_assert(sizeof(Site) == sizeof(uintptr_t));
  const auto record = std::bit_cast<uintptr_t>(site);
  const auto distance = static_cast<int64_t>(record - reinterpret_cast<uintptr_t>(&anchor));
  return distance == static_cast<int32_t>(distance) ? static_cast<uint32_t>(distance) : 0;
}

std::string SiteText(Site site) {
  return FileName(site.file_name()) + ":" + std::to_string(site.line()) + ":" +
         std::to_string(site.column());
}

std::string SiteText(uint32_t compact) {
  if (compact == 0) return "an unknown place";
  const int64_t distance = static_cast<int32_t>(compact);
  return SiteText(
      std::bit_cast<Site>(reinterpret_cast<uintptr_t>(&anchor) + static_cast<uintptr_t>(distance)));
}

bool SameSite(Site a, Site b) {
  return std::bit_cast<uintptr_t>(a) == std::bit_cast<uintptr_t>(b) ||
         (a.line() == b.line() && a.column() == b.column() &&
          std::strcmp(a.file_name(), b.file_name()) == 0);
}

// ---- Reports ----

CaptureReports::CaptureReports() {
  const std::lock_guard lock(reports_mutex);
  outer_ = captured;
  captured = &reports_;
}

CaptureReports::~CaptureReports() {
  const std::lock_guard lock(reports_mutex);
  captured = outer_;
}

std::vector<Report> CaptureReports::reports() const {
  const std::lock_guard lock(reports_mutex);
  return reports_;
}

bool CaptureReports::Has(Violation kind) const {
  for (const Report& report : reports()) {
    if (report.kind == kind) return true;
  }
  return false;
}

std::string CaptureReports::Text() const {
  std::string text;
  for (const Report& report : reports()) text += report.text + "\n";
  return text;
}

void AddReport(Violation kind, const std::string& text) {
  const std::string line = "simt: " + std::string(ViolationName(kind)) + ": " + text;
  const std::lock_guard lock(reports_mutex);
  if (captured == nullptr) {
    std::fprintf(stderr, "%s\n", line.c_str());
    std::fflush(stderr);
    std::abort();
  }
  captured->push_back({kind, line});
}

std::string ThreadText(int thread) {
  return "thread " + std::to_string(thread) + " (warp " + std::to_string(thread / kLanes) +
         ", lane " + std::to_string(thread % kLanes) + ")";
}

void Violate(Violation kind, const std::string& text, Site site) {
  const Thread& self = Running();
  AddReport(kind, text + "; at " + SiteText(site) + ", kernel " + grid->name + ", block " +
                      std::to_string(self.block) + ", " + ThreadText(self.thread) + "; order " +
                      OrderName(grid->settings.order) + ", seed " +
                      std::to_string(grid->settings.seed));
  AbandonKernel();
}

void OutsideKernel() {
  std::fprintf(stderr, "simt: a device function was called outside of a kernel\n");
  std::abort();
}

}  // namespace attend::simt
