// Grades stage 01.

#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <string>
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
                                health, device.one_owner(1), rule, device.filled({1}, gradient),
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
    HINT("the velocity in memory is still 0: where does the next step find the new one?");
    CHECK(one.velocity.to_host() != Values{0});
  }
  {
    HINT(
        "is the new gradient scaled before it goes into the velocity? PyTorch does not dampen it, "
        "and the learning rate is for the weight only");
    CHECK(one.velocity.to_host() == Values{2});
  }
  {
    HINT("the weight stayed where it was: does it move by the velocity from before this step?");
    CHECK(one.weight.to_host() != Values{4});
  }
  HINT("with momentum the weight follows the velocity: it, and nothing beside it");
  CHECK(one.weight.to_host() == Values{3});
  one.step(4, rule, Real(0.25));
  {
    HINT("0.5 * 2 + 4: a share of the velocity before, and all of this step's gradient");
    CHECK(one.velocity.to_host() == Values{5});
  }
  CHECK(one.weight.to_host() == Values{Real(1.75)});
}

TEST_CASE("Weight decay is part of the gradient", "[task01.1]") {
  OneWeight plain;
  plain.step(1, {.weight_decay = Real(0.25)}, 1);
  const Real weight = plain.weight.to_host()[0];
  {
    HINT("the weight moved by its gradient alone: weights decay without momentum, too");
    CHECK(weight != 3);
  }
  {
    HINT("decay pulls a weight towards 0: with which sign does it join the gradient?");
    CHECK(weight < 3);
  }
  {
    HINT("decay is 0.25 of the weight before the step: is it taken when the step is made already?");
    CHECK(weight == 2);
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
                              device.one_owner(3), {.momentum = Real(0.5)},
                              device.put({3}, {1, 2, 3}), velocity, weight);
  HINT("this is called for each of the weights: for which one?");
  CHECK(velocity.to_host() == Values{1, 3, 5});
  CHECK(weight.to_host() == Values{3, 2, 1});
}

// --- The scale of the loss -----------------------------------------------------------------------

/// What becomes of a scale at the end of steps. Letters: g is a good step, o one that overflowed.
Health after_steps(const std::string& steps, int64_t growth_interval, Health health) {
  const TestDevice device;
  for (const char step : steps) {
    health.skips = step == 'o' ? 1 : 0;
    const auto memory = HealthTensor::from_host(device.stream, {}, {health});
    device.kernels().update_scale(device.stream, growth_interval, memory);
    health = memory.to_host()[0];
  }
  return health;
}

TEST_CASE("A scale stays, and good steps are counted", "[task01.4]") {
  const Health health = after_steps("gg", 4, {.scale = 1024});
  {
    HINT("two good steps of the four that the scale waits for: nothing has changed the scale yet");
    CHECK(health.scale == 1024);
  }
  HINT("each step without an overflow is one more good step");
  CHECK(health.good_steps == 2);
  CHECK(health.skipped == 0);
}

TEST_CASE("A step that overflowed halves the scale at once", "[task01.4]") {
  const Health health = after_steps("go", 4, {.scale = 1024});
  {
    HINT(
        "a gradient that overflowed was scaled too much: with which scale does the next step go "
        "on?");
    CHECK(health.scale < 1024);
  }
  {
    HINT("GradScaler's backoff factor is 0.5");
    CHECK(health.scale == 512);
  }
  {
    HINT("the summary says how many steps were skipped: is this one counted?");
    CHECK(health.skipped == 1);
  }
  HINT("good steps count one after another: what does an overflow between them do to the count?");
  CHECK(health.good_steps == 0);
}

TEST_CASE("The step after a skipped one is made", "[task01.4]") {
  HINT("`skips` says that this step changes nothing: the next one must begin without it");
  CHECK(after_steps("o", 4, {.scale = 1024}).skips == 0);
}

TEST_CASE("After enough good steps the scale is doubled, and they count anew", "[task01.4]") {
  {
    HINT("the scale grows at the end of the growth_interval-th good step: not earlier, not later");
    CHECK(after_steps("ggg", 4, {.scale = 1024}).scale == 1024);
    CHECK(after_steps("gggg", 4, {.scale = 1024}).scale == 2048);
  }
  {
    HINT("a scale that has just grown waits for as many good steps again");
    CHECK(after_steps("ggggg", 4, {.scale = 1024}).scale == 2048);
    CHECK(after_steps("ggggg", 4, {.scale = 1024}).good_steps == 1);
  }
  HINT("three good steps, an overflow, and one more: the four were not one after another");
  CHECK(after_steps("gggog", 4, {.scale = 1024}).scale == 512);
}

