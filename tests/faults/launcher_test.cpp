// The launcher: who failed is named, and whatever happens, nobody is left.

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <future>
#include <random>
#include <regex>
#include <set>
#include <sstream>
#include <thread>

#include "common/launch/rank_end.h"
#include "tests/support/catch.h"
#include "tests/support/jobs.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;
using std::chrono::milliseconds;

Words lines_of(const std::string& text) {
  Words lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// --- What ranks are told -------------------------------------------------------------------------

std::map<std::string, std::string> variables(const std::string& text) {
  std::map<std::string, std::string> all;
  for (const std::string& line : lines_of(text)) {
    const size_t sign = line.find('=');
    if (sign == std::string::npos) continue;
    CHECK(all.emplace(line.substr(0, sign), line.substr(sign + 1)).second);  // each once
  }
  return all;
}

TEST_CASE("Ranks of one node get torchrun's variables and a free port", "[faults][launch]") {
  const Jobs jobs;
  for (const Words& options : {Words{}, Words{"--standalone"}}) {
    CHECK(jobs.run(options + Words{"--nproc-per-node=2", "--max-restarts", "3"},
                   "env >\"$DIR/env.$RANK\"; read x && exit 3; exit 0",
                   {"sh", "-c", "echo typed | env RANK=7 RANKING=mine \"$@\"", "sh"})
              .status == 0);
    auto first = variables(jobs.text("env.0")), second = variables(jobs.text("env.1"));
    for (const std::string name : {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}) {
      CHECK_FALSE(first[name].empty());
      CHECK(first[name] == second[name]);
    }
    CHECK(first["MASTER_ADDR"] == "127.0.0.1");
    CHECK(std::stoi(first["MASTER_PORT"]) > 0);
    CHECK((first["RANK"] == "0" && first["LOCAL_RANK"] == "0"));
    CHECK((second["RANK"] == "1" && second["LOCAL_RANK"] == "1"));
    CHECK((first["WORLD_SIZE"] == "2" && first["LOCAL_WORLD_SIZE"] == "2"));
    CHECK((first["GROUP_RANK"] == "0" && first["TORCHELASTIC_RESTART_COUNT"] == "0"));
    CHECK(first["TORCHELASTIC_MAX_RESTARTS"] == "3");
    CHECK(first["RANKING"] == "mine");  // nobody's but the user's
  }
}

TEST_CASE("Ranks of the second node count on from the first", "[faults][launch]") {
  const Jobs jobs;
  const ProcessResult run = jobs.run({"--nnodes", "3", "--node_rank", "1", "--nproc_per_node", "2",
                                      "--master_addr", "host.example", "--master_port", "1234"},
                                     "env >\"$DIR/env.$RANK\"");
  CHECK(run.status == 0);
  CHECK(jobs.names() == Words{"env.2", "env.3"});
  auto last = variables(jobs.text("env.3"));
  CHECK((last["RANK"] == "3" && last["LOCAL_RANK"] == "1"));
  CHECK((last["WORLD_SIZE"] == "6" && last["LOCAL_WORLD_SIZE"] == "2"));
  CHECK((last["GROUP_RANK"] == "1" && last["MASTER_ADDR"] == "host.example"));
  CHECK((last["MASTER_PORT"] == "1234" && last["TORCHELASTIC_RUN_ID"] == "host.example:1234"));
}

TEST_CASE("Ranks inherit no descriptor but the launcher's line, and no blocked signals",
          "[faults][launch]") {
  const Jobs jobs;
  const auto launched = [&](const Words& options, const Words& program) {
    const ProcessResult run = jobs.run_words(Words{jobs.launcher()} + options + program);
    INFO(story(run));
    CHECK(run.status == 0);
    return run.out;
  };
  const std::string others = "ls /proc/self/fd | grep -vx \"${LOCKSTEP_LAUNCHER_LINE%%:*}\"";
  const Words signals{"grep", "^Sig[BI]", "/proc/self/status"}, files{"sh", "-c", others};
  CHECK(launched({}, signals) == jobs.run_words(signals).out);
  const std::string bare = jobs.run_words(files).out;
  CHECK(launched({"--nproc-per-node", "2"}, files) == bare + bare);
  launched({"--redirect", jobs / "logs"}, files);
  CHECK(jobs.text("logs/rank_0.out") == bare);
  std::string marked;
  for (const std::string& line : lines_of(bare)) marked += "[rank 0] " + line + "\n";
  CHECK(launched({"--prefix"}, files) == marked);
}

TEST_CASE("A launcher needs no stdin, and says what it could not write", "[faults][launch]") {
  const Jobs jobs;
  for (const std::string closed : {"<&-", ">&-", "2>&-", "<&- >&- 2>&-"}) {
    INFO(closed);
    const ProcessResult run =
        jobs.run({"--nproc-per-node", "2", "--prefix"}, "echo out; echo err >&2; exit 0",
                 {"sh", "-c", "exec \"$@\" " + closed, "sh"});
    CHECK((run.status == 0) == (closed == "<&-"));
    // A rank that writes once more dies of it, which may be what is seen first.
    if (closed == ">&-") {
      CHECK_THAT(run.err, ContainsSubstring("Bad file descriptor") || ContainsSubstring("SIGPIPE"));
    }
  }
}

TEST_CASE("What follows the program's name is the program's", "[faults][launch]") {
  const Jobs jobs;
  const Words arguments{
      "-c", "printf '<%s>' \"$@\"", "sh", "--nproc-per-node", "9", "two words", "", "--help"};
  for (const Words& separator : {Words{}, Words{"--"}}) {
    const ProcessResult run =
        jobs.run_words(Words{jobs.launcher()} + separator + Words{"sh"} + arguments);
    INFO(story(run));
    CHECK(run.status == 0);
    CHECK(run.out == "<--nproc-per-node><9><two words><><--help>");
  }
}

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
  CHECK(cause_of({well, lost, pipe}).rank == 1);
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

// Ranks with a connection to rank 0. Whoever loses one ends with status 2, as a training program.
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
    CHECK(seconds_since(begin) < promised(1));
    CHECK(jobs.processes() == Words{});
    CHECK(run.status == 128 + SIGKILL);
    CHECK(run.err == fmt::format("error: rank {} (pid {}) was killed by signal 9 (SIGKILL); the "
                                 "other ranks were stopped\n",
                                 rank, pid));
  }
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

