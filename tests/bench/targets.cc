// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/targets.h"

#include <cstdio>
#include <set>
#include <utility>

namespace attend::bench {
namespace {

// Bf16 dot products count as fast, and have targets of their own, from this ratio to fp32 on.
constexpr double kFastDot = 1.5;

std::string Text(const char* format, auto... values) {
  char text[160];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

// Looks up results, and notes every name that it may need.
class Checker {
 public:
  explicit Checker(const std::vector<CaseResult>& results) : results_(results) {}

  // Null, after adding a target that is not reached, when the case has no result.
  const CaseResult* Find(const std::string& name, const std::string& what,
                         const std::string& wanted) {
    asked_.insert(name);
    for (const CaseResult& result : results_) {
      if (result.bench.name != name) continue;
      if (result.failure.empty()) return &result;
      Add(what, wanted, result.failure, false);
      return nullptr;
    }
    Add(what, wanted, name + " did not run", false);
    return nullptr;
  }

  void Add(std::string what, std::string wanted, std::string value, bool reached) {
    targets_.push_back({std::move(what), std::move(wanted), std::move(value), reached});
  }

  // At least `least` of the case's limit.
  void Share(const std::string& name, double least) {
    const std::string wanted = Text(">= %.0f %% of its limit", 100 * least);
    const CaseResult* result = Find(name, name, wanted);
    if (result == nullptr) return;
    const auto share = ShareOfLimit(*result);
    if (!share) return Add(name, wanted, "the limit moved, or was not measured", false);
    Add(name, Text(">= %.0f %% of ", 100 * least) + LimitName(*result),
        Text("%.1f %%", 100 * *share), *share >= least);
  }

  // Median of `name` over that of `other`, at most `most`.
  void NotSlower(const std::string& name, const std::string& other, double most,
                 const std::string& what) {
    asked_.insert(other);
    const std::string wanted = Text("<= %.2f x ", most) + other;
    const CaseResult* result = Find(name, what, wanted);
    const CaseResult* base = result == nullptr ? nullptr : Find(other, what, wanted);
    if (base == nullptr) return;
    const double ratio = result->times.wall_us.median / base->times.wall_us.median;
    Add(what, wanted, Text("%.2f x", ratio), ratio <= most);
  }

  // Bf16 weights: `least` of dot where that is fast, else not slower than fp32.
  void BF16(const std::string& layer, double least) {
    asked_.insert(layer + "/f32");
    const CaseResult* result = Find(layer + "/bf16", layer + "/bf16", "bf16");
    if (result == nullptr) return;
    const Limits limits = Mean(result->before, result->after);
    if (limits.dot > kFastDot * limits.fma) return Share(layer + "/bf16", least);
    NotSlower(layer + "/bf16", layer + "/f32", 1.0, layer + "/bf16, dot is slow here");
  }

  // At least `least` of the neighbour's share of its limit, or by its floor.
  void LikeNeighbour(const std::string& name, const std::string& neighbour, double least) {
    asked_.insert(neighbour);
    const std::string what = name + " beside " + neighbour;
    const std::string wanted = Text(">= %.0f %% of its share", 100 * least);
    const CaseResult* result = Find(name, what, wanted);
    const CaseResult* base = result == nullptr ? nullptr : Find(neighbour, what, wanted);
    if (base == nullptr) return;
    const auto share = ShareOfLimit(*result), other = ShareOfLimit(*base);
    if (!share || !other) return Add(what, wanted, "a limit moved", false);
    Add(what, wanted, Text("%.1f %% : %.1f %%", 100 * *share, 100 * *other),
        *share >= least * *other);
  }

  // Memory of a batch over rows, at the longest beside a shorter one.
  void LinearMemory(const std::string& longest, const std::string& shorter, double most) {
    asked_.insert(shorter);
    const std::string what = "memory, " + longest + " beside " + shorter;
    const std::string wanted = Text("<= %.2f x per row", most);
    const CaseResult* result = Find(longest, what, wanted);
    const CaseResult* base = result == nullptr ? nullptr : Find(shorter, what, wanted);
    if (base == nullptr) return;
    const auto per_row = [](const CaseResult& of) {
      return static_cast<double>(of.work_bytes) / static_cast<double>(of.bench.rows());
    };
    if (base->work_bytes == 0) return Add(what, wanted, "not measured", false);
    const double ratio = per_row(*result) / per_row(*base);
    Add(what, wanted, Text("%.2f x, %.1f KiB a row", ratio, per_row(*result) / 1024),
        ratio <= most);
  }

  std::vector<TargetResult> TakeTargets() { return std::move(targets_); }
  const std::set<std::string>& asked() const { return asked_; }

 private:
  const std::vector<CaseResult>& results_;
  std::vector<TargetResult> targets_;
  std::set<std::string> asked_;
};

void CheckAll(Checker& check) {
  const std::string bert = "layer/bert-base/128", bert8 = "layer/bert-base/8x128";
  const std::string llama = "layer/llama-7b/512", gpt2 = "layer/gpt2-medium/1024";
  for (const std::string& layer : {bert, bert8, llama}) check.Share(layer + "/f32", 0.92);
  check.Share(gpt2 + "/f32", 0.82);
  for (const std::string& layer : {bert, bert8, llama}) check.BF16(layer, 0.85);
  check.BF16(gpt2, 0.70);

  for (const char* types : {"/f32", "/bf16"}) {
    check.NotSlower(bert8 + types, "layer/bert-1-head/8x128" + std::string(types), 1.10,
                    std::string("12 heads of 64 beside one of 768") + types);
  }
  for (const char* types : {"/f32", "/bf16"}) {
    check.Share("decode/gqa-32-8/8x4096" + std::string(types), 0.90);
  }
  for (const char* types : {"/f32", "/bf16"}) {
    check.LinearMemory("long/transformer-base/32768" + std::string(types),
                       "long/transformer-base/4096" + std::string(types), 1.25);
  }

  constexpr double kNoCliff = 0.85;
  const std::pair<const char*, const char*> kNeighbours[] = {
      {"odd/8-heads-of-40/512", "layer/transformer-base/512"},
      {"odd/8-heads-of-80/512", "layer/transformer-base/512"},
      {"odd/bert-base/8x127", "layer/bert-base/8x128"},
      {"odd/bert-base/8x129", "layer/bert-base/8x128"},
      {"odd/gpt2-medium/1000", "layer/gpt2-medium/1024"},
      {"odd/gqa-24-4/512", "layer/gqa-32-8/512"},
      {"odd/20-heads-of-64/1024", "layer/gpt2-medium/1024"},
      {"decode/gqa-24-4/8x4096", "decode/gqa-32-8/8x4096"},
  };
  for (const auto& [name, neighbour] : kNeighbours) {
    for (const char* types : {"/f32", "/bf16"}) {
      check.LikeNeighbour(std::string(name) + types, std::string(neighbour) + types, kNoCliff);
    }
  }
}

}  // namespace

std::vector<TargetResult> CheckTargets(const std::vector<CaseResult>& results) {
  Checker check(results);
  CheckAll(check);
  return check.TakeTargets();
}

bool IsTargetCase(const std::string& name) {
  static const std::set<std::string> kCases = [] {
    const std::vector<CaseResult> none;
    Checker check(none);
    CheckAll(check);
    return check.asked();
  }();
  return kCases.contains(name);
}

}  // namespace attend::bench
