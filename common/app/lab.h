#pragma once
// The parts of a lab: mistakes with several ranks, to be run and seen, and a training run small
// enough to make them in.

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/app/rank_program.h"
#include "common/core/error.h"
#include "common/data/synthetic.h"
#include "common/kernels/devices.h"
#include "common/nn/init.h"
#include "common/nn/models.h"
#include "common/nn/sgd.h"
#include "common/step/feeder.h"

namespace lockstep {

/// A mistake that a program shows under its name: with it, or without it (`fixed`).
struct Lab {
  std::string name;
  std::function<void(ProcessGroup& group, bool fixed)> run;
};

/// What main() of a program of labs does: labs NAME [--fixed], on two ranks unless a launcher
/// started others. Returns the exit status.
inline int run_labs(int argc, const char* const* argv, const std::vector<Lab>& labs) {
  std::vector<std::string> names;
  for (const Lab& lab : labs) names.push_back(lab.name);
  std::string name;
  bool fixed = false;
  RankOptions rank_options;
  rank_options.timeout = 3;  // until a missing rank is given up
  OptionParser parser("labs", "Mistakes with several ranks, to be seen: labs NAME [--fixed].");
  parser.add("name", name, fmt::format("{}", fmt::join(names, ", ")));
  parser.add_flag("--fixed", fixed, "without the mistake");
  rank_options.add_to(parser);
  const auto named = [&] { return std::ranges::find(labs, name, &Lab::name); };
  parser.check_afterwards([&] {
    require(named() != labs.end(), "lab: found '{}', expected one of {}", name,
            fmt::join(names, ", "));
  });
  return run_rank_program(parser, argc, argv, rank_options, "cpu:0,cpu:1",
                          [&](ProcessGroup& group) { named()->run(group, fixed); });
}

/// Rank 0 speaks; the others only empty their buffers, so that lines keep their order.
inline void say(const ProcessGroup& group, const std::string& line) {
  if (group.rank() == 0) fmt::print("{}\n", line);
  std::fflush(stdout);
}

/// What one rank needs to train a small network on synthetic images.
struct SmallTraining {
  explicit SmallTraining(ProcessGroup& group, ModelKind kind = ModelKind::seed)
      : group(group),
        device(open_device({DeviceId::Kind::cpu, group.local_rank()}, {})),
        stream(device->create_stream("compute")),
        communication(device->create_stream("communication")),
        communicator(group.connect(*device)),
        comm(*communicator),
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

  /// Gradients of the parts of a batch, one after another; a sample counts `weight`.
  void forward_and_backward(const HostBatch& batch, const std::vector<BatchPart>& parts,
                            double weight) {
    context.begin_step({.learning_rate = Real(0.1), .loss_weight = Real(weight)});
    parameters.zero_gradients();
    for (const BatchPart& part : parts) {
      const DeviceBatch& fed = feeder.feed(batch, part, context);
      const Tensor scores = model.network->forward(feeder.normalize(fed, context), context);
      model.loss->forward(scores, fed.labels, loss, context);
      model.network->backward(model.loss->backward(fed.labels, context), context);
    }
    stream.synchronize();  // the host may release the batch
  }

  ProcessGroup& group;
  std::unique_ptr<Device> device;
  Stream stream, communication;
  std::unique_ptr<Communicator> communicator;
  Communicator& comm;
  Dataset set;
  Model model;
  FlatParameters parameters;
  Sgd optimizer;
  Context context;
  Feeder feeder;
  Tensor loss;
};

/// The L2 norm of x, taken as one vector.
inline double norm_of(const Tensor& x) {
  double sum = 0;
  for (const Real value : x.to_host()) sum += double(value) * double(value);
  return std::sqrt(sum);
}

}  // namespace lockstep
