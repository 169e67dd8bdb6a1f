// SPDX-License-Identifier: Apache-2.0
//
// What every engine owes its callers, 4: KV memory. What was appended can be read, moved to other
// blocks, written into other histories and is the same there; and what the engine says about
// itself.
#include <algorithm>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/engine_cases.h"

namespace attend {
namespace {

constexpr DType kF32 = DType::kF32;

class EngineMemoryTest : public EngineTest {
 protected:
  std::vector<std::byte> Read(const KvGeometry& geometry, const std::vector<int64_t>& blocks,
                              int64_t first, int64_t keys) {
    std::vector<std::byte> bytes(static_cast<size_t>(keys * geometry.TokenBytes()));
    EXPECT_THAT(engine->ReadKv({geometry, blocks, first, keys}, bytes), IsOk());
    return bytes;
  }
  std::vector<std::byte> RandomBytes(int64_t count) {
    std::vector<std::byte> bytes(static_cast<size_t>(count));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    return bytes;
  }
};

const KvGeometry kGeometries[] = {{1, 1, 1, DType::kF32},    {2, 40, 24, DType::kF32},
                                  {3, 12, 20, DType::kBF16}, {1, 256, 1, DType::kF16},
                                  {2, 7, 9, DType::kF16},    {8, 64, 64, DType::kBF16}};

TEST_P(EngineMemoryTest, RowsReadBackAsWritten) {
  std::vector<KvGeometry> geometries(std::begin(kGeometries), std::end(kGeometries));
  if (engine->info().keeps_i8) geometries.push_back({3, 13, 20, DType::kI8});
  for (const KvGeometry& geometry : geometries) {
    for (int64_t keys : {1, 63, 64, 65, 200}) {
      const std::vector<int64_t> blocks = space->Take(geometry, keys);
      const std::vector<std::byte> bytes = RandomBytes(keys * geometry.TokenBytes());
      ASSERT_THAT(engine->WriteKv({geometry, blocks, 0, keys}, bytes), IsOk());
      EXPECT_EQ(Read(geometry, blocks, 0, keys), bytes);
    }
  }
}

TEST_P(EngineMemoryTest, PartsOfRowsReadAndWriteLikeTheWhole) {
  const int64_t keys = 200;
  for (const KvGeometry& geometry : kGeometries) {
    const std::vector<int64_t> blocks = space->Take(geometry, keys);
    std::vector<std::byte> whole = RandomBytes(keys * geometry.TokenBytes());
    ASSERT_THAT(engine->WriteKv({geometry, blocks, 0, keys}, whole), IsOk());
    const int64_t k_row = geometry.kv_heads * geometry.head_dim * DTypeBytes(geometry.dtype);
    const int64_t v_row = geometry.TokenBytes() - k_row;
    for (int i = 0; i < 20; ++i) {
      const int64_t first = Uniform(random, 0, keys - 1), count = Uniform(random, 1, keys - first);
      const std::vector<std::byte> part = RandomBytes(count * geometry.TokenBytes());
      std::copy(part.begin(), part.begin() + count * k_row, whole.begin() + first * k_row);
      std::copy(part.begin() + count * k_row, part.end(),
                whole.begin() + keys * k_row + first * v_row);
      ASSERT_THAT(engine->WriteKv({geometry, blocks, first, count}, part), IsOk());
      EXPECT_EQ(Read(geometry, blocks, first, count), part);
      EXPECT_EQ(Read(geometry, blocks, 0, keys), whole);
    }
  }
}

TEST_P(EngineMemoryTest, RawKeysAndValuesAreStoredRoundedToTheKvType) {
  AttentionSpec spec = PlainSpec(0, 4, 2, 24, 20);
  for (DType kv : {DType::kF32, DType::kBF16, DType::kF16}) {
    std::vector<TestSequence> sequences;
    sequences.push_back(RandomSequence(random, spec, kv, kF32, kF32, 1, 130));
    Run(sequences);
    const KvGeometry geometry = GeometryOf(spec, kv);
    const std::vector<std::byte> stored = Read(geometry, sequences[0].blocks, 0, 130);
    for (int64_t i = 0; i < 130 * 88; ++i) {
      const bool key = i < 130 * 48;
      const TestTensor& source = key ? sequences[0].source : sequences[0].value;
      const float given = LoadFloat(kF32, source.bytes.data(), key ? i : i - 130 * 48);
      ASSERT_EQ(LoadFloat(kv, stored.data(), i), RoundTo(kv, given)) << "element " << i;
    }
  }
}

TEST_P(EngineMemoryTest, AProjectedHistoryHoldsTheReferenceKeysAndValues) {
  AttentionSpec spec = PlainSpec(40, 4, 2, 16, 12);
  spec.causal = true;
  spec.rope = PlainRope(RopePairing::kHalf, 16);
  spec.qk_norm = QkNorm::kRmsPerHead;
  spec.qk_norm_eps = 1e-6f;
  for (DType kv : {DType::kF32, DType::kBF16, DType::kF16}) {
    Restart();
    const TestLayer layer(random, spec, kF32);
    ASSERT_THAT(engine->AddLayer(layer.spec(), layer.weights()), IsOk());
    std::vector<TestSequence> sequences;
    sequences.push_back(RandomSequence(random, layer.spec(), kv, kF32, kF32, 130, 130));
    Run(sequences, 0);
    const ReferenceResult expected = Expected(sequences[0], layer.weights());
    const auto stored = Read(GeometryOf(spec, kv), sequences[0].blocks, 0, 130);
    EXPECT_TRUE(MatchesReference(kv, stored.data(), expected.keys));
    EXPECT_TRUE(MatchesReference(kv, stored.data() + 130 * 32 * DTypeBytes(kv), expected.values));
  }
}

TEST_P(EngineMemoryTest, AHistoryMovedByRowsOrByBlocksGivesTheSameBits) {
  AttentionSpec spec = PlainSpec(0, 4, 2, 24, 20);
  spec.causal = true;
  for (DType kv : {DType::kF32, DType::kBF16, DType::kF16}) {
    std::vector<TestSequence> sequences;
    sequences.push_back(RandomSequence(random, spec, kv, kF32, kF32, 10, 1100));
    Run(sequences);
    TestSequence& sequence = sequences[0];
    const TestTensor first = sequence.output;
    const std::vector<int64_t> original = sequence.blocks;
    const KvGeometry geometry = GeometryOf(spec, kv);
    const auto attend_again = [&] {
      sequence.output.FillRows(0, 10, 0);
      const AttendItem item = sequence.Item(0, 10, 1100, 1100);
      ASSERT_THAT(RunBatch(*engine, -1, spec, kv, {&item, 1}), IsOk());
      EXPECT_TRUE(SameBits(kF32, sequence.output.bytes, first.bytes));
    };

    TakeBlocks(sequence);
    const std::vector<std::byte> rows = Read(geometry, original, 0, 1100);
    ASSERT_THAT(engine->WriteKv({geometry, sequence.blocks, 0, 1100}, rows), IsOk());
    attend_again();

    TakeBlocks(sequence);
    std::vector<BlockCopy> copies;
    for (size_t i = 0; i < original.size(); ++i) {
      copies.push_back({original[i], sequence.blocks[i], geometry.BlockBytes()});
    }
    ASSERT_THAT(engine->CopyBlocks(copies), IsOk());
    // The copies stand alone: overwriting the originals doesn't show.
    ASSERT_THAT(
        engine->WriteKv({geometry, original, 0, 1100}, RandomBytes(1100 * geometry.TokenBytes())),
        IsOk());
    attend_again();
  }
}

TEST_P(EngineMemoryTest, DiscardedMemoryCanBeUsedAgainAndItsNeighboursStay) {
  const KvGeometry geometry{2, 64, 64, DType::kF32};
  const int64_t block_bytes = geometry.BlockBytes();
  // 96 blocks of 64 KiB: whole pages, huge ones too, lie inside the discarded middle.
  std::vector<int64_t> blocks;
  for (int64_t i = 0; i < 96; ++i) blocks.push_back(i * block_bytes);
  const int64_t keys = 96 * kBlockTokens;
  const std::vector<std::byte> bytes = RandomBytes(keys * geometry.TokenBytes());
  ASSERT_THAT(engine->WriteKv({geometry, blocks, 0, keys}, bytes), IsOk());
  const auto low = Read(geometry, blocks, 0, 7 * kBlockTokens);
  const auto high = Read(geometry, blocks, 89 * kBlockTokens, 7 * kBlockTokens);
  engine->Discard(7 * block_bytes, 82 * block_bytes);
  EXPECT_EQ(Read(geometry, blocks, 0, 7 * kBlockTokens), low);
  EXPECT_EQ(Read(geometry, blocks, 89 * kBlockTokens, 7 * kBlockTokens), high);
  ASSERT_THAT(engine->WriteKv({geometry, blocks, 0, keys}, bytes), IsOk());
  EXPECT_EQ(Read(geometry, blocks, 0, keys), bytes);
  engine->Discard(64, 0);
}

TEST_P(EngineMemoryTest, RawAppendOnlyAndAttendOnlyItemsTakePartInOneHistory) {
  AttentionSpec spec = PlainSpec(0, 4, 2, 24, 20);
  spec.causal = true;
  std::vector<TestSequence> sequences;
  sequences.push_back(RandomSequence(random, spec, kF32, kF32, kF32, 20, 150));
  TestSequence& sequence = sequences[0];
  RunAndCompare(sequences);
  const TestTensor whole = sequence.output;
  TakeBlocks(sequence);
  sequence.output.FillRows(0, 20, 0);
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 70}, {70, 71}, {71, 150}}) {
    const AttendItem append = sequence.Item(0, 0, begin, end);
    ASSERT_THAT(RunBatch(*engine, -1, spec, kF32, {&append, 1}), IsOk());
  }
  const AttendItem attend = sequence.Item(0, 20, 150, 150);
  ASSERT_THAT(RunBatch(*engine, -1, spec, kF32, {&attend, 1}), IsOk());
  EXPECT_TRUE(SameBits(kF32, sequence.output.bytes, whole.bytes));
}

