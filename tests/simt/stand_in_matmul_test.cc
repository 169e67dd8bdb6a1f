// SPDX-License-Identifier: Apache-2.0
//
// Products of the emulated cuBLASLt against plain loops in double, what their bits may depend on,
// and the calls that it refuses.
#include <cublasLt.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "engine/util/dtype.h"
#include "tests/simt/runtime.h"
#include "tests/simt/stand_in.h"
#include "tests/support/seed.h"

namespace attend::simt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kUntouched = -77;

// One product; matrices are column-major.
struct Case {
  int64_t m = 5;
  int64_t n = 3;
  int64_t k = 7;
  cudaDataType type = CUDA_R_32F;
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  bool transpose_a = true;
  bool transpose_b = false;
  bool bias = false;
  float alpha = 1;
  int64_t padding = 0;  // of every leading dimension
};

// What the device sees of a value.
double Seen(const Case& c, float value) {
  if (c.type == CUDA_R_16BF) return FloatFromBF16(BF16FromFloat(value));
  if (c.type == CUDA_R_16F) return FloatFromF16(F16FromFloat(value));
  if (c.compute != CUBLAS_COMPUTE_32F_FAST_TF32) return value;
  int exponent;
  const double fraction = std::frexp(static_cast<double>(value), &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(fraction, 11)), exponent - 11);
}

std::vector<std::byte> Encoded(cudaDataType type, const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * (type == CUDA_R_32F ? 4 : 2));
  for (size_t i = 0; i < values.size(); ++i) {
    if (type == CUDA_R_32F) {
      std::memcpy(&bytes[i * 4], &values[i], 4);
    } else {
      const uint16_t half = type == CUDA_R_16F ? F16FromFloat(values[i]) : BF16FromFloat(values[i]);
      std::memcpy(&bytes[i * 2], &half, 2);
    }
  }
  return bytes;
}

class StandInMatmulTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ConfigureDevice({});
    settings().checks = true;
    ASSERT_EQ(cublasLtCreate(&handle_), CUBLAS_STATUS_SUCCESS);
    ASSERT_EQ(cublasLtMatmulPreferenceCreate(&preference_), CUBLAS_STATUS_SUCCESS);
    SetPreference(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{1} << 20);
    SetPreference(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                  uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE});
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&workspace_, 1 << 20), cudaSuccess);
  }

  void TearDown() override {
    EXPECT_THAT(TakeViolations(), ElementsAre());
    ConfigureDevice({});
    ForgetProduct();
    EXPECT_EQ(cudaFree(workspace_), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    EXPECT_EQ(cublasLtMatmulPreferenceDestroy(preference_), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtDestroy(handle_), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(CurrentUse().blas_objects, 0);
    EXPECT_EQ(CurrentUse().allocations, 0);
  }

  template <class T>
  void SetPreference(cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    ASSERT_EQ(cublasLtMatmulPreferenceSetAttribute(preference_, attribute, &value, sizeof(value)),
              CUBLAS_STATUS_SUCCESS);
  }
  template <class T>
  void SetDesc(cublasLtMatmulDescAttributes_t attribute, T value) {
    ASSERT_EQ(cublasLtMatmulDescSetAttribute(desc_, attribute, &value, sizeof(value)),
              CUBLAS_STATUS_SUCCESS);
  }

  void* Allocate(size_t bytes) {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, bytes), cudaSuccess);
    memory_.push_back(memory);
    return memory;
  }
  void* Upload(const std::vector<std::byte>& bytes) {
    void* memory = Allocate(bytes.size());
    EXPECT_EQ(cudaMemcpyAsync(memory, bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream_),
              cudaSuccess);
    return memory;
  }

  void ForgetProduct() {
    for (void* memory : memory_) EXPECT_EQ(cudaFree(memory), cudaSuccess);
    memory_.clear();
    if (desc_ == nullptr) return;
    EXPECT_EQ(cublasLtMatmulDescDestroy(desc_), CUBLAS_STATUS_SUCCESS);
    for (cublasLtMatrixLayout_t layout : {a_layout_, b_layout_, d_layout_}) {
      EXPECT_EQ(cublasLtMatrixLayoutDestroy(layout), CUBLAS_STATUS_SUCCESS);
    }
    desc_ = nullptr;
  }

  // Makes descriptors, and matrices of random values in device memory; D holds kUntouched.
  void Prepare(const Case& c, uint64_t seed) {
    ForgetProduct();
    case_ = c;
    const int64_t a_rows = c.transpose_a ? c.k : c.m;
    const int64_t a_columns = c.transpose_a ? c.m : c.k;
    const int64_t b_rows = c.transpose_b ? c.n : c.k;
    const int64_t b_columns = c.transpose_b ? c.k : c.n;
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](int64_t count) {
      std::vector<float> values(static_cast<size_t>(count));
      for (float& value : values) value = normal(random);
      return values;
    };
    bias_values_ = fill(c.m);
    a_values_ = fill((a_rows + c.padding) * a_columns);
    b_values_ = fill((b_rows + c.padding) * b_columns);
    a_ = Upload(Encoded(c.type, a_values_));
    b_ = Upload(Encoded(c.type, b_values_));
    d_count_ = static_cast<size_t>((c.m + c.padding) * c.n);
    d_ = Upload(Encoded(CUDA_R_32F, std::vector<float>(d_count_, kUntouched)));
    ASSERT_EQ(cublasLtMatmulDescCreate(&desc_, c.compute, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
    SetDesc(CUBLASLT_MATMUL_DESC_TRANSA, int32_t{c.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N});
    SetDesc(CUBLASLT_MATMUL_DESC_TRANSB, int32_t{c.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N});
    if (c.bias) {
      SetDesc(CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t{CUBLASLT_EPILOGUE_BIAS});
      SetDesc(CUBLASLT_MATMUL_DESC_BIAS_POINTER, Upload(Encoded(CUDA_R_32F, bias_values_)));
      SetDesc(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t{CUDA_R_32F});
    }
    const auto layout = [&](cublasLtMatrixLayout_t* made, cudaDataType type, int64_t rows,
                            int64_t columns) {
      ASSERT_EQ(cublasLtMatrixLayoutCreate(made, type, static_cast<uint64_t>(rows),
                                           static_cast<uint64_t>(columns), rows + c.padding),
                CUBLAS_STATUS_SUCCESS);
    };
    layout(&a_layout_, c.type, a_rows, a_columns);
    layout(&b_layout_, c.type, b_rows, b_columns);
    layout(&d_layout_, CUDA_R_32F, c.m, c.n);
  }

  std::vector<cublasLtMatmulHeuristicResult_t> Algorithms(int requested = 8) {
    std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(requested));
    int returned = 0;
    cublasLtMatmulAlgoGetHeuristic(handle_, desc_, a_layout_, b_layout_, d_layout_, d_layout_,
                                   preference_, requested, results.data(), &returned);
    results.resize(static_cast<size_t>(returned));
    return results;
  }
  static int Attribute(const cublasLtMatmulAlgo_t& algo,
                       cublasLtMatmulAlgoConfigAttributes_t attribute) {
    int32_t value = -1;
    size_t written = 0;
    EXPECT_EQ(
        cublasLtMatmulAlgoConfigGetAttribute(&algo, attribute, &value, sizeof(value), &written),
        CUBLAS_STATUS_SUCCESS);
    return value;
  }

  cublasStatus_t Multiply(const cublasLtMatmulAlgo_t* algo, float beta = 0) {
    return cublasLtMatmul(handle_, desc_, &case_.alpha, a_, a_layout_, b_, b_layout_, &beta, d_,
                          d_layout_, d_, d_layout_, algo, workspace_, 1 << 20, stream_);
  }
  std::vector<float> Result() {
    std::vector<float> d(d_count_);
    EXPECT_EQ(cudaMemcpyAsync(d.data(), d_, d_count_ * 4, cudaMemcpyDeviceToHost, stream_),
              cudaSuccess);
    return d;
  }

  void ExpectRight(const std::vector<float>& d, const std::string& which) {
    const Case& c = case_;
    const int64_t a_leading = (c.transpose_a ? c.k : c.m) + c.padding;
    const int64_t b_leading = (c.transpose_b ? c.n : c.k) + c.padding;
    for (int64_t column = 0; column < c.n; ++column) {
      for (int64_t row = 0; row < c.m + c.padding; ++row) {
        const float got = d[static_cast<size_t>(row + column * (c.m + c.padding))];
        if (row >= c.m) {
          ASSERT_EQ(got, kUntouched) << which;
          continue;
        }
        double sum = 0;
        double magnitude = 0;
        for (int64_t i = 0; i < c.k; ++i) {
          const int64_t at_a = c.transpose_a ? i + row * a_leading : row + i * a_leading;
          const int64_t at_b = c.transpose_b ? column + i * b_leading : i + column * b_leading;
          const double term = Seen(c, a_values_[static_cast<size_t>(at_a)]) *
                              Seen(c, b_values_[static_cast<size_t>(at_b)]);
          sum += term;
          magnitude += std::abs(term);
        }
        const double bias = c.bias ? bias_values_[static_cast<size_t>(row)] : 0;
        const double expected = c.alpha * sum + bias;
        // k + 2 roundings at most, each of 2^-24 of the terms' sum.
        const double bound = static_cast<double>(c.k + 2) * 0x1p-24 *
                             (std::abs(c.alpha) * magnitude + std::abs(bias));
        ASSERT_NEAR(got, expected, bound) << which << " row " << row << " column " << column;
      }
    }
  }

  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulPreference_t preference_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::vector<void*> memory_;  // of the product
  void* workspace_ = nullptr;

  Case case_;
  std::vector<float> a_values_, b_values_, bias_values_;
  void* a_ = nullptr;
  void* b_ = nullptr;
  void* d_ = nullptr;
  size_t d_count_ = 0;
  cublasLtMatmulDesc_t desc_ = nullptr;
  cublasLtMatrixLayout_t a_layout_ = nullptr;
  cublasLtMatrixLayout_t b_layout_ = nullptr;
  cublasLtMatrixLayout_t d_layout_ = nullptr;
};

