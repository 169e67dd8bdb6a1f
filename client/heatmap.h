// SPDX-License-Identifier: Apache-2.0
//
// Heat maps of attention weights as images: one map for each head, queries down and keys across,
// one colour scale for all maps of an image. Pure: weights and labels in, pixels out. The command
// line writes them as PNG (cli/maps.cc).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "client/image.h"

namespace attend::client {

// What the queries or the keys of a map are called.
struct Axis {
  std::vector<std::string> labels;  // of the last labels.size() places; the others show numbers
  int64_t first = 0;                // the number of the first place
};

struct HeatMaps {
  std::string title;
  std::vector<std::string> names;  // one for each map; a single one may be empty: no name is drawn
  std::span<const float> weights;  // [names.size(), rows, keys]
  int64_t rows = 0;
  int64_t keys = 0;
  Axis row_axis;
  Axis key_axis;
};

// Where a map lies on the image, in pixels.
struct MapArea {
  int left = 0;
  int top = 0;
  int width = 0;
  int height = 0;
};

struct HeatMapImage {
  Image image;
  std::vector<MapArea> areas;  // one for each map
};

// The colour of a weight on a scale that ends at `maximum`. Exactly 0, as keys that a row may not
// see have, is grey; NaN and infinities are red.
Rgb WeightColor(float weight, float maximum);

// Few weights get large cells. More than fit (2048 a side; 320 where there are several maps) share
// pixels, each of which shows the largest of its weights, or NaN if one is.
HeatMapImage DrawHeatMaps(const HeatMaps& maps);

}  // namespace attend::client
