// Stream capture and graphs. A graph is the list of its operations in the order of the calls:
// one of the orders that the dependencies allow.

#include <set>
#include <utility>

#include "runtime/model.h"
#include "runtime/sanitizer.h"

struct CUgraph_st {
  std::vector<cuda_model::Task> nodes;
};
struct CUgraphExec_st {
  std::shared_ptr<const std::vector<cuda_model::Task>> nodes;
};

namespace cuda_model {
namespace {

std::set<std::shared_ptr<Capture>>& open_captures() {
  static auto& captures = *new std::set<std::shared_ptr<Capture>>;
  return captures;
}

/// A capture in global mode forbids unsafe calls to every thread, one in thread-local mode to its
/// own; a relaxed one forbids none.
bool forbids_unsafe_calls(const Capture& capture) {
  if (capture.mode == cudaStreamCaptureModeGlobal) return true;
  return capture.mode == cudaStreamCaptureModeThreadLocal &&
         capture.thread == std::this_thread::get_id();
}

/// Takes the streams out of the capture. True if each was joined to another in time.
bool release_streams(Capture& capture) {
  bool joined = true;
  for (CUstream_st* stream : capture.streams) {
    if (stream != capture.origin) {
      joined = joined && stream->joined_operations == stream->captured_operations;
    }
    stream->capture = nullptr;
  }
  capture.streams.clear();
  capture.origin = nullptr;
  return joined;
}

}  // namespace

cudaError_t forbid_in_capture(CUstream_st* stream) {
  const std::lock_guard lock(model_mutex());
  bool forbidden = false;
  for (const auto& capture : open_captures()) {
    if (!forbids_unsafe_calls(*capture) && (!stream || stream->capture != capture)) continue;
    capture->invalidated = true;
    forbidden = true;
  }
  return forbidden ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

}  // namespace cuda_model

using namespace cuda_model;

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return api("cudaStreamBeginCapture", [&] {
    static unsigned long long next_id = 0;
    const auto stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (const int sticky = stream->device.sticky) return static_cast<cudaError_t>(sticky);
    const std::lock_guard lock(model_mutex());
    if (stream->capture != nullptr) return cudaErrorIllegalState;
    const auto capture = make_shared_by_threads<Capture>();
    capture->id = ++next_id;
    capture->origin = stream.get();
    capture->thread = std::this_thread::get_id();
    capture->mode = mode;
    capture->streams = {stream.get()};
    stream->capture = capture;
    open_captures().insert(capture);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  return api("cudaStreamEndCapture", [&] {
    const auto stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (graph == nullptr) return cudaErrorInvalidValue;
    const std::lock_guard lock(model_mutex());
    const auto capture = stream->capture;
    *graph = nullptr;
    if (capture == nullptr) return cudaErrorIllegalState;
    if (capture->origin != stream.get()) {
      capture->invalidated = true;
      return cudaErrorStreamCaptureUnmatched;
    }
    if (capture->mode != cudaStreamCaptureModeRelaxed &&
        capture->thread != std::this_thread::get_id()) {
      return cudaErrorStreamCaptureWrongThread;
    }
    open_captures().erase(capture);
    const bool joined = release_streams(*capture);
    if (capture->invalidated) return cudaErrorStreamCaptureInvalidated;
    if (!joined) return cudaErrorStreamCaptureUnjoined;
    *graph = new CUgraph_st{std::move(capture->nodes)};
    return cudaSuccess;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(handle, status);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  return api("cudaStreamGetCaptureInfo", [&] {
    const auto stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (graph || dependencies || edges || count) return cudaErrorNotSupported;
    const std::lock_guard lock(model_mutex());
    const auto& capture = stream->capture;
    *status = capture == nullptr     ? cudaStreamCaptureStatusNone
              : capture->invalidated ? cudaStreamCaptureStatusInvalidated
                                     : cudaStreamCaptureStatusActive;
    if (id != nullptr && capture != nullptr) *id = capture->id;
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                 unsigned long long flags) {
  return api("cudaGraphInstantiate", [&] {
    if (exec == nullptr || graph == nullptr) return cudaErrorInvalidValue;
    if (flags > 15) return cudaErrorInvalidValue;
    *exec = new CUgraphExec_st{make_shared_by_threads<const std::vector<Task>>(graph->nodes)};
    return cudaSuccess;
  });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  return api("cudaGraphLaunch", [&] {
    if (exec == nullptr) return cudaErrorInvalidValue;
    return enqueue(stream, [nodes = exec->nodes] {
      for (const Task& node : *nodes) node();
    });
  });
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  return api("cudaGraphGetNodes", [&] {
    if (graph == nullptr || count == nullptr) return cudaErrorInvalidValue;
    if (nodes != nullptr) return cudaErrorNotSupported;  // the model's nodes have no handles
    *count = graph->nodes.size();
    return cudaSuccess;
  });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return api("cudaGraphDestroy", [&] {
    delete graph;
    return graph == nullptr ? cudaErrorInvalidValue : cudaSuccess;
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  return api("cudaGraphExecDestroy", [&] {
    delete exec;  // a launch that still waits keeps the operations
    return exec == nullptr ? cudaErrorInvalidValue : cudaSuccess;
  });
}