/// Whether nobody listens on this port.
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

// --- Restarts ------------------------------------------------------------------------------------

TEST_CASE("After a failure all ranks are started again, as often as asked", "[faults][launch]") {
  const Jobs jobs;
  const std::string script =
      "count=$TORCHELASTIC_RESTART_COUNT; date +%s.%N >\"$DIR/begin.$RANK.$count\"; "
      "echo \"$count $MASTER_PORT $TORCHELASTIC_RUN_ID\" >>\"$DIR/log.$RANK\"; "
      "is_rank 1 || { [ \"$count\" = 2 ] && exit 0; trap '' TERM; exec sleep 60; }; "
      "await begin.0.$count; date +%s.%N >\"$DIR/end\"; cp \"$DIR/end\" \"$DIR/end.$count\"; "
      "[ \"$count\" = 2 ] || exit 5";
  const ProcessResult run =
      jobs.run({"--nproc-per-node", "2", "--max-restarts", "4", "--grace", "0.1"}, script);
  CHECK(run.status == 0);
  std::set<std::string> ports, names;
  const Words log = lines_of(jobs.text("log.0"));
  CHECK(log == lines_of(jobs.text("log.1")));
  REQUIRE(log.size() == 3);
  for (size_t i = 0; i < log.size(); ++i) {
    std::istringstream line(log[i]);
    std::string count, port, name;
    line >> count >> port >> name;
    CHECK(count == std::to_string(i));
    ports.insert(port), names.insert(name);
  }
  CHECK(ports.size() == 3);
  CHECK(names.size() == 1);
  const Words said = lines_of(run.err);
  REQUIRE(said.size() == 2);
  CHECK(std::regex_match(
      said[1], std::regex(R"(launch: rank 1 \(pid \d+\) exited with status 5; starting all ranks )"
                          R"(again \(restart 2 of 4\))")));
  double gap = 10;  // the best of two, since machines hiccup
  for (const int count : {0, 1}) {
    const double ended = std::stod(jobs.text(fmt::format("end.{}", count)));
    gap = std::min(gap, std::stod(jobs.text(fmt::format("begin.0.{}", count + 1))) - ended);
  }
  CHECK(gap < promised(0.05 + 0.1 + 0.2));  // who was first, grace, and the restart itself
}

