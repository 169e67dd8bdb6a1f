// SPDX-License-Identifier: Apache-2.0
//
// Structured log lines: one event with key=value fields per line, as text or JSON. A Logger is made
// once at start-up and passed to those who log. It decides escaping, value length and how many
// lines per event are written; what an event is called and which fields it has is the caller's.
#pragma once

#include <concepts>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <initializer_list>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <variant>

namespace attend {

enum class LogFormat : uint8_t { kText, kJson };
enum class LogLevel : uint8_t { kInfo, kWarning, kError };

// Borrows key and text; lives as long as the call of Write it is made for.
struct LogField {
  template <std::integral T>
  LogField(std::string_view name, T number) : key(name), value(static_cast<int64_t>(number)) {}
  LogField(std::string_view name, bool flag) : key(name), value(flag) {}
  LogField(std::string_view name, double number) : key(name), value(number) {}
  LogField(std::string_view name, std::string_view text) : key(name), value(text) {}
  LogField(std::string_view name, const char* text) : key(name), value(std::string_view(text)) {}
  LogField(std::string_view name, const std::string& text)
      : key(name), value(std::string_view(text)) {}

  std::string_view key;  // [a-z_]+
  std::variant<int64_t, bool, double, std::string_view> value;
};

// Thread-safe; a line is written with one call, so lines never mix.
class Logger {
 public:
  // Monotonic microseconds; tests pass their own.
  using Clock = std::function<int64_t()>;

  // Borrows `out`, which outlives the logger.
  explicit Logger(LogFormat format, std::FILE* out = stderr, Clock clock = nullptr);
  // Writes how many lines were suppressed and not yet reported.
  ~Logger();
  Logger(const Logger&) = delete;
  Logger& operator=(const Logger&) = delete;

  // Writes one line, or counts it as suppressed when the event used up its share of lines; the next
  // line of the event then carries suppressed=N. `event` is one of a fixed set of names ([a-z_]+),
  // never user input. Text is cut at 256 bytes; control characters, quotes and bytes that are not
  // UTF-8 are escaped.
  void Write(LogLevel level, std::string_view event, std::initializer_list<LogField> fields);

 private:
  struct Share {
    double lines = 0;  // that may still be written
    int64_t refilled_us = 0;
    int64_t suppressed = 0;
  };
  void WriteLine(LogLevel level, std::string_view event, std::initializer_list<LogField> fields,
                 int64_t suppressed);

  const LogFormat format_;
  std::FILE* const out_;
  const Clock clock_;
  std::mutex mutex_;
  std::map<std::string, Share, std::less<>> shares_;  // by event
};

// 16 hexadecimal digits that stand for a session id: equal ids give equal digits in every process,
// and the id, which gives access to the session, can't be read off a log.
std::string HashedId(std::string_view id);

}  // namespace attend
