// SPDX-License-Identifier: Apache-2.0
#include "client/cli/bench/plan.h"

#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <optional>

namespace attend::cli {
namespace {

constexpr int64_t kMaxLength = 1'000'000;

std::optional<int64_t> ParseLength(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  if (!whole || value < 1 || value > kMaxLength) return std::nullopt;
  return value;
}

// The bits of `value`, a multiple of 1/64 in [-2, 2).
uint32_t BitsOf(v1::DType dtype, float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (dtype == v1::DTYPE_F32) return bits;
  if (dtype == v1::DTYPE_BF16) return bits >> 16;
  if (value == 0) return 0;
  const uint32_t exponent = (bits >> 23 & 0xff) - 112;  // the biases 127 and 15
  return (bits >> 16 & 0x8000) | exponent << 10 | (bits >> 13 & 0x3ff);
}

}  // namespace

std::string ParseLengthRange(std::string_view text, LengthRange* range) {
  const size_t colon = text.find(':');
  const auto first = ParseLength(text.substr(0, colon));
  const auto last = colon == std::string_view::npos ? first : ParseLength(text.substr(colon + 1));
  if (!first || !last || *first > *last) {
    return "got " + std::string(text) + ", wanted a length from 1 to " +
           std::to_string(kMaxLength) + " or SHORTEST:LONGEST";
  }
  *range = {.first = *first, .last = *last};
  return "";
}

std::string LengthRangeText(const LengthRange& range) {
  std::string text = std::to_string(range.first);
  if (range.last == range.first) return text;
  return text.append(":").append(std::to_string(range.last));
}

double ArrivalSchedule::Next() {
  const std::lock_guard lock(mutex_);
  const double uniform = std::uniform_real_distribution<double>(0, 1)(random_);
  now_ += -std::log1p(-uniform) / rate_;
  return now_;
}

std::string MakeInput(v1::DType dtype, int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto element_bytes = static_cast<size_t>(client::ElementBytes(dtype));
  std::string data(static_cast<size_t>(count) * element_bytes, '\0');
  uint64_t draws = 0;
  for (size_t at = 0; at < data.size(); at += element_bytes) {
    if (at / element_bytes % 8 == 0) draws = random();
    const auto draw = static_cast<int8_t>(draws & 0xff);
    draws >>= 8;
    const uint32_t bits = BitsOf(dtype, static_cast<float>(draw) / 64);
    for (size_t i = 0; i < element_bytes; ++i) data[at + i] = static_cast<char>(bits >> (8 * i));
  }
  return data;
}

bool HasNaN(v1::DType dtype, std::string_view row) {
  if (dtype == v1::DTYPE_F32) {
    for (size_t at = 0; at + 4 <= row.size(); at += 4) {
      uint32_t bits = 0;
      std::memcpy(&bits, row.data() + at, sizeof(bits));
      if ((bits & 0x7fffffff) > 0x7f800000) return true;
    }
    return false;
  }
  const uint16_t infinity = dtype == v1::DTYPE_F16 ? 0x7c00 : 0x7f80;
  for (size_t at = 0; at + 2 <= row.size(); at += 2) {
    uint16_t bits = 0;
    std::memcpy(&bits, row.data() + at, sizeof(bits));
    if ((bits & 0x7fff) > infinity) return true;
  }
  return false;
}

}  // namespace attend::cli
