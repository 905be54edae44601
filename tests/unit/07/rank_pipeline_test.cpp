// Stages of a pipeline that are ranks, here threads: where a network is cut, and a step.

#include "07-mesh/rank_pipeline.h"

#include <fmt/ranges.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/nn/init.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/ddp_test_support.h"
#include "tests/support/process.h"
#include "tests/unit/comm/process_group_job.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;

constexpr ModelOptions kPerceptron{
    .kind = ModelKind::mlp, .width = 4, .height = 16, .width_pixels = 16};

Layers released(Model& model) { return dynamic_cast<Sequential&>(*model.network).release_layers(); }

/// The layers' names, a text per stage.
Words stages_of(const ModelOptions& options, const std::map<std::string, double>& flops,
                int stages) {
  Model model = make_model(options);
  Words texts;
  for (const Layers& stage : cut_into_stages(released(model), flops, stages)) {
    Words names;
    for (const auto& layer : stage) names.push_back(layer->name());
    texts.push_back(fmt::format("{}", fmt::join(names, " ")));
  }
  return texts;
}

TEST_CASE("Every stage begins with a layer that has parameters, and the costliest is cheap",
          "[mesh][pipeline]") {
  const ModelOptions seed;
  CHECK(stages_of(seed, {{"conv1", 4}, {"conv2", 1}, {"fc1", 1}, {"fc2", 1}}, 2) ==
        Words{"conv1 pool1", "conv2 pool2 flatten fc1 fc2 log_softmax"});
  CHECK(stages_of(seed, {{"conv1", 1}, {"conv2", 1}, {"fc1", 1}, {"fc2", 3}}, 2) ==
        Words{"conv1 pool1 conv2 pool2 flatten fc1", "fc2 log_softmax"});
  CHECK(stages_of(seed, {}, 4) ==
        Words{"conv1 pool1", "conv2 pool2 flatten", "fc1", "fc2 log_softmax"});
  CHECK(stages_of(kPerceptron, {}, 5) == Words{"flatten fc1", "fc2", "fc3", "fc4", "fc5"});
  CHECK(stages_of(seed, {}, 1).size() == 1);
  CHECK(message_of<BadInput>([&] { stages_of(seed, {}, 5); }) ==
        "5 stages are more than the network's 4 layers with parameters, and each stage needs one; "
        "give at most that number");
}

TEST_CASE("Layers cost what they compute", "[mesh][pipeline]") {
  const auto device = open_device({DeviceId::Kind::cpu, 0}, {});
  const auto flops = flops_of_layers(kPerceptron, device->create_stream("compute"));
  CHECK(flops.at("flatten") == 0);
  CHECK(flops.at("fc2") == flops.at("fc3"));
  CHECK(flops.at("fc1") > 8 * flops.at("fc2"));  // 256 inputs and 16
}

/// What a rank has after a step, and of an evaluation after it.
struct StageOutcome {
  std::map<std::string, std::vector<Real>> gradients;
  std::vector<Real> loss, scores;
};

/// A network, or a stage of it, trained as the stages' programs do. The inputs are there before the
/// first pass, so that the host runs ahead of all streams.
StageOutcome steps_of_stage(Model& model, const FlatParameters& parameters,
                            const std::vector<Samples>& parts) {
  const Stream stream = parameters.stream();
  Context context(stream);
  context.state().copy_from_host({{.loss_weight = Real(1) / 16}});
  std::vector<Tensor> images;
  std::vector<LabelTensor> labels;
  for (const Samples& part : parts) {
    images.push_back(Tensor::from_host(stream, {part.count(), 16, 16, 1}, part.images));
    labels.push_back(LabelTensor::from_host(stream, {part.count()}, part.labels));
  }
  for (int step = 0; step < 3; ++step) {
    parameters.zero_gradients();
    for (size_t i = 0; i < parts.size(); ++i) {
      context.facts.last_contribution = i + 1 == parts.size();
      const AnyTensor scores = model.network->forward(images[i], context);
      model.loss->forward(scores, labels[i], parameters.loss(), context);
      model.network->backward(model.loss->backward(labels[i], context), context);
    }
  }
  context.facts = {.training = false};
  StageOutcome found;
  found.scores = model.network->forward(images[0], context).to_host();
  found.loss = parameters.loss().to_host();
  for (const Parameter* p : parameters.parameters()) found.gradients[p->name] = p->grad.to_host();
  return found;
}

/// On one device.
StageOutcome steps_of_whole(const std::vector<Samples>& parts) {
  const auto device = open_device({DeviceId::Kind::cpu, 0}, {});
  Model model = make_model(kPerceptron);
  const FlatParameters parameters(*model.network, device->create_stream("compute"));
  initialize(parameters, Initializer::kaiming_uniform, 1);
  return steps_of_stage(model, parameters, parts);
}

