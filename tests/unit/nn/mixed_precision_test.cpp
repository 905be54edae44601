// Networks that compute in 16 bits: what they keep, how near they stay to float32, and how fp16's
// gradients are scaled.

#include <algorithm>
#include <cmath>
#include <string>

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/core/parse.h"
#include "common/core/stream_backend.h"
#include "common/data/synthetic.h"
#include "common/nn/state_dict.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/training.h"

namespace lockstep {
namespace {

using testing::TestDevice;
using testing::Training;
using testing::TrainingOptions;
using Values = std::vector<Real>;

#ifndef LOCKSTEP_DOUBLE  // which computes in float64 alone

const std::vector<ModelOptions> kModels{{.dropout = true},
                                        {.kind = ModelKind::seed_bn},
                                        {.kind = ModelKind::seed_skip},
                                        {.kind = ModelKind::mlp, .width = 16},
                                        {.kind = ModelKind::resnet18, .width = 8}};

OptimizerRule rule_of(Precision precision) {
  return {.growth_interval = precision == Precision::fp16 ? 2000 : 0};
}

struct Run {
  std::vector<double> losses;
  Values weights;
  Health health;
};

Run run(const ModelOptions& model, Precision precision, bool graph = false) {
  const TestDevice d;
  const Dataset set = make_synthetic(SyntheticPart::train, 10 * 16 + 5);
  Training training(d.stream, set,
                    {.model = model,
                     .rule = rule_of(precision),
                     .batch_size = 16,
                     .graph = graph,
                     .precision = precision});
  Run run;
  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    for (const double loss : training.epoch(epoch)) run.losses.push_back(loss);
  }
  run.weights = training.parameters.values().to_host();
  run.health = training.optimizer.health().to_host()[0];
  return run;
}

TEST_CASE("Activations in 16 bits are half as large", "[sixteen]") {
  const Dataset set = make_synthetic(SyntheticPart::train, 32);
  for (const ModelOptions& model : kModels) {
    const auto bytes = [&](Precision precision) {
      const TestDevice d;
      Training training(d.stream, set, {.model = model, .precision = precision});
      return double(training.saved_bytes());
    };
    INFO(name_of(model.kind));
    const double real = bytes(Precision::real);
    CHECK(std::abs(bytes(Precision::bf16) / real - 0.5) <= 0.01);
    CHECK(std::abs(bytes(Precision::fp16) / real - 0.5) <= 0.01);
  }
}

TEST_CASE("In 16 bits losses stay near those of float32", "[sixteen]") {
  for (const ModelOptions& model : kModels) {
    INFO(name_of(model.kind));
    const Run real = run(model, Precision::real);
    for (const auto& [precision, most] :
         {std::pair(Precision::bf16, 0.03), std::pair(Precision::fp16, 0.01)}) {
      const Run sixteen = run(model, precision);
      double apart = 0;
      for (size_t i = 0; i < real.losses.size(); ++i) {
        apart = std::max(apart, std::abs(sixteen.losses[i] - real.losses[i]));
      }
      INFO(name_of(precision) << ": at most " << apart);
      // Two values of a window, or beside ReLU's zero, may change places when they are rounded, and
      // a whole gradient goes elsewhere. So gradients err by the square root of what values do, 2
      // to 5 % in fp16, 4 to 15 % in bf16. Batch after batch is normalised anew there, and
      // differences grow.
      CHECK(apart <= (model.kind == ModelKind::resnet18 ? 0.12 : most));
      CHECK(sixteen.losses != real.losses);
      CHECK(sixteen.health.failed_step == -1);
    }
  }
}

TEST_CASE("A replayed step in 16 bits gives the same bits", "[sixteen][graph]") {
  for (const Precision precision : {Precision::bf16, Precision::fp16}) {
    const Run eager = run({.kind = ModelKind::seed_bn}, precision),
              graph = run({.kind = ModelKind::seed_bn}, precision, /*graph=*/true);
    CHECK(graph.losses == eager.losses);
    CHECK(graph.weights == eager.weights);
    CHECK(graph.health.good_steps == eager.health.good_steps);
  }
}

TEST_CASE("Weights are rounded once after each update", "[sixteen]") {
  const auto device = cpu::open_cpu_device(0, {.trace = true}, cpu::EngineKind::best);
  const Stream stream = device->create_stream("stream");
  const Dataset set = make_synthetic(SyntheticPart::train, 3 * 8);
  Training training(stream, set, {.batch_size = 8, .precision = Precision::bf16});
  training.epoch();  // before it, the optimizer was made and the first weights were loaded
  stream.synchronize();
  const std::vector<Span> spans = stream.backend().timeline();
  CHECK(std::ranges::count_if(spans, [](const Span& span) {
          return std::string(span.op) == "to_sixteen_bits";
        }) == 2 + 3);
  // And they are what convolutions and products read.
  const Values weights = training.parameters.values().to_host(),
               copies = training.parameters.rounded().to_host();
  for (size_t i = 0; i < weights.size(); ++i) {
    if (copies[i] != Real(Bf16(weights[i]))) FAIL("weight " << i);
  }
  for (const Parameter* p : training.parameters.parameters()) {
    CHECK(p->value.to_host().size() == p->rounded.to_host().size());
  }
}

TEST_CASE("A gradient that overflows skips the step and halves the scale", "[sixteen]") {
  const TestDevice d;
  const Dataset set = make_synthetic(SyntheticPart::train, 8);
  Training training(d.stream, set,
                    {.rule = {.kind = OptimizerKind::adam, .growth_interval = 2},
                     .batch_size = 8,
                     .precision = Precision::fp16});
  const auto health = [&] { return training.optimizer.health().to_host()[0]; };
  const auto state = [&] {
    std::vector<Values> all{training.parameters.values().to_host(),
                            training.parameters.rounded().to_host()};
    for (const OptimizerState& part : training.optimizer.state())
      all.push_back(part.ranges[0].to_host());
    return all;
  };
  CHECK(health().scale == 65536);
  training.epoch();
  CHECK(health().scale == 65536);
  const auto after_one = state();
  // Planted: a scale with which fp16 cannot hold the gradients.
  Health planted = health();
  planted.scale = Real(0x1p40);
  training.optimizer.health().copy_from_host({planted});
  const std::vector<double> loss = training.epoch();
  CHECK(std::isfinite(loss[0]));
  CHECK(health().scale == Real(0x1p39));
  CHECK(health().skipped == 1);
  CHECK(health().failed_step == -1);
  CHECK(state() == after_one);
  for (const int64_t steps : training.optimizer.steps()) CHECK(steps == 1);
  // Back at a scale that fits, two good steps double it.
  planted = health();
  planted.scale = 1024;
  training.optimizer.health().copy_from_host({planted});
  training.epoch();
  CHECK(state() != after_one);
  CHECK(health().scale == 1024);
  training.epoch();
  CHECK(health().scale == 2048);
  for (const int64_t steps : training.optimizer.steps()) CHECK(steps == 3);
}

TEST_CASE("A loss that is not finite stops training in fp16, too", "[sixteen]") {
  const TestDevice d;
  const Dataset set = make_synthetic(SyntheticPart::train, 8);
  Training training(
      d.stream, set,
      {.rule = rule_of(Precision::fp16), .batch_size = 8, .precision = Precision::fp16});
  training.parameters.values().copy_from_host(
      Values(size_t(training.parameters.values().elements()), Real(1e30)));
  training.optimizer.round();
  training.epoch();
  CHECK(training.optimizer.health().to_host()[0].failed_step == 0);
}

#endif

TEST_CASE("Without 16 bits there are no copies and no scale", "[sixteen]") {
  const TestDevice d;
  const Dataset set = make_synthetic(SyntheticPart::train, 8);
  const Training training(d.stream, set, {.batch_size = 8});
  CHECK_FALSE(training.parameters.rounded().defined());
  CHECK_FALSE(training.optimizer.loss_scale().defined());
  for (const Parameter* p : training.parameters.parameters()) {
    CHECK(p->in_products().data() == p->value.data());
  }
}

}  // namespace
}  // namespace lockstep
