// What a rank's calls say of themselves, and calls that cannot be right.

#include "common/comm/communicator.h"

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "common/core/error.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/shm_ranks.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::message_of;
using testing::numbered;
using testing::Ranks;
using Floats = BasicTensor<float>;
using Wholes = BasicTensor<int64_t>;

TEST_CASE("Elements are parts of memory by number, and a call says what it is", "[comm]") {
  std::array<double, 10> memory{};
  const Elements all(memory.data(), 10, ElementType::f64);
  CHECK(all.part(3, 4).data == &memory[3]);
  CHECK(all.part(3, 4).count == 4);
  CHECK(size_of(ElementType::f32) == 4);
  CHECK(size_of(ElementType::f64) == 8);
  CHECK(size_of(ElementType::i64) == 8);
  CHECK(size_of(ElementType::bf16) == 2);
  CHECK(size_of(ElementType::fp16) == 2);
  const auto text = [&](Call::Op op) { return Call{.op = op, .mine = all, .all = {}}.text(); };
  CHECK(text(Call::Op::all_reduce) == "all_reduce of 10 f64, sum");
  CHECK(text(Call::Op::broadcast) == "broadcast of 10 f64, root 0");
  CHECK(text(Call::Op::receive) == "receive of 10 f64 from rank 0");
  CHECK(text(Call::Op::barrier) == "barrier");
  std::array<Bf16, 10> half{};
  const Elements halves(half.data(), 10, ElementType::bf16);
  CHECK(halves.part(3, 4).data == &half[3]);
  CHECK(Call{.op = Call::Op::all_reduce, .mine = halves, .all = {}}.text() ==
        "all_reduce of 10 bf16, sum");
  CHECK(std::string(name_of(ElementType::fp16)) == "fp16");
}

// --- Arguments that cannot be right --------------------------------------------------------------

struct Mistake {
  std::string name;
  std::function<void(Communicator&, Stream)> call;
  std::vector<std::string> said;
};

/// Of rank 1 of two, which is on cpu:1; `other` is on cpu:0.
std::vector<Mistake> mistakes(const Floats& x, const Wholes& w, const Floats& other) {
  const Elements three(x.data(), 3, ElementType::f32), seven(x.data(), 7, ElementType::f32);
  const Elements six(w.data(), 6, ElementType::i64), whole(w.data(), 3, ElementType::i64);
  const auto average = Reduction::average;
  return {
      {"root too large",
       [=](Communicator& r, Stream s) { r.broadcast(s, three, 2); },
       {"broadcast of 3 f32, root 2", "ranks 0 to 1"}},
      {"root negative",
       [=](Communicator& r, Stream s) { r.broadcast(s, three, -1); },
       {"root -1", "ranks 0 to 1"}},
      {"receiver unknown",
       [=](Communicator& r, Stream s) { r.send(s, three, 5); },
       {"to rank 5", "ranks 0 to 1"}},
      {"sender unknown",
       [=](Communicator& r, Stream s) { r.receive(s, three, -3); },
       {"from rank -3", "ranks 0 to 1"}},
      {"itself", [=](Communicator& r, Stream s) { r.send(s, three, 1); }, {"to rank 1", "itself"}},
      {"parts of all_gather",
       [=](Communicator& r, Stream s) { r.all_gather(s, three, seven); },
       {"all_gather", "must be 6 f32", "found 7 f32"}},
      {"parts of reduce_scatter",
       [=](Communicator& r, Stream s) { r.reduce_scatter(s, seven, three); },
       {"reduce_scatter", "must be 6 f32", "found 7 f32"}},
      {"type of the parts of all_gather",
       [=](Communicator& r, Stream s) { r.all_gather(s, three, six); },
       {"all_gather", "must be 6 f32", "found 6 i64"}},
      {"average of whole numbers",
       [=](Communicator& r, Stream s) { r.all_reduce(s, whole, average); },
       {"all_reduce of 3 i64", "whole numbers have no average"}},
      {"average of parts of whole numbers",
       [=](Communicator& r, Stream s) { r.reduce_scatter(s, six, whole, average); },
       {"whole numbers have no average"}},
      {"a tensor of another device",
       [=](Communicator& r, Stream s) { r.all_reduce(s, other); },
       {"all_reduce of 8 f32, sum on a stream of cpu:1, its tensor is on cpu:0; copy it there"}},
      {"a part of a tensor of another device",
       [=](Communicator& r, Stream s) { r.all_gather(s, three, Elements(other).part(0, 6)); },
       {"all_gather of 3 f32 on a stream of cpu:1, its tensor is on cpu:0"}},
  };
}

TEST_CASE("A call that cannot be right is refused by its rank, which goes on to work", "[comm]") {
  const Ranks ranks = testing::shm_ranks(2);
  const auto x = numbered<float>(ranks, 8, 1);
  const auto w = numbered<int64_t>(ranks, 8, 1);
  for (const Mistake& mistake : mistakes(x[1], w[1], x[0])) {
    for (const bool in_group : {false, true}) {
      Communicator& comm = *ranks.comms[1];
      if (in_group) comm.open_group();
      const std::string text = message_of<BadInput>([&] { mistake.call(comm, ranks.streams[1]); });
      if (in_group) comm.close_group();
      INFO(mistake.name << ": " << text);
      CHECK_THAT(text, ContainsSubstring("rank 1: "));
      CHECK(text.find('\n') == std::string::npos);
      for (const std::string& part : mistake.said) CHECK_THAT(text, ContainsSubstring(part));
    }
  }
  // Of all that nothing was enqueued: both ranks' first collective is this one.
  ranks.together(
      [&](Communicator& comm, Stream stream) { comm.all_reduce(stream, x[comm.rank()]); });
  for (const Floats& sum : x) CHECK(sum.to_host() == std::vector<float>(8, 3));
}

TEST_CASE("A group inside a group is refused, and the group stays open", "[comm]") {
  const Ranks ranks = testing::shm_ranks(1);
  const auto x = numbered<float>(ranks, 4, 1);
  Communicator& comm = *ranks.comms[0];
  comm.open_group();
  comm.all_reduce(ranks.streams[0], x[0]);
  CHECK(message_of<BadInput>([&] { comm.open_group(); }) ==
        "rank 0: a group of calls is open already; close it before");
  comm.close_group();
  comm.barrier(ranks.streams[0]);
  CHECK(x[0].to_host() == std::vector<float>(4, 1));
}

TEST_CASE("The same count in other parts fits together: only numbers, types and roots count",
          "[comm]") {
  const Ranks ranks = testing::shm_ranks(2);
  const auto x = numbered<float>(ranks, 8, 1);
  ranks.together([&](Communicator& comm, Stream stream) {
    const Elements mine = x[comm.rank()];
    comm.all_reduce(stream, comm.rank() == 0 ? mine.part(0, 3) : mine.part(5, 3));
  });
  CHECK(x[0].to_host() == std::vector<float>{3, 3, 3, 1, 1, 1, 1, 1});
  CHECK(x[1].to_host() == std::vector<float>{2, 2, 2, 2, 2, 3, 3, 3});
}

}  // namespace
}  // namespace lockstep
