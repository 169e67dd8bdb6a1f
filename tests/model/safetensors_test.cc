// SPDX-License-Identifier: Apache-2.0
//
// Every validity rule of the safetensors format, one malformed file each, and the valid files that
// stricter readers wrongly refuse.
#include "engine/model/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <random>

#include "engine/util/dtype.h"
#include "tests/model/checkpoint_folder.h"
#include "tests/support/seed.h"

namespace attend {
namespace {

using testing::HasSubstr;

constexpr char kOne[] = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";

absl::StatusOr<TensorMap> Read(const std::string& bytes,
                               std::shared_ptr<MappedFile>* keep = nullptr) {
  TemporaryFolder folder;
  folder.Write("m.safetensors", bytes);
  auto file = MappedFile::Open(folder.path() + "/m.safetensors");
  if (!file.ok()) return file.status();
  if (keep != nullptr) *keep = *file;
  return ReadTensors(**file);
}

std::string Data(size_t bytes) { return std::string(bytes, '\1'); }

std::string LengthOnly(uint64_t length, std::string_view rest = "") {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes.append(rest);
}

struct Malformed {
  const char* what;
  std::string bytes;
  const char* message;
};

std::string Two(const char* first, const char* second) {
  return std::string(R"({"a":{"dtype":"F32","shape":[4],"data_offsets":)") + first +
         R"(},"b":{"dtype":"F32","shape":[4],"data_offsets":)" + second + "}}";
}

std::string Entry(const std::string& entry) { return "{\"a\":" + entry + "}"; }

std::string Deep(int depth) {
  return "{\"__metadata__\":" + std::string(depth, '[') + std::string(depth, ']') + "}";
}

std::vector<Malformed> MalformedFiles() {
  const std::string q = R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  return {
      {"rule 1: empty file", "", "0 bytes"},
      {"rule 1: seven bytes", Data(7), "7 bytes"},
      {"rule 2: header above the limit", LengthOnly(100'000'001), "at most 100000000"},
      {"rule 2: length that overflows", LengthOnly(~uint64_t{0}), "18446744073709551615"},
      {"rule 3: header past the end", LengthOnly(3, "{}"), "header of 3 bytes in a file of 10"},
      {"rule 4: invalid UTF-8", FileBytes("{\"\xff\":1}", ""), "UTF-8"},
      {"rule 4: truncated UTF-8", FileBytes("{\"\xc3\":1}", ""), "UTF-8"},
      {"rule 4: byte order mark", FileBytes("\xef\xbb\xbf{}", ""), "one JSON object"},
      {"rule 5: no JSON", FileBytes("{nope}", ""), "header: byte"},
      {"rule 5: array", FileBytes("[]", ""), "one JSON object"},
      {"rule 5: text after the object", FileBytes("{} {}", ""), "header: byte"},
      {"rule 5: NUL padding", FileBytes(std::string("{}\0\0", 4), ""), "NUL at byte 2"},
      {"rule 5: empty header", FileBytes("", ""), "got nothing"},
      {"rule 5: comment", FileBytes("{/* */}", ""), "header: byte"},
      {"rule 7: duplicate tensor",
       FileBytes(R"({"q":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                 R"("q":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})",
                 Data(16)),
       "key 'q' stands twice"},
      {"rule 7: duplicate tensor in another spelling",
       FileBytes(R"({"q":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                 R"("\u0071":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})",
                 Data(16)),
       "key 'q' stands twice"},
      {"rule 7: two __metadata__", FileBytes(R"({"__metadata__":{},"__metadata__":{}})", ""),
       "'__metadata__' stands twice"},
      {"rule 7: duplicate field",
       FileBytes(Entry(R"({"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]})"),
                 Data(8)),
       "'dtype' stands twice"},
      {"rule 8: entry is no object", FileBytes(Entry("7"), ""), "wanted an object"},
      {"rule 8: no dtype", FileBytes(Entry(R"({"shape":[2],"data_offsets":[0,8]})"), Data(8)),
       "tensor 'a': has no dtype"},
      {"rule 8: no shape", FileBytes(Entry(R"({"dtype":"F32","data_offsets":[0,8]})"), Data(8)),
       "has no shape"},
      {"rule 8: no offsets", FileBytes(Entry(R"({"dtype":"F32","shape":[2]})"), Data(8)),
       "has no data_offsets"},
      {"rule 9: dtype is no string",
       FileBytes(Entry(R"({"dtype":1,"shape":[2],"data_offsets":[0,8]})"), Data(8)), "dtype"},
      {"rule 9: unknown dtype with an absurd offset",
       FileBytes(Entry(R"({"dtype":"XQ9","shape":[2],"data_offsets":[9223372036854775808,8]})"),
                 Data(8)),
       "unknown dtype 'XQ9'"},
      {"rule 9: dtype in the wrong case",
       FileBytes(Entry(R"({"dtype":"f32","shape":[2],"data_offsets":[0,8]})"), Data(8)),
       "unknown dtype 'f32'"},
      {"rule 10: negative shape",
       FileBytes(Entry(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})"), Data(8)),
       "shape item -2"},
      {"rule 10: fractional shape",
       FileBytes(Entry(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})"), Data(8)),
       "shape item 2.0"},
      {"rule 10: exponent in a shape",
       FileBytes(Entry(R"({"dtype":"F32","shape":[2e0],"data_offsets":[0,8]})"), Data(8)),
       "shape item"},
      {"rule 10: shape is no array",
       FileBytes(Entry(R"({"dtype":"F32","shape":2,"data_offsets":[0,8]})"), Data(8)),
       "shape is no array"},
      {"rule 11: one offset",
       FileBytes(Entry(R"({"dtype":"F32","shape":[2],"data_offsets":[0]})"), Data(8)),
       "two unsigned integers"},
      {"rule 11: three offsets",
       FileBytes(Entry(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8,8]})"), Data(8)),
       "two unsigned integers"},
      {"rule 11: negative offset",
       FileBytes(Entry(R"({"dtype":"F32","shape":[2],"data_offsets":[-8,0]})"), Data(8)),
       "two unsigned integers"},
      {"rule 11: end before begin",
       FileBytes(Entry(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})"), Data(8)), "[8,0]"},
      {"rule 12: elements overflow",
       FileBytes(Entry(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]})"),
                 ""),
       "overflows 64 bits"},
      {"rule 12: bits overflow",
       FileBytes(Entry(R"({"dtype":"F64","shape":[288230376151711744],"data_offsets":[0,0]})"), ""),
       "overflows 64 bits"},
      {"rule 12: an item above 2^63",
       FileBytes(Entry(R"({"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,0]})"),
                 ""),
       "overflows 64 bits"},
      {"rule 13: half a byte",
       FileBytes(Entry(R"({"dtype":"F4","shape":[3],"data_offsets":[0,1]})"), Data(1)),
       "no whole number of bytes"},
      {"rule 14: too few bytes",
       FileBytes(Entry(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})"), Data(8)),
       "span 8 bytes, shape [3] of F32 needs 12"},
      {"rule 14: a one-element tensor without bytes",
       FileBytes(Entry(R"({"dtype":"F32","shape":[1],"data_offsets":[0,0]})"), ""), "needs 4"},
      {"rule 15: overlap", FileBytes(Two("[0,16]", "[8,24]"), Data(24)), "begins at 8, inside"},
      {"rule 15: hole", FileBytes(Two("[0,16]", "[20,36]"), Data(36)),
       "begins at 20, after a hole"},
      {"rule 15: hole at the start",
       FileBytes(Entry(R"({"dtype":"F32","shape":[2],"data_offsets":[4,12]})"), Data(12)),
       "begins at 4, after a hole"},
      {"rule 16: trailing bytes", FileBytes(kOne, Data(16)), "cover 8 of 16 bytes"},
      {"rule 16: truncated data", FileBytes(kOne, Data(7)), "within the 7 bytes"},
      {"rule 16: bytes without a tensor", FileBytes("{}", Data(1)), "cover 0 of 1 bytes"},
      {"rule 17: metadata value is no string", FileBytes(R"({"__metadata__":{"a":1}})", ""),
       "__metadata__ 'a' is no string"},
      {"rule 17: metadata is no object", FileBytes(R"({"__metadata__":"pt"})", ""),
       "__metadata__ is no object"},
      {"nesting", FileBytes(Deep(100'000), ""), "nested more than"},
      {"a name of a megabyte", FileBytes("{\"" + Data(1 << 20) + "\":" + q + "}", Data(8)),
       "header: "},
      {"a printable name of a megabyte",
       FileBytes("{\"" + std::string(1 << 20, 'n') + "\":" + q + "}", Data(8)), "wanted at most"},
  };
}

TEST(SafetensorsTest, EveryMalformedFileIsRefusedWithItsNumbers) {
  for (const Malformed& file : MalformedFiles()) {
    SCOPED_TRACE(file.what);
    const absl::StatusOr<TensorMap> tensors = Read(file.bytes);
    EXPECT_EQ(tensors.status().code(), absl::StatusCode::kInvalidArgument);
    const std::string message(tensors.status().message());
    EXPECT_THAT(message, HasSubstr("m.safetensors"));
    EXPECT_THAT(message, HasSubstr(file.message));
    EXPECT_EQ(message.find('\n'), message.npos);
    EXPECT_LT(message.size(), 600u);
  }
}

TEST(SafetensorsTest, ValidFilesThatLookOddAreRead) {
  const std::vector<std::pair<const char*, std::string>> files = {
      {"no tensors", FileBytes("{}", "")},
      {"leading and trailing whitespace", FileBytes(std::string(" \n\t") + kOne + "   ", Data(8))},
      {"data in reverse order of the header", FileBytes(Two("[16,32]", "[0,16]"), Data(32))},
      {"metadata is null", FileBytes(R"({"__metadata__":null})", "")},
      {"metadata", FileBytes(R"({"__metadata__":{"format":"pt"}})", "")},
      {"an unknown field",
       FileBytes(Entry(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8],"note":1})"), Data(8))},
      {"four-bit pairs",
       FileBytes(Entry(R"({"dtype":"F4","shape":[2],"data_offsets":[0,1]})"), Data(1))},
      {"empty tensors and a scalar",
       FileBytes(R"({"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},)"
                 R"("b":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                 R"("c":{"dtype":"U8","shape":[0],"data_offsets":[4,4]},)"
                 R"("d":{"dtype":"I64","shape":[1],"data_offsets":[4,12]},)"
                 R"("e":{"dtype":"F32","shape":[3,0],"data_offsets":[12,12]}})",
                 Data(12))},
  };
  for (const auto& [what, bytes] : files) {
    SCOPED_TRACE(what);
    EXPECT_EQ(Read(bytes).status(), absl::OkStatus());
  }
}

