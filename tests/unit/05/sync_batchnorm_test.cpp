// SyncBatchNorm: the ranks of a group as threads of this process, joined by TCP or Gloo.

#include "05-syncbn-checkpoint/sync_batchnorm.h"

#include <algorithm>
#include <numeric>

#include "common/comm/host_communicator.h"
#include "common/core/error.h"
#include "tests/support/captured_output.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/ddp_test_support.h"
#include "tests/support/json.h"
#include "tests/support/local_store.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tasks.h"
#include "tests/support/tcp_stores.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::kDouble;
using testing::kShort;
using testing::kSoon;
using testing::kTolerance;
using testing::Member;
using testing::random_values;
using testing::Ranks;
using testing::relative_error;
using testing::run_ranks;
using testing::Samples;
using testing::small_network;
using Values = std::vector<Real>;
using Texts = std::vector<std::string>;

const char* const kReal = kDouble ? "f64" : "f32";

// --- One layer -----------------------------------------------------------------------------------

/// What a layer is given, [samples, 1, 1, 3], whole or as a rank's part.
struct LayerInput {
  static constexpr int64_t kChannels = 3;

  static LayerInput random(int64_t samples, Real mean = Real(0.5)) {
    const Shape shape{samples, 1, 1, kChannels};
    LayerInput in{random_values(shape, 1), random_values(shape, 2), random_values(shape, 3)};
    for (Real& value : in.x) value = mean + value * Real(std::sqrt(3.0));  // of spread 1
    return in;
  }
  LayerInput part(int64_t first, int64_t samples) const {
    const auto cut = [&](const Values& all) {
      return Values(all.begin() + first * kChannels, all.begin() + (first + samples) * kChannels);
    };
    return {cut(x), cut(skip), cut(dy)};
  }
  Shape shape() const { return {std::ssize(x) / kChannels, 1, 1, kChannels}; }

  Values x, skip, dy;
};

/// And the results of one training pass. Gradients are added to 1s.
struct LayerResult {
  Values y{}, dx{}, parameters{}, running{};
  int64_t tracked = 0;
};

enum class Form { plain, relu, residual };

/// A layer "bn1" of its own on a stream.
struct LayerUnderTest {
  LayerUnderTest(Stream stream, Form form)
      : form(form),
        layer(LayerInput::kChannels, form == Form::relu ? Activation::relu : Activation::none),
        parameters(named(layer), stream),
        context(stream) {
    for (Parameter* p : layer.parameters()) {
      p->value.copy_from_host(p->name == "bn1.bias" ? Values{Real(0.1), Real(-0.2), 0}
                                                    : Values{Real(0.5), 2, -1});
    }
    parameters.gradients().copy_from_host(
        Values(static_cast<size_t>(parameters.gradients().elements()), 1));
  }

  LayerResult pass(const LayerInput& in) {
    const Stream stream = context.stream();
    const auto put = [&](const Values& values) {
      return Tensor::from_host(stream, in.shape(), values);
    };
    LayerResult result;
    const Tensor x = put(in.x);
    result.y = (form == Form::residual ? layer.forward_add_relu(x, put(in.skip), context)
                                       : layer.forward(x, context))
                   .to_host();
    if (context.facts.training) result.dx = layer.backward(put(in.dy), context).to_host();
    for (const Parameter* p : layer.parameters()) append(result.parameters, p->grad);
    for (const ModelBuffer* b : layer.buffers()) append(result.running, b->value);
    result.tracked = layer.batches_tracked();
    return result;
  }

  Form form;
  BatchNorm2d layer;
  FlatParameters parameters;
  Context context;

 private:
  static BatchNorm2d& named(BatchNorm2d& layer) {
    layer.set_name("bn1");
    return layer;
  }
  static void append(Values& all, const Tensor& more) {
    const Values values = more.to_host();
    all.insert(all.end(), values.begin(), values.end());
  }
};

