// SPDX-License-Identifier: Apache-2.0
//
// The cache against a plain map: every session of the model is a list of numbers per layer, written
// into and read back from the blocks the cache names.
#include "engine/kv_cache.h"

#include <gtest/gtest.h>

#include <cstring>
#include <list>
#include <random>
#include <span>

#include "tests/support/memory_engine.h"
#include "tests/support/seed.h"

namespace attend {
namespace {

constexpr int64_t kKvBytes = 96 << 10;
constexpr int64_t kScratchBytes = 256 << 10;
constexpr int kLayers =
    3;  // two with history (one may also have a context), one with a context only

std::shared_ptr<const KvLayout> Layout() {
  auto layout = std::make_shared<KvLayout>();
  layout->layers.resize(kLayers);
  layout->layers[0] = {{1, 1, 1, DType::kF32}, true, false, 0};
  layout->layers[1] = {{2, 1, 2, DType::kF32}, true, true, 0};
  layout->layers[2] = {{1, 2, 1, DType::kBF16}, false, true, 0};
  layout->Place();
  return layout;
}

// Stores one number per token at the token's place in a layer's part of a block.
class Tokens {
 public:
  explicit Tokens(MemoryEngine& engine) : engine_(engine) {}
  void Write(std::span<const int64_t> blocks, int64_t token, uint32_t value) {
    std::memcpy(Place(blocks, token), &value, 4);
  }
  uint32_t Read(std::span<const int64_t> blocks, int64_t token) {
    uint32_t value;
    std::memcpy(&value, Place(blocks, token), 4);
    return value;
  }

 private:
  std::byte* Place(std::span<const int64_t> blocks, int64_t token) {
    return engine_.at(blocks[static_cast<size_t>(token / kBlockTokens)] + token % kBlockTokens * 4);
  }
  MemoryEngine& engine_;
};

struct Model {
  KvHistory history;
  std::vector<uint32_t> tokens[kLayers];
  std::vector<uint32_t> context[kLayers];
  std::array<uint64_t, 2> hash[kLayers];
};

class KvCacheTest : public ::testing::Test {
 protected:
  MemoryEngine engine_{kKvBytes + kScratchBytes};
  KvCache cache_{engine_, kKvBytes, kScratchBytes};
  Tokens store_{engine_};
  uint32_t next_value_ = 1;
  int64_t reserved_ = 0;
  int64_t refused_ = 0;

  std::vector<int64_t> Blocks(const KvReservation& reservation, int64_t keys) {
    std::vector<int64_t> blocks = {-1};  // what others have listed
    cache_.ListBlocks(reservation, keys, blocks);
    blocks.erase(blocks.begin());
    return blocks;
  }

  // What a look at the layer sees through a reservation that adds nothing.
  std::vector<uint32_t> ReadBack(Model& model, int layer) {
    KvReservation look;
    const int64_t length = model.history.length[layer];
    EXPECT_EQ(cache_.ReserveLookAhead(model.history, layer, length, 0, look),
              KvCache::Outcome::kOk);
    const std::vector<int64_t> blocks = Blocks(look, length);
    std::vector<uint32_t> values;
    for (int64_t i = 0; i < length; ++i) values.push_back(store_.Read(blocks, i));
    cache_.RollBack(look);
    return values;
  }

  void Check(Model& model) {
    for (int layer = 0; layer < kLayers; ++layer) {
      if (layer < 2) {
        ASSERT_EQ(ReadBack(model, layer), model.tokens[layer]) << "layer " << layer;
      }
      const KvContext& context = model.history.context[layer];
      ASSERT_EQ(context.length, static_cast<int64_t>(model.context[layer].size()));
      for (int64_t i = 0; i < context.length; ++i) {
        ASSERT_EQ(store_.Read(context.blocks, i), model.context[layer][i]);
      }
    }
  }

