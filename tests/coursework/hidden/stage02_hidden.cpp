// Hidden cases of stage 02.

#include "tests/coursework/hidden/hidden.h"
#include "tests/coursework/stage02_test.cpp"  // NOLINT(bugprone-suspicious-include): its helpers

namespace lockstep {
namespace {

using testing::Hidden;

TEST_CASE("Other batches in chunks", "[hidden02.1]") {
  Hidden hidden("02.1");
  for (int time = 0; time < 20; ++time) {
    const int64_t samples = hidden.whole(1, 60), parts = hidden.whole(1, 9);
    const std::vector<BatchPart> chunks = chunk_parts(samples, parts);
    const std::string which = fmt::format("{} samples for {} devices: ", samples, parts);
    hidden.tell(which + "sizes", sizes_of(chunks));
    hidden.tell(which + "begins", begins_of(chunks));
  }
}

TEST_CASE("Scores of other batches", "[hidden02.2]") {
  Hidden hidden("02.2");
  for (int time = 0; time < 3; ++time) {
    const int count = hidden.whole(2, 4);
    Replicas replicas(count);
    replicas.late_device = hidden.whole<size_t>(0, size_t(count) - 1);
    const int64_t samples = hidden.whole(count, 3 * count);
    hidden.tell(fmt::format("scores of {} samples on {} devices", samples, count),
                replicas.forward(hidden.reals(samples)).to_host());
  }
}

TEST_CASE("Gradients of other batches", "[hidden02.3]") {
  Hidden hidden("02.3");
  for (int time = 0; time < 3; ++time) {
    const int count = hidden.whole(2, 4);
    Replicas replicas(count);
    const size_t late = hidden.whole<size_t>(1, size_t(count) - 1);
    for (const size_t late_device : {size_t{0}, late}) {
      replicas.late_device = late_device;
      const int64_t samples = hidden.whole(count, 3 * count);
      replicas.pass(hidden.reals(samples));
      hidden.tell(fmt::format("the sum after {} samples on {} devices", samples, count),
                  replicas.gradient());
    }
  }
}

}  // namespace
}  // namespace lockstep
