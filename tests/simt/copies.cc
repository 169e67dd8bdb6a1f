// SPDX-License-Identifier: Apache-2.0
//
// Asynchronous copies: their destination is nobody's until the thread that started them has waited
// for their group; then it is that thread's, and others' after a barrier.
#include <cstring>

#include "tests/simt/state.h"

namespace attend::simt {
namespace {

void Move(const PendingCopy& copy) {
  auto* to = reinterpret_cast<void*>(copy.to);
  if (copy.valid) {
    std::memcpy(to, reinterpret_cast<const void*>(copy.from), 16);
  } else {
    std::memset(to, 0, 16);
  }
}

}  // namespace

void StartCopy(uintptr_t to, const SharedRange* range, uintptr_t from, uintptr_t origin, bool valid,
               Site site) {
  Thread& self = Running();
  ++counts.async_copies;
  GlobalLoadByCopy(from, origin, valid, site);
  SharedCopyStarted(to, range, site);
  const PendingCopy copy = {self.open_group, valid, to, from, site};
  if (grid->settings.copies == CopyTime::kAtIssue) {
    Move(copy);
  } else {
    std::memset(reinterpret_cast<void*>(to), 0xff, 16);
  }
  self.copies.push_back(copy);
}

void CommitCopyGroup() { ++Running().open_group; }

void WaitCopyGroups(int pending, Site site) {
  Thread& self = Running();
  if (pending < 0) Violate(Violation::kArgument, "a negative number of groups", site);
  // Groups [0, open_group - pending) are finished.
  size_t finished = 0;
  for (const PendingCopy& copy : self.copies) {
    if (copy.group + static_cast<uint32_t>(pending) >= self.open_group) break;
    if (grid->settings.copies == CopyTime::kAtWait) Move(copy);
    SharedCopyArrived(copy.to, copy.site);
    ++finished;
  }
  self.copies.erase(self.copies.begin(), self.copies.begin() + static_cast<ptrdiff_t>(finished));
}

void CheckCopiesAtExit(Thread& self) {
  if (self.copies.empty()) return;
  const PendingCopy& first = self.copies.front();
  Violate(
      Violation::kOutstandingCopies,
      std::to_string(self.copies.size()) + " copies, the first started at " + SiteText(first.site),
      first.site);
}

}  // namespace attend::simt
