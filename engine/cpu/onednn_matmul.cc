// SPDX-License-Identifier: Apache-2.0
#include "engine/cpu/onednn_matmul.h"

#include <omp.h>

#include <cstring>
#include <string>

#include "engine/util/status_macros.h"

namespace attend {
namespace {

using dnnl::memory;

// A primitive takes some 20 KiB; making one takes 0.04..0.17 ms. Enough for the row counts 1..256
// of the four to eight panel shapes of a model.
constexpr size_t kMaxPrimitives = 2048;

// Row count at which the layout of packed weights is chosen; every other row count takes the same
// layout.
constexpr int64_t kLayoutRows = 64;

// Its choice of kernels changes at few rows: all of these must get the one of kLayoutRows, or rows
// would have other bits alone than among others.
constexpr int64_t kProbedRows[] = {1, 2, 3, 4, 5, 8, 16, 32, 240};

constexpr memory::data_type kType = memory::data_type::bf16;
constexpr int64_t kTypeBytes = 2;

absl::Status OneDnnError(const dnnl::error& error) {
  return absl::InternalError(std::string("oneDNN: ") + error.what());
}

bool IsBrgemm(const dnnl::matmul::primitive_desc& description) {
  return std::string(description.impl_info_str()).starts_with("brg");
}

}  // namespace

OneDnnMatmul::OneDnnMatmul(int workers) : engine_(dnnl::engine::kind::cpu, 0) {
  omp_set_num_threads(1);
  for (int i = 0; i < workers; ++i) {
    workers_.push_back({dnnl::stream(engine_), MappedMemory(), MappedMemory(), MappedMemory()});
  }
}

std::string OneDnnMatmul::Version() {
  const dnnl_version_t* version = dnnl_version();
  return "onednn" + std::to_string(version->major) + "." + std::to_string(version->minor) + "." +
         std::to_string(version->patch);
}

// The first brgemm implementation, or whatever comes last when there is none.
dnnl::matmul::primitive_desc OneDnnMatmul::Describe(const Key& key, const memory::desc& weights) {
  const Shape& shape = key.shape;
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  // brgemm takes x and y without gaps only, so panels are written to a tile and copied on.
  const memory::desc x({key.rows, shape.inner}, kType, memory::dims{shape.inner, 1});
  const memory::desc y({key.rows, shape.columns}, memory::data_type::f32,
                       memory::dims{shape.columns, 1});
  dnnl::matmul::primitive_desc description(dnnl::matmul::desc(x, weights, y), attributes, engine_);
  while (!IsBrgemm(description) && description.next_impl()) {
  }
  return description;
}

absl::StatusOr<memory::desc> OneDnnMatmul::PackedLayout(const Shape& shape) {
  if (const auto known = layouts_.find(shape); known != layouts_.end()) return known->second;
  omp_set_num_threads(1);
  try {
    const memory::desc any({shape.inner, shape.columns}, kType, memory::format_tag::any);
    const auto description = Describe({shape, kLayoutRows}, any);
    if (!IsBrgemm(description)) {
      return absl::UnimplementedError("oneDNN has no brgemm for " + std::to_string(shape.inner) +
                                      " x " + std::to_string(shape.columns) + " BF16");
    }
    const memory::desc layout = description.weights_desc();
    const std::string name = description.impl_info_str();
    for (const int64_t rows : kProbedRows) {
      if (Describe({shape, rows}, layout).impl_info_str() != name) {
        return absl::UnimplementedError("oneDNN has another kernel for " + std::to_string(rows) +
                                        " rows than " + name);
      }
    }
    return layouts_.emplace(shape, layout).first->second;
  } catch (const dnnl::error& error) {
    if (error.status == dnnl_unimplemented) return absl::UnimplementedError(error.what());
    return OneDnnError(error);
  }
}

absl::StatusOr<std::string> OneDnnMatmul::KernelName(const Shape& shape) {
  ASSIGN_OR_RETURN(const memory::desc layout, PackedLayout(shape));
  try {
    return std::string(Describe({shape, kLayoutRows}, layout).impl_info_str());
  } catch (const dnnl::error& error) {
    return OneDnnError(error);
  }
}

absl::StatusOr<int64_t> OneDnnMatmul::PackedBytes(const Shape& shape) {
  ASSIGN_OR_RETURN(const memory::desc layout, PackedLayout(shape));
  return static_cast<int64_t>(layout.get_size());
}

absl::StatusOr<memory> OneDnnMatmul::Pack(const Shape& shape, const void* plain, void* packed) {
  const auto layout = layouts_.find(shape);
  if (layout == layouts_.end()) return absl::InternalError("Pack before PackedBytes");
  omp_set_num_threads(1);
  try {
    const memory::desc plain_layout({shape.inner, shape.columns}, kType,
                                    memory::dims{1, shape.inner});
    memory from(plain_layout, engine_, const_cast<void*>(plain));
    memory to(layout->second, engine_, packed);
    dnnl::stream stream(engine_);
    dnnl::reorder(from, to).execute(stream, from, to);
    stream.wait();
    return to;
  } catch (const dnnl::error& error) {
    return OneDnnError(error);
  }
}

absl::Status OneDnnMatmul::Prepare(const Shape& shape, int64_t rows) {
  const Key key{shape, rows};
  if (const auto known = by_key_.find(key); known != by_key_.end()) {
    primitives_.splice(primitives_.begin(), primitives_, known->second);
    return absl::OkStatus();
  }
  omp_set_num_threads(1);
  ASSIGN_OR_RETURN(const memory::desc layout, PackedLayout(shape));
  try {
    const auto description = Describe(key, layout);
    if (!IsBrgemm(description)) {
      return absl::InternalError("oneDNN has no brgemm for " + std::to_string(rows) + " rows");
    }
    primitives_.push_front({key, description, dnnl::matmul(description)});
  } catch (const dnnl::error& error) {
    return OneDnnError(error);
  }
  by_key_[key] = primitives_.begin();
  if (primitives_.size() > kMaxPrimitives) {
    by_key_.erase(primitives_.back().key);
    primitives_.pop_back();
  }
  const int64_t scratchpad_bytes =
      static_cast<int64_t>(primitives_.front().description.scratchpad_desc().get_size());
  for (Worker& worker : workers_) {
    RETURN_IF_ERROR(worker.tile.Reserve(rows * shape.columns * int64_t{sizeof(float)}));
    RETURN_IF_ERROR(worker.gathered.Reserve(rows * shape.inner * kTypeBytes));
    RETURN_IF_ERROR(worker.scratchpad.Reserve(scratchpad_bytes));
  }
  return absl::OkStatus();
}

absl::StatusOr<float*> OneDnnMatmul::Run(const Shape& shape, const memory& weights,
                                         const void* const* x, int64_t rows, int worker) {
  const auto found = by_key_.find({shape, rows});
  if (found == by_key_.end()) return absl::InternalError("Run before Prepare");
  const Primitive& primitive = *found->second;
  Worker& own = workers_[worker];
  const void* plain = x[0];
  const int64_t row_bytes = shape.inner * kTypeBytes;
  const auto* first = static_cast<const std::byte*>(x[0]);
  for (int64_t r = 1; r < rows && plain == x[0]; ++r) {
    if (x[r] != first + r * row_bytes) plain = own.gathered.data();
  }
  for (int64_t r = 0; r < rows && plain != x[0]; ++r) {
    std::memcpy(own.gathered.data() + r * row_bytes, x[r], static_cast<size_t>(row_bytes));
  }
  omp_set_num_threads(1);
  try {
    const memory from(primitive.description.src_desc(), engine_, const_cast<void*>(plain));
    const memory to(primitive.description.dst_desc(), engine_, own.tile.data());
    const memory scratchpad(primitive.description.scratchpad_desc(), engine_,
                            own.scratchpad.data());
    // The C call, as the C++ one builds a map for the arguments.
    const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, from.get()},
                                         {DNNL_ARG_WEIGHTS, weights.get()},
                                         {DNNL_ARG_DST, to.get()},
                                         {DNNL_ARG_SCRATCHPAD, scratchpad.get()}};
    dnnl::error::wrap_c_api(
        dnnl_primitive_execute(primitive.matmul.get(), own.stream.get(), 4, arguments),
        "matmul failed");
  } catch (const dnnl::error& error) {
    return OneDnnError(error);
  }
  return reinterpret_cast<float*>(own.tile.data());
}

}  // namespace attend