TEST_CASE("A scale does not grow to infinity", "[task01.4]") {
  const Real large = std::numeric_limits<Real>::max();
  HINT("twice the largest number is infinite: then the scale stays, and good steps count anew");
  CHECK(after_steps("g", 1, {.scale = large}).scale == large);
  CHECK(after_steps("g", 1, {.scale = large}).good_steps == 0);
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
  HINT("which windows contain a pixel? There is a first one and a last one");
  const Values last = pooled_backward(one, {7}, {3});
  {
    HINT(
        "only the pixel with the maximum was written. The body is called for each pixel of dx and "
        "writes this one: it gathers from the windows that contain the pixel, and sends (scatters) "
        "nothing to others");
    CHECK(last != Values{-1, -1, -1, 7});
  }
  {
    HINT(
        "every element of dx is written, and nothing is added to what was there: memory that comes "
        "in holds anything");
    CHECK(std::ranges::count(last, -1) == 0);
  }
  {
    HINT(
        "the window found its maximum at position 3, the last one: that pixel alone gets it. Which "
        "windows contain the pixel, and at which position?");
    CHECK(last == Values{0, 0, 0, 7});
  }
  {
    HINT("position 1 is right of position 0, and position 2 below it: row by row");
    CHECK(pooled_backward(one, {7}, {1}) == Values{0, 7, 0, 0});
  }
  const Window2d wide = make_window("pool", {1, 2, 3, 1}, 1, 1, 2, 1, 0);
  {
    HINT("which is the last window of the rows, which of the columns? Here are one row and two");
    CHECK(pooled_backward(wide, {5, 7}, {0, 0})[5] == 0);
  }
  HINT(
      "a position counts within its window, row by row from the window's own corner: it is no "
      "index "
      "into the image");
  CHECK(pooled_backward(wide, {5, 7}, {0, 3}) == Values{5, 0, 0, 0, 0, 7});
}

TEST_CASE("Overlapping windows: a pixel gets the gradient of every window that chose it",
          "[task01.2]") {
  // 3x3 pixels, windows of 2x2 at every place: 2x2 of them. All have their maximum in the middle.
  const Window2d window = make_window("pool", {1, 3, 3, 1}, 1, 1, 2, 1, 0);
  {
    HINT("dy has out_height rows of out_width windows: which element is that of one window?");
    CHECK(pooled_backward(window, {1, 2, 3, 4}, {0, 0, 0, 0})[8] == 0);
  }
  {
    HINT("a pixel lies in several windows: add up what they give, do not overwrite");
    CHECK(pooled_backward(window, {1, 10, 100, 1000}, {3, 2, 1, 0}) ==
          Values{0, 0, 0, 0, 1111, 0, 0, 0, 0});
  }
  const Values corners = pooled_backward(window, {1, 10, 100, 1000}, {0, 1, 2, 3});
  {
    HINT("a pixel has the gradient of a window that ends left of it: which windows contain it?");
    CHECK(corners[5] == 0);
  }
  HINT("positions count row by row within the window, from its own corner");
  CHECK(corners == Values{1, 0, 10, 0, 0, 0, 100, 0, 1000});
}

