#include "common/launch/launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <sstream>

#include "common/core/error.h"
#include "common/launch/flight_table.h"
#include "common/launch/line_relay.h"
#include "common/launch/rank_environment.h"
#include "common/launch/rank_processes.h"
#include "common/system/child_process.h"
#include "common/system/flight_recorder.h"
#include "common/system/rank.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr auto kNever = Clock::time_point::max();
// After the first failure: the next rank seen dead may be the cause, see cause_of(). While all ends
// seen may be answers to a lost peer, the wait for that peer is longer.
constexpr milliseconds kSettling{50}, kSettlingInDoubt{150};
// No signal comes when a process that a rank started ends.
constexpr milliseconds kLookAgain{10};
// How long a slow reader of stdout may keep a launcher that has failed.
constexpr milliseconds kLastWords{250};

/// For poll(): milliseconds until then, rounded up; -1 for ever.
int timeout_until(Clock::time_point time) {
  if (time == kNever) return -1;
  const auto rest = std::chrono::ceil<milliseconds>(time - Clock::now()).count();
  return static_cast<int>(std::max<int64_t>(rest, 0));
}

// --- What a start is made of ---------------------------------------------------------------------

bool is_file(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored);
}

[[noreturn]] void fail_not_executable(const std::string& path) {
  fail<EnvironmentError>(
      "{}: this file is not executable; chmod +x it, or give its interpreter first: python3 {}",
      path, path);
}

std::string checked_path(const std::string& path) {
  if (std::filesystem::is_directory(path)) {
    fail<EnvironmentError>("{}: this is a folder; expected a program", path);
  }
  if (!is_file(path)) fail<EnvironmentError>("{}: no such program; check its path", path);
  if (::access(path.c_str(), X_OK) != 0) fail_not_executable(path);
  return path;
}

/// The path of a program, as a shell finds it: `name` itself if it contains a slash, else the first
/// executable file of that name in the folders of PATH (an empty one is the current folder). Throws
/// EnvironmentError if there is none, or none that may be executed.
std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return checked_path(name);
  const char* variable = std::getenv("PATH");
  const std::string folders = variable != nullptr ? variable : "/usr/bin:/bin";
  std::string not_executable;
  for (size_t begin = 0; begin <= folders.size() && !name.empty();) {
    const size_t end = std::min(folders.find(':', begin), folders.size());
    const std::string folder = folders.substr(begin, end - begin);
    std::string path = (folder.empty() ? "." : folder) + "/" + name;
    if (is_file(path)) {
      if (::access(path.c_str(), X_OK) == 0) return path;
      if (not_executable.empty()) not_executable = path;
    }
    begin = end + 1;
  }
  if (!not_executable.empty()) fail_not_executable(not_executable);
  fail<EnvironmentError>("'{}': no such program in PATH; give its path, for instance ./{}", name,
                         name);
}

/// stdout and stderr of a rank. Without an owner (-1): this process's own.
using RankOutput = std::array<Descriptor, 2>;

/// An empty file, also where one was. Others may write into the folder: a link there would lead to
/// a file that was not meant, and a pipe would wait for its reader.
Descriptor new_file(const std::string& path) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  Descriptor file(::open(path.c_str(), kFlags, 0666));
  struct stat found = {};
  const bool other = file.is_open() ? ::fstat(file.get(), &found) == 0 && !S_ISREG(found.st_mode)
                                    : errno == ELOOP || errno == ENXIO || errno == EISDIR;
  require(!other,
          "--redirect: {} exists and is not a regular file; remove it, or name another folder",
          path);
  if (!file.is_open() || ::fcntl(file.get(), F_SETFL, 0) != 0 || ::ftruncate(file.get(), 0) != 0) {
    fail<EnvironmentError>("--redirect: cannot write {}: {}; name another folder", path,
                           std::strerror(errno));
  }
  return file;
}

/// New files DIR/rank_1.out and .err; after a restart rank_1.restart_1.out.
RankOutput redirected(const std::string& folder, int rank, int restart) {
  const std::string again = restart > 0 ? fmt::format(".restart_{}", restart) : "";
  RankOutput output;
  for (const size_t target : {0u, 1u}) {
    const std::string path =
        fmt::format("{}/rank_{}{}.{}", folder, rank, again, target == 0 ? "out" : "err");
    output[target] = new_file(path);
  }
  return output;
}

