// How a job ends: ranks that fail, die or will not stop, and a launcher that is itself ended.

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <regex>
#include <sstream>
#include <thread>

#include "common/launch/rank_end.h"
#include "tests/support/catch.h"
#include "tests/support/jobs.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

// --- How it ends ---------------------------------------------------------------------------------

TEST_CASE("The launcher's status is that of the rank that failed", "[faults][launch]") {
  const Jobs jobs;
  const auto check = [&](const std::string& script, int status, const std::string& line) {
    const ProcessResult run = jobs.run({"--nproc-per-node", "2"}, script);
    CHECK(run.status == status);
    CHECK(std::regex_match(run.err, std::regex(line)));
  };
  const std::string others = "; the other ranks were stopped\n";
  check("exit 0", 0, "");
  check("is_rank 1 || exec sleep 60; exit 3", 3,
        R"(error: rank 1 \(pid \d+\) exited with status 3)" + others);
  check("is_rank 0 || exec sleep 60; exit 255", 255,
        R"(error: rank 0 \(pid \d+\) exited with status 255)" + others);
  check("is_rank 1 || exec sleep 60; kill -KILL $$", 128 + SIGKILL,
        R"(error: rank 1 \(pid \d+\) was killed by signal 9 \(SIGKILL\))" + others);
  check("is_rank 0 || exit 0; sleep 0.1; kill -SEGV $$", 128 + SIGSEGV,
        R"(error: rank 0 \(pid \d+\) was killed by signal 11 \(SIGSEGV\))" + others);
  const ProcessResult alone = jobs.run({}, "exit 7");
  CHECK(alone.status == 7);
  CHECK(std::regex_match(alone.err,
                         std::regex("error: rank 0 \\(pid \\d+\\) exited with status 7\n")));
}

TEST_CASE("The cause is what cannot be the answer to a lost peer", "[faults][launch]") {
  const RankEnd well{.rank = 0}, lost{.rank = 1, .status = 2}, wrong{.rank = 2, .status = 1};
  const RankEnd killed{.rank = 3, .signal = SIGKILL}, pipe{.rank = 4, .signal = SIGPIPE};
  const RankEnd crashed{.rank = 5, .signal = SIGSEGV}, other{.rank = 6, .status = 77};
  CHECK(cause_of({lost}).rank == 1);
  CHECK(cause_of({well, pipe}).rank == 4);
  CHECK(cause_of({well, lost, pipe}).rank == 4);
  CHECK(cause_of({pipe, lost, wrong, other}).rank == 2);
  CHECK(cause_of({other, wrong}).rank == 6);
  CHECK(cause_of({lost, wrong, killed, pipe, crashed}).rank == 3);
  CHECK(cause_of({wrong, crashed, killed}).rank == 5);
}

TEST_CASE("A rank that dies is named, not the peer that answers at once", "[faults][launch]") {
  const Jobs jobs;
  REQUIRE(run_process({"mkfifo", jobs / "pipe"}, kDeadline).status == 0);
  // Rank 0 waits for the other end of the pipe to close: as with sockets, the kernel does that
  // before rank 1 can be seen dead.
  const auto run = [&](const std::string& end_of_rank_1) {
    return jobs.run({"--nproc-per-node", "2"},
                    "if is_rank 0; then read x <\"$DIR/pipe\"; exit 2; fi; exec 3>\"$DIR/pipe\"; " +
                        end_of_rank_1);
  };
  const int times = full_campaign() ? 300 : 25;
  for (int i = 0; i < times; ++i) {
    const ProcessResult killed = run("kill -KILL $$");
    REQUIRE_THAT(killed.err, ContainsSubstring("rank 1 ") && ContainsSubstring("(SIGKILL)"));
    REQUIRE(killed.status == 128 + SIGKILL);
  }
  // The same with rank 0 certainly the first to be seen.
  const ProcessResult killed = run("exec 3>&-; sleep 0.02; kill -KILL $$");
  CHECK_THAT(killed.err, ContainsSubstring("rank 1 ") && ContainsSubstring("(SIGKILL)"));
  const ProcessResult ended = run("exec 3>&-; sleep 0.02; exit 1");
  CHECK_THAT(ended.err, ContainsSubstring("rank 1 ") && ContainsSubstring("status 1;"));
  const ProcessResult lost = run("exec 3>&-; sleep 0.02; exit 0");
  CHECK_THAT(lost.err, ContainsSubstring("rank 0 ") && ContainsSubstring("status 2;"));
}

