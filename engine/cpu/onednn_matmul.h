// SPDX-License-Identifier: Apache-2.0
//
// oneDNN's packed BF16 matmul as the projection needs it: one column panel at a time,
// single-threaded, exact row counts, float32 sums. Its brgemm kernels were found bit-identical over
// row counts; its other kernels were not, so a shape that has no brgemm, or not the same one for
// every row count, is refused here.
//
// Threads: Pack, Prepare by the caller's thread; Run by any worker in between. oneDNN bakes the
// number of OpenMP threads into a primitive when it is made, so every entry point sets it to one
// for its thread: no OpenMP team ever starts.
#pragma once

#include <cstdint>
#include <dnnl.hpp>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/cpu/mapped_memory.h"

namespace attend {

class OneDnnMatmul {
 public:
  struct Shape {
    int64_t inner = 0;
    int64_t columns = 0;

    friend auto operator<=>(const Shape&, const Shape&) = default;
  };

  explicit OneDnnMatmul(int workers);

  static std::string Version();  // "onednn2.6.3"

  // Name of the brgemm kernel that serves the shape, e.g. "brg:avx512_core_bf16"; UNIMPLEMENTED
  // without one.
  absl::StatusOr<std::string> KernelName(const Shape& shape);

  // Bytes of the packed weights of a shape that KernelName accepts.
  absl::StatusOr<int64_t> PackedBytes(const Shape& shape);

  // Reorders plain [columns][inner] BF16 weights into `packed`, 64-byte aligned and
  // as long-lived as the result. Any thread.
  absl::StatusOr<dnnl::memory> Pack(const Shape& shape, const void* plain, void* packed);

  // Makes the primitive for a row count unless it is kept from before.
  absl::Status Prepare(const Shape& shape, int64_t rows);

  // Rows of x ([rows] pointers to [inner] BF16) times packed weights; the sums go to the worker's
  // tile, [rows, columns] without gaps, valid until its next Run. After Prepare of the same shape
  // and rows.
  absl::StatusOr<float*> Run(const Shape& shape, const dnnl::memory& weights, const void* const* x,
                             int64_t rows, int worker);

 private:
  struct Key {
    Shape shape;
    int64_t rows = 0;

    friend auto operator<=>(const Key&, const Key&) = default;
  };
  struct Primitive {
    Key key;
    dnnl::matmul::primitive_desc description;
    dnnl::matmul matmul;
  };
  struct Worker {
    dnnl::stream stream;
    MappedMemory tile;
    MappedMemory gathered;  // rows of x that do not lie one after another
    MappedMemory scratchpad;
  };

  dnnl::matmul::primitive_desc Describe(const Key& key, const dnnl::memory::desc& weights);
  absl::StatusOr<dnnl::memory::desc> PackedLayout(const Shape& shape);

  dnnl::engine engine_;
  std::vector<Worker> workers_;
  std::map<Shape, dnnl::memory::desc> layouts_;
  std::list<Primitive> primitives_;  // most recently prepared first
  std::map<Key, std::list<Primitive>::iterator> by_key_;
};

}  // namespace attend
