// Pipelines: they train as one device does, what they cost, and how they fail.

#include <chrono>
#include <map>
#include <thread>

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/machine.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/tasks.h"
#include "tests/unit/03/pipeline_runs.h"

namespace lockstep {
namespace {

using namespace testing::pipelines;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using std::chrono::milliseconds;
using testing::Clock;
using testing::cpus;
using testing::enqueue;
using testing::kTolerance;
using testing::Machine;
using testing::message_of;
using testing::ScopedEnvironment;
using Values = std::vector<Real>;

// --- From stage to stage -------------------------------------------------------------------------

TEST_CASE("A channel keeps the order, and nothing is overwritten before it was read",
          "[pipeline][tsan]") {
  const Machine machine(cpus(2));
  const Stream from = machine.streams[0], to = machine.streams[1];
  const std::vector<int64_t> rows{1, 2, 2, 5, 3, 1, 7, 4};  // ragged and growing
  for (const bool slow_sender : {false, true}) {
    std::vector<Tensor> read;
    const Tensor source = Tensor::empty(from, {7, 100});
    Channel channel(from, to, 2);
    const auto receive = [&] {
      const Tensor x = channel.receive();
      if (!slow_sender) sleep(3)(to);
      read.push_back(Tensor::empty(to, x.shape()));
      to.copy(read.back().data(), x.data(), x.bytes());
      channel.release();
    };
    CHECK_FALSE(channel.can_receive());
    for (size_t i = 0; i < rows.size(); ++i) {
      CHECK(channel.can_send() == (i < 2));
      if (!channel.can_send()) receive();
      if (slow_sender) sleep(3)(from);
      from.kernels().fill(from, Real(i), source);
      channel.send(source.rows(0, rows[i]));
      CHECK(channel.can_receive());
    }
    receive();
    receive();
    CHECK_FALSE(channel.can_receive());
    CHECK(channel.bytes_sent() == 25 * 100 * int64_t{sizeof(Real)});
    for (size_t i = 0; i < rows.size(); ++i) {
      CHECK(read[i].shape() == Shape{rows[i], 100});
      CHECK((read[i].to_host() == Values(static_cast<size_t>(rows[i] * 100), Real(i))));
    }
  }
}

TEST_CASE("A channel refuses another shape, and goes while copies are under way",
          "[pipeline][tsan][row49]") {
  const Machine machine(cpus(2));
  const Stream from = machine.streams[0], to = machine.streams[1];
  for (const size_t places : {1, 2}) {
    INFO(places << " places");
    Channel channel(from, to, places);
    const Tensor x = Tensor::from_host(from, {2, 4}, Values(8, 1));
    const Tensor other = Tensor::from_host(from, {3, 5}, Values(15, 2));
    sleep(5)(from);
    channel.send(x);
    if (places == 1) {
      channel.receive();
      channel.release();
    }
    const std::string text = message_of<BadInput>([&] { channel.send(other); });
    for (const char* part : {"cpu:0", "cpu:1", "[3, 5]", "[3, 4]"}) {
      CHECK_THAT(text, ContainsSubstring(part));
    }
    CHECK(text.find('\n') == text.npos);
  }
  for (const Stream& stream : machine.streams) CHECK_NOTHROW(stream.synchronize());
}

// --- The same as one device ----------------------------------------------------------------------

TEST_CASE("Every pipeline trains as one device does", "[pipeline][row42][row45][row46]") {
  const ModelOptions model = small(true);
  const OptimizerRule rule{.momentum = 0.9};
  const Outcome single = single_device(model, rule);
  for (const int micro_batches : {1, 2, 4, 8}) {
    std::optional<Outcome> first;
    for (const ScheduleKind kind : {kGpipe, kOneF1b, kNaive}) {
      if (kind == kNaive && micro_batches > 1) continue;
      for (const int stages : {1, 2, 3, 4}) {
        if (stages % 3 != 1 && micro_batches != 4 && !testing::full_campaign()) continue;
        INFO(name_of(kind) << ", " << stages << " stages, " << micro_batches << " micro-batches");
        Run run({stages, {kind, micro_batches}, model, rule});
        const Outcome found = run.three_steps();
        CHECK(error(found, single) <= kTolerance);
        if (micro_batches == 1) CHECK((found == single));
        if (!first) first = found;
        CHECK((found == *first));  // micro-batches come in one order in every stage
        for (int s = 0; s < stages; ++s) {
          CHECK(run.pipeline->live()[s] == predicted_live(kind, stages, micro_batches, s));
        }
        CHECK(run.pipeline->bytes_moved() == run.pipeline->bytes_predicted());
        CHECK((run.pipeline->bytes_moved() > 0) == (stages > 1));
      }
    }
  }
}

TEST_CASE("Devices with several stages train as one device does", "[pipeline][tsan]") {
  const ModelOptions model = small(true);
  const OptimizerRule rule{.momentum = 0.9};
  const Outcome single = single_device(model, rule);
  for (const auto& [devices, chunks] : {std::pair(2, 2), {2, 3}, {3, 2}, {4, 2}, {2, 4}}) {
    for (const int micro_batches : {devices, 2 * devices, 12}) {
      if (devices != 3 && micro_batches != 2 * devices && !testing::full_campaign()) continue;
      INFO(devices << " devices, " << chunks << " chunks, " << micro_batches << " micro-batches");
      Run run({.stages = devices,
               .pipeline = {kInterleaved, micro_batches},
               .model = model,
               .rule = rule,
               .chunks = chunks});
      const Outcome found = run.three_steps();
      CHECK(error(found, single) <= kTolerance);
      // Micro-batches come in one order in every stage: the bits are those of the other schedules.
      CHECK((found == three_steps({2, {kGpipe, micro_batches}, model, rule})));
      for (int d = 0; d < devices; ++d) {
        CHECK(run.pipeline->live()[d] ==
              predicted_live(kInterleaved, devices, micro_batches, d, chunks));
      }
    }
  }
}

TEST_CASE("Stages are dealt out to the devices in turn", "[pipeline]") {
  const Run run({.stages = 2, .pipeline = {kInterleaved, 4}, .chunks = 3});
  REQUIRE(run.split->stages().size() == 6);
  CHECK(run.split->chunks() == 3);
  for (size_t s = 0; s < 6; ++s) {
    CHECK(run.split->stages()[s].stream == run.machine.streams[s % 2]);
  }
  CHECK(run.split->text(3) == "stage 3 (cpu:1, flatten)");
  CHECK(run.split->device_text(1) ==
        "stages 1 and 3 and 5 (cpu:1, pool1 and flatten and fc2 to log_softmax)");
  // Only the interleaved schedule knows what to do with them.
  const Setup wrong{.stages = 2, .pipeline = {kOneF1b, 4}, .chunks = 2};
  CHECK_THAT(message_of<BadInput>([&] { Run{wrong}; }), ContainsSubstring("choose interleaved"));
}

TEST_CASE("Micro-batches of any sizes count as many samples as they have", "[pipeline][row43]") {
  const Outcome single = single_device(small(), {});
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{5, 5, 2}, {2, 5, 5}, {1, 1, 10}}) {
    for (const ScheduleKind kind : {kGpipe, kOneF1b}) {
      Run run({.stages = 3, .pipeline = {kind, 3}, .sizes = sizes});
      CHECK(error(run.three_steps(), single) <= kTolerance);
    }
  }
}

