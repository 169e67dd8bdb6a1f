// SPDX-License-Identifier: Apache-2.0
//
// Of cuda_runtime_api.h: streams, events, captures and graphs on the emulated device. What runs
// when is stand_in_device's.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "tests/simt/stand_in_device.h"

namespace attend::simt {
namespace {

template <class Body>
cudaError_t EventCall(const char* function, cudaEvent_t event, Body body) {
  return RuntimeCall(function, [&](Device& device) {
    if (device.events.contains(event)) return body(device);
    return device.Violation(std::string(function) + " on an event that does not exist");
  });
}

cudaError_t Record(const char* function, cudaEvent_t event, cudaStream_t stream, bool external) {
  return StreamCall(function, stream, [&](Device& device, EmulatedStream& queue) {
    if (!device.events.contains(event)) {
      return device.Violation(std::string(function) + " of an event that does not exist");
    }
    Operation record;
    record.kind = Operation::Kind::kRecord;
    record.name = "event record";
    record.event = event;
    record.external = external;
    return device.Submit(queue, std::move(record));
  });
}

cudaError_t EndCapture(EmulatedStream& stream, cudaGraph_t* graph) {
  if (graph == nullptr || stream.capture == nullptr) return cudaErrorInvalidValue;
  *graph = nullptr;
  const std::unique_ptr<EmulatedGraph> captured = std::move(stream.capture);
  if (std::exchange(stream.capture_broken, false) ||
      stream.capture_thread != std::this_thread::get_id()) {
    return cudaErrorStreamCaptureUnsupported;
  }
  *graph = new EmulatedGraph(*captured);
  return cudaSuccess;
}

cudaError_t Launch(Device& device, const EmulatedGraphExec& executable, EmulatedStream& stream) {
  if (stream.capture != nullptr) {  // graphs in graphs are not emulated
    stream.capture_broken = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  for (const Operation& node : executable.nodes) {
    if (node.event != nullptr && !device.events.contains(node.event)) {
      return device.Violation("launch of a graph that records an event that does not exist");
    }
    if (const cudaError_t error = device.Submit(stream, node); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace attend::simt

namespace simt = attend::simt;
using simt::Device;
using simt::EventCall;
using simt::ReleaseCall;
using simt::RuntimeCall;
using simt::StreamCall;

// ---- Streams ----

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return RuntimeCall(__func__, [&](Device& device) {
    // Others would wait for the default stream and it for them, which is not emulated.
    if (stream == nullptr || flags != cudaStreamNonBlocking) return cudaErrorInvalidValue;
    *stream = new EmulatedStream;
    device.streams.push_back(*stream);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return ReleaseCall(__func__, [&](Device& device) {
    if (stream == nullptr || device.Queue(stream) == nullptr) {
      return device.Violation("cudaStreamDestroy of a stream that does not exist");
    }
    const cudaError_t error = device.Finish(*stream);
    std::erase(device.streams, stream);
    delete stream;
    return error;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return StreamCall(__func__, stream, [](Device& device, EmulatedStream& queue) {
    if (device.CaptureForbids()) return cudaErrorStreamCaptureUnsupported;
    return device.Finish(queue);
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return StreamCall(__func__, stream, [&](Device& device, EmulatedStream& queue) {
    if (!device.events.contains(event)) {
      return device.Violation("cudaStreamWaitEvent for an event that does not exist");
    }
    if (flags != 0) return cudaErrorInvalidValue;
    simt::Operation wait;
    wait.kind = simt::Operation::Kind::kWait;
    wait.name = "event wait";
    wait.marker = event->marker;
    if (wait.marker == nullptr && queue.capture == nullptr) return cudaSuccess;  // never recorded
    return device.Submit(queue, std::move(wait));
  });
}

// ---- Events ----

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return RuntimeCall(__func__, [&](Device& device) {
    if (event == nullptr || (flags & ~cudaEventDisableTiming) != 0) return cudaErrorInvalidValue;
    *event = new EmulatedEvent;
    (*event)->timing = (flags & cudaEventDisableTiming) == 0;
    device.events.insert(*event);
    return cudaSuccess;
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return ReleaseCall(__func__, [&](Device& device) {
    if (device.events.erase(event) == 0) {
      return device.Violation("cudaEventDestroy of an event that does not exist");
    }
    delete event;
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return simt::Record(__func__, event, stream, /*external=*/false);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return simt::Record(__func__, event, stream, (flags & cudaEventRecordExternal) != 0);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return EventCall(__func__, event, [&](Device& device) {
    if (device.CaptureForbids()) return cudaErrorStreamCaptureUnsupported;
    if (event->marker == nullptr) return cudaSuccess;
    const std::shared_ptr<simt::Marker> marker = event->marker;
    if (const cudaError_t error = device.Poll(*marker); error != cudaSuccess) return error;
    return marker->done ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return EventCall(__func__, event, [&](Device& device) {
    if (device.CaptureForbids()) return cudaErrorStreamCaptureUnsupported;
    if (event->marker == nullptr) return cudaSuccess;
    const std::shared_ptr<simt::Marker> marker = event->marker;
    return device.Finish(*marker);
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  return EventCall(__func__, begin, [&](Device& device) {
    if (!device.events.contains(end) || !begin->timing || !end->timing ||
        begin->marker == nullptr || end->marker == nullptr) {
      return cudaErrorInvalidValue;
    }
    if (!begin->marker->done || !end->marker->done) return cudaErrorNotReady;
    *milliseconds =
        std::chrono::duration<float, std::milli>(end->marker->time - begin->marker->time).count();
    return cudaSuccess;
  });
}

// ---- Captures and graphs ----

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return StreamCall(__func__, stream, [&](Device&, EmulatedStream& queue) {
    if (stream == nullptr || queue.capture != nullptr) return cudaErrorStreamCaptureUnsupported;
    queue.capture = std::make_unique<EmulatedGraph>();
    queue.capture_mode = mode;
    queue.capture_thread = std::this_thread::get_id();
    queue.capture_broken = false;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return StreamCall(__func__, stream, [&](Device& device, EmulatedStream& queue) {
    const cudaError_t error = simt::EndCapture(queue, graph);
    if (error == cudaSuccess) device.graphs.insert(*graph);
    return error;
  });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long flags) {
  return RuntimeCall(__func__, [&](Device& device) {
    if (executable == nullptr || flags != 0 || !device.graphs.contains(graph)) {
      return cudaErrorInvalidValue;
    }
    *executable = new EmulatedGraphExec{graph->nodes};
    device.executables.insert(*executable);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return StreamCall(__func__, stream, [&](Device& device, EmulatedStream& queue) {
    if (!device.executables.contains(executable)) return cudaErrorInvalidValue;
    return simt::Launch(device, *executable, queue);
  });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return ReleaseCall(__func__, [&](Device& device) {
    if (device.graphs.erase(graph) == 0) return cudaErrorInvalidValue;
    delete graph;
    return cudaSuccess;
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return ReleaseCall(__func__, [&](Device& device) {
    if (device.executables.erase(executable) == 0) return cudaErrorInvalidValue;
    delete executable;
    return cudaSuccess;
  });
}
