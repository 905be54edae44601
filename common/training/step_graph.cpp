#include "common/training/step_graph.h"

#include <utility>

namespace lockstep {
namespace {

/// While it lives, the context's work is captured, with memory of `pool`. An error of the work ends
/// the capture as well: the stream goes on, and nothing is left of what was captured.
class Capture {
 public:
  Capture(Context& context, std::shared_ptr<TensorPool> pool,
          std::vector<std::function<void()>>& effects)
      : context_(context) {
    context_.stream().begin_capture();
    common_pool_ = context_.replace_pool(std::move(pool));
    context_.record_effects(&effects);
  }
  ~Capture() {
    context_.record_effects(nullptr);
    context_.replace_pool(common_pool_);
    if (ended_) return;
    try {
      context_.stream().end_capture();
    } catch (...) {  // of the error that is on its way
    }
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  std::unique_ptr<Graph> end() {
    ended_ = true;
    return context_.stream().end_capture();
  }

 private:
  Context& context_;
  std::shared_ptr<TensorPool> common_pool_;
  bool ended_ = false;
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
  Capture capture(context_, pool_, effects_);
  work();
  graph_ = capture.end();
}

}  // namespace lockstep