/// While it lives, SIGCHLD and the signals that would end this process (HeldSignals) wait until
/// they are read. A reader of stdout that has left is an error of write(), not a signal.
class SignalQueue {
 public:
  /// Throws EnvironmentError.
  SignalQueue() {
    sigset_t awaited = held_.ending();
    sigaddset(&awaited, SIGCHLD);
    fd_ = Descriptor(::signalfd(-1, &awaited, SFD_CLOEXEC | SFD_NONBLOCK));
    if (fd_.get() < 0) fail<EnvironmentError>("cannot receive signals: {}", std::strerror(errno));
  }
  ~SignalQueue() {
    sigset_t broken_pipe;
    sigemptyset(&broken_pipe);
    sigaddset(&broken_pipe, SIGPIPE);
    const timespec now{};
    ::sigtimedwait(&broken_pipe, nullptr, &now);  // write() reported it
    if (end_by_ != 0) ::raise(end_by_);
  }
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  /// Readable (poll) when a signal waits.
  int fd() const { return fd_.get(); }
  /// The next signal that waits, or 0.
  int next() const {
    signalfd_siginfo info{};
    return ::read(fd_.get(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo)
                                                                : 0;
  }
  /// This process's earlier signal mask, for children.
  const sigset_t& previous_mask() const { return held_.previous_mask(); }
  /// Ends this process by `signal`, once the object is destroyed.
  void end_by(int signal) { end_by_ = signal; }

 private:
  HeldSignals held_;  // first: the signals take effect when all else is done
  Descriptor fd_;
  int end_by_ = 0;
};

/// The pipe on which ranks say why the job ends, or that everything has been said
/// (system/rank.h).
struct LauncherPipe {
  LauncherPipe() {
    std::array<int, 2> ends{-1, -1};
    if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) return;  // then no rank can say anything
    from_ranks = Descriptor(ends[0]);
    of_ranks = Descriptor(ends[1]);
  }
  /// Each line once, in the order in which they came.
  std::vector<std::string> lines() const {
    std::string all;
    std::array<char, PIPE_BUF> some{};
    for (ssize_t size = 0; (size = ::read(from_ranks.get(), some.data(), some.size())) > 0;) {
      all.append(some.data(), size_t(size));
    }
    std::vector<std::string> found;
    std::istringstream text(all);
    for (std::string line; std::getline(text, line);) {
      if (std::ranges::find(found, line) == found.end()) found.push_back(line);
    }
    return found;
  }
  Descriptor from_ranks, of_ranks;
};

// --- The launch ----------------------------------------------------------------------------------

/// One call of launch().
class Launch {
 public:
  Launch(const LaunchOptions& options, const std::vector<std::string>& program)
      : options_(options), program_(program), path_(find_program(program.at(0))) {
    if (options.redirect.empty()) return;
    std::error_code error;
    std::filesystem::create_directories(options.redirect, error);
    if (error) {
      fail<EnvironmentError>("--redirect: cannot create the folder {}: {}", options.redirect,
                             error.message());
    }
  }

  int run();

 private:
  /// Starts all ranks once and returns when all are gone. Returns the failure that was the cause,
  /// if any; an interruption does not count.
  std::optional<RankEnd> run_ranks(const MeetingPlace& meet);
  /// `pipe`: the ranks' end of the launcher's pipe; `memory`: a FlightMemory's.
  void start(RankProcesses& ranks, MeetingPlace meet, int pipe, int memory);
  RankOutput open_output(int rank, int restart);
  /// Asks all ranks to end with `signal`, and kills them after the grace period.
  void stop(RankProcesses& ranks, int signal);
  /// Sleeps until a rank ends, a signal comes, output moves, or that time has come.
  void wait(Clock::time_point until);
  /// Waits for a slow reader, but not after a failure.
  void flush(bool failed);

  const LaunchOptions& options_;
  const std::vector<std::string>& program_;
  const std::string path_;
  SignalQueue signals_;  // first made, last destroyed: its destructor may end this process
  Keeper keeper_;
  LineRelay relay_;
  int interruptions_ = 0, interrupted_by_ = 0;  // the first signal
  bool said_ = false;                           // the ranks themselves have said what was wrong
};

int Launch::run() {
  MeetingPlace meet = first_meeting_place(options_);
  std::optional<RankEnd> cause = run_ranks(meet);
  while (cause && interruptions_ == 0 && meet.restart < options_.max_restarts) {
    meet = next_meeting_place(options_, meet);
    relay_.say(fmt::format("launch: {}; starting all ranks again (restart {} of {})", cause->text(),
                           meet.restart, options_.max_restarts));
    cause = run_ranks(meet);
  }
  if (cause && !said_) {
    relay_.say(fmt::format("error: {}{}", cause->text(),
                           options_.nproc_per_node > 1 ? "; the other ranks were stopped" : ""));
  }
  flush(cause.has_value());
  if (interruptions_ > 0) {
    signals_.end_by(interrupted_by_);
    return 128 + interrupted_by_;
  }
  if (cause) return cause->exit_status();
  if (relay_.error() != 0) {
    fail<EnvironmentError>("--prefix: output of the ranks was lost: {}",
                           std::strerror(relay_.error()));
  }
  return 0;
}