TEST_P(EngineMemoryTest, InfoNamesTheEngineAndProgressAdvancesWithWork) {
  EXPECT_EQ(engine->info().engine, GetParam().device);
  if (GetParam().cuda()) {  // the device decides
    EXPECT_THAT(engine->info().isa, testing::MatchesRegex("sm_[0-9]+"));
  } else {
    EXPECT_EQ(engine->info().isa, GetParam().isa);
    EXPECT_EQ(engine->info().threads, 2);
  }
  EXPECT_FALSE(engine->info().device.empty());
  EXPECT_GE(engine->info().batches_in_flight, 1);
  EXPECT_FALSE(engine->info().numerics_id.empty());
  for (const EngineCase& other : EngineCases()) {
    if (other.name == GetParam().name || !WhyNotHere(other).empty()) continue;
    EXPECT_NE(MakeTestEngine(other)->info().numerics_id, engine->info().numerics_id);
  }
  AttentionSpec spec = PlainSpec(0, 4, 2, 24, 20);
  std::vector<TestSequence> sequences;
  sequences.push_back(RandomSequence(random, spec, kF32, kF32, kF32, 100, 100));
  Run(sequences);
  const int64_t first = engine->progress_ns();
  EXPECT_GT(first, 0);
  Run(sequences);
  EXPECT_GT(engine->progress_ns(), first);
}