TEST_CASE("Batches that cannot be cut so are refused", "[pipeline][row43]") {
  Run many({.pipeline = {kOneF1b, 13}});
  const std::string text = message_of<BadInput>([&] { many.step(); });
  CHECK_THAT(text, ContainsSubstring("--micro-batches: found 13 for a batch of 12 samples"));
  CHECK(text.find('\n') == text.npos);
  Run wrong({.pipeline = {kOneF1b, 3}, .sizes = {6, 6}});
  CHECK_THAT(message_of<BadInput>([&] { wrong.step(); }),
             ContainsSubstring("parts of the batch: found 2, expected 3"));
  const Setup naive{.pipeline = {kNaive, 2}};
  CHECK_THAT(message_of<BadInput>([&] { Run{naive}; }), ContainsSubstring("naive"));
}

TEST_CASE("Batch normalisation sees micro-batches", "[pipeline][row47]") {
  const ModelOptions model = small(false, ModelKind::seed_bn);
  const Outcome expected = three_steps({1, {kGpipe, 4}, model});
  CHECK(error(expected, single_device(model, {})) > 1e-3);
  CHECK(expected.statistics.back() == 3 * 4);  // batches tracked
  for (const ScheduleKind kind : {kGpipe, kOneF1b}) {
    CHECK((three_steps({3, {kind, 4}, model}) == expected));
  }
  CHECK((three_steps({2, {kNaive, 1}, model}) == single_device(model, {})));
}

