#pragma once
// Programs run as children, while this process only waits, and the signals that wait with it.

#include <signal.h>

#include <exception>
#include <filesystem>
#include <string>
#include <vector>

namespace lockstep {

/// Lets signals wait while it lives: SIGCHLD, SIGPIPE (a reader of stdout that leaves) and those
/// that would end this process. Signals that are ignored on purpose (nohup, a shell's background
/// jobs) stay ignored, here and in children.
///
/// Make it before the process has threads: another thread would still receive the signals.
class HeldSignals {
 public:
  HeldSignals();
  /// Restores the mask; signals that have waited take effect.
  ~HeldSignals();
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;

  /// Those of SIGINT, SIGTERM, SIGHUP and SIGQUIT that are not ignored.
  const sigset_t& ending() const { return ending_; }
  /// This process's earlier signal mask, for children.
  const sigset_t& previous_mask() const { return previous_; }

 private:
  sigset_t ending_, previous_;
};

/// How a child ended.
struct ChildResult {
  int status = 0;      // exit status; 0 if a signal ended it
  int signal = 0;      // the signal that ended it, or 0
  std::string errors;  // what a quiet child wrote to stderr
  bool ok() const { return status == 0 && signal == 0; }
};

enum class ChildOutput {
  inherited,  // stdout and stderr are this process's
  quiet,      // stdout is dropped, stderr goes into the result
};

/// This process got a signal to end while a child ran, and will end once its ChildRunner is gone.
class Interrupted : public std::exception {
 public:
  const char* what() const noexcept override { return "interrupted"; }
};

/// Runs children, each in a process group of its own and without a terminal to read from. Whatever
/// happens, no child outlives this object or this process: it is killed with its group.
///
/// While the object lives, signals that would end this process wait, and run() passes them on to
/// the child. They take effect here when the object is destroyed, so after the destructors of
/// everything that was made later (temporary files). Make it before this process has threads.
class ChildRunner {
 public:
  /// Runs the program argv[0] (a path) and waits for its end, without a deadline. SIGINT, SIGTERM,
  /// SIGHUP and SIGQUIT are passed on to the child's group; a second one kills it. Throws
  /// Interrupted after such a signal, EnvironmentError if the program cannot be started.
  ChildResult run(const std::vector<std::string>& argv, ChildOutput output);
  /// Ends this process by `signal` when the object is destroyed. Throws Interrupted.
  [[noreturn]] void end_by(int signal);

 private:
  pid_t start(const std::vector<std::string>& argv, int errors_fd);
  void wait_for(pid_t child);

  HeldSignals held_;     // those that would end this process are passed on to the child
  int interrupted_ = 0;  // the signal that came while the child ran
};

/// A fresh directory for temporary files, removed with everything in it.
class TemporaryFolder {
 public:
  /// Throws EnvironmentError.
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

}  // namespace lockstep
