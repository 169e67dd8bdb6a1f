// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/result.h"

#include <algorithm>

namespace attend::bench {
namespace {

std::string NameOf(DType operands) {
  return operands == DType::kF32 ? "fma" : operands == DType::kBF16 ? "dot" : "int8";
}

Limits LimitsOf(const CaseResult& result) { return Mean(result.before, result.after); }

double Seconds(const CaseResult& result) { return result.times.wall_us.median / 1e6; }

double PerSecond(double amount, double seconds) { return seconds > 0 ? amount / seconds : 0; }

// Of the phases' operations alone; 0 when a limit is not known.
double OperationsSeconds(const CaseResult& result) {
  const CaseWork work = WorkOf(result.bench);
  const Limits limits = LimitsOf(result);
  const double project = limits.Operations(result.compute);
  const double attend = limits.Operations(result.attend);
  if (attend == 0 || (project == 0 && !result.bench.spec.raw())) return 0;
  const double projected = work.project.operations + work.output.operations;
  return (projected > 0 ? projected / project : 0) + work.attend.operations / attend;
}

}  // namespace

double LimitsMoved(const CaseResult& result) {
  if (result.bench.bound == Bound::kBytes) return Moved(result.before.read, result.after.read);
  return std::max(
      Moved(result.before.Operations(result.compute), result.after.Operations(result.compute)),
      Moved(result.before.Operations(result.attend), result.after.Operations(result.attend)));
}

double OperationsRate(const CaseResult& result) {
  return PerSecond(WorkOf(result.bench).operations(), Seconds(result));
}

double BytesRate(const CaseResult& result) {
  return PerSecond(StoredBytes(result.bench), Seconds(result));
}

double FloorSeconds(const CaseResult& result) {
  const CaseWork work = WorkOf(result.bench);
  const Limits limits = LimitsOf(result);
  const double project = limits.Operations(result.compute);
  const double attend = limits.Operations(result.attend);
  if (limits.read == 0 || attend == 0 || (project == 0 && !result.bench.spec.raw())) return 0;
  const auto floor = [&](const Work& phase, double operations) {
    const double computing = phase.operations > 0 ? phase.operations / operations : 0;
    return std::max(computing, phase.bytes / limits.read);
  };
  return floor(work.project, project) + floor(work.attend, attend) + floor(work.output, project);
}

std::optional<double> ShareOfLimit(const CaseResult& result) {
  if (!result.failure.empty() || LimitsMoved(result) > kMostMoved) return std::nullopt;
  if (result.bench.bound == Bound::kBytes) {
    const double read = LimitsOf(result).read;
    if (read == 0) return std::nullopt;
    return BytesRate(result) / read;
  }
  const double least = OperationsSeconds(result);
  if (least == 0 || Seconds(result) == 0) return std::nullopt;
  return least / Seconds(result);
}

std::string LimitName(const CaseResult& result) {
  if (result.bench.bound == Bound::kBytes) return "read";
  const std::string attend = NameOf(result.attend);
  if (result.bench.spec.raw() || result.compute == result.attend) return attend;
  return NameOf(result.compute) + " + " + attend;
}

}  // namespace attend::bench
