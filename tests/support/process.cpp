#include "tests/support/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <regex>
#include <stdexcept>

namespace lockstep::testing {
namespace {

[[noreturn]] void fail_with(const std::string& what, int error) {
  throw std::runtime_error(what + ": " + std::strerror(error));
}

/// A pipe whose reading end does not block. Both ends close on exec; the child's dup2 keeps one.
struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    std::array<int, 2> ends;
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail_with("pipe", errno);
    read = ends[0], write = ends[1];
    ::fcntl(read, F_SETFL, O_NONBLOCK);
  }
  ~Pipe() {
    close_writing();
    ::close(read);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void close_writing() {
    if (write >= 0) ::close(write);
    write = -1;
  }
};

/// Appends the available bytes to `text`; false at the end of the stream.
bool drain(int fd, std::string& text) {
  std::array<char, 65536> chunk;
  while (true) {
    const ssize_t count = ::read(fd, chunk.data(), chunk.size());
    if (count == 0) return false;
    if (count < 0) return errno == EAGAIN || errno == EINTR;
    text.append(chunk.data(), static_cast<size_t>(count));
  }
}

std::vector<std::string> merged_environment(
    const std::vector<std::pair<std::string, std::string>>& added) {
  std::vector<std::string> all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    const bool replaced = std::any_of(added.begin(), added.end(), [&](const auto& pair) {
      return text.starts_with(pair.first + "=");
    });
    if (!replaced) all.push_back(text);
  }
  for (const auto& [name, value] : added) all.push_back(name + "=" + value);
  return all;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> list;
  for (std::string& text : texts) list.push_back(text.data());
  list.push_back(nullptr);
  return list;
}

pid_t spawn(std::vector<std::string>& argv, std::vector<std::string>& environment, const Pipe& out,
            const Pipe& err) {
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&files, out.write, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&files, err.write, STDERR_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
  posix_spawnattr_setpgroup(&attributes, 0);
  sigset_t signals;  // a shell's background jobs, which tests may be, ignore SIGINT and SIGQUIT
  sigfillset(&signals);
  posix_spawnattr_setsigdefault(&attributes, &signals);
  pid_t child = 0;
  const int error = ::posix_spawnp(&child, argv.at(0).c_str(), &files, &attributes,
                                   pointers(argv).data(), pointers(environment).data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  if (error != 0) fail_with("cannot start " + argv[0], error);
  return child;
}

/// True once the child has ended. It stays a zombie, so that its id still names its group.
bool has_ended(pid_t child) {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == child;
}

/// Kills the whole group and returns how its first process ended.
int reap(pid_t child) {
  ::kill(-child, SIGKILL);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

ProcessResult run_process(std::vector<std::string> argv, double deadline_seconds,
                          std::vector<std::pair<std::string, std::string>> environment) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(deadline_seconds);
  std::vector<std::string> variables = merged_environment(environment);
  Pipe out, err;
  const pid_t child = spawn(argv, variables, out, err);
  out.close_writing();
  err.close_writing();

  ProcessResult result;
  std::array<pollfd, 2> ends{pollfd{out.read, POLLIN, 0}, pollfd{err.read, POLLIN, 0}};
  const auto read_both = [&] {  // poll() passes over an end that is -1
    if (ends[0].fd >= 0 && !drain(out.read, result.out)) ends[0].fd = -1;
    if (ends[1].fd >= 0 && !drain(err.read, result.err)) ends[1].fd = -1;
  };
  while (!has_ended(child)) {
    if (Clock::now() > deadline) {
      result.timed_out = true;
      break;
    }
    ::poll(ends.data(), ends.size(), 5 /* ms: also how late the end is noticed */);
    read_both();
  }
  result.status = reap(child);
  read_both();
  return result;
}

ProcessResult run_help(const std::string& program) {
  ProcessResult run = run_process({program, "--help"}, kDeadline);
  run.out = std::regex_replace(run.out, std::regex(" +"), " ");
  run.out = std::regex_replace(run.out, std::regex(R"( \[([^\]\n]*)\])"), "=$1");
  run.out = std::regex_replace(run.out, std::regex(" \n"), "\n");
  run.out = std::regex_replace(run.out, std::regex(", --"), ",--");
  return run;
}

std::string build_dir() {
  if (const char* named = std::getenv("LOCKSTEP_BUILD_DIR")) return named;
  const auto executable = std::filesystem::read_symlink("/proc/self/exe");
  return executable.parent_path().parent_path().parent_path().string();
}

std::string stage_binary(const std::string& stage) {
  const bool named = stage.find('/') != stage.npos;
  return build_dir() + "/" + stage + (named ? "" : "/" + stage);
}

TempDir::TempDir() {
  std::string name = (std::filesystem::temp_directory_path() / "lockstep-test-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) fail_with("mkdtemp " + name, errno);
  path_ = name;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::vector<std::string> TempDir::names() const {
  std::vector<std::string> names;
  for (const auto& item : std::filesystem::directory_iterator(path_)) {
    names.push_back(item.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string read_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_file(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary);
  out << bytes;
  if (!out.flush()) throw std::runtime_error("cannot write " + path.string());
}

}  // namespace lockstep::testing
