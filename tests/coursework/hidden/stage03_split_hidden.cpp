// Hidden cases of stage 03: what lies between the parts of a split model.

#include "tests/coursework/hidden/hidden.h"
#include "tests/coursework/stage03_split_test.cpp"  // NOLINT(bugprone-suspicious-include): its helpers

namespace lockstep {
namespace {

using testing::Hidden;

TEST_CASE("Other tensors over a boundary", "[hidden03.3]") {
  Hidden hidden("03.3");
  for (int time = 0; time < 3; ++time) {
    const size_t places = hidden.whole<size_t>(1, 4);
    Boundary boundary(places);
    for (int i = 0; i < 5; ++i) {
      hidden.tell(fmt::format("{} places: what arrived", places), boundary.carry(hidden.real()));
    }
    const Tensor x = boundary.put(0, 0), seen = boundary.put(1, -1);
    boundary.devices.hold(0);
    x.home().kernels().fill(x.home(), hidden.real(), x);
    boundary.channel.send(x);
    boundary.read(boundary.channel.receive(), seen);
    boundary.channel.release();
    boundary.devices.let_go_after(1);
    hidden.tell(fmt::format("{} places: what a late sender sent", places), seen.to_host());
  }
}

TEST_CASE("Other products and biases", "[hidden03.4]") {
  Hidden hidden("03.4");
  for (int time = 0; time < 8; ++time) {
    const Real weight = hidden.real(), others = hidden.real(), bias = hidden.real();
    const int me = hidden.whole(0, 1);
    const Activation activation = hidden.coin() ? Activation::relu : Activation::none;
    HalfOfLayer rank(weight, others, bias, activation, me);
    hidden.tell(fmt::format("products {} and {}, bias {}, on rank {}", weight, others, bias, me),
                rank.forward());
  }
}

}  // namespace
}  // namespace lockstep
