// SPDX-License-Identifier: Apache-2.0
//
// A small raster image: rectangles, text in a bitmap font of our own, PNG files (libpng). heatmap.h
// draws with it; it knows nothing of attention.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

namespace attend::cli {

struct Rgb {
  uint8_t red = 255;
  uint8_t green = 255;
  uint8_t blue = 255;

  friend bool operator==(const Rgb&, const Rgb&) = default;
};

// Pixels row by row from the top left; starts white.
class Image {
 public:
  Image(int width, int height)
      : width_(width), height_(height), pixels_(static_cast<size_t>(width) * height) {}

  int width() const { return width_; }
  int height() const { return height_; }
  const std::vector<Rgb>& pixels() const { return pixels_; }
  // A place outside the image ends the program.
  Rgb& at(int x, int y) { return pixels_[Index(x, y)]; }
  const Rgb& at(int x, int y) const { return pixels_[Index(x, y)]; }

  // What lies outside the image is left out, here and in DrawText.
  void Fill(int x, int y, int width, int height, Rgb color);

 private:
  size_t Index(int x, int y) const {
    if (x < 0 || x >= width_ || y < 0 || y >= height_) std::abort();
    return static_cast<size_t>(y) * static_cast<size_t>(width_) + static_cast<size_t>(x);
  }

  int width_;
  int height_;
  std::vector<Rgb> pixels_;
};

// A glyph is 5 x 8 pixels, a line of text 8 pixels high; `scale` multiplies all of it.
constexpr int kGlyphHeight = 8;
constexpr int kGlyphAdvance = 6;

// UTF-8. The font has ASCII; accented letters of Latin-1 appear without accents, the word markers
// of tokenizers (U+0120, U+2581) as an open box for a space, "..." for U+2026, anything else as one
// box for each character.
int TextWidth(std::string_view text, int scale);

// At most `limit` characters; a longer text ends in an ellipsis.
std::string Shortened(std::string_view text, size_t limit);

enum class Direction : uint8_t { kAcross, kUp };

// (x, y) is the top left corner of the text's box on the image; kUp is turned by 90 degrees and
// read from bottom to top.
void DrawText(Image& image, int x, int y, std::string_view text, int scale, Direction direction,
              Rgb color);

// Returns why the file could not be written, with its path; empty = it was.
std::string WritePng(const std::string& path, const Image& image);

}  // namespace attend::cli