/// One training pass of a layer over ranks with so many samples each; each rank's results, and what
/// it threw.
struct LayerPasses {
  LayerPasses(const Ranks& ranks, Form form, const LayerInput& whole,
              const std::vector<int64_t>& counts, bool synchronised = true)
      : results(counts.size()) {
    errors = run_ranks(ranks.size(), [&](int rank) {
      LayerUnderTest mine(ranks.streams[size_t(rank)], form);
      const Stream communication = ranks.devices[size_t(rank)]->create_stream("communication");
      if (synchronised) {
        convert_sync_batchnorm(mine.layer, *ranks.comms[size_t(rank)], communication);
      }
      const int64_t first = std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
      results[size_t(rank)] = mine.pass(whole.part(first, counts[size_t(rank)]));
    });
  }

  /// The ranks' y and dx one after the other, their parameters' gradients added up.
  LayerResult together() const {
    LayerResult all{.parameters = Values(results[0].parameters.size(), 1),
                    .running = results[0].running,
                    .tracked = results[0].tracked};
    for (const LayerResult& mine : results) {
      all.y.insert(all.y.end(), mine.y.begin(), mine.y.end());
      all.dx.insert(all.dx.end(), mine.dx.begin(), mine.dx.end());
      for (size_t i = 0; i < mine.parameters.size(); ++i) {
        all.parameters[i] += mine.parameters[i] - 1;
      }
    }
    return all;
  }
  /// The largest difference from one device's results for the whole batch.
  double error(Form form, const LayerInput& whole) const {
    const testing::TestDevice d;
    const LayerResult expected = LayerUnderTest(d.stream, form).pass(whole), found = together();
    return std::max({relative_error(found.y, expected.y), relative_error(found.dx, expected.dx),
                     relative_error(found.parameters, expected.parameters),
                     relative_error(found.running, expected.running)});
  }

  std::vector<LayerResult> results;
  Texts errors;
};

