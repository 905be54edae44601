#include "03-model-split/pipeline/pipeline.h"

#include <algorithm>

#include "common/core/device.h"
#include "common/core/error.h"

namespace lockstep {
namespace {

using Kind = Instruction::Kind;

/// Of the channels for gradients and losses: one tensor is read while the next one comes in.
constexpr size_t kPlaces = 2;

}  // namespace

Pipeline::Pipeline(std::unique_ptr<StagedNetwork> network, Loss& loss, const Dataset& set,
                   const OptimizerRule& rule, const PipelineOptions& options)
    : network_(std::move(network)), loss_(loss), options_(options) {
  const int stages = static_cast<int>(network_->stages().size());
  schedules_ = make_schedules(options.schedule, stages, options.micro_batches);
  for (Instructions& list : schedules_) std::erase(list, Instruction{Kind::step});  // see update()
  for (int s = 0; s < stages; ++s) {
    const StagedNetwork::Stage& stage = network_->stages()[s];
    workers_.push_back({.stage = stage,
                        .optimizer = Optimizer(*stage.parameters, rule),
                        .feeder = Feeder(stage.stream, set, size_t{2} * options.micro_batches),
                        .phases = PhaseTimer(stage.stream)});
    const auto pool = std::make_shared<TensorPool>(stage.stream);
    const int live = predicted_live(options.schedule, stages, options.micro_batches, s);
    for (int i = 0; i < live; ++i) workers_.back().flights.push_back({.context = Context(pool)});
    if (s == 0) continue;
    const Stream before = network_->stages()[s - 1].stream;
    const size_t places = workers_[s - 1].flights.size();  // as many as may be alive there
    activations_.emplace_back(before, stage.stream, places);
    gradients_.emplace_back(stage.stream, before, kPlaces);
    losses_.emplace_back(network_->stages().back().stream, before, kPlaces);
    losses_.back().reserve({1});
  }
}

void Pipeline::initialize(Initializer initializer, uint64_t seed) {
  for (const Worker& worker : workers_) {
    lockstep::initialize(*worker.stage.parameters, initializer, seed);
  }
}

int64_t Pipeline::parameter_count() const {
  int64_t count = 0;
  for (const Worker& worker : workers_) count += worker.stage.parameters->count();
  return count;
}

Module& Pipeline::network() {
  for (Worker& worker : workers_) worker.phases.settle();  // evaluation may be long
  return *network_;
}

void Pipeline::require_samples(int64_t samples) const {
  require(options_.micro_batches <= samples,
          "--micro-batches: {} of a batch of {} samples, expected at most one per sample; give "
          "fewer, or --drop-last if that is the epoch's last batch",
          options_.micro_batches, samples);
}

// --- A step --------------------------------------------------------------------------------------

void Pipeline::feed(const HostBatch& batch, const StepState& step) {
  require_samples(batch.size);
  const BatchSplit split{BatchSplit::Kind::micro, options_.micro_batches};
  feed(batch, split.divide(batch.size), step);
}

void Pipeline::feed(const HostBatch& batch, const std::vector<BatchPart>& micro_batches,
                    const StepState& step) {
  require_equal(static_cast<int>(micro_batches.size()), options_.micro_batches,
                "pipeline: parts of the batch");
  int64_t samples = 0;
  for (const BatchPart& part : micro_batches) {
    require(part.count > 0, "pipeline: a micro-batch of {} samples, expected 1 or more",
            part.count);
    samples += part.count;
  }
  require_equal(samples, batch.size, "pipeline: samples of all micro-batches");
  batch_ = batch;
  micro_batches_ = micro_batches;
  step_ = step;
}

void Pipeline::zero_gradients() {
  for (Worker& worker : workers_) {
    worker.phases.start();
    worker.optimizer.zero_gradients();
  }
}

void Pipeline::run_schedule() {
  for (Worker& worker : workers_) worker.next = 0;
  // The host enqueues each stage's instructions in order, as far as possible: an event must be
  // recorded before another stream can be told to wait for it. The streams themselves run freely.
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t s = 0; s < workers_.size(); ++s) moved |= enqueue_as_far_as_possible(s);
  }
  std::vector<size_t> next;
  for (const Worker& worker : workers_) next.push_back(worker.next);
  require_finished(schedules_, next);
}

void Pipeline::update() {
  // From the last stage to the first: the last one sends the loss to the others.
  for (size_t s = workers_.size(); s-- > 0;) enqueue(s, {Kind::step});
  // The first stage's step comes after the batch has been read: that stage has read the images, and
  // it waits for the loss, which the last stage sends when it has read the labels.
  workers_.front().feeder.retire(batch_);
}

bool Pipeline::enqueue_as_far_as_possible(size_t s) {
  size_t& next = workers_[s].next;
  const size_t before = next;
  for (; next < schedules_[s].size() && can_run(s, schedules_[s][next]); ++next) {
    enqueue(s, schedules_[s][next]);
  }
  return next > before;
}

void Pipeline::enqueue(size_t s, const Instruction& instruction) {
  try {
    run(s, instruction);
  } catch (const PeerLost&) {
    throw;  // it names the stage whose stream failed
  } catch (...) {
    within(network_->text(s), [] { throw; });
  }
}

