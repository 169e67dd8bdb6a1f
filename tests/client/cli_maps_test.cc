// SPDX-License-Identifier: Apache-2.0
//
// `attend run --maps` with the built binary and a scripted server: which files appear, and what is
// refused before anything is sent. What the pictures show is heatmap_test.cc's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "tests/client/cli_fixture.h"
#include "tests/client/png_file.h"

namespace attend::client {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

class CliMapsTest : public CliTest {
 protected:
  void WriteText(const std::string& name, const std::string& text) const {
    std::ofstream(directory_ + "/" + name) << text;
  }
  // Names of the files of a folder, in order.
  std::vector<std::string> Files(const std::string& folder) const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory_ + "/" + folder)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  PngFile Picture(const std::string& path) const { return ReadPng(directory_ + "/" + path); }
  // Both sequences of the input, two rows and two heads each.
  void AnswerTwoHeads(int sequences) {
    server_.weights.assign(
        static_cast<size_t>(sequences),
        FakeAttention::Floats({2, 2, 2}, {1, 0, 0.5f, 0.5f, 1, 0, 0.25f, 0.75f}));
  }
};

TEST_F(CliMapsTest, EveryLayerGetsASheetAndAPictureOfEachHead) {
  AnswerTwoHeads(1);
  const Outcome run = Run("run --layer decoder.0/self --input x.npy --maps new/maps");
  EXPECT_EQ(run.code, 0) << run.text;
  EXPECT_THAT(run.text, HasSubstr("3 pictures in new/maps"));
  EXPECT_THAT(Files("new/maps"),
              ElementsAre("layer-decoder-0-self-head-00.png", "layer-decoder-0-self-head-01.png",
                          "layer-decoder-0-self.png"));
  for (const std::string& name : Files("new/maps")) {
    EXPECT_FALSE(Picture("new/maps/" + name).bytes.empty()) << name;
  }
  EXPECT_EQ(server_.seen("Attend").at(0).attend.weights().mode(), v1::WeightsRequest::FULL);
}

TEST_F(CliMapsTest, SequencesAreNumbered) {
  AnswerTwoHeads(2);
  ASSERT_EQ(Run("run --layer 0 --input x.npy --maps m").code, 0);
  const std::vector<std::string> files = Files("m");
  EXPECT_EQ(files.size(), 6u);
  EXPECT_EQ(std::count(files.begin(), files.end(), "layer-0-sequence-1-head-01.png"), 1);
}

TEST_F(CliMapsTest, HeadsAreAskedForAndKeepTheirNumbers) {
  AnswerTwoHeads(1);
  ASSERT_EQ(Run("run --layer 0 --input x.npy --maps m --heads 3,101").code, 0);
  EXPECT_THAT(server_.seen("Attend").at(0).attend.weights().heads(), ElementsAre(3, 101));
  EXPECT_THAT(Files("m"),
              ElementsAre("layer-0-head-003.png", "layer-0-head-101.png", "layer-0.png"));
  ASSERT_EQ(Run("run --layer 0 --input x.npy --weights w.npy --heads 5,6").code, 0);
  EXPECT_THAT(server_.seen("Attend").at(1).attend.weights().heads(), ElementsAre(5, 6));
}

TEST_F(CliMapsTest, TokensLabelTheRowsAndWidenThePicture) {
  AnswerTwoHeads(1);
  WriteText("tokens", "ab\r\ncdefgh");  // no newline at the end, and one of another system
  ASSERT_EQ(Run("run --layer 0 --input x.npy --maps plain").code, 0);
  const Outcome run = Run("run --layer 0 --input x.npy --maps labelled --tokens tokens");
  ASSERT_EQ(run.code, 0) << run.text;
  const PngFile plain = Picture("plain/layer-0-head-00.png");
  const PngFile labelled = Picture("labelled/layer-0-head-00.png");
  EXPECT_GT(labelled.width, plain.width);
  EXPECT_GT(labelled.height, plain.height);  // above the keys, too
}

