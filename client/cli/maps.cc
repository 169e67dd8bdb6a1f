// SPDX-License-Identifier: Apache-2.0
#include "client/cli/maps.h"

#include <grpcpp/support/status.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>

#include "client/cli/heatmap.h"

namespace attend::cli {
namespace {

client::Error Wrong(std::string message) {
  client::Error error;
  error.code = grpc::StatusCode::INVALID_ARGUMENT;
  error.message = std::move(message);
  return error;
}

client::Result<std::vector<std::string>> ReadLabels(const std::string& flag,
                                                    const std::string& path) {
  errno = 0;
  std::ifstream file(path);
  std::vector<std::string> labels;
  for (std::string line; std::getline(file, line);) {
    if (line.ends_with('\r')) line.pop_back();
    labels.push_back(std::move(line));
  }
  if (!file.eof()) return Wrong(flag + ": " + path + ": " + std::strerror(errno));
  return labels;
}

client::Result<void> CheckCount(const std::string& flag, const std::vector<std::string>& labels,
                                int64_t wanted, const std::string& what) {
  if (std::ssize(labels) == wanted) return {};
  return Wrong(flag + ": got " + std::to_string(labels.size()) + " lines, wanted " +
               std::to_string(wanted) + ", one for each of the " + what);
}

client::Result<void> MakeWritable(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (!error && access(directory.c_str(), W_OK | X_OK) != 0) {
    error = std::error_code(errno, std::generic_category());
  }
  if (error) return Wrong("--maps: " + directory + ": " + error.message());
  return {};
}

// A layer's name as part of a file name.
std::string FileText(std::string name) {
  for (char& letter : name) {
    if (!std::isalnum(static_cast<unsigned char>(letter)) && letter != '_') letter = '-';
  }
  return name;
}

// `number` with as many digits as the last of `count` from 0 has, two at least.
std::string Padded(int number, int last) {
  const std::string text = std::to_string(number);
  const size_t width = std::max<size_t>(2, std::to_string(last).size());
  return std::string(width - std::min(width, text.size()), '0') + text;
}

// Draws one sequence after another and counts the files.
class MapWriter {
 public:
  MapWriter(const std::string& directory, const MapSource& source)
      : directory_(directory), source_(source) {}
  ~MapWriter() {
    if (shown_) std::fprintf(stderr, "\r\033[K");
  }

  int files() const { return files_; }

  client::Result<void> Write(size_t sequence, const std::vector<std::string>& rows,
                             const std::vector<std::string>& keys) {
    const client::Tensor& tensor = source_.sequences[sequence];
    const std::vector<float> weights = tensor.ToFloats();
    const int heads = static_cast<int>(tensor.shape[0]);
    HeatMaps maps{.title = {},
                  .names = {},
                  .weights = weights,
                  .rows = tensor.shape[1],
                  .keys = tensor.shape[2],
                  .row_axis = {rows},
                  .key_axis = {keys}};
    // The last query is the last token of the history, whose keys all are.
    if (!source_.cross) maps.row_axis.first = std::max<int64_t>(maps.keys - maps.rows, 0);
    std::string title = source_.model.empty() ? "layer " : source_.model + ", layer ";
    title += source_.layer;
    std::string name = "layer-" + FileText(source_.layer);
    if (source_.sequences.size() > 1) {
      title += ", sequence " + std::to_string(sequence);
      name += "-sequence-" + std::to_string(sequence);
    }
    for (int i = 0; i < heads; ++i) maps.names.push_back("head " + std::to_string(Head(i)));
    maps.title = heads == 1 ? title + ", " + maps.names[0] : title;
    if (auto written = WriteOne(name, maps); !written.ok()) return written;

    const std::vector<std::string> names = std::move(maps.names);
    const size_t size = static_cast<size_t>(maps.rows * maps.keys);
    const int last = source_.heads.empty()
                         ? heads - 1
                         : *std::max_element(source_.heads.begin(), source_.heads.end());
    for (int i = 0; i < heads; ++i) {
      maps.names = {names[static_cast<size_t>(i)]};
      maps.title = title + ", " + maps.names[0];
      maps.weights = std::span(weights).subspan(static_cast<size_t>(i) * size, size);
      auto written = WriteOne(name + "-head-" + Padded(Head(i), last), maps);
      if (!written.ok()) return written;
    }
    return {};
  }

 private:
  int Head(int i) const {
    return source_.heads.empty() ? i : source_.heads[static_cast<size_t>(i)];
  }