bool Pipeline::can_run(size_t s, const Instruction& instruction) const {
  switch (instruction.kind) {
    case Kind::receive_activation:
      return activations_[s - 1].can_receive();
    case Kind::send_activation:
      return activations_[s].can_send();
    case Kind::receive_gradient:
      return gradients_[s].can_receive();
    case Kind::send_gradient:
      return gradients_[s - 1].can_send();
    default:
      return true;
  }
}

void Pipeline::run(size_t s, const Instruction& instruction) {
  PhaseTimer& phases = workers_[s].phases;
  Flight& micro_batch = flight(s, instruction.micro_batch);
  switch (instruction.kind) {
    case Kind::receive_activation:
      micro_batch.input = activations_[s - 1].receive();
      return phases.end("wait");
    case Kind::forward:
      forward(s, instruction.micro_batch);
      return phases.end("forward");
    case Kind::send_activation:
      send(activations_[s], micro_batch.output, phases);
      return;
    case Kind::receive_gradient:
      micro_batch.output_gradient = gradients_[s].receive();
      return phases.end("wait");
    case Kind::backward:
      backward(s, instruction.micro_batch);
      return phases.end("backward");
    case Kind::send_gradient:
      send(gradients_[s - 1], micro_batch.input_gradient, phases);
      return;
    case Kind::step:
      step(s);
      phases.end("step");
      return phases.stop();
  }
}

void Pipeline::send(Channel& channel, Tensor& x, PhaseTimer& phases) {
  channel.await_place();
  phases.end("wait");  // for a neighbour that lags
  channel.send(x);
  x = {};
  phases.end("send");
}

Pipeline::Flight& Pipeline::flight(size_t s, int micro_batch) {
  std::vector<Flight>& flights = workers_[s].flights;
  return flights[static_cast<size_t>(micro_batch) % flights.size()];
}

// --- What a stage does ---------------------------------------------------------------------------

void Pipeline::forward(size_t s, int number) {
  Worker& worker = workers_[s];
  const ScopedRange range(worker.stage.stream, fmt::format("forward {}", number));
  Flight& micro_batch = flight(s, number);
  Context& context = micro_batch.context;
  worker.most_live = std::max(worker.most_live, ++worker.live);
  micro_batch.part = micro_batches_[number];
  context.facts = {.last_contribution = number + 1 == options_.micro_batches};
  context.begin_step(step_);
  worker.feeder.feed_state(batch_, micro_batch.part, context);
  if (s == 0) {
    const DeviceBatch& images = worker.feeder.feed_images(batch_, micro_batch.part);
    micro_batch.input = worker.feeder.normalize(images, context);
  }
  micro_batch.output = worker.stage.layers->forward(micro_batch.input, context);
  if (options_.recompute) context.clear();
  if (!is_last(s)) return;
  // The loss and its gradient at once: the scores need not be kept.
  const DeviceBatch& labels = worker.feeder.feed_labels(batch_, micro_batch.part);
  loss_.forward(micro_batch.output, labels.labels, loss(), context);
  micro_batch.output_gradient = loss_.backward(labels.labels, context);
  micro_batch.output = {};
}

void Pipeline::backward(size_t s, int number) {
  Worker& worker = workers_[s];
  const ScopedRange range(worker.stage.stream, fmt::format("backward {}", number));
  Flight& micro_batch = flight(s, number);
  Context& context = micro_batch.context;
  if (options_.recompute) {
    context.facts.recompute = true;
    worker.stage.layers->forward(micro_batch.input, context);
  }
  micro_batch.input_gradient = worker.stage.layers->backward(micro_batch.output_gradient, context);
  micro_batch.output_gradient = micro_batch.input = {};
  if (s > 0) activations_[s - 1].release();
  if (!is_last(s)) gradients_[s].release();
  --worker.live;
}

void Pipeline::step(size_t s) {
  const StepStateTensor& state = flight(s, 0).context.state();
  // Every stage looks at the loss: if it is not finite, no stage may move.
  if (is_last(s)) {
    const Tensor mean = loss();
    for (Channel& channel : losses_) channel.send(mean);
    workers_[s].optimizer.step(state, mean);
  } else {
    workers_[s].optimizer.step(state, losses_[s].receive());
    losses_[s].release();
  }
}

// --- Reports -------------------------------------------------------------------------------------

std::vector<HealthTensor> Pipeline::healths() const {
  std::vector<HealthTensor> all;
  for (const Worker& worker : workers_) all.push_back(worker.optimizer.health());
  return all;
}

std::vector<int> Pipeline::live() const {
  std::vector<int> all;
  for (const Worker& worker : workers_) all.push_back(worker.most_live);
  return all;
}

double Pipeline::flops() const {
  double all = 0;
  for (const Worker& worker : workers_) {
    for (const Flight& micro_batch : worker.flights) all += micro_batch.context.flops();
  }
  return all;
}

double Pipeline::measured_bubble() {
  double waited = 0, all = 0;
  for (Worker& worker : workers_) {
    for (const auto& [phase, seconds] : worker.phases.totals()) {
      all += seconds;
      if (phase == "wait") waited += seconds;
    }
  }
  return all == 0 ? 0 : waited / all;
}

void Pipeline::restart_clocks() {
  for (Worker& worker : workers_) worker.phases.restart();
}

}  // namespace lockstep
