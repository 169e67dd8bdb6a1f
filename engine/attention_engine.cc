// SPDX-License-Identifier: Apache-2.0
//
// Chooses the engine. The only file that names engines. The CUDA engine is a plugin opened at run
// time, so that one program serves machines with and without the CUDA libraries.
#include "engine/attention_engine.h"

#include <dlfcn.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "engine/cpu/cpu_engine.h"
#include "engine/cuda/cuda_plugin.h"
#include "engine/util/error.h"
#include "engine/util/status_macros.h"

namespace attend {
namespace {

constexpr char kPlugin[] = "attend-engine-cuda.so";

// Beside the program (build tree), or where an installation has it.
std::vector<std::filesystem::path> PluginPlaces() {
  std::error_code error;
  const auto folder = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  return {folder / kPlugin, folder / ".." / "lib" / "attend" / kPlugin};
}

// Opened once and never closed: its code may run until the process ends.
absl::StatusOr<const CudaPlugin*> OpenPlugin() {
  static const absl::StatusOr<const CudaPlugin*> opened =
      []() -> absl::StatusOr<const CudaPlugin*> {
    for (const std::filesystem::path& place : PluginPlaces()) {
      std::error_code error;
      if (!std::filesystem::exists(place, error)) continue;
      void* library = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) return absl::UnavailableError(dlerror());
      const auto entry = reinterpret_cast<CudaPluginEntry>(dlsym(library, kCudaPluginEntry));
      if (entry == nullptr) return absl::UnavailableError(dlerror());
      return entry();
    }
    return absl::UnavailableError(std::string("this attend has no CUDA engine (no ") + kPlugin +
                                  " beside the program or in ../lib/attend)");
  }();
  return opened;
}

absl::StatusOr<DeviceChoice> FindCudaDevice() {
  ASSIGN_OR_RETURN(const CudaPlugin* plugin, OpenPlugin());
  return plugin->find_device();
}

}  // namespace

absl::StatusOr<DeviceChoice> ChooseDevice(const std::string& device) {
  if (device == "cpu") return DeviceChoice{.device = "cpu"};
  if (device != "auto" && device != "cuda") {
    return InvalidField("device", device, "auto, cpu or cuda");
  }
  absl::StatusOr<DeviceChoice> found = FindCudaDevice();
  if (found.ok()) return found;
  const std::string why(found.status().message());
  if (device == "cuda") return InvalidField("device", "cuda", "auto or cpu: " + why);
  return DeviceChoice{.device = "cpu", .why = why};
}

absl::StatusOr<std::unique_ptr<AttentionEngine>> MakeEngine(const EngineOptions& options) {
  ASSIGN_OR_RETURN(const DeviceChoice choice, ChooseDevice(options.device));
  if (options.threads < 1) {
    return InvalidField("threads", std::to_string(options.threads), "1 or more");
  }
  if (options.kv_bytes < 0 || options.scratch_bytes < 0) {
    return InvalidField("kv_bytes", std::to_string(options.kv_bytes), "0 or more");
  }
  if (options.weight_dtype != "auto" && options.weight_dtype != "i8") {
    return InvalidField("weight_dtype", options.weight_dtype, "auto or i8");
  }
  if (choice.device == "cpu") return MakeCpuEngine(options);
  if (options.weight_dtype == "i8") {
    return InvalidField("weight_dtype", "i8", "auto: only the CPU engine computes with I8 weights");
  }
  ASSIGN_OR_RETURN(const CudaPlugin* plugin, OpenPlugin());
  return plugin->make_engine(options);
}

}  // namespace attend
