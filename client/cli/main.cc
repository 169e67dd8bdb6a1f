// SPDX-License-Identifier: Apache-2.0
//
// The command line `attend`: global flags and exit codes. Every subcommand is a file beside this
// one.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>

#include "client/cli/command.h"

namespace {

// One line on what is wrong and one on where to read more; help goes to standard output.
int ReportParse(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) return app.exit(error);
  std::string command = "attend";
  std::string what = error.what();
  if (app.get_subcommands().empty() && !app.remaining().empty()) {
    what = "got " + app.remaining().front() + ", wanted a subcommand";
  }
  for (const CLI::App* at = &app; !at->get_subcommands().empty();) {
    at = at->get_subcommands().front();
    command += " " + at->get_name();
  }
  std::fprintf(stderr, "attend: %s\nTry: %s --help\n", what.c_str(), command.c_str());
  return attend::cli::kUsage;
}

// What can't be printed, on a full disk or to a closed descriptor, is no success.
int AfterOutput(int code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  std::fprintf(stderr, "attend: standard output can't be written: %s\n", std::strerror(errno));
  return attend::cli::kUsage;
}

}  // namespace

int main(int argc, char** argv) try {
  using namespace attend::cli;
  CLI::App app("Talks to attend-server: attention layers of loaded models, sessions, checkpoints.",
               "attend");
  app.footer(
      "Exit codes: 0 done, 1 the server refused or a comparison failed, 2 wrong usage.\n"
      "Example: attend run --model bert --layer 0 --input states.npy --output attention.npy");
  Globals globals;
  app.add_option("--server", globals.server, "Address of the server")
      ->envname("ATTEND_SERVER")
      ->type_name("ADDRESS")
      ->capture_default_str();
  app.add_option("--timeout", globals.timeout_seconds,
                 "Longest time for each call, retries included")
      ->check(CLI::Range(0.001, 86400.0))
      ->check([](const std::string& text) {  // a range lets it pass
        return text.find("nan") == std::string::npos ? "" : "got " + text + ", wanted a number";
      })
      ->type_name("SECONDS")
      ->capture_default_str();
  app.set_version_flag("--version", "attend " ATTEND_VERSION);
  app.require_subcommand(1);
  app.fallthrough();  // global flags may follow the subcommand
  AddInfo(app, globals);
  AddModels(app, globals);
  AddRun(app, globals);
  AddSession(app, globals);
  AddBench(app, globals);
  AddMakeCheckpoint(app, globals);
  AddInspect(app, globals);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return ReportParse(app, error);
  }
  return AfterOutput(globals.exit_code);
} catch (const std::exception& error) {
  std::fprintf(stderr, "attend: %s\n", error.what());
  return attend::cli::kFailed;
}
