// SPDX-License-Identifier: Apache-2.0
#include "client/cli/command.h"

#include <google/protobuf/util/json_util.h>
#include <grpcpp/support/status.h>

#include <cctype>
#include <cstdio>
#include <iterator>

namespace attend::cli {

int Fail(const client::Error& error) {
  std::fprintf(stderr, "attend: %s\n", error.ToString().c_str());
  return error.attempts == 0 && error.field == "address" ? kUsage : kFailed;
}

client::Result<client::Client> Connect(const Globals& globals, client::Options options) {
  const std::chrono::duration<double> timeout(globals.timeout_seconds);
  options.deadline = std::chrono::duration_cast<std::chrono::milliseconds>(timeout);
  const auto unavailable = [](const client::Result<client::Client>& client) {
    return !client.ok() && client.error().code == grpc::StatusCode::UNAVAILABLE;
  };
  auto client = client::Client::Connect(globals.server, options);
  // About one connection in a hundred fails at once with "No such file or directory", though the
  // server listens. Where calls are made once only (bench), connecting is tried once more.
  if (unavailable(client) && options.max_attempts == 1) {
    client = client::Client::Connect(globals.server, options);
  }
  if (!unavailable(client)) return client;
  client::Error error = client.error();
  error.message = "server " + globals.server + ": " + error.message;
  return error;
}

std::string Json(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string text;
  (void)google::protobuf::util::MessageToJsonString(message, &text, options);
  return text;
}

std::string DTypeText(v1::DType dtype) {
  std::string name = v1::DType_Name(dtype);
  if (name.empty()) return std::to_string(static_cast<int>(dtype));
  name = name.substr(name.find('_') + 1);
  for (char& letter : name) letter = static_cast<char>(std::tolower(letter));
  return name;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

std::string BytesText(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1000 && unit + 1 < std::size(kUnits); ++unit) value /= 1000;
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

CLI::Validator NotNegative() {
  return CLI::Validator(
      [](std::string& text) {
        return text.starts_with('-') ? "got " + text + ", wanted 0 or more" : std::string();
      },
      "");
}

}  // namespace attend::cli
