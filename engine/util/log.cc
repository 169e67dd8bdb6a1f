// SPDX-License-Identifier: Apache-2.0
#include "engine/util/log.h"

#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <utility>

#include "engine/util/text.h"

namespace attend {
namespace {

// Per event kind: enough to see every line of a bad minute's start, and at most about 250 MB a day
// when every call fails for a whole day.
constexpr double kBurstLines = 100;
constexpr double kLinesPerSecond = 10;
constexpr size_t kValueBytes = 256;

int64_t MonotonicMicroseconds() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// UTC, ISO 8601, milliseconds.
std::string WallTime() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
  const std::time_t seconds = static_cast<std::time_t>(milliseconds / 1000);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char date[32];
  std::strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%S", &utc);
  char text[48];
  std::snprintf(text, sizeof(text), "%s.%03dZ", date, static_cast<int>(milliseconds % 1000));
  return text;
}

// A JSON string, also used as the quoted form of text lines.
void AppendQuoted(std::string_view text, std::string& out) {
  const bool cut = text.size() > kValueBytes;
  text = text.substr(0, kValueBytes);
  out.push_back('"');
  while (!text.empty()) {
    const auto first = static_cast<unsigned char>(text[0]);
    const size_t length = Utf8Length(text);
    if (length == 0) {
      out.append("\\ufffd");
    } else if (first == '"' || first == '\\') {
      out.push_back('\\');
      out.push_back(text[0]);
    } else if (first < 0x20 || first == 0x7f) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", first);
      out.append(escaped);
    } else {
      out.append(text.substr(0, length));
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  if (cut) out.append("...");
  out.push_back('"');
}

bool IsPlain(std::string_view text) {
  return !text.empty() && text.size() <= kValueBytes &&
         std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                  std::string_view("._-:/+,[]@").find(c) != std::string_view::npos;
         });
}

void AppendValue(LogFormat format, const LogField& field, std::string& out) {
  if (const auto* number = std::get_if<int64_t>(&field.value)) {
    out.append(std::to_string(*number));
  } else if (const auto* flag = std::get_if<bool>(&field.value)) {
    out.append(*flag ? "true" : "false");
  } else if (const auto* real = std::get_if<double>(&field.value)) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.6g", *real);
    // JSON has no word for NaN and infinity.
    out.append(format == LogFormat::kJson && !std::isfinite(*real) ? "null" : text);
  } else {
    const auto text = std::get<std::string_view>(field.value);
    if (format == LogFormat::kText && IsPlain(text)) {
      out.append(text);
    } else {
      AppendQuoted(text, out);
    }
  }
}

void AppendField(LogFormat format, const LogField& field, std::string& out) {
  if (format == LogFormat::kJson) {
    out.append(",\"").append(field.key).append("\":");
  } else {
    out.append(" ").append(field.key).append("=");
  }
  AppendValue(format, field, out);
}

}  // namespace

Logger::Logger(LogFormat format, std::FILE* out, Clock clock)
    : format_(format), out_(out), clock_(clock ? std::move(clock) : MonotonicMicroseconds) {}

Logger::~Logger() {
  for (const auto& [event, share] : shares_) {
    if (share.suppressed > 0) WriteLine(LogLevel::kWarning, event, {}, share.suppressed);
  }
}

void Logger::Write(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) {
  const int64_t now_us = clock_();
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = shares_.find(event);
  if (found == shares_.end()) {
    found = shares_.emplace(event, Share{.lines = kBurstLines, .refilled_us = now_us}).first;
  }
  Share& share = found->second;
  const double refill = static_cast<double>(now_us - share.refilled_us) * 1e-6 * kLinesPerSecond;
  share.lines = std::min(kBurstLines, share.lines + std::max(refill, 0.0));
  share.refilled_us = std::max(now_us, share.refilled_us);
  if (share.lines < 1) {
    ++share.suppressed;
    return;
  }
  share.lines -= 1;
  WriteLine(level, event, fields, std::exchange(share.suppressed, 0));
}

void Logger::WriteLine(LogLevel level, std::string_view event,
                       std::initializer_list<LogField> fields, int64_t suppressed) {
  static constexpr const char* kLevelNames[] = {"info", "warning", "error"};
  const char* level_name = kLevelNames[static_cast<int>(level)];
  std::string line;
  line.reserve(256);
  if (format_ == LogFormat::kJson) {
    line.append("{\"time\":\"").append(WallTime()).append("\",\"level\":\"").append(level_name);
    line.append("\",\"event\":\"").append(event).append("\"");
  } else {
    line.append(WallTime()).append(" ").append(level_name).append(" ").append(event);
  }
  for (const LogField& field : fields) AppendField(format_, field, line);
  if (suppressed > 0) AppendField(format_, {"suppressed", suppressed}, line);
  line.append(format_ == LogFormat::kJson ? "}\n" : "\n");
  std::fwrite(line.data(), 1, line.size(), out_);
  std::fflush(out_);
}

std::string HashedId(std::string_view id) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx",
                static_cast<unsigned long long>(XXH3_64bits(id.data(), id.size())));
  return text;
}

}  // namespace attend
