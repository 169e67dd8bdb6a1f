// SPDX-License-Identifier: Apache-2.0
//
// Heat maps as pixels: the colour scale, where cells lie and what colour they have, labels, many
// tokens, and the file.
#include "client/cli/heatmap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <set>

#include "tests/client/png_file.h"

namespace attend::cli {
namespace {

using client::PngFile;
using client::ReadPng;

constexpr Rgb kWhite = {255, 255, 255};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Relative luminance of sRGB (IEC 61966-2-1).
double Luminance(Rgb color) {
  const auto linear = [](uint8_t channel) {
    const double value = channel / 255.0;
    return value <= 0.04045 ? value / 12.92 : std::pow((value + 0.055) / 1.055, 2.4);
  };
  return 0.2126 * linear(color.red) + 0.7152 * linear(color.green) + 0.0722 * linear(color.blue);
}

HeatMaps Maps(std::span<const float> weights, int64_t rows, int64_t keys, int64_t heads = 1) {
  HeatMaps maps{.title = "m, layer 0",
                .names = {},
                .weights = weights,
                .rows = rows,
                .keys = keys,
                .row_axis = {},
                .key_axis = {}};
  for (int64_t head = 0; head < heads; ++head) maps.names.push_back("head " + std::to_string(head));
  return maps;
}

// The pixel in the middle of a cell; `area` has `rows` x `keys` of them.
Rgb CellColor(const HeatMapImage& drawn, const MapArea& area, const HeatMaps& maps, int64_t row,
              int64_t key) {
  return drawn.image.at(area.left + static_cast<int>((2 * key + 1) * area.width / (2 * maps.keys)),
                        area.top + static_cast<int>((2 * row + 1) * area.height / (2 * maps.rows)));
}

// Pixels of a part of the image that are not white.
int Inked(const Image& image, int left, int top, int right, int bottom) {
  int count = 0;
  for (int y = std::max(top, 0); y < std::min(bottom, image.height()); ++y) {
    for (int x = std::max(left, 0); x < std::min(right, image.width()); ++x) {
      count += image.at(x, y) != kWhite;
    }
  }
  return count;
}

TEST(ColorScaleTest, LightnessFallsWithTheWeight) {
  double before = 1;
  for (int i = 1; i <= 255; ++i) {
    const double now = Luminance(WeightColor(static_cast<float>(i) / 255, 1));
    EXPECT_LT(now, before) << i;
    before = now;
  }
  EXPECT_GT(Luminance(WeightColor(0.001f, 1)), 0.85);
  EXPECT_LT(before, 0.03);
  EXPECT_EQ(WeightColor(0.2f, 0.4f), WeightColor(0.5f, 1));
}

TEST(ColorScaleTest, ZeroAndWhatIsNoNumberHaveColorsOfTheirOwn) {
  const Rgb zero = WeightColor(0, 1);
  EXPECT_EQ(zero.red, zero.green);  // grey, as no weight is
  EXPECT_NE(zero, WeightColor(1e-30f, 1));
  const Rgb wrong = WeightColor(kNan, 1);
  EXPECT_EQ(wrong, WeightColor(INFINITY, 1));
  for (int i = 0; i <= 255; ++i) EXPECT_NE(WeightColor(static_cast<float>(i) / 255, 1), wrong);
}

TEST(HeatMapTest, EveryCellHasTheColorOfItsWeight) {
  const std::vector<float> weights = {0.5f, 0, 0, 0.1f, 0.4f, 0, 0.2f, 0.2f, 0.1f,
                                      0.3f, 0, 0, 0.2f, 0.1f, 0, 0.1f, 0.1f, kNan};
  const HeatMaps maps = Maps(weights, 3, 3, 2);
  const HeatMapImage drawn = DrawHeatMaps(maps);
  ASSERT_EQ(drawn.areas.size(), 2u);
  for (size_t i = 0; i < weights.size(); ++i) {  // both on one scale
    const auto cell = static_cast<int64_t>(i % 9);
    EXPECT_EQ(CellColor(drawn, drawn.areas[i / 9], maps, cell / 3, cell % 3),
              WeightColor(weights[i], 0.5f))
        << i;
  }
}

TEST(HeatMapTest, MapsLieInAGridInsideTheImageWithoutOverlap) {
  for (const int heads : {1, 2, 3, 12, 32}) {
    for (const auto& [rows, keys] : {std::pair{1, 1}, {1, 300}, {300, 1}, {9, 20}, {50, 50}}) {
      const std::vector<float> weights(static_cast<size_t>(heads * rows * keys), 0.5f);
      const HeatMapImage drawn = DrawHeatMaps(Maps(weights, rows, keys, heads));
      ASSERT_EQ(drawn.areas.size(), static_cast<size_t>(heads));
      for (size_t i = 0; i < drawn.areas.size(); ++i) {
        const MapArea& area = drawn.areas[i];
        EXPECT_GE(area.left, 16);
        EXPECT_LE(area.left + area.width + 16, drawn.image.width());
        EXPECT_LE(area.top + area.height + 16, drawn.image.height());
        EXPECT_GE(std::min(area.width, area.height), 24) << rows << " x " << keys;
        for (size_t j = 0; j < i; ++j) {
          const MapArea& other = drawn.areas[j];
          EXPECT_TRUE(other.left + other.width < area.left || other.top + other.height < area.top ||
                      area.left + area.width < other.left)
              << i << " and " << j << " of " << heads;
        }
      }
    }
  }
}

TEST(HeatMapTest, AnImageHasAMarginAndNothingIsCutOff) {
  std::vector<std::string> labels;
  for (int i = 0; i < 12; ++i) labels.push_back(std::string(static_cast<size_t>(i * 3), 'W'));
  const std::vector<float> weights(12 * 12 * 12, 0.5f);
  for (const int heads : {1, 12}) {
    HeatMaps maps = Maps(std::span(weights).first(static_cast<size_t>(heads * 144)), 12, 12, heads);
    maps.title = std::string(100, 'M');
    maps.row_axis.labels = maps.key_axis.labels = labels;
    const HeatMapImage drawn = DrawHeatMaps(maps);
    const Image& image = drawn.image;
    const int inside = Inked(image, 15, 15, image.width() - 12, image.height() - 12);
    EXPECT_EQ(inside, Inked(image, 0, 0, image.width(), image.height()));
  }
}

TEST(HeatMapTest, LabelsStandBesideTheirRowsAndAboveTheirKeys) {
  const std::vector<float> weights(16, 0.25f);
  HeatMaps maps = Maps(weights, 4, 4);
  maps.row_axis.labels = {"", "", "token", ""};
  maps.key_axis.labels = {"", "key", "", ""};
  const HeatMapImage drawn = DrawHeatMaps(maps);
  const MapArea& area = drawn.areas[0];
  const int cell = area.width / 4;
  for (int i = 0; i < 4; ++i) {
    const int row =
        Inked(drawn.image, 0, area.top + i * cell, area.left - 6, area.top + (i + 1) * cell);
    EXPECT_EQ(row > 0, i == 2) << "row " << i;
    const int key = Inked(drawn.image, area.left + i * cell, area.top - 50,
                          area.left + (i + 1) * cell, area.top - 6);
    EXPECT_EQ(key > 0, i == 1) << "key " << i;
  }
  // As wide as its text, two pixels a dot, and turned: as high as that.
  EXPECT_EQ(TextWidth("token", 2), 58);
  EXPECT_EQ(Inked(drawn.image, 0, area.top, area.left - 68, area.top + area.height), 0);
}

TEST(HeatMapTest, LabelsOfAHistoryAreThoseOfItsEnd) {
  const std::vector<float> weights(2 * 6, 0.25f);
  HeatMaps maps = Maps(weights, 2, 6);
  const auto above = [&](const std::vector<std::string>& labels, int key) {
    maps.key_axis.labels = labels;
    const HeatMapImage drawn = DrawHeatMaps(maps);
    const MapArea& area = drawn.areas[0];
    const int cell = area.width / 6;
    return Inked(drawn.image, area.left + key * cell, area.top - 60, area.left + (key + 1) * cell,
                 area.top - 6);
  };
  const int three = above({"", ""}, 3);  // numbers before the labels
  EXPECT_GT(three, 0);
  EXPECT_EQ(above({"", ""}, 4), 0);
  EXPECT_EQ(above({"3", "", ""}, 3), three);
  EXPECT_GT(above({"", "", "", "x"}, 5), 0);
}

TEST(HeatMapTest, MoreTokensThanPixelsShareThemAndTheLargestShows) {
  constexpr int kTokens = 5000;
  std::vector<float> weights(static_cast<size_t>(kTokens) * 2, 0);
  weights[4321] = 0.5f;
  weights[kTokens + 7] = kNan;
  const HeatMaps maps = Maps(weights, 2, kTokens);
  const HeatMapImage drawn = DrawHeatMaps(maps);
  const MapArea& area = drawn.areas[0];
  EXPECT_EQ(area.width, 1667);  // three to a pixel
  EXPECT_EQ(drawn.image.at(area.left + 4321 / 3, area.top), WeightColor(0.5f, 0.5f));
  EXPECT_EQ(drawn.image.at(area.left + 4321 / 3 - 1, area.top), WeightColor(0, 1));
  EXPECT_EQ(drawn.image.at(area.left + 2, area.top + area.height - 1), WeightColor(kNan, 1));
  EXPECT_EQ(drawn.image.at(area.left + 2, area.top), WeightColor(0, 1));  // rows are not shared

  const std::vector<float> square(2048 * 2048, 0.5f);
  EXPECT_EQ(DrawHeatMaps(Maps(square, 2048, 2048)).areas[0].width, 2048);
  EXPECT_LE(DrawHeatMaps(Maps(square, 1024, 1024, 4)).areas[0].width, 320);
}

TEST(HeatMapTest, NothingAtAllIsDrawnWithoutFault) {
  EXPECT_GT(DrawHeatMaps(Maps({}, 0, 5)).image.width(), 0);
  EXPECT_GT(DrawHeatMaps(Maps({}, 3, 0, 2)).image.width(), 0);
  const std::vector<float> zeros(4, 0);
  const HeatMaps maps = Maps(zeros, 2, 2);
  const HeatMapImage drawn = DrawHeatMaps(maps);
  EXPECT_EQ(CellColor(drawn, drawn.areas[0], maps, 1, 1), WeightColor(0, 1));
}

TEST(HeatMapDeathTest, SizesThatDoNotFitTogetherEndTheProgram) {
  const std::vector<float> weights(6, 0.5f);
  EXPECT_DEATH(DrawHeatMaps(Maps(weights, 2, 3, 0)), "a name for each map");
  EXPECT_DEATH(DrawHeatMaps(Maps(weights, 2, 2)), "names x rows x keys weights");
  EXPECT_DEATH(DrawHeatMaps(Maps(weights, 2, 3, 2)), "names x rows x keys weights");
  HeatMaps maps = Maps(weights, 2, 3);
  maps.row_axis.labels = {"a", "b", "c"};
  EXPECT_DEATH(DrawHeatMaps(maps), "no more labels than places");
  Image image(3, 2);
  EXPECT_DEATH(image.at(3, 0), "");
  EXPECT_DEATH(image.at(0, -1), "");
}

// ---- Text ----

// The text as '#' and ' ', line by line.
std::string Drawn(std::string_view text, Direction direction = Direction::kAcross) {
  const bool up = direction == Direction::kUp;
  const int length = TextWidth(text, 1);
  Image image(up ? kGlyphHeight : length, up ? length : kGlyphHeight);
  DrawText(image, 0, 0, text, 1, direction, {0, 0, 0});
  std::string dots;
  for (int y = 0; y < image.height(); ++y) {
    for (int x = 0; x < image.width(); ++x) dots += image.at(x, y) == kWhite ? ' ' : '#';
    dots += '\n';
  }
  return dots;
}

TEST(TextTest, LettersAreDrawnAndTurned) {
  EXPECT_EQ(Drawn("L"), "#    \n#    \n#    \n#    \n#    \n#    \n#####\n     \n");
  EXPECT_EQ(Drawn("L", Direction::kUp), "      # \n      # \n      # \n      # \n####### \n");
  std::set<std::string> seen;
  for (char letter = ' '; letter <= '~'; ++letter) {
    EXPECT_TRUE(seen.insert(Drawn(std::string(1, letter))).second) << letter;
  }
}

TEST(TextTest, OtherCharactersAreReplacedOneByOne) {
  EXPECT_EQ(Drawn("\u00fc\u00c9"), Drawn("uE"));  // accents
  EXPECT_EQ(Drawn("\u0120"), Drawn("\u2581"));    // the space of tokenizers
  EXPECT_NE(Drawn("\u0120"), Drawn("\u4e16"));
  EXPECT_EQ(Drawn("\u4e16"), Drawn("\U0001f600"));  // a box
  EXPECT_EQ(Drawn("\u4e16"), Drawn("\n"));
  EXPECT_EQ(TextWidth("\u4e16\u754c", 1), TextWidth("ab", 1));
  for (const char* broken : {"\xff", "\x80", "\xe4\xb8", "\xf0\x9f\x98"}) {
    EXPECT_EQ(Drawn(broken).substr(0, 5), "#####") << broken;
  }
  EXPECT_EQ(TextWidth("\xe4\x61", 1), TextWidth("ab", 1));  // the letter after it is not lost
}

TEST(TextTest, LongTextIsShortenedByCharacters) {
  EXPECT_EQ(Shortened("abcd", 4), "abcd");
  EXPECT_EQ(Shortened("abcde", 4), "abc\u2026");
  EXPECT_EQ(Shortened("\u4e16\u4e16\u4e16", 2), "\u4e16\u2026");
  EXPECT_EQ(Shortened("", 4), "");
}

// ---- Files ----

TEST(PngTest, AFileHoldsThePixels) {
  const std::string path = testing::TempDir() + "heatmap_test." + std::to_string(getpid()) + ".png";
  Image image(3, 2);
  image.at(2, 1) = {1, 2, 3};
  ASSERT_EQ(WritePng(path, image), "");
  const PngFile file = ReadPng(path);
  std::filesystem::remove(path);
  ASSERT_EQ(file.width, 3);
  ASSERT_EQ(file.height, 2);
  std::vector<unsigned char> expected(18, 255);
  expected[15] = 1;
  expected[16] = 2;
  expected[17] = 3;
  EXPECT_EQ(file.bytes, expected);
}

TEST(PngTest, AFileThatCanNotBeWrittenIsAnErrorWithItsPath) {
  EXPECT_EQ(WritePng("/nonexistent/a.png", Image(1, 1)),
            "/nonexistent/a.png: No such file or directory");
  EXPECT_NE(WritePng("/dev/full", Image(1000, 1000)), "");
}

}  // namespace
}  // namespace attend::cli
