// Grades stage 03.

#include "03-model-split/schedule.h"
#include "tests/coursework/hint.h"

namespace lockstep {
namespace {

/// One instruction per line.
std::string text_of(const Instructions& list) {
  std::string text;
  for (const Instruction& i : list) {
    text += name_of(i.kind);
    if (i.kind != Instruction::Kind::step) text += " " + std::to_string(i.micro_batch);
    text += "\n";
  }
  return text;
}

std::vector<Instructions> gpipe_schedules(int stages, int micro_batches) {
  std::vector<Instructions> all;
  for (int stage = 0; stage < stages; ++stage) {
    all.push_back(gpipe_schedule(stages, micro_batches, stage));
  }
  return all;
}

/// Micro-batches in the order in which they go backward.
std::vector<int> backward_order(const Instructions& list) {
  std::vector<int> order;
  for (const Instruction& i : list) {
    if (i.kind == Instruction::Kind::backward) order.push_back(i.micro_batch);
  }
  return order;
}

TEST_CASE("GPipe runs everything forward before anything backward", "[task03.1]") {
  const Instructions list = gpipe_schedule(1, 3, 0);
  size_t forwards_before = 0;
  while (forwards_before < list.size() &&
         list[forwards_before].kind == Instruction::Kind::forward) {
    ++forwards_before;
  }
  {
    HINT("a backward stands before the last forward: that is another schedule than GPipe's");
    CHECK(forwards_before == 3);
  }
  {
    HINT("first in, first out: in which order do the micro-batches go backward?");
    CHECK(backward_order(list) == std::vector<int>{0, 1, 2});
  }
  HINT("a stage alone neither sends nor receives, and its step comes last");
  CHECK(text_of(list) ==
        "forward 0\nforward 1\nforward 2\nbackward 0\nbackward 1\nbackward 2\nstep\n");
}

TEST_CASE("What a stage of a pipeline receives and sends", "[task03.1]") {
  {
    HINT("the first stage receives no activations and sends no gradients");
    CHECK(text_of(gpipe_schedule(3, 1, 0)) ==
          "forward 0\nsend activation 0\nreceive gradient 0\nbackward 0\nstep\n");
  }
  {
    HINT("the last stage sends no activations and receives no gradients");
    CHECK(text_of(gpipe_schedule(3, 1, 2)) ==
          "receive activation 0\nforward 0\nbackward 0\nsend gradient 0\nstep\n");
  }
  HINT("receive right before the work that needs it, send right after the work that made it");
  CHECK(text_of(gpipe_schedule(3, 2, 1)) ==
        "receive activation 0\nforward 0\nsend activation 0\n"
        "receive activation 1\nforward 1\nsend activation 1\n"
        "receive gradient 0\nbackward 0\nsend gradient 0\n"
        "receive gradient 1\nbackward 1\nsend gradient 1\nstep\n");
}

TEST_CASE("Four stages finish without waiting for each other for ever", "[task03.1]") {
  HINT("some stage waits for what its neighbour sends later, or never");
  const Timetable table = simulate(gpipe_schedules(4, 8), 1, 2, /*blocking_sends=*/true);
  HINT(
      "stages wait for one another longer than a pipeline must: (m + p - 1) forwards and "
      "backwards");
  CHECK(table.makespan == Approx((8 + 4 - 1) * 3));
}

}  // namespace
}  // namespace lockstep
