// SPDX-License-Identifier: Apache-2.0
#include "client/cli/heatmap.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <numbers>
#include <string_view>

namespace attend::cli {
namespace {

constexpr Rgb kInk = {38, 38, 46};
constexpr Rgb kFrame = {150, 150, 156};
constexpr Rgb kZero = {226, 226, 228};
constexpr Rgb kNotANumber = {214, 39, 40};

// All in pixels.
constexpr int kMargin = 16;
constexpr int kGap = 6;          // between a map and its text
constexpr int kMapGap = 20;      // between maps
constexpr int kTick = 4;         // length
constexpr int kLabelPitch = 10;  // least distance of labels at text scale 1
constexpr int kLeastSide = 24;   // of a map, so that a single row is seen
constexpr int kBarWidth = 16;
constexpr int kBarHeight = 120;  // at least
constexpr int kBarSteps = 4;     // numbers beside the bar, without the 0
constexpr size_t kLabelCharacters = 16;

// How large maps get.
struct Sizes {
  int wanted;        // length of a side, if cells of whole pixels allow it
  int limit;         // of a side with one pixel for each weight
  int label_limit;   // of a side that grows so that every label fits
  int largest_cell;  // side of a cell
};
constexpr Sizes kOneMap = {720, 2048, 2400, 48};
constexpr Sizes kSeveralMaps = {240, 320, 480, 24};

// From places (rows or keys) to pixels, in steps: a step is one place of several pixels, or one
// pixel of several places.
struct Scale {
  int step_pixels = 1;
  int64_t places_per_step = 1;

