// SPDX-License-Identifier: Apache-2.0
//
// `attend session open|show|fork|truncate|close`: sessions by their id. Ids go to standard output
// alone, so that scripts can keep them.
#include <cstdio>

#include "client/cli/command.h"

namespace attend::cli {
namespace {

struct SessionFlags {
  std::string id;
  std::string model;
  std::vector<std::string> layers;
  int64_t ttl_seconds = 0;
  int64_t max_tokens = 0;
  int64_t length = 0;
  bool json = false;
};

void PrintSession(const v1::Session& session) {
  std::printf("id            %s\n", session.id().c_str());
  std::printf("model         %s\n", session.model().c_str());
  std::printf("replica       %s\n", session.replica().c_str());
  std::printf("length        %ld tokens, %s\n", session.length(),
              BytesText(session.kv_bytes()).c_str());
  std::printf("idle          %ld of %ld s\n", session.idle_seconds(), session.ttl_seconds());
  for (const v1::LayerState& layer : session.layers()) {
    std::printf("layer %-7s %ld tokens", layer.layer().c_str(), layer.length());
    if (layer.context_length() > 0) std::printf(", context %ld", layer.context_length());
    std::printf("\n");
  }
}

int Open(client::Client& client, const SessionFlags& flags) {
  v1::OpenSessionRequest request;
  request.set_model(flags.model);
  request.mutable_layers()->Assign(flags.layers.begin(), flags.layers.end());
  request.set_ttl_seconds(flags.ttl_seconds);
  request.set_max_tokens(flags.max_tokens);
  auto session = client.OpenSession(request);
  if (!session.ok()) return Fail(session.error());
  session->Detach();
  std::printf("%s\n", session->id().c_str());
  return kOk;
}

int Show(client::Session& session, const SessionFlags& flags) {
  auto info = session.Info();
  if (!info.ok()) return Fail(info.error());
  if (flags.json) {
    std::printf("%s", Json(*info).c_str());
  } else {
    PrintSession(*info);
  }
  return kOk;
}

int Fork(client::Session& session, std::optional<int64_t> length) {
  auto fork = session.Fork(length);
  if (!fork.ok()) return Fail(fork.error());
  fork->Detach();
  std::printf("%s\n", fork->id().c_str());
  return kOk;
}

int Truncate(client::Session& session, int64_t length) {
  auto truncated = session.Truncate(length);
  return truncated.ok() ? kOk : Fail(truncated.error());
}

int Close(client::Session& session) {
  auto closed = session.Close();
  return closed.ok() ? kOk : Fail(closed.error());
}

// Finds the session named by `flags` and does `action` on it.
template <typename Action>
int WithSession(const Globals& globals, const SessionFlags& flags, Action action) {
  auto client = Connect(globals);
  if (!client.ok()) return Fail(client.error());
  auto session = client->AttachSession(flags.id);
  if (!session.ok()) return Fail(session.error());
  return action(*session);
}

CLI::App* AddOnId(CLI::App* parent, SessionFlags& flags, const char* name, const char* help) {
  CLI::App* command = parent->add_subcommand(name, help);
  command->add_option("id", flags.id, "Id of the session")->required()->type_name("ID");
  return command;
}

void AddOpen(CLI::App* parent, Globals& globals, const std::shared_ptr<SessionFlags>& flags) {
  CLI::App* open = parent->add_subcommand("open", "Open a session and print its id");
  open->add_option("--model", flags->model, "Model (default: the only one)")->type_name("NAME");
  open->add_option("--layers", flags->layers, "Only these layers, separated by commas")
      ->delimiter(',')
      ->type_name("NAMES");
  open->add_option("--ttl", flags->ttl_seconds, "Idle time allowed; 0 = the server's default")
      ->check(NotNegative())
      ->type_name("SECONDS");
  open->add_option("--max_tokens,--max-tokens", flags->max_tokens,
                   "Refuse more tokens; 0 = no limit")
      ->check(NotNegative())
      ->type_name("N");
  open->callback([&globals, flags] {
    auto client = Connect(globals);
    globals.exit_code = client.ok() ? Open(*client, *flags) : Fail(client.error());
  });
}

}  // namespace

void AddSession(CLI::App& app, Globals& globals) {
  CLI::App* parent = app.add_subcommand("session", "Open, show, fork, truncate or close a session");
  parent->require_subcommand(1);
  auto flags = std::make_shared<SessionFlags>();
  AddOpen(parent, globals, flags);

  CLI::App* show = AddOnId(parent, *flags, "show", "Show where a session stands");
  show->add_flag("--json", flags->json, "Print JSON, fields as in the proto");
  show->callback([&globals, flags] {
    globals.exit_code = WithSession(globals, *flags, [&](auto& s) { return Show(s, *flags); });
  });

  CLI::App* fork = AddOnId(parent, *flags, "fork", "Copy a session and print the new id");
  CLI::Option* fork_length = fork->add_option("--length", flags->length, "Cut the copy to N tokens")
                                 ->check(NotNegative())
                                 ->type_name("N");
  fork->callback([&globals, flags, fork_length] {
    std::optional<int64_t> length;
    if (fork_length->count() > 0) length = flags->length;
    globals.exit_code = WithSession(globals, *flags, [&](auto& s) { return Fork(s, length); });
  });

  CLI::App* truncate = AddOnId(parent, *flags, "truncate", "Cut every layer to at most N tokens");
  truncate->add_option("--length", flags->length, "Tokens to keep")
      ->required()
      ->check(NotNegative())
      ->type_name("N");
  truncate->callback([&globals, flags] {
    globals.exit_code =
        WithSession(globals, *flags, [&](auto& s) { return Truncate(s, flags->length); });
  });

  CLI::App* close = AddOnId(parent, *flags, "close", "End a session and free its memory");
  close->callback([&globals, flags] {
    globals.exit_code = WithSession(globals, *flags, [](auto& s) { return Close(s); });
  });
}

}  // namespace attend::cli
