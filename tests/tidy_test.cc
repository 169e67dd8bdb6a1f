// SPDX-License-Identifier: Apache-2.0
//
// What a reader may rely on without reading: who includes whom, how long files get, that every
// source is built and every test registered, that the README's tables are those of the code, and
// the format. Reads the source tree only.
#include <gtest/gtest.h>
#include <stdio.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "attend/v1/attend.pb.h"
#include "server/metrics.h"
#include "server/options.h"

namespace attend {
namespace {

namespace fs = std::filesystem;

const fs::path kRoot = ATTEND_SOURCE_DIR;

std::string Read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// Every file of the tree by its path from the root; no build folders, no dot files, no golden data.
std::vector<std::string> Files() {
  std::vector<std::string> files;
  for (auto entry = fs::recursive_directory_iterator(kRoot); entry != fs::end(entry); ++entry) {
    const std::string path = fs::relative(entry->path(), kRoot).generic_string();
    const std::string name = entry->path().filename().string();
    const bool top_level = path == name;
    if (name[0] == '.' || name == "__pycache__" || (top_level && name.starts_with("build")) ||
        path == "tests/golden") {
      if (entry->is_directory()) entry.disable_recursion_pending();
    } else if (entry->is_regular_file()) {
      files.push_back(path);
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

bool IsSource(const std::string& path) {
  return path.ends_with(".h") || path.ends_with(".cc") || path.ends_with(".cu");
}

std::vector<std::string> Sources() {
  std::vector<std::string> sources = Files();
  std::erase_if(sources, [](const std::string& path) { return !IsSource(path); });
  return sources;
}

// ---- Who includes whom ----

// The first matching prefix of an include names its group; a source's is that of its path.
std::string GroupOf(const std::string& path) {
  static const std::vector<std::pair<std::string, std::string>> kGroups = {
      {"engine/util/", "util"},
      {"engine/cpu/", "cpu"},
      {"engine/cuda/", "cuda"},
      {"engine/model/", "model"},
      {"engine/", "engine"},
      {"server/", "server"},
      {"client/", "client"},
      {"attend_client.h", "client"},
      {"tests/", "tests"},
      {"attend/v1/", "proto"},
      {"grpc/health/", "proto"},
      {"grpc/reflection/", "proto"},
      {"grpc/", "grpc"},
      {"grpcpp/", "grpc"},
      {"google/protobuf/", "protobuf"},
      {"prometheus/", "prometheus"},
      {"dnnl", "onednn"},
      {"cuda_runtime_api.h", "cuda_toolkit"},
      {"cublasLt.h", "cuda_toolkit"},
      {"hwy/", "highway"},
      {"omp.h", "openmp"},
      {"nlohmann/", "json"},
      {"CLI/", "cli11"},
      {"absl/", "absl"},
      {"xxhash.h", "xxhash"},
      {"png.h", "png"},
      {"sanitizer/", "std"}};
  for (const auto& [prefix, group] : kGroups) {
    if (path.starts_with(prefix)) return group;
  }
  return "std";
}

// What each group may include besides itself and the standard and system headers.
const std::map<std::string, std::set<std::string>> kMayInclude = {
    {"util", {"absl", "xxhash"}},
    {"engine", {"util", "absl"}},
    {"model", {"engine", "util", "absl", "json", "xxhash"}},
    {"cpu", {"engine", "util", "absl", "onednn", "highway", "openmp"}},
    {"cuda", {"engine", "util", "absl", "cuda_toolkit"}},
    {"server", {"engine", "util", "absl", "proto", "protobuf", "grpc", "cli11", "xxhash"}},
    {"client", {"absl", "proto", "protobuf", "grpc", "cli11"}},
};

// The seams: one file, one more header or group.
const std::set<std::pair<std::string, std::string>> kSeams = {
    {"engine/attention_engine.cc", "engine/cpu/cpu_engine.h"},
    {"engine/attention_engine.cc", "engine/cuda/cuda_plugin.h"},
    {"engine/attention_runtime.h", "engine/model/checkpoint.h"},
    {"server/server.h", "engine/model/checkpoint.h"},
    {"server/memory_plan.h", "engine/model/checkpoint.h"},
    {"server/metrics.cc", "prometheus"},
    {"client/cli/make_checkpoint.cc", "engine/model/make_checkpoint.h"},
    {"client/cli/inspect.cc", "engine/model/inspect.h"},
    {"client/cli/image.cc", "png"},
    {"client/cli/bench/report.cc", "json"},
    {"client/cli/bench/check.cc", "json"},
};

TEST(TidyTest, IncludesPointInTheDirectionsOfTheArchitecture) {
  const std::regex include("^\\s*#\\s*include\\s*[<\"]([^>\"]+)[>\"]");
  for (const std::string& path : Sources()) {
    const std::string group = GroupOf(path);
    if (group == "tests") continue;
    ASSERT_TRUE(kMayInclude.contains(group)) << path << ": no rule for this folder";
    for (const std::string& line : Lines(Read(kRoot / path))) {
      std::smatch match;
      if (!std::regex_search(line, match, include)) continue;
      const std::string header = match[1];
      const std::string target = GroupOf(header);
      const bool allowed = target == group || target == "std" ||
                           kMayInclude.at(group).contains(target) ||
                           kSeams.contains({path, header}) || kSeams.contains({path, target});
      EXPECT_TRUE(allowed) << path << " (" << group << ") must not include " << header << " ("
                           << target << ")";
    }
  }
}

TEST(TidyTest, QueueAndBatcherKnowNoWire) {
  for (const char* path :
       {"server/batch_queue.h", "server/batch_queue.cc", "server/batcher.h", "server/batcher.cc"}) {
    for (const std::string& line : Lines(Read(kRoot / path))) {
      EXPECT_FALSE(line.starts_with("#include") &&
                   std::regex_search(line, std::regex("grpc|attend/v1|protobuf|server/rpc")))
          << path << ": " << line;
    }
  }
}

// ---- Files ----

TEST(TidyTest, FilesFitOnAFewScreens) {
  for (const std::string& path : Sources()) {
    const size_t budget = path.starts_with("tests/") ? 600 : 500;
    EXPECT_LE(Lines(Read(kRoot / path)).size(), budget) << path << " has more lines than allowed";
  }
}

TEST(TidyTest, SourcesNameTheirLicenceFirst) {
  for (const std::string& path : Files()) {
    const bool python = path.ends_with(".py");
    if (!IsSource(path) && !path.ends_with(".proto") && !python) continue;
    const std::string comment = python ? "#" : "//";
    EXPECT_TRUE(Read(kRoot / path).starts_with(comment + " SPDX-License-Identifier: Apache-2.0\n"))
        << path;
  }
}

TEST(TidyTest, HeadersGuardThemselvesWithPragmaOnce) {
  for (const std::string& path : Sources()) {
    if (!path.ends_with(".h") || path.ends_with("-inl.h")) continue;  // -inl.h: once per target
    EXPECT_NE(Read(kRoot / path).find("\n#pragma once\n"), std::string::npos) << path;
  }
}

TEST(TidyTest, TopLevelHoldsOnlyWhatTheArchitectureNames) {
  const std::set<std::string> allowed = {"proto",      "server",    "client",
                                         "engine",     "deploy",    "tests",
                                         "Dockerfile", "README.md", "CMakeLists.txt"};
  for (const auto& entry : fs::directory_iterator(kRoot)) {
    const std::string name = entry.path().filename().string();
    if (name[0] == '.' || name.starts_with("build")) continue;
    EXPECT_TRUE(allowed.contains(name)) << name;
  }
}

TEST(TidyTest, NoFileHoldsAnUnfinishedNoteOrTheNameOfAPackageHost) {
  // In two parts each, or this file would be the first to fail.
  const std::vector<std::string> words = {
      std::string("TO") + "DO",       std::string("FIX") + "ME",
      std::string("pypi.") + "org",   std::string("pythonhosted.") + "org",
      std::string("debian.") + "org", std::string("docker.") + "io",
      std::string("ghcr.") + "io",    std::string("quay.") + "io"};
  for (const std::string& path : Files()) {
    if (path.ends_with(".npy")) continue;
    const std::string text = Read(kRoot / path);
    for (const std::string& word : words) {
      EXPECT_EQ(text.find(word), std::string::npos) << path << " holds " << word;
    }
  }
}

// ---- The build ----

// `text` with the body of each foreach(VARIABLE WORDS...) once for each word.
std::string Unrolled(const std::string& text) {
  const std::regex loop("foreach\\((\\w+) ([^)]*)\\)([^]*?)endforeach\\(\\)");
  std::string unrolled;
  auto rest = text.begin();
  for (auto found = std::sregex_iterator(text.begin(), text.end(), loop);
       found != std::sregex_iterator(); ++found) {
    const std::smatch& match = *found;
    unrolled.append(rest, match[0].first);
    std::istringstream words(match[2]);
    const std::regex variable("\\$\\{" + match[1].str() + "\\}");
    for (std::string word; words >> word;) {
      unrolled += std::regex_replace(match[3].str(), variable, word);
    }
    rest = match[0].second;
  }
  return unrolled.append(rest, text.end());
}

// The files that the commands of a CMakeLists.txt name, by their path from the root; `command`
// matches a whole command.
std::set<std::string> FilesNamedInCMake(const std::regex& command) {
  std::set<std::string> named;
  for (const std::string& path : Files()) {
    if (fs::path(path).filename() != "CMakeLists.txt") continue;
    const std::string text = Unrolled(Read(kRoot / path));
    for (auto match = std::sregex_iterator(text.begin(), text.end(), command);
         match != std::sregex_iterator(); ++match) {
      std::istringstream words(std::regex_replace(match->str(), std::regex("[()]"), " "));
      for (std::string word; words >> word;) {
        named.insert((fs::path(path).parent_path() / word).lexically_normal().generic_string());
      }
    }
  }
  return named;
}

TEST(TidyTest, EverySourceIsBuilt) {
  const auto built = FilesNamedInCMake(std::regex("add_(library|executable)\\([^)]*\\)"));
  const auto tested = FilesNamedInCMake(std::regex("attend_test\\([^)]*\\)"));
  for (const std::string& path : Sources()) {
    if (path.ends_with(".h")) continue;
    EXPECT_TRUE(built.contains(path) || tested.contains(path))
        << path << " is in no CMakeLists.txt";
  }
}

TEST(TidyTest, EveryTestIsRegistered) {
  const auto tested = FilesNamedInCMake(std::regex("attend_(python_)?test\\([^)]*\\)"));
  for (const std::string& path : Files()) {
    if (!path.ends_with("_test.cc") && !path.ends_with("_test.py")) continue;
    EXPECT_TRUE(tested.contains(path)) << path << " is in no attend_test(), attend_python_test()";
  }
}

TEST(TidyTest, SourcesAreFormatted) {
  std::string command = "cd '" + kRoot.string() + "' && clang-format --dry-run -Werror";
  for (const std::string& path : Sources()) command += " " + path;
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string output;
  char buffer[4096];
  while (fgets(buffer, sizeof buffer, pipe) != nullptr) output += buffer;
  std::string complaints;  // the first of each file: "path:line:column: error: ..."
  std::set<std::string> seen;
  for (const std::string& line : Lines(output)) {
    const bool of_a_file = line.find(": error: ") != std::string::npos;
    if (of_a_file && seen.insert(line.substr(0, line.find(':'))).second) complaints += line + "\n";
  }
  EXPECT_EQ(pclose(pipe), 0) << "run clang-format -i (deploy/install-dependencies.sh installs it)\n"
                             << (complaints.empty() ? output : complaints);
}

// ---- The README's tables ----

// The table rows below `heading`, up to the next heading, without the two header rows.
std::vector<std::string> ReadmeTable(const std::string& heading) {
  std::vector<std::string> rows;
  bool inside = false;
  for (const std::string& line : Lines(Read(kRoot / "README.md"))) {
    if (line.starts_with("#")) inside = line == heading;
    if (inside && line.starts_with("|")) rows.push_back(line);
  }
  EXPECT_GE(rows.size(), 2u) << "README.md has no table below " << heading;
  if (rows.size() >= 2) rows.erase(rows.begin(), rows.begin() + 2);
  return rows;
}

// The first cell of each row, without its backquotes.
std::vector<std::string> FirstCells(const std::vector<std::string>& rows) {
  std::vector<std::string> cells;
  for (const std::string& row : rows) {
    std::smatch match;
    cells.push_back(std::regex_search(row, match, std::regex("^\\| `([^`]*)`")) ? match[1].str()
                                                                                : row);
  }
  return cells;
}

std::string Cell(std::string_view text) {
  return std::regex_replace(std::string(text), std::regex("\\|"), "\\|");
}

// Printed whole when the README is behind: it can be pasted.
std::string Joined(const std::vector<std::string>& rows) {
  std::string text = "\n";
  for (const std::string& row : rows) text += row + "\n";
  return text;
}

TEST(TidyTest, ReadmeListsTheFlagsOfTheServer) {
  std::vector<std::string> rows;
  for (const FlagRow& flag : FlagTable()) {
    rows.push_back("| `--" + flag.name + "`" + (flag.repeatable ? " (repeatable)" : "") + " | " +
                   Cell(flag.default_value) + " | " + flag.unit + " | " + Cell(flag.allowed) +
                   " | " + Cell(flag.help) + " |");
  }
  EXPECT_EQ(Joined(ReadmeTable("## Flags")), Joined(rows));
}

TEST(TidyTest, ReadmeListsTheMetricsOfTheServer) {
  std::vector<std::string> rows;
  for (const SeriesRow& series : SeriesTable()) {
    rows.push_back("| `" + std::string(series.name) + "` | " + std::string(series.type) + " | " +
                   std::string(series.labels) + " | " + Cell(series.help) + " |");
  }
  EXPECT_EQ(Joined(ReadmeTable("## Metrics")), Joined(rows));
}

TEST(TidyTest, ReadmeListsEveryReasonOfAnError) {
  std::vector<std::string> reasons;
  const auto* descriptor = v1::Reason_descriptor();
  for (int i = 1; i < descriptor->value_count(); ++i) {
    reasons.push_back(descriptor->value(i)->name());
  }
  EXPECT_EQ(FirstCells(ReadmeTable("## Errors")), reasons);
}

TEST(TidyTest, ReadmeListsEveryLimitAndEachIsAFlag) {
  std::set<std::string> flags;
  for (const FlagRow& flag : FlagTable()) flags.insert(flag.name);
  std::vector<std::string> limits;
  const auto* descriptor = v1::Limits::descriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    limits.push_back(descriptor->field(i)->name());
    EXPECT_TRUE(flags.contains(limits.back())) << limits.back() << " is no flag";
  }
  EXPECT_EQ(FirstCells(ReadmeTable("## Limits")), limits);
}

}  // namespace
}  // namespace attend
