#include "04-ddp/ddp.h"

#include <algorithm>
#include <functional>

#include "common/core/error.h"
#include "common/core/text.h"

namespace lockstep {

DistributedDataParallel::DistributedDataParallel(std::unique_ptr<Module> module,
                                                 const FlatParameters& parameters,
                                                 Communicator& comm, const ExchangeTexts& exchange,
                                                 Stream communication,
                                                 const ReplicaOptions& options)
    : Replica(std::move(module), parameters, comm, communication, options.all_reduce,
              options.compress, options.broadcast_buffers),
      options_(options),
      in_order_(parameters.parameters().rbegin(), parameters.parameters().rend()),
      ready_(in_order_.size(), false) {
  require_same_network(exchange, parameters_.parameters(), parameters_.buffers());
  require(!in_order_.empty(), "rank {}: a network without parameters has nothing to be reduced",
          comm_.rank());
  std::vector<int64_t> bytes;
  for (size_t i = 0; i < in_order_.size(); ++i) {
    bytes.push_back(static_cast<int64_t>(in_order_[i]->grad.bytes()));
    in_order_[i]->on_gradient_ready =
        std::bind_front(&DistributedDataParallel::gradient_is_ready, this, i);
  }
  buckets_ = make_buckets(bytes, options.buckets.caps());
  comm_.broadcast(parameters_.stream(), parameters_.values(), 0);
  Replica::broadcast_buffers();
}

// --- The passes ----------------------------------------------------------------------------------

AnyTensor DistributedDataParallel::backward(const AnyTensor& dy, Context& context) {
  if (!context.facts.last_contribution) return module_.backward(dy, context);
  running_ = true;
  Tensor dx = module_.backward(dy, context);
  reduce_the_rest();
  return dx;
}

// --- The reduction -------------------------------------------------------------------------------

/// Called on the host, between the enqueuing of two layers' backward: what is enqueued here comes
/// after the kernels that make this gradient and before those that make the next ones.
void DistributedDataParallel::gradient_is_ready(size_t place, const Parameter& parameter) {
  require(
      running_,
      "rank {}: a gradient of {} outside the wrapper's backward, where nothing reduces it; call "
      "backward of the wrapper, or make the pass one that is not the last contribution",
      comm_.rank(), parameter.name);
  require(!ready_[place], "rank {}: a second gradient of {} in one backward; use every layer once",
          comm_.rank(), parameter.name);
  ready_[place] = true;
  if (!options_.no_overlap) reduce_complete_buckets();
}

/// Starts the reductions, reduce(bucket), of the buckets from `next_` on whose gradients are all
/// `ready_`, and moves `next_` past them. Called on the host at every gradient, and once more after
/// backward; backward sets `next_` back to 0 when it has ended.
///
/// The buckets are reduced in their order, even if a later one is complete first: so all ranks make
/// the same calls. A gradient is ready when its kernels are enqueued on `passes_`, the stream of
/// the passes; they may not have run yet. An event makes the stream `communication_` wait until
/// they have run. Neither the host nor `passes_` waits: backward goes on with earlier layers.
void DistributedDataParallel::reduce_complete_buckets() {
  // [task 04.3] gradient hook
  for (; next_ < buckets_.size(); ++next_) {
    const std::vector<size_t>& members = buckets_[next_].parameters;
    if (!std::all_of(members.begin(), members.end(), [&](size_t i) { return ready_[i]; })) return;
    communication_.wait(passes_.record());  // its gradients are complete
    reduce(buckets_[next_]);
  }
  // [end 04.3]
}

void DistributedDataParallel::reduce(const Bucket& bucket) {
  const ScopedRange range(communication_, fmt::format("bucket {}", &bucket - buckets_.data()));
  // From the first to the last gradient of the bucket: they are contiguous, with gaps that hold
  // zeros. After the very last one come the loss and the marks.
  const Tensor &first = in_order_[bucket.parameters.front()]->grad,
               &last = in_order_[bucket.parameters.back()]->grad;
  const Tensor& all = parameters_.contribution();
  const int64_t begin = first.data() - all.data();
  const bool is_last = bucket.parameters.back() + 1 == in_order_.size();
  const int64_t end = is_last ? all.elements() : last.data() - all.data() + last.elements();
  if (is_last) parameters_.marks().write(communication_);
  average_gradients(all.range(begin, {end - begin}));
}

void DistributedDataParallel::reduce_the_rest() {
  running_ = false;
  std::vector<std::string> missing;
  for (size_t i = 0; i < in_order_.size(); ++i) {
    if (!ready_[i]) missing.push_back(in_order_[i]->name);
  }
  require(missing.empty() || options_.find_unused_parameters,
          "rank {}: no gradient of {} in this backward; leave such layers out of the network, or "
          "allow that (--find-unused-parameters)",
          comm_.rank(), listed(missing));
  std::fill(ready_.begin(), ready_.end(), true);
  reduce_complete_buckets();
  std::fill(ready_.begin(), ready_.end(), false);
  next_ = 0;
  finish_reduction();
}

}  // namespace lockstep
