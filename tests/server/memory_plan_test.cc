// SPDX-License-Identifier: Apache-2.0
//
// Sums of the memory a server needs, by hand, on the CPU and on CUDA, and what is said when there
// is too little of it.
#include "server/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace attend {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr int64_t kWorkspaceRow = 512 + 512 + 256 + 512 + 32 + 288 + 512 + 256 + 8 + 4096 + 192;
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;

Options SmallOptions() {
  Options options;
  options.limits.message_bytes = 10 * kMiB;
  options.limits.response_bytes = 8 * kMiB;
  options.limits.queue_bytes = 100 * kMiB;
  options.limits.kv_bytes = 300 * kMiB;
  options.limits.request_tokens = 1024;
  options.limits.batch_tokens = 1000;
  return options;
}

DeviceChoice Cpu() { return {.device = "cpu", .name = "", .why = ""}; }

DeviceChoice Cuda(int64_t free_bytes) {
  return {.device = "cuda",
          .name = "NVIDIA Test",
          .why = "",
          .free_bytes = free_bytes,
          .total_bytes = 4 * kGiB};
}

// One layer: 64 wide, 4 heads of 16, 2 key heads; a row of activations is 1280 bytes. In the
// device's workspace it is 8 x 64 as given, 4 x 4 x 32 of queries, 4 x 64 attended, 8 x 64 of
// output, 8 x 4 of statistics, 4 x 72 of splits; its key 8 x 64 and 4 x 64; 8 of a block's address
// and 4096.
NamedCheckpoints OneLayer(DType weights, int64_t weight_bytes) {
  ModelLayer layer;
  layer.spec.d_model = layer.spec.context_width = layer.spec.output_width = 64;
  layer.spec.q_heads = 4;
  layer.spec.kv_heads = 2;
  layer.spec.head_dim = layer.spec.v_head_dim = 16;
  layer.weight_dtype = weights;
  layer.weight_bytes = weight_bytes;
  Checkpoint checkpoint;
  checkpoint.weight_dtype = weights;
  checkpoint.layers.push_back(layer);
  NamedCheckpoints checkpoints;
  checkpoints.emplace_back("m", std::move(checkpoint));
  return checkpoints;
}

TEST(MemoryPlanTest, TheCpuKeepsEverythingInTheMachinesMemory) {
  const MemoryPlan plan = PlanMemory(SmallOptions(), Cpu(), OneLayer(DType::kF32, 7 * kMiB));
  EXPECT_EQ(plan.weights, 7 * kMiB);
  EXPECT_EQ(plan.kv, 300 * kMiB);
  EXPECT_EQ(plan.scratch, 40 * kMiB);
  EXPECT_EQ(plan.workspace, 0);
  EXPECT_EQ(plan.queue, 140 * kMiB);
  EXPECT_EQ(plan.staging, 1000 * 1280);
  EXPECT_EQ(plan.DeviceBytes(), 0);
  EXPECT_EQ(plan.HostBytes(), 487 * kMiB + 1000 * 1280);
}

TEST(MemoryPlanTest, CudaKeepsAllButQueueAndStagingOnTheDevice) {
  const MemoryPlan plan = PlanMemory(SmallOptions(), Cuda(kGiB), OneLayer(DType::kF32, 7 * kMiB));
  EXPECT_EQ(plan.batch_workspace, 4 * 10 * kMiB + 2 * 8 * kMiB);  // one row of any request
  EXPECT_EQ(plan.workspace, 2 * (63 + 16) * kMiB + 256 * kMiB);
  EXPECT_EQ(plan.staging, 2 * (63 + 16) * kMiB + 16 * kMiB);
  EXPECT_EQ(plan.DeviceBytes(), (7 + 300 + 40 + 414) * kMiB);
  EXPECT_EQ(plan.HostBytes(), (140 + 174) * kMiB);

  Options large = SmallOptions();
  large.limits.batch_tokens = 100000;
  const MemoryPlan of_rows = PlanMemory(large, Cuda(kGiB), OneLayer(DType::kF32, 7 * kMiB));
  EXPECT_EQ(of_rows.batch_workspace, 100000 * kWorkspaceRow);
}