TEST_CASE("The last failure counts when no restart is left", "[faults][launch]") {
  const Jobs jobs;
  const ProcessResult run = jobs.run({"--max-restarts", "2", "--master-port", "1"},
                                     "echo $MASTER_PORT; exit $((5 + TORCHELASTIC_RESTART_COUNT))");
  CHECK(run.status == 7);
  CHECK(run.out == "1\n1\n1\n");
  CHECK(lines_of(run.err).size() == 3);
  CHECK_THAT(run.err, ContainsSubstring("\nerror: rank 0 "));
  const ProcessResult interrupted = jobs.run({"--max-restarts", "2"}, "kill -TERM $PPID; deaf");
  CHECK(interrupted.status == -SIGTERM);
  CHECK(interrupted.err.empty());
}

// --- Output --------------------------------------------------------------------------------------

TEST_CASE("Marked lines arrive whole", "[faults][launch]") {
  const Jobs jobs;
  const std::string script =
      "i=0; while [ $i -lt 1000 ]; do printf 'one '; printf 'line '; echo $i; i=$((i + 1)); done; "
      "printf 'no newline'; echo \"oh $RANK\" >&2";
  const ProcessResult run = jobs.run({"--nproc-per-node", "3", "--prefix"}, script);
  CHECK(run.status == 0);
  std::map<std::string, int> next;
  for (const std::string& line : lines_of(run.out)) {
    const std::string mark = line.substr(0, 9);
    const int number = next[mark]++;
    REQUIRE(line == mark + (number < 1000 ? fmt::format("one line {}", number) : "no newline"));
  }
  CHECK(next ==
        std::map<std::string, int>{{"[rank 0] ", 1001}, {"[rank 1] ", 1001}, {"[rank 2] ", 1001}});
  Words errors = lines_of(run.err);
  std::ranges::sort(errors);
  CHECK(errors == Words{"[rank 0] oh 0", "[rank 1] oh 1", "[rank 2] oh 2"});
  CHECK(run.out.back() == '\n');
  const ProcessResult halves = jobs.run(
      {"--nproc-per-node", "2", "--prefix"},
      "is_rank 0 && { printf half; announce half; await other.1; echo ' whole'; exit 0; }; "
      "await half.0; sleep 0.05; echo other; sleep 0.05; announce other");
  CHECK(halves.out == "[rank 1] other\n[rank 0] half whole\n");
}

TEST_CASE("A slow reader gets everything", "[faults][launch]") {
  const Jobs jobs;
  // More than all pipes and the launcher hold; an endless line arrives in parts.
  const std::string script = "is_rank 0 && exec seq 400000; head -c 3000000 /dev/zero | tr '\\0' x";
  const ProcessResult run = jobs.run({"--nproc-per-node", "2", "--prefix"}, script,
                                     {"sh", "-c", "\"$@\" | { sleep 0.3; cat; }", "sh"});
  size_t numbers = 0, letters = 0, parts = 0;
  for (const std::string& line : lines_of(run.out)) {
    if (line.starts_with("[rank 0] ")) REQUIRE(line.substr(9) == std::to_string(++numbers));
    if (line.starts_with("[rank 1] ")) letters += line.size() - 9, ++parts;
  }
  CHECK(parts > 1);
  CHECK(numbers == 400000);
  CHECK(letters == 3000000);
}

