#include "03-model-split/tensor_training.h"

#include "03-model-split/layer_split.h"
#include "common/core/error.h"
#include "common/kernels/devices.h"

namespace lockstep {
namespace {

/// The ranks' network as it looks from device 0.
class AsOneNetwork final : public Module {
 public:
  explicit AsOneNetwork(TensorSplit& split) : split_(split) {
    for (int r = 1; r < split.ranks(); ++r) others_.emplace_back(split.parameters(r).stream());
  }

  Tensor forward(const Tensor& x, Context& context) override {
    Tensors images{x};
    Contexts contexts{&context};
    for (Context& other : others_) {
      other.facts = context.facts;
      images.push_back(copied_to(x, other));
      contexts.push_back(&other);
    }
    return split_.forward(images, contexts)[0];
  }
  Tensor backward(const Tensor&, Context&) override {
    fail<BadInput>("tensor split: this network is for evaluation, expected train_step()");
  }

 private:
  TensorSplit& split_;
  std::deque<Context> others_;  // of ranks 1, 2, ...
};

}  // namespace

TensorTraining::TensorTraining(std::unique_ptr<TensorSplit> split, Loss& loss,
                               const ModelOptions& model, const Dataset& set, const SgdRule& rule)
    : split_(std::move(split)), loss_(loss), model_(model) {
  for (int r = 0; r < split_->ranks(); ++r) {
    const FlatParameters& parameters = split_->parameters(r);
    const Stream stream = parameters.stream();
    workers_.push_back({.context = Context(stream),
                        .feeder = Feeder(stream, set),
                        .optimizer = Sgd(parameters, rule),
                        .loss = Tensor::empty(stream, {1})});
  }
  evaluation_ = std::make_unique<AsOneNetwork>(*split_);
}

void TensorTraining::initialize(Initializer initializer, uint64_t seed) {
  // Parameters are drawn as whole tensors, so the whole network is made first, in host memory.
  const std::unique_ptr<Device> host = open_device({DeviceId::Kind::cpu, 0}, {});
  Model whole = make_model(model_);
  const FlatParameters parameters(*whole.network, host->create_stream("initialize"));
  lockstep::initialize(parameters, initializer, seed);
  load_state(state_dict(*whole.network));
}

int64_t TensorTraining::parameter_count() {
  const Model whole = make_model(model_);
  int64_t count = 0;
  for (const Parameter* parameter : whole.network->parameters()) {
    count += parameter->shape.elements();
  }
  return count;
}

Contexts TensorTraining::contexts() {
  Contexts all;
  for (Worker& worker : workers_) all.push_back(&worker.context);
  return all;
}

void TensorTraining::train_step(HostBatch batch, const StepState& step, const Tensor& mean_loss) {
  workers_.front().loss = mean_loss;
  Tensors images, scores_gradients;
  std::vector<const DeviceBatch*> fed;
  for (Worker& worker : workers_) {
    Context& context = worker.context;
    context.begin_step(step);
    fed.push_back(&worker.feeder.feed(batch, context));
    worker.optimizer.zero_gradients();
    context.kernels().fill(context.stream(), 0, worker.loss);
    images.push_back(worker.feeder.normalize(*fed.back(), context));
  }
  const Tensors scores = split_->forward(images, contexts());
  for (size_t r = 0; r < workers_.size(); ++r) {
    loss_.forward(scores[r], fed[r]->labels, workers_[r].loss, workers_[r].context);
    scores_gradients.push_back(loss_.backward(fed[r]->labels, workers_[r].context));
  }
  split_->backward(scores_gradients, contexts());
  for (const Worker& worker : workers_) worker.optimizer.step(worker.context.state(), worker.loss);
}

std::vector<HealthTensor> TensorTraining::healths() const {
  std::vector<HealthTensor> all;
  for (const Worker& worker : workers_) all.push_back(worker.optimizer.health());
  return all;
}

double TensorTraining::flops() const {
  double all = 0;
  for (const Worker& worker : workers_) all += worker.context.flops();
  return all;
}

}  // namespace lockstep