TEST_CASE("Recomputing changes no bit and saves memory", "[pipeline][row51]") {
  for (const ModelKind kind : {ModelKind::seed, ModelKind::seed_bn}) {
    const ModelOptions model = small(true, kind);
    Run keeping({3, {kGpipe, 4, false}, model});
    const Outcome expected = keeping.three_steps();
    for (const ScheduleKind schedule : {kGpipe, kOneF1b}) {
      Run run({3, {schedule, 4, true}, model});
      CHECK((run.three_steps() == expected));  // running statistics move once
      CHECK(run.peaks()[0] < keeping.peaks()[0]);
    }
  }
}

TEST_CASE("A batch is kept until the last stage has read its labels, and no longer",
          "[pipeline][tsan]") {
  for (const int stages : {1, 3}) {
    INFO(stages << " stages");
    testing::Gate gate;
    const auto wait = [&](Stream stream) { enqueue(stream, [&] { gate.pass(); }); };
    Run run({.stages = stages, .pipeline = {kOneF1b, 2}, .change = [&](Layers& layers) {
               insert(layers, layers.size(), wait, {});  // labels come after the last layer
             }});
    std::vector<std::weak_ptr<BatchBuffer>> batches;
    run.loader.begin_epoch(0);
    const auto step = [&] {
      const std::optional<HostBatch> batch = run.loader.next();
      batches.push_back(batch->memory);
      run.pipeline->feed(*batch, {.loss_weight = Real(1) / Real(kBatch)});
      run.pipeline->zero_gradients();
      run.pipeline->run_schedule();
      run.pipeline->update();
    };
    step();
    step();  // the host is done with the first
    for (const auto& batch : batches) CHECK_FALSE(batch.expired());
    gate.open();
    for (const Stream& stream : run.machine.streams) stream.synchronize();
    step();
    CHECK(batches[0].expired());
    CHECK(batches[1].expired());
  }
}

TEST_CASE("The result does not depend on which stage is late", "[pipeline][tsan]") {
  for (const ScheduleKind kind : {kGpipe, kOneF1b, kInterleaved}) {
    const Setup setup{.stages = 3,
                      .pipeline = {kind, kind == kInterleaved ? 6 : 4, kind == kOneF1b},
                      .model = small(true),
                      .chunks = kind == kInterleaved ? 2 : 1};
    const Outcome expected = three_steps(setup);
    for (const size_t place : {1, 4, 6, 8}) {  // in stages 0, 1, 1, 2; if interleaved 1 to 4
      if (place % 4 != 0 && !testing::full_campaign()) continue;
      INFO(name_of(kind) << ", late before layer " << place);
      Setup late = setup;
      late.change = [=](Layers& layers) { insert(layers, place, sleep(2), sleep(2)); };
      CHECK((three_steps(late) == expected));
    }
    const ScopedEnvironment chaos("LOCKSTEP_CHAOS", "200");
    CHECK((three_steps(setup) == expected));
  }
}

