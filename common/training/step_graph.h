#pragma once
// A training step as one graph: enqueued kernel by kernel once, then as a whole.

#include <functional>
#include <memory>

#include "common/nn/context.h"

namespace lockstep {

/// Runs the work of a step. Enqueuing an operation on a GPU costs the host a few microseconds, and
/// a small network's operations take no longer than that: the GPU waits. With `enabled` the work is
/// captured as a graph, and a step costs the host one call. Mirrors
/// torch.cuda.make_graphed_callables.
class StepGraph {
 public:
  /// Only steps of `full_size` samples are captured: a graph has fixed shapes.
  StepGraph(Context& context, bool enabled, int64_t full_size)
      : context_(context), enabled_(enabled), full_size_(full_size) {}

  /// Enqueues `work`, which must enqueue the same operations at the same addresses every time it is
  /// given a batch of `full_size`. `work` reads from device memory what differs from step to step
  /// (Context::state(), the batch). The first time `work` runs as it is, since libraries then
  /// choose how to compute. The second time `work` is captured; later it is no longer called. An
  /// error of `work` ends the capture, too.
  void run(int64_t size, const std::function<void()>& work);

 private:
  void capture(const std::function<void()>& work);

  Context& context_;
  bool enabled_;
  int64_t full_size_;
  bool warm_ = false;
  std::vector<std::function<void()>> effects_;  // what every replay changes on the host
  std::shared_ptr<TensorPool> pool_;  // memory of the graph: nothing else may use any of it
  std::unique_ptr<Graph> graph_;
};

}  // namespace lockstep
