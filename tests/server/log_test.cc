// SPDX-License-Identifier: Apache-2.0
#include "engine/util/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

namespace attend {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;

// A file in memory and a clock that stands still until moved.
class LogTest : public testing::Test {
 protected:
  LogTest() : file_(open_memstream(&data_, &bytes_)) {}
  ~LogTest() override {
    std::fclose(file_);
    std::free(data_);
  }
  Logger::Clock Clock() {
    return [this] { return now_us_; };
  }
  std::vector<std::string> Lines() {
    std::vector<std::string> lines;
    std::string line;
    for (size_t i = 0; i < bytes_; ++i) {
      if (data_[i] == '\n') {
        lines.push_back(line);
        line.clear();
      } else {
        line.push_back(data_[i]);
      }
    }
    EXPECT_EQ(line, "") << "a line without an end";
    return lines;
  }

  char* data_ = nullptr;
  size_t bytes_ = 0;
  std::FILE* file_;
  int64_t now_us_ = 1000000;
};

TEST_F(LogTest, ATextLineHasTimeLevelEventAndFields) {
  Logger logger(LogFormat::kText, file_, Clock());
  logger.Write(LogLevel::kWarning, "call_failed",
               {{"method", "Attend"}, {"tokens", 128}, {"seconds", 0.25}, {"slow", true}});
  ASSERT_EQ(Lines().size(), 1u);
  EXPECT_THAT(Lines()[0],
              MatchesRegex("[0-9-]+T[0-9:]+\\.[0-9][0-9][0-9]Z warning call_failed method=Attend "
                           "tokens=128 seconds=0.25 slow=true"));
}

TEST_F(LogTest, AJsonLineHasTypedValues) {
  Logger logger(LogFormat::kJson, file_, Clock());
  logger.Write(LogLevel::kInfo, "started",
               {{"address", "127.0.0.1:1"}, {"bytes", int64_t{1} << 40}, {"ready", false}});
  ASSERT_EQ(Lines().size(), 1u);
  EXPECT_THAT(Lines()[0], MatchesRegex("\\{\"time\":\"[^\"]+Z\",\"level\":\"info\",\"event\":"
                                       "\"started\",\"address\":\"127.0.0.1:1\",\"bytes\":"
                                       "1099511627776,\"ready\":false\\}"));
}

TEST_F(LogTest, JsonHasNoWordForNanSoItIsNull) {
  Logger logger(LogFormat::kJson, file_, Clock());
  logger.Write(LogLevel::kInfo, "event", {{"value", std::nan("")}});
  EXPECT_THAT(Lines()[0], HasSubstr("\"value\":null"));
}

TEST_F(LogTest, UserTextCannotBreakTheLineOrForgeAField) {
  for (const LogFormat format : {LogFormat::kText, LogFormat::kJson}) {
    Logger logger(format, file_, Clock());
    logger.Write(LogLevel::kInfo, "event", {{"request_id", "a\n\"b\\ code=OK\x7f\x01"}});
  }
  ASSERT_EQ(Lines().size(), 2u);
  for (const std::string& line : Lines()) {
    EXPECT_THAT(line, HasSubstr("\"a\\u000a\\\"b\\\\ code=OK\\u007f\\u0001\""));
  }
}

TEST_F(LogTest, OnlyBytesThatAreNotUtf8AreReplaced) {
  Logger logger(LogFormat::kJson, file_, Clock());
  // Two good characters; a lone continuation, an overlong form, a surrogate and a cut-off
  // character.
  logger.Write(LogLevel::kInfo, "event", {{"good", "\xc3\xa4\xf0\x9f\x98\x80"}});
  logger.Write(LogLevel::kInfo, "event", {{"bad", "\x80|\xc0\xaf|\xed\xa0\x80|\xe2\x82"}});
  EXPECT_THAT(Lines()[0], HasSubstr("\"good\":\"\xc3\xa4\xf0\x9f\x98\x80\""));
  EXPECT_THAT(Lines()[1],
              HasSubstr("\"bad\":\"\\ufffd|\\ufffd\\ufffd|\\ufffd\\ufffd\\ufffd|\\ufffd\\ufffd\""));
}

TEST_F(LogTest, LongTextIsCut) {
  Logger logger(LogFormat::kText, file_, Clock());
  logger.Write(LogLevel::kInfo, "event", {{"model", std::string(1 << 20, 'x')}});
  EXPECT_LT(Lines()[0].size(), 400u);
  EXPECT_THAT(Lines()[0], EndsWith("x...\""));
}

TEST_F(LogTest, AFloodOfOneEventIsSuppressedCountedAndDoesNotSilenceOthers) {
  Logger logger(LogFormat::kText, file_, Clock());
  for (int i = 0; i < 1000; ++i) logger.Write(LogLevel::kWarning, "call_failed", {});
  const size_t written = Lines().size();
  EXPECT_EQ(written, 100u);
  logger.Write(LogLevel::kInfo, "drain", {});
  ASSERT_EQ(Lines().size(), written + 1);
  EXPECT_THAT(Lines().back(), Not(HasSubstr("suppressed")));
  now_us_ += 1000000;
  logger.Write(LogLevel::kWarning, "call_failed", {});
  ASSERT_EQ(Lines().size(), written + 2);
  EXPECT_THAT(Lines().back(), EndsWith("suppressed=900"));
  logger.Write(LogLevel::kWarning, "call_failed", {});
  EXPECT_THAT(Lines().back(), EndsWith("call_failed"));
}

TEST_F(LogTest, TheEndReportsWhatIsStillSuppressed) {
  {
    Logger logger(LogFormat::kJson, file_, Clock());
    for (int i = 0; i < 103; ++i) logger.Write(LogLevel::kWarning, "call_failed", {});
  }
  ASSERT_EQ(Lines().size(), 101u);
  EXPECT_THAT(Lines().back(), EndsWith("\"event\":\"call_failed\",\"suppressed\":3}"));
}

TEST_F(LogTest, LinesOfSeveralThreadsDoNotMix) {
  {
    Logger logger(LogFormat::kText, file_, Clock());
    std::vector<std::thread> threads;
    for (const char* event : {"a", "b", "c", "d"}) {
      threads.emplace_back([&logger, event] {
        for (int i = 0; i < 100; ++i) logger.Write(LogLevel::kInfo, event, {{"i", i}});
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  ASSERT_EQ(Lines().size(), 400u);
  for (const std::string& line : Lines()) {
    EXPECT_THAT(line, MatchesRegex("[^ ]+Z info [abcd] i=[0-9]+"));
  }
}

TEST(HashedIdTest, EqualIdsGiveEqualDigitsAndTheIdIsNotAmongThem) {
  const std::string id = "host.65f.00112233445566778899aabbccddeeff";
  EXPECT_THAT(HashedId(id), MatchesRegex("[0-9a-f]+"));
  EXPECT_EQ(HashedId(id).size(), 16u);
  EXPECT_EQ(HashedId(id), HashedId(std::string(id)));
  EXPECT_NE(HashedId(id), HashedId(id + "0"));
  EXPECT_EQ(id.find(HashedId(id)), std::string::npos);
}

}  // namespace
}  // namespace attend