TEST_CASE("What a stage only passes on is sent before more comes in its place",
          "[pipeline][tsan]") {
  const Setup plain{.stages = 3, .pipeline = {kGpipe, 6}};
  const Outcome expected = three_steps(plain);
  Setup passing = plain;
  passing.change = [](Layers& layers) {
    insert(layers, 0, {}, sleep(20));  // stage 0 is late, so stage 1 has to wait for a place
    for (int i = 0; i < 4; ++i) insert(layers, 4, {}, {});  // all of stage 1
  };
  Run run(passing);
  CHECK_THAT(run.split->text(1), ContainsSubstring("hook to hook"));
  CHECK((run.three_steps() == expected));
}

// --- What it costs -------------------------------------------------------------------------------

TEST_CASE("1F1B needs less memory than GPipe on every device", "[pipeline][row45]") {
  Run gpipe({4, {kGpipe, 8}}), one_f1b({4, {kOneF1b, 8}});
  CHECK((gpipe.three_steps() == one_f1b.three_steps()));
  for (int s = 0; s < 4; ++s) CHECK(one_f1b.peaks()[s] < gpipe.peaks()[s]);
}

TEST_CASE("After two steps a pipeline allocates nothing more", "[pipeline]") {
  for (const ScheduleKind kind : {kGpipe, kOneF1b, kInterleaved}) {
    // 5: 3, 3, 2, 2, 2 samples
    for (const int micro_batches :
         kind == kInterleaved ? std::vector{3, 9} : std::vector{1, 4, 5}) {
      Run run(
          {.stages = 3, .pipeline = {kind, micro_batches}, .chunks = kind == kInterleaved ? 2 : 1});
      for (int i = 0; i < 2; ++i) run.step();
      // A stream takes its workspace when it gets there, so the peak use depends on how far the
      // host was by then. After the two steps it has it.
      run.peaks();
      std::vector<int64_t> before;
      for (const auto& device : run.machine.devices) {
        device->memory().reset_peak();
        before.push_back(device->memory().current());
      }
      for (int i = 0; i < 4; ++i) run.step();
      std::vector<int64_t> after = run.peaks();
      after.back() -= 4 * int64_t{sizeof(Real)};  // the test's own tensors of losses
      CHECK(after == before);
    }
  }
}

TEST_CASE("A long evaluation does not lose the times of a pipeline's steps", "[pipeline]") {
  Run run({});
  run.step();
  run.pipeline->network();  // for evaluation
  for (const Stream& stream : run.machine.streams) {
    for (int i = 0; i < 1100; ++i) stream.record();
  }
  const double bubble = run.pipeline->measured_bubble();
  CHECK((bubble > 0 && bubble < 1));
}

TEST_CASE("A stage that cannot send waits, whatever the schedule", "[pipeline]") {
  // Stage 0 is the slow one: stage 1 waits for its activations, or to get rid of its gradients.
  for (const auto kind : {kGpipe, kOneF1b}) {
    Run run({.stages = 2, .pipeline = {kind, 8, false}, .change = [](Layers& layers) {
               insert(layers, 0, sleep(4), sleep(8));
             }});
    for (int i = 0; i < 2; ++i) run.step();
    INFO(name_of(kind));
    CHECK(run.pipeline->measured_bubble() > 0.4);  // nearly all of stage 1's half
  }
}

TEST_CASE("More micro-batches than a stream keeps times of may be measured", "[pipeline]") {
  // Times may be lost then; the run must not be.
  Run run({.stages = 2, .pipeline = {kGpipe, kBatch, false}});
  run.step();
  for (int i = 0; i < 1500; ++i) run.machine.streams[1].record();
  CHECK_NOTHROW(run.step());
  const double bubble = run.pipeline->measured_bubble();
  CHECK((bubble >= 0 && bubble <= 1));
}

