#include "04-ddp/replica.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

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
                 bool broadcast_buffers)
    : module_(add_module("", std::move(module))),
      parameters_(parameters),
      comm_(comm),
      passes_(parameters.stream()),
      communication_(communication),
      all_reduce_(comm, kind, communication),
      broadcasts_buffers_(broadcast_buffers),
      own_health_(HealthTensor::from_host(passes_, {}, {Health{}})),
      pass_times_(passes_),
      communication_times_(communication_) {}

void Replica::broadcast_buffers() {
  if (broadcasts_buffers_ && buffers_are_old_ && !parameters_.buffers().empty()) {
    comm_.broadcast(passes_, parameters_.buffer_values(), 0);
  }
  buffers_are_old_ = false;
}

Tensor Replica::forward(const Tensor& x, Context& context) {
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
  if (comm_.world_size() > 1) {
    communication_.kernels().check_finite(communication_, state_, gradients, own_health_);
    communication_.kernels().scale(communication_, Real(1) / Real(comm_.world_size()), gradients);
  }
  all_reduce_(gradients);
  communication_times_.end("communication");
}

void Replica::finish_reduction() {
  pass_times_.end("compute");
  passes_.wait(communication_.record());  // the optimizer reads the sums
  pass_times_.end("exposed");
  pass_times_.stop();
  in_step_ = false;
  buffers_are_old_ = true;
}

StepTimes Replica::times(int64_t steps) {
  const double share = 1.0 / double(std::max<int64_t>(steps, 1));
  return {.compute = share * pass_times_.total("compute"),
          .communication = share * communication_times_.total("communication"),
          .exposed = share * pass_times_.total("exposed")};
}

}  // namespace lockstep
