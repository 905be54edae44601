// Which world serves which devices, and what its calls say of themselves.

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "common/core/error.h"
#include "common/core/stream_backend.h"
#include "common/kernels/kernels.h"
#include "tests/support/catch.h"
#include "tests/support/comm_trial.h"
#include "tests/support/data_test_files.h"
#include "tests/support/tasks.h"

namespace lockstep {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::collectives;
using testing::device_ids;
using testing::enqueue;
using testing::Gate;
using testing::message_of;
using testing::numbered;
using testing::Ranks;

}  // namespace

// --- Which world ---------------------------------------------------------------------------------

namespace {

/// A device that only has a name: what make_single_process_world() looks at before it uses one.
class NamedDevice final : public Device {
 public:
  explicit NamedDevice(DeviceId id) : Device(id, {}) {}
  std::string description() const override { return "none"; }
  Kernels& kernels() override { fail<EnvironmentError>("a named device has no kernels"); }
  std::shared_ptr<void> allocate_host(size_t) override { return nullptr; }

 protected:
  std::unique_ptr<StreamBackend> make_stream(std::string) override { return nullptr; }
};

std::string refusal_of_world(const std::string& list,
                             LocalBackend backend = LocalBackend::automatic) {
  std::vector<std::unique_ptr<NamedDevice>> devices;
  std::vector<Device*> pointers;
  for (size_t at = 0; at < list.size(); at = std::min(list.find(',', at), list.size()) + 1) {
    const DeviceId id = parse_devices(list.substr(at, list.find(',', at) - at))[0];
    devices.push_back(std::make_unique<NamedDevice>(id));
    pointers.push_back(devices.back().get());
  }
  const std::string text =
      message_of<BadInput>([&] { make_single_process_world(pointers, backend); });
  CHECK(text.find('\n') == std::string::npos);
  return text;
}

}  // namespace

TEST_CASE("A world without devices, or of two kinds of them, is refused", "[comm][row40]") {
  CHECK_THAT(refusal_of_world(""), ContainsSubstring("without devices"));
  for (const LocalBackend backend :
       {LocalBackend::automatic, LocalBackend::in_process, LocalBackend::nccl}) {
    CHECK_THAT(refusal_of_world("cpu:0,cuda:0", backend),
               ContainsSubstring("cpu:0") && ContainsSubstring("cuda:0"));
    CHECK_THAT(refusal_of_world("cuda:1,cuda:0,cpu:2", backend),
               ContainsSubstring("cuda:1") && ContainsSubstring("cpu:2"));
  }
}

TEST_CASE("NCCL is refused for CPU devices, the in-process world for several GPUs", "[comm]") {
  CHECK_THAT(refusal_of_world("cpu:0,cpu:1", LocalBackend::nccl),
             ContainsSubstring("NCCL") && ContainsSubstring("cpu:0"));
  CHECK_THAT(refusal_of_world("cuda:0,cuda:1", LocalBackend::in_process),
             ContainsSubstring("rank 0 is on cuda:0") && ContainsSubstring("rank 1 on cuda:1"));
}

TEST_CASE("A world knows its ranks and its kind", "[comm][row40]") {
  for (const LocalBackend backend : {LocalBackend::automatic, LocalBackend::in_process}) {
    Ranks ranks(testing::device_ids(3), backend);
    CHECK(ranks.world->description() == "in-process");
    CHECK(ranks.size() == 3);
    for (int rank = 0; rank < 3; ++rank) {
      CHECK(ranks.world->communicator(rank).rank() == rank);
      CHECK(ranks.world->communicator(rank).world_size() == 3);
    }
  }
}

TEST_CASE("In one process bytes are counted where their copies are enqueued", "[comm]") {
  for (const int world_size : {1, 2, 3, 5}) {
    const Ranks ranks(device_ids(world_size));
    for (const testing::Collective& collective : collectives(ElementType::f32, world_size)) {
      for (const int64_t n : {0, 1, 1001}) {
        const int root = world_size - 1;
        INFO(world_size << " ranks, " << collective.name(root) << " of " << n);
        int64_t found = 0, expected = 0;
        for (const int64_t sent : testing::bytes_sent_for(ranks, collective, n, root)) {
          found += sent;
        }
        // What each part of a sum goes through differs from a ring; all parts together do not.
        for (const int64_t sent : testing::ring_bytes_for(collective, n, root, world_size)) {
          expected += sent;
        }
        CHECK(found == expected);
      }
    }
  }
}

TEST_CASE("Elements are parts of memory by number, and a call says what it is", "[comm]") {
  std::array<double, 10> memory{};
  const Elements all(memory.data(), 10, ElementType::f64);
  CHECK(all.part(3, 4).data == &memory[3]);
  CHECK(all.part(3, 4).count == 4);
  CHECK(size_of(ElementType::f32) == 4);
  CHECK(size_of(ElementType::f64) == 8);
  CHECK(size_of(ElementType::i64) == 8);
  const auto text = [&](Call::Op op) { return Call{.op = op, .mine = all, .all = {}}.text(); };
  CHECK(text(Call::Op::all_reduce) == "all_reduce of 10 f64, sum");
  CHECK(text(Call::Op::broadcast) == "broadcast of 10 f64, root 0");
  CHECK(text(Call::Op::receive) == "receive of 10 f64 from rank 0");
  CHECK(text(Call::Op::barrier) == "barrier");
}

TEST_CASE("A call says for whom it is, and errors pass that on", "[comm]") {
  Gate gate;
  Ranks ranks(device_ids(2));
  const auto x = numbered<float>(ranks, 4, 1);
  const auto call_for = [&](const char* of_rank_0, const char* of_rank_1) {
    ranks.together([&](Communicator& rank, Stream stream) {
      const CallLabel outer(rank, rank.rank() == 0 ? of_rank_0 : of_rank_1);
      {  // gone when the call comes
        const CallLabel inner(rank, "nothing yet");
      }
      rank.all_reduce(stream, x[rank.rank()]);
    });
  };
  SECTION("the one that a rank does not come to") {
    enqueue(ranks.streams[1], [&] { gate.pass(); });
    call_for("bn1", "bn1");
    CHECK(message_of<PeerLost>([&] { ranks.world->wait(0.1); }) ==
          "group 1 of collectives (all_reduce of 4 f32, sum for bn1): rank 1 (cpu:1) did not come "
          "within 0.1 s");
    gate.open();
    for (const Stream& stream : ranks.streams) stream.backend().block(stream.backend().record());
  }
  SECTION("two that do not belong together") {
    CHECK_THAT(message_of<PeerLost>([&] { call_for("bn1", "bn2"); }),
               ContainsSubstring("rank 0 (cpu:0) called all_reduce of 4 f32, sum for bn1, rank 1 "
                                 "(cpu:1) called all_reduce of 4 f32, sum for bn2"));
  }
}

}  // namespace lockstep
