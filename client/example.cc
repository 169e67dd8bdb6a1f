// SPDX-License-Identifier: Apache-2.0
// The first program to read: attention over random rows, then two decode steps of a session.
#include <cstdio>
#include <random>

#include "attend_client.h"

using namespace std::chrono_literals;
namespace client = attend::client;

static int Fail(const client::Error& error) {
  return std::fprintf(stderr, "%s\n", error.ToString().c_str()), 1;
}

int main(int argc, char** argv) {
  auto attend = client::Client::Connect(argc > 1 ? argv[1] : "127.0.0.1:50051", {.deadline = 5s});
  if (!attend.ok()) return Fail(attend.error());
  auto models = attend->ListModels();
  if (!models.ok()) return Fail(models.error());
  const auto& model = models->at(0);
  const auto& layer = model.layers(0);
  std::vector<float> rows(8 * layer.d_model());  // the hidden states of eight tokens
  std::mt19937 random(1);
  for (float& value : rows) value = std::normal_distribution<float>()(random);
  auto answer = attend->Attend(model.name(), layer.name(), {rows, {8, layer.d_model()}});
  if (!answer.ok()) return Fail(answer.error());
  std::printf("%s layer %s: first output %g\n", model.name().c_str(), layer.name().c_str(),
              answer->output.ToFloats()[0]);
  if (!layer.sessions()) return 0;  // only causal layers keep a history

  auto session = attend->OpenSession(model.name());  // closed at the end of main
  if (!session.ok()) return Fail(session.error());
  for (int step = 0; step < 2; ++step) {
    const std::span row(rows.data() + step * layer.d_model(), layer.d_model());
    auto next = session->Attend(layer.name(), {row, {1, layer.d_model()}});
    if (!next.ok()) return Fail(next.error());
    std::printf("step %d: %ld tokens cached\n", step, session->position(layer.name()));
  }
}