TEST_F(CliMapsTest, AContextHasItsOwnTokens) {
  server_.weights = {FakeAttention::Floats({1, 2, 3}, {1, 0, 0, 0, 1, 0})};
  Write("c.npy", {1, 2, 3, 4, 5, 6});
  WriteText("tokens", "a\nb\n");
  WriteText("three", "c\nd\ne\n");
  const std::string run = "run --layer 0.cross --input x.npy --maps m --tokens tokens ";
  EXPECT_EQ(Run(run + "--context c.npy --context_tokens three").code, 0);
  EXPECT_EQ(Run(run).code, 0);
  EXPECT_EQ(Run(run + "--context_tokens three").code, 0);  // the session has the context
  const Outcome wrong = Run(run + "--context_tokens tokens");
  EXPECT_EQ(wrong.code, 2);
  EXPECT_THAT(wrong.text, HasSubstr("--context_tokens: got 2 lines, wanted 3, one for each"));
}

TEST_F(CliMapsTest, WrongFilesAreNamedBeforeAnythingIsSent) {
  WriteText("one", "a\n");
  WriteText("two", "a\nb\n");
  const std::string run = "run --layer 0 --input x.npy ";
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"--maps m --tokens one", "--tokens: got 1 lines, wanted 2, one for each of the rows"},
      {"--maps m --tokens absent", "--tokens: absent: No such file or directory"},
      {"--maps m --tokens .", "--tokens: .: Is a directory"},
      {"--maps m --context_tokens two", "--context_tokens: the layer has no context"},
      {"--maps m --context x.npy --context_tokens one", "--context_tokens: got 1 lines, wanted 2"},
      {"--maps x.npy/m", "--maps: x.npy/m: Not a directory"},
      {"--maps x.npy", "--maps: x.npy: Not a directory"},
  };
  for (const auto& [flags, message] : wrong) {
    const Outcome outcome = Run(run + flags);
    EXPECT_EQ(outcome.code, 2) << flags;
    EXPECT_THAT(outcome.text, StartsWith("attend: " + message)) << flags;
    EXPECT_EQ(std::count(outcome.text.begin(), outcome.text.end(), '\n'), 1) << outcome.text;
  }
  EXPECT_EQ(server_.seen("Attend").size(), 0u);
}

TEST_F(CliMapsTest, AnAnswerThatIsTooLargeSaysWhatHelps) {
  v1::ErrorDetail detail;
  detail.set_reason(v1::TOO_LARGE);
  for (const char* flags : {"--maps m", "--output y.npy"}) {
    server_.FailNext({StatusWithDetail(grpc::INVALID_ARGUMENT, "got 9 bytes, wanted 5", detail)});
    const Outcome outcome = Run(std::string("run --layer 0 --input x.npy ") + flags);
    EXPECT_EQ(outcome.code, 1);
    const bool maps = std::string_view(flags) == "--maps m";
    EXPECT_EQ(outcome.text.find("--heads asks for") != std::string::npos, maps) << outcome.text;
  }
}

TEST_F(CliMapsTest, AnAnswerWhoseSizesDoNotFitIsRefused) {
  WriteText("tokens", "a\nb\n");
  v1::Tensor torn = FakeAttention::Floats({2, 2, 2}, {1, 0, 0.5f, 0.5f, 1, 0, 0.25f, 0.75f});
  torn.mutable_data()->resize(20);
  const std::vector<std::pair<v1::Tensor, std::string>> wrong = {
      {torn, "not [heads, rows, keys]"},
      {FakeAttention::Floats({1, 3, 3}, std::vector<float>(9, 0.5f)), "wanted 3, one for each"},
      {FakeAttention::Floats({1, 2, 1}, {1, 1}), "fewer keys than rows"},
  };
  for (const auto& [weights, message] : wrong) {
    server_.weights = {weights};
    const Outcome outcome = Run("run --layer 0 --input x.npy --maps m --tokens tokens");
    EXPECT_EQ(outcome.code, 2);
    EXPECT_THAT(outcome.text, HasSubstr(message));
  }
  AnswerTwoHeads(1);
  EXPECT_THAT(Run("run --layer 0 --input x.npy --maps m --heads 5").text,
              HasSubstr("2 heads, wanted 1"));
}

TEST_F(CliMapsTest, AnswersWithoutQueriesOrKeysGiveNoPicture) {
  server_.weights = {FakeAttention::Floats({2, 2, 0}, {})};
  const Outcome run = Run("run --layer 0.cross --input x.npy --maps m");
  EXPECT_EQ(run.code, 0);
  EXPECT_THAT(run.text, HasSubstr("0 pictures"));
}

}  // namespace
}  // namespace attend::client