TEST_P(EngineMemoryTest, Bf16ProductsAreRefusedWhereThereAreNone) {
  if (HasBf16Products(GetParam())) GTEST_SKIP() << "this engine has BF16 products";
  EngineOptions options;
  options.device = GetParam().device;
  options.isa = GetParam().isa;
  options.compute = "bf16";
  EXPECT_THAT(MakeEngine(options), StatusIs(absl::StatusCode::kInvalidArgument));
}

// Steps of one history, so that the second batch reads what the first appends.
TEST_P(EngineMemoryTest, TwoBatchesInFlightGiveTheBitsOfOneAfterAnother) {
  if (engine->info().batches_in_flight < 2) GTEST_SKIP() << "this engine runs one batch at a time";
  for (DType type : {DType::kF32, DType::kBF16}) {
    SCOPED_TRACE(DTypeName(type));
    Restart();
    AttentionSpec spec = PlainSpec(32, 4, 2, 16, 12);
    spec.causal = true;
    const TestLayer layer(random, spec, type);
    ASSERT_THAT(engine->AddLayer(layer.spec(), layer.weights()), IsOk());
    std::vector<TestSequence> sequences;
    for (int64_t keys : {100, 70}) {
      sequences.push_back(RandomSequence(random, layer.spec(), type, kF32, kF32, keys, keys));
      sequences.back().AskWeights({0, 3});
      TakeBlocks(sequences.back());
    }
    // Step `step` of both histories: a prefill, then steps of one row.
    const auto items = [&](int64_t step) {
      std::vector<AttendItem> made;
      for (TestSequence& sequence : sequences) {
        const int64_t begin = step == 0 ? 0 : sequence.keys - 5 + step;
        const int64_t end = step == 0 ? sequence.keys - 4 : begin + 1;
        made.push_back(sequence.Item(begin, end, begin, end));
      }
      return made;
    };
    for (int64_t step = 0; step < 5; ++step) {
      ASSERT_THAT(RunBatch(*engine, 0, layer.spec(), type, items(step)), IsOk());
    }
    const std::vector<TestSequence> expected = sequences;
    for (TestSequence& sequence : sequences) {
      TakeBlocks(sequence);
      sequence.output.FillRows(0, sequence.rows, 77);
      sequence.AskWeights(sequence.weight_heads);
    }
    std::deque<std::pair<std::vector<AttendItem>, BatchPlan>> running;  // borrowed until Wait
    std::deque<Ticket> tickets;
    for (int64_t step = 0; step < 5; ++step) {
      if (tickets.size() == 2) {
        ASSERT_THAT(engine->Wait(tickets.front()), IsOk());
        tickets.pop_front();
        running.pop_front();
      }
      running.push_back({items(step), {}});
      auto plan = BuildPlan(0, layer.spec(), type, running.back().first);
      ASSERT_THAT(plan, IsOk());
      running.back().second = *std::move(plan);
      auto ticket = engine->Start(running.back().second, running.back().first);
      ASSERT_THAT(ticket, IsOk());
      tickets.push_back(*ticket);
    }
    for (Ticket ticket : tickets) ASSERT_THAT(engine->Wait(ticket), IsOk());
    for (size_t i = 0; i < sequences.size(); ++i) {
      EXPECT_TRUE(SameBits(kF32, sequences[i].output.bytes, expected[i].output.bytes));
      EXPECT_EQ(sequences[i].weights, expected[i].weights);
    }
  }
}

