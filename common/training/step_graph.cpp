#include "common/training/step_graph.h"

namespace lockstep {

void StepGraph::run(int64_t size, const std::function<void()>& work) {
  if (!enabled_ || size != full_size_ || !warm_) {
    work();
    warm_ = warm_ || size == full_size_;
    return;
  }
  if (!graph_) {
    capture(work);
  } else {
    for (const auto& effect : effects_) effect();
  }
  context_.stream().launch(*graph_);
}

/// The graph's activations get a pool of their own. In the common pool they would be free again
/// after the capture, and every replay would overwrite the tensor that came to their place.
void StepGraph::capture(const std::function<void()>& work) {
  pool_ = std::make_shared<TensorPool>(context_.stream());
  const std::shared_ptr<TensorPool> common_pool = context_.replace_pool(pool_);
  context_.record_effects(&effects_);
  context_.stream().begin_capture();
  work();
  graph_ = context_.stream().end_capture();
  context_.record_effects(nullptr);
  context_.replace_pool(common_pool);
}

}  // namespace lockstep
