#pragma once
// Ranks that share layers, as threads of this process, and networks split over them, compared with
// the same network in one piece.

#include "03-model-split/tensor/tensor_split.h"

#include <fmt/ranges.h>

#include <chrono>
#include <thread>
#include <type_traits>
#include <vector>

#include "common/kernels/devices.h"
#include "common/nn/init.h"
#include "common/nn/optimizer.h"
#include "tests/support/catch.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/rank_threads.h"
#include "tests/support/shm_ranks.h"
#include "tests/support/tasks.h"

namespace lockstep::testing::tensor_split {

using Values = std::vector<Real>;
using Names = std::vector<std::string>;
using State = std::vector<StateTensor>;

constexpr int64_t kReal = sizeof(Real);

/// The bytes that a rank sends for an all-reduce of `numbers`: to each other rank that rank's part,
/// then its own part of the sum; in shared memory up to 16 KiB go whole to all others. The second
/// function is for an all-gather whose result is `numbers`.
inline double sent_for_sum(int64_t numbers, int64_t ranks, bool in_shm = false) {
  if (in_shm && numbers * kReal <= 16384) return double((ranks - 1) * numbers * kReal);
  return 2.0 * double(numbers * (ranks - 1) * kReal) / double(ranks);
}
inline double sent_for_gather(int64_t numbers, int64_t ranks) {
  return sent_for_sum(numbers, ranks) / 2;
}
constexpr int kWhole = -1;  // for an axis: not split

// --- Ranks, and what they have -------------------------------------------------------------------

/// The part that rank r of `ranks` has of a tensor that is split along `axis`.
inline Values part(const Values& values, const Shape& shape, int axis, int ranks, int r) {
  if (axis == kWhole) return values;
  int64_t inner = 1;
  for (int a = axis + 1; a < shape.axes(); ++a) inner *= shape[a];
  Values mine;
  for (int64_t i = 0; i < int64_t(values.size()); ++i) {
    const int64_t place = i / inner % shape[axis];
    if (place / (shape[axis] / ranks) == r) mine.push_back(values[i]);
  }
  return mine;
}

/// One rank on its thread: its streams, and its membership. It can be late.
struct Member {
  Member(Communicator& comm, Device& device, bool late)
      : stream(device.create_stream("compute")),
        shared(comm, device.create_stream("communication")),
        context(stream),
        late(late) {
    set_state({});
  }

  int rank() const { return shared.rank(); }
  int ranks() const { return shared.world_size(); }
  /// This rank's part of a tensor that is split along `axis`, or all of it.
  Tensor put(const Shape& shape, const Values& values, int axis = kWhole) const {
    Shape mine = shape;
    if (axis != kWhole) mine[axis] /= ranks();
    return Tensor::from_host(stream, mine, part(values, shape, axis, ranks(), rank()));
  }
  /// Holds the device up, if it is late.
  void delay() const {
    if (!late) return;
    enqueue(stream, "sleep", [] { std::this_thread::sleep_for(std::chrono::milliseconds(15)); });
  }
  void set_state(const StepState& state) const { context.state().copy_from_host({state}); }