  int Length(int64_t count) const {
    return static_cast<int>((count + places_per_step - 1) / places_per_step) * step_pixels;
  }
  int Center(int64_t place) const {
    return static_cast<int>(place / places_per_step) * step_pixels + step_pixels / 2;
  }
};

Scale ScaleFor(int64_t longest, bool labelled, const Sizes& sizes) {
  if (longest > sizes.limit) return {1, (longest + sizes.limit - 1) / sizes.limit};
  const int count = static_cast<int>(std::max<int64_t>(longest, 1));
  int pixels = std::clamp((sizes.wanted + count / 2) / count, 1, sizes.largest_cell);
  if (labelled && pixels < kLabelPitch && count * kLabelPitch <= sizes.label_limit) {
    pixels = kLabelPitch;
  }
  return {pixels, 1};
}

// A side far shorter than the other gets larger steps.
Scale WidenedToLeastSide(Scale scale, int64_t count) {
  if (count == 0 || scale.Length(count) >= kLeastSide) return scale;
  return {static_cast<int>(std::max<int64_t>(kLeastSide / count, 1)), 1};
}

struct Tick {
  int at = 0;  // centre, from the beginning of the map
  std::string text;
};

// `least` pixels lie between two ticks at least.
std::vector<Tick> TicksOf(const Axis& axis, int64_t count, const Scale& scale, int least) {
  const int64_t numbered = count - static_cast<int64_t>(axis.labels.size());
  int64_t step = (least * scale.places_per_step + scale.step_pixels - 1) / scale.step_pixels;
  if (numbered > 0) {  // 1, 2, 5, 10, 20, 50, ...
    int64_t round = 1;
    for (int i = 0; round < step; ++i) round = i % 3 == 1 ? round / 2 * 5 : round * 2;
    step = round;
  }
  const auto text = [&](int64_t place) {
    if (place < numbered) return std::to_string(axis.first + place);
    return Shortened(axis.labels[static_cast<size_t>(place - numbered)], kLabelCharacters);
  };
  std::vector<Tick> ticks;
  for (int64_t place = 0; place < count; ++place) {
    const int64_t number = numbered > 0 ? axis.first + place : place;
    if (number % step == 0) ticks.push_back({scale.Center(place), text(place)});
  }
  if (ticks.empty() && count > 0) ticks.push_back({scale.Center(0), text(0)});
  return ticks;
}

int Widest(const std::vector<Tick>& ticks, int text_scale) {
  int width = 0;
  for (const Tick& tick : ticks) width = std::max(width, TextWidth(tick.text, text_scale));
  return width;
}

std::string NumberText(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

// The largest finite weight, and which others are there.
struct Range {
  float maximum = 0;
  bool zero = false;
  bool not_finite = false;

  int swatches() const { return static_cast<int>(zero) + static_cast<int>(not_finite); }
};

Range RangeOf(std::span<const float> weights) {
  Range range;
  for (const float weight : weights) {
    range.zero |= weight == 0;
    if (std::isfinite(weight)) {
      range.maximum = std::max(range.maximum, weight);
    } else {
      range.not_finite = true;
    }
  }
  if (range.maximum == 0) range.maximum = 1;  // nothing but zeros and NaN: the bar shows 0 to 1
  return range;
}

// Everything that is decided before the image has a size.
struct Layout {
  explicit Layout(const HeatMaps& maps);

  int columns = 1;
  int text_scale = 1;
  bool turned = false;  // labels of keys
  Scale row_scale;
  Scale key_scale;
  std::vector<Tick> row_ticks;
  std::vector<Tick> key_ticks;
  std::string caption;
  int name_height = 0;
  int key_label_height = 0;
  std::vector<MapArea> areas;
  int bar_left = 0;
};

std::string CaptionOf(const HeatMaps& maps, const Scale& rows, const Scale& keys) {
  std::string text = std::to_string(maps.rows) + (maps.rows == 1 ? " query" : " queries") +
                     " down, " + std::to_string(maps.keys) +
                     (maps.keys == 1 ? " key across" : " keys across");
  if (rows.places_per_step > 1 || keys.places_per_step > 1) {
    text += "; a pixel shows the largest of " + std::to_string(rows.places_per_step) + " x " +
            std::to_string(keys.places_per_step) + " weights";
  }
  return text;
}

Layout::Layout(const HeatMaps& maps) {
  const bool several = maps.names.size() > 1;
  const bool labelled = !maps.row_axis.labels.empty() || !maps.key_axis.labels.empty();
  const Scale common =
      ScaleFor(std::max(maps.rows, maps.keys), labelled, several ? kSeveralMaps : kOneMap);
  row_scale = WidenedToLeastSide(common, maps.rows);
  key_scale = WidenedToLeastSide(common, maps.keys);
  const bool roomy = common.step_pixels >= 2 * kLabelPitch || !labelled;
  text_scale = roomy && !several ? 2 : 1;

  turned = !maps.key_axis.labels.empty();
  const int line = kLabelPitch * text_scale;
  const std::string last = std::to_string(maps.key_axis.first + std::max<int64_t>(maps.keys, 1));
  row_ticks =
      TicksOf(maps.row_axis, maps.rows, row_scale, maps.row_axis.labels.empty() ? 2 * line : line);
  key_ticks = TicksOf(maps.key_axis, maps.keys, key_scale,
                      turned ? line : TextWidth(last, text_scale) + line);
  caption = CaptionOf(maps, row_scale, key_scale);

  const int text = kGlyphHeight * text_scale;
  name_height = several ? 2 * kGlyphHeight + kGap : 0;
  key_label_height = (turned ? Widest(key_ticks, text_scale) : text) + kTick + kGap;
  const int row_label_width = Widest(row_ticks, text_scale) + kTick + kGap;

  const int count = static_cast<int>(maps.names.size());
  while (columns * columns < count) ++columns;
  const int width = key_scale.Length(maps.keys);
  const int height = row_scale.Length(maps.rows);
  const int name_width = several ? TextWidth(*std::max_element(maps.names.begin(), maps.names.end(),
                                                               [](const auto& a, const auto& b) {
                                                                 return a.size() < b.size();
                                                               }),
                                             2)
                                 : 0;
  const int left = kMargin + row_label_width;
  const int top = kMargin + 2 * kGlyphHeight + kGap + kGlyphHeight + kMapGap;
  const int column_step = std::max(width, name_width) + kMapGap;
  for (int i = 0; i < count; ++i) {
    areas.push_back(
        {left + i % columns * column_step,
         top + key_label_height + name_height + i / columns * (height + name_height + kMapGap),
         width, height});
  }
  bar_left = left + columns * column_step;
}

// Of rows [row, row_end) and keys [key, key_end); one that is not finite wins.
float LargestOf(std::span<const float> weights, int64_t keys, int64_t row, int64_t row_end,
                int64_t key, int64_t key_end) {
  float largest = 0;
  for (; row < row_end; ++row) {
    for (int64_t j = key; j < key_end; ++j) {
      const float weight = weights[static_cast<size_t>(row * keys + j)];
      if (!std::isfinite(weight)) return weight;
      largest = std::max(largest, weight);
    }
  }
  return largest;
}

void DrawMap(Image& image, const HeatMaps& maps, std::span<const float> weights,
             const Layout& layout, const MapArea& area, float maximum) {
  const Scale& rows = layout.row_scale;
  const Scale& keys = layout.key_scale;
  image.Fill(area.left - 1, area.top - 1, area.width + 2, area.height + 2, kFrame);
  int y = area.top;
  for (int64_t row = 0; row < maps.rows; row += rows.places_per_step, y += rows.step_pixels) {
    const int64_t row_end = std::min(row + rows.places_per_step, maps.rows);
    int x = area.left;
    for (int64_t key = 0; key < maps.keys; key += keys.places_per_step, x += keys.step_pixels) {
      const int64_t key_end = std::min(key + keys.places_per_step, maps.keys);
      const float shown = LargestOf(weights, maps.keys, row, row_end, key, key_end);
      image.Fill(x, y, keys.step_pixels, rows.step_pixels, WeightColor(shown, maximum));
    }
  }
}

void DrawRowLabels(Image& image, const Layout& layout, const MapArea& area) {
  for (const Tick& tick : layout.row_ticks) {
    const int y = area.top + tick.at;
    const int width = TextWidth(tick.text, layout.text_scale);
    image.Fill(area.left - 1 - kTick, y, kTick, 1, kFrame);
    DrawText(image, area.left - kTick - kGap - width, y - kGlyphHeight * layout.text_scale / 2 + 1,
             tick.text, layout.text_scale, Direction::kAcross, kInk);
  }
}

void DrawKeyLabels(Image& image, const Layout& layout, const MapArea& area) {
  const int height = kGlyphHeight * layout.text_scale;
  for (const Tick& tick : layout.key_ticks) {
    const int x = area.left + tick.at;
    const int length = TextWidth(tick.text, layout.text_scale);
    image.Fill(x, area.top - 1 - kTick, 1, kTick, kFrame);
    const int bottom = area.top - kTick - kGap;
    if (layout.turned) {
      DrawText(image, x - height / 2 + 1, bottom - length, tick.text, layout.text_scale,
               Direction::kUp, kInk);
    } else {
      DrawText(image, x - length / 2, bottom - height + layout.text_scale, tick.text,
               layout.text_scale, Direction::kAcross, kInk);
    }
  }
}

// The colour bar with its numbers, and swatches of the colours outside it.
class Legend {
 public:
  Legend(const Range& range, int text_scale, int maps_height)
      : range_(range),
        scale_(text_scale),
        bar_(std::clamp(maps_height, kBarHeight, 2 * kBarHeight)) {
    for (int i = 0; i <= kBarSteps; ++i) {
      numbers_.push_back(NumberText(static_cast<double>(range.maximum) * i / kBarSteps));
      width_ = std::max(width_, TextWidth(numbers_.back(), scale_));
    }
    if (range.zero) width_ = std::max(width_, TextWidth(kZeroText, scale_));
    if (range.not_finite) width_ = std::max(width_, TextWidth(kNotANumberText, scale_));
    width_ += kBarWidth + kTick + kGap;
  }

  int width() const { return width_; }
  int height() const { return bar_ + range_.swatches() * (kGlyphHeight * scale_ + kGap); }

  void Draw(Image& image, int left, int top) const {
    image.Fill(left - 1, top - 1, kBarWidth + 2, bar_ + 2, kFrame);
    for (int i = 0; i < bar_; ++i) {
      const float share = static_cast<float>(bar_ - i) / static_cast<float>(bar_);
      image.Fill(left, top + i, kBarWidth, 1, WeightColor(share, 1));
    }
    for (int i = 0; i <= kBarSteps; ++i) {
      const int y = top + (bar_ - 1) * (kBarSteps - i) / kBarSteps;
      image.Fill(left + kBarWidth + 1, y, kTick, 1, kFrame);
      DrawEntry(image, left, y - kGlyphHeight * scale_ / 2 + 1, numbers_[static_cast<size_t>(i)]);
    }
    int y = top + bar_ + kGlyphHeight * scale_ / 2 + kGap;
    if (range_.zero) y = DrawSwatch(image, left, y, kZero, kZeroText);
    if (range_.not_finite) DrawSwatch(image, left, y, kNotANumber, kNotANumberText);
  }

 private:
  static constexpr std::string_view kZeroText = "exactly 0";
  static constexpr std::string_view kNotANumberText = "NaN";

  void DrawEntry(Image& image, int left, int y, std::string_view text) const {
    DrawText(image, left + kBarWidth + kTick + kGap, y, text, scale_, Direction::kAcross, kInk);
  }

  int DrawSwatch(Image& image, int left, int y, Rgb color, std::string_view text) const {
    const int side = kGlyphHeight * scale_;
    image.Fill(left - 1, y - 1, kBarWidth + 2, side + 2, kFrame);
    image.Fill(left, y, kBarWidth, side, color);
    DrawEntry(image, left, y + 1, text);
    return y + side + kGap;
  }

  Range range_;
  int scale_;
  int bar_;
  int width_ = 0;
  std::vector<std::string> numbers_;
};

// From linear light to the value of a channel (IEC 61966-2-1).
uint8_t Channel(double linear) {
  const double light = std::clamp(linear, 0.0, 1.0);
  const double value =
      light <= 0.0031308 ? 12.92 * light : 1.055 * std::pow(light, 1 / 2.4) - 0.055;
  return static_cast<uint8_t>(std::lround(255 * value));
}

// Lightness falls evenly from pale yellow over teal to dark violet, so order survives colour
// blindness and grey printing. The space is OKLab; its matrices are those of B. Ottosson, "A
// perceptual color space for image processing" (2020).
Rgb ScaleColor(double share) {
  const double lightness = 0.97 - 0.72 * share;
  const double chroma = 0.07 + 0.03 * share + 0.015 * std::sin(std::numbers::pi * share);
  const double hue = (105 + 185 * share) * std::numbers::pi / 180;
  const double a = chroma * std::cos(hue);
  const double b = chroma * std::sin(hue);
  const double l = std::pow(lightness + 0.3963377774 * a + 0.2158037573 * b, 3);
  const double m = std::pow(lightness - 0.1055613458 * a - 0.0638541728 * b, 3);
  const double s = std::pow(lightness - 0.0894841775 * a - 1.2914855480 * b, 3);
  return {Channel(4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s),
          Channel(-1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s),
          Channel(-0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s)};
}

// What only a mistake of the caller breaks.
void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "DrawHeatMaps: wanted %s\n", what);
  std::abort();
}

}  // namespace

