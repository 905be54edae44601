// Grades stage 02.

#include "02-dataparallel/data_parallel.h"
#include "common/data/batch_parts.h"
#include "tests/coursework/hint.h"
#include "tests/coursework/late.h"

namespace lockstep {
namespace {

using Numbers = std::vector<int64_t>;
using Values = std::vector<Real>;

// --- Chunks --------------------------------------------------------------------------------------

Numbers sizes_of(const std::vector<BatchPart>& parts) {
  Numbers sizes;
  for (const BatchPart& part : parts) sizes.push_back(part.count);
  return sizes;
}

Numbers begins_of(const std::vector<BatchPart>& parts) {
  Numbers begins;
  for (const BatchPart& part : parts) begins.push_back(part.first);
  return begins;
}

TEST_CASE("A batch that divides evenly gives equal chunks", "[task02.1]") {
  HINT("8 samples for 2 devices: is a size rounded up that needs no rounding?");
  const std::vector<BatchPart> parts = chunk_parts(8, 2);
  CHECK(sizes_of(parts) == Numbers{4, 4});
  {
    HINT("a chunk begins where the one before it ends");
    CHECK(begins_of(parts) == Numbers{0, 4});
  }
  for (const BatchPart& part : parts) {
    HINT("a chunk's samples lie side by side");
    CHECK(part.stride == 1);
  }
}

TEST_CASE("The last chunk has what is left", "[task02.1]") {
  HINT(
      "every sample is in one chunk: is the size rounded the right way, does the last one end with "
      "the batch?");
  const std::vector<BatchPart> parts = chunk_parts(10, 4);
  int64_t samples = 0;
  for (const BatchPart& part : parts) samples += part.count;
  CHECK(samples == 10);
  HINT("torch.chunk does not even its chunks out: all but the last have the same size");
  CHECK(sizes_of(parts) == Numbers{3, 3, 3, 1});
  CHECK(begins_of(parts) == Numbers{0, 3, 6, 9});
}

TEST_CASE("There may be fewer chunks than devices, but none is empty", "[task02.1]") {
  HINT("when nothing is left there are no more chunks: some devices have nothing to do");
  CHECK(sizes_of(chunk_parts(6, 4)) == Numbers{2, 2, 2});
  CHECK(sizes_of(chunk_parts(2, 3)) == Numbers{1, 1});
}

// --- Devices -------------------------------------------------------------------------------------

/// Called with a replica's stream, in its forward and backward: before and after its computation.
struct Hooks {
  std::function<void(Stream)> before, behind;
};

/// Its scores are its samples, computed anew. It has one weight, whose gradient is the sum of dy:
/// if dy is 1, 10, 100, ..., the digits show whose gradients it contains.
class Tally final : public Module {
 public:
  explicit Tally(Hooks hooks)
      : hooks_(std::move(hooks)), weight_(add_parameter("weight", ParameterKind::bias, {1}, 1)) {}

  Tensor forward(const Tensor& x, Context& context) override {
    const Tensor y = context.empty(x.shape());
    context.kernels().fill(context.stream(), 0, y);
    hooks_.before(context.stream());
    context.kernels().add(context.stream(), x, y);
    hooks_.behind(context.stream());
    return y;
  }
  Tensor backward(const Tensor& dy, Context& context) override {
    hooks_.before(context.stream());
    context.kernels().add_column_sums(context.stream(), dy, weight_.grad);
    hooks_.behind(context.stream());
    return dy;
  }

 private:
  Hooks hooks_;
  Parameter& weight_;
};

/// Replicas of Tally. In every forward and backward the one on `late_device` is held up. If that is
/// device 0, it is held up until the others have computed theirs: it finds everything there.
/// Otherwise it is held up until device 0 has done all that it does without waiting.
struct Replicas {
  explicit Replicas(int count)
      : devices(count),
        tally(make()),
        parameters(*tally, devices.stream(0)),
        context(devices.stream(0)),
        parallel(
            std::move(tally), parameters, [this] { return make(); }, devices.machine.streams,
            *devices.machine.world, ReduceMode::manual) {}

