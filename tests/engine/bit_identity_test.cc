// SPDX-License-Identifier: Apache-2.0
//
// A row's bits depend only on its query, its visible keys and values, and the layer: random mixed
// batches, whole, in pieces, in chunks, on 1, 2 and 8 threads, against every sequence alone in one
// call. Engines that promise less (SameBitsInPieces) owe pieces the oracle's bounds.
#include <algorithm>
#include <memory>
#include <vector>

#include "tests/support/engine_cases.h"
#include "tests/support/seed.h"

namespace attend {
namespace {

constexpr DType kF32 = DType::kF32;

struct Setting {
  AttentionSpec spec;
  DType weight = kF32;  // of a layer
  DType kv = kF32;
};

AttentionSpec RandomSpec(Random& random, bool raw) {
  const int widths[] = {8, 16, 20, 40, 64, 128};
  const int groups[] = {1, 2, 3, 4, 8};
  const int kv_heads = static_cast<int>(Uniform(random, 1, 2));
  const int q_heads = kv_heads * groups[Uniform(random, 0, 4)];
  const int d_model = raw ? 0 : static_cast<int>(Uniform(random, 1, 12) * 16);
  AttentionSpec spec = PlainSpec(d_model, q_heads, kv_heads, widths[Uniform(random, 0, 5)],
                                 widths[Uniform(random, 0, 5)]);
  spec.causal = Uniform(random, 0, 2) > 0;
  if (Uniform(random, 0, 2) == 0) spec.window = Uniform(random, 1, 300);
  if (Uniform(random, 0, 3) == 0) spec.softcap = 4;
  if (Uniform(random, 0, 3) == 0) spec.sinks.assign(static_cast<size_t>(q_heads), 0.5f);
  if (Uniform(random, 0, 3) == 0) spec.alibi_slopes.assign(static_cast<size_t>(q_heads), 0.03f);
  if (!raw && Uniform(random, 0, 1) == 0) spec.rope = PlainRope(RopePairing::kHalf, 8);
  return spec;
}

// A sequence on its way through batches. A causal one is cut into pieces that append and attend;
// others append all keys by chunks, then attend by chunks of rows (as the runtime does with work
// above a batch).
class Walk {
 public:
  Walk(TestSequence* sequence, bool in_pieces) : sequence_(sequence), in_pieces_(in_pieces) {}

  bool done() const { return keys_ == sequence_->keys && rows_ == sequence_->rows; }

  AttendItem Next(Random& random) {
    const int64_t keys_left = sequence_->keys - keys_, rows_left = sequence_->rows - rows_;
    if (!in_pieces_) return Take(rows_left, keys_left);
    if (sequence_->causal && !sequence_->own_source) {
      const int64_t piece = Piece(random, keys_left);
      return Take(piece, piece);
    }
    if (keys_left > 0) return Take(0, Piece(random, keys_left));
    return Take(Piece(random, rows_left), 0);
  }

 private:
  // Single rows (decode), a few, or many.
  static int64_t Piece(Random& random, int64_t left) {
    const int64_t most[] = {1, 3, 17, 64, 200, 1000};
    return std::min(left, Uniform(random, 1, most[Uniform(random, 0, 5)]));
  }
  AttendItem Take(int64_t rows, int64_t keys) {
    const AttendItem item = sequence_->Item(rows_, rows_ + rows, keys_, keys_ + keys);
    rows_ += rows;
    keys_ += keys;
    return item;
  }