/// On the ranks of a group.
StageOutcome steps_of_rank(ProcessGroup& group, ScheduleKind schedule,
                           const std::vector<Samples>& parts) {
  const auto device = open_device({DeviceId::Kind::cpu, group.rank()}, {});
  const std::unique_ptr<Communicator> world = group.connect(*device);
  const Stream passes = device->create_stream("compute");
  const MeshShape shape = MeshShape::from(fmt::format("pipeline={}", group.world_size()));
  DeviceMesh mesh(shape, group, *device, *world);
  Model model = make_model(kPerceptron);
  std::vector<Layers> stages = cut_into_stages(released(model), {}, group.world_size());
  auto mine = std::make_unique<Sequential>();
  for (auto& layer : stages[size_t(group.rank())]) {
    const std::string name = layer->name();
    mine->add(name, std::move(layer));
  }
  model.network = std::move(mine);
  const FlatParameters parameters(*model.network, passes);
  initialize(parameters, Initializer::kaiming_uniform, 1);
  make_stage(model, mesh, passes, device->create_stream("communication"),
             {schedule, int(parts.size())}, 10, parameters.loss());
  return steps_of_stage(model, parameters, parts);
}

TEST_CASE("The passes of stages that are ranks are those of the whole network, bit by bit",
          "[mesh][pipeline][tsan]") {
  const std::vector<Samples> parts{Samples(4, 1), Samples(3, 2), Samples(0, 3),
                                   Samples(2, 4), Samples(6, 5), Samples(1, 6)};
  const StageOutcome whole = steps_of_whole(parts);
  for (const auto& [ranks, backend] : {std::pair(3, "tcp"), {5, "shm"}}) {
    for (const ScheduleKind schedule : {ScheduleKind::one_f1b, ScheduleKind::gpipe}) {
      INFO(ranks << " ranks, " << backend << ", " << name_of(schedule));
      std::vector<StageOutcome> found(size_t(ranks), StageOutcome{});
      const Words errors = testing::group::Job(ranks, backend).run([&](ProcessGroup& group) {
        found[size_t(group.rank())] = steps_of_rank(group, schedule, parts);
      });
      CHECK(errors == Words(size_t(ranks)));
      std::map<std::string, std::vector<Real>> gradients;
      for (StageOutcome& stage : found) {
        CHECK((stage.loss == whole.loss));
        CHECK((stage.scores == whole.scores));
        gradients.merge(stage.gradients);
        CHECK(stage.gradients.empty());  // no two have the same
      }
      CHECK((gradients == whole.gradients));
    }
  }
}

// --- In virtual time -----------------------------------------------------------------------------

/// A layer that takes a millisecond, and backward two, on devices of write_profile(). Adds a letter
/// for each pass to `passes`.
class MillisecondLayer final : public Module {
 public:
  explicit MillisecondLayer(std::string& passes) : passes_(passes) {}

  AnyTensor forward(const AnyTensor& x, Context& context) override {
    passes_ += 'F';
    const Tensor y = context.empty(x.shape());
    context.kernels().relu(context.stream(), x, y);
    return y;
  }
  AnyTensor backward(const AnyTensor& dy, Context& context) override {
    passes_ += 'B';
    const Tensor dx = context.empty(dy.shape());
    context.kernels().relu_backward(context.stream(), dy, dy, dx);
    return dx;
  }

 private:
  std::string& passes_;
};

/// Nothing but these layers and the messages takes time.
std::string write_profile(const TempDir& folder, double message_seconds) {
  const std::string link = fmt::format(R"({{"seconds": {}, "bytes": 1e30}})", message_seconds),
                    path = folder / "layers.json";
  const auto operation = [](double seconds) {
    return fmt::format(R"({{"seconds": {}, "flops": 1e30, "bytes": 1e30}})", seconds);
  };
  write_file(path, fmt::format(R"({{"device": "layers", "source": "made up", "memory_bytes": 1e12,
    "launch_seconds": 0, "batch_seconds": 0,
    "operations": {{"default": {}, "relu": {}, "relu_backward": {}}},
    "links": {{"host": {{"seconds": 0, "bytes": 1e30}}, "device": {}, "network": {}}}}})",
                               operation(0), operation(1e-3), operation(2e-3), link, link));
  return path;
}

/// Milliseconds of a step, those that a stage waits in it, and its passes in their order.
struct StageTimes {
  double step = 0, waited = 0;
  std::string passes{};
};

