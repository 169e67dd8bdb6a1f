// SPDX-License-Identifier: Apache-2.0
//
// Reads safetensors files: memory-mapped, every length and offset of the header checked before a
// tensor is handed out, nothing copied. A folder may hold one file, or shards with an index. The
// checkpoint loader calls it; it knows no families and does not look at values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/util/dtype.h"

namespace attend {

// A read-only mapping of a whole file, unmapped by the destructor. The file must not shrink
// meanwhile.
class MappedFile {
 public:
  // NOT_FOUND when there is no such file; INVALID_ARGUMENT when it is not a regular, readable file.
  static absl::StatusOr<std::shared_ptr<MappedFile>> Open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  std::string_view text() const {
    return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()};
  }
  const std::string& path() const { return path_; }

 private:
  MappedFile(std::string path, std::span<const std::byte> bytes)
      : path_(std::move(path)), bytes_(bytes) {}

  std::string path_;
  std::span<const std::byte> bytes_;
};

// One tensor of a file. `bytes` lie in the mapping, row-major, little-endian, at any alignment.
struct StoredTensor {
  std::string dtype = {};  // as the file names it: "F32", "I64", ...
  std::vector<int64_t> shape = {};
  std::span<const std::byte> bytes = {};
  std::string file = {};  // file name without folder, for messages

  // F32, F16 or BF16; unspecified for dtypes that attention weights may not have.
  DType float_dtype() const;
};

// By name; ordered, so that the tensors of a module stand together.
using TensorMap = std::map<std::string, StoredTensor, std::less<>>;

// All tensors of one mapped file. INVALID_ARGUMENT names file, tensor and numbers.
absl::StatusOr<TensorMap> ReadTensors(const MappedFile& file);

struct TensorFolder {
  std::vector<std::shared_ptr<MappedFile>> files;
  TensorMap tensors;  // views into `files`
};

// The tensors of a checkpoint folder. With model.safetensors.index.json: exactly the tensors it
// lists, from the files it names. Without: of all *.safetensors files; a name in two of them is
// refused.
absl::StatusOr<TensorFolder> ReadTensorFolder(const std::string& directory);

}  // namespace attend
