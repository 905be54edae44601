#include "04-ddp/manual_ddp.h"

namespace lockstep {

void broadcast_parameters(const FlatParameters& parameters, Communicator& comm) {
  for (const Parameter* p : parameters.parameters()) {
    comm.broadcast(parameters.stream(), p->value, 0);
  }
}

ManualDdp::ManualDdp(std::unique_ptr<Module> module, const FlatParameters& parameters,
                     Communicator& comm, Stream communication, AllReduceKind kind,
                     Compression compress)
    : Replica(std::move(module), parameters, comm, communication, kind, compress,
              /*broadcast_buffers=*/true) {
  broadcast_parameters(parameters, comm);
  broadcast_buffers();
}

AnyTensor ManualDdp::backward(const AnyTensor& dy, Context& context) {
  Tensor dx = module_.backward(dy, context);
  if (!context.facts.last_contribution) return dx;
  communication_.wait(passes_.record());  // the gradients are complete
  for (const Parameter* p : parameters_.parameters()) average_gradients(p->grad);
  parameters_.marks().write(communication_);
  const Tensor& all = parameters_.contribution();
  const int64_t sent = parameters_.gradients().elements();
  average_gradients(all.range(sent, {all.elements() - sent}));  // the loss and the marks
  finish_reduction();
  return dx;
}

}  // namespace lockstep