TEST_CASE("Windows of 3x3", "[task01.2]") {
  {
    HINT("this window has 3 rows of 3 pixels: is a size of 2 written somewhere?");
    const Window2d one = make_window("pool", {1, 3, 3, 1}, 1, 1, 3, 1, 0);
    CHECK(pooled_backward(one, {7}, {5}) == Values{0, 0, 0, 0, 0, 7, 0, 0, 0});
    CHECK(pooled_backward(one, {7}, {8}) == Values{0, 0, 0, 0, 0, 0, 0, 0, 7});
  }
  {
    HINT(
        "the middle of 5x5 pixels lies in nine windows, three rows of three, and all chose it: how "
        "many does a pixel lie in? The size and the stride say");
    const Window2d nine = make_window("pool", {1, 5, 5, 1}, 1, 1, 3, 1, 0);
    CHECK(pooled_backward(nine, {1, 2, 4, 8, 16, 32, 64, 128, 256},
                          {8, 7, 6, 5, 4, 3, 2, 1, 0})[12] == 511);
  }
  // At every second pixel of 5 rows of 7: 2 rows of 3 windows. Row 2 is in both.
  HINT(
      "a window begins at multiples of the stride only, here at every second pixel, and an image "
      "may be wider than high");
  const Window2d wide = make_window("pool", {1, 5, 7, 1}, 1, 1, 3, 2, 0);
  CHECK(pooled_backward(wide, {1, 2, 4, 8, 16, 32}, {8, 7, 5, 2, 1, 4}) ==
        Values{0, 0, 0,     0,      0, 0,  0,  //
               0, 0, 0,     0,      0, 0,  4,  //
               0, 0, 1 + 8, 2 + 16, 0, 0,  0,  //
               0, 0, 0,     0,      0, 32, 0,  //
               0, 0, 0,     0,      0, 0,  0});
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
    CHECK(dx[2] != -1);
  }
  {
    HINT(
        "the pixel lies between two windows, and one of them gave it a gradient: a window begins "
        "at multiples of the stride only, and ends with its size");
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

/// Images of one byte; counts the reads that have begun. The first of them may wait for each other.
class CountingSource : public ImageSource {
 public:
  int64_t count() const override { return 40; }
  int64_t image_bytes() const override { return 1; }
  void read(int64_t index, uint8_t* image, int32_t* label) const override {
    ++reads;
    const auto begin = testing::Clock::now();
    while (reads < together && testing::seconds_since(begin) < 3) std::this_thread::yield();
    if (index == held_up) gate.pass();
    *image = static_cast<uint8_t>(index);
    *label = 0;
  }
  mutable std::atomic<int64_t> reads = 0;
  int64_t together = 0;  // no read ends before so many have begun
  int64_t held_up = -1;  // this image comes when the gate is opened
  testing::Gate gate;
};

/// A loader waits for its workers, also when a test failed.
struct OpenAtEnd {
  testing::Gate& gate;
  ~OpenAtEnd() { gate.open(); }
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
  HINT(
      "nobody takes a batch any more: does a worker that waits for its turn learn of the end? It "
      "is "
      "told by turn_[worker]");
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
  const OpenAtEnd open{source.gate};
  loader.begin_epoch(0);
  {
    HINT(
        "batch 2 may be made, and is not: 2 workers may be 2 batches ahead each. Is the bound that "
        "of all of them together?");
    CHECK(reads_after_a_while(source, 3) >= 3);
  }
  {
    HINT(
        "batch 1 was slow, and its neighbour went on to batch 4, for which there is no place yet: "
        "is it bounded how many batches are on their way, or which ones may be made? And is the "
        "batch itself counted?");
    CHECK(source.reads == 3);  // batches 0, 1 and 2
  }
  HINT("a worker that sleeps must be woken, and then look again");
  REQUIRE(loader.next().has_value());  // batch 0
  HINT(
      "a batch was taken, so one more may be made: is the bound counted from the next to be "
      "taken?");
  CHECK(reads_after_a_while(source, 4) == 4);
  HINT("1, 2 and 4 are in flight, 3 has not begun: a batch counts once it is its turn, no other");
  CHECK(loader.most_in_flight() == 3);
}

// All four have counted before one of them goes on: where two of them do that at the same time
// without the mutex, ThreadSanitizer sees it in every run.
TEST_CASE("Workers that begin together are all counted", "[task01.3]") {
  CountingSource source;
  source.together = 4;
  DataLoader loader(source, two_ahead(4));
  loader.begin_epoch(0);
  reads_after_a_while(source, 8);
  HINT(
      "4 workers have made 2 batches each, and nobody has taken one: is each of them counted? All "
      "workers change the loader's counters, so they belong to the mutex");
  CHECK(loader.most_in_flight() == 8);
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
  CHECK(loader.most_in_flight() >= 1);
  CHECK(loader.most_in_flight() <= 4);
}

TEST_CASE("A worker whose turn it is stops, too, when the epoch is cancelled", "[task01.3]") {
  bool stopped = false;
  for (int attempt = 0; attempt < 5 && !stopped; ++attempt) {  // begin_epoch() may be late
    CountingSource source;
    source.held_up = 0;
    DataLoader loader(source, two_ahead(1));
    const OpenAtEnd open{source.gate};
    loader.begin_epoch(0);
    reads_after_a_while(source, 1);
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      source.gate.open();  // by now the epoch is cancelled
    });
    loader.begin_epoch(1, 39);
    later.join();
    loader.next();
    stopped = loader.most_in_flight() == 1;  // batch 0; then batch 39, of the other epoch
  }
  HINT("batch 1 of a cancelled epoch was begun, or counted: its turn or not, who wants it?");
  CHECK(stopped);
}

TEST_CASE("The bound of an epoch that begins in its middle", "[task01.3]") {
  const CountingSource source;
  DataLoader loader(source, two_ahead(2));
  loader.begin_epoch(0, 10);
  HINT(
      "this epoch begins with batch 10, the next to be taken: from which one is the bound "
      "counted?");
  CHECK(reads_after_a_while(source, 4) == 4);
}

TEST_CASE("A cancelled epoch frees workers that wait for their turn", "[task01.3]") {
  const CountingSource source;
  DataLoader loader(source, two_ahead(2));
  loader.begin_epoch(0);
  reads_after_a_while(source, 4);
  {
    HINT(
        "begin_epoch() waits for the workers, and they for their turn: what tells them that their "
        "epoch is over, though the loader is not?");
    loader.begin_epoch(1, 39);
  }
  {
    HINT("after cancelling a worker makes no further batch");
    CHECK(loader.next().has_value());
    CHECK(source.reads == 5);
  }
  HINT("4 batches were in flight once, and only one later: which number is remembered?");
  CHECK(loader.most_in_flight() == 4);
}

}  // namespace
}  // namespace lockstep