  client::Result<void> WriteOne(const std::string& name, const HeatMaps& maps) {
    ++files_;
    if (isatty(STDERR_FILENO)) {
      std::fprintf(stderr, "\r\033[Kdrawing %s.png, file %d", name.c_str(), files_);
      shown_ = true;
    }
    std::string error = WritePng(directory_ + "/" + name + ".png", DrawHeatMaps(maps).image);
    if (!error.empty()) return Wrong(std::move(error));
    return {};
  }

  const std::string& directory_;
  const MapSource& source_;
  int files_ = 0;
  bool shown_ = false;
};

// Whether the answer's weights are what was asked for: their sizes are the server's word.
client::Result<void> CheckAnswer(const MapLabels& labels, const MapSource& source) {
  int64_t rows = 0;
  int64_t keys = 0;
  for (const client::Tensor& weights : source.sequences) {
    const std::vector<int64_t>& shape = weights.shape;
    const bool whole = shape.size() == 3 &&
                       std::all_of(shape.begin(), shape.end(), [](int64_t n) { return n >= 0; });
    int64_t size = 0;
    if (!whole || __builtin_mul_overflow(shape[0], shape[1], &size) ||
        __builtin_mul_overflow(size, shape[2], &size) || size != std::ssize(weights.ToFloats())) {
      return Wrong("the answer's weights are not [heads, rows, keys]");
    }
    if (!source.heads.empty() && shape[0] != std::ssize(source.heads)) {
      return Wrong("the answer's weights have " + std::to_string(shape[0]) + " heads, wanted " +
                   std::to_string(source.heads.size()));
    }
    if (!labels.rows.empty() && !source.cross && shape[2] < shape[1]) {
      return Wrong("the answer's weights have fewer keys than rows");
    }
    rows += shape[1];
    keys += shape[2];
  }
  if (!labels.rows.empty()) {
    auto fits = CheckCount("--tokens", labels.rows, rows, "rows of the answer");
    if (!fits.ok()) return fits;
  }
  if (labels.context.empty()) return {};
  return CheckCount("--context_tokens", labels.context, keys, "keys");
}

// The next `count` labels, or none where there are none at all.
std::vector<std::string> Take(const std::vector<std::string>& labels, size_t& from, int64_t count) {
  if (labels.empty()) return {};
  const auto first = labels.begin() + static_cast<int64_t>(from);
  from += static_cast<size_t>(count);
  return {first, first + count};
}

}  // namespace

client::Result<MapLabels> PrepareMaps(const MapFlags& flags, const MapInput& input) {
  MapLabels labels;
  if (!flags.tokens.empty()) {
    auto read = ReadLabels("--tokens", flags.tokens);
    if (!read.ok()) return read.error();
    labels.rows = *std::move(read);
    auto fits = CheckCount("--tokens", labels.rows, input.rows, "rows of the input");
    if (!fits.ok()) return fits.error();
  }
  if (!flags.context_tokens.empty()) {
    if (!input.cross) return Wrong("--context_tokens: the layer has no context");
    auto read = ReadLabels("--context_tokens", flags.context_tokens);
    if (!read.ok()) return read.error();
    labels.context = *std::move(read);
    auto fits =
        CheckCount("--context_tokens", labels.context,
                   input.context_rows.value_or(std::ssize(labels.context)), "rows of the context");
    if (!fits.ok()) return fits.error();
  }
  if (auto made = MakeWritable(flags.directory); !made.ok()) return made.error();
  return labels;
}

client::Result<int> WriteMaps(const std::string& directory, const MapLabels& labels,
                              const MapSource& source) {
  if (auto fits = CheckAnswer(labels, source); !fits.ok()) return fits.error();
  MapWriter writer(directory, source);
  size_t row = 0;
  size_t context = 0;
  for (size_t i = 0; i < source.sequences.size(); ++i) {
    const std::vector<int64_t>& shape = source.sequences[i].shape;
    const std::vector<std::string> rows = Take(labels.rows, row, shape[1]);
    const std::vector<std::string> keys =
        source.cross ? Take(labels.context, context, shape[2]) : rows;
    if (std::find(shape.begin(), shape.end(), 0) != shape.end()) continue;  // nothing to see
    if (auto written = writer.Write(i, rows, keys); !written.ok()) return written.error();
  }
  return writer.files();
}

}  // namespace attend::cli