int64_t total_of(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

TEST_CASE("Synchronised, a layer is that of one device, however the batch is dealt",
          "[syncbn][tsan][row98]") {
  const Ranks ranks = testing::tcp_ranks(4);
  for (const std::vector<int64_t>& counts :
       {std::vector<int64_t>{5, 0, 3, 8}, {4, 4, 4, 4}, {1, 0, 0, 6}, {0, 0, 7, 0}}) {
    const LayerInput whole = LayerInput::random(total_of(counts));
    for (const Form form : {Form::plain, Form::relu, Form::residual}) {
      INFO(counts[0] << ", " << counts[1] << ", " << counts[2] << ", " << counts[3]
                     << " samples, form " << int(form));
      const LayerPasses passes(ranks, form, whole, counts);
      CHECK(passes.errors == Texts(4));
      CHECK(passes.error(form, whole) <= kTolerance);
      for (const LayerResult& mine : passes.results) {
        CHECK(mine.running == passes.results[0].running);  // to the bit
        CHECK(mine.tracked == 1);
      }
    }
  }
}

TEST_CASE("Gloo carries a synchronised layer, too", "[syncbn][gloo][row98]") {
  if (!gloo_availability().empty()) LOCKSTEP_SKIP(gloo_availability());
  const LayerInput whole = LayerInput::random(16);
  const LayerPasses passes(testing::gloo_ranks(4), Form::relu, whole, {5, 0, 3, 8});
  CHECK(passes.errors == Texts(4));
  CHECK(passes.error(Form::relu, whole) <= kTolerance);
}

TEST_CASE("Plain batch normalisation in its place is another function", "[syncbn][row99]") {
  const Ranks ranks = testing::tcp_ranks(4);
  const LayerInput whole = LayerInput::random(16);
  for (const Form form : {Form::plain, Form::relu, Form::residual}) {
    const LayerPasses passes(ranks, form, whole, {5, 0, 3, 8}, /*synchronised=*/false);
    CHECK(passes.errors == Texts(4));
    CHECK(passes.error(form, whole) >= 1e-3);
  }
}

TEST_CASE("A mean that is large beside the spread does not cost the merged variance its digits",
          "[syncbn][row100]") {
  const LayerInput whole = LayerInput::random(12544, Real(1e4));
  const Ranks ranks = testing::tcp_ranks(4);
  const LayerPasses passes(ranks, Form::plain, whole, {3136, 3136, 3136, 3136});
  const LayerResult found = passes.together();
  for (int64_t c = 0; c < LayerInput::kChannels; ++c) {
    double mean = 0, m2 = 0;
    for (size_t i = size_t(c); i < whole.x.size(); i += 3) mean += double(whole.x[i]) / 12544;
    for (size_t i = size_t(c); i < whole.x.size(); i += 3) m2 += std::pow(whole.x[i] - mean, 2);
    double sum = 0, squares = 0;  // of y, whose spread is the weight's if the variance is right
    for (size_t i = size_t(c); i < found.y.size(); i += 3) sum += double(found.y[i]);
    for (size_t i = size_t(c); i < found.y.size(); i += 3) {
      squares += std::pow(double(found.y[i]) - sum / 12544, 2);
    }
    const double weight = std::vector{0.5, 2.0, -1.0}[size_t(c)], variance = m2 / 12544;
    const double used = variance / (squares / 12544) * weight * weight;  // and epsilon
    INFO("channel " << c << ", variance " << variance << ", used " << used);
    CHECK(std::abs((used - 1e-5) / variance - 1) <= (kDouble ? 1e-10 : 1e-5));
  }
}

TEST_CASE("Ranks that are all without samples change nothing", "[syncbn][row101]") {
  const Ranks ranks = testing::tcp_ranks(3);
  for (const Form form : {Form::plain, Form::residual}) {
    const LayerPasses passes(ranks, form, LayerInput::random(0), {0, 0, 0});
    CHECK(passes.errors == Texts(3));
    for (const LayerResult& mine : passes.results) {
      CHECK((mine.y.empty() && mine.dx.empty()));
      CHECK(mine.parameters == Values(6, 1));
      CHECK(mine.running == Values{0, 0, 0, 1, 1, 1});
      CHECK(mine.tracked == 0);
    }
  }
}

TEST_CASE("One value per channel on all ranks together is an error on each of them",
          "[syncbn][row101]") {
  const Ranks ranks = testing::tcp_ranks(3);
  for (const std::vector<int64_t>& counts : {std::vector<int64_t>{1, 0, 0}, {0, 0, 1}}) {
    const LayerPasses passes(ranks, Form::plain, LayerInput::random(1), counts);
    for (int rank = 0; rank < 3; ++rank) {
      CHECK(passes.errors[size_t(rank)] ==
            fmt::format("bn1: one value per channel (input [{}, 1, 1, 3]) has no variance; train "
                        "with a larger batch",
                        counts[size_t(rank)]));
    }
  }
}

// --- Communication -------------------------------------------------------------------------------

/// Passes a rank's calls on and writes them down.
class Recorded final : public Communicator {
 public:
  explicit Recorded(Communicator& comm)
      : Communicator(comm.rank(), comm.world_size()), comm_(comm) {}
  Texts calls;

 private:
  void enqueue(Stream stream, const std::vector<Call>& together, FlightCall) override {
    const Call& call = together[0];
    calls.push_back(call.text());
    const CallLabel label(comm_, call.label);
    if (call.op == Call::Op::all_gather) return comm_.all_gather(stream, call.mine, call.all);
    if (call.op == Call::Op::all_reduce) return comm_.all_reduce(stream, call.mine, call.reduction);
    fail<BadInput>("not a call of SyncBatchNorm's: {}", call.text());
  }
  Communicator& comm_;
};

/// What the ranks call in a pass of the seed network with batch normalisation, the same on all.
Texts calls_of_a_pass(int world_size, bool training) {
  const Ranks ranks = testing::tcp_ranks(world_size);
  std::vector<Texts> calls(static_cast<size_t>(world_size));
  const Texts errors = run_ranks(world_size, [&](int rank) {
    Member member(rank, small_network(ModelKind::seed_bn), 1);
    Recorded recorded(*ranks.comms[size_t(rank)]);
    const auto synchronised =
        convert_sync_batchnorm(*member.network, recorded, member.communication);
    require_equal(synchronised->layers(), 2, "layers");
    member.context.facts.training = training;
    if (training) {
      member.accumulate(Samples(4), 1);
    } else {
      const Tensor images = Tensor::from_host(member.stream, {4, 16, 16, 1}, Samples(4).images);
      member.network->forward(images, member.context);
    }
    member.stream.synchronize();
    require((synchronised->seconds_waited() > 0) == !recorded.calls.empty(), "{} s of waiting",
            synchronised->seconds_waited());
    calls[size_t(rank)] = recorded.calls;
  });
  CHECK(errors == Texts(errors.size()));
  for (const Texts& mine : calls) CHECK(mine == calls[0]);
  return calls[0];
}

TEST_CASE("A layer makes one all-gather of 2C+1 forward, and one all-reduce of 2C backward",
          "[syncbn][row103]") {
  const auto call = [](const char* text, const char* rest) {
    return fmt::format("{} {}{}", text, kReal, rest);
  };
  CHECK(calls_of_a_pass(3, /*training=*/true) == Texts{call("all_gather of 21", " for bn1"),
                                                       call("all_gather of 41", " for bn2"),
                                                       call("all_reduce of 40", ", sum for bn2"),
                                                       call("all_reduce of 20", ", sum for bn1")});
}

TEST_CASE("Evaluation and a rank alone communicate nothing", "[syncbn][row102]") {
  CHECK(calls_of_a_pass(2, /*training=*/false).empty());
  CHECK(calls_of_a_pass(1, /*training=*/true).empty());
}

TEST_CASE("A rank alone computes what a plain layer does, to the bit", "[syncbn][row102]") {
  Member alone(0, small_network(ModelKind::seed_bn), 1),
      one(0, small_network(ModelKind::seed_bn), 1);
  const Ranks ranks = testing::tcp_ranks(1);
  convert_sync_batchnorm(*one.network, *ranks.comms[0], one.communication);
  for (Member* member : {&alone, &one}) member->accumulate(Samples(5), 0.2);
  CHECK(one.gradients() == alone.gradients());
}

/// What each rank throws when rank 0 comes to a layer that rank 1 skips: it continues with
/// `instead`.
template <class Instead>
Texts skip_layer(bool compare_calls, Instead instead) {
  const testing::Stores stores(2);
  const Ranks ranks(
      2, [&](int rank) { return connect_tcp(stores[rank], 2 * kShort); },
      [&](int rank) { return RollCall(stores.all[size_t(rank)], 2 * kShort, compare_calls); });
  return run_ranks(2, [&](int rank) {
    const Stream stream = ranks.streams[size_t(rank)];
    if (rank == 0) {
      LayerUnderTest mine(stream, Form::plain);
      convert_sync_batchnorm(mine.layer, *ranks.comms[0],
                             ranks.devices[0]->create_stream("communication"));
      mine.pass(LayerInput::random(4));
    } else {
      instead(*ranks.comms[1], stream);
    }
    stream.synchronize();
  });
}

TEST_CASE("Where a rank skips a layer, the others' time-out names the layer", "[syncbn][row104]") {
  const auto begin = testing::Clock::now();
  const Texts errors = skip_layer(false, [](Communicator&, Stream) {
    std::this_thread::sleep_for(std::chrono::duration<double>(4 * kShort));
  });
  CHECK(errors[0] == fmt::format("rank 0: collective 1 (all_gather of 7 {} for bn1): no answer "
                                 "from rank 1 within 0.6 s",
                                 kReal));
  CHECK(testing::seconds_since(begin) < kSoon);
}

TEST_CASE("Ranks that compare their calls name the layer that one of them skips",
          "[syncbn][row104]") {
  const Texts errors = skip_layer(true, [](Communicator& comm, Stream stream) {
    const CallLabel label(comm, "bn2");  // of as many channels: nothing else is different
    comm.all_gather(stream, Tensor::empty(stream, {7}), Tensor::empty(stream, {14}));
  });
  for (const std::string& error : errors) {
    CHECK_THAT(error, ContainsSubstring(fmt::format("rank 0 called all_gather of 7 {0} for bn1, "
                                                    "rank 1 called all_gather of 7 {0} for bn2",
                                                    kReal)));
  }
}

// --- Whole networks ------------------------------------------------------------------------------

/// How far the ranks of a group are from one device after training, relative.
struct Distance {
  double weights = 0, running = 0, losses = 0, first_loss = 0;
  bool same_on_all_ranks = true;
};

/// A step with each of these batches, on one device.
void train_alone(Member& member, const std::vector<int64_t>& batches, std::vector<double>& losses) {
  for (const int64_t count : batches) {
    const Samples samples(count, uint32_t(losses.size()));
    member.parameters.zero_gradients();
    member.accumulate(samples, 1.0 / double(count));
    member.optimizer.step(member.context.state(), member.loss);
    losses.push_back(double(member.loss.to_host()[0]));
  }
}

/// The same as one rank of a group with DDP.
void train_as_rank(Member& member, Communicator& ranks, const ExchangeTexts& exchange,
                   bool synchronised, const std::vector<int64_t>& batches,
                   std::vector<double>& losses) {
  if (synchronised) convert_sync_batchnorm(*member.network, ranks, member.communication);
  member.network = std::make_unique<DistributedDataParallel>(
      std::move(member.network), member.parameters, ranks, exchange, member.communication,
      ReplicaOptions{.buckets = {0.01}, .broadcast_buffers = false});
  for (const int64_t count : batches) {
    const Samples samples = Samples(count, uint32_t(losses.size()));
    member.parameters.zero_gradients();
    member.accumulate(samples.every(ranks.rank(), ranks.world_size()),
                      double(ranks.world_size()) / double(count));
    member.optimizer.step(member.context.state(), member.loss);
    losses.push_back(double(member.loss.to_host()[0]));
  }
}

Distance distance(ModelKind kind, int world_size, const std::vector<int64_t>& batches,
                  bool synchronised = true) {
  const auto make = [&](int rank) {
    auto member = std::make_unique<Member>(rank, small_network(kind), 1);
    if (kind == ModelKind::resnet18) member->criterion = make_cross_entropy_loss();
    return member;
  };
  const auto alone = make(0);
  std::vector<double> expected;
  train_alone(*alone, batches, expected);

  std::vector<std::unique_ptr<Member>> members;
  for (int rank = 0; rank < world_size; ++rank) members.push_back(make(rank));
  std::vector<std::vector<double>> losses(members.size());
  const Ranks ranks = testing::tcp_ranks(world_size);
  testing::LocalStore store;
  const Texts errors = run_ranks(world_size, [&](int rank) {
    const auto exchange = [&](const std::string& mine) {
      return store.exchange(rank, world_size, mine);
    };
    train_as_rank(*members[size_t(rank)], *ranks.comms[size_t(rank)], exchange, synchronised,
                  batches, losses[size_t(rank)]);
  });
  CHECK(errors == Texts(errors.size()));
  Distance found;
  const auto running = [](const Member& member) {
    return member.parameters.buffer_values().to_host();
  };
  for (const auto& member : members) {
    found.same_on_all_ranks &= member->weights() == members[0]->weights();
    found.same_on_all_ranks &= running(*member) == running(*members[0]);
  }
  found.weights = relative_error(members[0]->weights(), alone->weights());
  found.running = relative_error(running(*members[0]), running(*alone));
  found.losses = relative_error(losses.back(), expected);
  found.first_loss = std::abs(losses.back()[0] / expected[0] - 1);
  return found;
}

TEST_CASE("A whole network, synchronised, trains as on one device", "[syncbn][row105]") {
  // Ragged, and too few for all: ranks without samples. In float one rounding grows from step to
  // step; only the first is compared.
  const std::vector<int64_t> batches =
      kDouble ? std::vector<int64_t>{19, 12, 3, 1, 13} : std::vector<int64_t>{19, 1};
  for (const ModelKind kind : {ModelKind::seed_bn, ModelKind::resnet18}) {
    for (const int world_size : {4, 2}) {
      const bool twin = (kind == ModelKind::resnet18) == (world_size == 4);
      if (twin && !testing::full_campaign()) continue;
      const Distance found = distance(kind, world_size, batches);
      INFO("model " << int(kind) << ", " << world_size << " ranks: weights " << found.weights
                    << ", running statistics " << found.running << ", losses " << found.losses);
      CHECK(found.same_on_all_ranks);
      CHECK(found.first_loss <= kTolerance);
      if (!kDouble) continue;
      CHECK(found.losses <= 1e-10);
      CHECK(found.weights <= 1e-10);
      CHECK(found.running <= 1e-10);
    }
  }
}

TEST_CASE("A whole network with plain batch normalisation does not", "[syncbn][row99]") {
  const Distance found = distance(ModelKind::seed_bn, 4, {19, 12}, /*synchronised=*/false);
  CHECK(found.weights >= 1e-3);
  CHECK(found.first_loss >= 1e-3);
}

TEST_CASE("Conversion leaves parameters, names and state where they are", "[syncbn]") {
  Member member(0, small_network(ModelKind::resnet18), 1);
  const Ranks ranks = testing::tcp_ranks(1);
  const std::vector<Parameter*> before = member.network->parameters();
  const auto layers_of = [&](Module& network) {
    return convert_sync_batchnorm(network, *ranks.comms[0], member.communication)->layers();
  };
  CHECK(layers_of(*member.network) == 17);
  CHECK(member.network->parameters() == before);
  CHECK(layers_of(*small_network()(0)) == 0);
}

TEST_CASE("Waiting for batch statistics is reported per step of this run", "[syncbn]") {
  const testing::TempDir folder;
  Options options;
  options.metrics = folder / "metrics";
  const testing::Ranks ranks = testing::tcp_ranks(2);
  double waited = 0;
  const std::vector<std::string> errors = testing::run_ranks(2, [&](int rank) {
    testing::Member member(rank, testing::small_network(ModelKind::seed_bn), 1);
    const auto synchronised =
        convert_sync_batchnorm(*member.network, *ranks.comms[size_t(rank)], member.communication);
    member.accumulate(testing::Samples(4), 1);
    member.stream.synchronize();
    if (rank != 0) return;
    const testing::CapturedOutput output(folder / "output");
    TrainingLog log("a stage", options, member.stream, {member.device.get()}, 4);
    log.resume(9, 0);
    log.begin_epoch(0);
    log.step({.global_size = 4}, member.loss, {member.optimizer.health()});
    log.end_epoch();
    waited = synchronised->seconds_waited();
    report(*synchronised, log);
    log.finish(0);
  });
  CHECK(errors == std::vector<std::string>(2));
  const nlohmann::json told = testing::read_json(folder / "metrics").at("batch_norm");
  CHECK(told.at("layers") == 2);
  CHECK(waited > 0);
  CHECK(told.at("seconds_per_step") == waited);
}

}  // namespace
}  // namespace lockstep
