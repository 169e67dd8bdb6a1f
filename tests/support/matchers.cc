// SPDX-License-Identifier: Apache-2.0
#include "tests/support/matchers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

namespace attend {
namespace {

// What rounding to `dtype` may add to a finite value: half a unit in its last place, or half of the
// smallest subnormal. F32 values may also have lost what lies below its normal range (flushed to
// zero).
double RoundingError(DType dtype, double value) {
  const double magnitude = std::fabs(value);
  if (dtype == DType::kBF16) return std::max(magnitude * 0x1p-8, 0x1p-126);
  if (dtype == DType::kF16) return std::max(magnitude * 0x1p-11, 0x1p-25);
  return std::max(magnitude * 0x1p-24, 0x1p-126);
}

// NaN 0, finite 1, +inf 2, -inf 3.
int Kind(double value) {
  if (std::isnan(value)) return 0;
  if (std::isfinite(value)) return 1;
  return value > 0 ? 2 : 3;
}

class Comparison {
 public:
  void Add(int64_t index, double actual, double expected, double tolerance) {
    if (Kind(actual) != Kind(expected)) {
      // A wrong kind outranks every finite error.
      if (wrong_++ == 0 || !kind_) Keep(index, actual, expected, tolerance);
      kind_ = true;
      return;
    }
    if (!std::isfinite(expected)) return;
    const double error = std::fabs(actual - expected);
    if (!(error <= tolerance)) {
      if (wrong_++ == 0 || (!kind_ && error / tolerance > worst_)) {
        worst_ = error / tolerance;
        Keep(index, actual, expected, tolerance);
      }
    }
  }

  testing::AssertionResult Result(int64_t count, int64_t columns) const {
    if (wrong_ == 0) return testing::AssertionSuccess();
    return testing::AssertionFailure()
           << wrong_ << " of " << count << " elements differ, worst is element " << index_
           << " (row " << index_ / columns << ", column " << index_ % columns << "): got "
           << actual_ << ", wanted " << expected_ << " +- " << tolerance_;
  }

 private:
  void Keep(int64_t index, double actual, double expected, double tolerance) {
    index_ = index;
    actual_ = actual;
    expected_ = expected;
    tolerance_ = tolerance;
  }

  int64_t wrong_ = 0;
  bool kind_ = false;
  double worst_ = 0;
  int64_t index_ = 0;
  double actual_ = 0, expected_ = 0, tolerance_ = 0;
};

}  // namespace

testing::AssertionResult MatchesReference(DType dtype, const void* actual,
                                          const BoundedRows& expected) {
  Comparison comparison;
  const auto count = static_cast<int64_t>(expected.value.size());
  for (int64_t i = 0; i < count; ++i) {
    // The oracle's value is rounded only for its kind: an F16 output may overflow.
    const double value = expected.value[i];
    const double rounded = dtype == DType::kF16 ? RoundTo(dtype, value) : value;
    comparison.Add(i, LoadFloat(dtype, actual, i), std::isfinite(rounded) ? value : rounded,
                   expected.error[i] + RoundingError(dtype, std::fabs(value) + expected.error[i]));
  }
  return comparison.Result(count, std::max<int64_t>(expected.columns, 1));
}

testing::AssertionResult MatchesWithin(std::span<const float> actual,
                                       std::span<const float> expected, double tolerance) {
  if (actual.size() != expected.size()) {
    return testing::AssertionFailure()
           << "got " << actual.size() << " elements, wanted " << expected.size();
  }
  Comparison comparison;
  for (size_t i = 0; i < expected.size(); ++i) {
    comparison.Add(static_cast<int64_t>(i), actual[i], expected[i], tolerance);
  }
  const auto count = static_cast<int64_t>(expected.size());
  return comparison.Result(count, std::max<int64_t>(count, 1));
}

testing::AssertionResult SameBits(DType dtype, std::span<const std::byte> actual,
                                  std::span<const std::byte> expected) {
  if (actual.size() != expected.size()) {
    return testing::AssertionFailure()
           << "got " << actual.size() << " bytes, wanted " << expected.size();
  }
  const auto bytes = static_cast<size_t>(DTypeBytes(dtype));
  int64_t different = 0, first = 0;
  for (size_t i = 0; i < actual.size() / bytes; ++i) {
    if (std::memcmp(&actual[i * bytes], &expected[i * bytes], bytes) == 0) continue;
    if (different++ == 0) first = static_cast<int64_t>(i);
  }
  if (different == 0) return testing::AssertionSuccess();
  return testing::AssertionFailure() << different << " of " << actual.size() / bytes
                                     << " elements differ, the first is element " << first
                                     << ": got " << LoadFloat(dtype, actual.data(), first)
                                     << ", wanted " << LoadFloat(dtype, expected.data(), first);
}

}  // namespace attend
