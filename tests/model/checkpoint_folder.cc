// SPDX-License-Identifier: Apache-2.0
#include "tests/model/checkpoint_folder.h"

#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "engine/model/safetensors.h"
#include "tests/support/golden.h"

namespace attend {

TemporaryFolder::TemporaryFolder() {
  path_ = std::filesystem::temp_directory_path() / "attend_model_XXXXXX";
  if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error("mkdtemp " + path_);
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void TemporaryFolder::Write(const std::string& name, std::string_view content) const {
  std::ofstream out(path_ + "/" + name, std::ios::binary);
  out << content;
  out.close();
  if (!out.good()) throw std::runtime_error("writing " + path_ + "/" + name);
}

std::string FileBytes(std::string_view header, std::string_view data) {
  const uint64_t length = header.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes.append(header).append(data);
}

std::string FileOf(const TestTensors& tensors) {
  nlohmann::json header = nlohmann::json::object();
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    const size_t end = data.size() + tensor.data.size();
    header[name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {data.size(), end}}};
    data += tensor.data;
  }
  return FileBytes(header.dump(), data);
}

TestTensor Ramp(std::vector<int64_t> shape, float start) {
  TestTensor tensor = Zeros("F32", std::move(shape), sizeof(float));
  for (size_t i = 0; i * sizeof(float) < tensor.data.size(); ++i) {
    const float value = start + static_cast<float>(i) / 64;
    std::memcpy(tensor.data.data() + i * sizeof(float), &value, sizeof(float));
  }
  return tensor;
}

TestTensor Zeros(std::string dtype, std::vector<int64_t> shape, int64_t element_bytes) {
  int64_t bytes = element_bytes;
  for (const int64_t size : shape) bytes *= size;
  return {std::move(dtype), std::move(shape), std::string(static_cast<size_t>(bytes), '\0')};
}

void TestCheckpoint::Rename(const std::string& base, const std::string& prefix) {
  TestTensors renamed;
  for (auto& [name, tensor] : tensors) {
    renamed[name.starts_with(base) ? prefix + name.substr(base.size()) : name] = tensor;
  }
  tensors = std::move(renamed);
}

void TestCheckpoint::WriteTo(const TemporaryFolder& folder) const {
  folder.Write("config.json", config.dump());
  folder.Write("model.safetensors", FileOf(tensors));
}

TestCheckpoint GoldenCheckpoint(const std::string& variant) {
  const std::string directory = GoldenDirectory(variant);
  TestCheckpoint checkpoint;
  std::ifstream config(directory + "/config.json");
  checkpoint.config = nlohmann::json::parse(config);
  const auto file = MappedFile::Open(directory + "/model.safetensors");
  if (!file.ok()) throw std::runtime_error(file.status().ToString());
  const auto tensors = ReadTensors(**file);
  if (!tensors.ok()) throw std::runtime_error(tensors.status().ToString());
  for (const auto& [name, tensor] : *tensors) {
    checkpoint.tensors[name] = {
        tensor.dtype, tensor.shape,
        std::string(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size())};
  }
  return checkpoint;
}

}  // namespace attend
