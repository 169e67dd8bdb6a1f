// SPDX-License-Identifier: Apache-2.0
//
// Reads a PNG file back with libpng.
#pragma once

#include <gtest/gtest.h>
#include <png.h>

#include <string>
#include <vector>

namespace attend::client {

struct PngFile {
  int width = 0;
  int height = 0;
  std::vector<unsigned char> bytes;  // red, green, blue, from the top left; empty = unreadable
};

inline PngFile ReadPng(const std::string& path) {
  png_image png = {};
  png.version = PNG_IMAGE_VERSION;
  PngFile file;
  if (png_image_begin_read_from_file(&png, path.c_str()) == 0) {
    ADD_FAILURE() << path << ": " << png.message;
    return file;
  }
  png.format = PNG_FORMAT_RGB;
  file.width = static_cast<int>(png.width);
  file.height = static_cast<int>(png.height);
  file.bytes.resize(PNG_IMAGE_SIZE(png));
  if (png_image_finish_read(&png, nullptr, file.bytes.data(), 0, nullptr) == 0) {
    ADD_FAILURE() << path << ": " << png.message;
    file.bytes.clear();
  }
  return file;
}

}  // namespace attend::client
