// SPDX-License-Identifier: Apache-2.0
//
// `attend info`: what the server is and what it allows.
#include <cstdio>

#include "client/cli/command.h"

namespace attend::cli {
namespace {

void PrintInfo(const v1::ServerInfo& info) {
  const v1::Limits& limits = info.limits();
  std::printf("version       %s\n", info.version().c_str());
  std::printf("replica       %s%s\n", info.replica().c_str(), info.draining() ? " (draining)" : "");
  std::printf("engine        %s, %s, %s", info.engine().c_str(), info.device().c_str(),
              info.isa().c_str());
  if (info.engine() == "cpu") std::printf(", %d threads", info.threads());
  std::printf("\n");
  std::printf("numerics      %s\n", info.numerics_id().c_str());
  std::printf("request       at most %s, %ld tokens, %.1f s\n",
              BytesText(limits.message_bytes()).c_str(), limits.request_tokens(),
              static_cast<double>(limits.deadline_ms()) / 1000);
  std::printf("response      at most %s\n", BytesText(limits.response_bytes()).c_str());
  std::printf("batch         %ld tokens\n", limits.batch_tokens());
  std::printf("queue         %ld requests, %ld tokens, %s\n", limits.queue_requests(),
              limits.queue_tokens(), BytesText(limits.queue_bytes()).c_str());
  std::printf("sessions      %ld, %s of keys and values, idle %ld s\n", limits.sessions(),
              BytesText(limits.kv_bytes()).c_str(), limits.session_ttl_seconds());
  std::printf("stream        %ld items in flight\n", limits.stream_items_in_flight());
}

int RunInfo(const Globals& globals, bool json) {
  auto client = Connect(globals);
  if (!client.ok()) return Fail(client.error());
  if (json) {
    std::printf("%s", Json(client->server()).c_str());
  } else {
    PrintInfo(client->server());
  }
  return kOk;
}

}  // namespace

void AddInfo(CLI::App& app, Globals& globals) {
  CLI::App* command = app.add_subcommand("info", "Show the server's version, device and limits");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print JSON, fields as in the proto");
  command->callback([&globals, json] { globals.exit_code = RunInfo(globals, *json); });
}

}  // namespace attend::cli
