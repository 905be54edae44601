#include "03-model-split/pipeline/pipeline.h"

#include <algorithm>

#include "common/core/device.h"
#include "common/core/error.h"
#include "common/io/json.h"

namespace lockstep {
namespace {

using Kind = Instruction::Kind;

}  // namespace

Pipeline::Pipeline(std::unique_ptr<StagedNetwork> network, Loss& loss, const Dataset& set,
                   const OptimizerRule& rule, const PipelineOptions& options)
    : network_(std::move(network)), loss_(loss), options_(options) {
  const size_t devices = network_->devices();
  schedules_ = make_schedules(options.schedule, int(devices), options.micro_batches,
                              int(network_->chunks()));
  for (Instructions& list : schedules_) std::erase(list, Instruction{Kind::step});  // see update()
  for (size_t d = 0; d < devices; ++d) add_device(d);
  while (stages_.size() < network_->stages().size()) add_stage(set, rule);
}

void Pipeline::add_device(size_t d) {
  const Stream stream = network_->stages()[d].stream, last = network_->stages().back().stream;
  workers_.push_back({.phases = PhaseTimer(stream), .pool = std::make_shared<TensorPool>(stream)});
  if (scales_loss()) workers_[d].overflow = OverflowNumber(Tensor::empty(stream, {1}));
  if (d + 1 == network_->devices()) return;
  const auto add_channel = [](std::deque<Channel>& channels, Stream from, Stream to) {
    channels.emplace_back(from, to, kGradientPlaces);
    channels.back().reserve({1});
  };
  add_channel(losses_, last, stream);
  if (!scales_loss()) return;
  add_channel(overflows_to_last_, stream, last);
  add_channel(overflows_, last, stream);
}

void Pipeline::add_stage(const Dataset& set, const OptimizerRule& rule) {
  const size_t s = stages_.size(), devices = workers_.size();
  const StagedNetwork::Stage& stage = network_->stages()[s];
  stages_.push_back(
      {.network = stage,
       .optimizer = Optimizer(*stage.parameters, rule, workers_[s % devices].overflow.number()),
       .feeder = Feeder(stage.stream, set, size_t{2} * options_.micro_batches)});
  const int live = most_live(schedules_[s % devices], int(s / devices));
  for (int i = 0; i < live; ++i) {
    stages_[s].in_flight.push_back(
        {.context = Context(workers_[s % devices].pool, options_.precision,
                            stages_[s].optimizer.loss_scale())});
  }
  if (s == 0) return;
  const Stage& before = stages_[s - 1];
  const size_t places = before.in_flight.size();  // as many as may be alive there
  activations_.emplace_back(before.network.stream, stage.stream, places);
  gradients_.emplace_back(stage.stream, before.network.stream, kGradientPlaces);
}

void Pipeline::initialize(Initializer initializer, uint64_t seed) {
  for (const Stage& stage : stages_) {
    lockstep::initialize(*stage.network.parameters, initializer, seed);
  }
}

void Pipeline::round() const {
  for (const Stage& stage : stages_) stage.optimizer.round();
}

int64_t Pipeline::parameter_count() const {
  int64_t count = 0;
  for (const Stage& stage : stages_) count += stage.network.parameters->count();
  return count;
}

Module& Pipeline::network() {
  for (Worker& worker : workers_) worker.phases.settle();  // evaluation may be long
  return *network_;
}

void Pipeline::require_samples(int64_t samples) const {
  require(
      options_.micro_batches <= samples,
      "--micro-batches: found {} for a batch of {} samples, expected at most one per sample; give "
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
  for (Worker& worker : workers_) worker.phases.start();
  for (Stage& stage : stages_) stage.optimizer.zero_gradients();
}

void Pipeline::run_schedule() {
  for (Worker& worker : workers_) worker.next = 0;
  // The host enqueues each device's instructions in order, as far as possible: an event must be
  // recorded before another stream can be told to wait for it. The streams themselves run freely.
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t d = 0; d < workers_.size(); ++d) moved |= enqueue_as_far_as_possible(d);
  }
  std::vector<size_t> next;
  for (const Worker& worker : workers_) next.push_back(worker.next);
  require_finished(schedules_, next);
}

void Pipeline::update() {
  if (scales_loss()) collect_overflows();
  // From the last device to the first: the last one sends the loss to the others.
  for (size_t d = workers_.size(); d-- > 0;) enqueue(d, {Kind::step});
  // The first device's step comes after the batch has been read: that device has read the images,
  // and it waits for the loss, which the last device sends when it has read the labels.
  stages_.front().feeder.retire(batch_);
}

