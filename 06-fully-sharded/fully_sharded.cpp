#include "06-fully-sharded/fully_sharded.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "common/core/error.h"
#include "common/nn/state_dict.h"
#include "common/training/weights_file.h"

namespace lockstep {
namespace {

/// The layers of `network`, one after another.
Layers layers_of(Module& network) {
  auto* const sequence = dynamic_cast<Sequential*>(&network);
  require(sequence != nullptr,
          "the network is no Sequential, expected one: units are cut between its layers");
  return sequence->release_layers();
}

std::vector<Parameter*> in_order(const std::vector<Unit*>& units) {
  std::vector<Parameter*> all;
  for (const Unit* unit : units) {
    all.insert(all.end(), unit->in_order().begin(), unit->in_order().end());
  }
  return all;
}

}  // namespace

FullyShardedDataParallel::FullyShardedDataParallel(std::unique_ptr<Module> network, Stream passes,
                                                   Communicator& comm,
                                                   const ExchangeTexts& exchange,
                                                   Stream communication,
                                                   const ShardingOptions& options,
                                                   Communicator* replicas)
    : options_(options),
      messages_{.kind = options.kind,
                .comm = comm,
                .passes = passes,
                .communication = communication,
                .replicas = replicas,
                .types = options.messages,
                .precision = options.precision},
      units_(make_units(layers_of(*network), options.unit)),
      buffers_(*this, passes),
      running_statistics_(comm, passes, communication, buffers_.values(),
                          options.broadcast_buffers),
      loss_and_marks_(Tensor::empty(passes, {1 + int64_t(parameters().size()) + scales_loss()})),
      marks_(in_order(units_), loss_and_marks_.range(1, {int64_t(parameters().size())})),
      own_health_(HealthTensor::from_host(passes, {}, {Health{}})) {
  if (scales_loss()) {
    overflow_ = OverflowNumber(loss_and_marks_.range(loss_and_marks_.elements() - 1, {1}));
  }
  gradient_health_ = scales_loss() ? overflow_.found() : own_health_;
  require_same_network(exchange, parameters(), buffers());
  require(count() > 0, "rank {}: a network without parameters has nothing to be shared out",
          comm.rank());
  if (replicas) {
    statistics_of_replicas_.emplace(*replicas, passes, communication, buffers_.values(),
                                    options.broadcast_buffers);
  }
  broadcast_buffers();
}

std::vector<Unit*> FullyShardedDataParallel::make_units(Layers layers, UnitSize size) {
  std::vector<Unit*> units;
  for (Layers& of_unit : divide_into_units(std::move(layers), size)) {
    const std::string name = name_of_unit(of_unit);
    units.push_back(&add_module(name, std::make_unique<Unit>(std::move(of_unit), messages_)));
  }
  return units;
}

int64_t FullyShardedDataParallel::count() {
  int64_t count = 0;
  for (const Parameter* p : parameters()) count += p->shape.elements();
  return count;
}

// --- The passes ----------------------------------------------------------------------------------

/// Brings in the whole values of unit `at` and starts to fetch those after it, in the direction of
/// the pass (1: forward, -1: backward). A gather that is enqueued here, before the unit's own
/// layers, is under way while they compute; it begins when the layers before them have ended.
void FullyShardedDataParallel::fetch(size_t at, int direction) {
  units_[at]->gather();
  const int64_t units = std::ssize(units_);
  for (int64_t ahead = 1; ahead <= options_.prefetch; ++ahead) {
    const int64_t next = int64_t(at) + direction * ahead;
    if (next >= 0 && next < units) units_[size_t(next)]->gather();
  }
  units_[at]->await_values();
  units_[at]->round_values();
}

AnyTensor FullyShardedDataParallel::forward(const AnyTensor& x, Context& context) {
  const bool training = context.facts.training;
  messages_.counts = training;
  if (training) {
    broadcast_buffers();
    if (!in_step_) messages_.pass_times.start();
    in_step_ = true;
    state_ = context.state();
  }
  AnyTensor y = x;
  for (size_t i = 0; i < units_.size(); ++i) {
    fetch(i, 1);
    const ScopedRange range(context.stream(), units_[i]->name());  // in traces
    y = units_[i]->forward(y, context);
    if (options_.reshard_after_forward || !training) units_[i]->free_values();
  }
  return y;
}

AnyTensor FullyShardedDataParallel::backward(const AnyTensor& dy, Context& context) {
  const bool reduces = context.facts.last_contribution;
  AnyTensor dx = dy;
  for (size_t i = units_.size(); i-- > 0;) {
    fetch(i, -1);
    const ScopedRange range(context.stream(), units_[i]->name());
    units_[i]->provide_gradients();
    dx = units_[i]->backward(dx, context);
    units_[i]->free_values();
    if (!reduces) continue;
    units_[i]->reduce_gradients(state_, gradient_health_);
    // One unit late: the passes need not wait for this reduction before they go on.
    if (i + 1 < units_.size()) units_[i + 1]->free_gradients();
  }
  if (!reduces) return dx;
  units_.front()->free_gradients();
  average_loss();
  messages_.pass_times.stop();
  in_step_ = false;
  running_statistics_.mark_changed();
  if (statistics_of_replicas_) statistics_of_replicas_->mark_changed();
  return dx;
}

/// The first group of shards gets them from the first of the replicas, and then all of a group from
/// its own first rank: rank 0's reach all.
void FullyShardedDataParallel::broadcast_buffers() {
  if (statistics_of_replicas_) statistics_of_replicas_->broadcast_buffers();
  running_statistics_.broadcast_buffers();
}

/// The loss and the marks are the last message of a step. A rank whose contribution was not finite
/// makes it NaN: the shards in which that shows are on other ranks, but all must stop. In fp16
/// all must skip the step if the gradients of one have overflowed: another number becomes NaN then.
void FullyShardedDataParallel::average_loss() {
  const Stream communication = messages_.communication;
  Kernels& kernels = communication.kernels();
  communication.wait(messages_.passes.record());
  kernels.check_finite(communication, state_, loss(), own_health_);
  kernels.poison(communication, own_health_, loss());
  if (scales_loss()) overflow_.write(communication);
  marks_.write(communication);
  kernels.scale(communication, Real(1) / Real(messages_.averaged()), loss_and_marks_);
  messages_.measure(Purpose::other,
                    [&] { messages_.comm.all_reduce(communication, loss_and_marks_); });
  messages_.await(communication.record());
  messages_.add_replicas(Purpose::other, loss_and_marks_);
  if (messages_.replicas) messages_.await_replicas(communication.record());
}

void FullyShardedDataParallel::gather_parameters() {
  for (Unit* unit : units_) unit->shard_was_updated();
  if (messages_.shards(ShardKind::parameters)) return;
  for (Unit* unit : units_) unit->gather();
}

// --- Values and what this rank keeps of them -----------------------------------------------------

void FullyShardedDataParallel::load_units(const std::function<void(Unit&)>& set) {
  for (Unit* unit : units_) {
    unit->begin_loading();
    set(*unit);
    unit->end_loading();
  }
}

void FullyShardedDataParallel::visit_units(const std::function<void(Unit&)>& use) {
  messages_.counts = false;
  messages_.exact = true;
  for (Unit* unit : units_) {
    unit->free_values();  // that an interrupted pass has left, rounded
    unit->gather();
    unit->await_values();
    use(*unit);
    unit->free_values();
  }
  messages_.exact = false;
}

void FullyShardedDataParallel::initialize(Initializer initializer, uint64_t seed) {
  load_units([&](Unit& unit) { lockstep::initialize(unit.in_order(), initializer, seed); });
}

std::vector<UpdatedRange> FullyShardedDataParallel::shards() const {
  std::vector<UpdatedRange> shards;
  int64_t parameters = 0;  // of the units before
  for (const Unit* unit : units_) {
    const std::vector<Stretch> all = unit->stretches(parameters);
    shards.push_back(
        {unit->value_shard(), unit->gradient_shard(),
         BasicTensor<Stretch>::from_host(messages_.passes, {int64_t(all.size())}, all)});
    parameters += int64_t(unit->in_order().size());
  }
  return shards;
}

Optimizer FullyShardedDataParallel::optimizer(const OptimizerRule& rule) const {
  std::vector<Tensor> zeroed{loss_and_marks_};
  for (const Unit* unit : units_) {
    if (!messages_.shards(ShardKind::gradients)) zeroed.push_back(unit->gradients());
  }
  return Optimizer(messages_.passes, shards(), rule, zeroed, marks_, overflow_.number());
}

ClipByNorm FullyShardedDataParallel::clip_by_norm(double most) const {
  return ClipByNorm(messages_.passes, shards(), most,
                    [this](const Tensor& squares) { sum_over_shards(squares); });
}

void FullyShardedDataParallel::sum_over_shards(const Tensor& squares) const {
  // [task 06.4] the norm over shards
  if (!messages_.shards(ShardKind::optimizer)) return;  // all ranks have all gradients
  messages_.communication.wait(messages_.passes.record());
  messages_.comm.all_reduce(messages_.communication, squares);
  messages_.passes.wait(messages_.communication.record());
  // [end 06.4]
}

StepTimes FullyShardedDataParallel::times(int64_t steps) {
  const double share = 1.0 / double(std::max<int64_t>(steps, 1));
  return {.compute = share * messages_.pass_times.total("compute"),
          .communication = share * messages_.communication_times.total("communication"),
          .exposed = share * (seconds_waited() + seconds_waited_for_replicas())};
}

double FullyShardedDataParallel::seconds_waited() { return messages_.pass_times.total("exposed"); }

double FullyShardedDataParallel::seconds_waited_for_replicas() {
  return messages_.pass_times.total("exposed, replicas");
}

// --- Whole weights in files ----------------------------------------------------------------------

namespace {

/// On rank 0: an open file, and where in it each tensor is.
struct OpenWeights {
  OpenWeights(const std::string& path, FullyShardedDataParallel& network) : file(path) {
    within(path, [&] { check_state_dict(network, file.tensors()); });
    for (size_t i = 0; i < file.tensors().size(); ++i) place[file.tensors()[i].name] = i;
  }
  StateTensor read(const std::string& name) const { return file.read(place.at(name)); }

