// SPDX-License-Identifier: Apache-2.0
//
// .npy files as NumPy writes them, and files that must be refused.
#include "client/npy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace attend::client {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class NpyTest : public testing::Test {
 protected:
  NpyTest() : path_(testing::TempDir() + "npy_test." + std::to_string(getpid()) + ".npy") {}
  ~NpyTest() override { std::filesystem::remove(path_); }

  void Write(const std::string& bytes) const { std::ofstream(path_, std::ios::binary) << bytes; }
  // A file as numpy.save lays it out.
  void WriteArray(const std::string& header, const std::string& data, char version = 1) const {
    std::string bytes = std::string("\x93NUMPY") + version + '\0';
    for (int i = 0; i < (version == 1 ? 2 : 4); ++i) {
      bytes += static_cast<char>(header.size() >> (8 * i) & 0xff);
    }
    Write(bytes + header + data);
  }
  std::string ErrorOfRead() const {
    auto tensor = ReadNpy(path_);
    return tensor.ok() ? "no error" : tensor.error().message;
  }

  const std::string path_;
};

const std::string kTwoFloats("\x00\x00\x80\x3f\x00\x00\x00\xc0", 8);  // 1, -2

TEST_F(NpyTest, ReadsEveryFormatVersion) {
  for (const char version : {1, 2, 3}) {
    WriteArray("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1), }   \n", kTwoFloats,
               version);
    auto tensor = ReadNpy(path_);
    ASSERT_TRUE(tensor.ok()) << tensor.error().message;
    EXPECT_EQ(tensor->dtype, v1::DTYPE_F32);
    EXPECT_THAT(tensor->shape, ElementsAre(2, 1));
    EXPECT_THAT(tensor->ToFloats(), ElementsAre(1.0f, -2.0f));
  }
}

TEST_F(NpyTest, ReadsHalfTypesByTheirDescr) {
  const std::pair<const char*, v1::DType> types[] = {{"<f2", v1::DTYPE_F16},
                                                     {"<V2", v1::DTYPE_BF16},
                                                     {"|V2", v1::DTYPE_BF16},
                                                     {"bfloat16", v1::DTYPE_BF16}};
  for (const auto& [descr, dtype] : types) {
    WriteArray(
        std::string("{\"descr\": \"") + descr + "\", \"fortran_order\": False, \"shape\": (1,)}\n",
        std::string("\x80\x3f", 2));
    auto tensor = ReadNpy(path_);
    ASSERT_TRUE(tensor.ok()) << tensor.error().message;
    EXPECT_EQ(tensor->dtype, dtype) << descr;
  }
}

TEST_F(NpyTest, ReadsScalarsAndEmptyArrays) {
  WriteArray("{'descr': '<f4', 'fortran_order': False, 'shape': (), }\n", kTwoFloats.substr(0, 4));
  EXPECT_THAT(ReadNpy(path_)->shape, IsEmpty());
  WriteArray("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 5), }\n", "");
  EXPECT_THAT(ReadNpy(path_)->shape, ElementsAre(0, 5));
}

TEST_F(NpyTest, WrittenFilesAreReadBackAndAligned) {
  for (const v1::DType dtype : {v1::DTYPE_F32, v1::DTYPE_F16, v1::DTYPE_BF16}) {
    for (const std::vector<int64_t>& shape :
         {std::vector<int64_t>{}, {3}, {2, 3}, {1, 2, 3, 4, 5, 6, 7}, {0, 9}}) {
      Tensor tensor{dtype, shape, {}};
      int64_t elements = 1;
      for (const int64_t dimension : shape) elements *= dimension;
      for (int64_t i = 0; i < elements * ElementBytes(dtype); ++i) {
        tensor.data += static_cast<char>(i * 7);
      }
      ASSERT_TRUE(WriteNpy(path_, tensor.view()).ok());
      const auto file_bytes = std::filesystem::file_size(path_);
      EXPECT_EQ((file_bytes - tensor.data.size()) % 64, 0u);
      auto read = ReadNpy(path_);
      ASSERT_TRUE(read.ok()) << read.error().message;
      EXPECT_EQ(read->dtype, dtype);
      EXPECT_EQ(read->shape, shape);
      EXPECT_EQ(read->data, tensor.data);
    }
  }
}

TEST_F(NpyTest, OtherElementTypesAreRefusedByName) {
  for (const char* descr : {"<f8", ">f4", "<i4", "|u1", "<c8"}) {
    WriteArray(std::string("{'descr': '") + descr + "', 'fortran_order': False, 'shape': (2,), }\n",
               kTwoFloats);
    EXPECT_THAT(ErrorOfRead(), HasSubstr("got '" + std::string(descr) + "'"));
    EXPECT_THAT(ErrorOfRead(), HasSubstr("'<f4'"));
  }
  WriteArray("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }\n", kTwoFloats);
  EXPECT_THAT(ErrorOfRead(), HasSubstr("astype(numpy.float32)"));
}

TEST_F(NpyTest, FortranOrderIsRefused) {
  WriteArray("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 1), }\n", kTwoFloats);
  EXPECT_THAT(ErrorOfRead(), HasSubstr("fortran_order: got True"));
}

TEST_F(NpyTest, TheDataMustFitTheShapeExactly) {
  for (const char* shape : {"(1,)", "(3,)", "(2, 2)"}) {
    WriteArray(std::string("{'descr': '<f4', 'fortran_order': False, 'shape': ") + shape + ", }\n",
               kTwoFloats);
    EXPECT_THAT(ErrorOfRead(), HasSubstr("data: got 8 bytes, wanted")) << shape;
  }
  WriteArray("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }\n", "");
  EXPECT_THAT(ErrorOfRead(), HasSubstr("more than 2^63"));
}

TEST_F(NpyTest, DamagedFilesAreRefused) {
  EXPECT_THAT(ErrorOfRead(), HasSubstr("can't be opened"));
  for (const std::string& bytes :
       {std::string(), std::string("PK\x03\x04zip file"), std::string("\x93NUMPY\x01\x00\x10", 9),
        std::string("\x93NUMPY\x04\x00\x10\x00", 10), std::string("\x93NUMPY\x01\x00\x10\x00{", 11),
        std::string("\x93NUMPY\x02\x00\xff\xff\xff\xff{", 13)}) {
    Write(bytes);
    EXPECT_FALSE(ReadNpy(path_).ok()) << bytes.size();
  }
  for (const char* header :
       {"", "{}", "{'descr': '<f4', 'shape': (2,)}", "{'descr': '<f4', 'fortran_order': False}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2;)}",
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,)}"}) {
    WriteArray(header, kTwoFloats);
    EXPECT_FALSE(ReadNpy(path_).ok()) << header;
  }
}

TEST_F(NpyTest, UnwritablePathsAndTypesAreErrors) {
  const Tensor tensor{v1::DTYPE_F32, {2}, kTwoFloats};
  EXPECT_FALSE(WriteNpy("/nonexistent-directory/x.npy", tensor.view()).ok());
  EXPECT_FALSE(WriteNpy(path_, TensorView(v1::DTYPE_I32, {2}, tensor.view().data)).ok());
}

}  // namespace
}  // namespace attend::client
