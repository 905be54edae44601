#include "02-dataparallel/data_parallel.h"

#include "common/core/error.h"
#include "common/data/batch_parts.h"
#include "common/io/json.h"

namespace lockstep {

DataParallel::DataParallel(std::unique_ptr<Module> module, const FlatParameters& parameters,
                           const MakeReplica& make_replica, const std::vector<Stream>& streams)
    : phases_(streams.at(0)) {
  require(&parameters.stream().device() == &streams[0].device(),
          "DataParallel: the parameters lie on {}, the first device is {}; put them there first",
          parameters.stream().device().name(), streams[0].device().name());
  const Precision precision = parameters.precision();
  replicas_.push_back({streams[0], &add_module("", std::move(module)), &parameters, nullptr});
  for (size_t r = 1; r < streams.size(); ++r) {
    replica_modules_.push_back(make_replica());
    Module& replica = *replica_modules_.back();
    replica_parameters_.push_back(std::make_unique<FlatParameters>(replica, streams[r], precision));
    replica_contexts_.push_back(std::make_unique<Context>(streams[r], precision));
    replicas_.push_back(
        {streams[r], &replica, replica_parameters_.back().get(), replica_contexts_.back().get()});
  }
}

// --- The passes ----------------------------------------------------------------------------------

AnyTensor DataParallel::forward(const AnyTensor& x, Context& context) {
  root().context = &context;
  if (context.facts.training) {
    phases_.start();
  } else {
    phases_.stop();
    phases_.settle();  // evaluation may be long
  }
  const std::vector<AnyTensor> inputs = scatter(x);
  phases_.end("scatter");
  replicate();
  phases_.end("replicate");
  const std::vector<AnyTensor> outputs = parallel_apply(inputs);
  phases_.end("forward");
  AnyTensor y = gather(outputs);
  phases_.end("gather");
  if (context.facts.training) {
    const int64_t scores = y.shape().row_elements(), input = x.shape().row_elements();
    bytes_expected_ +=
        predicted_bytes(x.shape()[0], input * size_of(x.type()) + 2 * scores * size_of(y.type()));
  }
  return y;
}

AnyTensor DataParallel::backward(const AnyTensor& dy, Context& context) {
  root().context = &context;
  phases_.end("loss");
  parallel_backward(scatter(dy));
  phases_.end("backward");
  reduce_add();
  phases_.end("reduce");
  phases_.stop();
  return {};
}

// --- Phases --------------------------------------------------------------------------------------

std::vector<AnyTensor> DataParallel::scatter(const AnyTensor& x) {
  const ScopedRange range(root().stream, "scatter");  // its name in traces
  require(x.shape()[0] > 0,
          "DataParallel: a batch of 0 samples cannot be divided; give one or more");
  const BatchSplit chunks{BatchSplit::Kind::chunk, static_cast<int64_t>(replicas_.size())};
  const std::vector<BatchPart> parts = chunks.divide(x.shape()[0]);
  in_use_ = parts.size();
  std::vector<AnyTensor> scattered{x.rows(0, parts[0].count)};
  for (size_t r = 1; r < in_use_; ++r) {
    const AnyTensor part = x.rows(parts[r].first, parts[r].count);
    Context& context = *replicas_[r].context;
    context.facts = root().context->facts;
    context.facts.first_sample = parts[r].first;
    scattered.push_back(context.empty(part.shape(), part.type()));
    hand_back(r);
    copy(part, scattered.back());
    hand_over(r);
  }
  return scattered;
}

void DataParallel::replicate() {
  const ScopedRange range(root().stream, "replicate");
  for (size_t r = 1; r < in_use_; ++r) {
    const Replica& replica = replicas_[r];
    hand_back(r);
    copy(root().context->state(), replica.context->state());
    copy(root().parameters->values(), replica.parameters->values());
    copy(root().parameters->buffer_values(), replica.parameters->buffer_values());
    hand_over(r);
    replica.parameters->round();
  }
}

std::vector<AnyTensor> DataParallel::parallel_apply(const std::vector<AnyTensor>& inputs) {
  std::vector<AnyTensor> outputs;
  on_each_replica([&](Replica& replica, size_t r) {
    outputs.push_back(replica.module->forward(inputs[r], *replica.context));
  });
  return outputs;
}

AnyTensor DataParallel::gather(const std::vector<AnyTensor>& outputs) {
  const ScopedRange range(root().stream, "gather");
  // [task 02.2] gather
  if (in_use_ == 1) return outputs[0];
  Shape shape = outputs[0].shape();
  shape[0] = 0;
  for (const AnyTensor& output : outputs) shape[0] += output.shape()[0];
  AnyTensor gathered = root().context->empty(shape, outputs[0].type());
  int64_t first = 0;
  for (size_t r = 0; r < in_use_; ++r) {
    const int64_t rows = outputs[r].shape()[0];
    if (r > 0) hand_back(r);
    copy(outputs[r], gathered.rows(first, rows));
    if (r > 0) hand_over(r);
    first += rows;
  }
  return gathered;
  // [end 02.2]
}

void DataParallel::parallel_backward(const std::vector<AnyTensor>& output_gradients) {
  on_each_replica([&](Replica& replica, size_t r) {
    if (r > 0) replica.parameters->zero_gradients();  // the optimizer zeroes device 0's
    replica.module->backward(output_gradients[r], *replica.context);
    if (r > 0) root().parameters->marks().add(replica.parameters->marks());
  });
}

void DataParallel::reduce_add() {
  const ScopedRange range(root().stream, "reduce");
  // [task 02.3] reduce-add
  const Tensor& sum = root().parameters->gradients();
  const Tensor received = in_use_ > 1 ? root().context->empty(sum.shape()) : Tensor();
  for (size_t r = 1; r < in_use_; ++r) {
    hand_back(r);
    copy(replicas_[r].parameters->gradients(), received);
    hand_over(r);
    root().stream.kernels().add(root().stream, received, sum);
  }
  // [end 02.3]
}

// --- What the phases are made of -----------------------------------------------------------------

void DataParallel::hand_back(size_t r) { root().stream.wait(replicas_[r].stream.record()); }

void DataParallel::hand_over(size_t r) { replicas_[r].stream.wait(root().stream.record()); }

template <class From, class To>
void DataParallel::copy(const From& from, const To& to) {
  root().stream.copy(to.data(), from.data(), from.bytes());
  if (&from.home().device() != &to.home().device()) count_bytes(int64_t(from.bytes()));
}

void DataParallel::count_bytes(int64_t bytes) {
  if (root().context->facts.training) bytes_moved_ += bytes;
}

template <class Work>
void DataParallel::on_each_replica(Work work) {
  for (size_t r = 0; r < in_use_; ++r) {
    Replica& replica = replicas_[r];
    const double flops_before = replica.context->flops();
    within(fmt::format("replica {} on {}", r, replica.stream.device().name()),
           [&] { work(replica, r); });
    if (r > 0) root().context->add_flops(replica.context->flops() - flops_before);
  }
}

int64_t DataParallel::predicted_bytes(int64_t batch_size, int64_t bytes_per_sample) const {
  const int64_t devices = static_cast<int64_t>(replicas_.size());
  const std::vector<BatchPart> parts =
      BatchSplit{BatchSplit::Kind::chunk, devices}.divide(batch_size);
  const int64_t used = static_cast<int64_t>(parts.size());
  const FlatParameters& model = *replicas_[0].parameters;
  const int64_t model_bytes = static_cast<int64_t>(
      model.values().bytes() + model.buffer_values().bytes() + model.gradients().bytes());
  return (used - 1) * (model_bytes + int64_t{sizeof(StepState)}) +
         (batch_size - parts[0].count) * bytes_per_sample;
}

void DataParallel::report(TrainingLog& log) {
  const int64_t steps = std::max<int64_t>(1, log.steps());
  log.note("ms per step", phases_.milliseconds_text(steps), "phase_seconds",
           phases_.seconds_json(steps));
  log.note_copies(bytes_moved_, bytes_expected_);
}

}  // namespace lockstep
