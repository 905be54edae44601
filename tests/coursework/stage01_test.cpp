// Grades stage 01.

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <thread>

#include "common/data/loader.h"
#include "tests/coursework/hint.h"
#include "tests/support/nn_test_support.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using testing::TestDevice;
using Values = std::vector<Real>;

// --- SGD -----------------------------------------------------------------------------------------

/// One weight, its velocity, and steps on them. All numbers have an exact sum.
struct OneWeight {
  void step(Real gradient, const SgdRule& rule, Real learning_rate) {
    device.kernels().sgd_update(device.stream, device.state({.learning_rate = learning_rate}),
                                health, rule, device.filled({1}, gradient),
                                rule.momentum > 0 ? velocity : Tensor(), weight);
  }
  TestDevice device;
  HealthTensor health = HealthTensor::from_host(device.stream, {}, {Health{}});
  Tensor weight = device.filled({1}, 4), velocity = device.filled({1}, 0);
};

TEST_CASE("Plain SGD goes down the gradient", "[task01.1]") {
  OneWeight one;
  {
    HINT("without momentum there is no velocity, and no memory for one: is it read or written?");
    one.step(2, {}, Real(0.5));
    one.device.stream.synchronize();
  }
  HINT("a step goes against the gradient, and the learning rate says how far");
  CHECK(one.weight.to_host() == Values{3});
}

TEST_CASE("A velocity keeps a share of itself and takes all of the gradient", "[task01.1]") {
  OneWeight one;
  const SgdRule rule{.momentum = Real(0.5)};
  one.step(2, rule, Real(0.5));
  {
    HINT(
        "is the new gradient scaled before it goes into the velocity? PyTorch does not dampen it, "
        "and the learning rate is for the weight only");
    CHECK(one.velocity.to_host() == Values{2});
  }
  HINT("with momentum the weight follows the velocity, not the gradient alone");
  CHECK(one.weight.to_host() == Values{3});
  one.step(4, rule, Real(0.25));
  CHECK(one.velocity.to_host() == Values{5});
  CHECK(one.weight.to_host() == Values{Real(1.75)});
}

TEST_CASE("Weight decay is part of the gradient", "[task01.1]") {
  {
    OneWeight plain;
    plain.step(1, {.weight_decay = Real(0.25)}, 1);
    HINT("weights decay without momentum, too");
    CHECK(plain.weight.to_host() == Values{2});
  }
  OneWeight one;
  one.step(1, {.momentum = Real(0.5), .weight_decay = Real(0.25)}, 1);
  HINT("decay pulls on the weight through the velocity, as if it were a gradient");
  CHECK(one.velocity.to_host() == Values{2});
  CHECK(one.weight.to_host() == Values{2});
}

TEST_CASE("Every weight has its own gradient and velocity", "[task01.1]") {
  const TestDevice device;
  const Tensor weight = device.put({3}, {4, 5, 6}), velocity = device.put({3}, {0, 2, 4});
  const HealthTensor health = HealthTensor::from_host(device.stream, {}, {Health{}});
  device.kernels().sgd_update(device.stream, device.state({.learning_rate = 1}), health,
                              {.momentum = Real(0.5)}, device.put({3}, {1, 2, 3}), velocity,
                              weight);
  HINT("this is called for each of the weights: for which one?");
  CHECK(velocity.to_host() == Values{1, 3, 5});
  CHECK(weight.to_host() == Values{3, 2, 1});
}

// --- Pooling -------------------------------------------------------------------------------------

/// The gradient of images whose windows have their maximum at these positions.
Values pooled_backward(const Window2d& window, const Values& dy,
                       const std::vector<int32_t>& where) {
  const TestDevice device;
  const Tensor dx = device.filled(window.input(), -1);
  device.kernels().max_pool2d_backward(
      device.stream, window, device.put(window.output(), dy),
      IndexTensor::from_host(device.stream, window.output(), where), dx);
  return dx.to_host();
}