// Plain decode steps, the shape that an engine may record once and replay: other lengths, other
// sequences in other places, another layer, another KV type, two in flight. Asking for attention
// weights makes the same rows no plain step, and every one of those is a batch of its own.
TEST_P(EngineMemoryTest, StepsOfChangingSequencesGiveTheBitsOfRowsAlone) {
  constexpr int64_t kSteps = 8;
  std::deque<TestLayer> layers;
  const auto add = [&](int d_model) {
    AttentionSpec spec = PlainSpec(d_model, 4, 2, 16, 12);
    spec.causal = true;
    layers.emplace_back(random, spec, DType::kBF16);
    ASSERT_THAT(engine->AddLayer(layers.back().spec(), layers.back().weights()), IsOk());
  };
  add(32);
  add(32);
  const auto try_steps = [&](int layer, DType kv, const std::vector<int64_t>& lengths) {
    SCOPED_TRACE(testing::Message() << "layer " << layer << ", kv " << DTypeName(kv));
    const AttentionSpec& spec = layers[static_cast<size_t>(layer)].spec();
    space->Reset();
    std::vector<TestSequence> sequences;
    for (int64_t cached : lengths) {
      const int64_t keys = cached + kSteps;
      sequences.push_back(RandomSequence(random, spec, kv, kF32, kF32, keys, keys));
    }
    const auto prefill = [&](std::vector<TestSequence>& all) {
      std::vector<AttendItem> items;
      for (TestSequence& sequence : all) {
        TakeBlocks(sequence);
        const int64_t cached = sequence.keys - kSteps;
        items.push_back(sequence.Item(0, cached, 0, cached));
      }
      ASSERT_THAT(RunBatch(*engine, layer, spec, kv, items), IsOk());
    };
    std::vector<TestSequence> alone = sequences;
    prefill(alone);
    for (TestSequence& sequence : alone) {
      sequence.AskWeights({0});
      for (int64_t row = sequence.keys - kSteps; row < sequence.keys; ++row) {
        const AttendItem item = sequence.Item(row, row + 1, row, row + 1);
        ASSERT_THAT(RunBatch(*engine, layer, spec, kv, {&item, 1}), IsOk());
      }
    }
    prefill(sequences);
    // Every sequence takes part in most of the steps, 5 to 8 in each, in another order.
    std::vector<int64_t> next;
    for (const TestSequence& sequence : sequences) next.push_back(sequence.keys - kSteps);
    constexpr int64_t kItems[kSteps] = {5, 5, 8, 8, 6, 7, 7, 6};
    std::deque<std::pair<std::vector<AttendItem>, BatchPlan>> running;  // borrowed until Wait
    std::deque<Ticket> tickets;
    const auto wait = [&] {
      ASSERT_THAT(engine->Wait(tickets.front()), IsOk());
      tickets.pop_front();
      running.pop_front();
    };
    for (int64_t step = 0; step < kSteps; ++step) {
      if (static_cast<int>(tickets.size()) == engine->info().batches_in_flight) wait();
      running.emplace_back();
      auto& [items, plan] = running.back();
      for (int64_t i = 0; i < kItems[step]; ++i) {
        const auto at = static_cast<size_t>((step * 3 + i) % 8);
        items.push_back(sequences[at].Item(next[at], next[at] + 1, next[at], next[at] + 1));
        items.back().group = static_cast<int32_t>(i);
        ++next[at];
      }
      auto built = BuildPlan(layer, spec, kv, items);
      ASSERT_THAT(built, IsOk());
      plan = *std::move(built);
      auto ticket = engine->Start(plan, items);
      ASSERT_THAT(ticket, IsOk());
      tickets.push_back(*ticket);
    }
    while (!tickets.empty()) wait();
    for (size_t i = 0; i < sequences.size(); ++i) {
      const auto bytes = static_cast<size_t>(next[i] * spec.output_width * 4);
      EXPECT_TRUE(SameBits(kF32, std::span(sequences[i].output.bytes).first(bytes),
                           std::span(alone[i].output.bytes).first(bytes)))
          << "sequence " << i;
    }
  };
  // Two blocks each: what is recorded for five serves eight. Then blocks begin, and keys are split.
  const std::vector<int64_t> alike{65, 70, 80, 90, 100, 110, 115, 119};
  for (DType kv : {DType::kBF16, kF32, DType::kF16}) {
    for (int layer : {0, 1}) try_steps(layer, kv, alike);
  }
  try_steps(0, DType::kBF16, {1, 60, 62, 64, 100, 508, 130, 3});
  add(96);  // working memory grows, and moves
  try_steps(0, DType::kBF16, alike);
}

