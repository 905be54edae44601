// Mistakes that everybody makes once. Run each with the mistake, and without it.
//
//   build/03-model-split/labs send-before-receive
//   build/03-model-split/labs send-before-receive --fixed

#include <algorithm>

#include "03-model-split/pipeline/schedule.h"
#include "common/core/error.h"
#include "common/nn/layers.h"
#include "common/training/lab.h"

namespace lockstep {
namespace {

// --- Two stages that both send first -------------------------------------------------------------

/// In 1F1B the next activation comes in before a gradient goes out. With the mistake it is the
/// other way round. A send lasts until the receiver has come to its receive.
void send_before_receive(bool fixed) {
  std::vector<Instructions> schedules = make_schedules(ScheduleKind::one_f1b, 2, 4);
  Instructions& last = schedules[1];
  for (size_t i = 0; i + 1 < last.size() && !fixed; ++i) {
    if (last[i].kind == Instruction::Kind::receive_activation &&
        last[i + 1].kind == Instruction::Kind::send_gradient) {
      std::swap(last[i], last[i + 1]);
    }
  }
  const Timetable played = simulate(schedules, 1, 2, /*blocking_sends=*/true);
  say(fmt::format("all stages end after {} units of time; they wait for {:.0f} % of it",
                  played.makespan, 100 * played.bubble()));
}

// --- Activations that the next micro-batch overwrites --------------------------------------------

/// Two micro-batches forward, then both backward: with the mistake their inputs share one place.
void activations_overwritten(bool fixed) {
  constexpr int64_t kBatch = 16, kMicroBatch = 8;
  SmallTraining training;
  const HostBatch batch = training.first_batch(kBatch);
  training.forward_and_backward(batch, {{0, 1, kBatch}}, 1.0 / kBatch);
  const Numbers expected = numbers_of(training.parameters.gradients());

  const Stream stream = training.stream;
  std::vector<Tensor> places;  // inputs, as a channel keeps them
  for (int i = 0; i < (fixed ? 2 : 1); ++i) {
    places.push_back(Tensor::empty(stream, {kMicroBatch, 28, 28, 1}));
  }
  std::vector<LabelTensor> labels;
  std::vector<Context> contexts(2, Context(stream));
  training.parameters.zero_gradients();
  for (size_t i = 0; i < 2; ++i) {
    Context& context = contexts[i];
    context.begin_step({.loss_weight = Real(1) / kBatch});
    const BatchPart part{int64_t(i) * kMicroBatch, 1, kMicroBatch};
    const DeviceBatch& fed = training.feeder.feed(batch, part, context);
    const Tensor& place = places[i % places.size()];
    stream.copy(place.data(), training.feeder.normalize(fed, context).data(), place.bytes());
    labels.push_back(LabelTensor::empty(stream, {kMicroBatch}));
    stream.copy(labels[i].data(), fed.labels.data(), labels[i].bytes());
    training.model.loss->forward(training.model.network->forward(place, context), labels[i],
                                 training.loss, context);
  }
  for (size_t i = 0; i < 2; ++i) {
    training.model.network->backward(training.model.loss->backward(labels[i], contexts[i]),
                                     contexts[i]);
  }
  say(fmt::format("{} for the inputs of 2 micro-batches: relative error of the gradient {:.1e}",
                  fixed ? "2 places" : "1 place",
                  relative_error(numbers_of(training.parameters.gradients()), expected)));
}

// --- A bias on every part of a row-parallel layer ------------------------------------------------

/// Columns [first, first + count) of a matrix [rows, columns].
std::vector<Real> columns_of(const Tensor& matrix, int64_t first, int64_t count) {
  const std::vector<Real> all = matrix.to_host();
  const int64_t rows = matrix.shape()[0], columns = matrix.shape()[1];
  std::vector<Real> part;
  for (int64_t row = 0; row < rows; ++row) {
    const auto begin = all.begin() + row * columns + first;
    part.insert(part.end(), begin, begin + count);
  }
  return part;
}

/// y = x W^T + b, each device with half of x's columns and of W's: the sum of their products, then
/// b.
void bias_on_every_part(bool fixed) {
  constexpr int64_t kSamples = 4, kIn = 8, kOut = 3, kDevices = 2, kPart = kIn / kDevices;
  const Devices devices = open_devices(parse_devices("cpu:0,cpu:1"), {});
  const std::vector<Stream> streams = create_streams(devices, "compute");
  Linear whole(kIn, kOut);
  const FlatParameters parameters(whole, streams[0]);
  initialize(parameters, Initializer::kaiming_uniform, 1);
  std::vector<Real> values(kSamples * kIn);
  for (size_t i = 0; i < values.size(); ++i) values[i] = Real(i % 5) - 2;
  const Tensor x = Tensor::from_host(streams[0], {kSamples, kIn}, values);
  Context context(streams[0]);
  const Numbers expected = numbers_of(whole.forward(x, context));
  const Tensor weight = whole.parameters()[0]->value, bias = whole.parameters()[1]->value;

  Numbers sum(expected.size());
  for (int64_t part = 0; part < kDevices; ++part) {
    const Stream stream = streams[size_t(part)];
    Linear share(kPart, kOut);
    const FlatParameters mine(share, stream);
    const std::vector<Real> w = columns_of(weight, part * kPart, kPart), b = bias.to_host();
    stream.copy(share.parameters()[0]->value.data(), w.data(), w.size() * sizeof(Real));
    stream.copy(share.parameters()[1]->value.data(), b.data(), b.size() * sizeof(Real));
    Context own(stream);
    const Tensor y = share.product(
        Tensor::from_host(stream, {kSamples, kPart}, columns_of(x, part * kPart, kPart)), own);
    if (!fixed || part == 0) share.add_bias(y, own);  // of the sum: once
    const Numbers product = numbers_of(y);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += product[i];
  }
  const Numbers b = numbers_of(bias);
  const double off = std::abs((sum[0] - expected[0]) / b[0]);
  say(fmt::format("relative error of the output {:.1e}: off by {:.2f} times the bias",
                  relative_error(sum, expected), off));
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  using namespace lockstep;
  return run_labs(argc, argv,
                  {{"send-before-receive", send_before_receive},
                   {"activations-overwritten", activations_overwritten},
                   {"bias-on-every-part", bias_on_every_part}});
}
