// SPDX-License-Identifier: Apache-2.0
//
// Written checkpoints load, are reproducible, random enough, and never overwrite anything.
#include "engine/model/make_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "engine/model/checkpoint.h"
#include "tests/model/checkpoint_folder.h"

namespace attend {
namespace {

using testing::HasSubstr;

std::string Content(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

TEST(MakeCheckpointTest, EveryPresetLoadsWithItsShape) {
  struct Row {
    const char* preset;
    const char* family;
    int layers, d_model, q_heads, kv_heads, head_dim;
  };
  const std::vector<Row> rows = {
      {"transformer-base", "torch_multihead_attention", 2, 512, 8, 8, 64},
      {"bert-base", "bert", 2, 768, 12, 12, 64},
      {"gpt2-medium", "gpt2", 2, 1024, 16, 16, 64},
      {"llama-7b", "llama", 1, 4096, 32, 32, 128},
      {"llama2-gqa", "llama", 1, 4096, 32, 8, 128},
  };
  ASSERT_EQ(CheckpointPresets().size(), rows.size());
  for (const Row& row : rows) {
    SCOPED_TRACE(row.preset);
    TemporaryFolder folder;
    const absl::Status made = MakeCheckpoint({.preset = row.preset,
                                              .layers = row.layers,
                                              .seed = 1,
                                              .dtype = DType::kBF16,
                                              .directory = folder.path()});
    ASSERT_EQ(made, absl::OkStatus());
    const absl::StatusOr<Checkpoint> checkpoint = LoadCheckpoint(folder.path());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ(checkpoint->family, row.family);
    ASSERT_EQ(static_cast<int>(checkpoint->layers.size()), row.layers);
    const AttentionSpec& spec = checkpoint->layers.back().spec;
    EXPECT_EQ(spec.d_model, row.d_model);
    EXPECT_EQ(spec.q_heads, row.q_heads);
    EXPECT_EQ(spec.kv_heads, row.kv_heads);
    EXPECT_EQ(spec.head_dim, row.head_dim);
    EXPECT_EQ(checkpoint->weight_dtype, DType::kBF16);
  }
}

TEST(MakeCheckpointTest, OneTransformerLayerHasTheNamesOfTheBareModule) {
  TemporaryFolder folder;
  ASSERT_EQ(MakeCheckpoint({.preset = "transformer-base", .heads = 64, .directory = folder.path()}),
            absl::OkStatus());
  const absl::StatusOr<Checkpoint> checkpoint = LoadCheckpoint(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_EQ(checkpoint->layers.size(), 1u);
  EXPECT_EQ(checkpoint->layers[0].spec.head_dim, 8);
  EXPECT_THAT(Content(folder.path() + "/model.safetensors"), HasSubstr("\"in_proj_weight\""));
}

TEST(MakeCheckpointTest, EqualRecipesGiveEqualBytesAndSeedsDifferentOnes) {
  std::vector<std::string> files;
  for (const uint64_t seed : {7, 7, 8}) {
    TemporaryFolder folder;
    ASSERT_EQ(
        MakeCheckpoint(
            {.preset = "transformer-base", .seed = seed, .directory = folder.path() + "/new/dir"}),
        absl::OkStatus());
    files.push_back(Content(folder.path() + "/new/dir/model.safetensors"));
    EXPECT_FALSE(std::filesystem::exists(folder.path() + "/new/dir/model.safetensors.part"));
  }
  EXPECT_GT(files[0].size(), 4u * 512 * 512 * 4);
  EXPECT_EQ(files[0], files[1]);
  EXPECT_NE(files[0], files[2]);
}

// q of 8 heads of 64 from 512 inputs: the deviation must be 1.3 / sqrt(512). With 2^18 values the
// estimated deviation is off by 1/sqrt(2 n) = 0.14 %, the mean by deviation / 512.
TEST(MakeCheckpointTest, WeightsAreNormalWithTheFanInsDeviation) {
  TemporaryFolder folder;
  ASSERT_EQ(MakeCheckpoint({.preset = "transformer-base", .seed = 3, .directory = folder.path()}),
            absl::OkStatus());
  const absl::StatusOr<Checkpoint> checkpoint = LoadCheckpoint(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const double expected = 1.3 / std::sqrt(512.0);
  for (const WeightView* view :
       {&checkpoint->layers[0].weights.q, &checkpoint->layers[0].weights.o}) {
    double sum = 0, squares = 0;
    for (int64_t row = 0; row < 512; ++row) {
      for (int64_t column = 0; column < 512; ++column) {
        sum += view->At(row, column);
        squares += std::pow(view->At(row, column), 2);
      }
    }
    const double count = 512.0 * 512;
    EXPECT_LT(std::fabs(sum / count), 5 * expected / 512);
    EXPECT_NEAR(std::sqrt(squares / count) / expected, 1, 0.01);
  }
}

TEST(MakeCheckpointTest, ProgressRisesToTheTotal) {
  TemporaryFolder folder;
  int64_t last = 0, total = 0;
  ASSERT_EQ(MakeCheckpoint({.preset = "gpt2-medium",
                            .layers = 1,
                            .directory = folder.path(),
                            .progress =
                                [&](int64_t done, int64_t all) {
                                  EXPECT_GT(done, last);
                                  last = done;
                                  total = all;
                                }}),
            absl::OkStatus());
  EXPECT_EQ(last, total);
  EXPECT_EQ(total, (4 * 1024 * 1024 + 4 * 1024) * 4);
}

TEST(MakeCheckpointTest, AFolderThatIsNotEmptyIsLeftAlone) {
  TemporaryFolder folder;
  folder.Write("notes.txt", "mine");
  EXPECT_EQ(MakeCheckpoint({.preset = "transformer-base", .directory = folder.path()}).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(Content(folder.path() + "/notes.txt"), "mine");
  EXPECT_FALSE(std::filesystem::exists(folder.path() + "/config.json"));
}

TEST(MakeCheckpointTest, RecipesThatCannotBeAreRefusedBeforeAnythingIsWritten) {
  TemporaryFolder folder;
  const std::string target = folder.path() + "/out";
  const std::vector<std::pair<CheckpointRecipe, const char*>> recipes = {
      {{.preset = "gpt5", .directory = target}, "preset: got gpt5, wanted transformer-base"},
      {{.preset = "bert-base", .layers = -1, .directory = target}, "layers: got -1"},
      {{.preset = "bert-base", .heads = -1, .directory = target}, "heads: got -1"},
      {{.preset = "bert-base", .heads = 7, .directory = target}, "got 7"},
      {{.preset = "llama-7b", .heads = 2, .directory = target}, "head_dim: got 2048"},
      {{.preset = "llama2-gqa", .heads = 4, .directory = target}, "num_key_value_heads: got 8"},
      {{.preset = "bert-base", .dtype = DType::kI8, .directory = target}, "dtype: got I8"},
      {{.preset = "bert-base"}, "directory"},
  };
  for (const auto& [recipe, message] : recipes) {
    const absl::Status status = MakeCheckpoint(recipe);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
  EXPECT_FALSE(std::filesystem::exists(target));
}

}  // namespace
}  // namespace attend
