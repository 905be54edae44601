// Hidden cases of stage 01.

#include "tests/coursework/hidden/hidden.h"
#include "tests/coursework/stage01_test.cpp"  // NOLINT(bugprone-suspicious-include): its helpers

namespace lockstep {
namespace {

using testing::Hidden;

TEST_CASE("SGD with other rules and weights", "[hidden01.1]") {
  Hidden hidden("01.1");
  for (int time = 0; time < 6; ++time) {
    const TestDevice device;
    const int64_t n = hidden.whole(1, 9);
    const SgdRule rule{.momentum = time % 2 == 0 ? Real(0) : hidden.share(),
                       .weight_decay = hidden.coin() ? hidden.share() : Real(0)};
    const Real learning_rate = hidden.share();
    const HealthTensor health = HealthTensor::from_host(device.stream, {}, {Health{}});
    const Tensor weight = device.put({n}, hidden.reals(n)),
                 velocity = device.put({n}, hidden.reals(n)),
                 gradient = device.put({n}, hidden.reals(n));
    device.kernels().sgd_update(device.stream, device.state({.learning_rate = learning_rate}),
                                health, device.one_owner(n), rule, gradient,
                                rule.momentum > 0 ? velocity : Tensor(), weight);
    const std::string rules = fmt::format("momentum {}, decay {}, learning rate {}", rule.momentum,
                                          rule.weight_decay, learning_rate);
    hidden.tell("weights after a step with " + rules, weight.to_host());
    hidden.tell("velocities after a step with " + rules, velocity.to_host());
  }
}

/// A window at random places of random images; the gradient of the images.
void tell_pooled(Hidden& hidden, int64_t stride) {
  const int64_t kernel = hidden.whole(1, 3), channels = hidden.whole(1, 3);
  const Shape images{hidden.whole(1, 2), hidden.whole(kernel, 7), hidden.whole(kernel, 7),
                     channels};
  const Window2d window = make_window("pool", images, channels, channels, kernel, stride, 0);
  std::vector<int32_t> where;
  for (int64_t i = 0; i < window.output().elements(); ++i) {
    where.push_back(static_cast<int32_t>(hidden.whole(-1, kernel * kernel - 1)));
  }
  const Values dy = hidden.reals(window.output().elements());
  hidden.tell(
      fmt::format("dx of images {}, windows of {} at every {}", images.text(), kernel, stride),
      pooled_backward(window, dy, where));
}

// Every position comes, so that the values decide nothing about who passes: this case has points of
// its own, which must be the same with each seed.
TEST_CASE("Pooling with windows side by side", "[hidden01.2]") {
  Hidden hidden("01.2");
  for (const int64_t kernel : {1, 2, 3}) {
    const Window2d window =
        make_window("pool", {1, kernel, 2 * kernel, 1}, 1, 1, kernel, kernel, 0);
    const auto last = static_cast<int32_t>(kernel * kernel - 1);
    for (int32_t position = 0; position <= last; ++position) {
      const Values dy{Real(hidden.whole(1, 64)), Real(hidden.whole(1, 64))};
      hidden.tell(fmt::format("dx of two windows of {} pixels, position {}", kernel, position),
                  pooled_backward(window, dy, {position, last - position}));
    }
  }
}

TEST_CASE("Pooling with other images and windows", "[hidden01.2]") {
  Hidden hidden("01.2 all");
  for (int time = 0; time < 8; ++time) tell_pooled(hidden, hidden.whole(1, 4));
}

TEST_CASE("A scale over other steps", "[hidden01.4]") {
  Hidden hidden("01.4");
  for (int time = 0; time < 6; ++time) {
    std::string steps;
    for (int64_t left = hidden.whole(1, 12); left > 0; --left) {
      steps += hidden.whole(0, 3) == 0 ? 'o' : 'g';
    }
    const int64_t interval = hidden.whole(1, 3);
    const Health health = after_steps(steps, interval, {.scale = 4096});
    hidden.tell(
        fmt::format("scale, good, skipped steps and skips after {} with an interval of {}", steps,
                    interval),
        Values{health.scale, Real(health.good_steps), Real(health.skipped), Real(health.skips)});
  }
}

TEST_CASE("A loader with other bounds", "[hidden01.3]") {
  Hidden hidden("01.3");
  for (int time = 0; time < 3; ++time) {
    const int workers = hidden.whole(1, 3), ahead = hidden.whole(1, 4);
    const int64_t bound = workers * ahead, first = hidden.whole(0, 8), taken = hidden.whole(1, 6);
    const std::string which =
        fmt::format("{} workers, {} ahead, from batch {}", workers, ahead, first);
    const CountingSource source;
    DataLoader loader(
        source,
        {.batch_size = 1, .num_workers = workers, .prefetch_factor = ahead, .timeout_seconds = 3});
    loader.begin_epoch(0, first);
    hidden.tell(which + ": batches begun", reads_after_a_while(source, bound));
    std::vector<int> images;
    for (int64_t i = 0; i < taken; ++i) images.push_back(loader.next().value().images[0]);
    hidden.tell(which + ": batches taken", images);
    hidden.tell(which + ": batches begun then", reads_after_a_while(source, bound + taken));
    hidden.tell(which + ": most in flight", loader.most_in_flight());
  }
}

}  // namespace
}  // namespace lockstep