bool Pipeline::enqueue_as_far_as_possible(size_t d) {
  const Instructions& list = schedules_[d];
  size_t& next = workers_[d].next;
  const size_t before = next;
  for (; next < list.size() && can_run(stage_of(d, list[next]), list[next]); ++next) {
    enqueue(d, list[next]);
  }
  return next > before;
}

void Pipeline::enqueue(size_t d, const Instruction& instruction) {
  const size_t s = stage_of(d, instruction);
  try {
    run(s, instruction);
  } catch (const PeerLost&) {
    throw;  // it names the stages whose stream failed
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
  PhaseTimer& phases = worker_of(s).phases;
  InFlight& micro_batch = in_flight(s, instruction.micro_batch);
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
      return release_gradient(s);
    case Kind::step:
      step(s % workers_.size());
      phases.end("step");
      return phases.stop();
  }
}

void Pipeline::send(Channel& channel, AnyTensor& x, PhaseTimer& phases) {
  channel.await_place();
  phases.end("wait");  // for a neighbour that lags
  channel.send(x);
  x = {};
  phases.end("send");
}

Pipeline::InFlight& Pipeline::in_flight(size_t s, int micro_batch) {
  std::vector<InFlight>& in_flight = stages_[s].in_flight;
  return in_flight[static_cast<size_t>(micro_batch) % in_flight.size()];
}

// --- What a stage does ---------------------------------------------------------------------------

std::string Pipeline::pass_text(const char* pass, size_t s, int micro_batch) const {
  const std::string name = fmt::format("{} {}", pass, micro_batch);
  return network_->chunks() == 1 ? name : fmt::format("{}.{}", name, s / workers_.size());
}

void Pipeline::forward(size_t s, int number) {
  Stage& stage = stages_[s];
  Worker& worker = worker_of(s);
  const ScopedRange range(stage.network.stream, pass_text("forward", s, number));
  InFlight& micro_batch = in_flight(s, number);
  Context& context = micro_batch.context;
  worker.most_live = std::max(worker.most_live, ++worker.live);
  micro_batch.part = micro_batches_[number];
  context.facts = {.last_contribution = number + 1 == options_.micro_batches};
  context.begin_step(step_);
  stage.feeder.feed_state(batch_, micro_batch.part, context);
  if (s == 0) {
    const DeviceBatch& images = stage.feeder.feed_images(batch_, micro_batch.part);
    micro_batch.input = stage.feeder.normalize(images, context);
  }
  micro_batch.output = stage.network.layers->forward(micro_batch.input, context);
  if (options_.recompute) context.clear();
  if (!is_last(s)) return expect_boundary(s, micro_batch.output);
  // The loss and its gradient at once: the scores need not be kept.
  const DeviceBatch& labels = stage.feeder.feed_labels(batch_, micro_batch.part);
  loss_.forward(micro_batch.output, labels.labels, loss(), context);
  micro_batch.output_gradient = loss_.backward(labels.labels, context);
  micro_batch.output = {};
}

/// The activation goes over the boundary after stage s, and its gradient comes back.
void Pipeline::expect_boundary(size_t s, const AnyTensor& activation) {
  if (activations_[s].crosses()) bytes_expected_ += 2 * int64_t(activation.bytes());
}

void Pipeline::backward(size_t s, int number) {
  const StagedNetwork::Stage& stage = stages_[s].network;
  const ScopedRange range(stage.stream, pass_text("backward", s, number));
  InFlight& micro_batch = in_flight(s, number);
  Context& context = micro_batch.context;
  if (options_.recompute) {
    context.facts.recompute = true;
    stage.layers->forward(micro_batch.input, context);
  }
  micro_batch.input_gradient = stage.layers->backward(micro_batch.output_gradient, context);
  micro_batch.output_gradient = micro_batch.input = {};
  if (s > 0) activations_[s - 1].release();
  if (s == 0) release_gradient(s);
  --worker_of(s).live;
}

void Pipeline::release_gradient(size_t s) {
  // Not before the stage has sent its own: that may be the very tensor that it received, if its
  // layers only pass it on, as EverySecondStep does in every second step.
  if (!is_last(s)) gradients_[s].release();
}

