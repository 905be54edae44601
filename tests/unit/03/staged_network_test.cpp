// How layers on several devices hand each other their tensors.

#include "03-model-split/pipeline/staged_network.h"

#include "tests/support/catch.h"
#include "tests/support/machine.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using testing::enqueue;
using testing::Gate;

TEST_CASE("What is copied to another device may be overwritten after it, and no sooner",
          "[pipeline]") {
  Gate made, read;
  const testing::Machine machine(testing::cpus(2));
  const Stream from = machine.streams[0], to = machine.streams[1];
  Context context(to);
  const Tensor x = Tensor::from_host(from, {3}, {1, 2, 3});
  enqueue(from, [&] { made.pass(); });
  from.kernels().fill(from, 7, x);
  enqueue(to, [&] { read.pass(); });
  const Tensor copy = copied_to(x, context);
  from.kernels().fill(from, 0, x);
  made.open();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // it could be overwritten now
  read.open();
  CHECK(copy.to_host() == std::vector<Real>{7, 7, 7});
  CHECK(x.to_host() == std::vector<Real>{0, 0, 0});
}

}  // namespace
}  // namespace lockstep
