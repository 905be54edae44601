// Groups of real processes: some find each other, some cannot, and in some one process dies, hangs
// or does something else than the others. Whatever happens, every process ends in time and says
// why.

#include <fmt/format.h>
#include <signal.h>

#include <chrono>
#include <future>
#include <map>
#include <optional>

#include "common/comm/host_transport.h"
#include "common/rendezvous/socket.h"
#include "common/rendezvous/store.h"
#include "common/rendezvous/wire.h"
#include "tests/support/catch.h"
#include "tests/support/free_port.h"
#include "tests/support/group_processes.h"
#include "tests/support/process.h"

namespace lockstep {
namespace {

using namespace testing;
using Catch::Matchers::ContainsSubstring;

/// The promised time, on a machine that does nothing else. The short campaign also runs next to
/// compilers, and sanitizers take their time.
double within_seconds(double seconds) {
#if defined(__SANITIZE_ADDRESS__)
  return 10 * seconds;
#else
  return testing::full_campaign() ? seconds : 5 * seconds;
#endif
}

Words backends_here() {
  return Words{"shm", "tcp"} + (gloo_availability().empty() ? Words{"gloo"} : Words{});
}

// --- Ranks that find each other ------------------------------------------------------------------

TEST_CASE("Processes form a group, reduce and part, and stdout is theirs", "[faults][group]") {
  for (const std::string& backend : backends_here() + Words{""}) {
    const GroupResult group = run_group(
        group_of(3, {"backend=" + backend, "join", "connect", "reduce=1000", "barrier",
                     "1:reduce=0", "0:reduce=0", "2:reduce=0", "meet", "say=done", "leave"}));
    INFO(group.story());
    for (const RankResult& rank : group.ranks) {
      CHECK(rank.status == 0);
      CHECK(rank.out == "done\n");
      CHECK(rank.err.empty());
    }
    CHECK(group.seconds < within_seconds(2));  // nobody waits for nothing at the end
  }
}

TEST_CASE("Garbage on the rendezvous port is dropped and the group comes together",
          "[faults][group][row73]") {
  const TempDir folder;
  const int port = testing::free_port();
  const std::string go = folder / "go";
  std::vector<RankProcess> processes =
      group_of(2, {"backend=tcp", "join", "connect", "reduce=10", "leave"}, port);
  processes[1].words = Words{"wait=" + go} + processes[1].words;
  auto run = std::async(std::launch::async, [&] { return run_group(processes); });
  const Deadline deadline(testing::kDeadline);
  std::vector<Socket> strangers;
  for (const std::string& text : {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(5000, '\xff'),
                                  std::string("LOCKSTEP\x10"), std::string()}) {
    strangers.push_back(connect_to({"127.0.0.1", port}, deadline));
    send_all(strangers.back(), bytes_of(text), deadline);
  }
  strangers[2].close();
  testing::write_file(go, "");
  const GroupResult group = run.get();
  INFO(group.story());
  for (const RankResult& rank : group.ranks) {
    CHECK(rank.status == 0);
    CHECK(rank.err.empty());
  }
}

// --- What a launcher says ------------------------------------------------------------------------

/// A process alone with one variable changed: refused at once.
void check_refused_alone(const std::string& name, const std::optional<std::string>& value,
                         const Words& fragments, const Words& words = {"join"}) {
  std::vector<RankProcess> process = group_of(1, words);
  process[0].environment[name] = value;
  const GroupResult group = run_group(process);
  INFO(name << "=" << value.value_or("(not set)") << "\n" << group.story());
  check_error(group.ranks[0], 1, fragments);
  CHECK(group.seconds < within_seconds(1));
}

TEST_CASE("A process without one of the four variables names it within a second",
          "[faults][group][row58]") {
  for (const std::string name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    for (const auto& value : {std::optional<std::string>(), std::optional<std::string>("")}) {
      check_refused_alone(name, value, {"environment variable " + name + " expected, but not set"});
    }
  }
}

TEST_CASE("A process with numbers that cannot be right refuses them within a second",
          "[faults][group][row59]") {
  check_refused_alone("RANK", "1", {"RANK=1", "0 to 0", "WORLD_SIZE is 1"});
  check_refused_alone("RANK", "-1", {"RANK=-1"});
  check_refused_alone("WORLD_SIZE", "0", {"WORLD_SIZE=0"});
  check_refused_alone("WORLD_SIZE", "abc", {"WORLD_SIZE=abc"});
  check_refused_alone("MASTER_PORT", "65536", {"MASTER_PORT=65536", "0 to 65535"});
  check_refused_alone("MASTER_PORT", "-1", {"MASTER_PORT=-1", "0 to 65535"});
  check_refused_alone("LOCKSTEP_DEBUG", "", {"Invalid backend: 'bogus'"},
                      {"backend=bogus", "join"});
  check_refused_alone("LOCKSTEP_DEBUG", "", {"No rendezvous handler for foo://"},
                      {"init=foo://x", "join"});
  check_refused_alone("LOCKSTEP_DEBUG", "", {"initialised twice"}, {"join", "join"});
}

TEST_CASE("An old launcher's local rank is taken, unless LOCAL_RANK says otherwise",
          "[faults][group][row65]") {
  std::vector<RankProcess> processes =
      group_of(2, {"backend=tcp", "local-rank=0", "join", "connect", "reduce=1", "leave"});
  processes[1].words[1] = "local-rank=1";
  processes[1].environment["LOCAL_RANK"] = std::nullopt;
  const GroupResult agreed = run_group(processes);
  INFO(agreed.story());
  for (const RankResult& rank : agreed.ranks) CHECK(rank.status == 0);
  processes = group_of(2, {"local-rank=1", "join"});
  processes.pop_back();
  const GroupResult conflict = run_group(processes);
  INFO(conflict.story());
  check_error(conflict.ranks[0], 1, {"LOCAL_RANK=0 and --local-rank=1 contradict each other"});
  CHECK(conflict.seconds < within_seconds(1));
}

TEST_CASE("A process that no launcher started is told how to start", "[faults][group]") {
  std::vector<RankProcess> process = group_of(1, {"join"});
  for (auto& [name, value] : process[0].environment) value = std::nullopt;
  const GroupResult group = run_group(process);
  INFO(group.story());
  check_error(group.ranks[0], 1, {"./lockstep launch --nproc-per-node 2 group-member WORDS..."});
}

// --- Ranks that do not find each other -----------------------------------------------------------

TEST_CASE("A taken port is reported by all ranks of a group, at once", "[faults][group][row60]") {
  const TcpStore other(
      {.address = {"127.0.0.1", 0}, .rank = 0, .world_size = 2, .run_id = "another job"});
  const int port = other.address().port;
  const GroupResult group = run_group(group_of(3, {"timeout=60", "join"}, port));
  INFO(group.story());
  check_error(group.ranks[0], 1,
              {"errno 98: Address already in use", std::to_string(port), "--standalone"});
  for (const int rank : {1, 2}) check_error(group.ranks[rank], 1, {"belongs to another job"});
  CHECK(group.seconds < within_seconds(2));
}

TEST_CASE("A rank that is never started is named after the timeout", "[faults][group][row61]") {
  std::vector<RankProcess> processes = group_of(3, {"timeout=2", "join"});
  processes.erase(processes.begin() + 1);
  const GroupResult group = run_group(processes);
  INFO(group.story());
  for (const RankResult& rank : group.ranks) check_error(rank, 2, {"missing ranks: 1 (of 3)"});
  CHECK(group.seconds >= 2);
  CHECK(group.seconds < 2 + within_seconds(1));
}

TEST_CASE("Two processes that claim one rank end the group, and all say so",
          "[faults][group][row62]") {
  std::vector<RankProcess> processes = group_of(3, {"join"});
  processes[2].environment["RANK"] = "1";
  const GroupResult group = run_group(processes);
  INFO(group.story());
  for (const RankResult& rank : group.ranks) check_error(rank, 1, {"rank 1 claimed twice"});
  CHECK(group.seconds < within_seconds(3));
}

TEST_CASE("Different world sizes end the group, and all say both", "[faults][group][row63]") {
  std::vector<RankProcess> processes = group_of(2, {"join"});
  processes[1].environment["WORLD_SIZE"] = "3";
  const GroupResult group = run_group(processes);
  INFO(group.story());
  for (const RankResult& rank : group.ranks) {
    check_error(rank, 1, {"WORLD_SIZE is 2 on rank 0 but 3 on rank 1"});
  }
  CHECK(group.seconds < within_seconds(3));
}

TEST_CASE("A host without address and a port where nobody listens have messages of their own",
          "[faults][group][row64]") {
  std::vector<RankProcess> processes = group_of(3, {"timeout=0.5", "join"});
  processes[2].environment["MASTER_ADDR"] = "no-such-host.invalid";
  processes.erase(processes.begin());
  const GroupResult group = run_group(processes);
  INFO(group.story());
  check_error(group.ranks[0], 1, {"127.0.0.1:", "nothing listens there"});
  check_error(group.ranks[1], 1, {"cannot resolve the host name 'no-such-host.invalid'"});
}

/// Rank 0 says this, and all end with its status.
void check_said_by_rank_0(const GroupResult& group, const std::string& text) {
  INFO(group.story());
  check_error(group.ranks[0], 1, {text});
  for (const RankResult& rank : group.ranks) {
    CHECK(rank.status == 1);
    CHECK((&rank == &group.ranks[0]) != rank.err.empty());
  }
}

TEST_CASE("Ranks with different options are told so once, with both values", "[faults][group]") {
  std::vector<RankProcess> processes = group_of(3, {"backend=tcp", "join"});
  processes[2].words[0] = "backend=";
  check_said_by_rank_0(run_group(processes), "--backend: rank 0 has tcp, rank 2 has auto");
  processes = group_of(2, {"join"});
  processes[1].environment["LOCKSTEP_DEBUG"] = "collectives";
  check_said_by_rank_0(run_group(processes),
                       "LOCKSTEP_DEBUG: rank 0 has nothing, rank 1 has collectives");
}

TEST_CASE("A rank without a device of its own says so, and the others hear that it has gone",
          "[faults][group][row66]") {
  const GroupResult group = run_group(group_of(2, {"devices=cpu:0", "join", "connect"}));
  INFO(group.story());
  check_error(group.ranks[0], 2, {"rank 0: devices: rank 1 closed the connection"});
  check_error(group.ranks[1], 1, {"rank 1 has local rank 1", "--devices names 1 device"});
}

// --- Ranks that get lost -------------------------------------------------------------------------

TEST_CASE("A rank that is killed between collectives is named by all others, at once",
          "[faults][group][row67]") {
  for (const std::string& backend : backends_here()) {
    for (int round = 0; round < (testing::full_campaign() ? 40 : 2); ++round) {
      const int victim = 2 * (round % 2);
      const GroupResult group =
          run_group(group_of(4, {"backend=" + backend, "join", "connect", "reduce=1000",
                                 fmt::format("{}:kill", victim), "reduce=1000"}));
      INFO(backend << "\n" << group.story());
      for (int rank = 0; rank < 4; ++rank) {
        if (rank == victim) continue;
        check_error(group.ranks[rank], 2,
                    {fmt::format("rank {}: collective 2 (all_reduce of 1000 f32, sum): ", rank),
                     fmt::format("rank {}", victim), "closed the connection"});
      }
      CHECK(group.ranks[victim].status == 128 + SIGKILL);
      CHECK(group.seconds < within_seconds(2));
    }
  }
}

TEST_CASE("A rank that is killed ends a launched group", "[faults][group][launch][row67]") {
  const auto run =
      testing::run_process({testing::build_dir() + "/common/launch/launch", "--nproc-per-node", "3",
                            testing::build_dir() + "/tests/faults/group-member", "join", "connect",
                            "reduce=1000", "1:kill", "reduce=1000", "wait=/no/such/file"},
                           testing::kDeadline);
  INFO(run.err);
  CHECK(run.status == 128 + SIGKILL);
  CHECK_THAT(run.err, ContainsSubstring("rank 1 "));
  CHECK_FALSE(run.timed_out);
}

TEST_CASE("A rank that is stopped is named with the collective that waits for it",
          "[faults][group][row68]") {
  const auto start = [](const std::string& backend, int victim) {
    std::vector<RankProcess> processes =
        group_of(3, {"backend=" + backend, "timeout=2.5", "join", "connect", "reduce=10",
                     fmt::format("{}:stop", victim), "reduce=87360"});
    processes[size_t(victim)].is_awaited = false;
    return std::async(std::launch::async, run_group, processes);
  };
  struct Trial {
    std::string backend;
    int victim;
    std::future<GroupResult> run;
  };
  std::vector<Trial> trials;
  for (const std::string& backend : backends_here()) {
    for (const int victim : {0, 2}) {
      trials.push_back({backend, victim, start(backend, victim)});
    }
  }
  for (Trial& trial : trials) {
    const GroupResult group = trial.run.get();
    INFO(trial.backend << "\n" << group.story());
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == trial.victim) continue;
      const std::string what =
          fmt::format("rank {}: collective 2 (all_reduce of 87360 f32, sum): ", rank);
      // Rank 0 takes the store down, and with it what the others could tell each other.
      if (trial.victim == 0) {
        check_error(group.ranks[rank], 2, {what, "rank 0", "did not answer within"});
      } else {
        // By itself, or as the last words of the other, who was quicker to give up.
        check_error(group.ranks[rank], 2, {what, "no answer from rank 2 within 2.5 s"});
      }
    }
    CHECK(group.ranks[trial.victim].status == -1);  // until it was killed
    CHECK(group.seconds >= 2.5);
    // At most a second late, and starting; alone, where other tests kept the machine busy.
    const double most = 2.5 + within_seconds(1.3);
    double seconds = group.seconds;
    for (int attempt = 0; attempt < 3 && seconds >= most; ++attempt) {
      seconds = start(trial.backend, trial.victim).get().seconds;
    }
    CHECK(seconds < most);
  }
}

