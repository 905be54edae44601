// Strangers who come to a job's ports: they cannot join it, learn nothing and do not hold it up.
// And ranks that a mistake makes strangers to each other.

#include <fmt/format.h>

#include <atomic>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/rendezvous/handshake.h"
#include "common/rendezvous/socket.h"
#include "common/rendezvous/store_server.h"
#include "common/rendezvous/wire.h"
#include "common/system/secrets.h"
#include "tests/support/group_processes.h"
#include "tests/support/proofs.h"

namespace lockstep {
namespace {

using namespace testing;
using Catch::Matchers::ContainsSubstring;

void check_all_well(const GroupResult& group) {
  INFO(group.story());
  for (const RankResult& rank : group.ranks) {
    CHECK(rank.status == 0);
    CHECK(rank.err.empty());
  }
}

// --- What a stranger sees ------------------------------------------------------------------------

/// What somebody without the key may try, as rank 1 of 2: all before it hears an answer.
Words tries(const std::string& where) {
  const JobKey guessed{JobKey::Source::rank_0, std::string(32, 'x')};
  const std::string proof(kProofBytes, '\0');
  Words all;
  for (const JobKey& key : {JobKey{}, guessed, JobKey{JobKey::Source::secret, "guessed"}}) {
    for (const std::string run_id : {"", "guessed"}) {
      const Hello hello{.world_size = 2, .rank = 1, .run_id = run_id};
      all.push_back(Handshake::of_caller(key, where, 0, 1).take_output() + proof +
                    frame(encode(hello)));
    }
  }
  all.push_back("LOCKMESH" + std::string("\1\0\0\0", 4));  // what was enough, once
  return all;
}

/// All that the listener says.
std::string answer_to(const std::string& text, int port) {
  const Socket stranger = connect_to({"127.0.0.1", port}, Deadline(kDeadline));
  std::string heard;
  try {
    send_all(stranger, bytes_of(text), Deadline(kDeadline));
    const Deadline deadline(kDeadline);
    for (std::string byte(1, '\0');; heard += byte) {
      receive_all(stranger, writable_bytes_of(byte), deadline);
    }
  } catch (const PeerLost&) {
    // Closed.
  }
  return heard;
}

TEST_CASE("A stranger that comes as a rank, and before it, is not taken for it, and learns nothing",
          "[faults][group][row73]") {
  LOCKSTEP_NEEDS_PROOFS();
  const TempDir folder;
  const int port = free_port();
  const std::string come = folder / "come";
  std::vector<RankProcess> processes =
      group_of(2, {"wait=" + come, "join", "connect", "reduce=10", "leave"}, port);
  processes[0].words.erase(processes[0].words.begin());
  for (RankProcess& process : processes) process.environment["TORCHELASTIC_RUN_ID"] = "this one";
  auto run = std::async(std::launch::async, [&] { return run_group(processes); });
  for (const std::string& text : tries(kStoreMeeting)) {
    const std::string heard = answer_to(text, port);
    // No more than magic, version, kind of key, a nonce and a proof.
    CHECK((heard.empty() || heard.size() == 77));
    CHECK(heard.find("this one") == heard.npos);
  }
  write_file(come, "");
  check_all_well(run.get());
}

TEST_CASE("A flood of connections does not hold a job up", "[faults][group][row73]") {
  for (const bool silent : {false, true}) {
    const int port = free_port();
    std::atomic<bool> done = false;
    std::vector<std::thread> flood;
    for (int i = 0; i < 2; ++i) {
      flood.emplace_back([&] {
        std::vector<Socket> open(200);
        for (size_t next = 0; !done; next = (next + 1) % open.size()) {
          try {
            Socket socket = connect_to({"127.0.0.1", port}, Deadline(0.05));
            if (silent) open[next] = std::move(socket);
          } catch (const Error&) {
            // Nobody listens yet, or any more.
          }
        }
      });
    }
    const GroupResult group = run_group(
        group_of(3, {"backend=tcp", "timeout=10", "join", "connect", "reduce=10", "leave"}, port));
    done = true;
    for (std::thread& thread : flood) thread.join();
    check_all_well(group);
  }
}

// --- Ranks that are strangers to each other ------------------------------------------------------

struct Trial {
  std::string host;
  std::optional<std::string> first, second;  // of rank 0 and rank 1
  Words told_0, told_1;
};

std::vector<RankProcess> ranks_of(const Trial& trial) {
  std::vector<RankProcess> processes = group_of(2, {"timeout=2", "join"});
  for (RankProcess& process : processes) process.environment["MASTER_ADDR"] = trial.host;
  processes[0].environment["LOCKSTEP_JOB_SECRET"] = trial.first;
  processes[1].environment["LOCKSTEP_JOB_SECRET"] = trial.second;
  return processes;
}

TEST_CASE("Ranks with different secrets, or one without, are told so, and nobody hangs",
          "[faults][group][row73]") {
  LOCKSTEP_NEEDS_PROOFS();
  const std::string a = "one secret, long enough", b = "another one, long enough";
  const std::string given = "a job key from LOCKSTEP_JOB_SECRET",
                    missing = "missing ranks: 1 (of 2)";
  const std::string no_proof = "says it is rank 1 went away without a proof of the job key";
  const std::vector<Trial> trials{
      {"127.0.0.1", a, b, {missing, no_proof}, {"rank 0 has " + given, "this rank 1 another"}},
      {"127.0.0.1",
       a,
       {},
       {missing, "a process without the job key"},
       {"rank 0 has " + given + ", this rank 1 has none; give all ranks the same"}},
      {"127.0.0.1",
       {},
       b,
       {missing, "says it is rank 1 was turned away: it has " + given},
       {"rank 0 has a job key that rank 0 made, this rank 1 has " + given}},
      {"0.0.0.0",
       a,
       {},
       {missing, "was turned away: it has no job key"},
       {"rank 0 has " + given + ", this rank 1 has no job key"}},
      {"0.0.0.0",
       {},
       b,
       {missing, "was turned away: it has " + given},
       {"rank 0 has no job key, this rank 1 has " + given}}};
  // In each of them rank 0 waits out its time: they run at once.
  std::vector<std::future<GroupResult>> running;
  for (const Trial& trial : trials) {
    running.push_back(std::async(std::launch::async, run_group, ranks_of(trial)));
  }
  for (size_t i = 0; i < trials.size(); ++i) {
    const GroupResult group = running[i].get();
    INFO(group.story());
    check_error(group.ranks[0], 2, trials[i].told_0);
    check_error(group.ranks[1], 1, trials[i].told_1);
    for (const RankResult& rank : group.ranks) {
      CHECK((rank.err.find(a) == rank.err.npos && rank.err.find(b) == rank.err.npos));
    }
  }
}

TEST_CASE("Ranks with one secret meet, from a file or the environment, at an address of their host",
          "[faults][group]") {
  LOCKSTEP_NEEDS_PROOFS();
  const TempDir folder;
  const std::string secret = "one secret, long enough", file = folder / "secret";
  write_file(file, secret + "\n");
  std::filesystem::permissions(file, std::filesystem::perms{0600});
  for (const std::string host : {"127.0.0.1", "0.0.0.0"}) {
    std::vector<RankProcess> processes =
        group_of(3, {"backend=tcp", "join", "connect", "reduce=10", "leave"});
    for (RankProcess& process : processes) {
      process.environment["MASTER_ADDR"] = host;
      process.environment["LOCKSTEP_JOB_SECRET"] = secret;
    }
    processes[1].environment["LOCKSTEP_JOB_SECRET"] = std::nullopt;
    processes[1].environment["LOCKSTEP_JOB_SECRET_FILE"] = file;
    check_all_well(run_group(processes));
  }
}

TEST_CASE("A program that a rank starts does not inherit the job's key", "[faults][group]") {
  const std::string look = "shell=echo key:$LOCKSTEP_JOB_SECRET$LOCKSTEP_LAUNCHER_KEY";
  for (const std::string name : {"LOCKSTEP_JOB_SECRET", "LOCKSTEP_LAUNCHER_KEY"}) {
    std::vector<RankProcess> processes =
        group_of(2, {"timeout=30", "join", look, "connect", "reduce=10", "leave"});
    for (RankProcess& process : processes) {
      if (proofs_availability().empty()) process.environment[name] = "one secret, long enough";
    }
    const GroupResult group = run_group(processes);
    check_all_well(group);
    for (const RankResult& rank : group.ranks) CHECK(rank.out == "key:\n");
  }
}

TEST_CASE("A job without a key says that it trusts its network, and one with a key does not",
          "[faults][ddp]") {
  LOCKSTEP_NEEDS_PROOFS();
  const auto first_line = [](const std::string& host, const std::string& secret) {
    std::vector<RankProcess> ranks = group_of(2, {});
    std::string script;
    for (RankProcess& rank : ranks) {
      rank.environment["MASTER_ADDR"] = host;
      if (!secret.empty()) rank.environment["LOCKSTEP_JOB_SECRET"] = secret;
      Words command = command_of(rank);
      command.back() = stage_binary("04-ddp");  // in place of the group's member
      script += quoted(command + Words{"--data", "synthetic:24:10", "--batch-size", "12",
                                       "--workers", "0", "--devices", "cpu:0,cpu:1"}) +
                " & ";
    }
    return run_process({"sh", "-c", script + "wait"}, kDeadline).out;
  };
  CHECK_THAT(first_line("0.0.0.0", ""),
             ContainsSubstring("2 ranks over shm (one host), no job key: trusts its network, its "
                               "store listens on all interfaces: global batch"));
  CHECK_THAT(first_line("0.0.0.0", "one secret, long enough"),
             ContainsSubstring("(one host), its store listens on all interfaces: global batch"));
  CHECK_THAT(first_line("127.0.0.1", ""), ContainsSubstring("(one host): global batch"));
}

}  // namespace
}  // namespace lockstep