  TestSequence* sequence_;
  bool in_pieces_;
  int64_t rows_ = 0, keys_ = 0;
};

class BitIdentityTest : public EngineTest {
 protected:
  std::vector<TestSequence> RandomSequences(const AttentionSpec& spec, DType kv) {
    const int64_t most[] = {1, 20, 70, 140, 1200};
    std::vector<TestSequence> sequences;
    for (int64_t count = Uniform(random, 2, 6); count > 0; --count) {
      int64_t keys = Uniform(random, 1, most[Uniform(random, 0, 4)]);
      // The first of a raw batch always spans segments: they are cheap there.
      if (spec.raw() && sequences.empty()) keys = Uniform(random, 1025, 2100);
      int64_t rows = keys;
      if (spec.raw() || spec.cross) rows = Uniform(random, 1, most[Uniform(random, 0, 3)]);
      const DType input = Uniform(random, 0, 1) == 0 ? kF32 : DType::kBF16;
      sequences.push_back(RandomSequence(random, spec, kv, input, kF32, rows, keys));
      if (Uniform(random, 0, 4) == 0) {
        const int64_t columns = std::min<int64_t>(keys, 100);
        sequences.back().AddBias(random, 1, keys - columns, columns, 0.2);
      }
      // A whole history that fits may use a short block.
      if (keys <= 48 && Uniform(random, 0, 1) == 0) {
        sequences.back().block_tokens = static_cast<int32_t>((keys + 15) / 16 * 16);
      }
    }
    return sequences;
  }

  // Every sequence alone, whole.
  void RunAlone(std::vector<TestSequence>& sequences, int layer, const Setting& setting) {
    space->Reset();
    for (TestSequence& sequence : sequences) {
      TakeBlocks(sequence);
      const AttendItem item = sequence.Whole();
      ASSERT_THAT(RunBatch(*engine, layer, setting.spec, setting.kv, {&item, 1}), IsOk());
    }
  }

  // All sequences on their way at once, a random choice of them in every batch, in random order.
  void RunMixed(std::vector<TestSequence>& sequences, int layer, const Setting& setting,
                bool in_pieces) {
    space->Reset();
    std::vector<Walk> walks;
    for (TestSequence& sequence : sequences) {
      TakeBlocks(sequence);
      sequence.output.FillRows(0, sequence.rows, 77);
      walks.emplace_back(&sequence, in_pieces);
    }
    while (!std::all_of(walks.begin(), walks.end(), [](const Walk& walk) { return walk.done(); })) {
      std::vector<AttendItem> items;
      std::shuffle(walks.begin(), walks.end(), random);
      for (Walk& walk : walks) {
        if (!walk.done() && (items.empty() || Uniform(random, 0, 2) > 0)) {
          items.push_back(walk.Next(random));
          items.back().group = static_cast<int32_t>(items.size() - 1);
        }
      }
      ASSERT_THAT(RunBatch(*engine, layer, setting.spec, setting.kv, items), IsOk());
    }
  }