TEST_CASE("Who has stopped reading, or left, does not keep the launcher", "[faults][launch]") {
  const Jobs jobs;
  const std::string note = "echo \"status $?\" >\"$DIR/status\"; date +%s.%N >\"$DIR/end\"; }";
  const auto run = [&](const std::string& script, const std::string& reader) {
    jobs.run({"--nproc-per-node", "2", "--prefix"}, script,
             {"sh", "-c", "{ \"$@\"; " + note + " | " + reader, "sh"});
    return jobs.text("status");
  };
  const auto begin = Clock::now();
  CHECK(
      run("is_rank 1 && { sleep 0.3; exit 4; }; head -c 9000000 /dev/zero; announce written; deaf",
          "{ until [ -e \"$DIR/end\" ]; do sleep 0.01; done; }") == "status 4\n");
  CHECK(seconds_since(begin) < promised(5));
  CHECK_FALSE(jobs.has("written.0"));  // nobody kept it all in memory
  CHECK(run("exec yes", "head -1 >/dev/null") == fmt::format("status {}\n", 128 + SIGPIPE));
}

TEST_CASE("Redirected output lies in a file per rank and restart", "[faults][launch]") {
  const Jobs jobs;
  const ProcessResult run = jobs.run(
      {"--nproc-per-node", "2", "--redirect", jobs / "new/logs", "--max-restarts", "1"},
      "echo \"out $RANK\"; echo \"err $RANK\" >&2; announce said.$TORCHELASTIC_RESTART_COUNT;"
      "await said.$TORCHELASTIC_RESTART_COUNT.0; await said.$TORCHELASTIC_RESTART_COUNT.1;"
      "exit $((1 - TORCHELASTIC_RESTART_COUNT))");
  CHECK(run.status == 0);
  CHECK(run.out.empty());
  CHECK(lines_of(run.err).size() == 1);
  size_t files = 0;
  for (const std::string rank : {"0", "1"}) {
    for (const std::string again : {"", ".restart_1"}) {
      for (const std::string kind : {"out", "err"}) {
        CHECK(jobs.text("new/logs/rank_" + rank + again + "." + kind) == kind + " " + rank + "\n");
        ++files;
      }
    }
  }
  const std::filesystem::directory_iterator folder(jobs / "new/logs");
  CHECK(size_t(std::distance(folder, {})) == files);
  jobs.run({"--redirect", jobs / "new/logs"}, "echo new");
  CHECK(jobs.text("new/logs/rank_0.out") == "new\n");  // nothing is left of the longer one
}

// --- What cannot be started ----------------------------------------------------------------------

/// One line on stderr with all of `fragments`, status 1, nothing started.
void check_refused(const Jobs& jobs, const Words& words, const Words& fragments) {
  const ProcessResult run = jobs.run_words(Words{jobs.launcher()} + words);
  INFO(story(run));
  CHECK(run.status == 1);
  CHECK(run.out.empty());
  CHECK(run.err.starts_with("error: "));
  CHECK(run.err.find('\n') == run.err.size() - 1);
  for (const std::string& fragment : fragments) CHECK_THAT(run.err, ContainsSubstring(fragment));
  CHECK_FALSE(jobs.has("started"));
  CHECK(jobs.processes() == Words{});
}

