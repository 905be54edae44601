#pragma once
// The frame of a program of labs (mistakes to run and to see), and a training run that is small
// enough for labs.

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/comm/process_group.h"
#include "common/data/synthetic.h"
#include "common/kernels/devices.h"
#include "common/nn/init.h"
#include "common/nn/models.h"
#include "common/nn/optimizer.h"
#include "common/training/feeder.h"

namespace lockstep {

/// A mistake that a program shows under its name: `run` has the mistake, or not (`fixed`).
struct Lab {
  std::string name;
  std::function<void(bool fixed)> run;
};
/// The same on several ranks, each of which calls `run`.
struct RankLab {
  std::string name;
  std::function<void(ProcessGroup& group, bool fixed)> run;
  std::string devices = "cpu:0,cpu:1";  // unless a launcher starts the ranks
};

/// The whole main() of a program of labs: labs NAME [--fixed]. Returns the exit status.
int run_labs(int argc, const char* const* argv, const std::vector<Lab>& labs);
/// The same on the lab's ranks, unless a launcher started others.
int run_rank_labs(int argc, const char* const* argv, const std::vector<RankLab>& labs);

/// Prints a line at once.
void say(const std::string& line);
/// Rank 0 speaks; the others only empty their buffers, so that lines keep their order.
void say(const ProcessGroup& group, const std::string& line);

// --- A small training run ------------------------------------------------------------------------

/// All that is needed to train a small network on synthetic images, on one CPU device. Every
/// SmallTraining begins with the same weights.
struct SmallTraining {
  explicit SmallTraining(int index = 0, ModelKind kind = ModelKind::seed)
      : device(open_device({DeviceId::Kind::cpu, index}, {})),
        stream(device->create_stream("compute")),
        set(make_synthetic(SyntheticPart::train, 160)),
        model(make_model({.kind = kind})),
        parameters(*model.network, stream),
        optimizer(parameters, {}),
        context(stream),
        feeder(stream, set),
        loss(parameters.loss()) {
    initialize(parameters, Initializer::kaiming_uniform, 1);
  }

  /// `size` samples, drawn at random: every tenth sample is of the same class.
  HostBatch first_batch(int64_t size) const {
    DataLoader loader(set, {.batch_size = size, .shuffle = true});
    loader.begin_epoch(0);
    return *loader.next();
  }

  /// Enqueues the passes that give the gradients of a batch's parts, one after another. A sample
  /// counts `weight`. Does not wait.
  void enqueue_pass(const HostBatch& batch, const std::vector<BatchPart>& parts, double weight,
                    double learning_rate = 0.1) {
    context.begin_step({.learning_rate = Real(learning_rate), .loss_weight = Real(weight)});
    parameters.zero_gradients();
    for (const BatchPart& part : parts) {
      const DeviceBatch& fed = feeder.feed(batch, part, context);
      const AnyTensor scores = model.network->forward(feeder.normalize(fed, context), context);
      model.loss->forward(scores, fed.labels, loss, context);
      model.network->backward(model.loss->backward(fed.labels, context), context);
    }
  }
  /// The same, and waits: the caller may release the batch.
  void forward_and_backward(const HostBatch& batch, const std::vector<BatchPart>& parts,
                            double weight, double learning_rate = 0.1) {
    enqueue_pass(batch, parts, weight, learning_rate);
    stream.synchronize();
  }
  /// Enqueues the update that follows.
  void update() { optimizer.step(context.state(), loss); }

  std::unique_ptr<Device> device;
  Stream stream;
  Dataset set;
  Model model;
  FlatParameters parameters;
  Optimizer optimizer;
  Context context;
  Feeder feeder;
  Tensor loss;
};

/// The same as one of several ranks.
struct RankTraining : SmallTraining {
  explicit RankTraining(ProcessGroup& of, ModelKind kind = ModelKind::seed)
      : SmallTraining(of.local_rank(), kind),
        group(of),
        communication(device->create_stream("communication")),
        communicator(group.connect(*device)),
        comm(*communicator) {}

  ProcessGroup& group;
  Stream communication;
  std::unique_ptr<Communicator> communicator;
  Communicator& comm;
};

using Numbers = std::vector<double>;

/// The values of x, on the host. Waits for its stream.
inline Numbers numbers_of(const Tensor& x) {
  const std::vector<Real> values = x.to_host();
  return {values.begin(), values.end()};
}

/// The L2 norm of x, taken as one vector.
inline double norm_of(const Numbers& x) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  return std::sqrt(sum);
}
inline double norm_of(const Tensor& x) { return norm_of(numbers_of(x)); }

/// |found - expected| / |expected|, of numbers of any type.
template <class T>
double relative_error(const std::vector<T>& found, const std::vector<T>& expected) {
  Numbers apart(found.begin(), found.end());
  for (size_t i = 0; i < apart.size(); ++i) apart[i] -= double(expected.at(i));
  return norm_of(apart) / norm_of(Numbers(expected.begin(), expected.end()));
}

}  // namespace lockstep
