// Mistakes that everybody makes once. Run each with the mistake, and without it.
//
//   build/02-dataparallel/labs mean-of-means
//   build/02-dataparallel/labs mean-of-means --fixed

#include <chrono>
#include <thread>

#include "common/core/stream_backend.h"
#include "common/data/batch_parts.h"
#include "common/training/lab.h"

namespace lockstep {
namespace {

constexpr double kRate = 0.1;

Numbers gradient_of(SmallTraining& training, const HostBatch& batch, const BatchPart& part,
                    double weight) {
  training.forward_and_backward(batch, {part}, weight, kRate);
  return numbers_of(training.parameters.gradients());
}

void add(const Numbers& more, Numbers& sum) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += more.at(i);
}

/// The values of one tensor, on another device.
void copy(const Tensor& from, const Tensor& to) {
  const std::vector<Real> values = from.to_host();
  to.home().copy(to.data(), values.data(), to.bytes());
  to.home().synchronize();
}

// --- A stream that does not wait for another -----------------------------------------------------

/// Device 0 takes the gradient that device 1 computes.
void missing_hand_back(bool fixed) {
  const Devices devices = open_devices(parse_devices("cpu:0,cpu:1"), {});
  const std::vector<Stream> streams = create_streams(devices, "compute");
  const Tensor gradient = Tensor::from_host(streams[1], {1}, {0});
  const Tensor received = Tensor::from_host(streams[0], {1}, {0});
  for (const Stream& stream : streams) stream.synchronize();
  streams[1].backend().host_task(
      "backward", [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
  streams[1].kernels().fill(streams[1], 1, gradient);
  if (fixed) streams[0].wait(streams[1].record());  // hand_back()
  streams[0].copy(received.data(), gradient.data(), gradient.bytes());
  say(fmt::format("device 0 adds {} as the gradient of device 1, which is {}",
                  received.to_host()[0], gradient.to_host()[0]));
}

// --- A replica that keeps its first weights ------------------------------------------------------

/// Two devices train on halves of a batch, beside one that takes it whole.
void stale_replica(bool fixed) {
  constexpr int64_t kBatch = 32;
  SmallTraining whole(0), root(0), replica(1);
  const HostBatch batch = whole.first_batch(kBatch);
  const BatchPart first{0, 1, kBatch / 2}, second{kBatch / 2, 1, kBatch / 2};
  for (int64_t step = 0; step < 5; ++step) {
    if (fixed) copy(root.parameters.values(), replica.parameters.values());  // replicate()
    const Numbers expected = gradient_of(whole, batch, {0, 1, kBatch}, 1.0 / kBatch);
    Numbers sum = gradient_of(root, batch, first, 1.0 / kBatch);
    add(gradient_of(replica, batch, second, 1.0 / kBatch), sum);
    say(fmt::format("step {}: relative error of the gradient {:.1e}", step,
                    relative_error(sum, expected)));
    const std::vector<Real> gradient(sum.begin(), sum.end());
    copy(Tensor::from_host(root.stream, {std::ssize(gradient)}, gradient),
         root.parameters.gradients());
    for (SmallTraining* training : {&whole, &root}) training->update();
  }
}

// --- A mean of means -----------------------------------------------------------------------------

/// A batch of 10 on 3 devices: 4, 4 and 2 samples.
void mean_of_means(bool fixed) {
  constexpr int64_t kBatch = 10, kDevices = 3;
  SmallTraining training;
  const HostBatch batch = training.first_batch(kBatch);
  const Numbers expected = gradient_of(training, batch, {0, 1, kBatch}, 1.0 / kBatch);
  Numbers sum(expected.size());
  for (const BatchPart& part : BatchSplit{BatchSplit::Kind::chunk, kDevices}.divide(kBatch)) {
    const double weight = fixed ? 1.0 / kBatch : 1.0 / double(kDevices * part.count);
    add(gradient_of(training, batch, part, weight), sum);
    say(fmt::format("a device with {} samples: each weighs {:.4f}", part.count, weight));
  }
  say(fmt::format("relative error of the gradient {:.1e}", relative_error(sum, expected)));
}

// --- A larger batch at the old learning rate -----------------------------------------------------

/// The mean loss over all images after 10 epochs.
double loss_after_training(int64_t batch_size, double rate) {
  SmallTraining training;
  const int64_t all = training.set.count();
  const HostBatch images = training.first_batch(all);
  for (int64_t epoch = 0; epoch < 10; ++epoch) {
    for (int64_t first = 0; first < all; first += batch_size) {
      training.forward_and_backward(images, {{first, 1, batch_size}}, 1.0 / double(batch_size),
                                    rate);
      training.update();
    }
  }
  training.forward_and_backward(images, {{0, 1, all}}, 1.0 / double(all));
  return training.loss.to_host()[0];
}

/// Batches four times as large, as for four times as many devices.
void unscaled_learning_rate(bool fixed) {
  constexpr double kBase = 0.02;
  const double rate = fixed ? 4 * kBase : kBase;
  say(fmt::format("batch size  8, learning rate {:.2f}: loss {:.3f} after 10 epochs", kBase,
                  loss_after_training(8, kBase)));
  say(fmt::format("batch size 32, learning rate {:.2f}: loss {:.3f} after 10 epochs", rate,
                  loss_after_training(32, rate)));
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  using namespace lockstep;
  return run_labs(argc, argv,
                  {{"missing-hand-back", missing_hand_back},
                   {"stale-replica", stale_replica},
                   {"mean-of-means", mean_of_means},
                   {"unscaled-learning-rate", unscaled_learning_rate}});
}