// Items of a self-attention layer with rows only and with keys only, beside ones with both: three
// ranges of one matrix, none of a whole number of the products' rows.
TEST_P(EngineMemoryTest, LayerAppendOnlyAndAttendOnlyItemsShareABatchWithOthers) {
  for (DType type : {kF32, DType::kBF16}) {
    SCOPED_TRACE(DTypeName(type));
    Restart();
    const TestLayer layer(random, PlainSpec(32, 4, 2, 16, 12), type);
    auto info = engine->AddLayer(layer.spec(), layer.weights());
    ASSERT_THAT(info, IsOk());
    std::vector<TestSequence> sequences;
    for (int64_t keys : {70, 9, 33, 5}) {
      sequences.push_back(RandomSequence(random, layer.spec(), type, kF32, kF32, keys, keys));
      TakeBlocks(sequences.back());
    }
    TestSequence *a = &sequences[0], *b = &sequences[1], *c = &sequences[2], *d = &sequences[3];
    const std::vector<std::vector<AttendItem>> batches = {
        {a->Item(0, 0, 0, 70), d->Item(0, 0, 0, 5)},
        {b->Whole(), c->Item(0, 0, 0, 33), a->Item(0, 67, 70, 70), d->Item(0, 5, 5, 5)},
        {c->Item(0, 33, 33, 33), a->Item(67, 70, 70, 70)}};
    for (std::vector<AttendItem> items : batches) {
      for (size_t i = 0; i < items.size(); ++i) items[i].group = static_cast<int32_t>(i);
      ASSERT_THAT(RunBatch(*engine, 0, layer.spec(), type, items), IsOk());
    }
    for (const TestSequence& sequence : sequences) {
      Compare(sequence, Expected(sequence, layer.weights(), info->compute_dtype));
    }
  }
}

// Padding is zeroed, not hoped to be zero: batches after ones that left NaN everywhere.
TEST_P(EngineMemoryTest, WhatEarlierBatchesLeftBehindChangesNothing) {
  AttentionSpec raw = PlainSpec(0, 4, 2, 24, 20);
  AttentionSpec spec = PlainSpec(20, 3, 1, 9, 5);
  spec.causal = true;
  const TestLayer layer(random, spec, kF32);
  auto info = engine->AddLayer(layer.spec(), layer.weights());
  ASSERT_THAT(info, IsOk());
  for (DType kv : {kF32, DType::kBF16}) {
    for (int slot = 0; slot < 2; ++slot) {
      std::vector<TestSequence> bad;
      bad.push_back(RandomSequence(random, raw, kv, kF32, kF32, 300, 300));
      for (TestTensor* tensor : {&bad[0].query, &bad[0].source, &bad[0].value}) {
        std::fill(tensor->bytes.begin(), tensor->bytes.end(), std::byte{0xff});
      }
      Run(bad);
    }
    for (int slot = 0; slot < 2; ++slot) {
      std::vector<TestSequence> sequences;
      for (int64_t rows : {1, 7, 40}) {
        sequences.push_back(RandomSequence(random, layer.spec(), kv, kF32, kF32, rows, rows));
      }
      RunAndCompare(sequences, info->index, layer.weights(), info->compute_dtype);
    }
  }
}

