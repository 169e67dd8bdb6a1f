// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/flags.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <vector>

namespace attend::bench {
namespace {

using testing::HasSubstr;

std::variant<Flags, Ending> Parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "attend-bench");
  return ParseFlags(static_cast<int>(arguments.size()), arguments.data(), 8);
}

TEST(BenchFlagsTest, Defaults) {
  const auto parsed = Parse({});
  const Flags& flags = std::get<Flags>(parsed);
  EXPECT_EQ(flags.threads, 8);
  EXPECT_EQ(flags.isa, "auto");
  EXPECT_EQ(flags.compute, "auto");
  EXPECT_EQ(flags.repeats, 0);
  EXPECT_FALSE(flags.list || flags.quick || flags.check);
}

TEST(BenchFlagsTest, EveryFlagIsRead) {
  const auto parsed =
      Parse({"--threads=3", "--isa", "avx2", "--compute=fp32", "--cases=^layer/(bert|gpt2)",
             "--list", "--repeats=5", "--quick", "--check", "--json", "out.json"});
  const Flags& flags = std::get<Flags>(parsed);
  EXPECT_EQ(flags.threads, 3);
  EXPECT_EQ(flags.isa, "avx2");
  EXPECT_EQ(flags.compute, "fp32");
  EXPECT_EQ(flags.cases, "^layer/(bert|gpt2)");
  EXPECT_EQ(flags.repeats, 5);
  EXPECT_EQ(flags.json, "out.json");
  EXPECT_TRUE(flags.list && flags.quick && flags.check);
}

TEST(BenchFlagsTest, WrongOnesAreOneLineAndExitCode2) {
  const std::vector<std::vector<const char*>> wrong = {
      {"--threads=0"},   {"--threads=9"}, {"--threads=x"}, {"--isa=sse"}, {"--compute=f16"},
      {"--cases=(bert"}, {"--repeats=0"}, {"--json"},      {"--fast"},    {"layer"}};
  for (const auto& arguments : wrong) {
    const auto parsed = Parse(arguments);
    ASSERT_TRUE(std::holds_alternative<Ending>(parsed)) << arguments[0];
    const Ending& ending = std::get<Ending>(parsed);
    EXPECT_EQ(ending.code, 2) << arguments[0];
    EXPECT_EQ(std::count(ending.text.begin(), ending.text.end(), '\n'), 1) << ending.text;
    const std::string name = arguments[0];
    EXPECT_THAT(ending.text, HasSubstr(name.substr(0, name.find('=')))) << arguments[0];
  }
  const auto threads = Parse({"--threads=9"});
  EXPECT_THAT(std::get<Ending>(threads).text, HasSubstr("got 9, wanted 1 to 8"));
}

TEST(BenchFlagsTest, HelpNamesEveryFlag) {
  const auto parsed = Parse({"--help"});
  const Ending& ending = std::get<Ending>(parsed);
  EXPECT_EQ(ending.code, 0);
  for (const char* flag : {"--threads", "--isa", "--compute", "--cases", "--list", "--repeats",
                           "--quick", "--check", "--json"}) {
    EXPECT_THAT(ending.text, HasSubstr(flag));
  }
}

}  // namespace
}  // namespace attend::bench
