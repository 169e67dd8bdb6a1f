// SPDX-License-Identifier: Apache-2.0
#include "client/cli/image.h"

#include <errno.h>
#include <png.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>

namespace attend::cli {
namespace {

constexpr int kGlyphWidth = 5;

// Eight rows a glyph, from the top; each is a digit of base 32 whose highest bit is the leftmost
// pixel. The glyphs of U+0020 to U+007E, then the three below.
constexpr char kFont[] =
    "0000000044444040aaa00000aavavaa04fke5u40pp248jj0cik8lid044400000"  //  !"#$%&'
    "248884208422248004lel400044v440000000c48000v000000000cc011248gg0"  // ()*+,-./
    "ehjlphe04c4444e0eh1248v0eh161he026aiv220vgu11he0egguhhe0v1248880"  // 01234567
    "ehhehhe0ehhf11e00cc0cc000cc00c48248g842000v0v00084212480eh164040"  // 89:;<=>?
    "ehnlnge0ehhvhhh0uhhuhhu0ehggghe0uhhhhhu0vgguggv0vgguggg0ehgnhhf0"  // @ABCDEFG
    "hhhvhhh0e44444e072222ic0hikokih0ggggggv0hrllhhh0hppljjh0ehhhhhe0"  // HIJKLMNO
    "uhhuggg0ehhhlid0uhhukih0fgge11u0v4444440hhhhhhe0hhhhaa40hhhllrh0"  // PQRSTUVW
    "hha4ahh0hha44440v1248gv0e88888e0gg842110e22222e04ah000000000000v"  // XYZ[\]^_
    "8420000000e1fhf0ggmphhu000egghe011djhhf000ehvge0698s888000fhhf1e"  // `abcdefg
    "ggmphhh040c444e0206222icggikoki0c44444e000qlllh000mphhh000ehhhe0"  // hijklmno
    "00uhhugg00fhhf1100mpggg000fge1u088s8896000hhhjd000hhha4000hhlla0"  // pqrstuvw
    "00ha4ah000hhhf1e00v248v03448443044444440o44244o0008l2000vhhhhhv0"  // xyz{|}~
    "000000l000000hv0";
constexpr int kBox = 95;        // a character that the font has not
constexpr int kEllipsis = 96;   // U+2026
constexpr int kOpenSpace = 97;  // the space at the beginning of a token
constexpr char32_t kEllipsisCode = 0x2026;
constexpr std::string_view kEllipsisText = "\xe2\x80\xa6";
static_assert(sizeof(kFont) == (kOpenSpace + 1) * kGlyphHeight + 1);

// U+00C0 to U+00FF without their accents.
constexpr char kLatin1[] = "AAAAAAACEEEEIIIIDNOOOOOxOUUUUYPsaaaaaaaceeeeiiiidnooooo/ouuuuypy";
static_assert(sizeof(kLatin1) == 65);

// Takes one character off the front; a byte that begins none counts as one (U+FFFD).
char32_t TakeCharacter(std::string_view& text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  const size_t length = lead < 0x80   ? 1
                        : lead < 0xC0 ? 0
                        : lead < 0xE0 ? 2
                        : lead < 0xF0 ? 3
                        : lead < 0xF8 ? 4
                                      : 0;
  bool whole = length > 0 && length <= text.size();
  char32_t code = length < 2 ? lead : lead & (0xFFu >> (length + 1));
  for (size_t i = 1; whole && i < length; ++i) {
    whole = (byte(i) & 0xC0) == 0x80;
    code = code << 6 | (byte(i) & 0x3F);
  }
  text.remove_prefix(whole ? length : 1);
  return whole ? code : 0xFFFD;
}

int GlyphOf(char32_t code) {
  if (code >= 0xC0 && code <= 0xFF) code = kLatin1[code - 0xC0];
  if (code >= 0x20 && code <= 0x7E) return static_cast<int>(code) - 0x20;
  if (code == kEllipsisCode) return kEllipsis;
  return code == 0x0120 || code == 0x2581 ? kOpenSpace : kBox;
}

bool Inked(int glyph, int x, int y) {
  const char digit = kFont[glyph * kGlyphHeight + y];
  const int row = digit <= '9' ? digit - '0' : digit - 'a' + 10;
  return (row >> (kGlyphWidth - 1 - x) & 1) != 0;
}

size_t Characters(std::string_view text) {
  size_t count = 0;
  for (; !text.empty(); ++count) TakeCharacter(text);
  return count;
}

}  // namespace

void Image::Fill(int x, int y, int width, int height, Rgb color) {
  const int right = std::min(x + width, width_);
  const int bottom = std::min(y + height, height_);
  for (int row = std::max(y, 0); row < bottom; ++row) {
    for (int column = std::max(x, 0); column < right; ++column) at(column, row) = color;
  }
}

int TextWidth(std::string_view text, int scale) {
  const int count = static_cast<int>(Characters(text));
  return count == 0 ? 0 : (count * kGlyphAdvance - (kGlyphAdvance - kGlyphWidth)) * scale;
}

std::string Shortened(std::string_view text, size_t limit) {
  if (Characters(text) <= limit) return std::string(text);
  std::string_view rest = text;
  for (size_t i = 0; i + 1 < limit; ++i) TakeCharacter(rest);
  return std::string(text.substr(0, text.size() - rest.size())).append(kEllipsisText);
}

void DrawText(Image& image, int x, int y, std::string_view text, int scale, Direction direction,
              Rgb color) {
  const int end = y + TextWidth(text, scale);  // kUp begins here
  for (int start = 0; !text.empty(); start += kGlyphAdvance) {
    const int glyph = GlyphOf(TakeCharacter(text));
    for (int row = 0; row < kGlyphHeight; ++row) {
      for (int column = 0; column < kGlyphWidth; ++column) {
        if (!Inked(glyph, column, row)) continue;
        const int along = (start + column) * scale;
        if (direction == Direction::kAcross) {
          image.Fill(x + along, y + row * scale, scale, scale, color);
        } else {
          image.Fill(x + row * scale, end - along - scale, scale, scale, color);
        }
      }
    }
  }
}

std::string WritePng(const std::string& path, const Image& image) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "wb"),
                                                             &std::fclose);
  if (file == nullptr) return path + ": " + std::strerror(errno);
  png_image png = {};
  png.version = PNG_IMAGE_VERSION;
  png.width = static_cast<png_uint_32>(image.width());
  png.height = static_cast<png_uint_32>(image.height());
  png.format = PNG_FORMAT_RGB;
  static_assert(sizeof(Rgb) == 3);
  if (png_image_write_to_stdio(&png, file.get(), 0, image.pixels().data(), 0, nullptr) == 0) {
    return path + ": " + png.message;
  }
  if (std::fflush(file.get()) != 0) return path + ": " + std::strerror(errno);
  return {};
}

}  // namespace attend::cli