// Ranks with a connection to rank 0. A rank that loses it ends with status 2, as a training
// program.
constexpr const char* kPeers = R"(
import os, select, socket, sys
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    server = socket.create_server(place)
    peers = [server.accept()[0] for _ in range(size - 1)]
else:
    while True:
        try:
            peers = [socket.create_connection(place)]
            break
        except ConnectionRefusedError:
            pass
name = os.path.join(os.environ["DIR"], "pid.%d" % rank)
with open(name + "~", "w") as file:
    file.write(str(os.getpid()))
os.rename(name + "~", name)
select.select(peers, [], [])
os._exit(2)
)";
const Words kPeersProgram{"python3", "-S", "-E", "-c", kPeers};

TEST_CASE("Killed at random, a rank is named and the others are stopped within a second",
          "[faults][launch][row67]") {
  std::mt19937 random(20261121);
  const int times = full_campaign() ? 100 : 10;
  std::vector<double> taken;
  for (int i = 0; i < times; ++i) {
    const Jobs jobs;
    auto running = jobs.begin({"--nproc-per-node", "3"}, kPeersProgram);
    REQUIRE(soon(kDeadline, [&] { return jobs.all_have("pid", 3); }));
    const int rank = int(random() % 3);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));
    const std::string pid = jobs.text(fmt::format("pid.{}", rank));
    REQUIRE(::kill(std::stoi(pid), SIGKILL) == 0);
    const auto begin = Clock::now();
    const ProcessResult run = running.get();
    taken.push_back(seconds_since(begin));
    CHECK(taken.back() < promised(1));
    CHECK(jobs.processes() == Words{});
    CHECK(run.status == 128 + SIGKILL);
    CHECK(run.err == fmt::format("error: rank {} (pid {}) was killed by signal 9 (SIGKILL); the "
                                 "other ranks were stopped\n",
                                 rank, pid));
  }
  check_promise(taken, 1);
}

/// Seconds from the moment that a rank noted with `date +%s.%N >"$DIR/end"`.
double seconds_since_end(const Jobs& jobs) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  return now.count() - std::stod(jobs.text("end"));
}

TEST_CASE("Ranks that ignore SIGTERM, and what they started, are killed within a second",
          "[faults][launch][row67]") {
  const std::string end = "\nawait ready.0; date +%s.%N >\"$DIR/end\"; exit 3";
  for (const std::string script : {
           "is_rank 1 || { announce ready; deaf; }",
           "is_rank 1 || { (deaf) & announce ready; exec sleep 60; }",
           "is_rank 1 || { timeout 60 sh -c 'trap \"\" TERM; sleep 60' & announce ready; deaf; }",
           "is_rank 1 || { announce ready; kill -STOP $$; }",
           "is_rank 1 || { sleep 0.05; announce ready; exec sleep 60; }; (deaf) &",
       }) {
    const Jobs jobs;
    INFO(script);
    const ProcessResult run = jobs.run({"--nproc-per-node", "2"}, script + end);
    CHECK(seconds_since_end(jobs) < promised(1));
    CHECK(run.status == 3);
    CHECK_THAT(run.err, ContainsSubstring("rank 1 "));
  }
}

TEST_CASE("Ranks that are stopped may finish what they do, for as long as --grace says",
          "[faults][launch]") {
  const std::string script =
      "is_rank 1 && { await ready.0; exit 3; }; trap 'sleep 0.3; announce saved; exit 0' TERM; "
      "announce ready; while :; do sleep 0.05; done";
  const Jobs patient, hasty;
  CHECK(patient.run({"--nproc-per-node", "2", "--grace", "20"}, script).status == 3);
  CHECK(patient.has("saved.0"));
  CHECK(hasty.run({"--nproc-per-node", "2", "--grace", "0"}, script).status == 3);
  CHECK_FALSE(hasty.has("saved.0"));
  const Jobs orphaned;  // its parent ends at once
  const std::string child =
      "is_rank 1 && { await ready.0; exit 3; }; (trap 'sleep 0.2; announce saved; exit 0' TERM; "
      "announce ready; while :; do sleep 0.05; done) & exec sleep 60";
  CHECK(orphaned.run({"--nproc-per-node", "2", "--grace", "20"}, child).status == 3);
  CHECK(orphaned.has("saved.0"));
  const Jobs stopped;  // by SIGSTOP, as by a debugger
  const std::string stop =
      "is_rank 1 && { await ready.0; sleep 0.05; exit 3; }; trap 'announce saved; exit 0' TERM; "
      "announce ready; kill -STOP $$; sleep 60";
  CHECK(stopped.run({"--nproc-per-node", "2", "--grace", "20"}, stop).status == 3);
  CHECK(stopped.has("saved.0"));
}

