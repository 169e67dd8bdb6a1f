// SPDX-License-Identifier: Apache-2.0
//
// Checkpoint folders that tests write themselves: right ones, and ones that are wrong in one place.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace attend {

// A new folder, removed with everything in it by the destructor.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }
  void Write(const std::string& name, std::string_view content) const;

 private:
  std::string path_;
};

// A safetensors file: length, header as given, data.
std::string FileBytes(std::string_view header, std::string_view data);

struct TestTensor {
  std::string dtype = "F32";
  std::vector<int64_t> shape;
  std::string data;
};
using TestTensors = std::map<std::string, TestTensor>;

// A valid file with these tensors.
std::string FileOf(const TestTensors& tensors);

// F32, values start, start + 1/64, ...: all different, all finite.
TestTensor Ramp(std::vector<int64_t> shape, float start);

// A tensor of `shape` whose bytes are all zero; `element_bytes` is the width of the dtype.
TestTensor Zeros(std::string dtype, std::vector<int64_t> shape, int64_t element_bytes);

// A checkpoint in memory that a test changes in one place before it writes it.
struct TestCheckpoint {
  nlohmann::json config;
  TestTensors tensors;

  // The same tensors under names that start with `prefix` instead of `base`.
  void Rename(const std::string& base, const std::string& prefix);
  void WriteTo(const TemporaryFolder& folder) const;
};

// The config.json and tensors of a golden variant with a single tensor file.
TestCheckpoint GoldenCheckpoint(const std::string& variant);

}  // namespace attend
