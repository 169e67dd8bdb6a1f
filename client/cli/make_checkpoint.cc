// SPDX-License-Identifier: Apache-2.0
//
// `attend make-checkpoint`: a checkpoint of random weights in the Hugging Face layout. Works
// without a server; the one command that uses the engine's checkpoint library.
#include "engine/model/make_checkpoint.h"

#include <unistd.h>

#include <cstdio>

#include "client/cli/command.h"

namespace attend::cli {
namespace {

const std::vector<std::pair<std::string, DType>> kDTypes = {
    {"f32", DType::kF32}, {"f16", DType::kF16}, {"bf16", DType::kBF16}};

void PrintProgress(int64_t done_bytes, int64_t total_bytes) {
  const int percent = total_bytes > 0 ? static_cast<int>(100 * done_bytes / total_bytes) : 100;
  std::fprintf(stderr, "\rwriting %s of %s, %d %%", BytesText(done_bytes).c_str(),
               BytesText(total_bytes).c_str(), percent);
  if (done_bytes >= total_bytes) std::fprintf(stderr, "\n");
}

int MakeCheckpointFrom(CheckpointRecipe& recipe) {
  if (isatty(STDERR_FILENO)) recipe.progress = PrintProgress;
  const absl::Status status = MakeCheckpoint(recipe);
  if (!status.ok()) {
    std::fprintf(stderr, "attend: %s\n", std::string(status.message()).c_str());
    return status.code() == absl::StatusCode::kInternal ? kFailed : kUsage;
  }
  std::printf("%s\n", recipe.directory.c_str());
  return kOk;
}

}  // namespace

void AddMakeCheckpoint(CLI::App& app, Globals& globals) {
  CLI::App* command = app.add_subcommand(
      "make-checkpoint", "Write a checkpoint of random weights for tests and benchmarks");
  command->footer(
      "transformer-base  512 wide, 8 heads of 64, torch MultiheadAttention\n"
      "bert-base         768 wide, 12 heads of 64\n"
      "gpt2-medium       1024 wide, 16 heads of 64, causal\n"
      "llama-7b          4096 wide, 32 heads of 128, causal, rotary positions\n"
      "llama2-gqa        4096 wide, 32 query heads and 8 key/value heads of 128, causal, rotary");
  auto recipe = std::make_shared<CheckpointRecipe>();
  command->add_option("--preset", recipe->preset, "Shape of the model")
      ->required()
      ->check(CLI::IsMember(CheckpointPresets()))
      ->type_name("NAME");
  command->add_option("--layers", recipe->layers, "Layers (default: the preset's)")
      ->check(CLI::Range(1, 1000))
      ->type_name("N");
  command->add_option("--heads", recipe->heads, "Query heads, same width (default: the preset's)")
      ->check(CLI::Range(1, 65536))
      ->type_name("N");
  command->add_option("--seed", recipe->seed, "Equal seeds give equal bytes")
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--dtype", recipe->dtype, "Type of the weights (default: f32)")
      ->transform(OneOf(kDTypes))
      ->type_name("f32|f16|bf16");
  command->add_option("--out", recipe->directory, "Directory to write")
      ->required()
      ->type_name("DIR");
  command->callback([&globals, recipe] { globals.exit_code = MakeCheckpointFrom(*recipe); });
}

}  // namespace attend::cli
