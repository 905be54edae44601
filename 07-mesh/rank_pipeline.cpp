#include "07-mesh/rank_pipeline.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "03-model-split/pipeline/staged_network.h"
#include "06-fully-sharded/unit.h"
#include "common/core/device.h"
#include "common/core/error.h"

namespace lockstep {

// --- Where to cut --------------------------------------------------------------------------------

std::map<std::string, double> flops_of_layers(const ModelOptions& options, Stream stream) {
  const Model model = make_model(options);
  const Layers layers = dynamic_cast<Sequential&>(*model.network).release_layers();
  const Shape images{2, options.height, options.width_pixels, options.channels};
  std::map<std::string, double> flops;
  for (const LayerCost& cost : probe_layers(layers, images, stream)) flops[cost.name] = cost.flops;
  return flops;
}

std::vector<Layers> cut_into_stages(Layers layers, const std::map<std::string, double>& flops,
                                    int stages) {
  std::vector<Layers> units = divide_into_units(std::move(layers), {UnitSize::Kind::layer});
  require(stages <= std::ssize(units),
          "{} stages are more than the network's {} layers with parameters, and each stage needs "
          "one; give at most that number",
          stages, units.size());
  std::vector<double> costs;
  for (const Layers& unit : units) {
    costs.push_back(0);
    for (const auto& layer : unit) {
      const auto found = flops.find(layer->name());  // the layers that split it inside have none
      if (found != flops.end()) costs.back() += found->second;
    }
  }
  Cuts ends = balanced_cuts(costs, stages);
  ends.push_back(units.size());
  std::vector<Layers> cut(1);
  for (size_t u = 0; u < units.size(); ++u) {
    if (u == ends[cut.size() - 1]) cut.emplace_back();
    std::ranges::move(units[u], std::back_inserter(cut.back()));
  }
  return cut;
}

// --- Messages ------------------------------------------------------------------------------------

namespace {

constexpr size_t kPlaces = 2;       // of a receiver
constexpr size_t kMostExtents = 4;  // [N,H,W,C], [N,F]

}  // namespace

StageLink::StageLink(DeviceMesh& mesh, Stream passes, const std::string& name, int most_under_way)
    : mesh_(mesh),
      name_(name),
      passes_(passes),
      stream_(mesh.device().create_stream(name)),
      comm_(mesh.new_group({Axis::pipeline})),
      most_under_way_(size_t(most_under_way)),
      places_(kPlaces),
      waits_(passes) {
  comm_->replace_label(name);  // errors name it
}

StageLink::~StageLink() {
  if (!under_way_.empty()) passes_.wait(under_way_.back().arrived);
  stream_.wait(passes_.record());  // the places are freed in this stream's order
}

void StageLink::send(const AnyTensor& x, int to, const Context& context) {
  if (!told_.defined()) tell_extents(x, to);
  if (under_way_.size() == most_under_way_) {
    passes_.wait(under_way_.front().arrived);  // the memory is used again in their order
    under_way_.pop_front();
  }
  const bool training = context.facts.training;
  const CallPurpose counted(*comm_, training ? Purpose::activations : Purpose::other);
  if (training) bytes_by_sizes_ += int64_t(x.bytes());
  stream_.wait(passes_.record());  // x is there
  comm_->send(stream_, x, to);
  under_way_.push_back({x, stream_.record()});
}

void StageLink::await_sent(const Context& context) {
  if (!under_way_.empty()) await(under_way_.back().arrived, context);  // it is the last one
  under_way_.clear();
}

/// The passes wait; in training that time is measured.
void StageLink::await(const Event& arrived, const Context& context) {
  if (context.facts.training) waits_.start();
  passes_.wait(arrived);
  waits_.end("waited");
  waits_.stop();
}

AnyTensor StageLink::receive(int64_t samples, int from, Context& context) {
  if (learnt_.axes() == 0) learn_extents(samples, from);
  Shape shape = learnt_;
  shape[0] = samples;
  Place& place = places_[received_++ % places_.size()];
  if (place.emptied) stream_.wait(*place.emptied);
  if (!place.memory.defined() || place.memory.elements() < shape.elements()) {
    place.memory = AnyTensor::empty(stream_, shape, type_of(context.precision()));
  }
  const AnyTensor arrived = place.memory.range(0, shape);
  AnyTensor x = context.activation(shape);
  comm_->receive(stream_, arrived, from);
  await(stream_.record(), context);
  passes_.copy(x.data(), arrived.data(), x.bytes());
  place.emptied = passes_.record();
  return x;
}

void StageLink::tell_extents(const AnyTensor& x, int to) {
  std::vector<int64_t> extents = x.shape().extents();
  require(extents.size() <= kMostExtents, "pipeline: an activation {}, expected at most {} extents",
          x.shape().text(), kMostExtents);
  extents.resize(kMostExtents, 0);
  told_ = CountTensor::from_host(stream_, {kMostExtents}, extents);
  comm_->send(stream_, told_, to);
}

/// Ranks of other stages that have other samples would take one message for another.
void StageLink::learn_extents(int64_t samples, int from) {
  const auto told = CountTensor::empty(stream_, {kMostExtents});
  comm_->receive(stream_, told, from);
  std::vector<int64_t> extents = told.to_host();
  require(
      extents[0] == samples,
      "{}: the first {} from stage {} have {} samples, expected {}, which this rank has loaded; "
      "ranks along pipeline load the same, by their place along data and shard",
      mesh_.group().store().name_of(mesh_.group().rank()), name_, from, extents[0], samples);
  extents[0] = 1;  // the others are not 0
  std::erase(extents, 0);
  learnt_ = Shape(extents);
}

// --- A stage -------------------------------------------------------------------------------------

namespace {

using Kind = Instruction::Kind;

Instructions passes_of(const PipelinePlan& plan, int stages, int stage) {
  Instructions list = make_schedule(plan.schedule, stages, plan.micro_batches, stage);
  std::erase(list, Instruction{Kind::step});
  return list;
}

/// Scores have 16 bits where the network does not end with log-softmax.
Tensor in_float32(const AnyTensor& scores, Context& context) {
  if (scores.type() == kTypeOf<Real>) return Tensor(scores);
  const Tensor wide = context.empty(scores.shape());
  context.kernels().from_sixteen_bits(context.stream(), scores, wide);
  return wide;
}

}  // namespace

RankPipeline::RankPipeline(std::unique_ptr<Module> stage, DeviceMesh& mesh, Stream passes,
                           Stream communication, const PipelinePlan& plan, int64_t classes,
                           const Tensor& loss)
    : stage_(mesh.coordinate(Axis::pipeline)),
      calls_(mesh.along({Axis::pipeline}), communication),
      list_(passes_of(plan, mesh.size(Axis::pipeline), stage_)),
      activations_(mesh, passes, "activations", most_live(list_, 0)),
      gradients_(mesh, passes, "gradients", kGradientPlaces),
      classes_(classes),
      loss_(loss) {
  add_module("", std::move(stage));
}

AnyTensor RankPipeline::forward(const AnyTensor& x, Context& context) {
  if (!context.facts.training) return evaluate(x, context);
  const int number = forwards_given_++;
  in_flight_.emplace(
      number,
      InFlight{.context = context, .samples = x.shape()[0], .input = is_first() ? x : AnyTensor()});
  follow(context);
  return is_last() ? std::exchange(in_flight_.at(number).output, {}) : AnyTensor();
}

AnyTensor RankPipeline::backward(const AnyTensor& dy, Context& context) {
  const int number = backwards_given_++;
  if (is_last()) in_flight_.at(number).output_gradient = dy;
  follow(context);
  if (next_ == list_.size()) end_step(context);
  return {};
}

/// Whether the training loop has given what the instruction needs of it.
bool RankPipeline::can_run(const Instruction& instruction) const {
  const bool needs_gradient = is_last() && instruction.kind == Kind::backward;
  return instruction.micro_batch < (needs_gradient ? backwards_given_ : forwards_given_);
}

void RankPipeline::follow(Context& context) {
  for (; next_ < list_.size() && can_run(list_[next_]); ++next_) {
    const Context& own = in_flight_.at(list_[next_].micro_batch).context;
    const double before = own.flops();
    run(list_[next_]);
    context.add_flops(own.flops() - before);
    const bool passed_on = list_[next_].kind == (is_first() ? Kind::backward : Kind::send_gradient);
    if (passed_on) in_flight_.erase(list_[next_].micro_batch);
  }
}

void RankPipeline::run(const Instruction& instruction) {
  auto& [context, samples, input, output, output_gradient, input_gradient] =
      in_flight_.at(instruction.micro_batch);
  const ScopedRange range(context.stream(),
                          fmt::format("{} {}", name_of(instruction.kind), instruction.micro_batch));
  switch (instruction.kind) {
    case Kind::receive_activation:
      input = activations_.receive(samples, stage_ - 1, context);
      break;
    case Kind::forward:
      output = layers().forward(std::exchange(input, {}), context);
      break;
    case Kind::send_activation:
      activations_.send(std::exchange(output, {}), stage_ + 1, context);
      break;
    case Kind::receive_gradient:
      output_gradient = gradients_.receive(samples, stage_ + 1, context);
      break;
    case Kind::backward:
      input_gradient = layers().backward(std::exchange(output_gradient, {}), context);
      break;
    case Kind::send_gradient:
      gradients_.send(std::exchange(input_gradient, {}), stage_ - 1, context);
      break;
    case Kind::step:
      break;
  }
}

/// Without a list: a batch passes through all stages before the next one comes.
AnyTensor RankPipeline::evaluate(const AnyTensor& x, Context& context) {
  const int64_t samples = x.shape()[0];
  const AnyTensor y = layers().forward(
      is_first() ? x : activations_.receive(samples, stage_ - 1, context), context);
  if (!is_last()) activations_.send(y, stage_ + 1, context);
  activations_.await_sent(context);
  const Tensor scores = is_last() ? in_float32(y, context) : context.empty({samples, classes_});
  Communicator& comm = calls_.comm();
  calls_.run("scores", Purpose::other, context,
             [&](Stream stream) { comm.broadcast(stream, scores, comm.world_size() - 1); });
  return scores;
}

/// A loss that is not finite is so on all ranks then: none of them moves.
void RankPipeline::end_step(Context& context) {
  activations_.await_sent(context);
  gradients_.await_sent(context);
  calls_.run("loss", Purpose::other, context,
             [&](Stream stream) { calls_.comm().all_reduce(stream, loss_); });
  next_ = 0;
  forwards_given_ = backwards_given_ = 0;
}

double RankPipeline::seconds_waited() {
  return activations_.seconds_waited() + gradients_.seconds_waited() + calls_.seconds_waited();
}

// --- In a model ----------------------------------------------------------------------------------

namespace {

/// Of a stage that has no scores in training; in evaluation it has the last stage's.
class LossOfOthers final : public Loss {
 public:
  explicit LossOfOthers(std::unique_ptr<Loss> whole) : whole_(std::move(whole)) {}

  void forward(const AnyTensor& scores, const LabelTensor& labels, const Tensor& loss,
               Context& context) override {
    if (!context.facts.training) whole_->forward(scores, labels, loss, context);
  }
  AnyTensor backward(const LabelTensor&, Context&) override { return {}; }

 private:
  std::unique_ptr<Loss> whole_;
};

}  // namespace

RankPipeline& make_stage(Model& model, DeviceMesh& mesh, Stream passes, Stream communication,
                         const PipelinePlan& plan, int64_t classes, const Tensor& loss) {
  auto& stage = model.wrap<RankPipeline>(mesh, passes, communication, plan, classes, loss);
  if (!stage.is_last()) model.loss = std::make_unique<LossOfOthers>(std::move(model.loss));
  return stage;
}

}  // namespace lockstep
