// SPDX-License-Identifier: Apache-2.0
#include "engine/model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/model/strict_json.h"
#include "engine/util/status_macros.h"
#include "engine/util/text.h"

namespace attend {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors data are used in place");

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr char kIndexName[] = "model.safetensors.index.json";

struct DTypeBits {
  const char* name;
  uint64_t bits;
};
constexpr DTypeBits kDTypes[] = {
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
};

std::string BaseName(const std::string& path) { return std::filesystem::path(path).filename(); }

template <typename... Parts>
absl::Status Bad(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// Where a tensor's bytes stand, relative to the data buffer.
struct Extent {
  uint64_t begin = 0;
  uint64_t end = 0;
  const std::string* name = nullptr;
};

// The element count times the width of an element, in bytes.
absl::StatusOr<uint64_t> ShapeBytes(const std::string& where, const json& shape, uint64_t bits,
                                    StoredTensor& tensor) {
  if (!shape.is_array()) return Bad(where, "shape is no array");
  uint64_t total_bits = bits;
  for (const json& item : shape) {
    if (!item.is_number_unsigned()) {
      return Bad(where, "shape item ", item.dump(), ", wanted an unsigned integer");
    }
    const uint64_t size = item.get<uint64_t>();
    if (size > static_cast<uint64_t>(INT64_MAX) ||
        __builtin_mul_overflow(total_bits, size, &total_bits)) {
      return Bad(where, "shape ", shape.dump(), " overflows 64 bits");
    }
    tensor.shape.push_back(static_cast<int64_t>(size));
  }
  if (total_bits % 8 != 0) {
    return Bad(where, "shape ", shape.dump(), " of ", tensor.dtype, " is ", total_bits,
               " bits, no whole number of bytes");
  }
  return total_bits / 8;
}

absl::StatusOr<Extent> ReadEntry(const std::string& where, const json& entry, uint64_t data_bytes,
                                 StoredTensor& tensor) {
  if (!entry.is_object()) return Bad(where, "wanted an object, got ", entry.type_name());
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!entry.contains(key)) return Bad(where, "has no ", key);
  }
  const json& dtype = entry["dtype"];
  if (!dtype.is_string()) return Bad(where, "dtype is no string");
  tensor.dtype = dtype.get<std::string>();
  const auto* known = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                   [&](const DTypeBits& row) { return tensor.dtype == row.name; });
  if (known == std::end(kDTypes)) return Bad(where, "unknown dtype ", Quoted(tensor.dtype));
  ASSIGN_OR_RETURN(const uint64_t bytes, ShapeBytes(where, entry["shape"], known->bits, tensor));

  const json& offsets = entry["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned()) {
    return Bad(where, "data_offsets ", offsets.dump().substr(0, 60),
               ", wanted two unsigned integers");
  }
  const Extent extent{offsets[0].get<uint64_t>(), offsets[1].get<uint64_t>()};
  if (extent.begin > extent.end || extent.end > data_bytes) {
    return Bad(where, "data_offsets [", extent.begin, ",", extent.end, "] do not lie within the ",
               data_bytes, " bytes of data");
  }
  if (extent.end - extent.begin != bytes) {
    return Bad(where, "data_offsets [", extent.begin, ",", extent.end, "] span ",
               extent.end - extent.begin, " bytes, shape ", ShapeText(tensor.shape), " of ",
               tensor.dtype, " needs ", bytes);
  }
  return extent;
}

absl::Status CheckMetadata(const std::string& name, const json& metadata) {
  if (metadata.is_null()) return absl::OkStatus();
  if (!metadata.is_object()) return Bad(name, ": __metadata__ is no object");
  for (const auto& [key, value] : metadata.items()) {
    if (!value.is_string()) return Bad(name, ": __metadata__ ", Quoted(key), " is no string");
  }
  return absl::OkStatus();
}

// The tensors must tile the data buffer: no hole, no overlap, no byte left over.
absl::Status CheckTiling(const std::string& name, std::vector<Extent> extents,
                         uint64_t data_bytes) {
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  uint64_t covered = 0;
  for (const Extent& extent : extents) {
    if (extent.begin != covered) {
      return Bad(name, ": tensor ", Quoted(*extent.name), " begins at ", extent.begin,
                 extent.begin < covered ? ", inside the tensor before it, which ends at "
                                        : ", after a hole: the tensor before it ends at ",
                 covered);
    }
    covered = extent.end;
  }
  if (covered != data_bytes) {
    return Bad(name, ": the tensors cover ", covered, " of ", data_bytes, " bytes of data");
  }
  return absl::OkStatus();
}

// Adds all tensors of a file; a name that is there already is refused.
absl::Status AddFile(const std::string& path, TensorFolder& folder) {
  ASSIGN_OR_RETURN(std::shared_ptr<MappedFile> file, MappedFile::Open(path));
  ASSIGN_OR_RETURN(TensorMap tensors, ReadTensors(*file));
  for (auto& [name, tensor] : tensors) {
    const auto [place, added] = folder.tensors.try_emplace(name, tensor);
    if (!added) {
      return Bad("tensor ", Quoted(name), " is in ", place->second.file, " and in ", tensor.file,
                 ", and there is no ", kIndexName, " that picks one");
    }
  }
  folder.files.push_back(std::move(file));
  return absl::OkStatus();
}

