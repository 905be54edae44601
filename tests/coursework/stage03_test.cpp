// Grades stage 03: the schedules (03.1, 03.2, 03.5). stage03_split_test.cpp grades the others.

#include <algorithm>

#include "03-model-split/pipeline/schedule.h"
#include "tests/coursework/hint.h"

namespace lockstep {
namespace {

// --- Schedules -----------------------------------------------------------------------------------

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

/// "F0 F1 B0 ...": the forwards and backwards of a stage, without what it sends and receives.
std::string work_of(const Instructions& list) {
  std::string text;
  for (const Instruction& i : list) {
    const bool forward = i.kind == Instruction::Kind::forward;
    if (!forward && i.kind != Instruction::Kind::backward) continue;
    text += (text.empty() ? "" : " ") + std::string(forward ? "F" : "B") +
            std::to_string(i.micro_batch);
  }
  return text;
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
  HINT("a stage alone, and 3 micro-batches");
  const Instructions list = gpipe_schedule(1, 3, 0);
  {
    HINT("every micro-batch goes forward once and backward once");
    CHECK(std::ranges::count(list, Instruction::Kind::forward, &Instruction::kind) == 3);
    CHECK(std::ranges::count(list, Instruction::Kind::backward, &Instruction::kind) == 3);
  }
  {
    HINT("micro-batches are numbered from 0");
    CHECK(list[0].micro_batch == 0);
  }
  {
    HINT("a backward stands before the last forward: that is another schedule than GPipe's");
    CHECK(work_of(list).substr(0, 9) == "F0 F1 F2 ");
  }
  {
    HINT("first in, first out: in which order do the micro-batches go backward?");
    CHECK(backward_order(list) == std::vector<int>{0, 1, 2});
  }
  HINT(
      "a stage alone neither sends nor receives, and its step comes last: was the writer told "
      "which "
      "stage it is, and then of how many?");
  CHECK(text_of(list) ==
        "forward 0\nforward 1\nforward 2\nbackward 0\nbackward 1\nbackward 2\nstep\n");
}

TEST_CASE("What a stage of a pipeline receives and sends", "[task03.1]") {
  const Instructions list = gpipe_schedule(3, 2, 1);
  const std::string middle = text_of(list);
  {
    HINT("a stage with one before it sends that one a gradient for every micro-batch");
    CHECK(std::ranges::count(list, Instruction::Kind::send_gradient, &Instruction::kind) == 2);
  }
  {
    HINT("gradient 0 goes out before the next backward: the stage before this one waits for it");
    CHECK(middle.find("send gradient 0") < middle.find("backward 1"));
  }
  {
    HINT("receive right before the work that needs it, send right after the work that made it");
    CHECK(middle ==
          "receive activation 0\nforward 0\nsend activation 0\n"
          "receive activation 1\nforward 1\nsend activation 1\n"
          "receive gradient 0\nbackward 0\nsend gradient 0\n"
          "receive gradient 1\nbackward 1\nsend gradient 1\nstep\n");
  }
  {
    HINT("the first stage receives no activations and sends no gradients");
    CHECK(text_of(gpipe_schedule(3, 1, 0)) ==
          "forward 0\nsend activation 0\nreceive gradient 0\nbackward 0\nstep\n");
  }
  HINT("the last stage sends no activations and receives no gradients");
  CHECK(text_of(gpipe_schedule(3, 1, 2)) ==
        "receive activation 0\nforward 0\nbackward 0\nsend gradient 0\nstep\n");
}

TEST_CASE("Four stages finish without waiting for each other for ever", "[task03.1]") {
  HINT(
      "some stage waits for what its neighbour sends later, or never: when does a gradient go "
      "out?");
  const Timetable table = simulate(gpipe_schedules(4, 8), 1, 2, /*blocking_sends=*/true);
  HINT(
      "stages wait for one another longer than a pipeline must: (m + p - 1) forwards and "
      "backwards");
  CHECK(table.makespan == Approx((8 + 4 - 1) * 3));
}

std::vector<Instructions> one_f1b_schedules(int stages, int micro_batches) {
  std::vector<Instructions> all;
  for (int stage = 0; stage < stages; ++stage) {
    all.push_back(one_f1b_schedule(stages, micro_batches, stage));
  }
  return all;
}

/// The instructions for one micro-batch, and the step.
Instructions only(const Instructions& list, int micro_batch) {
  Instructions some = list;
  std::erase_if(some, [&](const Instruction& i) {
    return i.kind != Instruction::Kind::step && i.micro_batch != micro_batch;
  });
  return some;
}

TEST_CASE("1F1B goes backward as soon as there is a gradient", "[task03.2]") {
  for (const int stage : {2, 1, 0}) {
    HINT("every micro-batch goes backward, too: what of the last ones, when no forward is left?");
    const Instructions list = one_f1b_schedule(3, 4, stage);
    CHECK(std::ranges::count(list, Instruction::Kind::backward, &Instruction::kind) == 4);
    HINT("first in, first out: which micro-batch has waited longest for its backward?");
    CHECK(backward_order(list) == std::vector<int>{0, 1, 2, 3});
  }
  {
    HINT("the last stage has a gradient right after its first forward: what does it wait for?");
    CHECK(work_of(one_f1b_schedule(3, 4, 2)) == "F0 B0 F1 B1 F2 B2 F3 B3");
  }
  {
    HINT("an earlier stage runs ahead of its first backward: by how many, and then in turn");
    CHECK(work_of(one_f1b_schedule(3, 4, 1)) == "F0 F1 B0 F2 B1 F3 B2 B3");
    CHECK(work_of(one_f1b_schedule(3, 4, 0)) == "F0 F1 F2 B0 F3 B1 B2 B3");
  }
  HINT(
      "there may be fewer micro-batches than stages: how many are there before the first backward "
      "then?");
  CHECK(work_of(one_f1b_schedule(4, 2, 0)) == "F0 F1 B0 B1");
}

TEST_CASE("What becomes of one micro-batch in 1F1B", "[task03.2]") {
  for (const int micro_batch : {0, 2, 3}) {
    const auto seen_by = [&](int stage) {
      return text_of(only(one_f1b_schedule(3, 4, stage), micro_batch));
    };
    const std::string i = " " + std::to_string(micro_batch) + "\n";
    {
      HINT("what a forward or backward needs is received before it, and what it made is sent then");
      CHECK(seen_by(1) == "receive activation" + i + "forward" + i + "send activation" + i +
                              "receive gradient" + i + "backward" + i + "send gradient" + i +
                              "step\n");
    }
    {
      HINT("the first stage receives no activations and sends no gradients");
      CHECK(seen_by(0) == "forward" + i + "send activation" + i + "receive gradient" + i +
                              "backward" + i + "step\n");
    }
    HINT("the last stage sends no activations and receives no gradients");
    CHECK(seen_by(2) == "receive activation" + i + "forward" + i + "backward" + i +
                            "send gradient" + i + "step\n");
  }
}

TEST_CASE("1F1B holds no gradient back", "[task03.2]") {
  const Instructions list = one_f1b_schedule(3, 4, 1);
  const auto place = [&](Instruction::Kind kind, int micro_batch) {
    return std::ranges::find(list, Instruction{kind, micro_batch}) - list.begin();
  };
  const auto sent = place(Instruction::Kind::send_gradient, 0);
  {
    HINT("gradient 0 goes out only after the next backward: the stage before waits for it, idle");
    CHECK(sent < place(Instruction::Kind::backward, 1));
  }
  HINT("gradient 0 goes out only after the next forward: the stage before waits for it, idle");
  CHECK(sent < place(Instruction::Kind::forward, 2));
}

TEST_CASE("Four stages of 1F1B finish, and keep few activations", "[task03.2]") {
  HINT(
      "some stage waits for ever: what it receives comes only after its neighbour has got "
      "something "
      "from it. What comes first, a backward or the activation for the next forward?");
  const std::vector<Instructions> schedules = one_f1b_schedules(4, 8);
  const Timetable table = simulate(schedules, 1, 2);
  {
    HINT("a stage keeps the activations of a micro-batch until it has gone backward: how many?");
    CHECK(table.live == std::vector<int>{4, 3, 2, 1});
  }
  {
    HINT(
        "the bubble is that of GPipe, (m + p - 1) forwards and backwards: does a stage wait for "
        "something that it does not need yet? What comes first, a backward or the activation for "
        "the next forward?");
    CHECK(table.makespan == Approx((8 + 4 - 1) * 3));
  }
  HINT(
      "two neighbours wait for each other, because a send lasts until it is received: in which "
      "order does a stage send its gradient and receive its next activation?");
  CHECK_NOTHROW(simulate(schedules, 1, 2, /*blocking_sends=*/true));
}

bool is_pass(const Instruction& i) {
  return i.kind == Instruction::Kind::forward || i.kind == Instruction::Kind::backward;
}

/// "F0.1 B0.1 ...": the forwards and backwards of a device, each with its chunk; or only those that
/// begin with `letter`, and so many of them.
std::string passes_of(const Instructions& list, const std::string& letter = "", int most = 99) {
  std::string text;
  for (const Instruction& i : list) {
    if (!is_pass(i)) continue;
    const std::string label = label_of(i, 2);
    if (label.starts_with(letter) && most-- > 0) text += (text.empty() ? "" : " ") + label;
  }
  return text;
}

/// "send gradient 3 of chunk 1": what does not stand beside its forward or backward; "" if all do.
std::string not_beside_its_pass(const Instructions& list) {
  const auto is_beside = [](const Instruction& pass, const Instruction& message) {
    return is_pass(pass) && pass.micro_batch == message.micro_batch && pass.chunk == message.chunk;
  };
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string name = name_of(list[i].kind);
    const bool fits = name.starts_with("receive") ? is_beside(list.at(i + 1), list[i])
                      : name.starts_with("send")  ? i > 0 && is_beside(list[i - 1], list[i])
                                                  : true;
    if (!fits) {
      return name + " " + std::to_string(list[i].micro_batch) + " of chunk " +
             std::to_string(list[i].chunk);
    }
  }
  return "";
}

TEST_CASE("Interleaved 1F1B takes its chunks in turn", "[task03.5]") {
  HINT(
      "device 0 of 3, two chunks, 6 micro-batches: does the writer know of both chunks, and are "
      "there no others?");
  const Instructions list = interleaved_schedule(3, 2, 6, 0);
  {
    HINT("every micro-batch goes through every chunk of a device, forward once and backward once");
    CHECK(std::ranges::count(list, Instruction::Kind::forward, &Instruction::kind) == 12);
    CHECK(std::ranges::count(list, Instruction::Kind::backward, &Instruction::kind) == 12);
  }
  {
    HINT(
        "how many micro-batches go through one chunk before the next chunk's turn? As many as "
        "there "
        "are devices: then the first of them has come round to the next chunk. After the last "
        "chunk, which ones come?");
    CHECK(passes_of(list, "F") == "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 F3.0 F4.0 F5.0 F3.1 F4.1 F5.1");
  }
  {
    HINT("a gradient comes from the last stage: with which chunk of a device do backwards begin?");
    CHECK(passes_of(list, "B", 1) == "B0.1");
  }
  HINT(
      "backwards go through as many micro-batches before the next chunk's turn: do a backward's "
      "micro-batch and chunk belong together?");
  CHECK(passes_of(list, "B") == "B0.1 B1.1 B2.1 B0.0 B1.0 B2.0 B3.1 B4.1 B5.1 B3.0 B4.0 B5.0");
}

TEST_CASE("What a device does before its first backward", "[task03.5]") {
  {
    HINT(
        "the last device has a gradient right after the first forward of its last chunk: what does "
        "it do until then, and then in turn?");
    CHECK(passes_of(interleaved_schedule(2, 2, 4, 1)) ==
          "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0");
  }
  {
    HINT(
        "the first gradient comes later to a device that is further from the last one: on the way "
        "there and back, how many forwards are there time for?");
    CHECK(passes_of(interleaved_schedule(2, 2, 4, 0), "", 9) ==
          "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1");
    CHECK(passes_of(interleaved_schedule(3, 2, 6, 0), "", 9) ==
          "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 F3.0 F4.0 B0.1");
  }
  {
    HINT("2 devices with three chunks each: does something count on two?");
    CHECK(passes_of(interleaved_schedule(2, 3, 2, 1)) ==
          "F0.0 F1.0 F0.1 F1.1 F0.2 B0.2 F1.2 B1.2 B0.1 B1.1 B0.0 B1.0");
    CHECK(passes_of(interleaved_schedule(2, 3, 4, 0), "", 9) ==
          "F0.0 F1.0 F0.1 F1.1 F0.2 F1.2 F2.0 B0.2 F3.0");
  }
  HINT("there may be fewer forwards than a device could do before its first backward");
  CHECK(passes_of(interleaved_schedule(4, 2, 4, 0)) ==
        "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 B0.1 B1.1 B2.1 B3.1 B0.0 B1.0 B2.0 B3.0");
}

TEST_CASE("What becomes of one micro-batch in one chunk", "[task03.5]") {
  const auto seen_by = [](int device, int chunk) {
    Instructions some = only(interleaved_schedule(3, 2, 6, device), 4);
    std::erase_if(some, [&](const Instruction& i) { return i.chunk != chunk; });
    std::erase(some, Instruction{Instruction::Kind::step});
    return text_of(some);
  };
  const std::string whole =
      "receive activation 4\nforward 4\nsend activation 4\n"
      "receive gradient 4\nbackward 4\nsend gradient 4\n";
  {
    HINT(
        "what a forward or backward needs is received before it, and what it made is sent then. Of "
        "which chunk is what stands there twice, or not at all?");
    CHECK(seen_by(1, 0) == whole);
    CHECK(seen_by(1, 1) == whole);
  }
  {
    HINT("chunk 1 of the first device has a stage before it: the last device's in chunk 0");
    CHECK(seen_by(0, 1) == whole);
    CHECK(seen_by(2, 0) == whole);
  }
  {
    HINT("the first of all stages receives no activations and sends no gradients");
    CHECK(seen_by(0, 0) == "forward 4\nsend activation 4\nreceive gradient 4\nbackward 4\n");
  }
  {
    HINT("the last of all stages sends no activations and receives no gradients");
    CHECK(seen_by(2, 1) == "receive activation 4\nforward 4\nbackward 4\nsend gradient 4\n");
  }
  {
    HINT("the optimizer's step comes once, and last");
    CHECK(interleaved_schedule(3, 2, 6, 1).back() == Instruction{Instruction::Kind::step});
  }
  HINT("receive right before the work that needs it, send right after the work that made it");
  CHECK(not_beside_its_pass(interleaved_schedule(3, 2, 6, 1)) == "");
}

TEST_CASE("Four devices of two chunks finish, with half the bubble", "[task03.5]") {
  std::vector<Instructions> schedules;
  for (int device = 0; device < 4; ++device) {
    schedules.push_back(interleaved_schedule(4, 2, 8, device));
  }
  HINT("some stage waits for ever: what it receives comes only after it has sent something later");
  const Timetable table = simulate(schedules, 1, 2);
  {
    HINT("an activation is kept until its backward: how many forwards before the first backward?");
    CHECK(table.live == std::vector<int>{11, 9, 7, 5});
  }
  HINT(
      "devices wait longer than they must: (V m + p - 1) forwards and backwards of a stage. Does "
      "something wait for what it does not need yet?");
  CHECK(table.makespan == Approx((2 * 8 + 4 - 1) * 3));
}

}  // namespace
}  // namespace lockstep