TEST_CASE("The gradient of a window goes to its maximum", "[task01.2]") {
  const Window2d one = make_window("pool", {1, 2, 2, 1}, 1, 1, 2, 1, 0);
  {
    HINT(
        "every element of dx is written, and nothing is added to what was there: memory that comes "
        "in holds anything");
    CHECK(pooled_backward(one, {7}, {3})[0] == 0);
  }
  {
    HINT("the window found its maximum at position 3, the last one: that pixel has its gradient");
    CHECK(pooled_backward(one, {7}, {3}) == Values{0, 0, 0, 7});
  }
  HINT(
      "a position counts within its window, row by row from the window's own corner: it is no "
      "index "
      "into the image");
  CHECK(pooled_backward(make_window("pool", {1, 2, 3, 1}, 1, 1, 2, 1, 0), {5, 7}, {0, 3}) ==
        Values{5, 0, 0, 0, 0, 7});
}

TEST_CASE("Overlapping windows: a pixel gets the gradient of every window that chose it",
          "[task01.2]") {
  // 3x3 pixels, windows of 2x2 at every place: 2x2 of them. All have their maximum in the middle.
  const Window2d window = make_window("pool", {1, 3, 3, 1}, 1, 1, 2, 1, 0);
  {
    HINT("a pixel lies in several windows: add up what they give, do not overwrite");
    CHECK(pooled_backward(window, {1, 10, 100, 1000}, {3, 2, 1, 0}) ==
          Values{0, 0, 0, 0, 1111, 0, 0, 0, 0});
  }
  HINT("positions count row by row within the window, from its own corner");
  CHECK(pooled_backward(window, {1, 10, 100, 1000}, {0, 1, 2, 3}) ==
        Values{1, 0, 10, 0, 0, 0, 100, 0, 1000});
}

TEST_CASE("Every image and every channel is pooled by itself", "[task01.2]") {
  HINT(
      "every image and every channel is pooled by itself, and an image may be wider than high: "
      "which window of dy is it, which pixel of dx?");
  // Two images of 2x3 pixels with two channels, and 1x2 windows of each.
  const Window2d window = make_window("pool", {2, 2, 3, 2}, 2, 2, 2, 1, 0);
  CHECK(pooled_backward(window, {1, 2, 3, 4, 5, 6, 7, 8}, {0, 1, 2, 3, 3, 2, 1, 0}) ==
        Values{1, 0, 0, 2, 0, 0, 0, 0, 3, 0, 0, 4,    // image 0, its two rows
               0, 0, 0, 8, 7, 0, 0, 6, 5, 0, 0, 0});  // image 1
}

TEST_CASE("Pixels that no window covers have no gradient", "[task01.2]") {
  // 5 pixels, a window of 2 at 0 and at 3: the one at 2 is in none.
  const Window2d window = make_window("pool", {1, 5, 5, 1}, 1, 1, 2, 3, 0);
  const Values dx = pooled_backward(window, {1, 2, 3, 4}, {0, 0, 0, 0});
  {
    HINT("every element of dx is written: memory that comes in holds anything");
    CHECK(dx[2] == 0);
  }
  HINT("which windows contain a pixel? The stride and the size say, and there is a last one");
  CHECK(dx[0] + dx[3] * 10 + dx[15] * 100 + dx[18] * 1000 == 4321);
}

TEST_CASE("Windows whose maximum the ReLU cut off give nothing", "[task01.2]") {
  const Window2d window = make_window("pool", {1, 3, 3, 1}, 1, 1, 2, 1, 0);
  HINT("a position of -1 is no pixel");
  CHECK(pooled_backward(window, {1, 1, 1, 1}, {-1, -1, -1, -1}) == Values(9, 0));
}

// --- Prefetching ---------------------------------------------------------------------------------

/// Images of one byte; counts the reads that have begun.
class CountingSource : public ImageSource {
 public:
  int64_t count() const override { return 40; }
  int64_t image_bytes() const override { return 1; }
  void read(int64_t index, uint8_t* image, int32_t* label) const override {
    ++reads;
    if (index == held_up) gate.pass();
    *image = static_cast<uint8_t>(index);
    *label = 0;
  }
  mutable std::atomic<int64_t> reads = 0;
  int64_t held_up = -1;  // this image comes when the gate is opened
  testing::Gate gate;
};

/// Workers for batches of one image, and 2 of them ahead of the consumer each.
DataLoaderOptions two_ahead(int workers) {
  return {.batch_size = 1, .num_workers = workers, .prefetch_factor = 2, .timeout_seconds = 3};
}

/// Waits until nothing more is read.
int64_t reads_after_a_while(const CountingSource& source, int64_t expected) {
  const auto begin = testing::Clock::now();
  while (source.reads < expected && testing::seconds_since(begin) < 3) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  return source.reads;
}

