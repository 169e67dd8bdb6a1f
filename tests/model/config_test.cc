// SPDX-License-Identifier: Apache-2.0
//
// config.json: which values are taken from where, and what is refused with which words.
#include "engine/model/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace attend {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int kHeadDim = 8;
constexpr double kTheta = 10000;

Config Parsed(const std::string& text) {
  absl::StatusOr<Config> config = Config::Parse(text);
  EXPECT_EQ(config.status(), absl::OkStatus()) << text;
  return config.ok() ? *config : *Config::Parse("{}");
}

absl::StatusOr<RopeSpec> Rope(const std::string& text,
                              const std::string& layer_type = "full_attention",
                              int head_dim = kHeadDim) {
  const auto read = ReadRope(Parsed(text), head_dim, kTheta, 2048, layer_type);
  if (!read.ok()) return read.status();
  return read->spec;
}

std::vector<double> Plain(double theta, int dim, double divisor = 1) {
  std::vector<double> frequencies;
  for (int i = 0; i < dim / 2; ++i)
    frequencies.push_back(std::pow(theta, -2.0 * i / dim) / divisor);
  return frequencies;
}

TEST(ConfigTest, WhatIsNoStrictJsonObjectIsRefused) {
  for (const char* text : {"", "[]", "{", "{\"a\":1,\"a\":1}", "{\"a\":NaN}", "{} x", "{'a':1}"}) {
    const absl::Status status = Config::Parse(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("config.json")) << text;
  }
}

TEST(ConfigTest, OtherTensorLayoutsAndScoreRulesAreRefused) {
  for (const char* text :
       {R"({"quantization_config":{"bits":4}})", R"({"position_embedding_type":"relative_key"})"}) {
    const std::string message(Config::Parse(text).status().message());
    EXPECT_THAT(message, HasSubstr("config.json: "));
    EXPECT_THAT(message, HasSubstr("wanted"));
  }
  EXPECT_TRUE(Config::Parse(R"({"quantization_config":null})").ok());
  EXPECT_TRUE(Config::Parse(R"({"position_embedding_type":"absolute"})").ok());
}

TEST(ConfigTest, IntegersAreReadUnderAnyAliasAndCheckedAgainstTheirRange) {
  const Config config = Parsed(
      R"({"n_embd":12,"hidden_size":12,"n_head":3,"num_heads":4,"null":null,"big":18446744073709551615,
          "text":"5","real":5.0,"negative":-1})");
  EXPECT_EQ(*config.Integer({"n_embd", "hidden_size"}, std::nullopt, 1, 100), 12);
  EXPECT_EQ(*config.Integer({"null"}, 7, 1, 100), 7);
  EXPECT_EQ(*config.Integer({"absent"}, 7, 1, 100), 7);
  EXPECT_EQ(std::string(config.Integer({"n_head", "num_heads"}, 1, 1, 100).status().message()),
            "config.json: num_heads: got 4, wanted the value of n_head, 3");
  EXPECT_EQ(std::string(config.Integer({"absent"}, std::nullopt, 1, 100).status().message()),
            "config.json: absent: got nothing, wanted an integer, 1..100");
  for (const char* name : {"big", "text", "real", "negative"}) {
    EXPECT_THAT(std::string(config.Integer({name}, 1, 1, 100).status().message()),
                HasSubstr("wanted an integer, 1..100"));
  }
}

TEST(ConfigTest, BooleansAndNumbersAreNotGuessed) {
  const Config config = Parsed(R"({"yes":true,"one":1,"text":"true"})");
  EXPECT_TRUE(*config.Boolean("yes", false));
  EXPECT_TRUE(*config.Boolean("absent", true));
  EXPECT_FALSE(config.Boolean("one", false).ok());
  EXPECT_FALSE(config.Boolean("text", false).ok());
  EXPECT_FALSE(config.Number({"yes"}, 1.0).ok());
  EXPECT_EQ(*config.Number({"one"}, 2.0), 1.0);
}

TEST(RopeTest, ThetaComesFromTheObjectElseTheTopElseTheDefault) {
  EXPECT_EQ(Rope("{}")->inverse_frequency, Plain(kTheta, kHeadDim));
  EXPECT_EQ(Rope(R"({"rope_theta":100})")->inverse_frequency, Plain(100, kHeadDim));
  EXPECT_EQ(
      Rope(R"({"rope_theta":100,"rope_parameters":{"rope_type":"default","rope_theta":500.0}})")
          ->inverse_frequency,
      Plain(500, kHeadDim));
  EXPECT_EQ(Rope(R"({"rope_theta":100,"rope_scaling":null})")->inverse_frequency,
            Plain(100, kHeadDim));
  EXPECT_EQ(Rope(R"({"rope_theta":100,"rope_scaling":{}})")->inverse_frequency,
            Plain(100, kHeadDim));
  EXPECT_EQ(Rope("{}")->dim, kHeadDim);
  EXPECT_EQ(Rope("{}")->pairing, RopePairing::kHalf);
  EXPECT_EQ(Rope("{}")->attention_factor, 1.0);
}

TEST(RopeTest, LinearScalingDividesPositionsUnderBothNames) {
  for (const char* text : {R"({"rope_scaling":{"type":"linear","factor":4}})",
                           R"({"rope_scaling":{"rope_type":"linear","factor":4.0}})",
                           R"({"rope_scaling":{"type":"linear","rope_type":"linear","factor":4}})",
                           R"({"rope_parameters":{"rope_type":"linear","factor":4}})"}) {
    EXPECT_EQ(Rope(text)->inverse_frequency, Plain(kTheta, kHeadDim, 4)) << text;
  }
}

