// SPDX-License-Identifier: Apache-2.0
//
// Products of the CUDA engine by themselves, on the emulated device: a row's bits do not depend on
// how many rows or which parts are computed with it, and only what was asked for is written.
#include "engine/cuda/projection.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/simt/stand_in.h"
#include "tests/support/matchers.h"
#include "tests/support/test_batches.h"

namespace attend {
namespace {

constexpr int64_t kIn = 37;
constexpr int64_t kMaxRows = 320;

class ProjectionTest : public testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    simt::ConfigureDevice({});
    auto context = MakeLtContext();
    ASSERT_THAT(context, IsOk());
    context_ = *std::move(context);
    ASSERT_EQ(cudaStreamCreateWithFlags(stream_.out(), cudaStreamNonBlocking), cudaSuccess);
    for (int64_t rows : {11, 5, 9}) {
      tensors_.push_back(RandomTensor(random_, GetParam(), rows, kIn));
      tensors_.push_back(RandomTensor(random_, GetParam(), rows, 1));
    }
    for (size_t part = 0; part < 3; ++part) {
      const TestTensor& weight = tensors_[2 * part];
      const TestTensor& bias = tensors_[2 * part + 1];
      weights_[part] = {weight.bytes.data(), weight.dtype, weight.rows, kIn, kIn, 1};
      biases_[part] = {bias.bytes.data(), bias.dtype, bias.rows, 1, 1, 1};
      parts_.push_back({&weights_[part], &biases_[part]});
    }
    const Projection::PartRun runs[] = {{0, 3}, {0, 1}, {1, 3}};
    auto made =
        Projection::Make(context_, parts_, runs, GetParam(), false, kMaxRows, stream_.get());
    ASSERT_THAT(made, IsOk());
    projection_.emplace(*std::move(made));
    ASSERT_EQ(x_.Allocate(Bytes(PaddedRows(kMaxRows) * projection_->in() * 4)), cudaSuccess);
    ASSERT_EQ(y_.Allocate(Bytes(PaddedRows(kMaxRows) * projection_->out() * 4)), cudaSuccess);
    input_ = RandomTensor(random_, GetParam(), PaddedRows(kMaxRows), projection_->in());
    Check(cudaMemcpyAsync(x_.data(), input_.bytes.data(), input_.bytes.size(),
                          cudaMemcpyHostToDevice, stream_.get()));
  }

  static size_t Bytes(int64_t bytes) { return static_cast<size_t>(bytes); }
  static void Check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess); }

  // y after one run, over memory full of 0x7f.
  std::vector<float> Run(const Projection::PartRun& run, int64_t rows) {
    Check(cudaMemsetAsync(y_.data(), 0x7f, y_.bytes(), stream_.get()));
    EXPECT_THAT(projection_->Run(context_, run, x_.data(), rows,
                                 reinterpret_cast<float*>(y_.data()), stream_.get()),
                IsOk());
    std::vector<float> y(y_.bytes() / sizeof(float));
    Check(cudaMemcpyAsync(y.data(), y_.data(), y_.bytes(), cudaMemcpyDeviceToHost, stream_.get()));
    Check(cudaStreamSynchronize(stream_.get()));
    return y;
  }

  Random random_{11};
  LtContext context_;
  Stream stream_;
  std::vector<TestTensor> tensors_;
  WeightView weights_[3], biases_[3];
  std::vector<Projection::Part> parts_;
  std::optional<Projection> projection_;
  DeviceMemory x_, y_;
  TestTensor input_;
};

TEST_P(ProjectionTest, ARowsBitsDoNotDependOnTheRowsAndPartsBesideIt) {
  const int64_t width = projection_->out();
  const std::vector<float> all = Run({0, 3}, kMaxRows);
  uint32_t untouched = 0;
  std::memset(&untouched, 0x7f, sizeof(untouched));
  for (const Projection::PartRun& run : {Projection::PartRun{0, 3}, {0, 1}, {1, 3}}) {
    const int64_t begin = projection_->part_begin(run.first);
    const int64_t end = projection_->part_begin(run.last);
    for (int64_t rows : {1, 2, 63, 64, 65, 129, 300}) {
      const std::vector<float> y = Run(run, rows);
      for (int64_t i = 0; i < static_cast<int64_t>(y.size()); ++i) {
        uint32_t bits = 0;
        std::memcpy(&bits, &y[static_cast<size_t>(i)], sizeof(bits));
        const bool asked = i / width < PaddedRows(rows) && i % width >= begin && i % width < end;
        uint32_t expected = untouched;
        if (asked) std::memcpy(&expected, &all[static_cast<size_t>(i)], sizeof(expected));
        ASSERT_EQ(bits, expected) << "parts " << run.first << ".." << run.last << ", " << rows
                                  << " rows, row " << i / width << ", column " << i % width;
      }
    }
  }
}

TEST_P(ProjectionTest, ProductsMatchPlainLoops) {
  const std::vector<float> y = Run({0, 3}, 70);
  for (int part = 0; part < 3; ++part) {
    for (int64_t row = 0; row < 70; ++row) {
      for (int64_t out = 0; out < weights_[part].rows; ++out) {
        double sum = biases_[part].At(out, 0);
        double size = std::abs(sum);
        for (int64_t i = 0; i < kIn; ++i) {
          const double term =
              double{LoadFloat(GetParam(), input_.bytes.data(), row * input_.columns + i)} *
              weights_[part].At(out, i);
          sum += term;
          size += std::abs(term);
        }
        const auto place =
            static_cast<size_t>(row * projection_->out() + projection_->part_begin(part) + out);
        ASSERT_NEAR(y[place], sum, size * kIn * 0x1p-24);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, ProjectionTest,
                         testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& info) { return std::string(DTypeName(info.param)); });

}  // namespace
}  // namespace attend
