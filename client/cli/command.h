// SPDX-License-Identifier: Apache-2.0
//
// What the subcommands of `attend` share: the global flags, the exit codes and small output
// helpers. Each subcommand is one file with one Add function that main.cc calls.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <utility>
#include <vector>

#include "client/attend_client.h"

namespace attend::cli {

constexpr int kOk = 0;
constexpr int kFailed = 1;  // the server's answer, or a comparison that failed
constexpr int kUsage = 2;   // wrong flags, unreadable or unwritable files

struct Globals {
  std::string server = "127.0.0.1:50051";
  double timeout_seconds = 30;
  int exit_code = kOk;  // set by the subcommand that ran
};

// Prints the error on one line and returns kFailed, for a --server that is no address kUsage.
int Fail(const client::Error& error);

// With the deadline of `globals`.
client::Result<client::Client> Connect(const Globals& globals, client::Options options = {});

// The text of a message as JSON, field names as in the proto.
std::string Json(const google::protobuf::Message& message);
// What --dtype takes.
inline const std::vector<std::pair<std::string, v1::DType>> kWireDTypes = {
    {"f32", v1::DTYPE_F32}, {"f16", v1::DTYPE_F16}, {"bf16", v1::DTYPE_BF16}};
// "f32", "bf16"; the number for types this build doesn't know.
std::string DTypeText(v1::DType dtype);
// "[2, 3]"
std::string ShapeText(const std::vector<int64_t>& shape);
// "1.5 MB" with powers of 1000.
std::string BytesText(int64_t bytes);

// Accepts the names of `values` and turns them into their numbers.
template <typename Value>
CLI::Validator OneOf(std::vector<std::pair<std::string, Value>> values) {
  return CLI::Validator(
      [values = std::move(values)](std::string& text) {
        std::string names;
        for (const auto& [name, value] : values) {
          if (text == name) {
            text = std::to_string(static_cast<int>(value));
            return std::string();
          }
          names += names.empty() ? name : "|" + name;
        }
        return "got " + text + ", wanted " + names;
      },
      "");
}
// Accepts integers from 0.
CLI::Validator NotNegative();

// `globals` outlives the parsing.
void AddInfo(CLI::App& app, Globals& globals);
void AddModels(CLI::App& app, Globals& globals);
void AddRun(CLI::App& app, Globals& globals);
void AddSession(CLI::App& app, Globals& globals);
void AddBench(CLI::App& app, Globals& globals);
void AddMakeCheckpoint(CLI::App& app, Globals& globals);
void AddInspect(CLI::App& app, Globals& globals);

}  // namespace attend::cli
