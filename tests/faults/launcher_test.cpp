// The launcher: what ranks are told, restarts, output, and what cannot be started.

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <regex>
#include <set>
#include <sstream>
#include <tuple>

#include "common/system/secrets.h"
#include "tests/support/catch.h"
#include "tests/support/free_port.h"
#include "tests/support/jobs.h"

namespace lockstep {
namespace {

using namespace lockstep::testing;
using Catch::Matchers::ContainsSubstring;

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

/// Of the key that the launcher makes; none in a build that can prove nothing.
size_t key_digits() { return proofs_availability().empty() ? 64 : 0; }

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
    CHECK(first[kLauncherKey] == second[kLauncherKey]);
    CHECK(first[kLauncherKey].size() == key_digits());
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

TEST_CASE("The chosen port waits for rank 0", "[faults][launch]") {
  const Jobs jobs;
  const std::string script = R"(import os, socket
def bind(reuse):
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    server.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    return server
for start in ("before", "while"):
    try:
        bind(False)
        raise SystemExit("the port is anybody's " + start + " rank 0 listens")
    except OSError:
        server = bind(True) if start == "before" else server
        server.listen()
)";
  for (const Words& options : {Words{}, Words{"--standalone"}}) {
    const ProcessResult run = jobs.run(options + Words{"--nproc-per-node=1"},
                                       "exec python3 -c \"$SCRIPT\"", {"env", "SCRIPT=" + script});
    INFO(run.err);
    CHECK(run.status == 0);
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
  CHECK(last[kLauncherKey].empty());  // the nodes have not met: a key is the user's to give
  CHECK((last["MASTER_PORT"] == "1234" && last["TORCHELASTIC_RUN_ID"] == "host.example:1234"));
}

TEST_CASE("The second node tells where its own ranks were", "[faults][launch][flight]") {
  const Jobs jobs;
  const std::string script = fmt::format(
      "launch=$0; set -- --nnodes 2 --master-addr 127.0.0.1 --master-port {} \"$@\"; "
      "\"$launch\" --node-rank 0 \"$@\" 2>\"$DIR/err.0\" & "
      "\"$launch\" --node-rank 1 \"$@\" 2>\"$DIR/err.1\"; wait $!",
      free_port());
  jobs.run_words({"sh", "-c", script, jobs.launcher(), build_dir() + "/tests/faults/group-member",
                  "timeout=10", "join", "connect", "reduce=10", "1:kill", "reduce=10", "leave"});
  CHECK_THAT(jobs.text("err.1"),
             ContainsSubstring("flight recorder: the last call of each rank (1 of 2 ranks)") &&
                 ContainsSubstring("rank 1 was killed by signal 9 (SIGKILL), after call 1 "));
}

TEST_CASE("Ranks inherit no descriptor but the launcher's two, and no blocked signals",
          "[faults][launch]") {
  const Jobs jobs;
  const auto launched = [&](const Words& options, const Words& program) {
    const ProcessResult run = jobs.run_words(Words{jobs.launcher()} + options + program);
    INFO(story(run));
    CHECK(run.status == 0);
    return run.out;
  };
  const std::string others =
      "ls /proc/self/fd | grep -vx -e \"${LOCKSTEP_LAUNCHER_PIPE%%:*}\" "
      "-e \"${LOCKSTEP_FLIGHT_MEMORY%%:*}\"";
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

// --- Restarts ------------------------------------------------------------------------------------

TEST_CASE("After a failure all ranks are started again, as often as asked", "[faults][launch]") {
  const Jobs jobs;
  const std::string script =
      "count=$TORCHELASTIC_RESTART_COUNT; date +%s.%N >\"$DIR/begin.$RANK.$count\"; "
      "echo \"$count $MASTER_PORT $TORCHELASTIC_RUN_ID $LOCKSTEP_LAUNCHER_KEY\" "
      ">>\"$DIR/log.$RANK\"; "
      "is_rank 1 || { [ \"$count\" = 2 ] && exit 0; trap '' TERM; exec sleep 60; }; "
      "await begin.0.$count; date +%s.%N >\"$DIR/end\"; cp \"$DIR/end\" \"$DIR/end.$count\"; "
      "[ \"$count\" = 2 ] || exit 5";
  const ProcessResult run =
      jobs.run({"--nproc-per-node", "2", "--max-restarts", "4", "--grace", "0.1"}, script);
  CHECK(run.status == 0);
  std::set<std::string> ports, names, keys;
  const Words log = lines_of(jobs.text("log.0"));
  CHECK(log == lines_of(jobs.text("log.1")));
  REQUIRE(log.size() == 3);
  for (size_t i = 0; i < log.size(); ++i) {
    std::istringstream line(log[i]);
    std::string count, port, name, key;
    line >> count >> port >> name >> key;
    CHECK(count == std::to_string(i));
    ports.insert(port), names.insert(name), keys.insert(key);
  }
  CHECK(ports.size() == 3);
  CHECK(names.size() == 1);
  CHECK(keys.size() == (key_digits() > 0 ? 3 : 1));  // who is left of an earlier start cannot join
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

TEST_CASE("Redirected output goes to no pipe and along no link", "[faults][launch]") {
  const Jobs jobs;
  namespace fs = std::filesystem;
  fs::create_directory(jobs / "logs");
  write_file(jobs / "precious", "kept");
  const auto refused = [&] {
    const ProcessResult run =
        jobs.run({"--nproc-per-node", "2", "--redirect", jobs / "logs"}, "touch \"$DIR/started\"");
    INFO(story(run));
    CHECK(run.status == 1);
    CHECK_THAT(run.err, ContainsSubstring("logs/rank_1.out exists and is not a regular file"));
    CHECK(run.err.find('\n') == run.err.size() - 1);
    CHECK_FALSE(jobs.has("started"));
    fs::remove(jobs / "logs/rank_1.out");
  };
  REQUIRE(run_process({"mkfifo", jobs / "logs/rank_1.out"}, kDeadline).status == 0);
  refused();
  fs::create_symlink(jobs / "precious", jobs / "logs/rank_1.out");
  refused();
  fs::create_symlink(jobs / "not there", jobs / "logs/rank_1.out");
  refused();
  fs::create_symlink("/dev/null", jobs / "logs/rank_1.out");
  refused();
  CHECK(jobs.text("precious") == "kept");
  CHECK_FALSE(jobs.has("not there"));
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