TEST_CASE("Options that cannot be meant are refused before anything starts", "[faults][launch]") {
  const Jobs jobs;
  const Words program{"sh", "-c", "touch \"$DIR/started\""};
  const auto refused = [&](const Words& options, const Words& fragments) {
    check_refused(jobs, options + program, fragments);
  };
  for (const auto& [option, below, above, range] :
       {std::tuple("--nproc-per-node", "0", "1025", "1 to 1024"),
        {"--nproc_per_node", "-1", "2000000", "1 to 1024"},
        {"--nnodes", "0", "65537", "1 to 65536"},
        {"--node-rank", "-1", "1", "0 to 0"},
        {"--master-port", "-1", "65536", "0 to 65535"},
        {"--max-restarts", "-1", "1000001", "0 to 1000000"},
        {"--grace", "-0.1", "3601", "0 to 3600"}}) {
    const std::string name = std::regex_replace(option, std::regex("(\\w)_"), "$1-");
    refused({option, below}, {name, below, range});
    refused({option, above}, {name, above, range});
    refused({option, "many"}, {name, "many"});
  }
  refused({"--grace", "nan"}, {"--grace", "nan"});
  refused({"--nnodes", "2", "--node-rank", "2"}, {"--node-rank", "2", "0 to 1", "--nnodes"});
  refused({"--nnodes", "2", "--master-port", "1234"}, {"--master-addr is missing"});
  refused({"--nnodes", "2", "--master-addr", "there"}, {"--master-port is missing", "there"});
  refused({"--standalone", "--nnodes", "2"}, {"--standalone", "--nnodes 2"});
  refused({"--standalone", "--master-port", "1"}, {"--standalone", "--master-port"});
  refused({"--standalone", "--master-addr", "a"}, {"--standalone", "--master-addr"});
  refused({"--prefix", "--redirect", "logs"}, {"--prefix", "--redirect logs"});
  refused({"--nproc", "2"}, {"--nproc", "--help"});
  write_file(jobs / "file", "");
  refused({"--redirect", jobs / "file"}, {"--redirect", (jobs / "file").string()});
  std::filesystem::create_directories(jobs / "logs/rank_1.err");
  refused({"--nproc-per-node", "2", "--redirect", jobs / "logs"}, {"logs/rank_1.err"});
  check_refused(jobs, {}, {"no program"});
  check_refused(jobs, {"--prefix"}, {"no program"});
  check_refused(jobs, {"--nproc-per-node"}, {"--nproc-per-node"});
}

TEST_CASE("A program is found as a shell finds it, or nothing starts", "[faults][launch]") {
  const Jobs jobs;
  std::filesystem::create_directory(jobs / "first");
  std::filesystem::create_directory(jobs / "second");
  write_file(jobs / "first/program", "");
  write_file(jobs / "second/program", "#!/bin/sh\necho \"$0 $1\"\n");
  const std::string second = jobs / "second/program";
  const Words path{"env", fmt::format("PATH={}:{}:/usr/bin:/bin", (jobs / "first").string(),
                                      (jobs / "second").string())};
  const auto run = [&](const std::string& name) {
    return jobs.run_words(path + Words{jobs.launcher(), name, "word"});
  };
  CHECK_THAT(run("program").err, ContainsSubstring((jobs / "first/program").string()) &&
                                     ContainsSubstring("not executable"));
  std::filesystem::permissions(second, std::filesystem::perms(0755));
  CHECK(run("program").out == second + " word\n");  // the first may not be executed
  CHECK(run(second).out == second + " word\n");

  check_refused(jobs, {"no-such-program"}, {"'no-such-program'", "PATH"});
  check_refused(jobs, {jobs / "nowhere"}, {(jobs / "nowhere").string(), "no such program"});
  check_refused(jobs, {jobs / "first"}, {(jobs / "first").string(), "folder"});
  check_refused(jobs, {jobs / "first/program"}, {"first/program", "not executable", "chmod"});
  std::filesystem::permissions(jobs / "first/program", std::filesystem::perms(0755));
  check_refused(jobs, {jobs / "first/program"}, {"cannot start rank 0", "Exec format error"});
  write_file(second, "#!/no/such/interpreter\n");
  check_refused(jobs, {"--nproc-per-node", "2", second}, {"cannot start rank 0", "No such file"});
}

TEST_CASE("The launcher's help names every option in both spellings", "[faults][launch]") {
  const Jobs jobs;
  const ProcessResult run = run_help(jobs.launcher());
  CHECK(run.status == 0);
  CHECK(run.err.empty());
  for (const std::string option :
       {"--nproc-per-node,--nproc_per_node INT=1", "--nnodes INT=1", "--node-rank,--node_rank",
        "--master-addr,--master_addr", "--master-port,--master_port", "--standalone",
        "--max-restarts,--max_restarts", "--redirect", "--prefix", "--grace FLOAT=0.5"}) {
    CHECK_THAT(run.out, ContainsSubstring(option));
  }
}

}  // namespace
}  // namespace lockstep