  WeightsFile file;
  std::map<std::string, size_t> place;
};

/// Running statistics and counters, which are no parameters.
void load_running(const OpenWeights& weights, FullyShardedDataParallel& network) {
  std::map<std::string, StateTensor> running;
  for (const auto& [name, place] : weights.place) running.emplace(name, StateTensor{.name = name});
  for (const Parameter* p : network.parameters()) running.erase(p->name);
  for (auto& [name, tensor] : running) tensor = weights.read(name);
  load_running_state(network, running);
}

}  // namespace

void load_weights(ProcessGroup& group, Communicator& comm, const std::string& path,
                  FullyShardedDataParallel& network) {
  if (path.empty()) return;
  std::optional<OpenWeights> weights;  // on rank 0
  group.together([&] {
    if (group.rank() == 0) weights.emplace(path, network);
  });
  network.load_units([&](Unit& unit) {
    group.together([&] {
      if (!weights) return;
      for (Parameter* p : unit.in_order()) {
        p->value.copy_from_host(from_torch_layout(*p, weights->read(p->name).real));
      }
    });
    comm.broadcast(unit.values().home(), unit.values(), 0);
  });
  group.together([&] {
    if (!weights) return;
    load_running(*weights, network);
    weights->file.say_loaded();
  });
  const Tensor& statistics = network.running_statistics().values();
  if (statistics.elements() > 0) comm.broadcast(statistics.home(), statistics, 0);
}

void save_weights(ProcessGroup& group, const std::string& path, FullyShardedDataParallel& network) {
  if (path.empty()) return;
  const bool writes = group.rank() == 0;
  std::vector<StateTensor> state;
  network.visit_units([&](Unit& unit) {
    for (const Parameter* p : unit.parameters()) {
      if (writes) state.push_back(state_of(*p));
    }
  });
  group.together([&] {
    if (!writes) return;
    for (StateTensor& tensor : running_state(network)) state.push_back(std::move(tensor));
    save_weights(path, state);
  });
}

}  // namespace lockstep
