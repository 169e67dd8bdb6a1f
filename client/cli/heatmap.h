// SPDX-License-Identifier: Apache-2.0
//
// Heat maps of attention weights as images: one map for each head, queries down and keys across,
// one colour scale for all maps of an image. Pure: weights and labels in, pixels out. The command
// line writes them as PNG (maps.cc).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "client/cli/image.h"

namespace attend::cli {

// What the queries or the keys of a map are called.
struct Axis {
  // Of the last labels.size() places, not more than there are; the others show numbers.
  std::vector<std::string> labels;
  int64_t first = 0;  // the number of the first place
};

struct HeatMaps {
  std::string title;
  std::vector<std::string> names;  // one for each map, at least one; of a single one none is drawn
  std::span<const float> weights;  // [names.size(), rows, keys]
  int64_t rows = 0;                // rows and keys may be 0
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
// Sizes that do not fit together end the program.
HeatMapImage DrawHeatMaps(const HeatMaps& maps);

}  // namespace attend::cli