std::optional<RankEnd> Launch::run_ranks(const MeetingPlace& meet) {
  RankProcesses ranks(keeper_);
  const LauncherPipe pipe;
  const FlightMemory flight(global_rank(options_, 0), options_.nproc_per_node);
  start(ranks, meet, pipe.of_ranks.get(), flight.descriptor());
  const auto watch = [&](Clock::time_point until) {
    wait(until);
    ranks.collect();
  };
  const auto goes_on = [&] { return ranks.any_running() && interruptions_ == 0; };
  while (goes_on() && !ranks.any_failed()) watch(kNever);
  const auto end = Clock::now();
  const auto settled = [&] {
    return end + (cause_of(ranks.ends()).may_be_answer() ? kSettlingInDoubt : kSettling);
  };
  while (goes_on() && Clock::now() < settled()) watch(settled());
  std::optional<RankEnd> cause;
  if (ranks.any_failed() && interruptions_ == 0) cause = cause_of(ranks.ends());
  if (cause && cause->may_be_answer()) cause = ranks.stopped().value_or(*cause);
  if (cause) cause->place = flight.place_of(cause->rank);
  std::vector<std::string> where;
  // Nobody reads any more what the ranks print: that explains itself.
  if (cause && cause->signal != SIGPIPE) where = flight.table(ranks.ends(), *cause);
  if (cause || interruptions_ > 0) stop(ranks, cause ? SIGTERM : interrupted_by_);
  relay_.close();
  const std::vector<std::string> told = pipe.lines();
  for (const std::string& text : told) {
    if (!text.empty()) relay_.say("error: " + text);
  }
  said_ = !told.empty();
  if (said_) where.clear();  // all ranks were at one place, and said what was wrong there
  for (const std::string& line : where) relay_.say(line);
  return cause;
}

void Launch::start(RankProcesses& ranks, MeetingPlace meet, int pipe, int memory) {
  meet.launcher_pipe = launcher_pipe(pipe);
  meet.flight_memory = flight_memory(memory);
  std::vector<int> inherited;
  for (const int fd : {pipe, memory}) {
    if (fd >= 0) inherited.push_back(fd);
  }
  std::vector<RankOutput> outputs;  // all are opened before the first rank starts: one may fail
  outputs.reserve(size_t(options_.nproc_per_node));
  for (int local = 0; local < options_.nproc_per_node; ++local) {
    outputs.push_back(open_output(global_rank(options_, local), meet.restart));
  }
  for (int local = 0; local < options_.nproc_per_node; ++local) {
    const RankOutput output = std::move(outputs[size_t(local)]);
    ranks.start({.rank = global_rank(options_, local),
                 .path = path_,
                 .argv = program_,
                 .environment = rank_environment(options_, meet, local),
                 .out = output[0].get(),
                 .err = output[1].get(),
                 .inherited = inherited,
                 .signal_mask = signals_.previous_mask()});
  }
}

RankOutput Launch::open_output(int rank, int restart) {
  if (!options_.redirect.empty()) return redirected(options_.redirect, rank, restart);
  if (options_.prefix) return {relay_.open(rank, 0), relay_.open(rank, 1)};
  return {};
}

void Launch::stop(RankProcesses& ranks, int signal) {
  ranks.send(signal);
  ranks.send(SIGCONT);  // a stopped rank would not get the signal
  const int before = interruptions_;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(options_.grace_seconds));
  while (Clock::now() < end && interruptions_ == before &&
         (ranks.any_running() || ranks.any_alive())) {
    wait(ranks.any_running() ? end : std::min(end, Clock::now() + kLookAgain));
    ranks.collect();
  }
  ranks.kill();
}

void Launch::wait(Clock::time_point until) {
  std::vector<pollfd> polls{{signals_.fd(), POLLIN, 0}};
  relay_.add_polls(polls);
  ::poll(polls.data(), polls.size(), timeout_until(until));
  while (const int signal = signals_.next()) {
    if (signal == SIGCHLD) continue;
    if (++interruptions_ == 1) interrupted_by_ = signal;
  }
  relay_.pump();
}

void Launch::flush(bool failed) {
  const int before = interruptions_;
  const auto end = failed || before > 0 ? Clock::now() + kLastWords : kNever;
  while (!relay_.flushed() && interruptions_ == before && Clock::now() < end) wait(end);
}

}  // namespace

int launch(const LaunchOptions& options, const std::vector<std::string>& program) {
  check_launch_options(options);
  require(!program.empty(), "launch: no program was given");
  std::fflush(stdout);  // what this process said comes before what the ranks say
  return Launch(options, program).run();
}

}  // namespace lockstep