TEST_CASE("Gradients are complete once per step, with the last micro-batch", "[pipeline]") {
  for (const auto kind : {kGpipe, kOneF1b, kInterleaved}) {
    Run run({.stages = 2, .pipeline = {kind, 4, false}, .chunks = kind == kInterleaved ? 2 : 1});
    std::map<std::string, int> calls;
    for (Parameter* p : run.split->parameters()) {
      p->on_gradient_ready = [&](Parameter& ready) { ++calls[ready.name]; };
    }
    for (int step = 1; step <= 2; ++step) {
      run.step();
      CHECK(calls.size() == run.split->parameters().size());
      for (const auto& [name, count] : calls) CHECK(count == step);
    }
  }
}

TEST_CASE("With stages that only sleep the measured bubble is that of the formula", "[pipeline]") {
  constexpr int kStages = 4;
  for (const auto& [kind, micro_batches] :
       {std::pair(kNaive, 1), {kOneF1b, 4}, {kGpipe, 12}, {kInterleaved, 4}}) {
    const int chunks = kind == kInterleaved ? 2 : 1;
    const double predicted = predicted_bubble(kStages, micro_batches, chunks);
    double found = -1;
    // A busy machine adds to the sleeps, whatever their length: then once more, with longer ones.
    for (int attempt = 0; attempt < 5 && std::abs(found - predicted) > 0.1; ++attempt) {
      const int ms = 5 << attempt;
      Run run({.stages = kStages,
               .pipeline = {kind, micro_batches, false},
               .change =
                   [=](Layers& layers) {  // 12 layers, three a stage; or 16, two a stage
                     for (int place = 0; place < 4 * chunks; ++place) {
                       insert(layers, size_t(place) * (chunks == 1 ? 3 : 2), sleep(ms), sleep(ms));
                     }
                   },
               .chunks = chunks});
      for (int i = 0; i < 2; ++i) run.step();
      found = run.pipeline->measured_bubble();
    }
    INFO(name_of(kind) << ", " << micro_batches << " micro-batches");
    CHECK(found == Approx(predicted).margin(0.1));
  }
}

// --- Failures ------------------------------------------------------------------------------------

/// A hook as the first layer of stage 1 of 3.
Setup hooked(Hook::Action forward, Hook::Action backward) {
  return {.pipeline = {kOneF1b, 4},
          .change = [=](Layers& layers) { insert(layers, 3, forward, backward); }};
}

TEST_CASE("An error of a stage names it, its device and its layers, and the others finish",
          "[pipeline][row50]") {
  for (const bool in_forward : {true, false}) {
    int calls = 0;
    const Hook::Action fault = [&](Stream) {
      if (++calls == 3) throw std::runtime_error("planted fault");  // of the third micro-batch
    };
    Run run(in_forward ? hooked(fault, {}) : hooked({}, fault));
    CHECK_THAT(run.split->text(1), ContainsSubstring("stage 1 (cpu:1"));
    CHECK_THAT(run.split->text(1), ContainsSubstring("hook to flatten"));
    CHECK(message_of<EnvironmentError>([&] { run.step(); }) ==
          run.split->text(1) + ": planted fault");
    for (const Stream& stream : run.machine.streams) CHECK_NOTHROW(stream.synchronize());
  }
}

