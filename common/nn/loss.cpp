#include "common/nn/loss.h"

#include "common/core/error.h"
#include "common/nn/layers.h"

namespace lockstep {
namespace {

class NllLoss final : public Loss {
 public:
  void forward(const AnyTensor& log_probabilities, const LabelTensor& labels, const Tensor& loss,
               Context& context) override {
    require_equal(labels.elements(), log_probabilities.shape()[0], "labels of a batch of samples");
    classes_ = log_probabilities.shape()[1];
    context.kernels().nll_loss(context.stream(), context.state(), log_probabilities, labels, loss);
  }
  AnyTensor backward(const LabelTensor& labels, Context& context) override {
    const Tensor dx = context.empty({labels.elements(), classes_});
    context.kernels().nll_loss_backward(context.stream(), context.state(), labels, dx);
    if (context.loss_scale().defined()) {
      context.kernels().scale_loss(context.stream(), context.loss_scale(), dx);
    }
    return dx;
  }

 private:
  int64_t classes_ = 0;
};

class CrossEntropyLoss final : public Loss {
 public:
  void forward(const AnyTensor& scores, const LabelTensor& labels, const Tensor& loss,
               Context& context) override {
    nll_.forward(log_softmax_.forward(scores, context), labels, loss, context);
  }
  AnyTensor backward(const LabelTensor& labels, Context& context) override {
    return log_softmax_.backward(nll_.backward(labels, context), context);
  }

 private:
  LogSoftmax log_softmax_;
  NllLoss nll_;
};

}  // namespace

std::unique_ptr<Loss> make_nll_loss() { return std::make_unique<NllLoss>(); }

std::unique_ptr<Loss> make_cross_entropy_loss() { return std::make_unique<CrossEntropyLoss>(); }

}  // namespace lockstep
