// SPDX-License-Identifier: Apache-2.0
//
// `attend inspect` with the built binary: what it says of sound and broken checkpoints, for people
// and for machines.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "tests/model/checkpoint_folder.h"
#include "tests/support/golden.h"
#include "tests/support/shell.h"

namespace attend {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

Outcome Inspect(const std::string& arguments) {
  return RunShell(ATTEND_BINARY_DIR "/bin/attend inspect " + arguments);
}

// Standard output alone.
json InspectJson(const std::string& directory) {
  const std::string command = ATTEND_BINARY_DIR "/bin/attend inspect --json " + directory;
  return json::parse(RunShell("(" + command + " 2>/dev/null)").text, nullptr, false);
}

Outcome Inspect(const TestCheckpoint& checkpoint, const std::string& flags = "") {
  TemporaryFolder folder;
  checkpoint.WriteTo(folder);
  return Inspect(flags + " " + folder.path());
}

class GoldenInspectTest : public testing::TestWithParam<std::string> {};

TEST_P(GoldenInspectTest, EveryGoldenVariantIsAcceptedAndAccountedFor) {
  const std::string directory = GoldenDirectory(GetParam());
  const Outcome text = Inspect(directory);
  EXPECT_EQ(text.code, 0) << text.text;
  EXPECT_THAT(text.text, AllOf(StartsWith(directory + ": accepted\nfamily "), HasSubstr("\nlayer "),
                               HasSubstr("\nused: "), HasSubstr("\nignored, ")));
  const json found = InspectJson(directory);
  ASSERT_TRUE(found.is_object());
  EXPECT_EQ(found["accepted"], true);
  EXPECT_EQ(found["model_type"], ReadGolden(GetParam())->model_type);
  std::set<std::string> used;
  for (const json& layer : found["layers"]) {
    EXPECT_FALSE(layer["tensors"].empty());
    for (const json& tensor : layer["tensors"]) used.insert(tensor["name"]);
  }
  size_t held = 0;
  for (const json& tensor : found["tensors"]) {
    const bool is_used = used.contains(tensor["name"]);
    held += is_used;
    EXPECT_NE(tensor["holds"].empty(), is_used) << tensor["name"];
    EXPECT_EQ(tensor["ignored_because"] == "", is_used) << tensor["name"];
  }
  EXPECT_EQ(held, used.size());
}

INSTANTIATE_TEST_SUITE_P(All, GoldenInspectTest, testing::ValuesIn(GoldenVariants()),
                         [](const auto& info) { return info.param; });

TEST(CliInspectTest, TheTextSaysWhatWasUnderstood) {
  const std::string text = Inspect(GoldenDirectory("llama_gqa4")).text;
  for (const char* line :
       {"family       llama\n", "layers       2\n", "\nlayer 0 .. 1\n",
        "64 in, 64 out, 8 query and 2 key/value heads of 8\n", "mask       causal\n",
        "positions  rope over 8 of 8, halves paired, theta 100\n", "yes, 128 B a token in F32\n",
        "sessions     256 B a token in all layers\n", "module     layers.{0 .. 1}.self_attn\n",
        "layers.{0 .. 1}.self_attn.k_proj.weight  F32 [16, 64]  k\n",
        "ignored, outside the attention modules: 12 tensors", "embed_tokens.weight "}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  EXPECT_THAT(Inspect(GoldenDirectory("llama_bf16")).text, HasSubstr("a token in BF16\n"));
  EXPECT_THAT(Inspect(GoldenDirectory("qwen2_sliding")).text,
              AllOf(HasSubstr("\nlayer 0\n"), HasSubstr("\nlayer 1 .. 2\n"),
                    HasSubstr("causal, window 5\n")));
  EXPECT_THAT(Inspect(GoldenDirectory("gpt2_cross")).text,
              AllOf(HasSubstr("\nlayer {0 .. 1}.cross\n"), HasSubstr("cross-attention\n"),
                    HasSubstr("[36, 108]  q, k, v\n")));
  EXPECT_THAT(Inspect(GoldenDirectory("bert")).text,
              AllOf(HasSubstr("no: it looks both ways"), HasSubstr("ignored, in an attention"),
                    HasSubstr("attention.output.LayerNorm.weight")));
}

TEST(CliInspectTest, PositionsAreToldWithThetaAndScaling) {
  for (const auto& [variant, rope] :
       {std::pair{"llama_theta10000", "rope over 16 of 16, halves paired, theta 10000\n"},
        {"llama_linear", "rope over 12 of 12, halves paired, theta 100, linear scaling by 4\n"},
        {"llama_llama3",
         "rope over 16 of 16, halves paired, theta 100, llama3 scaling by 4 over 64 positions, "
         "frequency factors 1 and 4\n"}}) {
    EXPECT_THAT(Inspect(GoldenDirectory(variant)).text, HasSubstr(rope));
  }
  const json rope = InspectJson(GoldenDirectory("llama_linear"))["layers"][1]["rope"];
  EXPECT_EQ(rope["from"], "theta 100, linear scaling by 4");
  EXPECT_EQ(rope["inverse_frequency"].size(), 6u);
  EXPECT_EQ(rope["inverse_frequency"][0], 0.25);
  EXPECT_TRUE(InspectJson(GoldenDirectory("bert"))["layers"][0]["rope"].is_null());
}

TEST(CliInspectTest, LayersOfDifferentThetaAndWindowAreToldApart) {
  TestCheckpoint checkpoint = GoldenCheckpoint("qwen3");
  checkpoint.config["use_sliding_window"] = true;
  checkpoint.config["sliding_window"] = 5;
  checkpoint.config["layer_types"] = {"full_attention", "sliding_attention"};
  checkpoint.config["rope_parameters"] = {
      {"full_attention", {{"rope_type", "default"}, {"rope_theta", 1e6}}},
      {"sliding_attention", {{"rope_type", "linear"}, {"rope_theta", 7}, {"factor", 2.5}}}};
  EXPECT_THAT(Inspect(checkpoint).text,
              AllOf(HasSubstr("\nlayer 0\n"), HasSubstr("mask       causal\n"),
                    HasSubstr("halves paired, theta 1e+06\n"), HasSubstr("\nlayer 1\n"),
                    HasSubstr("mask       causal, window 5\n"),
                    HasSubstr("halves paired, theta 7, linear scaling by 2.5\n"),
                    HasSubstr("q and k normalised per head with eps 1e-06\n")));
  checkpoint.config["layer_types"] = {"sliding_attention", "sliding_attention"};
  EXPECT_THAT(Inspect(checkpoint).text, HasSubstr("\nlayer 0 .. 1\n"));
}

TEST(CliInspectTest, TensorsArePrintedOneByOneOnRequest) {
  const Outcome all = Inspect("--tensors " + GoldenDirectory("llama_gqa4"));
  EXPECT_EQ(all.code, 0);
  EXPECT_THAT(all.text,
              AllOf(HasSubstr("layers.1.self_attn.k_proj.weight "),
                    HasSubstr("model-00005-of-00007.safetensors"), Not(HasSubstr("{0 .. 1}.mlp"))));
}

TEST(CliInspectTest, ARefusedCheckpointSaysWhyAndWhatCouldBeRead) {
  TestCheckpoint checkpoint = GoldenCheckpoint("llama");
  const std::string count = std::to_string(checkpoint.tensors.size());
  checkpoint.config["model_type"] = "mamba";
  const Outcome unknown = Inspect(checkpoint);
  EXPECT_EQ(unknown.code, 1);
  EXPECT_THAT(
      unknown.text,
      AllOf(HasSubstr("attend: /"), HasSubstr("model_type: got 'mamba', supported: "),
            HasSubstr(": refused\nmodel_type   mamba\ntensors      " + count + " in 1 file, ")));

  checkpoint = GoldenCheckpoint("llama");
  checkpoint.config["quantization_config"] = {{"bits", 4}};
  EXPECT_THAT(Inspect(checkpoint).text,
              AllOf(HasSubstr("quantization_config"), HasSubstr("model_type   llama\n")));

  checkpoint = GoldenCheckpoint("llama");
  ASSERT_EQ(checkpoint.tensors.erase("model.layers.1.self_attn.k_proj.weight"), 1u);
  const Outcome missing = Inspect(checkpoint, "--tensors");
  EXPECT_EQ(missing.code, 1);
  EXPECT_THAT(
      missing.text,
      AllOf(HasSubstr("'model.layers.1.self_attn.k_proj.weight'"),
            HasSubstr("\nfound: " + std::to_string(checkpoint.tensors.size()) + " tensors")));

  TemporaryFolder folder;
  folder.Write("config.json", "{\"model_type\": 7");
  folder.Write("model.safetensors", "short");
  const Outcome broken = Inspect(folder.path());
  EXPECT_EQ(broken.code, 1);
  EXPECT_THAT(broken.text, AllOf(HasSubstr("config.json: "), HasSubstr("model_type   not readable"),
                                 HasSubstr("not readable: model.safetensors: 5 bytes")));
  const json machine = InspectJson(folder.path());
  ASSERT_TRUE(machine.is_object());
  EXPECT_EQ(machine["accepted"], false);
  EXPECT_THAT(machine["refused_because"].get<std::string>(), HasSubstr("config.json"));
  EXPECT_THAT(machine["tensors_unreadable"].get<std::string>(), HasSubstr("5 bytes"));
  EXPECT_FALSE(machine.contains("layers"));
}

TEST(CliInspectTest, NamesInFilesCannotSteerATerminal) {
  TestCheckpoint checkpoint = GoldenCheckpoint("llama");
  checkpoint.config["model_type"] = "\x1b[31mred\n";
  checkpoint.tensors["a\n\x1b[2J"] = checkpoint.tensors.begin()->second;
  const Outcome hostile = Inspect(checkpoint, "--tensors");
  EXPECT_EQ(hostile.code, 1);
  EXPECT_THAT(hostile.text,
              AllOf(HasSubstr("red\\n"), HasSubstr("a\\n\\x1b[2J"), Not(HasSubstr("\x1b"))));
}

TEST(CliInspectTest, AFolderThatIsNotThereIsWrongUsage) {
  TemporaryFolder folder;
  folder.Write("file", "");
  for (const auto& [path, why] : {std::pair{folder.path() + "/absent", "No such file or directory"},
                                  {folder.path() + "/file", "Not a directory"}}) {
    const Outcome outcome = Inspect(path);
    EXPECT_EQ(outcome.code, 2);
    EXPECT_EQ(outcome.text, "attend: " + path + ": " + why + "\n");
  }
  EXPECT_EQ(Inspect(folder.path()).code, 1);  // a folder, but no checkpoint
}

}  // namespace
}  // namespace attend