TEST_CASE("A failure on one stage's device reaches all stages, and nobody hangs",
          "[pipeline][tsan][row50]") {
  for (const bool in_forward : {true, false}) {
    const auto begin = Clock::now();
    {
      const Hook::Action fault = [](Stream stream) {
        enqueue(stream, "fault", [] {
          std::this_thread::sleep_for(milliseconds(20));  // the host has long gone on
          throw std::runtime_error("planted fault");
        });
      };
      Run run(in_forward ? hooked(fault, {}) : hooked({}, fault));
      run.step();
      const std::string expected = run.split->text(1) + " failed: planted fault";
      for (const Stream& stream : run.machine.streams) {
        CHECK(message_of<PeerLost>([&] { stream.synchronize(); }) == expected);
      }
      const std::string text = message_of<Error>([&] {
        for (int i = 0; i < 4; ++i) run.step();
      });
      CHECK(text == expected);
    }  // all streams are drained here
    CHECK(Clock::now() - begin < std::chrono::seconds(20));
  }
}

TEST_CASE("A failure on a device with several stages names them all", "[pipeline][tsan]") {
  const Hook::Action fault = [](Stream stream) {
    enqueue(stream, "fault", [] { throw std::runtime_error("planted fault"); });
  };
  Run run({.stages = 2,
           .pipeline = {kInterleaved, 4},
           .change = [=](Layers& layers) { insert(layers, 0, fault, {}); },
           .chunks = 2});
  run.step();
  for (const Stream& stream : run.machine.streams) {
    CHECK(message_of<PeerLost>([&] { stream.synchronize(); }) ==
          run.split->device_text(0) + " failed: planted fault");
  }
  CHECK_THAT(run.split->device_text(0), StartsWith("stages 0 and 2 (cpu:0, hook to "));
}

TEST_CASE("Stages that do not fit: the stage and both shapes are named", "[pipeline][row49]") {
  Run run({.pipeline = {kOneF1b, 4}, .change = [](Layers& layers) {
             layers.erase(layers.begin() + 3);  // pool2
           }});
  const auto expected = [&](int samples) {
    return fmt::format("{}: fc1: features of input [{}, 80]: found 80, expected 20",
                       run.split->text(2), samples);
  };
  CHECK(message_of<BadInput>([&] { run.step(); }) == expected(3));
  Context context(run.machine.streams[0]);
  const Tensor x = Tensor::empty(run.machine.streams[0], {2, 16, 16, 1});
  CHECK(message_of<BadInput>([&] { run.split->forward(x, context); }) == expected(2));
  for (const Stream& stream : run.machine.streams) CHECK_NOTHROW(stream.synchronize());
}

TEST_CASE("If the loss is not finite, no stage's weights move", "[pipeline][tsan]") {
  Run run({.pipeline = {kOneF1b, 4}, .infinite_loss = true});
  run.step();
  const Values before = all_of(*run.split, &Parameter::value);
  run.step();
  run.step();
  CHECK((all_of(*run.split, &Parameter::value) == before));
  const std::vector<HealthTensor> healths = run.pipeline->healths();
  CHECK(healths.size() == 3);
  for (const HealthTensor& health : healths) CHECK(health.to_host()[0].failed_step == 1);
}

#ifndef LOCKSTEP_DOUBLE  // which has no other precision
TEST_CASE("In fp16 a gradient that overflows in one stage skips the step in all of them",
          "[pipeline][sixteen]") {
  for (const size_t bad_stage : {0, 1, 2}) {
    INFO("stage " << bad_stage);
    Run run({.pipeline = {kOneF1b, 4, false, Precision::fp16}, .rule = {.growth_interval = 9}});
    const StagedNetwork::Stage& stage = run.split->stages()[bad_stage];
    stage.parameters->parameters().front()->on_gradient_ready = [&](Parameter& p) {
      if (run.steps != 2) return;
      stage.stream.kernels().fill(stage.stream, std::numeric_limits<Real>::infinity(),
                                  p.grad.range(0, {1}));
    };
    for (const int64_t skipped : {0, 1, 1}) {
      run.step();
      for (const HealthTensor& health : run.pipeline->healths()) {
        CHECK(health.to_host()[0].skipped == skipped);
      }
    }
  }
}
#endif

}  // namespace
}  // namespace lockstep