// The index's map from tensor names to file names, checked; no file is opened.
absl::StatusOr<std::map<std::string, std::set<std::string>>> ReadIndex(const MappedFile& index) {
  ASSIGN_OR_RETURN(const json root, ParseStrictJson(index.text(), kIndexName));
  if (!root.contains("weight_map") || !root["weight_map"].is_object()) {
    return Bad(kIndexName, ": wanted an object weight_map");
  }
  std::map<std::string, std::set<std::string>> names_by_file;
  for (const auto& [name, value] : root["weight_map"].items()) {
    if (!value.is_string()) return Bad(kIndexName, ": ", Quoted(name), " does not map to a string");
    const std::string file = value.get<std::string>();
    if (file.empty() || file == "." || file == ".." || file.find_first_of("/\\") != file.npos) {
      return Bad(kIndexName, ": ", Quoted(name), " maps to ", Quoted(file),
                 ", wanted the plain name of a file in the same folder");
    }
    names_by_file[file].insert(name);
  }
  return names_by_file;
}

absl::Status AddIndexed(const std::string& directory, const MappedFile& index,
                        TensorFolder& folder) {
  ASSIGN_OR_RETURN(const auto names_by_file, ReadIndex(index));
  constexpr char kWhole[] = "model.safetensors";
  std::error_code ignored;
  if (!names_by_file.contains(kWhole) &&
      std::filesystem::exists(absl::StrCat(directory, "/", kWhole), ignored)) {
    return Bad("the folder holds both ", kWhole, " and ", kIndexName,
               ", which does not list it: remove one");
  }
  for (const auto& [file_name, names] : names_by_file) {
    ASSIGN_OR_RETURN(std::shared_ptr<MappedFile> file,
                     MappedFile::Open(absl::StrCat(directory, "/", file_name)));
    ASSIGN_OR_RETURN(TensorMap tensors, ReadTensors(*file));
    for (const std::string& name : names) {
      const auto tensor = tensors.find(name);
      if (tensor == tensors.end()) {
        return Bad(kIndexName, ": tensor ", Quoted(name), " is not in ", Quoted(file_name));
      }
      folder.tensors.emplace(name, std::move(tensor->second));
    }
    folder.files.push_back(std::move(file));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<MappedFile>> MappedFile::Open(const std::string& path) {
  // Non-blocking: a named pipe in the place of a file must not hang the start.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) {
    const std::string message = absl::StrCat(BaseName(path), ": ", std::strerror(errno));
    return errno == ENOENT ? absl::NotFoundError(message) : absl::InvalidArgumentError(message);
  }
  struct stat state = {};
  absl::Status problem;
  void* data = nullptr;
  size_t size = 0;
  if (::fstat(descriptor, &state) != 0 || !S_ISREG(state.st_mode)) {
    problem = Bad(BaseName(path), ": not a regular file");
  } else if (size = static_cast<size_t>(state.st_size); size > 0) {
    data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (data == MAP_FAILED)
      problem = Bad(BaseName(path), ": mmap of ", size, " bytes: ", std::strerror(errno));
  }
  ::close(descriptor);
  if (!problem.ok()) return problem;
  return std::shared_ptr<MappedFile>(
      new MappedFile(path, {static_cast<const std::byte*>(data), size}));
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

DType StoredTensor::float_dtype() const {
  for (const DType candidate : {DType::kF32, DType::kF16, DType::kBF16}) {
    if (dtype == DTypeName(candidate)) return candidate;
  }
  return DType::kUnspecified;
}

absl::StatusOr<TensorMap> ReadTensors(const MappedFile& file) {
  const std::string name = BaseName(file.path());
  const std::span<const std::byte> bytes = file.bytes();
  if (bytes.size() < kLengthBytes) {
    return Bad(name, ": ", bytes.size(), " bytes, a safetensors file has at least ", kLengthBytes);
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), kLengthBytes);
  if (header_bytes > kMaxHeaderBytes) {
    return Bad(name, ": header of ", header_bytes, " bytes, wanted at most ", kMaxHeaderBytes);
  }
  if (header_bytes > bytes.size() - kLengthBytes) {
    return Bad(name, ": header of ", header_bytes, " bytes in a file of ", bytes.size());
  }
  const std::span<const std::byte> data = bytes.subspan(kLengthBytes + header_bytes);
  ASSIGN_OR_RETURN(const json header,
                   ParseStrictJson(file.text().substr(kLengthBytes, header_bytes),
                                   absl::StrCat(name, ": header")));
  TensorMap tensors;
  std::vector<Extent> extents;
  for (const auto& [key, entry] : header.items()) {
    if (key == "__metadata__") {
      RETURN_IF_ERROR(CheckMetadata(name, entry));
      continue;
    }
    const auto place = tensors.emplace(key, StoredTensor{.file = name}).first;
    ASSIGN_OR_RETURN(Extent extent, ReadEntry(absl::StrCat(name, ": tensor ", Quoted(key), ": "),
                                              entry, data.size(), place->second));
    extent.name = &place->first;
    place->second.bytes = data.subspan(extent.begin, extent.end - extent.begin);
    extents.push_back(extent);
  }
  RETURN_IF_ERROR(CheckTiling(name, std::move(extents), data.size()));
  return tensors;
}

absl::StatusOr<TensorFolder> ReadTensorFolder(const std::string& directory) {
  TensorFolder folder;
  auto index = MappedFile::Open(absl::StrCat(directory, "/", kIndexName));
  if (index.ok()) {
    RETURN_IF_ERROR(AddIndexed(directory, **index, folder));
    return folder;
  }
  if (!absl::IsNotFound(index.status())) return index.status();

  std::vector<std::string> paths;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->path().extension() == ".safetensors") paths.push_back(entry->path().string());
  }
  if (error) return Bad("the folder can not be listed: ", error.message());
  if (paths.empty()) {
    return absl::NotFoundError(
        absl::StrCat("no model.safetensors, no ", kIndexName, " and no *.safetensors"));
  }
  std::sort(paths.begin(), paths.end());
  for (const std::string& path : paths) RETURN_IF_ERROR(AddFile(path, folder));
  return folder;
}

}  // namespace attend