/// The second step, as the first one's messages tell extents. A layer for each stage. Threads
/// become ranks in the order in which they come: the times of rank r go to times[r].
void time_a_stage(const SimulatedRanks& ranks, const std::string& profile, const PipelinePlan& plan,
                  std::vector<StageTimes>& times) {
  ProcessGroup group = init_process_group({.simulated = ranks});
  const auto ids = parse_devices(fmt::format("sim:{}x{}", profile, ranks.per_host));
  const auto device = open_device(group.device_of(ids), {});
  const std::unique_ptr<Communicator> world = group.connect(*device);
  DeviceMesh mesh(MeshShape::from(fmt::format("pipeline={}", ranks.kinds)), group, *device, *world);
  const Stream passes = device->create_stream("compute");
  std::string made;
  RankPipeline stage(std::make_unique<MillisecondLayer>(made), mesh, passes,
                     device->create_stream("communication"), plan, 10, Tensor::empty(passes, {1}));
  Context context(passes);
  const Tensor x = Tensor::empty(passes, {1, 10});
  const auto step = [&] {
    made.clear();
    for (int i = 0; i < plan.micro_batches; ++i) {
      stage.forward(x, context);
      stage.backward(stage.is_last() ? x : Tensor(), context);
    }
    passes.synchronize();
    return StageTimes{1e-6 * double(device->now_ns()), 1e3 * stage.seconds_waited()};
  };
  const StageTimes first = step(), both = step();
  times[size_t(group.rank())] = {both.step - first.step, both.waited - first.waited, made};
}

std::vector<StageTimes> times_of_stages(int stages, double message_seconds,
                                        const PipelinePlan& plan) {
  const TempDir folder;
  const std::string profile = write_profile(folder, message_seconds);
  const SimulatedRanks ranks{.world_size = stages, .per_host = stages, .kinds = stages};
  std::vector<StageTimes> times(size_t(stages), StageTimes{});
  const Words errors =
      run_ranks(stages, [&](int /*thread*/) { time_a_stage(ranks, profile, plan, times); });
  CHECK(errors == Words(size_t(stages)));
  return times;
}

TEST_CASE("Simulated stages of equal layers have the bubble of the formula",
          "[mesh][pipeline][sim][tsan]") {
  for (const ScheduleKind schedule : {ScheduleKind::one_f1b, ScheduleKind::gpipe}) {
    for (const int stages : {2, 4}) {
      for (const int micro_batches : {1, 2, 4, 7}) {
        INFO(name_of(schedule) << ", " << stages << " stages, " << micro_batches);
        for (const StageTimes& stage : times_of_stages(stages, 0, {schedule, micro_batches})) {
          CHECK(stage.step == Approx(3 * (micro_batches + stages - 1)));
          CHECK(stage.waited / stage.step == Approx(predicted_bubble(stages, micro_batches)));
        }
      }
    }
  }
}

TEST_CASE("A stage makes its passes in the order of the schedule", "[mesh][pipeline][sim]") {
  const auto passes = [](ScheduleKind schedule) {
    Words all;
    for (const StageTimes& stage : times_of_stages(2, 0, {schedule, 3}))
      all.push_back(stage.passes);
    return all;
  };
  CHECK(passes(ScheduleKind::one_f1b) == Words{"FFBFBB", "FBFBFB"});
  CHECK(passes(ScheduleKind::gpipe) == Words{"FFFBBB", "FFFBBB"});
}

/// Forward and backward of both stages follow each other, with a message between any two; the sum
/// of the losses goes round in two.
TEST_CASE("What simulated stages wait for includes their messages", "[mesh][pipeline][sim]") {
  const std::vector<StageTimes> stages = times_of_stages(2, 1e-4, {ScheduleKind::gpipe, 1});
  for (const StageTimes& stage : stages) {
    CHECK(stage.step == Approx(6 + 4 * 0.1));
    CHECK(stage.waited == Approx(3 + 4 * 0.1));
  }
}

TEST_CASE("Stages that load other samples are told so before they wait for each other",
          "[mesh][pipeline]") {
  const Words errors = testing::group::Job(2, "shm").run([](ProcessGroup& group) {
    steps_of_rank(group, ScheduleKind::one_f1b, {Samples(group.rank() == 0 ? 4 : 3, 1)});
  });
  CHECK(errors[1] ==
        "rank 1 (pipeline 1): the first activations from stage 0 have 4 samples, expected 3, which "
        "this rank has loaded; ranks along pipeline load the same, by their place along data and "
        "shard");
  CHECK(errors[0] != "");
}

}  // namespace
}  // namespace lockstep
