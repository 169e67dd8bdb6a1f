// SPDX-License-Identifier: Apache-2.0
//
// Plans by hand for small batches, what BuildPlan refuses, and which keys a row sees.
#include "engine/attention_plan.h"

#include <limits>
#include <vector>

#include "tests/support/matchers.h"
#include "tests/support/test_batches.h"

namespace attend {
namespace {

constexpr DType kF32 = DType::kF32;

class AttentionPlanTest : public testing::Test {
 protected:
  AttentionPlanTest() : spec_(PlainSpec(4, 2, 1, 2, 2)), data_(4096) {}

  // `rows` query rows and `new_keys` keys of the same tensor.
  AttendItem Item(int64_t rows, int64_t new_keys, int64_t cached_keys,
                  const std::vector<int64_t>& blocks) {
    AttendItem item;
    item.rows = rows;
    item.new_keys = new_keys;
    item.cached_keys = cached_keys;
    item.first_row = cached_keys;
    item.query = {data_.data(), kF32};
    item.key_source = {data_.data(), kF32};
    item.value_source = {data_.data(), kF32};
    item.output = data_.data();
    item.blocks = blocks;
    return item;
  }
  absl::StatusOr<BatchPlan> Plan(const std::vector<AttendItem>& items) {
    return BuildPlan(3, spec_, DType::kBF16, items);
  }

  AttentionSpec spec_;
  std::vector<float> data_;
};

TEST_F(AttentionPlanTest, QueryRowsAndNewKeysAreOverlappingRangesOfOneMatrix) {
  const std::vector<int64_t> b0{64}, b1{128, 256}, b2{512}, b3{640, 704, 768};
  const std::vector<AttendItem> items{Item(0, 9, 0, b0), Item(5, 5, 70, b1), Item(2, 0, 33, b2),
                                      Item(3, 3, 128, b3)};
  const auto plan = Plan(items);
  ASSERT_THAT(plan, IsOk());
  EXPECT_EQ(plan->layer, 3);
  EXPECT_EQ(plan->spec, &spec_);
  EXPECT_EQ(plan->kv_dtype, DType::kBF16);
  EXPECT_EQ(plan->order, (std::vector<int32_t>{2, 1, 3, 0}));
  EXPECT_EQ(plan->row_begin, (std::vector<int64_t>{0, 2, 7, 10, 10}));
  EXPECT_EQ(plan->new_key_begin, (std::vector<int64_t>{0, 0, 5, 8, 17}));
  EXPECT_EQ(plan->query_rows, 10);
  EXPECT_EQ(plan->key_row_offset, 2);
  EXPECT_EQ(plan->key_rows, 17);
  EXPECT_EQ(plan->input_rows, 19);
  EXPECT_EQ(plan->block_begin, (std::vector<int32_t>{0, 1, 3, 6, 7}));
  EXPECT_EQ(plan->block_address, (std::vector<int64_t>{512, 128, 256, 640, 704, 768, 64}));
}

TEST_F(AttentionPlanTest, CrossAttentionAndRawHaveTwoMatrices) {
  const std::vector<int64_t> blocks{0};
  for (bool raw : {false, true}) {
    spec_ = PlainSpec(raw ? 0 : 4, 2, 1, 2, 2);
    spec_.cross = !raw;
    const auto plan = Plan({Item(3, 7, 0, blocks), Item(2, 0, 5, blocks)});
    ASSERT_THAT(plan, IsOk());
    EXPECT_EQ(plan->query_rows, 5);
    EXPECT_EQ(plan->input_rows, 5);
    EXPECT_EQ(plan->key_rows, 7);
    EXPECT_EQ(plan->key_row_offset, 0);
  }
}

TEST_F(AttentionPlanTest, AnEmptyBatchIsAnEmptyPlan) {
  const auto plan = Plan({});
  ASSERT_THAT(plan, IsOk());
  EXPECT_EQ(plan->items(), 0);
  EXPECT_EQ(plan->input_rows, 0);
}

TEST_F(AttentionPlanTest, OnlyBlocksThatHoldKeysAreTaken) {
  const std::vector<int64_t> blocks{0, 64, 128, 192};
  for (const auto& [keys, wanted] : {std::pair<int64_t, size_t>{0, 0}, {1, 1}, {64, 1}, {65, 2}}) {
    const auto plan = Plan({Item(1, 0, keys, blocks)});
    ASSERT_THAT(plan, IsOk());
    EXPECT_EQ(plan->block_address.size(), wanted) << keys << " keys";
  }
}

TEST_F(AttentionPlanTest, ItemsThatContradictTheSpecAreProgrammerErrors) {
  const std::vector<int64_t> blocks{0};
  const auto refused = [&](const AttendItem& item) {
    EXPECT_THAT(Plan({item}), StatusIs(absl::StatusCode::kInternal));
  };
  AttendItem item = Item(1, 1, 64, blocks);  // needs two blocks
  refused(item);
  item = Item(-1, 0, 0, blocks);
  refused(item);
  item = Item(1, 0, 1, blocks);
  item.output = nullptr;
  refused(item);
  item = Item(0, 1, 0, blocks);
  item.key_source = {};
  refused(item);
  item = Item(0, 17, 0, blocks);
  item.block_tokens = 16;
  refused(item);
  item = Item(2, 3, 0, blocks);  // self-attention whose rows are not its keys
  refused(item);
  item = Item(2, 2, 0, blocks);
  item.key_source.data = data_.data() + 8;
  refused(item);
  spec_ = PlainSpec(0, 2, 1, 2, 2);
  item = Item(0, 1, 0, blocks);
  item.value_source = {};
  refused(item);
}

TEST(VisibleKeysTest, AgreesWithItsDefinitionKeyByKey) {
  AttentionSpec spec;
  for (bool causal : {true, false}) {
    for (int64_t window : {0, 1, 2, 5, 100}) {
      spec.window = window;
      for (int64_t position = -4; position < 16; ++position) {
        for (int64_t keys = 0; keys < 14; ++keys) {
          const KeyRange range = VisibleKeys(spec, causal, position, keys);
          EXPECT_LE(range.begin, range.end);
          for (int64_t key = 0; key < keys; ++key) {
            EXPECT_EQ(key >= range.begin && key < range.end,
                      ReferenceVisible(spec, causal, position, key))
                << "causal " << causal << ", window " << window << ", position " << position
                << ", keys " << keys << ", key " << key;
          }
          if (range.end > range.begin) {
            EXPECT_GE(range.begin, 0);
            EXPECT_LE(range.end, keys);
          }
        }
      }
    }
  }
}

TEST(VisibleKeysTest, TheLargestWindowIsNoWindow) {
  AttentionSpec spec;
  spec.window = std::numeric_limits<int64_t>::max();
  for (bool causal : {true, false}) {
    const KeyRange range = VisibleKeys(spec, causal, 9, 100);
    EXPECT_EQ(range.begin, 0);
    EXPECT_EQ(range.end, causal ? 10 : 100);
    // A row before the first key (more rows than keys): nothing may overflow.
    EXPECT_EQ(VisibleKeys(spec, causal, -5, 100).begin, 0);
    EXPECT_EQ(VisibleKeys(spec, causal, -5, 100).end, causal ? 0 : 100);
  }
}

// Each term of the bound by itself: what it grows by.
class WorkspaceBytesTest : public testing::Test {
 protected:
  WorkspaceBytesTest() : spec_(PlainSpec(64, 8, 2, 12, 20)) {
    spec_.context_width = 48;
    spec_.output_width = 72;
    item_.rows = 100;  // more than are split
    item_.cached_keys = 640;
  }
  int64_t Bytes() const { return WorkspaceBytes(spec_, item_); }

