// SPDX-License-Identifier: Apache-2.0
//
// Family tables: the specification of every golden layer, and checkpoints that are wrong in one
// place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "engine/model/checkpoint.h"
#include "engine/util/text.h"
#include "tests/model/checkpoint_folder.h"
#include "tests/support/golden.h"

namespace attend {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

absl::StatusOr<Checkpoint> Load(const TestCheckpoint& checkpoint) {
  TemporaryFolder folder;
  checkpoint.WriteTo(folder);
  return LoadCheckpoint(folder.path());
}

std::string Error(const TestCheckpoint& checkpoint) {
  return std::string(Load(checkpoint).status().message());
}

std::vector<std::string> LayerNames(const Checkpoint& checkpoint) {
  std::vector<std::string> names;
  for (const ModelLayer& layer : checkpoint.layers) names.push_back(layer.name);
  return names;
}

const ModelLayer* FindLayer(const Checkpoint& checkpoint, const std::string& name) {
  for (const ModelLayer& layer : checkpoint.layers) {
    if (layer.name == name) return &layer;
  }
  return nullptr;
}

// Every weight of the layer as floats, for comparing two checkpoints.
std::vector<float> AllWeights(const Checkpoint& checkpoint) {
  std::vector<float> values;
  for (const ModelLayer& layer : checkpoint.layers) {
    const LayerWeights& w = layer.weights;
    for (const WeightView* view : {&w.q, &w.k, &w.v, &w.o, &w.q_bias, &w.k_bias, &w.v_bias,
                                   &w.o_bias, &w.q_norm, &w.k_norm}) {
      if (!view->present()) continue;
      for (int64_t row = 0; row < view->rows; ++row) {
        for (int64_t column = 0; column < view->columns; ++column) {
          values.push_back(view->At(row, column));
        }
      }
    }
  }
  return values;
}

TEST(GoldenVariantsTest, ThirtyVariantsAreThere) { EXPECT_EQ(GoldenVariants().size(), 30u); }

class GoldenVariantTest : public testing::TestWithParam<std::string> {};

TEST_P(GoldenVariantTest, EveryLayerIsWhatItsCasesSay) {
  const absl::StatusOr<Checkpoint> checkpoint = LoadCheckpoint(GoldenDirectory(GetParam()));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const absl::StatusOr<GoldenVariant> golden = ReadGolden(GetParam());
  ASSERT_TRUE(golden.ok()) << golden.status();
  EXPECT_EQ(checkpoint->family, golden->model_type);
  EXPECT_EQ(checkpoint->fingerprint.size(), 32u);
  for (const GoldenCase& expected : golden->cases) {
    SCOPED_TRACE(expected.id);
    const ModelLayer* layer = FindLayer(*checkpoint, expected.layer);
    ASSERT_NE(layer, nullptr) << expected.layer;
    const AttentionSpec& spec = layer->spec;
    EXPECT_EQ(spec.d_model, expected.hidden_states.shape[2]);
    EXPECT_EQ(spec.output_width, expected.output.shape[2]);
    if (!expected.attention_weights.shape.empty()) {
      EXPECT_EQ(spec.q_heads, expected.attention_weights.shape[1]);
    }
    if (expected.role == "cross") {
      EXPECT_TRUE(spec.cross || spec.mask_selectable);
      EXPECT_EQ(spec.context_width, expected.context.shape[2]);
      EXPECT_FALSE(spec.causal);
    } else {
      EXPECT_FALSE(spec.cross);
      EXPECT_TRUE(spec.mask_selectable || spec.causal == expected.causal);
      EXPECT_EQ(spec.window, expected.window_left + 1);
    }
    EXPECT_EQ(layer->weights.q.rows, int64_t{spec.q_heads} * spec.head_dim);
    EXPECT_EQ(layer->weights.k.rows, int64_t{spec.kv_heads} * spec.head_dim);
    EXPECT_EQ(layer->weights.v.rows, int64_t{spec.kv_heads} * spec.v_head_dim);
    EXPECT_EQ(layer->weights.o.rows, spec.output_width);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenVariantTest, testing::ValuesIn(GoldenVariants()),
                         [](const auto& info) { return info.param; });

TEST(FamiliesTest, AnUnknownModelTypeNamesWhatIsSupportedInOneLine) {
  TestCheckpoint checkpoint = GoldenCheckpoint("llama");
  checkpoint.config["model_type"] = "mamba\n2";
  const std::string message = Error(checkpoint);
  EXPECT_THAT(message, AllOf(HasSubstr("model_type: got 'mamba\\n2'"), HasSubstr("bert, roberta"),
                             HasSubstr("torch_merged_qkv")));
  EXPECT_EQ(message.find('\n'), message.npos);
  checkpoint.config.erase("model_type");
  EXPECT_THAT(Error(checkpoint), HasSubstr("model_type: got nothing"));
}

TEST(FamiliesTest, MissingFoldersAndFilesAreNotFound) {
  EXPECT_EQ(LoadCheckpoint("/nowhere/at/all").status().code(), absl::StatusCode::kNotFound);
  TemporaryFolder folder;
  folder.Write("config.json", GoldenCheckpoint("llama").config.dump());
  EXPECT_EQ(LoadCheckpoint(folder.path()).status().code(), absl::StatusCode::kNotFound);
}

TEST(FamiliesTest, KnownPrefixesGiveTheSameWeights) {
  struct Row {
    const char* variant;
    const char* base;
    std::vector<const char*> prefixes;
  };
  const std::vector<Row> rows = {
      {"gpt2", "h.", {"h.", "transformer.h."}},
      {"bert", "encoder.", {"encoder.", "bert.encoder."}},
      {"llama", "model.", {"", "model.", "language_model.model.", "model.language_model."}},
  };
  for (const Row& row : rows) {
    const std::vector<float> expected = AllWeights(*LoadCheckpoint(GoldenDirectory(row.variant)));
    for (const char* prefix : row.prefixes) {
      TestCheckpoint checkpoint = GoldenCheckpoint(row.variant);
      checkpoint.Rename(row.base, prefix);
      const absl::StatusOr<Checkpoint> loaded = Load(checkpoint);
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      EXPECT_EQ(AllWeights(*loaded), expected) << row.variant << " " << prefix;
    }
    EXPECT_FALSE(expected.empty());
  }
}

TEST(FamiliesTest, AnUnknownPrefixListsExpectedAndFoundNames) {
  TestCheckpoint checkpoint = GoldenCheckpoint("llama");
  checkpoint.Rename("model.", "foo.");
  EXPECT_THAT(Error(checkpoint), AllOf(HasSubstr("'model.layers.0.self_attn.q_proj.weight'"),
                                       HasSubstr("'layers.0.self_attn.q_proj.weight'"),
                                       HasSubstr("found"), HasSubstr("'foo.")));
}

TEST(FamiliesTest, TwoMatchingPrefixesAreAmbiguous) {
  TestCheckpoint checkpoint = GoldenCheckpoint("llama");
  checkpoint.tensors["layers.0.self_attn.q_proj.weight"] =
      checkpoint.tensors.at("model.layers.0.self_attn.q_proj.weight");
  EXPECT_THAT(Error(checkpoint), HasSubstr("ambiguous"));
}

TEST(FamiliesTest, LayerOneDoesNotMatchLayerTen) {
  TestCheckpoint checkpoint = GoldenCheckpoint("llama");
  checkpoint.Rename("model.layers.1.", "model.layers.10.");
  EXPECT_THAT(Error(checkpoint), HasSubstr("layer 1: expected tensor 'model.layers.1."));
}

TEST(FamiliesTest, Qwen2BiasesAreUsedAndMustBeThere) {
  TestCheckpoint checkpoint = GoldenCheckpoint("qwen2");
  const std::string bias = "layers.0.self_attn.q_proj.bias";
  ASSERT_TRUE(checkpoint.tensors.contains(bias));
  ASSERT_FALSE(checkpoint.config.contains("attention_bias"));
  const absl::StatusOr<Checkpoint> loaded = Load(checkpoint);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const LayerWeights& weights = loaded->layers[0].weights;
  EXPECT_TRUE(weights.q_bias.present() && weights.k_bias.present() && weights.v_bias.present());
  EXPECT_FALSE(weights.o_bias.present());
  checkpoint.tensors.erase(bias);
  EXPECT_THAT(Error(checkpoint), HasSubstr("expected tensor '" + bias + "'"));
}

TEST(FamiliesTest, LlamaTakesFourBiasesExactlyWhenTheConfigSaysSo) {
  TestCheckpoint checkpoint = GoldenCheckpoint("llama_gqa3_headdim_bias");
  const LayerWeights weights = Load(checkpoint)->layers[0].weights;
  EXPECT_TRUE(weights.q_bias.present() && weights.k_bias.present() && weights.v_bias.present() &&
              weights.o_bias.present());
  checkpoint.config["attention_bias"] = false;
  EXPECT_THAT(Error(checkpoint), AllOf(HasSubstr(".bias' belongs to layer 0")));
}

TEST(FamiliesTest, TensorsOfTheLayerThatTheConfigDoesNotExplainAreRefusedByName) {
  struct Row {
    const char* variant;
    const char* tensor;
  };
  const std::vector<Row> rows = {
      {"qwen2", "layers.1.self_attn.o_proj.bias"},
      {"mistral_full", "model.layers.0.self_attn.q_proj.bias"},
      {"llama", "model.layers.0.self_attn.q_norm.weight"},
      {"bert", "encoder.layer.0.attention.self.distance_embedding.weight"},
      {"bert", "encoder.layer.1.crossattention.self.query.weight"},
      {"gpt2", "h.0.crossattention.c_attn.weight"},
      {"torch_mha", "bias_k"},
      {"torch_mha_nobias", "in_proj_bias"},
      {"torch_merged_qkv_nobias", "qkv.bias"},
      {"torch_merged_qkv_nobias", "out.bias"},
  };
  for (const Row& row : rows) {
    TestCheckpoint checkpoint = GoldenCheckpoint(row.variant);
    ASSERT_FALSE(checkpoint.tensors.contains(row.tensor)) << row.tensor;
    checkpoint.tensors[row.tensor] = Ramp({4}, 0);
    EXPECT_THAT(Error(checkpoint), HasSubstr(std::string("'") + row.tensor + "' belongs to layer"));
  }
}

TEST(FamiliesTest, BuffersAndTensorsOfOtherModulesNeverMatter) {
  TestCheckpoint checkpoint = GoldenCheckpoint("gpt2");
  checkpoint.tensors["h.0.attn.bias"] = Zeros("U8", {1, 1, 8, 8}, 1);
  checkpoint.tensors["h.0.attn.masked_bias"] = Zeros("F64", {}, 8);
  checkpoint.tensors["lm_head.weight"] = Zeros("I64", {3, 4}, 8);
  checkpoint.tensors["h.0.mlp.nan"] = {"F32", {1}, std::string("\xff\xff\xff\xff", 4)};
  EXPECT_EQ(Load(checkpoint).status(), absl::OkStatus());
}

TEST(FamiliesTest, NeededTensorsOfOtherDtypesAreRefusedByName) {
  const std::string name = "model.layers.0.self_attn.q_proj.weight";
  for (const auto& [dtype, bytes] : std::vector<std::pair<const char*, int>>{
           {"F64", 8}, {"I64", 8}, {"I16", 2}, {"U8", 1}, {"BOOL", 1}, {"F8_E4M3", 1}, {"I8", 1}}) {
    TestCheckpoint checkpoint = GoldenCheckpoint("llama");
    checkpoint.tensors[name] = Zeros(dtype, checkpoint.tensors.at(name).shape, bytes);
    EXPECT_THAT(Error(checkpoint), AllOf(HasSubstr("'" + name + "'"), HasSubstr(dtype),
                                         HasSubstr("F32, F16 or BF16")));
  }
}

TEST(FamiliesTest, AWrongShapeIsRefusedWithBothShapes) {
  TestCheckpoint checkpoint = GoldenCheckpoint("gpt2");
  const std::string name = "h.1.attn.c_attn.weight";
  const std::vector<int64_t> shape = checkpoint.tensors.at(name).shape;
  ASSERT_EQ(shape[1], 3 * shape[0]);
  std::swap(checkpoint.tensors.at(name).shape[0], checkpoint.tensors.at(name).shape[1]);
  EXPECT_THAT(Error(checkpoint),
              HasSubstr("'" + name + "': shape " + ShapeText(checkpoint.tensors.at(name).shape) +
                        ", config.json asks for " + ShapeText(shape)));
}

TEST(FamiliesTest, NeededWeightsMustBeFinite) {
  const std::string name = "model.layers.1.self_attn.v_proj.weight";
  for (const float value :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    TestCheckpoint checkpoint = GoldenCheckpoint("llama");
    std::memcpy(checkpoint.tensors.at(name).data.data() + 5 * sizeof(float), &value, sizeof(float));
    EXPECT_THAT(Error(checkpoint), AllOf(HasSubstr("'" + name + "'"), HasSubstr("element 5 is")));
  }
  for (const char* dtype : {"F16", "BF16"}) {
    TestCheckpoint checkpoint = GoldenCheckpoint("llama");
    checkpoint.tensors[name] = Zeros(dtype, checkpoint.tensors.at(name).shape, 2);
    EXPECT_EQ(Error(checkpoint), "");
    std::memcpy(checkpoint.tensors[name].data.data() + 7 * 2,
                dtype[0] == 'F' ? "\0\x7c" : "\x80\x7f", 2);
    EXPECT_THAT(Error(checkpoint), HasSubstr("element 7 is inf")) << dtype;
  }
}

TEST(FamiliesTest, KeyValueHeadsDefaultToQueryHeadsAndMustDivideThem) {
  TestCheckpoint checkpoint = GoldenCheckpoint("llama_linear");
  ASSERT_EQ(checkpoint.config["num_attention_heads"], 4);
  for (auto& [name, tensor] : checkpoint.tensors) {  // two heads in the file, four are wanted
    if (name.ends_with("k_proj.weight") || name.ends_with("v_proj.weight"))
      tensor = Ramp({48, 48}, 0);
  }
  checkpoint.config.erase("num_key_value_heads");
  EXPECT_EQ(Load(checkpoint)->layers[0].spec.kv_heads, 4);
  checkpoint.config["num_key_value_heads"] = nullptr;
  EXPECT_EQ(Load(checkpoint)->layers[0].spec.kv_heads, 4);
  for (const int wrong : {0, 3, 8, -1}) {
    checkpoint.config["num_key_value_heads"] = wrong;
    EXPECT_THAT(Error(checkpoint),
                HasSubstr("num_key_value_heads: got " + std::to_string(wrong) + ", wanted"));
  }
  checkpoint.config["num_key_value_heads"] = 2;  // the file's k_proj has four heads
  EXPECT_THAT(Error(checkpoint), HasSubstr("k_proj.weight': shape ["));
}

TEST(FamiliesTest, SlidingWindowsFollowEachFamilysRule) {
  TestCheckpoint mistral = GoldenCheckpoint("mistral_full");
  EXPECT_EQ(Load(mistral)->layers[0].spec.window, 0);
  mistral.config.erase("sliding_window");
  EXPECT_EQ(Load(mistral)->layers[0].spec.window, 4096);
  mistral.config["sliding_window"] = 0;
  EXPECT_THAT(Error(mistral), HasSubstr("sliding_window: got 0"));
  mistral.config["sliding_window"] = 3;
  mistral.config["layer_types"] = {"full_attention", "sliding_attention"};
  EXPECT_EQ(Load(mistral)->layers[0].spec.window, 0);
  EXPECT_EQ(Load(mistral)->layers[1].spec.window, 3);

  TestCheckpoint qwen = GoldenCheckpoint("qwen2_sliding");
  EXPECT_EQ(Load(qwen)->layers[2].spec.window, 5);
  qwen.config["use_sliding_window"] = false;
  EXPECT_EQ(Load(qwen)->layers[2].spec.window, 0);
  qwen.config["layer_types"] = {"full_attention", "full_attention", "sliding_attention"};
  EXPECT_THAT(Error(qwen), HasSubstr("layer_types: got sliding_attention"));
}

TEST(FamiliesTest, DecodersWithCrossAttentionNameBothModules) {
  const absl::StatusOr<Checkpoint> bert = LoadCheckpoint(GoldenDirectory("bert_decoder"));
  EXPECT_THAT(LayerNames(*bert), ElementsAre("0.self", "0.cross", "1.self", "1.cross"));
  EXPECT_EQ(bert->layers[1].module, "encoder.layer.0.crossattention");
  TestCheckpoint alone = GoldenCheckpoint("bert_decoder");
  alone.config["is_decoder"] = false;
  EXPECT_THAT(Error(alone), HasSubstr("add_cross_attention"));

  TestCheckpoint causal = GoldenCheckpoint("bert");
  causal.config["is_decoder"] = true;
  const absl::StatusOr<Checkpoint> loaded = Load(causal);
  EXPECT_EQ(loaded->layers[0].name, "0");
  EXPECT_TRUE(loaded->layers[0].spec.causal);
}

TEST(FamiliesTest, Gpt2ScaleFollowsItsTwoFlags) {
  const Checkpoint usual = *LoadCheckpoint(GoldenDirectory("gpt2"));
  const double scale = 1 / std::sqrt(static_cast<double>(usual.layers[0].spec.head_dim));
  EXPECT_EQ(usual.layers[2].spec.scale, scale);
  EXPECT_EQ(LoadCheckpoint(GoldenDirectory("gpt2_noscale"))->layers[1].spec.scale, 1.0);
  EXPECT_DOUBLE_EQ(LoadCheckpoint(GoldenDirectory("gpt2_inverse_layer"))->layers[2].spec.scale,
                   scale / 3);
}

TEST(FamiliesTest, PlainModulesLeaveTheMaskToTheCallerUnlessTheyAreCrossOnly) {
  const Checkpoint plain = *LoadCheckpoint(GoldenDirectory("torch_mha"));
  EXPECT_TRUE(plain.layers[0].spec.mask_selectable);
  EXPECT_FALSE(plain.layers[0].spec.cross);
  const Checkpoint cross = *LoadCheckpoint(GoldenDirectory("torch_mha_kdim"));
  EXPECT_TRUE(cross.layers[0].spec.cross);
  EXPECT_EQ(cross.layers[0].spec.context_width, 20);
  TestCheckpoint unequal = GoldenCheckpoint("torch_mha_kdim");
  unequal.config["vdim"] = 24;
  EXPECT_THAT(Error(unequal), HasSubstr("vdim: got 24, wanted kdim 20"));
}

TEST(FamiliesTest, TheFingerprintCoversTheConfigAndTheNeededTensorsOnly) {
  const TestCheckpoint checkpoint = GoldenCheckpoint("llama");
  const std::string original = Load(checkpoint)->fingerprint;
  EXPECT_EQ(Load(checkpoint)->fingerprint, original);
  TestCheckpoint other = checkpoint;
  other.config["vocab_size"] = 49;
  EXPECT_NE(Load(other)->fingerprint, original);
  other = checkpoint;
  other.tensors.at("model.layers.1.self_attn.o_proj.weight").data[0] ^= 1;
  EXPECT_NE(Load(other)->fingerprint, original);
  other = checkpoint;
  other.tensors["unrelated"] = Ramp({2}, 0);
  EXPECT_EQ(Load(other)->fingerprint, original);
}

TEST(FamiliesTest, AbsurdSizesAreRefusedBeforeAnythingIsAllocated) {
  for (const char* key : {"num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim"}) {
    TestCheckpoint checkpoint = GoldenCheckpoint("llama");
    checkpoint.config[key] = int64_t{1} << 60;
    EXPECT_THAT(Error(checkpoint), HasSubstr(std::string(key) + ": got 1152921504606846976"))
        << key;
  }
  TestCheckpoint wide = GoldenCheckpoint("bert");
  wide.config["hidden_size"] = 4096;
  wide.config["num_attention_heads"] = 2;
  EXPECT_THAT(Error(wide), HasSubstr("head_dim: got 2048, wanted 1..1024"));
}

TEST(FamiliesTest, OfEveryTensorTheStoredBytesAreCounted) {
  const Checkpoint checkpoint = *LoadCheckpoint(GoldenDirectory("torch_merged_qkv"));
  EXPECT_EQ(checkpoint.layers[0].weight_bytes, (4 * 36 * 36 + 4 * 36) * 4);
  EXPECT_EQ(LoadCheckpoint(GoldenDirectory("llama_bf16"))->weight_dtype, DType::kBF16);
  EXPECT_EQ(LoadCheckpoint(GoldenDirectory("llama_f16"))->weight_dtype, DType::kF16);
}

}  // namespace
}  // namespace attend