/// In fp16 all stages skip a step together. The last device learns from every other one whether
/// gradients there have overflowed, and tells the sum to all, beside the loss.
void Pipeline::collect_overflows() {
  for (size_t d = 0; d < workers_.size(); ++d) {
    const OverflowNumber& overflow = workers_[d].overflow;
    const Stream stream = overflow.number().home();
    stream.kernels().fill(stream, 0, overflow.number());
    for (const size_t s : network_->stages_on(d)) {
      stream.kernels().check_finite(stream, in_flight(s, 0).context.state(),
                                    stages_[s].network.parameters->gradients(), overflow.found());
    }
    overflow.write(stream);
    if (d < overflows_to_last_.size()) overflows_to_last_[d].send(overflow.number());
  }
  const Tensor& sum = workers_.back().overflow.number();
  for (Channel& channel : overflows_to_last_) {
    sum.home().kernels().add(sum.home(), channel.receive(), sum);
    channel.release();
  }
}

void Pipeline::step(size_t d) {
  // Every stage looks at the loss: if it is not finite, no stage may move.
  const bool last = d + 1 == workers_.size();
  const Tensor mean = last ? loss() : Tensor(losses_[d].receive());
  for (size_t i = 0; last && i < losses_.size(); ++i) losses_[i].send(mean);
  if (scales_loss()) share_overflow(d);
  if (!last) bytes_expected_ += int64_t{sizeof(Real)};
  for (const size_t s : network_->stages_on(d)) {
    stages_[s].optimizer.step(in_flight(s, 0).context.state(), mean);
  }
  if (!last) losses_[d].release();
}

void Pipeline::share_overflow(size_t d) {
  const Tensor& number = workers_[d].overflow.number();
  if (d + 1 == workers_.size()) {
    for (Channel& channel : overflows_) channel.send(number);
    return;
  }
  number.home().copy(number.data(), overflows_[d].receive().data(), number.bytes());
  overflows_[d].release();
  bytes_expected_ += 2 * int64_t(number.bytes());  // there and back
}

// --- What it did ---------------------------------------------------------------------------------

std::vector<HealthTensor> Pipeline::healths() const {
  std::vector<HealthTensor> all;
  for (const Stage& stage : stages_) all.push_back(stage.optimizer.health());
  return all;
}

std::vector<int> Pipeline::live() const {
  std::vector<int> all;
  for (const Worker& worker : workers_) all.push_back(worker.most_live);
  return all;
}

double Pipeline::flops() const {
  double all = 0;
  for (const Stage& stage : stages_) {
    for (const InFlight& micro_batch : stage.in_flight) all += micro_batch.context.flops();
  }
  return all;
}

int64_t Pipeline::bytes_moved() const {
  int64_t bytes = 0;
  for (const auto* channels :
       {&activations_, &gradients_, &losses_, &overflows_to_last_, &overflows_}) {
    for (const Channel& channel : *channels) bytes += channel.bytes_sent();
  }
  return bytes;
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

void Pipeline::report(TrainingLog& log) {
  const int64_t steps = std::max<int64_t>(1, log.steps());
  const int devices = int(workers_.size()), chunks = int(network_->chunks());
  const double predicted = predicted_bubble(devices, options_.micro_batches, chunks);
  nlohmann::json all = nlohmann::json::array();
  for (int d = 0; d < devices; ++d) {
    Worker& worker = workers_[d];
    const std::vector<size_t> stages = network_->stages_on(size_t(d));
    const int expected =
        predicted_live(options_.schedule, devices, options_.micro_batches, d, chunks);
    size_t bytes = 0;
    for (const size_t s : stages) bytes += stages_[s].network.parameters->values().bytes();
    all.push_back({{"layers", network_->layers_text(stages)},
                   {"phase_seconds", worker.phases.seconds_json(steps)},
                   {"live", worker.most_live},
                   {"predicted_live", expected},
                   {"parameter_bytes", bytes}});
    log.note(network_->numbers_text(stages), network_->layers_text(stages), "stages", all);
    log.note("  ms per step", worker.phases.milliseconds_text(steps));
    log.note("  live", fmt::format("{} micro-batch{}{} (at most {})", worker.most_live,
                                   worker.most_live == 1 ? "" : "es",
                                   chunks == 1 ? "" : ", counted per stage", expected));
  }
  log.note("bubble",
           fmt::format("{:.1f} % of the time, {} = {:.1f} %", 100 * measured_bubble(),
                       bubble_formula(chunks), 100 * predicted),
           "bubble", {{"measured", measured_bubble()}, {"predicted", predicted}});
  log.note_copies(bytes_moved(), bytes_expected_);
}

}  // namespace lockstep