  void Try(const Setting& setting, const LayerWeights* weights, int layer,
           const std::string& compute) {
    DType compute_dtype = kF32;
    const auto restart = [&](int threads) {
      Restart(compute, threads);
      if (weights == nullptr) return;
      auto info = engine->AddLayer(setting.spec, *weights);
      ASSERT_THAT(info, IsOk());
      compute_dtype = info->compute_dtype;
    };
    restart(1);
    std::vector<TestSequence> sequences = RandomSequences(setting.spec, setting.kv);
    RunAlone(sequences, layer, setting);
    const std::vector<TestSequence> alone = sequences;
    for (int threads : {1, 2, 8}) {
      if (GetParam().cuda() && threads != 2) continue;  // its work has no host threads
      restart(threads);
      for (bool in_pieces : {false, true}) {
        RunMixed(sequences, layer, setting, in_pieces);
        for (size_t i = 0; i < sequences.size(); ++i) {
          SCOPED_TRACE(testing::Message()
                       << threads << " threads, " << (in_pieces ? "pieces" : "whole") << ", rows "
                       << sequences[i].rows << ", keys " << sequences[i].keys << ", columns "
                       << sequences[i].output.columns);
          if (!in_pieces || SameBitsInPieces(GetParam())) {
            EXPECT_TRUE(SameBits(kF32, sequences[i].output.bytes, alone[i].output.bytes));
          } else {
            Compare(sequences[i],
                    Expected(sequences[i], weights == nullptr ? LayerWeights() : *weights,
                             compute_dtype));
          }
        }
      }
    }
  }
};

TEST_P(BitIdentityTest, RawSequencesHaveTheSameBitsAloneInBatchesAndInPieces) {
  random.seed(TestSeed());
  for (int round = 0; round < 12; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    const DType kv[] = {kF32, DType::kBF16, DType::kF16};
    Try({RandomSpec(random, true), kF32, kv[round % 3]}, nullptr, -1, "auto");
  }
}

TEST_P(BitIdentityTest, LayersHaveTheSameBitsAloneInBatchesAndInPieces) {
  random.seed(TestSeed());
  for (DType weight : {kF32, DType::kBF16}) {
    for (int round = 0; round < 8; ++round) {
      SCOPED_TRACE(testing::Message() << DTypeName(weight) << " weights, round " << round);
      AttentionSpec spec = RandomSpec(random, false);
      if (round == 7) {
        spec.cross = true;
        spec.context_width = 48;
        spec.causal = false;
        spec.rope = {};
      }
      const TestLayer layer(random, spec, weight);
      const DType kv = round % 2 == 0 ? weight : kF32;
      Try({layer.spec(), weight, kv}, &layer.weights(), 0, round % 3 == 0 ? "fp32" : "auto");
      if (weight == DType::kBF16 && HasBf16Products(GetParam())) {
        Try({layer.spec(), weight, kv}, &layer.weights(), 0, "bf16");
      }
    }
  }
}

// The widths of real layers: several column panels, and row counts over every kernel's tile edges.
TEST_P(BitIdentityTest, WideLayersHaveTheSameBitsForEveryRowCount) {
  random.seed(TestSeed());
  const std::pair<DType, std::string> products[] = {
      {kF32, "fp32"}, {DType::kBF16, "fp32"}, {DType::kBF16, "bf16"}};
  for (const auto& [weight, compute] : products) {
    if (compute == "bf16" && !HasBf16Products(GetParam())) continue;
    AttentionSpec spec = PlainSpec(768, 12, 12, 64, 64);
    spec.causal = true;
    const TestLayer layer(random, spec, weight);
    Restart(compute, 2);
    auto info = engine->AddLayer(layer.spec(), layer.weights());
    ASSERT_THAT(info, IsOk());
    TestSequence sequence = RandomSequence(random, layer.spec(), weight, kF32, kF32, 300, 300);
    std::vector<TestSequence> sequences{sequence};
    Run(sequences, 0);
    const TestTensor whole = sequences[0].output;
    BoundedRows expected;
    if (!SameBitsInPieces(GetParam())) {
      expected = Expected(sequences[0], layer.weights(), info->compute_dtype).output;
    }
    for (int64_t rows : {1, 2, 5, 6, 7, 15, 16, 17, 31, 32, 33, 64, 65, 127, 129}) {
      space->Reset();
      TakeBlocks(sequences[0]);
      const AttendItem item = sequences[0].Item(0, rows, 0, rows);
      sequences[0].output.FillRows(0, rows, 0);
      ASSERT_THAT(RunBatch(*engine, 0, layer.spec(), weight, {&item, 1}), IsOk());
      SCOPED_TRACE(testing::Message()
                   << rows << " rows, " << DTypeName(weight) << " weights, compute " << compute);
      if (SameBitsInPieces(GetParam())) {
        const auto bytes = static_cast<size_t>(rows * 768 * 4);
        EXPECT_TRUE(SameBits(kF32, std::span(sequences[0].output.bytes).first(bytes),
                             std::span(whole.bytes).first(bytes)));
      } else {
        BoundedRows first(rows, 768);
        std::copy_n(expected.value.begin(), rows * 768, first.value.begin());
        std::copy_n(expected.error.begin(), rows * 768, first.error.begin());
        EXPECT_TRUE(MatchesReference(kF32, sequences[0].output.bytes.data(), first));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, BitIdentityTest, testing::ValuesIn(EngineCases()),
                         EngineCaseName);

}  // namespace
}  // namespace attend