TEST(SafetensorsTest, EveryKnownDtypeParses) {
  const std::vector<std::pair<const char*, int>> bits = {
      {"BOOL", 8}, {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},
      {"I8", 8},   {"I16", 16}, {"F8_E5M2", 8}, {"F8_E4M3", 8},     {"F8_E8M0", 8},
      {"U16", 16}, {"F16", 16}, {"BF16", 16},   {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
      {"I32", 32}, {"U32", 32}, {"F32", 32},    {"C64", 64},        {"F64", 64},
      {"I64", 64}, {"U64", 64}};
  for (const auto& [name, width] : bits) {
    const std::string bytes = std::to_string(width);  // eight elements
    const std::string entry =
        std::string(R"({"dtype":")") + name + R"(","shape":[8],"data_offsets":[0,)" + bytes + "]}";
    EXPECT_EQ(Read(FileBytes(Entry(entry), Data(width))).status(), absl::OkStatus()) << name;
  }
}

TEST(SafetensorsTest, TensorsAreViewsOfTheirBytesAtAnyAlignment) {
  std::string data(4 + 8, '\0');
  const float values[] = {1.5f, -2.0f, 0x1p-140f};
  std::memcpy(data.data(), values, sizeof(values));
  std::string header = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                       R"("b":{"dtype":"F32","shape":[2,1],"data_offsets":[4,12]}})";
  for (int padding = 0; padding < 8; ++padding, header.push_back(' ')) {
    std::shared_ptr<MappedFile> file;
    const absl::StatusOr<TensorMap> tensors = Read(FileBytes(header, data), &file);
    ASSERT_EQ(tensors.status(), absl::OkStatus());
    const StoredTensor& b = tensors->at("b");
    EXPECT_EQ(b.float_dtype(), DType::kF32);
    EXPECT_EQ(b.shape, (std::vector<int64_t>{2, 1}));
    EXPECT_EQ(LoadFloat(DType::kF32, tensors->at("a").bytes.data(), 0), 1.5f);
    EXPECT_EQ(LoadFloat(DType::kF32, b.bytes.data(), 0), -2.0f);
    EXPECT_EQ(LoadFloat(DType::kF32, b.bytes.data(), 1), 0x1p-140f);
  }
}

TEST(SafetensorsTest, FilesDamagedAtRandomNeverCrashTheReader) {
  const std::string good = FileBytes(Two("[0,16]", "[16,32]"), Data(32));
  std::mt19937_64 random(TestSeed());
  TemporaryFolder folder;
  for (int round = 0; round < 600; ++round) {
    std::string bytes = good.substr(0, random() % 8 == 0 ? random() % good.size() : good.size());
    for (uint64_t changes = 1 + random() % 3; changes > 0 && !bytes.empty(); --changes) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    folder.Write("m.safetensors", bytes);
    const auto file = MappedFile::Open(folder.path() + "/m.safetensors");
    ASSERT_EQ(file.status(), absl::OkStatus());
    const absl::StatusOr<TensorMap> tensors = ReadTensors(**file);
    if (!tensors.ok()) continue;
    for (const auto& [name, tensor] : *tensors) {
      const auto begin = static_cast<size_t>(tensor.bytes.data() - (*file)->bytes().data());
      ASSERT_LE(begin + tensor.bytes.size(), (*file)->bytes().size());
    }
  }
}

TEST(MappedFileTest, WhatIsNoRegularFileIsRefused) {
  TemporaryFolder folder;
  EXPECT_EQ(MappedFile::Open(folder.path() + "/none").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(MappedFile::Open(folder.path()).status().code(), absl::StatusCode::kInvalidArgument);
  ASSERT_EQ(::mkfifo((folder.path() + "/pipe").c_str(), 0600), 0);
  EXPECT_EQ(MappedFile::Open(folder.path() + "/pipe").status().code(),
            absl::StatusCode::kInvalidArgument);
}

class TensorFolderTest : public testing::Test {
 protected:
  std::string Error() { return std::string(ReadTensorFolder(folder_.path()).status().message()); }
  float First(const std::string& name) {
    const auto folder = ReadTensorFolder(folder_.path());
    EXPECT_EQ(folder.status(), absl::OkStatus());
    return folder.ok() ? LoadFloat(DType::kF32, folder->tensors.at(name).bytes.data(), 0) : -1;
  }

  TemporaryFolder folder_;
};

constexpr char kIndex[] =
    R"({"metadata":{"total_size":16},"weight_map":{"a":"s1.safetensors","b":"s2.safetensors"}})";

TEST_F(TensorFolderTest, WithAnIndexOnlyListedFilesAreRead) {
  folder_.Write("s1.safetensors", FileOf({{"a", Ramp({2}, 1)}}));
  folder_.Write("s2.safetensors", FileOf({{"b", Ramp({2}, 2)}, {"a", Ramp({2}, 7)}}));
  folder_.Write("zz.safetensors", FileOf({{"a", Ramp({2}, 8)}, {"b", Ramp({2}, 9)}}));
  folder_.Write("model.safetensors.index.json", kIndex);
  EXPECT_EQ(First("a"), 1);
  EXPECT_EQ(First("b"), 2);
}

TEST_F(TensorFolderTest, WithoutAnIndexTheSameNameInTwoFilesIsRefused) {
  folder_.Write("model.safetensors", FileOf({{"a", Ramp({2}, 1)}}));
  EXPECT_EQ(First("a"), 1);
  folder_.Write("zz.safetensors", FileOf({{"a", Ramp({2}, 8)}}));
  EXPECT_THAT(Error(), HasSubstr("tensor 'a' is in model.safetensors and in zz.safetensors"));
}

TEST_F(TensorFolderTest, WithoutAnIndexTensorsOfAllFilesAreRead) {
  folder_.Write("s1.safetensors", FileOf({{"a", Ramp({2}, 1)}}));
  folder_.Write("s2.safetensors", FileOf({{"b", Ramp({2}, 2)}}));
  EXPECT_EQ(First("b"), 2);
}

TEST_F(TensorFolderTest, AWrongIndexIsRefused) {
  folder_.Write("s1.safetensors", FileOf({{"a", Ramp({2}, 1)}}));
  const std::vector<std::pair<std::string, const char*>> indices = {
      {"{}", "wanted an object weight_map"},
      {R"({"weight_map":[]})", "wanted an object weight_map"},
      {R"({"weight_map":{"a":1}})", "'a' does not map to a string"},
      {R"({"weight_map":{"a":"../s1.safetensors"}})", "plain name"},
      {R"({"weight_map":{"a":".."}})", "plain name"},
      {R"({"weight_map":{"a":""}})", "plain name"},
      {R"({"weight_map":{"a":"s1.safetensors","a":"s1.safetensors"}})", "'a' stands twice"},
      {R"({"weight_map":{"b":"s1.safetensors"}})", "tensor 'b' is not in 's1.safetensors'"},
      {R"({"weight_map":{"a":"gone.safetensors"}})", "gone.safetensors"},
      {"[", "one JSON object"},
  };
  for (const auto& [text, message] : indices) {
    folder_.Write("model.safetensors.index.json", text);
    EXPECT_THAT(Error(), HasSubstr(message)) << text;
  }
}

TEST_F(TensorFolderTest, AnIndexNextToAFileItDoesNotListIsAmbiguous) {
  folder_.Write("s1.safetensors", FileOf({{"a", Ramp({2}, 1)}}));
  folder_.Write("s2.safetensors", FileOf({{"b", Ramp({2}, 2)}}));
  folder_.Write("model.safetensors", FileOf({{"a", Ramp({2}, 3)}}));
  folder_.Write("model.safetensors.index.json", kIndex);
  EXPECT_THAT(Error(), HasSubstr("remove one"));
}

TEST_F(TensorFolderTest, AFolderWithoutTensorsSaysWhatWasLookedFor) {
  EXPECT_THAT(Error(), HasSubstr("no model.safetensors"));
}

}  // namespace
}  // namespace attend
