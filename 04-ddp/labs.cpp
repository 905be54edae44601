// Mistakes that everybody makes once. Run each with the mistake, and without it.
//
//   build/04-ddp/labs summed-gradients
//   build/04-ddp/labs summed-gradients --fixed
//
// Two ranks or, for the last lab, three, unless a launcher starts more.

#include <fmt/ranges.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "04-ddp/ddp.h"
#include "04-ddp/distributed_sampler.h"
#include "04-ddp/join.h"
#include "common/core/text.h"
#include "common/training/lab.h"

namespace lockstep {
namespace {

constexpr int64_t kBatch = 32;  // of all ranks together
constexpr int64_t kSteps = 5;
constexpr std::chrono::milliseconds kBusy{10000};  // longer than the others wait

// --- Forgotten set_epoch -------------------------------------------------------------------------

/// Every rank prints the first samples of its epochs.
void forgotten_set_epoch(ProcessGroup& group, bool fixed) {
  DistributedSampler sampler(1000, {.rank = group.rank(), .world_size = group.world_size()});
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    if (fixed) sampler.set_epoch(epoch);
    std::vector<int64_t> order = sampler.order_of_epoch(epoch);
    order.resize(8);
    print_clean("rank {}, epoch {}: samples {}, ...\n", group.rank(), epoch,
                fmt::join(order, ", "));
  }
}

// --- A collective that only one rank calls -------------------------------------------------------

/// Rank 0 wants to save: with the mistake it calls a barrier that the others do not.
void rank_conditional_collective(ProcessGroup& group, bool fixed) {
  const auto device = open_device({DeviceId::Kind::cpu, group.local_rank()}, {});
  const Stream stream = device->create_stream("compute");
  const std::unique_ptr<Communicator> comm = group.connect(*device);
  if (group.rank() == 0) say(group, "rank 0 saves, and waits for the others");
  if (fixed || group.rank() == 0) comm->barrier(stream);
  comm->all_reduce(stream, BasicTensor<float>::from_host(stream, {1}, {1}));
  stream.synchronize();
  say(group, "all ranks went on");
}

// --- Summed gradients ----------------------------------------------------------------------------

/// The first gradient of one batch: from one process, and summed or averaged over the ranks' parts.
void summed_gradients(ProcessGroup& group, bool fixed) {
  RankTraining training(group);
  const HostBatch batch = training.first_batch(kBatch);
  training.forward_and_backward(batch, {{0, 1, kBatch}}, 1.0 / kBatch);
  const double whole = norm_of(training.parameters.gradients());

  const int64_t rank = group.rank(), world_size = group.world_size();
  const BatchSplit dealt{BatchSplit::Kind::stride, world_size};
  training.forward_and_backward(batch, {dealt.divide(kBatch).at(size_t(rank))},
                                double(world_size) / kBatch);
  training.comm.all_reduce(training.stream, training.parameters.gradients(),
                           fixed ? Reduction::average : Reduction::sum);
  const double reduced = norm_of(training.parameters.gradients());
  say(group,
      fmt::format("gradient of one process: norm {:.6f}; {} over {} ranks: norm {:.6f}, {:.3f} "
                  "times as long",
                  whole, fixed ? "averaged" : "summed", world_size, reduced, reduced / whole));
}

// --- Uneven batches ------------------------------------------------------------------------------

/// A rank's batches, one per step; rank 0 has `more` of them than the others.
std::vector<HostBatch> batches_of(const RankTraining& training, int64_t more, DataLoader& loader) {
  const int64_t mine = training.group.rank() == 0 ? kSteps : kSteps - more;
  std::vector<HostBatch> batches;
  loader.begin_epoch(0);
  for (int64_t i = 0; i < mine; ++i) batches.push_back(*loader.next());
  return batches;
}

enum class Uneven { unnoticed, detected, joined };

/// Rank 0 has two batches more than the others.
void uneven_batches(ProcessGroup& group, Uneven how) {
  RankTraining training(group);
  training.model.wrap<DistributedDataParallel>(training.parameters, training.comm,
                                               group.exchanger(), training.communication);
  DataLoader loader(training.set, {.batch_size = kBatch / 2, .max_held = kSteps + 1});
  const std::vector<HostBatch> batches = batches_of(training, 2, loader);
  const int64_t mine = std::ssize(batches);
  print_clean("rank {} has {} batches\n", group.rank(), mine);
  std::fflush(stdout);
  if (how == Uneven::detected) {
    require_even_inputs(mine, group.exchanger());
  }
  Join join(training.comm, training.stream);
  for (int64_t step = 0; how == Uneven::joined || step < mine; ++step) {
    const int64_t size = step < mine ? batches[size_t(step)].size : 0;
    const int64_t all =
        how == Uneven::joined ? join.samples_of_step(size) : size * group.world_size();
    if (all == 0) break;
    training.forward_and_backward(size > 0 ? batches[size_t(step)] : HostBatch(), {{0, 1, size}},
                                  double(group.world_size()) / double(all));
    training.optimizer.step(training.context.state(), training.loss);
    training.stream.synchronize();
    say(group, fmt::format("step {}: {} samples", step, all));
  }
  print_clean("rank {} ends, |w| = {:.6f}\n", group.rank(), norm_of(training.parameters.values()));
}

RankLab uneven_lab(const std::string& name, Uneven mistake) {
  return {name, [=](ProcessGroup& group, bool fixed) {
            uneven_batches(group, fixed ? Uneven::joined : mistake);
          }};
}

// --- A hang, and who reports it ------------------------------------------------------------------

/// Rank 0 waits for rank 1, and rank 1 in another group for rank 2, which does something else.
void hang_reported_elsewhere(ProcessGroup& group, bool fixed) {
  const int rank = group.rank();
  require(group.world_size() > 2, "this lab takes 3 ranks, found {}", group.world_size());
  const auto device = open_device({DeviceId::Kind::cpu, group.local_rank()}, {});
  const Stream stream = device->create_stream("compute");
  const std::unique_ptr<Communicator> all = group.connect(*device);
  const std::unique_ptr<Communicator> front =
      group.new_group(*device, [](int each) { return std::max(each, 1); });
  const std::unique_ptr<Communicator> back =
      group.new_group(*device, [](int each) { return std::min(each, 1); });
  const auto x = BasicTensor<float>::from_host(stream, {1}, {1});
  all->barrier(stream);
  if (rank == 2 && !fixed) std::this_thread::sleep_for(kBusy);
  if (rank == 1 && !fixed) std::this_thread::sleep_for(kBusy / 10);  // so rank 0 gives up first
  if (rank > 0) back->all_reduce(stream, x);
  if (rank < 2) front->all_reduce(stream, x);
  stream.synchronize();
  print_clean("rank {} went on\n", rank);
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  using namespace lockstep;
  return run_rank_labs(argc, argv,
                       {{"forgotten-set-epoch", forgotten_set_epoch},
                        {"rank-conditional-collective", rank_conditional_collective},
                        {"summed-gradients", summed_gradients},
                        uneven_lab("uneven-batches", Uneven::unnoticed),
                        uneven_lab("uneven-batches-detected", Uneven::detected),
                        {"hang-reported-elsewhere", hang_reported_elsewhere, "cpu:0,cpu:1,cpu:2"}});
}