TEST(RopeTest, ANonEmptyRopeScalingReplacesRopeParameters) {
  EXPECT_EQ(Rope(R"({"rope_scaling":{"type":"linear","factor":4},
                     "rope_parameters":{"rope_type":"default","rope_theta":7}})")
                ->inverse_frequency,
            Plain(kTheta, kHeadDim, 4));
}

TEST(RopeTest, ParametersPerLayerTypeArePickedByType) {
  const std::string text = R"({"rope_parameters":{
      "full_attention":{"rope_type":"linear","factor":2,"rope_theta":100},
      "sliding_attention":{"rope_type":"default","rope_theta":7}}})";
  EXPECT_EQ(Rope(text)->inverse_frequency, Plain(100, kHeadDim, 2));
  EXPECT_EQ(Rope(text, "sliding_attention")->inverse_frequency, Plain(7, kHeadDim));
  EXPECT_FALSE(Rope(R"({"rope_parameters":{"full_attention":{}}})", "sliding_attention").ok());
}

// The values were computed independently (double arithmetic, Llama 3.1's parameters).
TEST(RopeTest, Llama3ScalingKeepsShortWavelengthsAndStretchesLongOnes) {
  const auto rope = Rope(R"({"rope_theta":500000,"rope_scaling":{"rope_type":"llama3","factor":8,
      "low_freq_factor":1,"high_freq_factor":4,"original_max_position_embeddings":8192}})",
                         "full_attention", 128);
  ASSERT_TRUE(rope.ok()) << rope.status();
  const std::vector<std::pair<int, double>> expected = {
      {28, 1},        {29, 0.828168}, {30, 0.643743}, {32, 0.371122},
      {34, 0.190211}, {35, 0.125},    {63, 0.125}};
  const std::vector<double> plain = Plain(500000, 128);
  for (const auto& [i, ratio] : expected) {
    EXPECT_NEAR(rope->inverse_frequency[i] / plain[i], ratio, 1e-6) << i;
  }
}

TEST(RopeTest, PartialRotationTakesTheExponentFromTheRotatedWidth) {
  const auto rope = Rope(R"({"partial_rotary_factor":0.25})", "full_attention", 64);
  EXPECT_EQ(rope->dim, 16);
  EXPECT_NEAR(rope->inverse_frequency[1], 0.316228, 1e-6);
  EXPECT_FALSE(Rope(R"({"partial_rotary_factor":1.5})").ok());
  EXPECT_FALSE(Rope(R"({"partial_rotary_factor":0.4})").ok());  // 3 of 8 dimensions
  EXPECT_FALSE(Rope("{}", "full_attention", 7).ok());
}

TEST(RopeTest, ScalingsThisBuildLacksAreRefusedByName) {
  for (const char* type : {"yarn", "dynamic", "longrope", "su", "mrope", "spiral"}) {
    const std::string text =
        std::string(R"({"rope_scaling":{"rope_type":")") + type + R"(","factor":4}})";
    const std::string message(Rope(text).status().message());
    EXPECT_THAT(message, HasSubstr(std::string("rope_scaling.rope_type: got '") + type + "'"));
    EXPECT_THAT(message, HasSubstr("default, linear, llama3"));
  }
}

TEST(RopeTest, ContradictionsAndBadFactorsAreRefused) {
  for (const char* scaling :
       {R"({"type":"linear","rope_type":"llama3","factor":4})", R"({"type":"linear"})",
        R"({"type":"linear","factor":0})", R"({"type":"linear","factor":-1})",
        R"({"type":"linear","factor":"4"})", R"({"type":"linear","factor":null})",
        R"({"type":7,"factor":4})", R"([])", R"("linear")", R"({"type":"default","rope_theta":0})",
        R"({"type":"llama3","factor":8,"low_freq_factor":4,"high_freq_factor":4})",
        R"({"type":"llama3","factor":8,"low_freq_factor":1})",
        R"({"type":"llama3","low_freq_factor":1,"high_freq_factor":4})"}) {
    const absl::Status status = Rope(std::string("{\"rope_scaling\":") + scaling + "}").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << scaling;
    EXPECT_THAT(std::string(status.message()), HasSubstr("config.json: rope_scaling")) << scaling;
  }
  EXPECT_FALSE(Rope(R"({"rope_theta":-5})").ok());
}

TEST(LayerTypesTest, AListMustNameAKnownTypeForEveryLayer) {
  EXPECT_THAT(*ReadLayerTypes(Parsed("{}"), 2), ElementsAre());
  const Config two = Parsed(R"({"layer_types":["full_attention","sliding_attention"]})");
  EXPECT_THAT(*ReadLayerTypes(two, 2), ElementsAre("full_attention", "sliding_attention"));
  EXPECT_EQ(std::string(ReadLayerTypes(two, 3).status().message()),
            "config.json: layer_types: got 2 values, wanted 3, one per layer");
  EXPECT_FALSE(ReadLayerTypes(two, 1).ok());
  EXPECT_THAT(
      std::string(
          ReadLayerTypes(Parsed(R"({"layer_types":["chunked_attention"]})"), 1).status().message()),
      HasSubstr("'chunked_attention'"));
  EXPECT_FALSE(ReadLayerTypes(Parsed(R"({"layer_types":[1]})"), 1).ok());
  EXPECT_FALSE(ReadLayerTypes(Parsed(R"({"layer_types":"full_attention"})"), 1).ok());
}

}  // namespace
}  // namespace attend