  // Appends (or rolls back, or looks ahead) as a call would.
  void Append(Model& model, int layer, int64_t position, int64_t count, bool keep, bool ahead) {
    KvReservation reservation;
    const KvCache::Outcome outcome =
        ahead ? cache_.ReserveLookAhead(model.history, layer, position, count, reservation)
              : cache_.ReserveAppend(model.history, layer, position, count, reservation);
    if (outcome != KvCache::Outcome::kOk) {
      ++refused_;
      return;
    }
    ++reserved_;
    const std::vector<int64_t> blocks = Blocks(reservation, position + count);
    std::vector<uint32_t> values(model.tokens[layer].begin(),
                                 model.tokens[layer].begin() + position);
    for (int64_t i = 0; i < count; ++i) {
      values.push_back(next_value_);
      store_.Write(blocks, position + i, next_value_++);
    }
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(store_.Read(blocks, static_cast<int64_t>(i)), values[i]);
    }
    if (keep) {
      cache_.Commit(reservation);
      if (!ahead) model.tokens[layer] = values;
    } else {
      cache_.RollBack(reservation);
    }
  }
};

TEST_F(KvCacheTest, AnAppendThatIsRolledBackLeavesRowsAndMemoryAsTheyWere) {
  Model model{cache_.Open(Layout()), {}, {}, {}};
  Append(model, 0, 0, 100, true, false);
  const int64_t used = cache_.arena().used_bytes();
  Append(model, 0, 30, 200, false, false);  // rewind over committed rows, then fail
  EXPECT_EQ(cache_.arena().used_bytes(), used);
  Check(model);
}

TEST_F(KvCacheTest, ExhaustionChangesNothing) {
  Model model{cache_.Open(Layout()), {}, {}, {}};
  Append(model, 0, 0, 65, true, false);
  const int64_t used = cache_.arena().used_bytes();
  KvReservation reservation;
  EXPECT_EQ(cache_.ReserveAppend(model.history, 0, 65, 1 << 20, reservation),
            KvCache::Outcome::kKvExhausted);
  EXPECT_EQ(cache_.arena().used_bytes(), used);
  EXPECT_EQ(model.history.length[0], 65);
  Check(model);
}

TEST_F(KvCacheTest, ALayerThatLagsNeedsNoMoreMemory) {
  Model model{cache_.Open(Layout()), {}, {}, {}};
  Append(model, 0, 0, 640, true, false);
  const int64_t used = cache_.arena().used_bytes();
  Append(model, 1, 0, 640, true, false);
  EXPECT_EQ(cache_.arena().used_bytes(), used);
  EXPECT_EQ(cache_.HeldBytes(model.history), used);
}

TEST_F(KvCacheTest, AMillionRandomOperationsEqualAPlainMap) {
  std::mt19937_64 random(TestSeed());
  const auto pick = [&](int64_t below) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(below));
  };
  const auto layout = Layout();
  std::list<Model> models;
  for (int step = 0; step < 1000000; ++step) {
    const int64_t choice = pick(100);
    if (models.empty() || (choice < 4 && models.size() < 24)) {
      models.push_back({cache_.Open(layout), {}, {}, {}});
      continue;
    }
    auto at = models.begin();
    std::advance(at, pick(static_cast<int64_t>(models.size())));
    Model& model = *at;
    const int layer = static_cast<int>(pick(2));
    const int64_t length = model.history.length[layer];
    if (choice < 60) {
      const int64_t count = pick(10) == 0 ? pick(150) : pick(4);
      const int64_t position = pick(4) == 0 ? pick(length + 1) : length;
      ASSERT_NO_FATAL_FAILURE(Append(model, layer, position, count, pick(3) != 0, pick(5) == 0));
    } else if (choice < 61) {
      const int64_t cut = pick(model.history.Longest() + 1);
      cache_.Truncate(model.history, cut);
      for (auto& tokens : model.tokens) {
        if (static_cast<int64_t>(tokens.size()) > cut) tokens.resize(static_cast<size_t>(cut));
      }
    } else if (choice < 64 && models.size() < 24) {
      Model fork = model;
      fork.history = cache_.Fork(model.history);
      models.push_back(std::move(fork));
    } else if (choice < 65) {
      cache_.Close(model.history);
      models.erase(at);
      continue;
    } else if (choice < 84) {
      const int cross = 1 + static_cast<int>(pick(2));
      if (model.history.context[cross].present) continue;
      KvReservation reservation;
      const int64_t count = pick(130);
      if (cache_.ReserveContext(model.history, cross, count, {1, 2}, reservation) !=
          KvCache::Outcome::kOk) {
        continue;
      }
      const std::vector<int64_t> blocks = Blocks(reservation, count);
      std::vector<uint32_t> values;
      for (int64_t i = 0; i < count; ++i) {
        values.push_back(next_value_);
        store_.Write(blocks, i, next_value_++);
      }
      if (pick(2) == 0) {
        cache_.Commit(reservation);
        model.context[cross] = values;
      } else {
        cache_.RollBack(reservation);
      }
    } else if (choice < 86) {
      ASSERT_NO_FATAL_FAILURE(Check(model));
    }
  }
  for (Model& model : models) {
    ASSERT_NO_FATAL_FAILURE(Check(model));
    cache_.Close(model.history);
  }
  EXPECT_GT(reserved_, 200000);  // the test really ran
  EXPECT_GT(refused_, 1000);     // and met exhaustion
  EXPECT_EQ(cache_.arena().used_bytes(), 0);
  EXPECT_EQ(cache_.scratch_used_bytes(), 0);
}

}  // namespace
}  // namespace attend