  Stream stream;
  SplitRanks shared;
  Context context;
  bool late;
};

/// Calls work(member) on a thread for each rank of a group. Returns the results by rank. Throws the
/// first rank's error, if any.
template <class Work>
auto on_ranks(const Ranks& ranks, Work work, int late = -1) {
  using Result = decltype(work(std::declval<Member&>()));
  std::vector<Result> results(size_t(ranks.size()));
  const std::vector<std::string> errors = run_ranks(ranks.size(), [&](int rank) {
    Member member(*ranks.comms[size_t(rank)], *ranks.devices[size_t(rank)], rank == late);
    results[size_t(rank)] = work(member);
    member.stream.synchronize();
  });
  for (const std::string& error : errors) require(error.empty(), "{}", error);
  return results;
}
template <class Work>
auto on_ranks(int count, Work work, int late = -1) {
  return on_ranks(shm_ranks(count), work, late);
}

/// Checks each rank's part of `expected`; if `expected` is not split, all have the same bits.
inline void check_parts(const std::vector<Values>& found, const Values& expected,
                        const Shape& shape, int axis) {
  const int ranks = static_cast<int>(found.size());
  for (int r = 0; r < ranks; ++r) {
    INFO("rank " << r);
    CHECK(relative_error(found[r], part(expected, shape, axis, ranks, r)) <= kTolerance);
    if (axis == kWhole) CHECK((found[r] == found[0]));
  }
}

/// Collects one data member of all elements, by rank.
template <class T, class Member>
auto each(const std::vector<T>& all, Member member) {
  std::vector<std::remove_cvref_t<decltype(all.front().*member)>> found;
  for (const T& one : all) found.push_back(one.*member);
  return found;
}

// --- A network -----------------------------------------------------------------------------------

inline ModelOptions seed_options(ModelKind kind = ModelKind::seed) {
  return {.kind = kind, .dropout = true, .seed = 5};
}

inline ModelOptions resnet_options(int64_t width = 4) {
  return {
      .kind = ModelKind::resnet18, .width = width, .height = 8, .width_pixels = 8, .channels = 3};
}

/// Images and labels for a network, on the host.
struct Batch {
  Batch(const ModelOptions& o, int64_t count, uint32_t seed = 7)
      : shape{count, o.height, o.width_pixels, o.channels}, images(random_values(shape, seed)) {
    for (int64_t i = 0; i < count; ++i) labels.push_back(int32_t((i * 7 + seed) % o.classes));
  }
  Shape shape;
  Values images;
  std::vector<int32_t> labels;
};

/// The state of the network with these first weights.
inline State initial_state(const ModelOptions& options, uint64_t seed = 1) {
  const std::unique_ptr<Device> device = open_device({DeviceId::Kind::cpu, 0}, {});
  const Model model = make_model(options);
  const FlatParameters parameters(*model.network, device->create_stream("initial"));
  initialize(parameters, Initializer::kaiming_uniform, seed);
  return state_dict(*model.network);
}

/// A network with the first weights and what it takes to train it: a rank's share of it, or the
/// whole, as stage 01 trains it, with a group of one.
class Network {
 public:
  struct Unsplit {};
  Network(const ModelOptions& options, Member& member, Unsplit) : Network(options, member) {
    finish();
    load_state_dict(*model.network, initial_state(options));
  }
  Network(const ModelOptions& options, Member& member, const std::optional<Names>& layers)
      : Network(options, member) {
    auto share = std::make_unique<TensorSplit>(options, member.shared, layers);
    split = share.get();
    model.network = std::move(share);
    finish();
    split->load_full_state(initial_state(options));
  }

  State state() { return split ? split->full_state() : state_dict(*model.network); }

  /// Adds the gradients of the batch's mean loss, which it returns.
  Real accumulate(const Batch& batch) {
    const int64_t n = batch.shape[0];
    Context& context = member.context;
    member.set_state(
        {.step = steps_, .learning_rate = Real(0.05), .loss_weight = Real(1) / Real(n)});
    const Tensor images = member.put(batch.shape, batch.images);
    const LabelTensor labels = LabelTensor::from_host(member.stream, {n}, batch.labels);
    member.delay();
    const AnyTensor scores = model.network->forward(images, context);
    member.delay();
    model.loss->forward(scores, labels, parameters->loss(), context);
    model.network->backward(model.loss->backward(labels, context), context);
    member.delay();
    return parameters->loss().to_host()[0];
  }

  Real step(const Batch& batch) {
    optimizer->zero_gradients();
    const Real loss = accumulate(batch);
    optimizer->step(member.context.state(), parameters->loss());
    ++steps_;
    return loss;
  }

  /// The gradients of the batch's mean loss in the shape of a state, and what else it holds.
  State gradients(const Batch& batch) {
    optimizer->zero_gradients();
    accumulate(batch);
    const Values weights = parameters->values().to_host();
    parameters->values().copy_from_host(parameters->gradients().to_host());
    State gradients = state();
    parameters->values().copy_from_host(weights);
    return gradients;
  }

  /// The scores of an evaluation.
  Values evaluate(const Batch& batch) {
    member.context.facts.training = false;
    const Tensor images = member.put(batch.shape, batch.images);
    const AnyTensor scores = model.network->forward(images, member.context);
    member.context.facts.training = true;
    return scores.to_host();
  }