TEST(MemoryPlanTest, TwoByteWeightsAreWidenedWhereTheyAreMultipliedAsFp32) {
  const auto weights = [](const DeviceChoice& device, DType dtype, const char* compute) {
    Options options = SmallOptions();
    options.compute = compute;
    return PlanMemory(options, device, OneLayer(dtype, 100)).weights;
  };
  EXPECT_EQ(weights(Cpu(), DType::kF16, "auto"), 200);
  EXPECT_EQ(weights(Cpu(), DType::kBF16, "auto"), 100);
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    EXPECT_EQ(weights(Cuda(kGiB), dtype, "auto"), 100);
    EXPECT_EQ(weights(Cuda(kGiB), dtype, "fp32"), 200);
  }
  EXPECT_EQ(weights(Cuda(kGiB), DType::kF32, "tf32"), 100);
}

std::string ErrorOf(const MemoryPlan& plan, const DeviceChoice& device, int64_t machine_bytes) {
  const absl::Status status = CheckMemory(plan, device, machine_bytes);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  const std::string message(status.message());
  EXPECT_THAT(message, Not(HasSubstr("\n")));
  return message;
}

TEST(MemoryPlanTest, WhatDoesNotFitTheMachineNamesTheFlagsToLower) {
  const MemoryPlan plan = PlanMemory(SmallOptions(), Cpu(), OneLayer(DType::kF32, 7 * kMiB));
  EXPECT_TRUE(CheckMemory(plan, Cpu(), plan.HostBytes()).ok());
  EXPECT_THAT(ErrorOf(plan, Cpu(), plan.HostBytes() - 1),
              AllOf(HasSubstr("--kv_bytes=314572800"), HasSubstr("= 488 MiB"),
                    HasSubstr("memory of 488 MiB"), HasSubstr("lower --kv_bytes, --queue_bytes")));
}

TEST(MemoryPlanTest, WhatDoesNotFitTheDeviceSaysHowLargeTheCacheMayBe) {
  const DeviceChoice device = Cuda(761 * kMiB);
  MemoryPlan plan = PlanMemory(SmallOptions(), device, OneLayer(DType::kF32, 7 * kMiB));
  EXPECT_TRUE(CheckMemory(plan, device, kGiB).ok());
  plan.kv += kMiB;
  EXPECT_THAT(
      ErrorOf(plan, device, kGiB),
      AllOf(HasSubstr("weights 7 MiB + kv 301 MiB + scratch 40 MiB + workspace 414 MiB = 762 MiB "
                      "do not fit into the free 761 MiB of 4096 MiB of NVIDIA Test"),
            HasSubstr("lower --kv_bytes to 300MiB at most")));
  // Without any cache it would not fit either.
  EXPECT_THAT(ErrorOf(plan, Cuda(460 * kMiB), kGiB),
              AllOf(HasSubstr("--batch_tokens"), Not(HasSubstr("at most"))));
}

TEST(MemoryPlanTest, OnCudaTheMachineHoldsQueueAndStagingOnly) {
  const DeviceChoice device = Cuda(kGiB);
  const MemoryPlan plan = PlanMemory(SmallOptions(), device, OneLayer(DType::kF32, 7 * kMiB));
  EXPECT_TRUE(CheckMemory(plan, device, plan.HostBytes()).ok());
  EXPECT_THAT(ErrorOf(plan, device, plan.HostBytes() - 1),
              AllOf(HasSubstr("queue 140 MiB + staging 174 MiB = 314 MiB"),
                    HasSubstr("lower --queue_bytes"), Not(HasSubstr("kv"))));
}

}  // namespace
}  // namespace attend
