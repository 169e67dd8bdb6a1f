// SPDX-License-Identifier: Apache-2.0
#include "client/npy.h"

#include <grpcpp/support/status_code_enum.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>

namespace attend::client {
namespace {

constexpr char kMagic[] = "\x93NUMPY";
constexpr size_t kMagicBytes = 6;
// Headers of plain arrays are below 200 bytes; only damaged files promise more.
constexpr uint32_t kLargestHeaderBytes = 64 << 10;
constexpr const char* kWantedTypes = "'<f4', '<f2', '<V2' or 'bfloat16' (the last two: bfloat16)";

Error FileError(const std::string& path, const std::string& what) {
  Error error;
  error.code = grpc::INVALID_ARGUMENT;
  error.reason = v1::INVALID_FIELD;
  error.field = path;
  error.message = path + ": " + what;
  return error;
}

// The header is a Python dictionary literal of three known keys. Returns the text after `'key':`.
std::optional<std::string_view> ValueOf(std::string_view header, std::string_view key) {
  for (const char quote : {'\'', '"'}) {
    const std::string quoted = quote + std::string(key) + quote;
    const size_t at = header.find(quoted);
    if (at == std::string_view::npos) continue;
    std::string_view rest = header.substr(at + quoted.size());
    const size_t value = rest.find_first_not_of(" :");
    if (value == std::string_view::npos) return std::nullopt;
    return rest.substr(value);
  }
  return std::nullopt;
}

std::optional<std::string> ParseString(std::string_view text) {
  if (text.empty() || (text[0] != '\'' && text[0] != '"')) return std::nullopt;
  const size_t end = text.find(text[0], 1);
  if (end == std::string_view::npos) return std::nullopt;
  return std::string(text.substr(1, end - 1));
}

// "(3, 4)", "(3,)", "()".
std::optional<std::vector<int64_t>> ParseShape(std::string_view text) {
  if (text.empty() || text[0] != '(') return std::nullopt;
  std::vector<int64_t> shape;
  size_t at = 1;
  while (true) {
    at = text.find_first_not_of(' ', at);
    if (at == std::string_view::npos) return std::nullopt;
    if (text[at] == ')') return shape;
    int64_t dimension = -1;
    const auto [end, error] =
        std::from_chars(text.data() + at, text.data() + text.size(), dimension);
    if (error != std::errc() || dimension < 0) return std::nullopt;
    shape.push_back(dimension);
    at = text.find_first_not_of(' ', static_cast<size_t>(end - text.data()));
    if (at == std::string_view::npos || (text[at] != ',' && text[at] != ')')) return std::nullopt;
    if (text[at] == ',') ++at;
  }
}

// product(shape) x element_bytes, nullopt when it does not fit 63 bits.
std::optional<int64_t> SizeBytes(const std::vector<int64_t>& shape, int64_t element_bytes) {
  int64_t bytes = element_bytes;
  for (const int64_t dimension : shape) {
    if (__builtin_mul_overflow(bytes, dimension, &bytes)) return std::nullopt;
  }
  return bytes;
}

v1::DType DTypeOf(const std::string& descr) {
  if (descr == "<f4") return v1::DTYPE_F32;
  if (descr == "<f2") return v1::DTYPE_F16;
  if (descr == "<V2" || descr == "|V2" || descr == "bfloat16") return v1::DTYPE_BF16;
  return v1::DTYPE_UNSPECIFIED;
}

Result<Tensor> ParseHeader(const std::string& path, std::string_view header) {
  const auto descr_text = ValueOf(header, "descr");
  const auto order = ValueOf(header, "fortran_order");
  const auto shape_text = ValueOf(header, "shape");
  const auto descr = descr_text ? ParseString(*descr_text) : std::nullopt;
  auto shape = shape_text ? ParseShape(*shape_text) : std::nullopt;
  if (!descr || !order || !shape) {
    return FileError(path,
                     "the header has no readable descr, fortran_order and shape of one array");
  }
  Tensor tensor;
  tensor.dtype = DTypeOf(*descr);
  if (tensor.dtype == v1::DTYPE_UNSPECIFIED) {
    const std::string hint =
        *descr == "<f8" ? " (float64: convert with array.astype(numpy.float32))" : "";
    return FileError(path, "descr: got '" + *descr + "'" + hint + ", wanted " + kWantedTypes);
  }
  if (!order->starts_with("False")) {
    return FileError(path,
                     "fortran_order: got True, wanted False (numpy.ascontiguousarray converts)");
  }
  tensor.shape = *std::move(shape);
  return tensor;
}

// The header's text, with `file` left at the first byte of the data.
Result<std::string> ReadHeader(const std::string& path, std::ifstream& file) {
  char start[kMagicBytes + 2] = {};
  if (!file.read(start, sizeof(start)) ||
      std::string_view(start, kMagicBytes) != std::string_view(kMagic, kMagicBytes)) {
    return FileError(path, "is no .npy file (its first bytes are not \\x93NUMPY)");
  }
  const int version = static_cast<unsigned char>(start[kMagicBytes]);
  if (version < 1 || version > 3) {
    return FileError(path, "version: got " + std::to_string(version) + ", wanted 1, 2 or 3");
  }
  unsigned char length[4] = {};
  const int length_bytes = version == 1 ? 2 : 4;
  if (!file.read(reinterpret_cast<char*>(length), length_bytes)) {
    return FileError(path, "ends inside its header");
  }
  const uint32_t header_bytes =
      length[0] | length[1] << 8 | length[2] << 16 | static_cast<uint32_t>(length[3]) << 24;
  if (header_bytes > kLargestHeaderBytes) {
    return FileError(path, "header: got " + std::to_string(header_bytes) +
                               " bytes, wanted at most " + std::to_string(kLargestHeaderBytes));
  }
  std::string header(header_bytes, '\0');
  if (!file.read(header.data(), header_bytes)) return FileError(path, "ends inside its header");
  return header;
}

}  // namespace

Result<Tensor> ReadNpy(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    return FileError(path, "can't be opened for reading: " + std::string(std::strerror(errno)));
  Result<std::string> header = ReadHeader(path, file);
  if (!header.ok()) return header.error();
  Result<Tensor> tensor = ParseHeader(path, *header);
  if (!tensor.ok()) return tensor;

  const auto wanted = SizeBytes(tensor->shape, ElementBytes(tensor->dtype));
  const std::streamoff begin = file.tellg();
  file.seekg(0, std::ios::end);
  const std::streamoff got = file.tellg() - begin;
  if (!wanted || got != *wanted) {
    return FileError(path, "data: got " + std::to_string(got) + " bytes, wanted " +
                               (wanted ? std::to_string(*wanted) : "more than 2^63") +
                               " bytes for its shape");
  }
  file.seekg(begin);
  tensor->data.resize(static_cast<size_t>(got));
  if (!file.read(tensor->data.data(), got)) return FileError(path, "can't be read to its end");
  return tensor;
}

Result<void> WriteNpy(const std::string& path, const TensorView& tensor) {
  const char* descr = nullptr;
  if (tensor.dtype == v1::DTYPE_F32) descr = "<f4";
  if (tensor.dtype == v1::DTYPE_F16) descr = "<f2";
  if (tensor.dtype == v1::DTYPE_BF16) descr = "<V2";
  if (descr == nullptr) {
    return FileError(path,
                     "dtype: got " + v1::DType_Name(tensor.dtype) + ", wanted F32, F16, BF16");
  }
  std::string header = std::string("{'descr': '") + descr + "', 'fortran_order': False, 'shape': (";
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    if (i > 0) header += ' ';
    header += std::to_string(tensor.shape[i]);
    header += ',';
  }
  header += "), }";
  // The format pads with spaces and one newline so that the data begin at a multiple of 64 bytes.
  const size_t prefix_bytes = kMagicBytes + 2 + 2;
  header.append(63 - (prefix_bytes + header.size()) % 64, ' ');
  header += '\n';
  const char version_and_length[] = {1, 0, static_cast<char>(header.size() & 0xff),
                                     static_cast<char>(header.size() >> 8)};
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(kMagic, kMagicBytes);
  file.write(version_and_length, sizeof(version_and_length));
  file.write(header.data(), static_cast<std::streamsize>(header.size()));
  file.write(reinterpret_cast<const char*>(tensor.data.data()),
             static_cast<std::streamsize>(tensor.data.size()));
  file.close();
  if (!file) return FileError(path, "can't be written: " + std::string(std::strerror(errno)));
  return {};
}

}  // namespace attend::client