  /// Losses of some steps, every third over a short batch; then weights and running statistics.
  Values train(const ModelOptions& options, int steps = 3) {
    Values all;
    for (int i = 0; i < steps; ++i) {
      all.push_back(step({options, i % 3 == 2 ? 2 : 4, uint32_t(7 + i)}));
    }
    for (const StateTensor& tensor : state()) {
      all.insert(all.end(), tensor.real.begin(), tensor.real.end());
    }
    return all;
  }

  Member& member;
  Model model;
  TensorSplit* split = nullptr;
  std::optional<FlatParameters> parameters;
  std::optional<Optimizer> optimizer;

 private:
  Network(const ModelOptions& options, Member& member)
      : member(member), model(make_model(options)) {}
  void finish() {
    parameters.emplace(*model.network, member.stream);
    optimizer.emplace(*parameters, OptimizerRule{.momentum = 0.9});
  }

  int64_t steps_ = 0;
};

constexpr Network::Unsplit kUnsplit;

/// The result of `work` on the unsplit network.
template <class Work>
auto unsplit(const ModelOptions& options, Work work) {
  return on_ranks(1,
                  [&](Member& member) {
                    Network network(options, member, kUnsplit);
                    return work(network);
                  })
      .front();
}
/// The results of `work` on each rank's share.
template <class Work>
auto split(const ModelOptions& options, int ranks, const std::optional<Names>& layers, Work work,
           int late = -1) {
  return on_ranks(
      ranks,
      [&](Member& member) {
        Network network(options, member, layers);
        return work(network);
      },
      late);
}

/// Checks for the same names and shapes, and numbers within `tolerance` of the largest.
inline void check_states(const State& found, const State& expected, double tolerance) {
  REQUIRE(found.size() == expected.size());
  Values a, b;
  for (size_t i = 0; i < found.size(); ++i) {
    INFO(expected[i].name);
    CHECK(found[i].name == expected[i].name);
    CHECK(found[i].shape == expected[i].shape);
    CHECK(found[i].integer == expected[i].integer);
    a.insert(a.end(), found[i].real.begin(), found[i].real.end());
    b.insert(b.end(), expected[i].real.begin(), expected[i].real.end());
  }
  if (tolerance == 0) CHECK((a == b));
  CHECK(relative_error(a, b) <= tolerance);
}

/// The results of a network.
struct Computed {
  State gradients;
  Values scores, trained;
  State mine;  // this rank's, whole or split
};
inline Computed compute(Network& network, const ModelOptions& options) {
  const bool residual = options.kind == ModelKind::resnet18;
  const Batch batch(options, residual ? 8 : 3);
  Computed all;
  all.gradients = network.gradients(batch);
  all.scores = network.evaluate(batch);
  all.trained = network.train(options, residual ? 1 : 3);
  all.mine = state_dict(*network.model.network);
  return all;
}

/// Compares gradients, an evaluation and training of a split network with the unsplit one. What
/// every rank has must be the same, bit by bit.
inline void check_network(const ModelOptions& options, int ranks,
                          const std::optional<Names>& layers = {}) {
  // In ResNet-18, with so few values per channel, rounding grows tenfold with every step.
  const bool residual = options.kind == ModelKind::resnet18;
  const double tolerance = kDouble ? 1e-12 : residual ? 1e-4 : 1e-5;
  INFO(ranks << " ranks, layers: "
             << (layers ? fmt::format("{}", fmt::join(*layers, ",")) : "all"));
  const auto work = [&](Network& network) { return compute(network, options); };
  const Computed whole = unsplit(options, work);
  const std::vector<Computed> shares = split(options, ranks, layers, work);
  check_states(shares[0].gradients, whole.gradients, tolerance);
  CHECK(relative_error(shares[0].scores, whole.scores) <= tolerance);
  CHECK(relative_error(shares[0].trained, whole.trained) <= tolerance);
  for (const Computed& share : shares) {
    CHECK((share.scores == shares[0].scores));
    CHECK((share.trained == shares[0].trained));
    for (size_t i = 0; i < whole.mine.size(); ++i) {
      INFO(whole.mine[i].name);
      if (share.mine[i].shape != whole.mine[i].shape) continue;
      CHECK((share.mine[i].real == shares[0].mine[i].real));
    }
  }
}

}  // namespace lockstep::testing::tensor_split
