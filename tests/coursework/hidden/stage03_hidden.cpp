// Hidden cases of stage 03: the schedules.

#include "tests/coursework/hidden/hidden.h"
#include "tests/coursework/stage03_test.cpp"  // NOLINT(bugprone-suspicious-include): its helpers

namespace lockstep {
namespace {

using testing::Hidden;

TEST_CASE("GPipe with other stages and micro-batches", "[hidden03.1]") {
  Hidden hidden("03.1");
  for (int time = 0; time < 8; ++time) {
    const int stages = hidden.whole(1, 6), micro_batches = hidden.whole(1, 9);
    const int stage = hidden.whole(0, stages - 1);
    hidden.tell(fmt::format("stage {} of {}, {} micro-batches", stage, stages, micro_batches),
                text_of(gpipe_schedule(stages, micro_batches, stage)));
  }
}

TEST_CASE("1F1B's passes with other stages and micro-batches", "[hidden03.2]") {
  Hidden hidden("03.2");
  for (int time = 0; time < 8; ++time) {
    const int stages = hidden.whole(1, 6), micro_batches = hidden.whole(1, 9);
    const int stage = hidden.whole(0, stages - 1);
    hidden.tell(fmt::format("stage {} of {}, {} micro-batches", stage, stages, micro_batches),
                work_of(one_f1b_schedule(stages, micro_batches, stage)));
  }
}

// The order of sends and receives of different micro-batches is free as long as no stage waits.
TEST_CASE("1F1B's messages with other stages and micro-batches", "[hidden03.2]") {
  Hidden hidden("03.2 messages");
  for (int time = 0; time < 6; ++time) {
    const int stages = hidden.whole(2, 6), micro_batches = hidden.whole(1, 9);
    const std::string which = fmt::format("{} stages, {} micro-batches: ", stages, micro_batches);
    const std::vector<Instructions> all = one_f1b_schedules(stages, micro_batches);
    const int one = hidden.whole(0, micro_batches - 1);
    for (const Instructions& list : all) hidden.tell(which + "of one", text_of(only(list, one)));
    const Timetable table = simulate(all, 1, 2, /*blocking_sends=*/true);
    hidden.tell(which + "time", table.makespan);
    hidden.tell(which + "activations", table.live);
  }
}

TEST_CASE("Interleaved 1F1B with other devices and chunks", "[hidden03.5]") {
  Hidden hidden("03.5");
  for (int time = 0; time < 8; ++time) {
    const int devices = hidden.whole(2, 5), chunks = hidden.whole(2, 4);
    const int micro_batches = devices * hidden.whole(1, 3), device = hidden.whole(0, devices - 1);
    const Instructions list = interleaved_schedule(devices, chunks, micro_batches, device);
    const std::string which = fmt::format("device {} of {}, {} chunks, {} micro-batches: ", device,
                                          devices, chunks, micro_batches);
    hidden.tell(which + "passes", passes_of(list, "", 999));
    hidden.tell(which + "messages", text_of(list));
  }
}

}  // namespace
}  // namespace lockstep
