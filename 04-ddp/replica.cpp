#include "04-ddp/replica.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "common/core/error.h"

namespace lockstep {

double StepTimes::hidden() const {
  return communication > 0 ? std::clamp(1 - exposed / communication, 0.0, 1.0) : 0;
}

double StepTimes::hand_over() const { return std::max(0.0, exposed - communication); }

std::string StepTimes::text(bool may_overlap) const {
  const std::string share =
      may_overlap && hidden() >= 0.005 ? fmt::format(" ({:.0f} % hidden)", 100 * hidden()) : "";
  return fmt::format("compute {:.2f}, communication {:.2f}{}, exposed {:.2f}, hand-over {:.2f}",
                     1e3 * compute, 1e3 * communication, share, 1e3 * (exposed - hand_over()),
                     1e3 * hand_over());
}

Replica::Replica(std::unique_ptr<Module> module, const FlatParameters& parameters,
                 Communicator& comm, Stream communication, AllReduceKind kind,
                 Compression compression, bool broadcast_buffers)
    : module_(add_module("", std::move(module))),
      parameters_(parameters),
      comm_(comm),
      passes_(parameters.stream()),
      communication_(communication),
      all_reduce_(comm, kind, communication),
      compression_(compression),
      messages_in_16_bits_(comm, communication),
      running_statistics_(comm, passes_, communication_, parameters.buffer_values(),
                          broadcast_buffers),
      own_health_(HealthTensor::from_host(passes_, {}, {Health{}})),
      pass_times_(passes_),
      communication_times_(communication_) {}

void require_same_network(const ExchangeTexts& exchange, const std::vector<Parameter*>& parameters,
                          const std::vector<ModelBuffer*>& buffers) {
  NamedValues facts;  // "parameter 0": "conv1.weight [10, 5, 5, 1]"
  const auto add = [&](const std::string& name, const Shape& shape) {
    facts.emplace_back(fmt::format("parameter {}", facts.size()), name + " " + shape.text());
  };
  for (const Parameter* p : parameters) add(p->name, p->shape);
  for (const ModelBuffer* b : buffers) add(b->name, b->shape);
  require_same(exchange, facts, "all ranks must build the same network");
}

void RunningStatistics::broadcast_buffers() {
  if (broadcasts_ && changed_ && values_.elements() > 0) {
    communication_.wait(passes_.record());  // the last pass has changed them
    comm_.broadcast(communication_, values_, 0);
    passes_.wait(communication_.record());
  }
  changed_ = false;
}

AnyTensor Replica::forward(const AnyTensor& x, Context& context) {
  if (context.facts.training) {
    broadcast_buffers();
    if (!in_step_) pass_times_.start();
    in_step_ = true;
    state_ = context.state();
  }
  return module_.forward(x, context);
}

void Replica::average_gradients(const Tensor& gradients) {
  communication_times_.start();
  const int64_t rounded = count_in_16_bits(gradients);
  const Tensor others = gradients.range(rounded, {gradients.elements() - rounded});
  if (comm_.world_size() > 1) {
    communication_.kernels().check_finite(communication_, state_, gradients, own_health_);
    communication_.kernels().scale(communication_, Real(1) / Real(comm_.world_size()), others);
  }
  if (rounded > 0) {
    const CallPurpose purpose(comm_, Purpose::gradients);
    messages_in_16_bits_.all_reduce(Real(1) / Real(comm_.world_size()),
                                    gradients.range(0, {rounded}));
  }
  if (others.elements() > 0) all_reduce_(others);
  communication_times_.end("communication");
}

/// The first numbers of the part: not the loss and the marks, which follow the last gradient. One
/// rank sends nothing, and rounds nothing.
int64_t Replica::count_in_16_bits(const Tensor& part) const {
  if (compression_ == Compression::none || comm_.world_size() == 1) return 0;
  const int64_t first = part.data() - parameters_.contribution().data();
  return std::clamp<int64_t>(parameters_.gradients().elements() - first, 0, part.elements());
}

void Replica::finish_reduction() {
  pass_times_.end("compute");
  passes_.wait(communication_.record());  // the optimizer reads the sums
  pass_times_.end("exposed");
  pass_times_.stop();
  in_step_ = false;
  running_statistics_.mark_changed();
}

StepTimes Replica::times(int64_t steps) {
  const double share = 1.0 / double(std::max<int64_t>(steps, 1));
  return {.compute = share * pass_times_.total("compute"),
          .communication = share * communication_times_.total("communication"),
          .exposed = share * pass_times_.total("exposed")};
}

}  // namespace lockstep
