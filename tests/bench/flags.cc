// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/flags.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <regex>

namespace attend::bench {
namespace {

constexpr const char* kFooter =
    "ms       median of a batch through the layer, from the call to its end; least is the best,\n"
    "         spread what lies between the quarters of the batches, of the median\n"
    "useful   operations on visible keys only, or bytes of weights, keys and values as stored\n"
    "share    of the limit measured before and after the case on the same cores; not printed\n"
    "         when that moved by more than 10 % meanwhile\n"
    "floor    ms that the limits allow: in each phase the larger of its operations over their\n"
    "         limit and its bytes over the read bandwidth\n"
    "peak     resident memory of all the case needs; work: of it, what its batches added to\n"
    "         weights, caches, inputs and outputs\n"
    "\n"
    "fma, dot and int8 are multiply-adds of fp32, bf16 and int8; read is a buffer as large as "
    "what\n"
    "the case reads in a round. Decode cases go through so many layers and caches that what a "
    "batch\n"
    "reads is in no cache.\n"
    "\n"
    "Exit codes: 0, 1 a case failed or, with --check, a target was not reached, 2 wrong usage.\n"
    "\n"
    "Example: attend-bench --cases 'bert|decode' --threads 1 --json bench.json";

CLI::Validator OneOf(std::initializer_list<const char*> names) {
  return CLI::Validator(
      [names = std::vector<std::string>(names.begin(), names.end())](std::string& text) {
        std::string all;
        for (const std::string& name : names) {
          if (name == text) return std::string();
          all += all.empty() ? name : "|" + name;
        }
        return "got " + text + ", wanted " + all;
      },
      "");
}

CLI::Validator Between(int64_t first, int64_t last) {
  return CLI::Validator(
      [first, last](std::string& text) {
        int64_t value = 0;
        if (CLI::detail::lexical_cast(text, value) && value >= first && value <= last) {
          return std::string();
        }
        return "got " + text + ", wanted " + std::to_string(first) + " to " + std::to_string(last);
      },
      "");
}

CLI::Validator RegularExpression() {
  return CLI::Validator(
      [](std::string& text) {
        try {
          std::regex ignored(text);
        } catch (const std::regex_error&) {
          return "got " + text + ", wanted a regular expression (ECMAScript)";
        }
        return std::string();
      },
      "");
}

}  // namespace

std::variant<Flags, Ending> ParseFlags(int count, const char* const* arguments, int most_threads) {
  Flags flags;
  flags.threads = most_threads;
  CLI::App app{"Measures attend's CPU engine, without service, beside the limits of the machine",
               "attend-bench"};
  app.footer(kFooter);
  app.add_option("--threads", flags.threads, "Threads, each with a core of its own")
      ->check(Between(1, most_threads))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--isa", flags.isa, "Instruction set: auto, avx2 or avx512")
      ->check(OneOf({"auto", "avx2", "avx512"}))
      ->type_name("NAME")
      ->capture_default_str();
  app.add_option("--compute", flags.compute, "Products of bf16 weights: auto, fp32 or bf16")
      ->check(OneOf({"auto", "fp32", "bf16"}))
      ->type_name("NAME")
      ->capture_default_str();
  app.add_option("--cases", flags.cases, "Only those whose names hold a match")
      ->check(RegularExpression())
      ->type_name("REGEX");
  app.add_flag("--list", flags.list, "Print the names of the cases and end");
  app.add_option("--repeats", flags.repeats, "Batches of each layer (default: 11 or more)")
      ->check(Between(1, 1000000))
      ->type_name("N");
  app.add_flag("--quick", flags.quick,
               "Fewer batches and not the longest sequences: all in a minute");
  app.add_flag("--check", flags.check,
               "Print the engine's targets and whether they are reached (default cases: those "
               "that are needed for it)");
  app.add_option("--json", flags.json, "Write the results there, too")->type_name("FILE");
  try {
    app.parse(count, arguments);
  } catch (const CLI::CallForHelp&) {
    return Ending{0, app.help()};
  } catch (const CLI::ParseError& error) {
    return Ending{2, std::string("attend-bench: ") + error.what() + "; see attend-bench --help\n"};
  }
  return flags;
}

}  // namespace attend::bench