// The runtime cuts long calls where time and memory say: that must not show.
TEST_P(EngineMemoryTest, WhereACallIsCutIntoChunksChangesNoBit) {
  for (DType kv : {kF32, DType::kBF16}) {
    Restart();
    AttentionSpec spec = PlainSpec(32, 6, 2, 16, 12);
    spec.causal = true;
    const TestLayer layer(random, spec, DType::kBF16);
    ASSERT_THAT(engine->AddLayer(layer.spec(), layer.weights()), IsOk());
    std::vector<TestSequence> sequences;
    sequences.push_back(RandomSequence(random, layer.spec(), kv, kF32, kF32, 600, 600));
    Run(sequences, 0);
    TestSequence& sequence = sequences[0];
    const TestTensor whole = sequence.output;
    for (const int64_t first : {597, 598, 599, 595, 64, 300}) {  // the rest: few rows, and many
      space->Reset();
      TakeBlocks(sequence);
      sequence.output.FillRows(0, 600, 0);
      for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, first}, {first, 600}}) {
        AttendItem chunk = sequence.Item(begin, end, begin, end);
        chunk.sequence_rows = 600;
        ASSERT_THAT(RunBatch(*engine, 0, layer.spec(), kv, {&chunk, 1}), IsOk());
      }
      EXPECT_TRUE(SameBits(kF32, sequence.output.bytes, whole.bytes)) << "cut at " << first;
    }
  }
}

TEST_P(EngineMemoryTest, UnknownComputeTypesAreRefused) {
  EngineOptions options;
  options.device = GetParam().device;
  options.isa = GetParam().isa;
  for (const char* compute : {"fp8", "", "FP32"}) {
    options.compute = compute;
    EXPECT_THAT(MakeEngine(options), StatusIs(absl::StatusCode::kInvalidArgument)) << compute;
  }
  options.compute = "tf32";
  if (!GetParam().cuda()) {  // TF32 is a type of tensor cores
    EXPECT_THAT(MakeEngine(options), StatusIs(absl::StatusCode::kInvalidArgument));
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, EngineMemoryTest, testing::ValuesIn(EngineCases()),
                         EngineCaseName);

TEST(MakeEngineTest, UnknownOptionsAreRefused) {
  EngineOptions options;
  options.device = "cpu";
  options.isa = "sse";
  EXPECT_THAT(MakeEngine(options), StatusIs(absl::StatusCode::kInvalidArgument));
  options = {};
  options.device = "tpu";
  EXPECT_THAT(MakeEngine(options), StatusIs(absl::StatusCode::kInvalidArgument));
  options = {};
  options.compute = "fp8";
  EXPECT_THAT(MakeEngine(options), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(MakeEngineTest, CudaWithoutADeviceIsRefusedWithTheReasonAndAutoTakesTheCpu) {
  const auto automatic = ChooseDevice("auto");
  ASSERT_THAT(automatic, IsOk());
  if (automatic->device == "cuda") GTEST_SKIP() << "there is a device: " << automatic->name;
  EXPECT_EQ(automatic->device, "cpu");
  EXPECT_FALSE(automatic->why.empty());
  EngineOptions options;
  options.device = "cuda";
  const auto made = MakeEngine(options);
  EXPECT_THAT(made, StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(std::string(made.status().message()), testing::HasSubstr(automatic->why));
  options.device = "auto";
  const auto cpu = MakeEngine(options);
  ASSERT_THAT(cpu, IsOk());
  EXPECT_EQ((*cpu)->info().engine, "cpu");
  EXPECT_EQ((*cpu)->info().batches_in_flight, 1);
}

TEST(MakeEngineTest, TheCpuIsChosenWithoutLookingForADevice) {
  const auto cpu = ChooseDevice("cpu");
  ASSERT_THAT(cpu, IsOk());
  EXPECT_EQ(cpu->device, "cpu");
  EXPECT_EQ(cpu->why, "");
  EXPECT_THAT(ChooseDevice("tpu"), StatusIs(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace attend
