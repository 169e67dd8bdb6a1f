// SPDX-License-Identifier: Apache-2.0
//
// `attend models`: the loaded models and their layers, equal neighbours folded into one line.
#include <cstdio>

#include "client/cli/command.h"

namespace attend::cli {
namespace {

std::string Describe(const v1::Layer& layer) {
  std::string text = std::to_string(layer.d_model()) + " wide, " + std::to_string(layer.q_heads());
  if (layer.kv_heads() != layer.q_heads()) text += "/" + std::to_string(layer.kv_heads());
  text += " heads of " + std::to_string(layer.head_dim());
  if (layer.mask_selectable()) {
    text += ", mask selectable";
  } else {
    text += layer.causal() ? ", causal" : ", bidirectional";
  }
  if (layer.window() > 0) text += ", window " + std::to_string(layer.window());
  if (layer.cross_attention())
    text += ", context " + std::to_string(layer.context_width()) + " wide";
  if (!layer.positions().empty() && layer.positions() != "none") text += ", " + layer.positions();
  if (layer.sessions()) {
    text += ", sessions (" + BytesText(layer.kv_bytes_per_token()) + " a token)";
  }
  return text + ", " + BytesText(layer.weight_bytes());
}

void PrintModel(const v1::Model& model) {
  std::printf("%s: %s, weights %s, keys and values %s, computed in %s, %s\n", model.name().c_str(),
              model.family().c_str(), DTypeText(model.weight_dtype()).c_str(),
              DTypeText(model.kv_dtype()).c_str(), DTypeText(model.compute_dtype()).c_str(),
              model.fingerprint().c_str());
  for (int first = 0; first < model.layers_size();) {
    const std::string text = Describe(model.layers(first));
    int last = first;
    while (last + 1 < model.layers_size() && Describe(model.layers(last + 1)) == text) ++last;
    std::string name = model.layers(first).name();
    if (last > first) name += " .. " + model.layers(last).name();
    std::printf("  layer %s: %s\n", name.c_str(), text.c_str());
    std::printf("    feed it: %s\n", model.layers(first).input_point().c_str());
    first = last + 1;
  }
}

int RunModels(const Globals& globals, bool json) {
  auto client = Connect(globals);
  if (!client.ok()) return Fail(client.error());
  auto models = client->ListModels();
  if (!models.ok()) return Fail(models.error());
  if (json) {
    v1::ListModelsResponse response;
    response.mutable_models()->Assign(models->begin(), models->end());
    std::printf("%s", Json(response).c_str());
    return kOk;
  }
  if (models->empty()) std::printf("no model loaded; raw attention works\n");
  for (const v1::Model& model : *models) PrintModel(model);
  return kOk;
}

}  // namespace

void AddModels(CLI::App& app, Globals& globals) {
  CLI::App* command = app.add_subcommand("models", "List the loaded models and their layers");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print JSON, fields as in the proto");
  command->callback([&globals, json] { globals.exit_code = RunModels(globals, *json); });
}

}  // namespace attend::cli