TEST_CASE("A barrier that only one rank comes to times out and names the others",
          "[faults][group][row72]") {
  // On a busy machine processes need more than half a second to find each other.
  const std::string in_store = "rank 0: barrier 1: ranks 1, 2 did not come within 3 s";
  const std::string on_stream =
      "rank 0: collective 1 (barrier): no answer from ranks 1, 2 within 3 s";
  std::vector<std::pair<std::string, std::future<GroupResult>>> runs;
  const auto begin = [&](const std::string& backend, const Words& word, const std::string& error) {
    std::vector<RankProcess> processes =
        group_of(3, Words{"backend=" + backend, "timeout=3", "join", "connect"} + word +
                        Words{"wait=/no/such/file"});
    for (const size_t rank : {1, 2}) processes[rank].is_awaited = false;
    runs.emplace_back(error, std::async(std::launch::async, run_group, processes));
  };
  for (const std::string& backend : backends_here()) begin(backend, {"0:meet"}, on_stream);
  begin("tcp", {"0:barrier"}, in_store);
  for (auto& [error, run] : runs) {
    const GroupResult group = run.get();
    INFO(group.story());
    check_error(group.ranks[0], 2, {error});
    CHECK(group.seconds < within_seconds(5));
  }
}

TEST_CASE("With LOCKSTEP_DEBUG=collectives processes that disagree all say how, and nothing aborts",
          "[faults][group][row71]") {
  const std::string sum = "all_reduce of 1000 f32, sum";
  for (const std::string& backend : backends_here()) {
    for (const auto& [mine, called] :
         std::map<std::string, std::string>{{"reduce=1001", "all_reduce of 1001 f32, sum"},
                                            {"double=1000", "all_reduce of 1000 f64, sum"},
                                            {"meet", "barrier"}}) {
      std::vector<RankProcess> processes = group_of(
          3,
          {"backend=" + backend, "join", "connect", "reduce=1000", "reduce=1000", "meet", "leave"});
      processes[1].words[4] = mine;
      for (RankProcess& process : processes) {
        process.environment["LOCKSTEP_DEBUG"] = "collectives";
      }
      const GroupResult group = run_group(processes);
      INFO(backend << "\n" << group.story());
      for (const RankResult& rank : group.ranks) {
        check_error(rank, 2,
                    {"collective 2 (", "rank 0 called " + sum + ", rank 1 called " + called});
      }
      CHECK(group.seconds < within_seconds(2));
    }
  }
}

}  // namespace
}  // namespace lockstep
