#pragma once
// Starting programs from tests, and the files that they leave behind.

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::testing {

/// Command lines.
using Words = std::vector<std::string>;

inline Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

/// In seconds: no program that a test starts takes this long, even on a busy machine under a
/// sanitizer.
constexpr double kDeadline = 250;

struct ProcessResult {
  int status = 0;          // exit status, or minus the signal that ended the process
  bool timed_out = false;  // the deadline passed and the whole process group was killed
  std::string out, err;
};

/// Runs a program (argv[0] is a path, or a name to be found in PATH) in a process group of its own
/// and returns when it has ended. Whatever it started is killed then too, so nothing outlives the
/// test. `environment` is added to this process's own. Throws std::runtime_error if the program
/// cannot be started.
ProcessResult run_process(std::vector<std::string> argv, double deadline_seconds,
                          std::vector<std::pair<std::string, std::string>> environment = {});

/// A program's --help, in one form for all releases of CLI11 (2.1 to 2.6), which differ in blanks
/// and in how they write a default: "\n --lr FLOAT=0.1\n learning rate".
ProcessResult run_help(const std::string& program);

/// The build folder that this test executable, BUILD/tests/KIND/KIND-test, belongs to;
/// LOCKSTEP_BUILD_DIR overrides it.
std::string build_dir();

/// Path of a stage's program in that folder: stage_binary("01-single-gpu"), or of another program
/// beside it: stage_binary("01-single-gpu/reference").
std::string stage_binary(const std::string& stage);

/// A fresh directory, removed with everything in it.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }
  /// Names of all files in it, hidden ones too, sorted.
  std::vector<std::string> names() const;

 private:
  std::filesystem::path path_;
};

/// All bytes of a file. Throws std::runtime_error if it cannot be read.
std::string read_text(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, const std::string& bytes);

}  // namespace lockstep::testing
