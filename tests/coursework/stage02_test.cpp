// Grades stage 02.

#include <functional>
#include <memory>

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
  for (const BatchPart& part : parts) {
    HINT("a chunk's samples lie side by side; a part is its first sample, its stride, its count");
    CHECK(part.stride == 1);
  }
  CHECK(sizes_of(parts) == Numbers{4, 4});
  {
    HINT("a chunk begins where the one before it ends");
    CHECK(begins_of(parts) == Numbers{0, 4});
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
  {
    HINT("more chunks than devices: 10 / 4 is 2 in whole numbers, before anything is rounded up");
    CHECK(parts.size() <= 4);
  }
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

  AnyTensor forward(const AnyTensor& x, Context& context) override {
    const Tensor y = context.empty(x.shape());
    context.kernels().fill(context.stream(), 0, y);
    hooks_.before(context.stream());
    context.kernels().add(context.stream(), x, y);
    hooks_.behind(context.stream());
    return y;
  }
  AnyTensor backward(const AnyTensor& dy, Context& context) override {
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
        parallel(std::move(tally), parameters, maker(), devices.machine.streams) {
    parameters.parameters()[0]->value.copy_from_host({1});
  }

  std::function<std::unique_ptr<Module>()> maker() {
    return [this] { return make(); };
  }
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
  /// A pass over as many samples as there are gradients of scores. `late_device` is late in
  /// backward. In forward device 0 is late, which costs no waiting.
  void pass(const Values& dy) {
    const size_t late = std::exchange(late_device, 0);
    forward(dy);
    late_device = late;
    parallel.backward(put(dy), context);
    late_one_goes_on();
  }
  /// The copies that a device's stream has made so far.
  size_t copies_by(size_t device) const {
    devices.stream(device).synchronize();
    return devices.machine.spans(device, "copy").size();
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
  const Tensor scores = two.forward({1, 1, 2, 2});
  {
    HINT("the scores belong on device 0, which computes the loss");
    CHECK(scores.home().device().name() == "cpu:0");
  }
  const Values values = scores.to_host();
  {
    HINT("scores come in the order of the samples: device 0's are the first rows");
    CHECK(values[2] != 1);
  }
  {
    HINT("the parts were written to the same rows: where does the next one begin?");
    CHECK(values[0] != 2);
  }
  {
    HINT("device 0's own scores are missing: its part is copied, too, though it travels nowhere");
    CHECK(values[0] == 1);
  }
  HINT("each part has its rows, and they come in the order of the samples");
  CHECK(values == Values{1, 1, 2, 2});
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

// Of three replicas: who waits for one of them only has not waited for the others.
TEST_CASE("The scores of a late replica are there, too", "[task02.2]") {
  for (const size_t late : {2u, 1u}) {
    Replicas three(3);
    three.late_device = late;
    HINT("does the host wait for a device, or read its memory? It has to go on and enqueue");
    const Tensor scores = three.forward({1, 2, 3});
    HINT(
        "a replica had not computed its scores yet when they were fetched: does device 0 wait for "
        "each of them, before it copies?");
    CHECK(scores.to_host() == Values{1, 2, 3});
  }
}

TEST_CASE("A batch that is too small for all devices", "[task02.2]") {
  Replicas three(3);
  three.forward({1, 2, 3});
  HINT("a device without samples has no scores: how many of the devices are in use?");
  CHECK(three.forward({4, 5}).to_host() == Values{4, 5});
}

TEST_CASE("Device 0's stream fetches the scores", "[task02.2]") {
  Replicas two(2);
  const size_t before = two.copies_by(1);
  two.pass({1, 2, 3});
  {
    HINT("a replica's stream made a copy: whose stream makes them all? copy() knows");
    CHECK(two.copies_by(1) == before);
  }
  HINT("scores of another device come by copy(), which counts them; device 0 has its own already");
  CHECK(two.parallel.bytes_moved() == two.parallel.bytes_predicted());
}

TEST_CASE("The memory for the scores is used again", "[task02.2]") {
  Replicas two(2);
  two.forward({1, 2, 3, 4});
  const Tensor samples = two.put({1, 2, 3, 4});
  const MemoryCounter& memory = two.devices.stream(0).device().memory();
  const int64_t before = memory.current();
  const Tensor scores = two.parallel.forward(samples, two.context);
  two.late_one_goes_on();
  HINT("every batch takes new memory for its scores: whose memory is used again? Its context's");
  CHECK(memory.current() == before);
}

TEST_CASE("Device 0 has the sum of all gradients", "[task02.3]") {
  Replicas three(3);
  HINT("the host only enqueues, and a stream's operations use memory of its own device");
  three.pass({1, 20, 300});
  const Real sum = three.gradient();
  {
    HINT("device 0 has its own gradient only: to which of its two tensors does add() add?");
    CHECK(sum != 1);
  }
  {
    HINT("1 is the value of every weight: are the weights added up, not their gradients?");
    CHECK(sum != 3);
  }
  {
    HINT("the last replica's gradient is 300: do all of them come in?");
    CHECK(sum >= 100);
  }
  {
    HINT("device 0's gradient, 1, is in the sum twice, once as if it were another's");
    CHECK(sum != 322);
  }
  {
    HINT("1 + 20 + 300: is the sum divided, or a part of it?");
    CHECK(sum >= 300);
  }
  {
    HINT("20 is missing: one replica's gradients were overwritten before they were added");
    CHECK(sum != 301);
  }
  HINT("gradients are added: what device 0 had of its own part is in the sum");
  CHECK(sum == 321);
  three.pass({1, 20, 300});
  HINT("gradients are added: what device 0 had from before is in the sum, too");
  CHECK(three.gradient() == 321 + 321);
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
  for (const size_t late : {2u, 1u}) {
    Replicas three(3);
    three.late_device = late;
    three.pass({1, 20, 300});
    HINT(
        "a replica's backward was not done when its gradients were fetched: does device 0 wait for "
        "each of them, before it copies?");
    CHECK(three.gradient() == 321);
  }
}

TEST_CASE("Device 0's stream fetches the gradients", "[task02.3]") {
  Replicas three(3);
  const size_t before = three.copies_by(1) + three.copies_by(2);
  three.pass({1, 20, 300});
  {
    HINT("a replica's stream made a copy: whose stream makes them all? copy() knows");
    CHECK(three.copies_by(1) + three.copies_by(2) == before);
  }
  const int64_t moved = three.parallel.bytes_moved(), expected = three.parallel.bytes_predicted();
  {
    HINT("more was copied than the gradients: which of a replica's tensors holds them alone?");
    CHECK(moved <= expected);
  }
  HINT("not all gradients came by copy(), which counts: those of all parameters, of each replica?");
  CHECK(moved == expected);
}

}  // namespace
}  // namespace lockstep
