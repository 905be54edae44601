#include "common/training/step_graph.h"

#include <utility>

namespace lockstep {
namespace {

/// While it lives, the context has memory of `pool`, and lists its effects. Where no graph came of
/// the capture meanwhile, for an error, that is over, too: the stream goes on.
class Capture {
 public:
  Capture(Context& context, std::shared_ptr<TensorPool> pool,
          std::vector<std::function<void()>>& effects, const std::unique_ptr<Graph>& graph)
      : context_(context), common_pool_(context.replace_pool(std::move(pool))), graph_(graph) {
    context_.record_effects(&effects);
  }
  ~Capture() {
    context_.record_effects(nullptr);
    context_.replace_pool(common_pool_);
    if (graph_) return;
    try {
      context_.stream().end_capture();
    } catch (...) {  // the error that is on its way tells more
    }
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

 private:
  Context& context_;
  const std::shared_ptr<TensorPool> common_pool_;
  const std::unique_ptr<Graph>& graph_;
};

}  // namespace

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
  effects_.clear();
  const Capture capture(context_, pool_, effects_, graph_);
  context_.stream().begin_capture();
  work();
  graph_ = context_.stream().end_capture();
}

}  // namespace lockstep
