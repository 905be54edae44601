// The process group: what ranks tell each other, and how they are connected. Ranks are threads;
// tests/faults has the same with processes.

#include "common/comm/process_group.h"

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/comm/backend_choice.h"
#include "common/core/error.h"
#include "common/rendezvous/agreement.h"
#include "tests/support/catch.h"
#include "tests/support/data_test_files.h"
#include "tests/support/free_port.h"
#include "tests/support/tasks.h"
#include "tests/unit/comm/process_group_job.h"

namespace lockstep {
namespace {

using namespace testing::group;
using Catch::Matchers::ContainsSubstring;
using testing::Clock;
using testing::contract_of;
using testing::kLong;
using testing::kShort;
using testing::kSoon;
using testing::message_of;
using testing::ScopedEnvironment;
using testing::seconds_since;
using Texts = std::vector<std::string>;

// --- What ranks tell each other ------------------------------------------------------------------

TEST_CASE("Ranks of a group know their place, exchange texts and meet", "[group][tsan]") {
  constexpr int kRanks = 3;
  std::atomic<int> came{0};
  std::vector<Texts> all(kRanks);
  const Texts errors = Job(kRanks).run([&](ProcessGroup& group) {
    require_equal(group.world_size(), kRanks, "world size");
    require_equal(group.local_rank(), group.rank(), "local rank");
    require_equal(group.local_world_size(), kRanks, "local world size");
    for (int i = 0; i < 3; ++i) {
      for (const std::string& text : group.exchange(fmt::format("{}.{}", group.rank(), i))) {
        all[group.rank()].push_back(text);
      }
    }
    if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ++came;
    group.barrier();
    require_equal(came.load(), kRanks, "ranks that came to the barrier");
  });
  CHECK(errors == Texts(kRanks));
  for (const Texts& texts : all) {
    CHECK(texts == Texts{"0.0", "1.0", "2.0", "0.1", "1.1", "2.1", "0.2", "1.2", "2.2"});
  }
}

TEST_CASE("A barrier names the ranks that do not come to it, and its number",
          "[group][tsan][row72]") {
  const auto begin = Clock::now();
  const Texts errors = Job(4, "tcp", kShort).run([](ProcessGroup& group) {
    group.barrier();
    if (group.rank() % 2 == 0) group.barrier();
    std::this_thread::sleep_for(std::chrono::duration<double>(2 * kShort));
  });
  for (const int rank : {0, 2}) {  // one of them may give up first
    CHECK_THAT(errors[rank],
               Catch::Matchers::StartsWith(fmt::format("rank {}: barrier 2: ", rank)));
    CHECK_THAT(errors[rank], Catch::Matchers::EndsWith("ranks 1, 3 did not come within 0.3 s"));
  }
  CHECK(seconds_since(begin) < kLong);
}

TEST_CASE("Who waits for a rank that dies hears of it at once", "[group][tsan][row67]") {
  const auto begin = Clock::now();
  const Texts errors = Job(3).run([](ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 2) fail<BadInput>("rank 2 has had enough");
    group.exchange("");
  });
  CHECK(errors[0] == "rank 0: exchange 1: rank 2 closed the connection");
  CHECK(errors[1] == "rank 1: exchange 1: rank 2 closed the connection");
  CHECK(seconds_since(begin) < kSoon);
}

TEST_CASE("What fails on some ranks fails on all, and one of them says it", "[group][tsan]") {
  for (const std::vector<int>& failing :
       std::vector<std::vector<int>>{{0, 1, 2}, {1}, {2, 1}, {0}}) {
    std::array<bool, 3> says{};
    const Texts errors = Job(3).run([&](ProcessGroup& group) {
      try {
        group.together([&] {
          if (std::ranges::count(failing, group.rank()) > 0) fail<DeviceError>("no luck");
        });
      } catch (const SaidByAnother& error) {
        require_equal(error.exit_status(), DeviceError("").exit_status(), "exit status");
        throw;
      } catch (const DeviceError&) {
        says[size_t(group.rank())] = true;
        throw;
      }
    });
    const int first = *std::ranges::min_element(failing);
    const std::string expected = first == 0 ? "no luck" : fmt::format("rank {}: no luck", first);
    CHECK(errors == Texts(3, expected));
    for (int rank = 0; rank < 3; ++rank) CHECK(says[size_t(rank)] == (rank == first));
  }
}

TEST_CASE("What fails on no rank goes on, with each rank's own result", "[group][tsan]") {
  const Texts errors = Job(3).run([](ProcessGroup& group) {
    for (int turn = 0; turn < 3; ++turn) {
      const int mine = 10 * turn + group.rank();
      require_equal(group.together([&] { return mine; }), mine, "result");
      require_equal(*group.together([&] { return std::make_unique<int>(mine); }), mine, "result");
    }
  });
  CHECK(errors == Texts(3));
}

TEST_CASE("An exception that is none of ours ends all ranks, too", "[group][tsan]") {
  const Texts errors = Job(2).run([](ProcessGroup& group) {
    group.together([&] {
      if (group.rank() == 1) throw std::runtime_error("strange");
    });
  });
  CHECK(errors == Texts(2, "rank 1: strange"));
}

TEST_CASE("Rank 0, which hosts the store, leaves last", "[group][tsan]") {
  const Texts errors = Job(3).run([](ProcessGroup& group) {
    // The others' last words need the store when rank 0 is at its end already.
    if (group.rank() == 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(50 * group.rank()));
    group.store().set("word of " + std::to_string(group.rank()), "last");
  });
  CHECK(errors == Texts(3));
}

TEST_CASE("Ranks may leave right after their last collective", "[group][gloo][tcp]") {
  for (const std::string& backend : host_backends()) {
    for (int i = 0; i < 10; ++i) {
      const Texts errors =
          Job(4, backend).run_connected([&](ProcessGroup&, Communicator& ranks, Stream stream) {
            reduce(ranks, stream, 1 + 999 * i);
          });
      CHECK(errors == Texts(4));
    }
  }
}

// --- Groups of some ranks ------------------------------------------------------------------------

/// What an all-reduce of the ranks' numbers in the job leaves on this one.
float sum_of_ranks(Communicator& ranks, Stream stream, int mine) {
  const auto x = BasicTensor<float>::from_host(stream, {1}, {float(mine)});
  ranks.all_reduce(stream, x);
  return x.to_host()[0];
}

TEST_CASE("Ranks in two groups at once, rows and columns, over every transport",
          "[group][gloo][tcp][tsan]") {
  for (const std::string& backend : host_backends()) {
    INFO(backend);
    const Texts errors = Job(4, backend).run([&](ProcessGroup& group) {
      const auto device = open_device({DeviceId::Kind::cpu, group.rank()}, {});
      const Stream stream = device->create_stream("communication");
      const auto all = group.connect(*device);
      const int me = group.rank();
      const auto row = group.new_group(*device, [](int rank) { return rank / 2; }),
                 column = group.new_group(*device, [](int rank) { return rank % 2; });
      const std::vector<int> places{row->rank(), row->world_size(), column->rank(),
                                    column->world_size()};
      if (places != std::vector<int>{me % 2, 2, me / 2, 2}) fail<BadInput>("places");
      for (int turn = 0; turn < 3; ++turn) {  // in one order on all ranks
        if (sum_of_ranks(*row, stream, me) != float(me < 2 ? 0 + 1 : 2 + 3)) fail<BadInput>("row");
        if (sum_of_ranks(*all, stream, me) != 6) fail<BadInput>("all");
        if (sum_of_ranks(*column, stream, me) != float(me % 2 == 0 ? 0 + 2 : 1 + 3)) {
          fail<BadInput>("column");
        }
      }
      const auto mine = BasicTensor<float>::from_host(stream, {1}, {float(me)}),
                 gathered = BasicTensor<float>::empty(stream, {2});
      column->all_gather(stream, mine, gathered);
      if (gathered.to_host() != std::vector<float>{float(me % 2), float(me % 2 + 2)}) {
        fail<BadInput>("gathered");
      }
    });
    CHECK(errors == Texts(4));
  }
}

TEST_CASE("A group may be one rank, or all; none is made before the ranks are connected",
          "[group]") {
  const Texts errors =
      Job(3).run_connected([](ProcessGroup& group, Communicator& all, Stream stream) {
        const auto alone =
            group.new_group(stream.device(), [](int rank) { return rank == 1 ? 7 : 0; });
        require_equal(alone->world_size(), group.rank() == 1 ? 1 : 2, "world size");
        sum_of_ranks(*alone, stream, 1);
        const auto same = group.new_group(stream.device(), [](int) { return 0; });
        require_equal(same->rank(), all.rank(), "rank");
        if (sum_of_ranks(*same, stream, 1) != 3) fail<BadInput>("sum");
      });
  CHECK(errors == Texts(3));
  CHECK(Job(1).run([](ProcessGroup& group) {
    const auto device = open_device({DeviceId::Kind::cpu, 0}, {});
    group.new_group(*device, [](int) { return 0; });
  }) == Texts{"rank 0: new_group() before connect(), which chooses what connects ranks"});
}

TEST_CASE("A group's errors say which ranks it has, and the other groups go on", "[group][tcp]") {
  for (const std::string& backend : host_backends()) {
    INFO(backend);
    const Texts errors =
        Job(4, backend, kShort)
            .run_connected([](ProcessGroup& group, Communicator&, Stream stream) {
              const auto half = group.new_group(stream.device(), [](int rank) { return rank / 2; });
              if (group.rank() == 3) {
                std::this_thread::sleep_for(std::chrono::duration<double>(4 * kShort));
              } else {
                reduce(*half, stream);
              }
            });
    CHECK(errors[0].empty());
    CHECK(errors[1].empty());
    CHECK_THAT(errors[2], Catch::Matchers::StartsWith(
                              "rank 2 of ranks 2, 3: collective 1 (all_reduce of 10 f32, sum): "));
    CHECK_THAT(errors[2], ContainsSubstring("no answer from rank 3 within 0.3 s"));
  }
}

// --- Options -------------------------------------------------------------------------------------

TEST_CASE("Options that cannot be meant are refused before anyone waits", "[group][row59]") {
  const auto refusal = [](const ProcessGroupOptions& options) {
    return message_of<BadInput>([&] { ProcessGroup group(contract_of(1, 2, 1), options); });
  };
  CHECK(refusal({.backend = "bogus"}) ==
        "--backend: Invalid backend: 'bogus', expected auto, nccl, shm, tcp or gloo");
  CHECK_THAT(refusal({.timeout_seconds = 0}), ContainsSubstring("--timeout 0: expected seconds"));
  CHECK_THAT(refusal({.timeout_seconds = -1}), ContainsSubstring("--timeout -1"));
  const ScopedEnvironment debug("LOCKSTEP_DEBUG", "everything");
  CHECK(refusal({}) == "LOCKSTEP_DEBUG=everything: expected collectives, or nothing");
}

TEST_CASE("Ranks that are given different backends all say so", "[group][tsan]") {
  Job job(3);
  job.options_of_rank = [](int rank, ProcessGroupOptions& options) {
    if (rank == 2) options.backend = "";
  };
  for (const std::string& error : job.run([](ProcessGroup&) {})) {
    CHECK(error ==
          "--backend: rank 0 has tcp, rank 2 has auto; start all ranks with the same options and "
          "environment");
  }
}

TEST_CASE("A rank's device is the one with its local rank, if so many are named",
          "[group][row66]") {
  const ProcessGroup group(contract_of(0, 1, 0), {});
  const auto ids = parse_devices("cpu:3,cpu:5");
  CHECK(group.device_of(ids) == ids[0]);
  const Texts errors = Job(2).run([&](ProcessGroup& ranks) {
    require(ranks.device_of(ids) == ids[ranks.rank()], "another device");
    ranks.device_of({ids[0]});
  });
  CHECK(errors[0].empty());
  CHECK_THAT(errors[1], ContainsSubstring(
                            "rank 1 has local rank 1 on its host, but --devices names 1 device"));
}

// --- Backends ------------------------------------------------------------------------------------

TEST_CASE("Connected ranks reduce over every backend, and know its name",
          "[group][gloo][tcp][row70]") {
  const auto reduces_over = [](const std::string& backend) {
    return [backend](ProcessGroup& group, Communicator& ranks, Stream stream) {
      require_equal(group.backend(), backend, "backend");
      const auto x = BasicTensor<int64_t>::from_host(stream, {2}, {group.rank(), 5});
      ranks.all_reduce(stream, x);
      const int64_t ranks_here = group.world_size();
      require(
          x.to_host() == std::vector<int64_t>{ranks_here * (ranks_here - 1) / 2, 5 * ranks_here},
          "another sum");
    };
  };
  for (const std::string& backend : host_backends()) {
    CHECK(Job(3, backend).run_connected(reduces_over(backend)) == Texts(3));
  }
  CHECK(Job(2, "").run_connected(reduces_over("shm")) == Texts(2));
}

TEST_CASE("A group is connected once", "[group][tsan]") {
  const Texts errors = Job(1).run_connected(
      [](ProcessGroup& group, Communicator&, Stream stream) { group.connect(stream.device()); });
  CHECK_THAT(errors[0], ContainsSubstring("connect() called twice"));
}

TEST_CASE("NCCL is refused for CPU devices, on all ranks", "[group][tsan]") {
  const Texts errors = Job(2, "nccl").run_connected([](ProcessGroup&, Communicator&, Stream) {});
  for (const std::string& error : errors) {
    CHECK_THAT(error, ContainsSubstring("--backend nccl serves GPUs, rank 0 (cpu:0 on ") &&
                          ContainsSubstring("leave --backend out"));
  }
}

RankOffer gpu(const std::string& host, const std::string& uuid) {
  return {.host = host,
          .hardware = uuid,
          .device = "cuda:0",
          .gpu = true,
          .no_gloo = "",
          .no_nccl = ""};
}

TEST_CASE("A GPU that two ranks name is refused for NCCL, with both", "[group][row123]") {
  const std::vector<RankOffer> shared{gpu("a", "GPU-1"), gpu("b", "GPU-1"), gpu("a", "GPU-1")};
  CHECK(message_of<BadInput>([&] { choose_backend("nccl", shared); }) ==
        "rank 0 (cuda:0 on a) and rank 2 (cuda:0 on a) are on the same GPU (GPU-1): NCCL serves "
        "each GPU once; name different GPUs, or leave --backend out");
  CHECK(choose_backend("", shared).name == "tcp");
}

TEST_CASE("Without a choice NCCL serves GPUs of one's own, else memory one host, else TCP",
          "[group]") {
  const auto chosen = [](const std::string& asked, const std::vector<RankOffer>& offers) {
    const BackendChoice choice = choose_backend(asked, offers);
    return choice.name + ", " + choice.why;
  };
  std::vector<RankOffer> offers{gpu("a", "GPU-1"), gpu("a", "GPU-2"), gpu("b", "GPU-1")};
  CHECK(chosen("", offers) == "nccl, a GPU for each rank");
  CHECK(chosen("nccl", offers) == "nccl, as asked");
  offers[1].no_nccl = "no NCCL there";
  CHECK(chosen("", offers) == "tcp, several hosts");
  CHECK(chosen("gloo", offers) == "gloo, as asked");
  CHECK(chosen("", {offers[0], offers[1]}) == "shm, one host");
  CHECK_THAT(message_of<EnvironmentError>([&] { choose_backend("nccl", offers); }),
             ContainsSubstring("rank 1 (cuda:0 on a): no NCCL: no NCCL there"));
  offers[2].no_gloo = "this build has no Gloo";
  CHECK_THAT(message_of<EnvironmentError>([&] { choose_backend("gloo", offers); }),
             ContainsSubstring("rank 2 (cuda:0 on b): this build has no Gloo; give --backend tcp"));
  const RankOffer sent = RankOffer::from(offers[2].text());
  CHECK(sent.text() == offers[2].text());
  CHECK((sent.host == "b" && sent.hardware == "GPU-1" && sent.gpu && sent.no_nccl.empty()));
}

TEST_CASE("Ranks beside rank 0 are reached where other hosts reach it", "[group]") {
  CHECK(reachable_host("10.0.0.2", {"127.0.1.1", "10.0.0.1"}) == "10.0.0.2");
  CHECK(reachable_host("127.0.1.1", {"127.0.1.1", "127.0.1.1", "10.0.0.1"}) == "10.0.0.1");
  CHECK(reachable_host("127.0.0.1", {"127.0.0.1", "127.0.0.1"}) == "127.0.0.1");
}

// --- The group of this process -------------------------------------------------------------------

TEST_CASE("A process has one group at a time", "[group][row58]") {
  const ScopedEnvironment rank("RANK", "0"), size("WORLD_SIZE", "1"), port("MASTER_PORT", "0"),
      address("MASTER_ADDR", "127.0.0.1"), local_rank("LOCAL_RANK", {}),
      local_size("LOCAL_WORLD_SIZE", {});
  const auto second = [] { init_process_group({.backend = "tcp"}); };
  {
    const ProcessGroup group = init_process_group({.backend = "tcp"});
    CHECK(group.rank() == 0);
    CHECK(group.world_size() == 1);
    CHECK_THAT(message_of<BadInput>(second), ContainsSubstring("initialised twice"));
  }
  ProcessGroup ended = init_process_group({.backend = "tcp"});
  ended.end();
  CHECK_NOTHROW(second());
  const ProcessGroup next = init_process_group({.backend = "tcp"});
  ended.end();  // once more: not the next one's end
  CHECK_THAT(message_of<BadInput>(second), ContainsSubstring("initialised twice"));
}

TEST_CASE("A group that has ended says so to whoever still uses it", "[group][row58]") {
  ProcessGroup group(contract_of(0, 1, 0), {});
  const auto device = open_device({}, {});
  const ExchangeTexts exchange = group.exchanger();
  CHECK(exchange("x") == Texts{"x"});
  group.end();
  for (const std::function<void()>& use :
       {std::function<void()>([&] { exchange("x"); }),
        std::function<void()>([&] { group.barrier(); }),
        std::function<void()>([&] { group.together([] {}); }),
        std::function<void()>([&] { group.connect(*device); })}) {
    CHECK_THAT(message_of<BadInput>(use), ContainsSubstring("the process group has ended"));
  }
}

TEST_CASE("Without a launcher there is no group, and the error says how to get one",
          "[group][row58]") {
  const ScopedEnvironment rank("RANK", {}), size("WORLD_SIZE", {}), port("MASTER_PORT", {}),
      address("MASTER_ADDR", {}), local_rank("LOCAL_RANK", {}), local_size("LOCAL_WORLD_SIZE", {});
  CHECK_THAT(message_of<BadInput>([] { init_process_group({.program = "04-ddp --epochs 2"}); }),
             ContainsSubstring("./lockstep launch --nproc-per-node 2 04-ddp --epochs 2"));
}

}  // namespace
}  // namespace lockstep