TEST_CASE("A rank that ends well leaves no zombie and no process behind", "[faults][launch]") {
  const Jobs jobs;
  // Rank 0 leaves two processes running; rank 1 looks at the launcher's children meanwhile: the
  // keeper and itself.
  const ProcessResult run = jobs.run(
      {"--nproc-per-node", "2"},
      "is_rank 1 || { sleep 60 & timeout 60 sleep 60 & announce done; exit 0; }; "
      "await done.0; sleep 0.2; cat /proc/$PPID/task/$PPID/children; "
      "grep -lsz '^RANK=0' /proc/[0-9]*/environ | xargs -r grep -lz \"^DIR=$DIR\"; exit 0");
  CHECK(run.status == 0);
  const Words lines = lines_of(run.out);
  REQUIRE(lines.size() == 1);
  CHECK(std::ranges::count(lines[0], ' ') == 2);
}

// --- The launcher itself is ended ----------------------------------------------------------------

TEST_CASE("Ranks do not outlive a killed launcher, nor does what they started",
          "[faults][launch]") {
  for (int i = 0; i < (full_campaign() ? 30 : 3); ++i) {
    const Jobs jobs;
    const std::string script =
        "sleep 60 & timeout 60 sleep 60 & (deaf) & announce ready; "
        "is_rank 1 || deaf; await ready.0; await ready.1; sleep 0.1; kill -KILL $PPID; deaf";
    const ProcessResult run = jobs.run_words(
        Words{jobs.launcher(), "--nproc-per-node", "2", "sh", "-c", kFunctions + script});
    CHECK(run.status == -SIGKILL);
    CHECK(jobs.has("ready.1"));
    CHECK(soon(1, [&] { return jobs.processes().empty(); }));
  }
}

TEST_CASE("Without its keeper a launcher goes on, and its ranks still do not outlive it",
          "[faults][launch]") {
  const Jobs jobs;
  const std::string kill_keeper =
      "read keeper rest </proc/$PPID/task/$PPID/children; "
      "kill -KILL $keeper; sleep 0.1; ";
  CHECK(jobs.run({}, kill_keeper + "echo on").out == "on\n");
  CHECK(jobs.run({"--max-restarts", "1"},
                 "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || { " + kill_keeper + "exit 3; }; exit 0")
            .status == 0);
  const ProcessResult run = jobs.run_words({jobs.launcher(), "--nproc-per-node", "2", "sh", "-c",
                                            kFunctions + ("announce ready; is_rank 0 && exec sleep "
                                                          "60; await ready.0; " +
                                                          kill_keeper + "kill -KILL $PPID")});
  CHECK(run.status == -SIGKILL);
  CHECK(soon(1, [&] { return jobs.processes().empty(); }));
}

TEST_CASE("A launcher killed while it starts its ranks leaves none", "[faults][launch]") {
  std::mt19937 random(7);
  for (int i = 0; i < (full_campaign() ? 200 : 20); ++i) {
    const Jobs jobs;
    const auto begin = Clock::now();
    const ProcessResult run = jobs.run_words(
        {"timeout", "-s", "KILL", fmt::format("0.{:04}", 1 + random() % 300), jobs.launcher(),
         "--nproc-per-node", "8", "sh", "-c", "sleep 60 & sleep 60"});
    REQUIRE(seconds_since(begin) < 30);
    CHECK(run.status != 0);
    REQUIRE(soon(2, [&] { return jobs.processes().empty(); }));
  }
}