Rgb WeightColor(float weight, float maximum) {
  constexpr size_t kShades = 256;
  static const std::array<Rgb, kShades> shades = [] {
    std::array<Rgb, kShades> all;
    for (size_t i = 0; i < kShades; ++i) all[i] = ScaleColor(static_cast<double>(i) / 255);
    return all;
  }();
  if (!std::isfinite(weight)) return kNotANumber;
  if (weight == 0) return kZero;
  const float share = maximum > 0 ? std::clamp(weight / maximum, 0.0f, 1.0f) : 0.0f;
  return shades[static_cast<size_t>(share * (kShades - 1) + 0.5f)];
}

HeatMapImage DrawHeatMaps(const HeatMaps& maps) {
  Require(!maps.names.empty(), "a name for each map");
  Require(maps.rows >= 0 && maps.keys >= 0 &&
              std::ssize(maps.weights) == std::ssize(maps.names) * maps.rows * maps.keys,
          "names x rows x keys weights");
  Require(std::ssize(maps.row_axis.labels) <= maps.rows &&
              std::ssize(maps.key_axis.labels) <= maps.keys,
          "no more labels than places");
  const Layout layout(maps);
  const Range range = RangeOf(maps.weights);
  const MapArea& first = layout.areas.front();
  const MapArea& last = layout.areas.back();
  const Legend legend(range, layout.text_scale, last.top + last.height - first.top);
  const int text_width = std::max(TextWidth(maps.title, 2), TextWidth(layout.caption, 1));
  HeatMapImage drawn{
      Image(kMargin + std::max(layout.bar_left - kMargin + legend.width(), text_width) + kMargin,
            std::max(last.top + last.height, first.top + legend.height() + 2 * kGap) + kMargin),
      layout.areas};
  Image& image = drawn.image;
  DrawText(image, kMargin, kMargin, maps.title, 2, Direction::kAcross, kInk);
  DrawText(image, kMargin, kMargin + 2 * kGlyphHeight + kGap, layout.caption, 1, Direction::kAcross,
           kInk);
  const size_t size = static_cast<size_t>(maps.rows * maps.keys);
  for (size_t i = 0; i < layout.areas.size(); ++i) {
    const MapArea& area = layout.areas[i];
    DrawMap(image, maps, maps.weights.subspan(i * size, size), layout, area, range.maximum);
    const bool in_first_row = i < static_cast<size_t>(layout.columns);
    if (i % static_cast<size_t>(layout.columns) == 0) DrawRowLabels(image, layout, area);
    if (in_first_row) DrawKeyLabels(image, layout, area);
    if (layout.name_height > 0) {
      const int above = (in_first_row ? layout.key_label_height : 0) + layout.name_height;
      DrawText(image, area.left, area.top - above, maps.names[i], 2, Direction::kAcross, kInk);
    }
  }
  legend.Draw(image, layout.bar_left, first.top);
  return drawn;
}

}  // namespace attend::cli