/// Whether the work ends within 3 s; if not, it is left running in a thread of its own.
bool ends_soon(std::function<void()> work) {
  const auto done = std::make_shared<std::promise<void>>();
  const std::future<void> end = done->get_future();
  std::thread([work = std::move(work), done] {
    work();
    done->set_value();
  }).detach();
  return end.wait_for(std::chrono::seconds(3)) == std::future_status::ready;
}

// First of all: a loader that cannot end would hang at the end of every other case.
TEST_CASE("A loader ends though its workers wait for their turn", "[task01.3]") {
  const auto source = std::make_shared<CountingSource>();
  auto loader = std::make_shared<DataLoader>(*source, two_ahead(2));
  HINT("nobody takes a batch any more: does a worker that waits for its turn learn of the end?");
  loader->begin_epoch(0);
  reads_after_a_while(*source, 4);
  CHECK(ends_soon([source, end = std::move(loader)]() mutable { end.reset(); }));
}

TEST_CASE("A loader ends though a worker comes to its turn only then", "[task01.3]") {
  const auto source = std::make_shared<CountingSource>();
  source->held_up = 1;  // the last batch that may be made
  auto loader = std::make_shared<DataLoader>(*source, two_ahead(1));
  HINT(
      "the end came before the worker began to wait, and nothing wakes it after that: what does it "
      "look at before it waits?");
  loader->begin_epoch(0);
  reads_after_a_while(*source, 2);
  std::thread([source] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    source->gate.open();  // by now the loader is about to end
  }).detach();
  CHECK(ends_soon([source, end = std::move(loader)]() mutable { end.reset(); }));
}

TEST_CASE("A slow worker does not let the others run further ahead", "[task01.3]") {
  CountingSource source;
  source.held_up = 1;  // of the second worker
  DataLoader loader(source, two_ahead(2));
  loader.begin_epoch(0);
  const int64_t reads = reads_after_a_while(source, 3);
  source.gate.open();
  HINT(
      "batch 1 was slow, and its neighbour went on to batch 4, for which there is no place yet: is "
      "it bounded how many batches are on their way, or which ones may be made? And is the batch "
      "itself counted?");
  CHECK(reads == 3);  // batches 0, 1 and 2
}

TEST_CASE("Workers run ahead of the consumer as far as the bound, and no further", "[task01.3]") {
  const CountingSource source;
  DataLoader loader(source, two_ahead(2));
  loader.begin_epoch(0);
  {
    HINT(
        "nobody has taken a batch, and 2 workers may be 2 batches ahead each: is the batch itself "
        "counted?");
    CHECK(reads_after_a_while(source, 4) == 4);
  }
  HINT(
      "a worker that sleeps must be woken: on which condition does it wait, and does it look "
      "again?");
  REQUIRE(loader.next().has_value());
  HINT("a batch was taken, so one more may be made");
  CHECK(reads_after_a_while(source, 5) == 5);
}

TEST_CASE("A whole epoch comes in order, and the batches on their way are counted", "[task01.3]") {
  const CountingSource source;
  DataLoader loader(source, two_ahead(2));
  loader.begin_epoch(0);
  HINT("a worker waits forever: does every reason to continue end the wait?");
  std::vector<int> images;
  while (const auto batch = loader.next()) images.push_back(batch->images[0]);
  std::vector<int> expected;
  for (int i = 0; i < 40; ++i) expected.push_back(i);
  CHECK(images == expected);
  HINT("a batch is in flight from the worker's turn on, and the most at one time are remembered");
  CHECK(loader.counters().most_in_flight >= 1);
  CHECK(loader.counters().most_in_flight <= 4);
}

TEST_CASE("A cancelled epoch frees workers that wait for their turn", "[task01.3]") {
  const CountingSource source;
  DataLoader loader(source, two_ahead(2));
  loader.begin_epoch(0);
  reads_after_a_while(source, 4);
  {
    HINT("after cancelling a worker makes no further batch");
    loader.begin_epoch(1, 39);
    CHECK(loader.next().has_value());
    CHECK(source.reads == 5);
  }
  HINT("4 batches were in flight once, and only one later: which number is remembered?");
  CHECK(loader.counters().most_in_flight == 4);
}

}  // namespace
}  // namespace lockstep