TEST_F(StandInMatmulTest, ProductsOfEveryTypeAndLayoutAreRight) {
  const uint64_t seed = TestSeed();
  SetPreference(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, ~uint32_t{0});
  struct Types {
    cudaDataType type;
    cublasComputeType_t compute;
  };
  constexpr int64_t kShapes[][3] = {{1, 1, 1}, {16, 4, 8}, {17, 5, 33}, {40, 21, 129}};
  int algorithms = 0;
  for (const Types& types :
       {Types{CUDA_R_32F, CUBLAS_COMPUTE_32F}, Types{CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32},
        Types{CUDA_R_16BF, CUBLAS_COMPUTE_32F}, Types{CUDA_R_16F, CUBLAS_COMPUTE_32F}}) {
    for (const auto& [m, n, k] : kShapes) {
      for (int variant = 0; variant < 8; ++variant) {
        Case c = {m, n, k, types.type, types.compute};
        c.transpose_a = (variant & 1) != 0;
        c.transpose_b = (variant & 2) != 0;
        c.bias = (variant & 4) != 0;
        c.alpha = c.bias ? 0.25f : 1.0f;
        c.padding = variant % 3;
        Prepare(c, seed + static_cast<uint64_t>(variant));
        for (const auto& result : Algorithms()) {
          ASSERT_EQ(Multiply(&result.algo), CUBLAS_STATUS_SUCCESS);
          ExpectRight(Result(), "variant " + std::to_string(variant) + " type " +
                                    std::to_string(c.type) + " compute " +
                                    std::to_string(c.compute));
          ++algorithms;
        }
      }
    }
  }
  EXPECT_EQ(algorithms, 4 * 4 * 8 * 3);
}

// The bits of D's first column alone and among others, by algorithm.
TEST_F(StandInMatmulTest, OnlySplitAlgorithmsDependOnTheNumberOfColumns) {
  const uint64_t seed = TestSeed();
  SetPreference(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, ~uint32_t{0});
  Case c = {64, 1, 200, CUDA_R_16BF};
  Prepare(c, seed);
  const auto algorithms = Algorithms();
  ASSERT_EQ(algorithms.size(), 3u);
  std::vector<std::vector<float>> alone;
  for (const auto& result : algorithms) {
    ASSERT_EQ(Multiply(&result.algo), CUBLAS_STATUS_SUCCESS);
    alone.push_back(Result());
  }
  int splits = 0;
  for (size_t i = 0; i < algorithms.size(); ++i) {
    const bool split = Attribute(algorithms[i].algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) > 1;
    EXPECT_EQ(split, Attribute(algorithms[i].algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) !=
                         CUBLASLT_REDUCTION_SCHEME_NONE);
    splits += split;
    bool differs = false;
    for (const int64_t n : {2, 3, 6, 19}) {
      c.n = n;
      Prepare(c, seed);  // A and the first column of B are the same
      ASSERT_EQ(Multiply(&algorithms[i].algo), CUBLAS_STATUS_SUCCESS);
      std::vector<float> d = Result();
      d.resize(static_cast<size_t>(c.m));
      differs = differs || d != alone[i];
    }
    EXPECT_EQ(differs, split) << i;
  }
  EXPECT_EQ(splits, 1);
  EXPECT_NE(alone[1], alone[2]) << "two orders of addition";
}