  static constexpr int64_t kRow = 8 * 64                // as given, for the product
                                  + 4 * 8 * (12 + 16)   // queries: projected, padded
                                  + 4 * 8 * 20 + 8 * 8  // attended, statistics
                                  + 8 * 72;             // output
  static constexpr int64_t kTile = 2 * 96;              // a tile of each key head
  static constexpr int64_t kItem = 4096 + 8 * 10;       // with ten blocks
  AttentionSpec spec_;
  AttendItem item_;
  float data_ = 0;
};

TEST_F(WorkspaceBytesTest, RowsAndNewKeys) {
  EXPECT_EQ(Bytes(), kItem + 100 * kRow + 25 * kTile);
  item_.cached_keys -= 30;
  item_.new_keys = 30;
  EXPECT_EQ(Bytes(), kItem + 100 * kRow + 25 * kTile + 30 * (8 * 48 + 4 * 2 * (12 + 20)));
  ++item_.new_keys;  // the first key of an eleventh block
  EXPECT_EQ(Bytes(), kItem + 100 * kRow + 25 * kTile + 31 * (8 * 48 + 4 * 2 * (12 + 20)) + 8);
}

TEST_F(WorkspaceBytesTest, RawRowsComeProjected) {
  spec_.d_model = spec_.context_width = 0;
  spec_.output_width = 0;
  item_.cached_keys -= 30;
  item_.new_keys = 30;
  EXPECT_EQ(Bytes(), kItem + 100 * (kRow - 8 * 64 + 4 * 8 * 12 - 8 * 72 + 8 * 8 * 20) +
                         30 * (8 * 2 * (12 + 20)) + 25 * kTile);
}

TEST_F(WorkspaceBytesTest, FewPackedRowsAreSplitOverKeys) {
  item_.rows = 4;  // of four query heads: 16 packed rows
  EXPECT_EQ(Bytes(), kItem + 4 * (kRow + 2 * 8 * (4 * 20 + 8)) + 2 * kTile);
  item_.sequence_rows = 5;  // the last rows of a longer call are computed like its first ones
  EXPECT_EQ(Bytes(), kItem + 4 * kRow + kTile);
  item_.rows = 5;
  EXPECT_EQ(Bytes(), kItem + 5 * kRow + 2 * kTile);
}

TEST_F(WorkspaceBytesTest, BiasAndAskedWeights) {
  item_.bias = {&data_, 0, 77, 77, 0};
  EXPECT_EQ(Bytes(), kItem + 100 * (kRow + 4 * 77) + 25 * kTile);
  item_.bias.head_stride = 7700;
  EXPECT_EQ(Bytes(), kItem + 100 * (kRow + 4 * 8 * 77) + 25 * kTile);
  item_.bias = {};
  item_.weights.data = &data_;
  item_.weights.head_count = 3;
  item_.weights.row_begin = 10;
  item_.weights.row_end = 17;
  EXPECT_EQ(Bytes(), kItem + 100 * kRow + 3 * 7 * 640 * 4 + 25 * kTile);
}

}  // namespace
}  // namespace attend