  std::unique_ptr<Module> make() {
    const auto hold = [this](Stream stream) {
      if (stream == devices.stream(late_device)) devices.hold(late_device);
    };
    const auto note = [this](Stream stream) {
      if (!(stream == devices.stream(late_device))) computed.push_back(stream.record());
    };
    return std::make_unique<Tally>(Hooks{hold, note});
  }
  void late_one_goes_on() {
    if (late_device != 0) return devices.let_go_after(0);
    for (const Event& event : std::exchange(computed, {})) devices.comes(event);
    devices.let_go();
  }
  Tensor put(const Values& values) const {
    return Tensor::from_host(devices.stream(0), {int64_t(values.size()), 1}, values);
  }
  /// The scores of these samples, of one number each.
  Tensor forward(const Values& samples) {
    const Tensor scores = parallel.forward(put(samples), context);
    late_one_goes_on();
    return scores;
  }
  /// A pass over as many samples as there are gradients of scores.
  void pass(const Values& dy) {
    forward(dy);
    parallel.backward(put(dy), context);
    late_one_goes_on();
  }
  /// Device 0's gradient of the weight.
  Real gradient() const { return parameters.gradients().to_host()[0]; }

  size_t late_device = 0;
  std::vector<Event> computed;
  testing::LateMachine devices;
  std::unique_ptr<Module> tally;  // then it is in `parallel`
  FlatParameters parameters;
  Context context;
  DataParallel parallel;
};

TEST_CASE("The scores of all parts come one after another", "[task02.2]") {
  Replicas two(2);
  HINT("does the host wait for a device, or read its memory? It has to go on and enqueue");
  const Tensor scores = two.forward({1, 2, 3, 4});
  {
    HINT("the scores belong on device 0, which computes the loss");
    CHECK(scores.home().device().name() == "cpu:0");
  }
  HINT("scores come in the order of the samples, those of device 0 first");
  CHECK(scores.to_host() == Values{1, 2, 3, 4});
}

TEST_CASE("The last part may be smaller than the others", "[task02.2]") {
  Replicas three(3);
  HINT("parts have different numbers of rows");
  const Tensor scores = three.forward({1, 2, 3, 4, 5});
  {
    HINT("are there as many rows as all parts have together? They are not equally large");
    CHECK(scores.shape().text() == "[5, 1]");
  }
  HINT("where does a part begin, if those before it had more rows than it has itself?");
  CHECK(scores.to_host() == Values{1, 2, 3, 4, 5});
}

TEST_CASE("The scores of a late replica are there, too", "[task02.2]") {
  Replicas two(2);
  two.late_device = 1;
  HINT("does the host wait for a device, or read its memory? It has to go on and enqueue");
  const Tensor scores = two.forward({1, 2, 3, 4});
  HINT("replica 1 had not computed its scores yet when they were fetched: who waits for it?");
  CHECK(scores.to_host() == Values{1, 2, 3, 4});
}

TEST_CASE("A batch that is too small for all devices", "[task02.2]") {
  Replicas three(3);
  three.forward({1, 2, 3});
  HINT("a device without samples has no scores: how many of the devices are in use?");
  CHECK(three.forward({4, 5}).to_host() == Values{4, 5});
}

TEST_CASE("Scores that go from device to device are counted", "[task02.2]") {
  Replicas two(2);
  two.pass({1, 2, 3});
  HINT("scores of another device come by copy(), which counts them; device 0 has its own already");
  CHECK(two.parallel.bytes_moved() == two.parallel.bytes_predicted());
}

TEST_CASE("Device 0 has the sum of all gradients", "[task02.3]") {
  Replicas three(3);
  three.pass({0, 0, 8});
  {
    HINT("the last replica's gradient is 8: do all of them come in, and is the sum divided?");
    CHECK(three.gradient() == 8);
  }
  three.pass({1, 20, 300});
  HINT("gradients are added: what device 0 had of its own part, and from before, is in the sum");
  CHECK(three.gradient() == 8 + 321);
}

TEST_CASE("A device without samples adds nothing", "[task02.3]") {
  Replicas three(3);
  three.pass({1, 20, 300});
  three.parameters.zero_gradients();
  three.pass({4, 50});
  HINT("this batch had nothing for the last device: its gradients are those of the batch before");
  CHECK(three.gradient() == 54);
}

TEST_CASE("The gradients of a late replica are in the sum", "[task02.3]") {
  Replicas two(2);
  two.late_device = 1;
  two.pass({1, 20});
  HINT("replica 1's backward was not done when its gradients were fetched: who waits for it?");
  CHECK(two.gradient() == 21);
}

TEST_CASE("Gradients that go from device to device are counted", "[task02.3]") {
  Replicas three(3);
  three.pass({1, 20, 300});
  HINT("a kernel reads memory of its own device only, and copy() counts what comes from others");
  CHECK(three.parallel.bytes_moved() == three.parallel.bytes_predicted());
}

}  // namespace
}  // namespace lockstep