TEST_CASE("A launcher among a launcher's ranks takes its own ranks along", "[faults][launch]") {
  for (const std::string grace : {"0", "5"}) {  // the inner launcher is killed, or ends in order
    INFO("--grace " << grace);
    const Jobs jobs;
    const std::string inner =
        fmt::format("{}\nsleep 60 & announce inner; exec sleep 60", kFunctions);
    const std::string outer = "is_rank 1 || exec " + jobs.launcher() +
                              " --nproc-per-node 2 sh -c \"$INNER\"; await inner.0; await inner.1; "
                              "sleep 0.05; exit 3";
    const ProcessResult run =
        jobs.run_words({"env", "INNER=" + inner, jobs.launcher(), "--nproc-per-node", "2",
                        "--grace", grace, "sh", "-c", kFunctions + outer});
    INFO(story(run));
    CHECK(run.status == 3);
    CHECK(soon(1, [&] { return jobs.processes().empty(); }));
  }
}

/// Whether no process listens on this port.
bool port_is_free(int port) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(uint16_t(port));
  const int error = ::bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof address);
  ::close(socket);
  return error == 0;
}

TEST_CASE("Ctrl-C goes on to the ranks, ends the launcher and frees the port",
          "[faults][launch][row69]") {
  // Rank 0 listens and would never end.
  const Words listener{"python3", "-S", "-E", "-c", R"(
import os, signal, socket, subprocess
signal.signal(signal.SIGINT, signal.SIG_IGN)
server = socket.create_server(("", int(os.environ["MASTER_PORT"])), reuse_port=False)
subprocess.Popen(["sleep", "60"])
name = os.path.join(os.environ["DIR"], "port." + os.environ["LOCAL_RANK"])
with open(name + "~", "w") as file:
    file.write("%s %d" % (os.environ["MASTER_PORT"], os.getppid()))
os.rename(name + "~", name)
signal.pause()
)"};
  const Jobs jobs;
  auto running = jobs.begin({}, listener);
  REQUIRE(soon(kDeadline, [&] { return jobs.has("port.0"); }));
  int port = 0, launcher = 0;
  std::istringstream(jobs.text("port.0")) >> port >> launcher;
  CHECK_FALSE(port_is_free(port));
  REQUIRE(::kill(launcher, SIGINT) == 0);
  const auto begin = Clock::now();
  const ProcessResult run = running.get();
  CHECK(seconds_since(begin) < promised(5));
  CHECK(jobs.processes() == Words{});
  CHECK(port_is_free(port));
  CHECK(run.status == -SIGINT);
  CHECK(run.err.empty());
}

TEST_CASE("Every signal that ends a launcher reaches its ranks first", "[faults][launch][row69]") {
  for (const auto& [name, number] :
       {std::pair("INT", SIGINT), {"TERM", SIGTERM}, {"HUP", SIGHUP}, {"QUIT", SIGQUIT}}) {
    INFO(name);
    const Jobs jobs;
    // QUIT would write a core file.
    const ProcessResult run =
        jobs.run({"--nproc-per-node", "2"},
                 fmt::format("ulimit -c 0; trap 'announce got; exit 0' {0}; announce ready; "
                             "is_rank 0 && {{ await ready.1; sleep 0.05; kill -{0} $PPID; }}; "
                             "while :; do sleep 0.05; done",
                             name),
                 {"sh", "-c", "ulimit -c 0; exec \"$@\"", "sh"});
    CHECK(run.status == -number);
    CHECK_THAT(run.err, !ContainsSubstring("error"));  // a shell may say who was terminated
    CHECK(jobs.all_have("got", 2));
  }
}

TEST_CASE("A second Ctrl-C kills at once, an ignored signal does nothing",
          "[faults][launch][row69]") {
  const std::string twice =
      "trap '' INT; announce ready; "
      "is_rank 0 && { await ready.1; kill -INT $PPID; sleep 0.2; kill -INT $PPID; }; deaf";
  const Jobs jobs;
  const auto begin = Clock::now();
  CHECK(jobs.run({"--nproc-per-node", "2", "--grace", "60"}, twice).status == -SIGINT);
  CHECK(seconds_since(begin) < promised(5));
  const ProcessResult nohup = jobs.run({}, "kill -HUP $PPID; sleep 0.1; echo on",
                                       {"sh", "-c", "trap '' HUP; \"$@\"", "sh"});
  CHECK(nohup.status == 0);
  CHECK(nohup.out == "on\n");
}

}  // namespace
}  // namespace lockstep
