// Three mistakes on a mesh, each a message or a sample for the wrong axis. Run each with the
// mistake, and without it.
//
//   build/07-mesh/labs wrong-axis-average
//   build/07-mesh/labs wrong-axis-average --fixed
//
// All of them take four ranks.

#include <fmt/ranges.h>

#include <algorithm>
#include <memory>

#include "04-ddp/distributed_sampler.h"
#include "07-mesh/mesh_parallel.h"
#include "common/training/lab.h"

namespace lockstep {
namespace {

constexpr int64_t kBatch = 32;  // of all ranks together

DistributedSampler sampler_of(const Dataset& set, int place, int places) {
  return {set.count(), {.rank = place, .world_size = places}};
}

/// The samples of one of `places` in the first batch.
HostBatch first_batch(const Dataset& set, int place, int places) {
  DataLoader loader(
      set, {.batch_size = kBatch / places,
            .sampler = std::make_shared<DistributedSampler>(sampler_of(set, place, places))});
  loader.begin_epoch(0);
  return *loader.next();
}

/// Training of the small network on a mesh. Beside it every rank has the whole network, and the
/// gradient of the whole batch, as one process has them. Both begin with the same weights.
struct MeshTraining {
  MeshTraining(ProcessGroup& group, const char* shape)
      : one(group),
        mesh(MeshShape::from(shape), group, *one.device, one.comm),
        model(make_model({})),
        network(model, {}, mesh, one.stream, one.communication, {}),
        sharded(network.sharded()),
        context(one.stream),
        feeder(one.stream, one.set) {
    network.initialize(Initializer::kaiming_uniform, 1);
    one.forward_and_backward(first_batch(one.set, 0, 1), {{0, 1, kBatch}}, 1.0 / kBatch);
  }

  /// How many ranks have other samples than each other, and which of them this rank is.
  int places() { return mesh.along(kSampleAxes).world_size(); }
  int place() { return mesh.along(kSampleAxes).rank(); }

  /// Gradients of one place's samples; averaged as stage 07 does, or, with `reduces` false, as they
  /// are. Waits.
  void forward_and_backward(int of_place, bool reduces = true) {
    const HostBatch batch = first_batch(one.set, of_place, places());
    context.begin_step({.loss_weight = Real(double(places()) / double(kBatch))});
    context.facts.last_contribution = reduces;
    const DeviceBatch& fed = feeder.feed(batch, {0, 1, batch.size}, context);
    const AnyTensor scores = model.network->forward(feeder.normalize(fed, context), context);
    model.loss->forward(scores, fed.labels, sharded.loss(), context);
    model.network->backward(model.loss->backward(fed.labels, context), context);
    one.stream.synchronize();
  }

  RankTraining one;
  DeviceMesh mesh;
  Model model;
  MeshParallel network;
  FullyShardedDataParallel& sharded;
  Context context;
  Feeder feeder;
};

/// Gradients of a rank, and what they would be: its parts of those of one process.
struct Compared {
  std::vector<Real> found, expected;
  double error() const { return relative_error(found, expected); }
};

/// Those of the parameters of which ranks along `tensor` have parts, or copies.
Compared gradients(MeshTraining& training, bool parts) {
  Compared all;
  for (const Parameter* whole : training.one.model.network->parameters()) {
    for (const Parameter* mine : training.model.network->parameters()) {
      if (mine->name != whole->name || (mine->shape != whole->shape) != parts) continue;
      const std::vector<Real> found = mine->grad.to_host();
      const std::vector<Real> expected = part_of(whole->grad.to_host(), whole->shape, mine->shape,
                                                 training.mesh.coordinate(Axis::tensor));
      all.found.insert(all.found.end(), found.begin(), found.end());
      all.expected.insert(all.expected.end(), expected.begin(), expected.end());
    }
  }
  return all;
}

/// Rank 0 says all ranks' lines, each behind its rank's coordinates.
void say_of_all(MeshTraining& training, const std::string& mine) {
  ProcessGroup& group = training.mesh.group();
  const std::string place = training.mesh.shape().place_of(group.rank());
  const std::string line = fmt::format("rank {} ({}): {}", group.rank(), place, mine);
  for (const std::string& each : group.exchange(line)) say(group, each);
}

void say_errors(MeshTraining& training) {
  say_of_all(training,
             fmt::format("relative error of the gradient {:.1e} in copies, {:.1e} in parts",
                         gradients(training, /*parts=*/false).error(),
                         gradients(training, /*parts=*/true).error()));
}

// --- Averaged over the wrong axis ----------------------------------------------------------------

/// The mistake: an average over all ranks, as in stage 04. Those along `tensor` have other parts.
void wrong_axis_average(ProcessGroup& group, bool fixed) {
  MeshTraining training(group, "data=2,tensor=2");
  training.forward_and_backward(training.place(), /*reduces=*/false);
  Communicator& averaged = fixed ? training.mesh.along({Axis::data}) : training.one.comm;
  for (const Unit* unit : training.sharded.units()) {
    averaged.all_reduce(training.one.stream, unit->gradients(), Reduction::average);
  }
  say_errors(training);
}

// --- A norm that counts twice --------------------------------------------------------------------

/// The norm of this rank's shards.
double norm_of_shards(const MeshTraining& training) {
  Numbers norms;
  for (const UpdatedRange& shard : training.sharded.shards()) {
    norms.push_back(norm_of(shard.gradients));
  }
  return norm_of(norms);
}

/// The mistake: every rank adds the squares of all that it has, and the ranks along `tensor` have
/// the same gradients of all layers that are not split.
void norm_counted_twice(ProcessGroup& group, bool fixed) {
  constexpr double kMost = 0.01;
  MeshTraining training(group, "shard=2,tensor=2");
  const Stream stream = training.one.stream;
  training.forward_and_backward(training.place());
  const double before = norm_of_shards(training);
  const ClipByNorm all_that_it_has(
      stream, training.sharded.shards(), kMost,
      [&](const Tensor& squares) { training.one.comm.all_reduce(stream, squares); });
  const ClipByNorm clip = fixed ? training.network.clip_by_norm(kMost) : all_that_it_has;
  clip();
  const double factor = norm_of_shards(training) / before;
  const double norm = norm_of(training.one.parameters.gradients());
  say(group, fmt::format("gradient of one process: norm {:.4f}; the ranks found {:.4f}", norm,
                         kMost / factor));
  say(group,
      fmt::format("the gradient was to have a norm of {}, and has {:.4f}", kMost, norm * factor));
}

// --- The same samples twice ----------------------------------------------------------------------

/// The mistake: a rank's place among the samples from its number, where neighbours along `tensor`
/// need the same samples, and those along `data` others.
void same_samples_twice(ProcessGroup& group, bool fixed) {
  MeshTraining training(group, "data=2,tensor=2");
  const int place = fixed ? training.place() : group.rank() % training.places();
  DistributedSampler sampler = sampler_of(training.one.set, place, training.places());
  std::vector<int64_t> order = sampler.order_of_epoch(0);
  order.resize(5);
  say_of_all(training, fmt::format("samples {}, ...", fmt::join(order, ", ")));
  training.forward_and_backward(place);
  say_errors(training);
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  using namespace lockstep;
  const std::string four = "cpu:0,cpu:1,cpu:2,cpu:3";
  return run_rank_labs(argc, argv,
                       {{"wrong-axis-average", wrong_axis_average, four},
                        {"norm-counted-twice", norm_counted_twice, four},
                        {"same-samples-twice", same_samples_twice, four}});
}