TEST_F(StandInMatmulTest, PreferenceExcludesAndTheChoiceDependsOnTheColumns) {
  const auto first = [&](int64_t n) {
    Prepare({64, n, 64}, 1);
    const auto algorithms = Algorithms();
    EXPECT_EQ(algorithms.size(), 2u);
    for (const auto& result : algorithms) {
      EXPECT_EQ(Attribute(result.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM), 1);
    }
    return algorithms[0].workspaceSize;
  };
  EXPECT_NE(first(8), first(64));
  SetPreference(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{0});
  EXPECT_EQ(Algorithms().size(), 1u);
  SetPreference(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, ~uint32_t{0});
  EXPECT_EQ(Attribute(Algorithms(1)[0].algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM), 4);
}

TEST_F(StandInMatmulTest, CheckAnswersForAnotherShape) {
  Prepare({64, 64, 64}, 1);
  const auto algorithms = Algorithms();
  Prepare({64, 3, 64}, 1);
  cublasLtMatmulHeuristicResult_t result;
  const auto check = [&](const cublasLtMatmulAlgo_t& algo) {
    return cublasLtMatmulAlgoCheck(handle_, desc_, a_layout_, b_layout_, d_layout_, d_layout_,
                                   &algo, &result);
  };
  EXPECT_EQ(check(algorithms[0].algo), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(result.state, CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(check(cublasLtMatmulAlgo_t{}), CUBLAS_STATUS_INVALID_VALUE);
}

TEST_F(StandInMatmulTest, CallsWithoutSenseAreRefused) {
  Prepare({16, 8, 16, CUDA_R_16BF}, 1);
  const auto algorithms = Algorithms();
  const auto refused = [&](const cublasLtMatmulAlgo_t* algo, const std::string& reason,
                           float beta = 0) {
    EXPECT_EQ(Multiply(algo, beta), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_THAT(TakeViolations(), ElementsAre(HasSubstr(reason)));
  };
  refused(nullptr, "no algorithm");
  refused(&algorithms[0].algo, "beta", 1);
  const auto moved = [&](void** matrix, int64_t bytes, const std::string& reason) {
    void* before = *matrix;
    *matrix = static_cast<std::byte*>(before) + bytes;
    refused(&algorithms[0].algo, reason);
    *matrix = before;
  };
  moved(&a_, 16, "multiple of the alignment");
  moved(&a_, 256, "A is not inside");
  moved(&d_, 256, "D is not inside");
  SetPreference(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t{2});
  const auto loose = Algorithms();
  void* before = b_;
  b_ = static_cast<std::byte*>(b_) + 2;
  refused(&loose[0].algo, "multiple of 16");
  b_ = before;
  SetDesc(CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t{CUBLASLT_EPILOGUE_BIAS});
  refused(&loose[0].algo, "without a bias");
  SetDesc(CUBLASLT_MATMUL_DESC_TRANSB, int32_t{CUBLAS_OP_T});
  refused(&loose[0].algo, "unequal k");
}

TEST_F(StandInMatmulTest, UnwrittenRowsAreReported) {
  Prepare({16, 8, 16}, 1);
  const auto algorithms = Algorithms();
  d_ = Allocate(8 * 16 * 4);
  ASSERT_EQ(Multiply(&algorithms[0].algo), CUBLAS_STATUS_SUCCESS);
  ExpectRight(Result(), "a product is written");
  b_ = Allocate(8 * 16 * 4);
  ASSERT_EQ(cudaMemsetAsync(b_, 0, 7 * 16 * 4, stream_), cudaSuccess);
  ASSERT_EQ(Multiply(&algorithms[0].algo), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorIllegalAddress);
  EXPECT_THAT(TakeViolations(), ElementsAre(HasSubstr("nothing wrote element (0, 7) of B")));
}

TEST_F(StandInMatmulTest, ProductsAreCapturedWithTheirArguments) {
  Prepare({16, 8, 16}, 1);
  const auto algorithms = Algorithms();
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  ASSERT_EQ(Multiply(&algorithms[0].algo), CUBLAS_STATUS_SUCCESS);
  cudaGraph_t graph;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  cudaGraphExec_t executable;
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  EXPECT_EQ(Result()[0], kUntouched);
  ASSERT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess);
  ExpectRight(Result(), "replay");
  ASSERT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(StandInMatmulTest, WithoutDriverThereIsNoHandle) {
  DeviceSettings none;
  none.driver = false;
  ConfigureDevice(none);
  cublasLtHandle_t handle = nullptr;
  EXPECT_EQ(cublasLtCreate(&handle), CUBLAS_STATUS_NOT_INITIALIZED);
  EXPECT_STREQ(cublasGetStatusName(CUBLAS_STATUS_NOT_INITIALIZED), "CUBLAS_STATUS_NOT_INITIALIZED");
}

}  // namespace
}  // namespace attend::simt
